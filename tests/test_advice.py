"""Advice about traces: each finding on a small trace made for it, and none on a trace without any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.replay.inspect import inspect_trace
from tests.traces_kit import Event, kernel, launch, write
from traces.advice import advise
from traces.advised import Advice, shown
from traces.classify import classify
from traces.read.load import read_trace
from traces.summary import summarise

GEMM, ADD, NORM, REDUCE = (
    "nvjet_tst_128x256",
    "vectorized_elementwise_kernel",
    "rms_norm_kernel",
    "ncclDevKernel_AllReduce",
)
H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3", "numSms": 132}]}


def advice(folder: Path, *ranks: list[Event]) -> list[Advice]:
    """What is said of a trace of one file a rank."""
    for rank, events in enumerate(ranks):
        write(folder / f"rank{rank}.json", events, distributedInfo={"rank": rank})
    capture = read_trace(folder)
    classes = classify(capture)
    return advise(capture, classes, summarise(capture, classes))


def queue(*works: tuple[str, float], start: float = 0.0, pause: float = 0.0, **more: int | list[int]) -> list[Event]:
    """Kernels one after another."""
    events = []
    for name, dur in works:
        events.append(kernel(name, start, dur, **more))
        start += dur + pause
    return events


def test_a_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    """Ten layers: the product of rank 1 takes 150 us in the place of 100, so rank 0 waits 50 us in each collective."""
    (found,) = (
        one
        for one in advice(
            tmp_path, queue(*[(GEMM, 100.0), (REDUCE, 55.0)] * 10), queue(*[(GEMM, 150.0), (REDUCE, 5.0)] * 10)
        )
        if one.rule == "rank-skew"
    )
    assert found.seen == (
        "it comes last to 10 of 10 collectives, and the others wait 500 us (32% of its time) for it: "
        "its gemm kernels take 500 us longer than the other ranks'"
    )
    assert (found.rank, found.start_us, found.end_us, found.kernel) == (1, 100.0, 150.0, REDUCE)
    assert found.saves_us == pytest.approx(500.0)


def test_a_rank_whose_host_is_late(tmp_path: Path) -> None:
    """The same waits, but rank 1's products take as long as the others': it begins them 50 us late."""
    late: list[Event] = []
    for layer in range(10):
        late += queue((GEMM, 100.0), (REDUCE, 5.0), start=155.0 * layer + 50.0)
    found = advice(tmp_path, queue(*[(GEMM, 100.0), (REDUCE, 55.0)] * 10), late)
    assert [one.seen for one in found if one.rule == "rank-skew"] == [
        "it comes last to 10 of 10 collectives, and the others wait 500 us (33% of its time) for it: "
        "its kernels take no longer than the other ranks'"
    ]
    assert "its host launches late" in next(one.remedy for one in found if one.rule == "rank-skew")


def test_a_profiler_that_began_late_is_no_skew(tmp_path: Path) -> None:
    """Rank 1's record begins 300 us later, with the collective that rank 0 has waited in since then."""
    first = queue((REDUCE, 320.0), *[(GEMM, 300.0), (REDUCE, 20.0)] * 4)
    second = queue((REDUCE, 20.0), *[(GEMM, 300.0), (REDUCE, 20.0)] * 4, start=300.0)
    assert [one.rule for one in advice(tmp_path, first, second)] == ["exposed-small-collectives"]


def test_ranks_that_are_late_in_turn_are_no_skew(tmp_path: Path) -> None:
    slow, quick = [(GEMM, 110.0), (REDUCE, 5.0)], [(GEMM, 100.0), (REDUCE, 15.0)]
    assert advice(tmp_path, queue(*(slow + quick) * 6), queue(*(quick + slow) * 6)) == []


def test_stretches_where_the_gpu_waits_for_launches(tmp_path: Path) -> None:
    """Twelve kernels of 10 us, each launched 50 us after the one before and begun as its call returns."""
    events = []
    for number in range(12):
        events += [
            launch(50.0 * number, number + 1, dur=5.0),
            kernel(ADD, 50.0 * number + 5.0, 10.0, correlation=number + 1),
        ]
    assert shown(advice(tmp_path, events)) == [
        f"host-bound: rank 0, 0.010 to 0.550 ms, '{ADD}': 11 pieces of work wait for their launches, idle 440 us of "
        "540; in all its GPU idles 440 us (79% of its time) for its host: launch it as a CUDA or HIP graph "
        "(replay --launch graph), compile the host's code, or batch more (saves at most 440 us)"
    ]


def test_few_long_waits_for_the_host(tmp_path: Path) -> None:
    """Four kernels of 10 us, launched 100 us after one another, the third 400 us after the second."""
    events = []
    for number, at in enumerate((0.0, 100.0, 500.0, 600.0)):
        events += [launch(at, number + 1, dur=5.0), kernel(ADD, at + 5.0, 10.0, correlation=number + 1)]
    assert shown(advice(tmp_path, events)) == [
        f"host-bound: rank 0, 0.110 to 0.500 ms, '{ADD}': this piece of work waits for its launch longest; in all its "
        "GPU idles 570 us (93% of its time) for its host: find what the host does meanwhile (data, synchronisation, "
        "Python), and launch ahead of the GPU (saves at most 570 us)"
    ]


def test_waits_for_ranks_that_the_trace_lacks(tmp_path: Path) -> None:
    """Eight collectives of one size: six take 20 us, two 220; those of another size tell nothing of them."""
    sizes = {"Collective name": "allreduce", "dtype": "Half", "In msg nelems": 64, "Group size": 2}
    events = []
    for number, dur in enumerate((20.0, 220.0, 20.0, 20.0, 220.0, 20.0, 20.0, 20.0)):
        events += [kernel(GEMM, 1000.0 * number, 600.0), kernel(REDUCE, 1000.0 * number + 600.0, dur, **sizes)]
    larger = sizes | {"In msg nelems": 4096}
    events += [kernel(REDUCE, 7700.0 + 30.0 * number, 20.0, **larger) for number in range(5)]
    (found,) = (one for one in advice(tmp_path, events) if one.rule == "waits-for-untraced-ranks")
    assert found.seen == "2 collectives take 400 us (5% of its time) more than others of their size, the longest here"
    assert (found.start_us, found.end_us, found.saves_us) == (1600.0, 1820.0, 400.0)


def test_kernels_shorter_than_their_launches(tmp_path: Path) -> None:
    """60 kernels of 2 us, 1 us apart, then a product of 300 us."""
    events = [*queue(*[(ADD, 2.0)] * 60, pause=1.0), kernel(GEMM, 200.0, 300.0)]
    assert shown(advice(tmp_path, events)) == [
        f"small-launches: rank 0, 0.000 to 0.179 ms, '{ADD}': 60 kernels of less than 5 us and the pauses behind them "
        "take 179 us (36% of its time), up to 60 in a row: fuse what follows one another (torch.compile, the engine's "
        "fused norm, RoPE and activation kernels), or batch more (saves at most 59 us)"
    ]


def test_collectives_that_nothing_hides(tmp_path: Path) -> None:
    """Five products of 200 us, each with a collective of 100 us behind it."""
    ranks = [queue(*[(GEMM, 200.0), (REDUCE, 100.0)] * 5) for _ in range(2)]
    (found,) = advice(tmp_path, *ranks)
    assert (found.rule, found.rank, found.start_us, found.end_us) == ("exposed-collectives", 0, 200.0, 300.0)
    assert found.seen == "5 collectives run 500 us (33% of its time) with nothing beside them, the longest here"
    assert found.saves_us == 500.0


def test_hidden_collectives_are_left_alone(tmp_path: Path) -> None:
    ranks = [queue(*[(GEMM, 200.0)] * 5) + queue(*[(REDUCE, 100.0)] * 5, pause=100.0, stream=13) for _ in range(2)]
    assert advice(tmp_path, *ranks) == []


def test_small_collectives_want_quicker_kernels_and_no_parts(tmp_path: Path) -> None:
    ranks = [queue(*[(GEMM, 40.0), (REDUCE, 20.0)] * 5) for _ in range(2)]
    (found,) = advice(tmp_path, *ranks)
    assert (found.rule, found.saves_us) == ("exposed-small-collectives", 100.0)
    assert "one-shot or multicast" in found.remedy


def test_a_clock_that_falls(tmp_path: Path) -> None:
    """Products take 100 us, from the 25th on 110; a copy takes 30 us all the time."""
    works = [(GEMM, 100.0), (ADD, 30.0)] * 24 + [(GEMM, 110.0), (ADD, 30.0)] * 24
    (found,) = advice(tmp_path, queue(*works))
    assert (found.rule, found.start_us, found.end_us, found.kernel) == ("clock-throttling", 3120.0, 6450.0, GEMM)
    assert found.seen.startswith("products of one name and grid take 10% longer later than at first, and copies do not")
    assert found.saves_us == pytest.approx(240.0)


def test_a_clock_that_falls_little_by_little(tmp_path: Path) -> None:
    """Products take 100 us, then half a microsecond longer each time, up to 115: the first and last thirds differ."""
    works = [work for turn in range(60) for work in ((GEMM, 100.0 + min(turn, 30) / 2), (ADD, 30.0))]
    (found,) = advice(tmp_path, queue(*works))
    assert (found.rule, found.kernel) == ("clock-throttling", GEMM)
    assert found.seen.startswith("products of one name and grid take 10% longer later than at first")


@pytest.mark.parametrize(
    "works",
    [
        pytest.param(
            [(GEMM, us) for us in (100.0, 130.0, 100.0, 130.0, 130.0, 145.0) for _ in range(10)],
            id="stretches of shapes",
        ),
        pytest.param([(GEMM, 100.0), (ADD, 30.0)] * 24 + [(GEMM, 110.0), (ADD, 33.0)] * 24, id="copies too: more work"),
        pytest.param([(GEMM, 100.0), (ADD, 30.0), (GEMM, 400.0), (NORM, 30.0)] * 24, id="two shapes under one grid"),
        pytest.param([("fused_moe_kernel", 100.0)] * 24 + [("fused_moe_kernel", 110.0)] * 24, id="experts get more"),
    ],
)
def test_other_changes_are_no_clock(tmp_path: Path, works: list[tuple[str, float]]) -> None:
    assert advice(tmp_path, queue(*works)) == []


def test_nothing_is_said_of_a_trace_where_nothing_is_amiss(tmp_path: Path) -> None:
    """Long kernels that queue, collectives hidden, ranks that agree, a steady pace."""
    ranks = []
    for _ in range(2):
        events = queue(*[(GEMM, 200.0), (NORM, 8.0), (ADD, 12.0)] * 30, pause=1.0)
        ranks.append(events + queue(*[(REDUCE, 100.0)] * 20, pause=120.0, start=10.0, stream=13))
    assert advice(tmp_path, *ranks) == []


def test_the_simulator_says_what_advice_saves(tmp_path: Path) -> None:
    """Of a named GPU: a graph saves the waits for launches, and joules."""
    events = []
    for number in range(12):
        events += [
            launch(50.0 * number, number + 1, dur=5.0),
            kernel(ADD, 50.0 * number + 6.5, 10.0, correlation=number + 1, grid=[264, 1, 1], block=[256, 1, 1]),
        ]
    path = write(tmp_path / "host.json", events, **H100)
    (found,) = inspect_trace((path,), lint=True).advice
    # 560 us of span become twelve kernels of 10 us and pauses of about a microsecond.
    assert found.rule == "host-bound"
    assert found.saves_us == pytest.approx(430, abs=15)
    assert found.saves_j is not None
    assert 0.02 < found.saves_j < 0.2  # 430 us of an idle H100, about 110 to 130 W
    assert inspect_trace((path,)).advice == ()
