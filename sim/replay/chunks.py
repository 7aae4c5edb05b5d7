"""Chunking: a product and its collective cut into parts that run in turn, a part's transfer beside the next product."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sim.replay.changes import ReplayError
from sim.replay.price import REDUCTION, Jobs
from sim.replay.run import ReplayRows
from traces.capture import NONE, Capture, Category, GpuWork
from traces.classify import COMMUNICATION, Classes
from traces.dag import Dag
from traces.records import Floats, Ints
from workloads.work import CollectiveWork, ElementwiseWork, GemmWork, Work

CHUNKABLE = re.compile(
    r"reduce_?scatter|all_?gather|all_?reduce|all_?to_?all|dispatch|combine|one_?shot|two_?shot|cross_device_reduce",
    re.IGNORECASE,
)
AWAITED = re.compile(r"all_?gather|all_?to_?all|dispatch", re.IGNORECASE)  # whose rows a product may take part by part
AT_ONCE_NS = -(10**6)  # the lead of what follows its predecessor without a pause
EXPOSED = 0.5  # a collective beside products for more of its time than this is overlapped already


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A product with what cuBLAS puts around it on its stream: a counter set to zero, the sum of parts along k."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Products to be cut, and for each collective the products that feed it and those that wait for it (``units``)."""

    units: Sequence[Unit]
    feeding: dict[int, list[int]]
    awaiting: dict[int, list[int]]

    @property
    def collectives(self) -> list[int]:
        """Rows of collectives to be cut."""
        return sorted(self.feeding.keys() | self.awaiting.keys())

    def partners(self, row: int) -> list[int]:
        """First rows of the products on either side of a collective."""
        numbers = (*self.feeding.get(row, ()), *self.awaiting.get(row, ()))
        return [self.units[number].rows[0] for number in numbers]

    @property
    def pairs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By each pair of rows that may be joined, the one whose parts are: a product's last or first row."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for row, numbers in self.feeding.items():
            for rows in (self.units[number].rows for number in numbers):
                found |= {(product, row): (rows[-1], row) for product in rows}
        for row, numbers in self.awaiting.items():
            for rows in (self.units[number].rows for number in numbers):
                found |= {(row, product): (row, rows[0]) for product in rows}
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedRows:
    """Rows of a replay after chunking: ``origin`` is the row before, ``is_part`` marks parts, ``stream`` is each one's.

    ``last`` is the last part of each row before. ``chunked`` counts collectives, over ranks once.
    """

    chunks: int
    origin: Ints
    is_part: NDArray[np.bool_]
    stream: Ints
    last: Ints
    dag: Dag
    chunked: int


def chains_of(capture: Capture, classes: Classes, dag: Dag, *, beside: Floats, chunks: int) -> Chains:
    """Products next to a collective, with nothing between them but an order of stream or an edge.

    A collective qualifies when it is a reduce-scatter, all-reduce, all-gather or all-to-all, is exposed (products run
    beside it, ``beside``, for at most half its time), waits for a product, or is an all-gather or all-to-all that one
    waits for, and does so on every rank that it spans. A product of fewer recorded rows than ``chunks`` stays whole.
    """
    units, unit_of, previous = _units(capture, classes, dag, chunks)
    waited: dict[int, list[int]] = defaultdict(list)
    for before, after in zip(dag.before.tolist(), dag.after.tolist(), strict=True):
        waited[after].append(before)
    fit = _chunkable(capture, classes, CHUNKABLE) & (beside <= EXPOSED)
    takes = fit & _chunkable(capture, classes, AWAITED)
    feeding: dict[int, list[int]] = defaultdict(list)
    awaiting: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(fit).tolist():
        causes = {unit_of[cause] for cause in (*waited.get(row, ()), previous[row]) if cause in unit_of}
        feeding[row] += sorted(causes)
    for number, unit in enumerate(units):
        causes_of_unit = {cause for member in unit.rows for cause in waited.get(member, ())} | {previous[unit.rows[0]]}
        for row in causes_of_unit:
            if row != NONE and takes[row]:
                awaiting[row].append(number)
    chunked = {row for row in feeding if feeding[row]} | set(awaiting)
    lost = {int(dag.collective[row]) for row in np.flatnonzero(dag.collective != NONE).tolist() if row not in chunked}
    chunked = {row for row in chunked if int(dag.collective[row]) not in lost}
    kept = sorted({product for row in chunked for product in (*feeding[row], *awaiting[row])})
    place = {number: at for at, number in enumerate(kept)}
    return Chains(
        units=[units[number] for number in kept],
        feeding={row: [place[product] for product in feeding[row]] for row in chunked if feeding[row]},
        awaiting={row: [place[product] for product in awaiting[row]] for row in chunked if awaiting[row]},
    )


def _chunkable(capture: Capture, classes: Classes, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Communication of a kind that ``pattern`` names: by the recorded operation, else by the kernel's name."""
    work = capture.work
    by_name = np.array([pattern.search(name) is not None for name in capture.names], dtype=bool)
    fits = by_name[work.name]
    operations = [args.operation for args in capture.collectives]
    chosen = np.array([*(pattern.search(operation) is not None for operation in operations), False], dtype=bool)
    known = np.array([*(bool(operation) for operation in operations), False], dtype=bool)
    return np.where(known[work.collective], chosen[work.collective], fits) & classes.is_class(COMMUNICATION)


def _units(
    capture: Capture, classes: Classes, dag: Dag, chunks: int
) -> tuple[list[Unit], dict[int, int], dict[int, int]]:
    """Products with what is around them; unit by row; the row before each on its stream."""
    work = capture.work
    sums = np.array([REDUCTION.search(name) is not None for name in capture.names], dtype=bool)[work.name]
    rows_of = np.array([*(product.m for product in capture.matrices), chunks])[work.matrix]
    product = classes.is_class("gemm") & ~sums & (rows_of >= chunks)
    zeroed = work.category == Category.MEMSET
    units: list[Unit] = []
    unit_of: dict[int, int] = {}
    previous: dict[int, int] = {}
    for queue in dag.queues:
        lane = queue.tolist()
        previous |= dict(zip(lane, [NONE, *lane[:-1]], strict=True))
        for at in np.flatnonzero(product[queue]).tolist():
            before = [row for row in lane[max(0, at - 1) : at] if zeroed[row]]
            behind = [row for row in lane[at + 1 : at + 2] if sums[row]]
            unit = Unit(rows=(*before, lane[at], *behind))
            unit_of |= dict.fromkeys(unit.rows, len(units))
            units.append(unit)
    return units, unit_of, previous


def split(work: GpuWork, dag: Dag, chains: Chains, chunks: int) -> ChunkedRows:
    """``dag`` with the chains cut into ``chunks`` parts, which follow one another.

    Part i of a product comes before part i of the collective that it feeds, and after part i of the one that it waits
    for; whoever else waits for a row waits for its last part. A collective on the stream of its product gets a stream
    beside it, with waits for what came before it there, and of what came after it.
    """
    chunked = {row for unit in chains.units for row in unit.rows} | set(chains.collectives)
    parts = np.ones(len(work), dtype=np.int64)
    parts[sorted(chunked)] = chunks
    first = np.cumsum(parts) - parts
    origin = np.repeat(np.arange(len(work)), parts)
    part = np.arange(len(origin)) - first[origin]

    def parts_of(row: int) -> list[int]:
        return list(range(int(first[row]), int(first[row] + parts[row])))

    unit_of = {unit.rows[0]: unit.rows for unit in chains.units}
    inner = {row for unit in chains.units for row in unit.rows[1:]}
    queues, stream, joints = [], work.stream[origin], []
    beside = {rank: int(work.stream[work.rank == rank].max()) for rank in np.unique(work.rank).tolist()}
    for queue in dag.queues:
        lane = queue.tolist()
        here = set(lane)
        moved = [row for row in lane if any(partner in here for partner in chains.partners(row))]
        away = set(moved)
        for kept in ([row for row in lane if row not in away], moved):
            of_unit = [unit_of.get(row, (row,)) for row in kept if row not in inner]
            together = (zip(*(parts_of(row) for row in rows), strict=True) for rows in of_unit)
            queues.append(np.array([member for unit in together for same in unit for member in same], dtype=np.int64))
        if moved:
            beside[int(work.rank[lane[0]])] += 1
            stream[queues[-1]] = beside[int(work.rank[lane[0]])]
        joints += [pair for pair in pairwise(lane) if not away.isdisjoint(pair)]
    edges = dict.fromkeys(joints, 1.0)
    for before, after, sure in zip(dag.before.tolist(), dag.after.tolist(), dag.confidence.tolist(), strict=True):
        edges[before, after] = max(sure, edges.get((before, after), 0.0))
    paired = chains.pairs
    found = {
        (parts_of(before)[-1], parts_of(after)[0]): sure
        for (before, after), sure in edges.items() if (before, after) not in paired
    }  # fmt: skip
    for before, after in paired.values():
        found |= dict.fromkeys(zip(parts_of(before), parts_of(after), strict=True), 1.0)
    common = int(dag.collective.max(initial=NONE)) + 1
    of_row = dag.collective[origin]
    numbers = dag.collective[chains.collectives]
    return ChunkedRows(
        chunks=chunks,
        origin=origin,
        is_part=parts[origin] > 1,
        stream=stream,
        last=first + parts - 1,
        dag=replace(
            dag,
            queues=[queue for queue in queues if len(queue)],
            before=np.array([before for before, _ in found], dtype=np.int64),
            after=np.array([after for _, after in found], dtype=np.int64),
            confidence=np.array(list(found.values()), dtype=np.float64),
            collective=np.where(of_row == NONE, NONE, of_row + part * common),
        ),
        chunked=len(np.unique(numbers[numbers != NONE])) + int((numbers == NONE).sum()),
    )


def split_jobs(jobs: Jobs, parts: ChunkedRows, whole: NDArray[np.bool_]) -> Jobs:
    """The jobs of all parts; rows where ``whole`` holds keep theirs in each part."""
    works = list(jobs.works)
    place: dict[Work, int] = {work: number for number, work in enumerate(works)}
    job = jobs.job[parts.origin]
    small: dict[int, int] = {NONE: NONE}
    for number in np.unique(job[parts.is_part & ~whole]).tolist():
        if number != NONE:
            work = part_of(works[number], parts.chunks)
            small[number] = place.setdefault(work, len(place))
    job[parts.is_part & ~whole] = [small[number] for number in job[parts.is_part & ~whole].tolist()]
    as_copy, as_product = (
        np.where(parts.is_part, NONE, column[parts.origin]) for column in (jobs.as_copy, jobs.as_product)
    )
    sized = jobs.sized[parts.origin]
    return replace(jobs, works=tuple(place), job=job, as_copy=as_copy, as_product=as_product, sized=sized)


def part_of(work: Work, chunks: int) -> Work:
    """One of ``chunks`` parts of ``work`` along its rows; those of a collective share its bytes.

    >>> part_of(GemmWork(m=8192, n=5120, k=8192), 4).m
    2048
    """
    match work:
        case GemmWork():
            return replace(work, m=-(-work.m // chunks))
        case CollectiveWork():
            return replace(work, buffer_bytes=-(-work.buffer_bytes // chunks))
        case ElementwiseWork():
            return replace(work, rows=-(-work.rows // chunks), bytes_moved=-(-work.bytes_moved // chunks))
    raise ReplayError(f"chunks = {chunks}: cannot cut a {type(work).__name__}")


def split_load(
    load: ReplayRows, parts: ChunkedRows, factor: Floats, units: Sequence[Unit], launched: Ints
) -> ReplayRows:
    """``load`` of all parts; each takes ``factor`` times as long as the row that it is a part of.

    A product's part has the tiles that the library launches for as few rows (``launched``; 0: unknown, its share of
    the whole's), in the rounds that these need on a GPU that nobody else uses. If no block of it fetches any, nothing
    clears a counter before it.
    """
    origin, products = parts.origin, parts.is_part & ~load.is_collective[parts.origin]
    tiles, blocks = load.tiles[origin], load.blocks[origin]
    tiles = np.where(products, np.where(launched > 0, launched, -(-tiles // parts.chunks)), tiles)
    blocks = np.where(products, np.minimum(blocks, tiles), blocks)
    fetches = load.fetches[origin] & (~products | (tiles > load.own[origin] * blocks))
    whole = set(origin[load.fetches[origin] & ~fetches].tolist())
    needless = np.isin(origin, [before for unit in units for before, row in pairwise(unit.rows) if row in whole])
    dur_ns = np.where(needless, 0, load.dur_ns[origin] * factor)

    def lead(column: Ints) -> Ints:
        return np.where(needless, AT_ONCE_NS, np.where(load.is_collective[origin] | fetches, column[origin], 0))

    rounds = None
    if load.rounds is not None:
        alone = -(-tiles // np.maximum(blocks, 1))
        rounds = np.where(products & (blocks > 0), alone, load.rounds[origin])
    return replace(
        load,
        dur_ns=np.rint(dur_ns).astype(np.int64),
        issue_ns=load.issue_ns[origin],
        early=load.early[origin],
        blocks=blocks,
        tiles=tiles,
        cluster=load.cluster[origin],
        own=load.own[origin],
        is_collective=load.is_collective[origin],
        lead_ns=lead(load.lead_ns),
        graph_lead_ns=lead(load.graph_lead_ns),
        clearing_ns=np.where(fetches, load.clearing_ns[origin], 0),
        fetches=fetches,
        rank=load.rank[origin],
        rounds=rounds,
        contest=None,
    )
