"""An engine of one process tells a step's tokens once it has launched the next step."""

from __future__ import annotations

import numpy as np
import pytest

from sim.serving.records import Log
from sim.serving.requests import Request
from sim.serving.result import ServeResult
from sim.serving.server import serve
from sim.serving.traffic import Traffic
from workloads.engine import load_engine

MIXTURE = {"model": "qwen3-30b-a3b", "gpu": "h200-sxm-141gb", "stack": "vllm"}


def two(second_s: float, **fields: object) -> ServeResult:
    """A prompt of 1,024 tokens, and another one that comes ``second_s`` later."""
    requests = [
        Request(number=n, arrival_s=at, input_tokens=1024, output_tokens=20) for n, at in enumerate((0.0, second_s))
    ]
    return serve(**{**MIXTURE, **fields}, traffic=Traffic(requests=requests))


def launch_s() -> float:
    pace = load_engine("vllm").host
    return pace.seconds(tokens=1025, layers=48, kernels=16, experts=True) + pace.prepare_s + pace.sample_s


def test_a_first_token_waits_until_the_next_prompt_is_launched() -> None:
    """The GPU takes 26 ms for either prompt, the host 61: the first one's token waits for the launch of the second."""
    alone, beside = two(10.0).requests["ttft_s"], two(0.02).requests["ttft_s"]
    pace = load_engine("vllm").host
    graph_s = pace.prepare_s + pace.sample_s  # of the decode step that follows a lone prompt
    assert beside[0] - alone[0] == pytest.approx(launch_s() - graph_s, rel=1e-6)
    assert launch_s() == pytest.approx(0.0606, abs=0.0005)


def test_a_quicker_host_launches_sooner() -> None:
    """A lone prompt takes its launches, and what is around them as before."""
    pace = load_engine("vllm").host
    usual, quick = (two(10.0, host_pace=times).requests["ttft_s"][0] for times in (1.0, 0.8))
    launches_s = pace.seconds(tokens=1024, layers=48, kernels=16, experts=True)
    assert usual - quick == pytest.approx(0.2 * launches_s, rel=1e-6)


def test_workers_of_their_own_leave_the_engine_free_to_tell() -> None:
    """With two GPUs the launches are those of other processes."""
    alone, beside = two(10.0, tp=2).requests["ttft_s"], two(0.02, tp=2).requests["ttft_s"]
    assert beside[0] == pytest.approx(alone[0], rel=1e-9)


@pytest.mark.parametrize("fields", [{}, {"tp": 2}, {"host": "none"}])
def test_times_between_tokens_add_up_to_each_request(fields: dict[str, object]) -> None:
    load = {
        "requests": 40,
        "rate_per_s": 8.0,
        "input_tokens": 900,
        "output_tokens": 30,
        "length_spread": 0.5,
        "seed": 3,
    }
    run = serve(**{**MIXTURE, **load, **fields})
    gaps_s, counts = run.log.each_gap()
    table = run.requests
    assert (gaps_s > 0).all()
    assert np.dot(gaps_s, counts) == pytest.approx((table["done_s"] - table["first_token_s"]).sum(), rel=1e-9)
    assert run.end_s == pytest.approx(table["done_s"].max(), abs=1e-12)


def test_a_closed_loop_sends_its_next_request_when_the_last_token_is_told() -> None:
    load = {"requests": 12, "concurrency": 3, "input_tokens": 900, "output_tokens": 7, "length_spread": 0.6, "seed": 3}
    table = serve(**MIXTURE, **load).requests
    told, sent = sorted(table["done_s"]), sorted(table["arrival_s"])
    assert sent[:3] == [0.0] * 3 and sent[3:] == pytest.approx(told[:9], abs=1e-12)


def test_a_row_of_steps_is_told_late_at_its_end_and_the_next_gap_is_shorter() -> None:
    import simpy

    from sim.serving.untold import Untold

    untold = Untold(env=simpy.Environment(), log=Log())
    untold.ran(5e-3, 1e-4, 4, 2)
    untold.tell(3e-3, lambda: None)
    untold.ran(6e-3, 0.0, 2, 2)
    gaps_s, counts = untold.log.each_gap()
    assert gaps_s.tolist() == pytest.approx([5.0e-3, 5.1e-3, 5.2e-3, 8.3e-3, 3.0e-3, 6.0e-3])
    assert counts.tolist() == [2] * 6
