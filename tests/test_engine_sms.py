"""Which kernel gets which SMs in the engine: late blocks, collectives beside products, priorities, tails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sim.build.cost import Pricer
from sim.build.lower import lower
from sim.engine.graph import KernelClass
from sim.scenario.machine import machine
from tests.engine_kit import COMPUTE, COPY, GPU, REDUCE, energy_of_steps, graph, run, spans, with_terms
from workloads.kernel_names import CollectiveOp
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import CollectiveWork, GemmWork


def test_blocks_that_find_no_sm_start_late_with_all_their_tiles_before_them() -> None:
    # Another kernel holds 50 SMs for 4 us: half of the GEMM's blocks start then, and take their 10 us. In profiler
    # traces a GEMM of 77 us beside a reduce-scatter that ends 41 us after its start takes 118 us.
    short = with_terms(COMPUTE, blocks=50, cycles_per_block=8_000.0)
    g = graph((0, [short]), (0, [COMPUTE]))
    records = run(g)
    assert spans(g, records) == [("gemm", 0, 0.0, 4.0), ("gemm", 0, 0.0, 14.0)]
    # Idle power lasts as long as somebody runs; the joules of the blocks are the same, early or late.
    assert math.fsum(records.span_energy_j) == pytest.approx(100.0 * 14e-6 + 2e-3, rel=1e-9)


# Rounds of 10 us on 132 SMs, by clusters of two blocks; 512 tiles are rounds of 132, 132, 132 and 116.
HOPPER = replace(GPU, sms=132)
PRODUCT = replace(with_terms(COMPUTE, blocks=512, cluster=2), name="product")
FOUR = with_terms(REDUCE, blocks=4, cluster=4, sms_per_block=1.0)


def holding(sms: int, rounds: float, **changes: object) -> KernelClass:
    """A kernel that keeps ``sms`` SMs for so many rounds of :data:`PRODUCT`."""
    return with_terms(COMPUTE, blocks=sms, cycles_per_block=20_000.0 * rounds, core_energy_j=0.0, **changes)


@pytest.mark.parametrize(
    ("held", "until_rounds", "ends_after_rounds"),
    [
        # 32 late blocks have two tiles each; 100 others do the other 448 in 4.48 rounds, so the late fetch two more.
        (32, 0.58, 4.58),
        (4, 2.2, 4.2),  # four late blocks do their two tiles, 128 others 504 in four rounds
        (32, 2.2, 5.0),
        (4, 3.4, 5.0),  # 128 blocks have fetched all; four of them are idle in the last round, and the late start there
    ],
)
def test_late_blocks_of_a_product_keep_two_tiles_and_fetch_further_ones(
    held: int, until_rounds: float, ends_after_rounds: float
) -> None:
    g = graph((0, [holding(held, until_rounds)]), (0, [PRODUCT]))
    [product] = [row for row in spans(g, run(g, gpu=HOPPER)) if row[0] == "product"]
    assert product[2:] == (0.0, pytest.approx(10.0 * ends_after_rounds, abs=1e-5))


@pytest.mark.parametrize("tiles", [100, 256, 264, 512, 529, 600, 1440])
@pytest.mark.parametrize(("held", "rounds"), [(4, 0.58), (32, 2.2), (32, 3.4), (100, 0.3), (130, 0.7), (4, 99.0)])
def test_a_product_whose_blocks_start_late_burns_what_it_burns_alone(tiles: int, held: int, rounds: float) -> None:
    product = with_terms(
        PRODUCT, blocks=tiles, cycles_per_block=2e6, hbm_energy_j=3e-4, sm_power_w=30.0, core_energy_j=1e-3 * tiles
    )
    alone = run(graph((0, [product])), gpu=HOPPER)
    split = run(graph((0, [holding(held, 100.0 * rounds)]), (0, [product])), gpu=HOPPER)
    assert split.end_ps >= alone.end_ps
    above_idle_j = [math.fsum(one.span_energy_j) - 100.0 * one.end_ps * 1e-12 for one in (alone, split)]
    assert above_idle_j[1] == pytest.approx(above_idle_j[0], rel=1e-9)
    assert math.fsum(split.span_energy_j) == pytest.approx(energy_of_steps(split), rel=1e-12)


def test_a_collective_of_32_blocks_starts_on_8_sms_and_grows() -> None:
    # 12 SMs are free: two clusters of four. Moving its data takes 10 us on 32 SMs, 40 on 8: after 20 us, when the
    # product ends, two turns of four are done, and the other blocks start: each moves data of its own, for 10 us.
    wide = with_terms(REDUCE, blocks=32, cluster=4, sms_per_block=1.0, link_bytes=0.0, moving_cycles=20_000.0)
    late = replace(wide, lead_s=1e-6)
    g = graph((0, [holding(120, 2.1, cluster=2)]), (0, [(late, 0)]))
    records = run(g, gpu=HOPPER)
    assert spans(g, records) == [("gemm", 0, 0.0, 21.0), ("all_reduce", 0, 1.0, 31.0)]
    steps = [
        (t / 1e6, records.states[s].sms_busy) for t, s in zip(records.step_time_ps, records.step_state, strict=True)
    ]
    assert steps == [(0.0, 120.0), (1.0, 128.0), (21.0, 32.0)]


def test_a_collective_of_4_blocks_needs_more_than_the_4_sms_that_clusters_of_two_leave() -> None:
    product = holding(128, 3.0, cluster=2)
    late = graph((0, [product]), (0, [(replace(FOUR, lead_s=1e-6), 0)]))
    assert spans(late, run(late, gpu=HOPPER)) == [("gemm", 0, 0.0, 30.0), ("all_reduce", 0, 30.0, 40.0)]
    six = graph((0, [holding(126, 3.0, cluster=2)]), (0, [(replace(FOUR, lead_s=1e-6), 0)]))
    assert spans(six, run(six, gpu=HOPPER)) == [("gemm", 0, 0.0, 30.0), ("all_reduce", 0, 1.0, 11.0)]
    # Those that another collective gives back lie in one cluster's place.
    two = graph((0, [product]), (0, [(FOUR, 0), (FOUR, 1)]))
    assert spans(two, run(two, gpu=HOPPER)) == [
        ("all_reduce", 0, 0.0, 10.0),
        ("gemm", 0, 0.0, 30.0),
        ("all_reduce", 0, 10.0, 20.0),
    ]


@pytest.mark.parametrize(("m", "first"), [(2048, "all_gather"), (1024, "gemm")])
def test_a_product_that_clears_its_counter_loses_its_sms_to_a_collective_released_with_it(m: int, first: str) -> None:
    # 512 tiles are fetched from a counter that a kernel before them clears; 256 are two a block and need none.
    product = Kernel(name="gemm", work=GemmWork(m=m, n=8192, k=4096), flops=0.0, bytes_moved=0.0, after=(0,))
    before = replace(product, name="before", after=())
    work = CollectiveWork(op=CollectiveOp.ALL_GATHER, ranks=(0, 1), buffer_bytes=2**25, ctas=4)
    gather = Kernel(name="all_gather", work=work, flops=0.0, bytes_moved=0.0, stream=1, priority=-1, after=(0,))
    segment = Segment(name="layer", kernels=(before, product, gather))
    rank = RankProgram(phases=(Phase(name="step", segments=(segment,)),))
    target = machine("h200-sxm-141gb", 2)
    pricer = Pricer(profile=target.profile, gpu=target.gpu, gap_s=1e-6, chips=2, cluster=target.cluster)
    g = lower(Program(ranks=(rank, rank)), pricer.price)
    starts = {name: start for name, gpu, start, _ in spans(g, run(g, gpu=target.model)) if gpu == 0}
    assert sorted(starts, key=lambda name: starts[name]) == ["before", first, *({"gemm", "all_gather"} - {first})]
    if first == "gemm":  # the other starts in its tail at the earliest
        assert starts["all_gather"] - starts["gemm"] > 10.0


def test_blocks_without_tiles_of_their_own_join_in() -> None:
    # Half speed on 50 SMs for 4 us, then all of them: 2 + 8 us of work.
    short = with_terms(COMPUTE, blocks=50, cycles_per_block=8_000.0)
    g = graph((0, [short]), (0, [with_terms(COMPUTE, quantised=False)]))
    assert spans(g, run(g)) == [("gemm", 0, 0.0, 4.0), ("gemm", 0, 0.0, 12.0)]


def test_a_collective_takes_sms_from_short_blocks_at_once() -> None:
    # The copy holds every SM; its blocks end all the time, so the all-reduce does not wait for its end.
    wide = with_terms(COPY, blocks=100, shrink="fluid")
    g = graph((0, [wide]), (0, [(REDUCE, 0)]))
    assert ("all_reduce", 0, 0.0, 10.0) in spans(g, run(g))


def test_a_collective_beside_a_kernel_that_fills_hbm_gets_its_share_by_blocks() -> None:
    # Alone 0.2 TB/s; the copy leaves nothing, so its level is 10 of 60 SMs: 1/6 TB/s; as squares of times 0.128.
    thin = with_terms(REDUCE, hbm_bytes=2e6)
    g = graph((0, [COPY, COPY, COPY]), (0, [(thin, 0)]))
    [reduce] = [row for row in spans(g, run(g)) if row[0] == "all_reduce"]
    assert reduce[3] == pytest.approx(10.0 * math.hypot(1.0, 0.2 * 6.0), rel=1e-5)


def test_the_second_full_gpu_kernel_waits_for_the_first() -> None:
    g = graph((0, [COMPUTE]), (0, [COMPUTE]))
    assert spans(g, run(g)) == [("gemm", 0, 0.0, 10.0), ("gemm", 0, 10.0, 20.0)]


def test_a_collective_starts_in_the_tail_of_a_gemm() -> None:
    # 281 tiles go in three rounds of 10 us over 100 SMs; the last round needs 81, so that from 20 us on 19 are free.
    tall = with_terms(COMPUTE, blocks=281)
    seven = with_terms(REDUCE, blocks=7, sms_per_block=1.0)
    g = graph((0, [tall]), (0, [with_terms(COPY, hbm_bytes=1e6, blocks=1), (seven, 0)]))
    assert spans(g, run(g)) == [("gemm", 0, 0.0, 30.0), ("copy", 0, 20.0, 21.0), ("all_reduce", 0, 21.0, 31.0)]


def test_priority_decides_who_gets_free_sms_not_the_order_of_creation() -> None:
    first = graph((0, [COMPUTE, COMPUTE]), (0, [COMPUTE, (REDUCE, 0)]))
    swapped = graph((0, [COMPUTE, (REDUCE, 0)]), (0, [COMPUTE, COMPUTE]))
    # It becomes ready at 20 or 10 us and each time passes the GEMM that has been waiting longer.
    for g, start_us in ((first, 20.0), (swapped, 10.0)):
        [reduce] = [row for row in spans(g, run(g)) if row[0] == "all_reduce"]
        assert reduce[2] == start_us


def test_taking_sms_from_the_pool_changes_the_timeline() -> None:
    g = graph((0, [COMPUTE]))
    assert run(g).end_ps == 10_000_000
    assert run(g, pool=[50.0]).end_ps == 20_000_000
