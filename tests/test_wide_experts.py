"""Experts over many nodes: DeepEP's kernels in whole runs, the type that tokens travel in, and redundant experts."""

from __future__ import annotations

from typing import Any

import pytest

from hardware.laws.exchange import RoutedExchange, exchange_s
from sim import simulate
from sim.errors import ScenarioError
from sim.result.network import port_use
from sim.result.timeline import Timeline
from workloads.errors import WorkloadError

MODEL = {"model": "deepseek-v3", "gpu": "h800", "ep_mode": "all_to_all", "ignore_memory": True}


def run(**fields: Any) -> Timeline:
    """One layer of decoding with 128 sequences a rank on two nodes."""
    given = {"phase": "decode", "ep": 16, "batch": 128, "seq_len": 512, "layers": 4, "lm_head": False}
    return simulate(**(MODEL | given | {"dtype": "fp8", "ep_kernels": "low_latency", "shortcuts": True} | fields))


def kernels(run: Timeline) -> dict[str, Any]:
    """Classes of rank 0's last layer by name."""
    return {c.name: c for c in run.graph.classes}


def test_an_exchange_in_a_run_takes_what_it_takes_alone() -> None:
    """Experts are drawn, so that the busiest rank's share sets the size: at least as many tokens as a rank has."""
    found = kernels(run())
    for name, op, element in (("low_latency_dispatch", "dispatch", 1), ("low_latency_combine", "combine", 2)):
        kernel = found[name]
        said: Any = kernel.describe
        sent = "fp8_e4m3" if element == 1 else "bf16"
        assert said["tokens"] >= 128 and (said["top_k"], said["hidden"], said["dtype"]) == (8, 7168, sent)
        sizes = RoutedExchange(
            tokens=said["tokens"], top_k=8, hidden=7168, element_bytes=element, kernels="low_latency"
        )
        span = run().machine.cluster.span(range(16), "pairs")
        assert kernel.terms.floor_s == exchange_s(op, sizes, span, 200e9)
        assert kernel.terms.extrapolated


def test_the_kernels_take_the_place_of_gathers_and_sums_around_an_all_to_all() -> None:
    names = {by: set(kernels(run(ep_kernels=by))) for by in (None, "normal", "low_latency")}
    around = {"gather_dispatch", "gather", "gather_return", "gather_back", "topk_sum", "quantise_rows"}
    assert {"all_to_all_dispatch", "all_to_all_combine", "gather_dispatch", "gather_back", "topk_sum"} <= names[None]
    assert names["normal"] & around == {"gather", "gather_return"}
    assert names["low_latency"] & around == set()


@pytest.mark.parametrize("by", ["low_latency", "normal"])
def test_tokens_in_fp8_are_half_the_bytes(by: str) -> None:
    narrow, wide = (kernels(run(ep_kernels=by, dispatch_dtype=kind)) for kind in ("fp8_e4m3", "bf16"))
    sent = [found[f"{by}_dispatch"].terms.beyond_bytes for found in (narrow, wide)]
    header = 16 if by == "low_latency" else 0
    assert sent[0] / sent[1] == pytest.approx((7168 + 7168 / 128 * 4 + header) / (2 * 7168 + header))
    assert run(ep_kernels=by).latency_s == run(ep_kernels=by, dispatch_dtype="fp8_e4m3").latency_s
    assert run(ep_kernels=by).latency_s < run(ep_kernels=by, dispatch_dtype="bf16").latency_s


def test_many_tokens_want_normal_kernels() -> None:
    many = [run(ep_kernels=by, phase="prefill", batch=4, seq_len=2048).latency_s for by in ("normal", "low_latency")]
    assert many[0] < many[1]


@pytest.mark.parametrize(("ep", "copies"), [(144, 32), (320, 64)])
def test_widths_that_do_not_divide_the_experts_need_copies_that_fill_them(ep: int, copies: int) -> None:
    """DeepSeek's decoding units: 256 experts and 32 copies on 144 GPUs, or 64 copies on 320."""
    done = run(ep=ep, expert_replicas=copies, batch=64)
    assert done.machine.world == ep and done.tokens == 64 * ep
    with pytest.raises(WorkloadError, match=f"ep = {ep} does not divide the 256 experts of deepseek-v3"):
        run(ep=ep)


def test_refusals_name_the_field() -> None:
    for fields, message in (
        ({"ep_kernels": None, "dispatch_dtype": "bf16"}, "dispatch_dtype = 'bf16' needs ep_kernels"),
        ({"ep_mode": "all_reduce"}, "ep_kernels = 'low_latency' needs ep_mode = 'all_to_all'"),
        ({"dtype": "bf16", "dispatch_dtype": "fp8"}, "dispatch_dtype = 'fp8_e4m3': experts read bf16"),
        ({"dispatch_dtype": "int8"}, "dispatch_dtype = 'int8': input should be 'bf16' or 'fp8_e4m3'"),
    ):
        with pytest.raises((ScenarioError, WorkloadError), match=message):
            run(**fields)


def test_beside_compute_low_latency_kernels_hold_no_sms_and_share_the_nics() -> None:
    done = run(overlap="two_batch", detail="full", shortcuts=False, regime="cold")
    exchanges = [c for c in done.graph.classes if c.name.startswith("low_latency")]
    assert exchanges and not any(c.terms.sms_per_block for c in exchanges)
    used = port_use(done)
    assert {one.port.tier for one in used} == {"nic"}
    assert max(one.bytes_per_s.max() for one in used) <= 50e9 * (1 + 1e-6)


def test_an_exchange_that_no_run_measured_is_marked_so() -> None:
    said = run().standing
    assert any("ep_kernels" in text for text in said.unchecked), said


def test_deepseeks_decoding_unit_comes_near_its_published_rate() -> None:
    """EP 144 with 32 copies, 4,989 tokens cached a sequence: 14,800 tokens/s a node of eight H800s over a day.

    20 to 22 tokens/s a user are some 88 sequences a GPU at that rate.
    """
    done = simulate(
        **MODEL, phase="decode", ep=144, batch=88, seq_len=4989, dtype="fp8", expert_replicas=32,
        ep_kernels="low_latency", shortcuts=True,
    )  # fmt: skip
    assert done.tokens_per_s / 18 == pytest.approx(14_800, rel=0.2)
