"""Kernels of recorded durations on the engine's resources, given as columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware.scheduling import scheduling
from sim.errors import DeadlockError
from sim.replay.run import Contest, HostWait, ReplayRows, Times, no_contest, replay
from traces.capture import NONE
from traces.dag import Dag
from traces.records import Ints

FACTS = scheduling()


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def dag(*queues: list[int], edges: tuple[tuple[int, int], ...] = (), meets: tuple[int, ...] = ()) -> Dag:
    """Rows on streams; ``meets`` numbers the collective of each row."""
    rows = sum(map(len, queues))
    return Dag(
        queues=[ints(*queue) for queue in queues],
        before=ints(*(before for before, _ in edges)),
        after=ints(*(after for _, after in edges)),
        confidence=np.ones(len(edges)),
        collective=ints(*(meets or [NONE] * rows)),
        counts={},
    )


def load(*dur_ns: int, blocks: tuple[int, ...] = (), is_collective: tuple[int, ...] = (), own: int = 0) -> ReplayRows:
    """Rows that last so long, launched at zero, on a GPU of 132 SMs; ``is_collective`` are collectives."""
    count = len(dur_ns)
    grids = ints(*(blocks or [0] * count))
    collective = np.isin(np.arange(count), is_collective)
    zeros = np.zeros(count, dtype=np.int64)
    return ReplayRows(
        dur_ns=ints(*dur_ns),
        issue_ns=zeros,
        early=np.zeros(count, dtype=bool),
        blocks=grids,
        tiles=grids,
        cluster=np.ones(count, dtype=np.int64),
        own=np.where(collective, 0, own),
        is_collective=collective,
        lead_ns=zeros,
        graph_lead_ns=zeros,
        clearing_ns=zeros,
        fetches=np.zeros(count, dtype=bool),
        rank=zeros,
        sms=132,
        clusters=False,
        pause_ns=0,
    )


def spans(times: Times) -> list[tuple[int, int]]:
    return list(zip(times.start_ns.tolist(), times.end_ns.tolist(), strict=True))


def test_a_pause_counts_from_what_a_kernel_waits_for_and_runs_while_the_host_launches() -> None:
    rows = replace(load(10, 20, 5), issue_ns=ints(0, 3, 40), pause_ns=2)
    assert spans(replay(dag([0, 1], [2], edges=((0, 2),)), rows)) == [(0, 10), (12, 32), (40, 45)]


def test_a_collective_waits_for_sms_that_products_do_not() -> None:
    """All 132 SMs are held: a product begins beside it at once, on nothing, a collective when they are free."""
    beside = dag([0], [1], [2])
    rows = replace(load(100, 50, 50, blocks=(132, 132, 8), is_collective=(2,)), issue_ns=ints(0, 5, 5))
    assert spans(replay(beside, rows)) == [(0, 100), (5, 55), (100, 150)]
    assert spans(replay(beside, replace(rows, asks=False)))[2] == (5, 55)  # as recorded: it had SMs


def product_beside(collective_ns: int) -> tuple[Dag, ReplayRows]:
    """A product of 512 tiles, 100 ns each, 2 ns behind a collective of 8 blocks."""
    rows = load(collective_ns, 400, blocks=(8, 132), is_collective=(0,), own=FACTS.own_tiles)
    return dag([0], [1]), replace(rows, tiles=ints(8, 512), cluster=ints(1, 2), issue_ns=ints(0, 2))


@pytest.mark.parametrize(("collective_ns", "end_ns"), [(50, 402), (222, 422), (400, 600), (1000, 602)])
def test_blocks_that_find_no_sm_do_their_own_tiles_when_others_leave(collective_ns: int, end_ns: int) -> None:
    """The last 8 blocks have two tiles each by their number: they begin when the collective or other blocks leave."""
    streams, rows = product_beside(collective_ns)
    found = replay(streams, replace(rows, rounds=np.array([0.0, 4.0])))
    assert spans(found) == [(0, collective_ns), (2, end_ns)]


def test_a_kernel_of_unknown_rounds_lasts_as_recorded_and_says_in_how_many_rounds() -> None:
    streams, rows = product_beside(1000)
    found = replay(streams, rows)
    assert spans(found)[1] == (2, 402)
    assert found.rounds[1] == pytest.approx(6.0)
    assert spans(replay(streams, replace(rows, rounds=found.rounds))) == spans(found)


def contest(rows: int, **known: Ints | np.ndarray) -> Contest:
    return replace(no_contest(rows), **known)


def test_a_kernel_asks_for_sms_right_after_a_rival_that_is_about_to() -> None:
    """The collective could begin at 3 ns, the product at 5: in the trace the product was first."""
    rows = replace(load(100, 50, blocks=(132, 8), is_collective=(1,)), issue_ns=ints(5, 3))
    streams = dag([0], [1])
    assert spans(replay(streams, rows)) == [(5, 105), (3, 53)]
    first = contest(2, rival=ints(NONE, 0))
    assert spans(replay(streams, replace(rows, contest=first))) == [(5, 105), (105, 155)]
    late = replace(rows, issue_ns=ints(20_000, 3), contest=first)
    assert spans(replay(streams, late))[1] == (3, 53)  # nothing is waited for that is not near


def test_a_rival_behind_a_short_kernel_is_waited_for() -> None:
    rows = replace(load(20, 100, 50, blocks=(0, 132, 8), is_collective=(2,)), issue_ns=ints(0, 0, 3))
    known = contest(3, rival=ints(NONE, NONE, 1), via=ints(NONE, NONE, 0))
    assert spans(replay(dag([0, 1], [2]), replace(rows, contest=known))) == [(0, 20), (20, 120), (120, 170)]


def test_kernels_that_began_together_begin_together_on_their_sms() -> None:
    rows = replace(load(20, 100, 50, blocks=(0, 132, 8), is_collective=(2,)), issue_ns=ints(0, 0, 3))
    both = contest(3, rival=ints(NONE, 2, 1), via=ints(NONE, NONE, 0), together=np.array([False, False, True]))
    assert spans(replay(dag([0, 1], [2]), replace(rows, contest=both))) == [(0, 20), (20, 120), (20, 70)]
    slow = replace(rows, issue_ns=ints(0, 0, 30), contest=both)
    assert spans(replay(dag([0, 1], [2]), slow)) == [(0, 20), (30, 130), (30, 80)]


def test_others_get_the_sms_of_a_kernel_in_its_tail() -> None:
    rows = replace(load(100, 50, blocks=(132, 8), is_collective=(1,)), issue_ns=ints(0, 5))
    streams, tail = dag([0], [1]), contest(2, tail=np.array([0.1, 0.0]))
    assert spans(replay(streams, replace(rows, contest=tail))) == [(0, 100), (90, 140)]
    again = replace(rows, contest=tail, rounds=np.array([1.0, 0.0]), dur_ns=ints(200, 50))
    assert spans(replay(streams, again)) == [(0, 200), (180, 230)]  # a share of however long it takes


def test_a_closed_kernel_leaves_no_room_and_a_collective_that_finds_some_needs_none() -> None:
    rows = replace(load(100, 50, blocks=(120, 8), is_collective=(1,)), issue_ns=ints(0, 5))
    streams = dag([0], [1])
    assert spans(replay(streams, rows))[1] == (5, 55)
    closed = contest(2, closed=np.array([True, False]))
    assert spans(replay(streams, replace(rows, contest=closed)))[1] == (100, 150)
    full = replace(rows, blocks=ints(132, 8), contest=contest(2, finds=np.array([False, True])))
    assert spans(replay(streams, full))[1] == (5, 55)


def test_ranks_meet_and_each_spins_on_its_sms() -> None:
    both = replace(
        load(30, 30, 40, blocks=(8, 8, 132), is_collective=(0, 1)), rank=ints(0, 1, 0), issue_ns=ints(0, 100, 10)
    )
    found = replay(dag([0], [1], [2], meets=(0, 0, NONE)), both)
    assert spans(found) == [(0, 130), (100, 130), (10, 50)]


def test_a_blocking_call_shifts_what_the_host_launches_after_it() -> None:
    rows = replace(load(100, 10), issue_ns=ints(0, 60))
    wait = HostWait(rank=0, call_ns=5, return_ns=50, lag_ns=7, rows=(0,))
    assert spans(replay(dag([0], [1]), rows, [wait])) == [(0, 100), (117, 127)]


def test_ranks_that_meet_in_different_orders_are_named() -> None:
    rows = replace(load(5, 5, 5, 5), rank=ints(0, 0, 1, 1))
    with pytest.raises(DeadlockError) as error:
        replay(dag([0, 1], [2, 3], meets=(0, 1, 1, 0)), rows)
    assert str(error.value) == (
        "replay: deadlock with 4 kernels left: collective 0 (kernel of 0 tiles on 0 SMs) has GPUs [0], misses [1]: "
        "ranks run their collectives in different orders: replay one rank with --rank"
    )
