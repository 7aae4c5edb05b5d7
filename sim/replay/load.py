"""From a capture to what its replay needs: launches as the host made them, pauses as the host noticed them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from hardware.scheduling import Scheduling, scheduling
from sim.replay.own import is_ours
from sim.replay.price import Jobs
from sim.replay.run import HostWait, ReplayRows, replay
from traces.capture import NONE, Capture, Category
from traces.classify import COMMUNICATION, Classes
from traces.dag import Dag
from traces.host_order import LIBRARY
from traces.records import Ints
from traces.rounds import TILE, products_of, rounds_of, tiles_of
from workloads.work import GemmWork

# A kernel begins 1.5 us after the call that launched it returned, a copy or a HIP graph 10 us after the call began, and
# a blocking call returns 8 us after its work (medians over the public traces: 0.3 to 2.2, 8 to 14 and 4 to 21 us). A
# CUDA graph of 72 to 578 nodes begins 49 us after the call began (median of 20 under records/; 42 to 71, save two).
AFTER_LAUNCH_NS, AFTER_CALL_NS, AFTER_GRAPH_NS, WAKE_UP_NS = 1_500, 10_000, 49_000, 8_000
# Between kernels that queue: 0.8 to 1.5 us on V100, A100 and H100. Used where no blocking call tells.
FEWEST_PAUSES = 8
USUAL_PAUSE_NS, SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS, PAUSE_STEP_NS = 1_200, 300, 4_000, 10
# Between kernels of the graphs in which a product's pause behind a memset was measured (records/*/traces).
GRAPH_PAUSE_NS = 900
# Tiles a block of a product without a counter in front, where shapes are unknown: between 1 and a block's own.
USUAL_TILES = 1.5
# Only a call that blocked for so long surely found its work running, and work that waited for it other work.
SURELY_BLOCKED_NS = 200_000
BLOCKING = re.compile("Synchronize|MemcpyWithStream")


def load_of(capture: Capture, classes: Classes, dag: Dag, *, sms: int, clusters: bool) -> ReplayRows:
    """Durations, launches, SMs and pauses of each row on GPUs of ``sms`` SMs; of starts only a rank's first is used.

    ``clusters``: collectives start in clusters on that GPU.
    """
    work, calls, facts = capture.work, capture.calls, scheduling()
    is_communication = classes.is_class(COMMUNICATION)
    issue_ns = np.zeros(len(work), dtype=np.int64)
    for rank in capture.ranks:  # what was launched before the trace is ready when its record of the host begins
        mine = calls.start_ns[calls.rank == rank]
        issue_ns[work.rank == rank] = mine.min() if len(mine) else 0
    known = work.launch != NONE
    issue_ns[known] = calls.start_ns[work.launch[known]] + AFTER_CALL_NS
    cuda_graph = np.array([name.startswith("cu") for name in capture.names], dtype=bool)
    graph = np.flatnonzero(work.graph != NONE)
    graph = graph[cuda_graph[calls.name[work.graph[graph]]]]
    issue_ns[graph] += AFTER_GRAPH_NS - AFTER_CALL_NS
    late = graph[np.isin(work.graph[graph], _begun_with_return(capture, graph))]
    issue_ns[late] = (calls.start_ns + calls.dur_ns)[work.launch[late]]
    alone = known & (work.graph == NONE) & (work.category == Category.KERNEL)
    issue_ns[alone] = (calls.start_ns + calls.dur_ns)[work.launch[alone]] + AFTER_LAUNCH_NS
    for rank in capture.ranks:
        mine = np.flatnonzero(work.rank == rank)
        first_ns = int(work.start_ns[mine].min())
        # A rank whose first work waited for so long was busy with work of before that the trace has not.
        if known[mine].all() and first_ns - issue_ns[mine].min() >= SURELY_BLOCKED_NS:
            issue_ns[mine] = np.maximum(issue_ns[mine], first_ns)
    blocks, tiles = rounds_of(capture, classes, sms)
    persistent, cluster = products_of(capture)
    fetches = persistent & _behind_memset(capture, dag)
    # In graphs; where kernels are launched one by one, they pause for about as long behind a memset as otherwise.
    cleared_ns = np.where(fetches, cleared_lead_ns(facts), 0)
    clearing_ns = np.zeros(len(work), dtype=np.int64)
    if clusters and is_ours(capture):  # ours name no kernels of cuBLAS
        persistent = classes.is_class("gemm")
        cluster = np.where(persistent, facts.gemm_cluster, cluster)
        fetches = persistent & (tiles > facts.own_tiles * blocks)
        cleared_ns = np.zeros(len(work), dtype=np.int64)
        clearing_ns = np.where(fetches, round(facts.clearing_s * 1e9), 0)
    # The leads are NCCL's: a custom all-reduce begins like any other kernel (0.43 us behind one in vLLM's graphs).
    leads = is_communication & (is_ours(capture) | _of_library(capture))
    graph_lead_ns = np.where(leads, round(facts.collective_lead_graph_s * 1e9), cleared_ns)
    eager_lead_ns = round(facts.collective_lead_eager_s * 1e9)
    in_graph = ~known | (work.graph != NONE)
    return ReplayRows(
        dur_ns=work.dur_ns,
        issue_ns=issue_ns,
        early=~known,
        blocks=blocks,
        tiles=tiles,
        cluster=cluster,
        own=np.where(persistent, facts.own_tiles, 0),
        is_collective=is_communication & (blocks > 0),
        lead_ns=np.where(in_graph, graph_lead_ns, np.where(leads & _beside_others(capture), eager_lead_ns, 0)),
        graph_lead_ns=graph_lead_ns,
        clearing_ns=clearing_ns,
        fetches=fetches,
        rank=work.rank,
        sms=sms,
        clusters=clusters,
        pause_ns=USUAL_PAUSE_NS,
    )


def _begun_with_return(capture: Capture, rows: Ints) -> Ints:
    """The graphs among those of ``rows`` that began when their launch call returned, not soon after it began.

    So do graphs that the call has to upload first. The trace tells it where the GPU had nothing else to do meanwhile:
    the first kernel began nearer to the return.
    """
    work, calls = capture.work, capture.calls
    before_ns = np.full(len(work), np.iinfo(np.int64).min)
    for rank in capture.ranks:
        mine = np.flatnonzero(work.rank == rank)
        before_ns[mine[1:]] = np.maximum.accumulate(work.end_ns[mine])[:-1]
    graphs, first = np.unique(work.graph[rows], return_index=True)
    first = rows[first]  # rows go by rank, then start
    call, began_ns = work.launch[first], work.start_ns[first]
    soon_ns, return_ns = calls.start_ns[call] + AFTER_GRAPH_NS, calls.start_ns[call] + calls.dur_ns[call]
    free = np.maximum(before_ns[first], soon_ns) + LONGEST_PAUSE_NS < began_ns
    late = free & (2 * began_ns > soon_ns + return_ns) & (began_ns <= return_ns + AFTER_CALL_NS)
    return np.asarray(graphs[late])


def cleared_lead_ns(facts: Scheduling) -> int:
    """How much longer than behind other kernels of a graph a product pauses behind the memset of its counter."""
    return round(facts.cleared_pause_s * 1e9) - GRAPH_PAUSE_NS


def _of_library(capture: Capture) -> NDArray[np.bool_]:
    """Rows that NCCL (or RCCL, whose kernels are named alike) runs."""
    return np.array([LIBRARY.search(name) is not None for name in capture.names], dtype=bool)[capture.work.name]


def _beside_others(capture: Capture) -> NDArray[np.bool_]:
    """Rows of ranks with more than one stream; on a lone one a collective begins like any other kernel."""
    work = capture.work
    lanes = np.unique(np.stack([work.rank, work.stream]), axis=1)[0]
    ranks, streams = np.unique(lanes, return_counts=True)
    return np.asarray(streams[np.searchsorted(ranks, work.rank)] > 1)


def _behind_memset(capture: Capture, dag: Dag) -> NDArray[np.bool_]:
    """Rows right behind a memset on their stream."""
    behind = np.zeros(len(capture.work), dtype=bool)
    for queue in dag.queues:
        behind[queue[1:]] = capture.work.category[queue[:-1]] == Category.MEMSET
    return behind


def with_tiles(load: ReplayRows, capture: Capture, jobs: Jobs) -> ReplayRows:
    """``load`` with the tiles of persistent products whose shapes were not recorded: about those of their stand-ins.

    A grid below the SMs has a tile a block; a counter is cleared where there are more than its own a block, and
    only there (370 of 370 products with shapes, in our traces and the public ones).
    """
    work, tiles, own = capture.work, load.tiles.copy(), scheduling().own_tiles
    tile_of = [TILE.search(name) for name in capture.names]
    for row in np.flatnonzero((work.matrix == NONE) & (jobs.job != NONE) & (load.blocks == load.sms)).tolist():
        tile, job, blocks = tile_of[work.name[row]], jobs.works[jobs.job[row]], int(load.blocks[row])
        if tile is not None and isinstance(job, GemmWork):
            likely = tiles_of(tile, m=job.m, n=job.n)
            if load.fetches[row]:
                tiles[row] = max(likely, own * blocks + 1)
            else:
                tiles[row] = likely if blocks < likely <= own * blocks else round(USUAL_TILES * blocks)
    return replace(load, tiles=tiles)


def host_waits(capture: Capture) -> list[HostWait]:
    """Blocking calls in the order of their returns, with the rows that they wait for; lags as yet unknown (0).

    A device synchronisation waits for all that its rank had launched, one of a stream or an event for the work
    launched last on its thread (the trace does not say which stream).
    """
    work, calls = capture.work, capture.calls
    blocks = np.array([BLOCKING.search(name) is not None for name in capture.names], dtype=bool)
    known = np.flatnonzero(work.launch != NONE)
    launched_ns = np.full(len(work), np.iinfo(np.int64).min)
    launched_ns[known] = calls.start_ns[work.launch[known]]
    waits = []
    for rank in capture.ranks:
        mine = np.flatnonzero(work.rank == rank)
        mine = mine[np.argsort(launched_ns[mine], kind="stable")]
        lanes = {int(stream): mine[work.stream[mine] == stream] for stream in np.unique(work.stream[mine])}
        threads = {
            int(thread): rows
            for thread in np.unique(calls.thread[calls.rank == rank])
            if len(rows := mine[(work.launch[mine] != NONE) & (calls.thread[work.launch[mine]] == thread)])
        }
        for call in np.flatnonzero(blocks[calls.name] & (calls.rank == rank)).tolist():
            begin_ns, thread = int(calls.start_ns[call]), int(calls.thread[call])
            everything = "Device" in capture.names[calls.name[call]]
            groups = lanes.values() if everything else [threads[thread]] if thread in threads else []
            rows = tuple(
                int(group[place - 1])
                for group in groups
                if (place := int(np.searchsorted(launched_ns[group], begin_ns)))
            )
            if rows:
                waits.append(
                    HostWait(
                        rank=rank, call_ns=begin_ns, return_ns=begin_ns + int(calls.dur_ns[call]), lag_ns=0, rows=rows
                    )
                )  # fmt: skip
    return sorted(waits, key=lambda wait: wait.return_ns)


def fitted(load: ReplayRows, dag: Dag, waits: list[HostWait]) -> ReplayRows:
    """``load`` with the pause that the host's blocking calls tell: the longest with which none returns too early.

    The longer kernels pause, the later their work ends; no call may return before what it waited for. Work launched
    before the trace began moves as a whole, so that the first blocking call returns when it did.
    """
    sure = [wait for wait in waits if wait.return_ns - wait.call_ns >= SURELY_BLOCKED_NS]
    before = [wait for wait in sure if load.early[list(wait.rows)].all()]
    telling = [wait for wait in sure if wait not in before]

    def late_ns(load: ReplayRows, some: list[HostWait]) -> int:
        end_ns = replay(dag, load).end_ns
        return max(int(end_ns[list(wait.rows)].max()) + WAKE_UP_NS - wait.return_ns for wait in some)

    @cache
    def late_with(pause_ns: float) -> int:
        return late_ns(replace(load, pause_ns=round(pause_ns)), telling)

    if telling and late_with(SHORTEST_PAUSE_NS) < 0 < late_with(LONGEST_PAUSE_NS):
        load = replace(load, pause_ns=round(brentq(late_with, SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS, xtol=PAUSE_STEP_NS)))
    for rank in {wait.rank for wait in before}:
        first = next(wait for wait in before if wait.rank == rank)
        moved = load.early & (load.rank == rank)
        load = replace(load, issue_ns=np.where(moved, load.issue_ns - late_ns(load, [first]), load.issue_ns))
    return load


def shown_pause_ns(capture: Capture, dag: Dag) -> int | None:
    """The pause between kernels that queued, as the trace shows it (a mean: sums count); None where it shows none.

    Kernels that came together (a graph, or before the trace began) show it. Those that the host launched one by one
    also wait for SMs and counters: their pauses are believed only where they are too short to hold any of that.
    """
    work, calls = capture.work, capture.calls
    free = (work.category == Category.KERNEL) & (dag.collective == NONE)
    free &= ~(_of_library(capture) | _behind_memset(capture, dag))  # those have leads beyond the pause
    free[dag.after] = False
    known = work.launch != NONE
    ready_ns = np.full(len(work), np.iinfo(np.int64).min)
    ready_ns[known] = (calls.start_ns + calls.dur_ns)[work.launch[known]] + AFTER_CALL_NS
    together, queued = [], []
    for queue in dag.queues:
        first, second = queue[:-1], queue[1:]
        pause_ns = work.start_ns[second] - work.end_ns[first]
        fits = free[second] & (pause_ns >= 0) & (pause_ns <= LONGEST_PAUSE_NS)
        same = (work.graph[first] == work.graph[second]) & (known[first] == known[second])
        same &= (work.graph[second] != NONE) | ~known[second]
        together.append(pause_ns[fits & same])
        queued.append(pause_ns[fits & known[second] & (ready_ns[second] <= work.end_ns[first])])
    shown, hosted = np.concatenate(together), np.concatenate(queued)
    if len(shown) >= FEWEST_PAUSES:
        return round(float(np.mean(shown)))
    if len(hosted) >= FEWEST_PAUSES and np.median(hosted) < SHORTEST_PAUSE_NS:
        return round(float(np.median(hosted)))
    return None


def with_lags(waits: list[HostWait], end_ns: Ints) -> list[HostWait]:
    """``waits`` that return as they did when the work ends at ``end_ns``: the lag is what the replay leaves open.

    A call whose work had ended before it began did not block: it takes as long as in the trace, wherever it moves.
    """
    found = []
    for wait in waits:
        done_ns = int(end_ns[list(wait.rows)].max())
        if done_ns > wait.call_ns:
            found.append(replace(wait, lag_ns=wait.return_ns - done_ns))
        else:
            found.append(replace(wait, call_ns=wait.return_ns))
    return found
