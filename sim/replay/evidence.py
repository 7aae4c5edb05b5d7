"""What the times of a file say of kinds of kernels: how long they pause, who is first at the SMs, when these go back.

No kernel is put where it was: pauses and tails are means over kernels alike, the rest is an order of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.replay.run import NEVER, Contest, ReplayRows
from traces.capture import NONE, Capture, Category
from traces.dag import Dag
from traces.records import Ints

# A wake-up by another stream, a memset or a copy takes up to so long; who began later than that waited for SMs.
LONGEST_WAKE_NS, LEAST_PAUSE_NS = 9_000, -4_000
LONGEST_BESIDE_NS = 30_000  # beside a collective on V100s
LAUNCHED_NS = 10_000  # a launch that returned so long before was no reason to wait
FEWEST_ALIKE = 4  # pauses of one kind that give their mean
TOGETHER_NS = 1_000  # kernels that begin within this got their SMs together, as the one that came first left room


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Of each row: its mean pause (NONE: not shown), and how it and its neighbours came to SMs.

    ``rival`` began first where both could begin at about the same time, after the short row ``via`` of its stream;
    where they are ``together``, both began at once. A collective that ``finds`` SMs began beside a kernel that ran
    already. ``tail`` is the share of a row's time, before its end, in which others got its SMs (0: not shown);
    ``closed`` ones left no room before, whatever their grids.
    """

    pause_ns: Ints
    contest: Contest

    @property
    def taken(self) -> dict[str, int]:
        """How many rows take their pause, their turn at the SMs and their tail from the file."""
        contest = self.contest
        turns = (contest.rival != NONE) | contest.finds
        told = {"pauses": self.pause_ns != NONE, "turns": turns, "tails": contest.tail > 0.0}
        return {what: int(rows.sum()) for what, rows in told.items()}

    def on(self, load: ReplayRows, in_graph: NDArray[np.bool_]) -> ReplayRows:
        """``load`` with it; ``in_graph`` are rows whose pauses are those of graphs."""
        lead_ns = np.where(self.pause_ns == NONE, load.lead_ns, self.pause_ns - load.pause_ns)
        graph_lead_ns = np.where(in_graph, lead_ns, load.graph_lead_ns)
        return replace(load, lead_ns=lead_ns, graph_lead_ns=graph_lead_ns, contest=self.contest)


def evidence_of(capture: Capture, dag: Dag, load: ReplayRows) -> Evidence:
    """What ``capture`` shows; ``load`` says which rows hold SMs."""
    work = capture.work
    released_ns, before = released_by(dag, work.end_ns)
    free_ns = np.where(released_ns == NEVER, NEVER, np.maximum(released_ns, load.issue_ns))
    rival, via = np.full(len(work), NONE), np.full(len(work), NONE)
    together, finds, tail = (np.zeros(len(work), dtype=kind) for kind in (bool, bool, float))
    previous, following = _neighbours(dag, len(work))

    def lag_ns(row: int, of: int) -> int:
        """From when ``row`` could begin to when ``of`` did."""
        return int(work.start_ns[of] - free_ns[row])

    for rank in capture.ranks:
        mine = np.flatnonzero((work.rank == rank) & (load.blocks > 0))
        products, collectives = mine[~load.is_collective[mine]], mine[load.is_collective[mine]]
        beside = _running(capture, products, collectives)
        for row, product in zip(collectives.tolist(), beside, strict=True):
            if product == NONE or free_ns[row] == NEVER:
                continue
            near = 0 <= lag_ns(row, product) <= LONGEST_WAKE_NS
            together[row] = near and abs(int(work.start_ns[row] - work.start_ns[product])) <= TOGETHER_NS
            if near:
                rival[row] = product
            if work.start_ns[row] - work.start_ns[product] <= TOGETHER_NS:
                continue
            if lag_ns(row, row) > LONGEST_WAKE_NS:
                left = float(work.end_ns[product] - work.start_ns[row]) / max(1, int(work.dur_ns[product]))
                tail[product] = max(tail[product], left)
            else:
                finds[row] = True
        beside = _running(capture, collectives, products)
        for row, collective in zip(products.tolist(), beside, strict=True):
            first = collective != NONE and (rival[collective] != row or together[collective])
            if first and abs(lag_ns(row, collective)) <= LONGEST_WAKE_NS:
                rival[row] = collective
    contested = rival != NONE
    via = np.where(contested, previous[rival], NONE)
    via[(via != NONE) & (work.dur_ns[via] > LONGEST_WAKE_NS)] = NONE
    names = (np.where(rows == NONE, NONE, work.name[rows]) for rows in (previous, following))
    _, kind = np.unique(np.stack([work.name, load.blocks, *names]), axis=1, return_inverse=True)
    kind, shown = kind.reshape(-1), np.flatnonzero(tail)
    count = np.bincount(kind[shown], minlength=int(kind.max(initial=0)) + 1)
    mean = np.bincount(kind[shown], weights=tail[shown], minlength=len(count)) / np.maximum(count, 1)
    contest = Contest(
        rival=rival, via=via, together=together, finds=finds, tail=np.where(tail > 0.0, tail, mean[kind]),
        closed=(count[kind] > 0) & (load.blocks < load.sms),
    )  # fmt: skip
    return Evidence(pause_ns=_pauses(capture, dag, load, released_ns, before), contest=contest)


def released_by(dag: Dag, end_ns: Ints) -> tuple[Ints, Ints]:
    """When each row has nothing to wait for any more, and the row that it waited for last (NEVER, NONE: nothing)."""
    before, released_ns = np.full(len(end_ns), NONE), np.full(len(end_ns), NEVER)
    for queue in dag.queues:
        before[queue[1:]], released_ns[queue[1:]] = queue[:-1], end_ns[queue[:-1]]
    for source, target in zip(dag.before.tolist(), dag.after.tolist(), strict=True):
        if end_ns[source] > released_ns[target]:
            before[target], released_ns[target] = source, end_ns[source]
    return released_ns, before


def _neighbours(dag: Dag, count: int) -> tuple[Ints, Ints]:
    """The rows before and after each on its stream."""
    previous, following = np.full(count, NONE), np.full(count, NONE)
    for queue in dag.queues:
        previous[queue[1:]], following[queue[:-1]] = queue[:-1], queue[1:]
    return previous, following


def _running(capture: Capture, rows: Ints, at: Ints) -> list[int]:
    """For each of ``at`` the one of ``rows`` (both by start) that began last before it or with it, if it ran still."""
    work = capture.work
    if not len(rows):
        return [NONE] * len(at)
    place = np.searchsorted(work.start_ns[rows], work.start_ns[at] + TOGETHER_NS, side="right") - 1
    found = rows[np.maximum(place, 0)]
    runs = (place >= 0) & (work.end_ns[found] > work.start_ns[at])
    return [row if one else NONE for row, one in zip(found.tolist(), runs.tolist(), strict=True)]


def _pauses(capture: Capture, dag: Dag, load: ReplayRows, released_ns: Ints, before: Ints) -> Ints:
    """How long rows of each one's kind pause on average (sums count), NONE where fewer than ``FEWEST_ALIKE`` show it.

    A kind is a kernel behind a kernel, by names, on the same stream or on another, alone or beside another. A pause
    shows where the row had been launched; that of a collective where nothing ran for whose SMs it might have waited.
    """
    work, calls = capture.work, capture.calls
    found = np.full(len(work), NONE)
    rows = np.flatnonzero(before != NONE)
    if not len(rows):
        return found
    known = work.launch != NONE
    ready_ns = np.full(len(work), NEVER)
    ready_ns[known] = (calls.start_ns + calls.dur_ns)[work.launch[known]] + LAUNCHED_NS
    pause_ns = work.start_ns - released_ns
    beside = _accompanied(capture)
    same = work.stream[rows] == work.stream[before[rows]]
    columns = np.stack([work.name[rows], work.name[before[rows]], same, beside[rows]])
    _, kind = np.unique(columns, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    shows = (ready_ns <= released_ns) & (dag.collective == NONE) & ~(beside & load.is_collective)
    shows &= (pause_ns >= LEAST_PAUSE_NS) & (pause_ns <= np.where(beside, LONGEST_BESIDE_NS, LONGEST_WAKE_NS))
    shows = shows[rows]
    count = np.bincount(kind[shows], minlength=int(kind.max()) + 1)
    total = np.bincount(kind[shows], weights=pause_ns[rows[shows]], minlength=len(count))
    mean_ns = np.maximum(np.rint(total / np.maximum(count, 1)), 0).astype(np.int64)
    told = count[kind] >= FEWEST_ALIKE
    found[rows[told]] = mean_ns[kind[told]]
    return found


def _accompanied(capture: Capture) -> NDArray[np.bool_]:
    """Rows at whose start a kernel of their rank ran that had begun before."""
    work = capture.work
    found = np.zeros(len(work), dtype=bool)
    for rank in capture.ranks:
        mine = np.flatnonzero(work.rank == rank)
        kernels = mine[work.category[mine] == Category.KERNEL]
        if len(kernels):
            latest_ns = np.maximum.accumulate(work.end_ns[kernels])
            place = np.searchsorted(kernels, mine) - 1  # rows go by start
            found[mine] = (place >= 0) & (latest_ns[np.maximum(place, 0)] > work.start_ns[mine])
    return found
