"""Prompts and decoding side by side on one GPU, each on SMs of its own."""

from __future__ import annotations

import json
import math

import pytest
from rich.console import Console

from sim.cli import main
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.resources.sm_pool import SmPool
from sim.errors import ScenarioError
from sim.scenario.machine import machine_of
from sim.scenario.partition import Partitions
from sim.scenario.spec import Scenario
from sim.serving import ServeResult, ServeSpec, serve
from sim.serving.beside import BesidePrices, near
from sim.serving.cost import Batch, Chunk
from sim.serving.price import StepPrices
from sim.serving.report import print_summary
from sim.serving.trace import to_trace

SIZES = (("prefill", 64), ("decode", 68))
PROMPTS = Batch(chunks=(Chunk(tokens=2048, context=2048),), ending=1)
DECODING = Batch(decoding=64, cached=64 * 1024)
TRAFFIC = {"model": "llama3-8b", "requests": 12, "rate_per_s": 8.0, "input_tokens": 1500, "output_tokens": 20}


@pytest.fixture(scope="module")
def sides() -> ServeResult:
    return serve(sm_partition="prefill=64,decode=68", window=(0.0, 1.0), **TRAFFIC)


def beside_of(power_cap_w: float | None = None) -> BesidePrices:
    scenario = Scenario.of(model="llama3-8b", phase="decode", power_cap_w=power_cap_w)
    machine = machine_of(scenario)
    first, second = (
        StepPrices(
            scenario=scenario,
            machine=machine,
            partitions=Partitions(sms=SIZES, streams=((0, name),), gpu=machine.gpu),
        )
        for name, _ in SIZES
    )
    both = Partitions(sms=SIZES, streams=((0, "prefill"), (1, "decode")), gpu=machine.gpu)
    return BesidePrices(alone=(first, second), partitions=both)


class Watched(SmPool):
    """A pool that remembers the most that was held of it."""

    most = 0.0

    def arbitrate(self) -> None:
        """As ever."""
        super().arbitrate()
        self.most = max(self.most, sum(one.held for one in self.users))


def test_no_kernel_of_a_side_holds_more_sms_than_its_partition() -> None:
    for place, (price, batch) in enumerate(zip(beside_of().alone, (PROMPTS, DECODING), strict=True)):
        piece = price.whole_step(batch).folded.sequence[0].piece
        engine = Engine(Core(piece.graph, [piece.model], [math.inf]))
        (gpu,) = engine.core.gpus
        gpu.pools = [Watched(engine.env, sms, engine.rounds, 0) for sms in piece.graph.partition_sms]
        engine.run()
        most = [pool.most for pool in gpu.pools if isinstance(pool, Watched)]
        assert 0 < most[place] <= SIZES[place][1]
        assert most[1 - place] == 0


def test_steps_side_by_side_take_longer_than_alone_and_draw_more() -> None:
    prices = beside_of()
    both = prices.at(PROMPTS, DECODING, math.inf)
    alone_w = [price.whole(batch) for price, batch in zip(prices.alone, (PROMPTS, DECODING), strict=True)]
    assert all(slower > 0.999 for slower in both.slower)
    assert both.power_w > max(cost.energy_j / cost.time_s for cost in alone_w)


def test_a_lower_power_target_slows_both_and_lowers_the_clock() -> None:
    prices = beside_of()
    free, held = (prices.at(PROMPTS, DECODING, target_w) for target_w in (math.inf, 450.0))
    assert held.power_w < free.power_w
    assert held.clock_hz < free.clock_hz
    assert held.slower[0] > free.slower[0]


def test_sizes_stand_on_a_grid_of_two_to_an_octave() -> None:
    assert [near(size) for size in (0.2, 1, 2, 1024, 1500)] == [1, 1, 2, 1024, 1448]


def test_every_request_is_served_once_and_joules_add_up(sides: ServeResult) -> None:
    table = sides.requests
    assert len(table) == TRAFFIC["requests"]
    assert table["done_s"].notna().all()
    assert (table["first_token_s"] < table["done_s"]).all()
    by_stretch = math.fsum(one.energy_j for one in sides.log.stretches)
    assert by_stretch == pytest.approx(sides.energy_j, rel=1e-9)
    own = math.fsum(one.prefill_j + one.decode_j for one in sides.log.served)
    assert own == pytest.approx(sides.log.prefill_j + sides.log.decode_j, rel=1e-9)


def test_gpus_are_counted_once_though_both_sides_have_a_timeline(sides: ServeResult) -> None:
    assert sides.summary["gpus"] == 1
    assert sides.summary["gpu_hours"] == pytest.approx(sides.end_s / 3600.0, rel=1e-9)
    assert sides.summary["power_w_per_gpu"] < 700.0


def test_steps_of_the_two_sides_overlap_and_hold_only_their_kind(sides: ServeResult) -> None:
    steps = [one for one in sides.log.stretches if one.steps]
    prompts = [one for one in steps if one.replica == 0]
    decoding = [one for one in steps if one.replica == 1]
    assert all(one.prompt_tokens and not one.decoding for one in prompts)
    assert all(one.decoding and not one.prompt_tokens for one in decoding)
    assert any(a.start_s < b.end_s and b.start_s < a.end_s for a in prompts for b in decoding)


def test_the_trace_shows_both_sides_and_their_kernels(sides: ServeResult) -> None:
    trace = to_trace(sides)
    assert trace.processes[0] == "replica 0, prefill (64 SMs of 1 x h100-sxm-80gb)"
    assert trace.processes[1] == "replica 0, decode (68 SMs of 1 x h100-sxm-80gb)"
    marks = {kind.args.get("sm_partition") for kind in trace.kinds if kind.category == "kernel"}
    assert {"prefill (64 SMs)", "decode (68 SMs)"} <= marks


def test_tokens_come_more_evenly_than_where_prompts_share_their_steps(sides: ServeResult) -> None:
    """As the GPU yields them; a host that tells tokens late evens out those of shared steps."""
    whole = serve(**TRAFFIC)
    plain = {"host": "none", **TRAFFIC}
    apart = serve(sm_partition="prefill=64,decode=68", **plain)
    assert apart.summary["itl_s"]["p99"] < 0.6 * serve(**plain).summary["itl_s"]["p99"]
    assert sides.summary["itl_s"]["p99"] < whole.summary["itl_s"]["p99"]
    assert sides.summary["ttft_s"]["p50"] > whole.summary["ttft_s"]["p50"]


def test_small_memory_preempts_but_loses_nobody() -> None:
    run = serve(sm_partition="prefill=64,decode=68", kv_blocks=130, **TRAFFIC)
    assert run.requests["done_s"].notna().all()
    assert run.summary["most_blocks"] <= 130


def test_sides_of_several_gpus_and_replicas() -> None:
    traffic = TRAFFIC | {"requests": 4, "output_tokens": 4}
    run = serve(sm_partition="prefill=66,decode=66", tp=2, replicas=2, **traffic)
    assert run.summary["gpus"] == 4
    assert set(run.requests["replica"]) <= {2, 3}
    by_stretch = math.fsum(one.energy_j for one in run.log.stretches)
    assert by_stretch == pytest.approx(run.energy_j, rel=1e-9)


def test_the_summary_says_who_has_which_sms(sides: ServeResult) -> None:
    console = Console(record=True, width=120)
    print_summary(sides, console)
    assert "1 x tp 1, prefill on 64 SMs beside decode on 68" in console.export_text()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sm_partition": "prefill=64"}, "give prefill and decode their SMs"),
        ({"sm_partition": "prefill=64,decoding=68"}, "give prefill and decode their SMs"),
        ({"sm_partition": "prefill=100,decode=68"}, "168 SMs in all, the GPU has 132"),
        ({"sm_partition": "prefill=64,decode=68", "prefill_replicas": 1}, "prefill_replicas = 1 is not known beside"),
        ({"sm_partition": "prefill=64,decode=68", "launch": "eager"}, "launch = eager is not known beside"),
    ],
)
def test_what_cannot_be_split_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        serve(**(TRAFFIC | fields))


def test_a_side_cannot_be_killed() -> None:
    with pytest.raises(ScenarioError, match="not known beside sm_partition"):
        serve(ServeSpec.of(sm_partition="prefill=64,decode=68", **TRAFFIC), kills=[(0.1, 0)])


def test_the_command_takes_the_partition(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--model", "llama3-8b", "--requests", "2", "--output-tokens", "2", "--json", "--quiet"]
    main([*arguments, "--sm-partition", "prefill=64,decode=68"])
    told = json.loads(capsys.readouterr().out)
    assert dict(told["scenario"]["sm_partition"]) == {"prefill": 64, "decode": 68}
