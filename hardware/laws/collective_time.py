"""Seconds of collectives: measured tables of bare loops, what a step saves, and a law for other world sizes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hardware.laws.nccl import RINGS, level_from, pairs_seconds, ring_seconds
from hardware.laws.nccl_paces import ring_steps
from inputs.same import Same

# Blocks that NCCL takes by default: rings (profiler traces), exchanges between pairs (collective rows; docs/laws.md,
# "Blocks by default").
DEFAULT_CTAS, DEFAULT_PAIR_CTAS = 24, 32
# Blocks whose rate no link bounds, where a collective has no table of its own.
FEW_CTAS = 2
# NCCL's own ring latency model, us: base of the LL protocol and per step over NVLink (public tuning table of
# NCCL, tuning.cc: 6.6 and 0.6).
RING_BASE_S, RING_STEP_S = 6.6e-6, 0.6e-6
# A bare loop's host overhead is hidden behind longer transfers: full up to the first, gone at the second (bytes).
HIDE_FROM, HIDE_TO = 8 * 2**20, 32 * 2**20
# Bytes of a transfer that takes its latency only.
SMALL_BYTES = 8192
# Operations with a law for any world.
_CARRIED = (*RINGS, "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Loop measurements of one collective at one world size: rows of (ctas, bytes, seconds, watts above idle)."""

    op: str
    world: int
    rows: tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCoefficients:
    """Tables and what in_context and contention rows add.

    Inside a step a collective draws ``step_power_w`` above idle while it runs, plus energies per bus byte; a rank that
    waits draws ``waiting_power_w``. Links that exchange anything draw ``links_power_w`` a GPU all the time.
    ``slower_link``: how many times slower than an H100's the links are; ``library``: the architecture whose paces the
    library keeps (:mod:`hardware.laws.nccl_data`). Where they are not an H100's the tables are another GPU's.
    """

    tables: tuple[CollectiveTable, ...]
    step_power_w: float
    bus_byte_energy_j: float
    call_energy_j: float
    waiting_power_w: float
    links_power_w: float = 0.0
    slower_link: float = 1.0
    library: str = "hopper"


def default_ctas(op: str) -> int:
    """Blocks of ``op`` where nobody asks for a number."""
    return DEFAULT_PAIR_CTAS if op in ("all_to_all", "sendrecv_ring", "send") else DEFAULT_CTAS


def bus_bytes(op: str, world: int, buffer_bytes: float) -> float:
    """Bytes that one rank sends, mean over ranks: 2 (n-1)/n B for all-reduce, (n-1)/n B for its halves and
    all-to-all, B/2 for a send from one to the other, B else.

    >>> bus_bytes("all_reduce", 4, 1000)
    1500.0
    """
    if op == "all_reduce":
        return 2.0 * (world - 1) / world * buffer_bytes
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (world - 1) / world * buffer_bytes
    if op == "send":
        return buffer_bytes / 2.0  # one of the two ranks sends
    return float(buffer_bytes)


def seconds_within(
    c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float, ctas: int, in_graph: bool
) -> float:
    """Seconds within a node: as in a bare loop, or less what a graph hides of a launch."""
    loop_s, _, _ = loop_of(c, op, world, buffer_bytes, ctas)
    return max(loop_s - _launch_s(c, op, world, buffer_bytes), 0.3 * loop_s) if in_graph else loop_s


def _launch_s(c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float) -> float:
    """Seconds of a bare loop that its launches take, of longer transfers none: what its smallest size takes too long.

    A world without a table is launched like the nearest one with it. The host launches what has a law of its own as
    fast as it did for the table, whose times were stretched by this GPU's links.
    """
    table = _table(c, op, world) or _nearest(c, op, world)
    smallest_s, _, _ = _at(c, table, SMALL_BYTES, default_ctas(op))
    smallest_s /= c.slower_link if op in _CARRIED else 1.0
    launch_s = max(0.0, smallest_s - RING_BASE_S - RING_STEP_S * ring_steps(table.op, table.world))
    hidden = min(max(math.log(buffer_bytes / HIDE_FROM) / math.log(HIDE_TO / HIDE_FROM), 0.0), 1.0)
    return launch_s * (1.0 - hidden)


def moving_s(c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float, ctas: int, in_graph: bool) -> float:
    """Seconds that ``ctas`` blocks need at the maximum clock, at the rate of a few blocks, which no link bounds.

    Loops run at that clock. Under the power cap these seconds grow as the clock falls, while many blocks are bound by
    the link (docs/laws.md, "Blocks and the clock").
    """
    table = _table(c, op, world)
    few = min(_curves(table)) if table is not None else FEW_CTAS
    own_s = seconds_within(c, op, world, buffer_bytes, ctas, in_graph)
    if few >= ctas:
        return own_s
    latency_s = seconds_within(c, op, world, SMALL_BYTES, few, in_graph)
    return min(own_s, latency_s + (seconds_within(c, op, world, buffer_bytes, few, in_graph) - latency_s) * few / ctas)


def loop_of(
    c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float, ctas: int
) -> tuple[float, float, bool]:
    """Loop seconds and watts above idle: the table of this world, or what follows for it from others.

    The library's rings and all-to-alls take what :mod:`hardware.laws.nccl` says of their protocol, with other numbers
    of blocks as many times that as the nearest table does; the rest keeps the bytes on the link and adds the latency of
    its steps.
    """
    table = _table(c, op, world)
    carried = op in _CARRIED and (table is None or (c.slower_link, c.library) != (1.0, "hopper"))
    if table is not None and not carried:
        return _at(c, table, buffer_bytes, ctas)
    if op == "send":
        return loop_of(c, "sendrecv_ring", world, buffer_bytes, ctas)  # links carry both ways at once
    nearest = _nearest(c, op, world)
    same_bus = buffer_bytes * bus_bytes(op, world, 1.0) / bus_bytes(nearest.op, nearest.world, 1.0)
    time_s, power_w, _ = _at(c, nearest, same_bus, ctas)
    if not carried:
        steps = ring_steps(op, world) - ring_steps(nearest.op, nearest.world)
        return max(time_s + RING_STEP_S * steps, 0.5 * time_s), power_w, False
    launch_s = _launch_s(c, op, world, buffer_bytes)
    if op not in RINGS:
        own_s = pairs_seconds(world, buffer_bytes, c.slower_link, c.library)
        return own_s * _slower(c, nearest, same_bus, ctas) + launch_s, power_w, False
    # Over sizes of one time blocks of one's own take what the slowest of them takes: more bytes never take less.
    level = level_from(op, world, buffer_bytes, c.slower_link, c.library) / buffer_bytes * same_bus
    sizes = [same_bus, level, *(size for _, size, _, _ in nearest.rows if level < size < same_bus)]
    slower = max(_slower(c, nearest, size, ctas) for size in sizes)
    return ring_seconds(op, world, buffer_bytes, c.slower_link, c.library) * slower + launch_s, power_w, False


def _slower(c: CollectiveCoefficients, table: CollectiveTable, buffer_bytes: float, ctas: int) -> float:
    """How many times longer than in the library's blocks a loop of ``table`` takes in ``ctas``."""
    free = default_ctas(table.op)
    if ctas == free:
        return 1.0
    return _at(c, table, buffer_bytes, ctas)[0] / _at(c, table, buffer_bytes, free)[0]


def _nearest(c: CollectiveCoefficients, op: str, world: int) -> CollectiveTable:
    """The table of the nearest world; a send's is that of rings of sends, whose links carry both ways at once.

    An operation without any takes those of all-gathers.
    """
    name = "sendrecv_ring" if op == "send" else op
    known = [t for t in c.tables if t.op == name] or [t for t in c.tables if t.op == "all_gather"]
    return min(known, key=lambda t: abs(math.log(t.world / world)))


def _at(c: CollectiveCoefficients, table: CollectiveTable, buffer_bytes: float, ctas: int) -> tuple[float, float, bool]:
    """The table at ``ctas`` blocks. One measured with a single number of blocks follows the all-gather for others.

    Blocks of all collectives move bytes at about the same rate, so that the all-gather of as many bus bytes stands in
    (docs/laws.md: within 28 % of send/receive rows, all-to-alls at most 34 % too fast).
    """
    if len(_curves(table)) > 1:
        return _interpolate(table, buffer_bytes, ctas)
    (count,) = _curves(table)
    time_s, power_w, inside = _interpolate(table, buffer_bytes, count)
    gather = _table(c, "all_gather", table.world)
    if ctas == count or gather is None:
        return time_s, power_w, inside and ctas == count
    size = buffer_bytes * bus_bytes(table.op, table.world, 1.0) / bus_bytes("all_gather", table.world, 1.0)
    asked, known = (_interpolate(gather, size, blocks) for blocks in (ctas, count))
    return time_s * asked[0] / known[0], max(0.0, power_w + asked[1] - known[1]), False


def _table(c: CollectiveCoefficients, op: str, world: int) -> CollectiveTable | None:
    return next((t for t in c.tables if t.op == op and t.world == world), None)


# By number of blocks: logs of sizes, logs of seconds, and watts above idle.
_Curves = Mapping[int, tuple[Sequence[float], Sequence[float], Sequence[float]]]


def _interpolate(table: CollectiveTable, buffer_bytes: float, ctas: int) -> tuple[float, float, bool]:
    """Log-log in bytes along each number of blocks; then time in blocks' share of the bytes (1 / blocks)."""
    curves, log_bytes = _curves(table), math.log(buffer_bytes)
    counts = sorted(curves)
    near = _next_to(counts, ctas)
    watts = [float(np.interp(log_bytes, curves[count][0], curves[count][2])) for count in near]
    power_w = float(np.interp(math.log(ctas), [math.log(count) for count in near], watts))
    inside = counts[0] <= ctas <= counts[-1] and log_bytes <= max(x[-1] for x, _, _ in curves.values())
    return _seconds(curves, log_bytes, ctas), power_w, inside


def _seconds(curves: _Curves, log_bytes: float, ctas: int) -> float:
    counts = sorted(curves)
    near = _next_to(counts, ctas)
    times = []
    for count in near:
        x, log_t, _ = curves[count]
        # Beyond the largest size time grows with bytes.
        times.append(math.exp(float(np.interp(log_bytes, x, log_t)) + max(log_bytes - x[-1], 0.0)))
    share = [1.0 / count for count in near]
    return float(np.interp(1.0 / ctas, share[::-1], times[::-1]))


def _next_to(counts: Sequence[int], ctas: int) -> Sequence[int]:
    """Those of sorted ``counts`` between which ``ctas`` lies; itself where it is among them.

    >>> _next_to([2, 4, 8], 6), _next_to([2, 4, 8], 4), _next_to([2, 4, 8], 16)
    ([4, 8], [4], [8])
    """
    above = bisect_left(counts, ctas)
    return [ctas] if ctas in counts[above : above + 1] else counts[max(above - 1, 0) : above + 1]


def no_less(values: Sequence[float]) -> list[float]:
    """What comes nearest to ``values`` with none less than the one before it: neighbours share their mean.

    >>> no_less([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    ends = range(len(values))
    return [max(min(float(np.mean(values[a : b + 1])) for b in ends[i:]) for a in ends[: i + 1]) for i in ends]


def _curves(table: CollectiveTable) -> _Curves:
    """The curves of a table, which is known by which one it is: its rows take longer to compare than to read."""
    return _curves_of(Same(table))


@lru_cache(maxsize=256)
def _curves_of(one: Same[CollectiveTable]) -> _Curves:
    """Each number of blocks over all sizes, never quicker with more bytes: loops of small sizes differ by some % a run.

    Below its smallest size it takes what those that reach further down take, at most its own time at that size, and the
    cost of its own bytes where it is slower than they are there.
    """
    rows: dict[int, list[tuple[float, float, float]]] = {}
    for ctas, size, time_s, power_w in sorted(one.held.rows):
        rows.setdefault(ctas, []).append((math.log(size), time_s, power_w))
    rows = {ctas: own for ctas, own in rows.items() if len(own) >= 2} or rows
    curves: dict[int, tuple[list[float], list[float], list[float]]] = {}
    for start in sorted({own[0][0] for own in rows.values()}):
        reaching = dict(curves)
        below = sorted({size for x, _, _ in reaching.values() for size in x if size < start})
        for ctas, own in rows.items():
            if own[0][0] != start:
                continue
            x, seconds, watts = (list(column) for column in zip(*own, strict=True))
            seconds = no_less(seconds)
            slower_s = max(seconds[0] - _seconds(reaching, start, ctas), 0.0) if reaching else 0.0
            down = [min(_seconds(reaching, b, ctas), seconds[0]) + slower_s * math.exp(b - start) for b in below]
            log_t = [math.log(s) for s in (*down, *seconds)]
            curves[ctas] = ([*below, *x], log_t, [*(watts[0] for _ in below), *watts])
    return curves
