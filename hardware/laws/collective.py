"""Collectives: measured tables of loop latency and power, what a step saves, and a law for other world sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from hardware.errors import HardwareError
from hardware.laws.routes import DIRECT_CTAS, Span, between_nodes_s, direct_bytes, direct_choice, direct_s, tree_s
from hardware.laws.terms import KernelTerms

# Blocks that NCCL takes by itself on these machines: rings 24 (profiler traces), exchanges between pairs 32 (collective
# rows: an all-to-all takes the same time with 32 blocks as with none asked for, 504 and 506 us at 256 MiB).
DEFAULT_CTAS, DEFAULT_PAIR_CTAS = 24, 32
FEW_CTAS = 2
# What the engine takes for SMs in the weight of a flow that holds none.
LEAST_SMS = 1e-9
# A send between two ranks: at 4 MiB the library's choice takes as long as 16 forced blocks, from 16 MiB on as long as
# 32 (sendrecv_ring rows of collective.jsonl and pair.jsonl).
BYTES_PER_SEND_CTA, MOST_SEND_CTAS = 256 * 2**10, 32
# NCCL's own ring latency model, us: base of the LL protocol and per step over NVLink (public tuning table of
# NCCL, tuning.cc: 6.6 and 0.6).
RING_BASE_S, RING_STEP_S = 6.6e-6, 0.6e-6
# A bare loop's host overhead is hidden behind longer transfers: full up to the first, gone at the second (bytes).
HIDE_FROM, HIDE_TO = 8 * 2**20, 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Loop measurements of one collective at one world size: rows of (ctas, bytes, seconds, watts above idle)."""

    op: str
    world: int
    rows: tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCoefficients:
    """Tables and what in_context and contention rows add.

    Inside a step a collective draws ``step_power_w`` above idle while it runs, plus energies per bus byte;
    a rank that waits draws ``waiting_power_w``.
    """

    tables: tuple[CollectiveTable, ...]
    step_power_w: float
    bus_byte_energy_j: float
    call_energy_j: float
    waiting_power_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What kernels take from one another, fitted by ``python -m sim.studies.contention`` on kernel rows.

    A block of a collective holds ``sms_per_cta`` SMs and claims HBM like ``hbm_weight_per_sm`` SMs of streaming
    kernels each. A collective moves ``traffic_scale`` times the HBM bytes that :func:`ring_traffic` counts, and takes
    ``beside_slowdown`` times as long while compute runs beside it. Kernels that share HBM get ``mixed_hbm_share`` of
    the best rate of a kernel alone. ``source``, ``command`` and ``standard_errors`` say where they come from;
    ``left_out`` holds, for each number of blocks, rows and mean errors of both slow-downs when fitted without them.
    """

    sms_per_cta: float
    beside_slowdown: float
    hbm_weight_per_sm: float
    traffic_scale: float
    mixed_hbm_share: float
    source: str
    command: str
    standard_errors: Mapping[str, float] = field(default_factory=dict, hash=False)
    left_out: Mapping[int, tuple[int, float, float]] = field(default_factory=dict, hash=False)
    row_digests: tuple[str, ...] = ()


# Before sim.studies.contention has run: nobody takes anything from anybody but SMs.
UNFITTED = Sharing(
    sms_per_cta=1.0,
    beside_slowdown=1.0,
    hbm_weight_per_sm=1.0,
    traffic_scale=1.0,
    mixed_hbm_share=1.0,
    source="not fitted",
    command="",
)


def ring_traffic(op: str, world: int) -> float:
    """HBM bytes that a rank reads and writes for each byte on the bus, by count of the ring's steps.

    A reduce-scatter of n chunks reads n of its own, has n - 1 written to it, reads these and writes one; an all-gather
    has n - 1 written, reads and stores them and reads one; an all-reduce is both. Anything else is written, read,
    stored and read once.

    >>> ring_traffic("reduce_scatter", 2), ring_traffic("all_reduce", 2)
    (5.0, 4.5)
    """
    others = world - 1
    scattered, gathered = 3 * others + 2, 3 * others + 1
    match op:
        case "reduce_scatter":
            return scattered / others
        case "all_gather":
            return gathered / others
        case "all_reduce":
            return (scattered + gathered) / (2 * others)
        case _:
            return 4.0


def default_ctas(op: str) -> int:
    """Blocks of ``op`` where nobody asks for a number."""
    return DEFAULT_PAIR_CTAS if op in ("all_to_all", "sendrecv_ring", "send") else DEFAULT_CTAS


def ring_steps(op: str, world: int) -> int:
    """Steps of the ring: 2 (n - 1) for all-reduce, n - 1 for its halves and all-to-all, 1 for send/recv."""
    return {"all_reduce": 2 * (world - 1), "sendrecv_ring": 1, "send": 1}.get(op, world - 1)


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


def send_blocks(buffer_bytes: int) -> int:
    """Blocks that the library gives one point-to-point transfer, at most 32.

    >>> send_blocks(8), send_blocks(4 * 2**20), send_blocks(2**30)
    (1, 16, 32)
    """
    return min(MOST_SEND_CTAS, max(1, buffer_bytes // BYTES_PER_SEND_CTA))


def even_buffer(world: int, sent_bytes: int, received_bytes: int) -> int:
    """The buffer of an even all-to-all in which a rank moves what it moves in the busier direction.

    Through a switch only a rank's totals count, not who gets how much.

    >>> even_buffer(4, 300, 600)
    800
    """
    return round(max(sent_bytes, received_bytes) * world / (world - 1))


@lru_cache(maxsize=65536)
def collective_base_terms(
    coefficients: CollectiveCoefficients,
    sharing: Sharing,
    *,
    op: str,
    world: int,
    buffer_bytes: int,
    ctas: int | None,
    in_graph: bool,
    sms: int,
    max_clock_hz: float,
    algorithm: str = "library",
    span: Span | None = None,
    link_bytes_per_s: float = math.inf,
) -> KernelTerms:
    """Terms of one collective: loop cost as measured, or its cost inside a step.

    ``algorithm`` chooses among the ways of an all-reduce. ``span`` says how the ranks lie on nodes; None: on one.
    ``link_bytes_per_s`` is a GPU's own link rate, for reads of peers.
    """
    c = coefficients
    if world < 2:
        raise HardwareError(f"{op} over {world} rank: a collective needs at least 2")
    if ctas == 0:
        return _copy_engine_terms(
            c,
            sharing,
            op=op,
            world=world,
            buffer_bytes=buffer_bytes,
            in_graph=in_graph,
            sms=sms,
            max_clock_hz=max_clock_hz,
        )
    blocks = default_ctas(op) if ctas is None else ctas
    one_node = span is None or span.nodes == 1
    if algorithm == "auto":
        algorithm = direct_choice(world, buffer_bytes) if one_node else "library"
    moved = bus_bytes(op, world, buffer_bytes)
    _, loop_w, measured = _loop(c, op, world, buffer_bytes, blocks)
    moving_s = 0.0

    def inside(name: str, ranks: int, size: float) -> float:
        return _seconds(c, name, ranks, size, blocks, in_graph)

    if algorithm in ("one_shot", "two_shot"):
        if not one_node:
            raise HardwareError(f"all_reduce = '{algorithm}' reads peers of one node, these {world} ranks span several")
        floor_s = direct_s(algorithm, world, buffer_bytes, link_bytes_per_s)
        moved = direct_bytes(algorithm, world, buffer_bytes)
        blocks, measured = min(blocks, DIRECT_CTAS), False
    elif span is not None and not one_node:
        floor_s, measured = between_nodes_s(op, algorithm, span, buffer_bytes, inside), False
    elif algorithm == "tree":
        chain = Span(nodes=1, per_node=world, nic_bytes_per_s=math.inf, nic_latency_s=0.0)
        floor_s, measured = tree_s(chain, buffer_bytes, inside), False
    else:
        floor_s = inside(op, world, buffer_bytes)
        moving_s = _moving_s(c, op, world, buffer_bytes, blocks, in_graph)
    if in_graph:
        power_w, energy_j = c.step_power_w, c.bus_byte_energy_j * moved + c.call_energy_j
    else:
        power_w, energy_j = 0.0, loop_w * floor_s
    per_block, waiting_w = sharing.sms_per_cta, c.waiting_power_w
    if op == "send":
        blocks = send_blocks(buffer_bytes) if ctas is None else ctas
        waiting_w = c.waiting_power_w * blocks / DEFAULT_CTAS
    held = min(blocks * per_block, float(sms))
    return KernelTerms(
        floor_s=floor_s,
        blocks=min(blocks, int(sms / per_block)),
        cycles_per_block=0.0,
        quantised=False,
        sms_per_block=per_block,
        link_bytes=moved,
        hbm_bytes=sharing.traffic_scale * ring_traffic(op, world) * moved,
        link_energy_j=energy_j,
        sm_power_w=power_w * sms / held,
        waiting_power_w=waiting_w,
        hbm_weight_per_sm=sharing.hbm_weight_per_sm,
        beside_slowdown=sharing.beside_slowdown,
        moving_cycles=moving_s * max_clock_hz,
        extrapolated=not measured,
    )


def _seconds(c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float, ctas: int, in_graph: bool) -> float:
    """Seconds within a node: as in a bare loop, or less what a graph hides of a launch."""
    loop_s, _, _ = _loop(c, op, world, buffer_bytes, ctas)
    if not in_graph:
        return loop_s
    smallest_s, _, _ = _loop(c, op, world, 8192, default_ctas(op))
    launch_s = max(0.0, smallest_s - RING_BASE_S - RING_STEP_S * ring_steps(op, world))
    hidden = min(max(math.log(buffer_bytes / HIDE_FROM) / math.log(HIDE_TO / HIDE_FROM), 0.0), 1.0)
    return max(loop_s - launch_s * (1.0 - hidden), 0.3 * loop_s)


def _moving_s(c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float, ctas: int, in_graph: bool) -> float:
    """Seconds that ``ctas`` blocks need at the maximum clock, at the pace of few, which no link holds back.

    Loops run at that clock. In steps under the power cap the same blocks take longer in proportion: 361 us for 299 at
    about 1640 MHz (4 blocks gathering 32 MiB on two GPUs, a profiler trace), while 32 blocks take no longer there.
    """
    table = _table(c, op, world)
    few = min(_curves(table)) if table is not None else FEW_CTAS
    own_s = _seconds(c, op, world, buffer_bytes, ctas, in_graph)
    if few >= ctas:
        return own_s
    latency_s = _seconds(c, op, world, 8192, few, in_graph)
    return min(own_s, latency_s + (_seconds(c, op, world, buffer_bytes, few, in_graph) - latency_s) * few / ctas)


def _copy_engine_terms(
    c: CollectiveCoefficients,
    sharing: Sharing,
    *,
    op: str,
    world: int,
    buffer_bytes: int,
    in_graph: bool,
    sms: int,
    max_clock_hz: float,
) -> KernelTerms:
    """An exchange by copy engines: the time and energy of the library's, less its SMs. Not measured by us."""
    if not op.startswith("send"):
        raise HardwareError(f"{op}: copy engines move data and cannot add: give it blocks")
    kernels = collective_base_terms(
        c,
        sharing,
        op=op,
        world=world,
        buffer_bytes=buffer_bytes,
        ctas=None,
        in_graph=in_graph,
        sms=sms,
        max_clock_hz=max_clock_hz,
    )
    return replace(
        kernels,
        blocks=1,
        sms_per_block=0.0,
        sm_power_w=0.0,
        waiting_power_w=0.0,
        moving_cycles=0.0,
        beside_slowdown=1.0,  # fitted on loads that blocks wait for; a copy engine has many in flight
        hbm_weight_per_sm=sharing.hbm_weight_per_sm * DEFAULT_CTAS * sharing.sms_per_cta / LEAST_SMS,
        extrapolated=True,
    )


def _loop(c: CollectiveCoefficients, op: str, world: int, buffer_bytes: float, ctas: int) -> tuple[float, float, bool]:
    """Loop seconds and watts above idle: table at this world, or the nearest one carried over by ring steps.

    Another world size keeps the bytes on the link and adds the latency of its steps (NCCL's ring model).
    """
    table = _table(c, op, world)
    if table is not None:
        return _at(c, table, buffer_bytes, ctas)
    if op == "send":
        return _loop(c, "sendrecv_ring", world, buffer_bytes, ctas)  # links carry both ways at once
    known = [t for t in c.tables if t.op == op]
    if not known:
        known = [t for t in c.tables if t.op == "all_gather"]
    nearest = min(known, key=lambda t: abs(math.log(t.world / world)))
    same_bus = buffer_bytes * bus_bytes(op, world, 1.0) / bus_bytes(nearest.op, nearest.world, 1.0)
    time_s, power_w, _ = _at(c, nearest, same_bus, ctas)
    steps = ring_steps(op, world) - ring_steps(nearest.op, nearest.world)
    return max(time_s + RING_STEP_S * steps, 0.5 * time_s), power_w, False


def _at(c: CollectiveCoefficients, table: CollectiveTable, buffer_bytes: float, ctas: int) -> tuple[float, float, bool]:
    """The table at ``ctas`` blocks. One measured with a single number of blocks follows the all-gather for others.

    Blocks of all collectives move bytes at about the same rate, so that the all-gather of as many bus bytes tells:
    our send/receive rows with 2 to 16 blocks are met within 28 % and all-to-alls are at most 34 % too fast.
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


def _interpolate(table: CollectiveTable, buffer_bytes: float, ctas: int) -> tuple[float, float, bool]:
    """Log-log in bytes along each measured number of blocks; then time in blocks' share of the bytes (1 / blocks).

    Numbers of blocks that were measured from larger sizes only are left out where two others cover the size.
    """
    curves = _curves(table)
    log_bytes = math.log(buffer_bytes)
    inside_sizes = [n for n, (x, _, _) in curves.items() if x[0] - 1e-9 <= log_bytes <= x[-1] + 1e-9]
    counts = sorted(inside_sizes if len(inside_sizes) >= 2 else curves)
    smallest = min(counts, key=lambda n: curves[n][0][0])
    times, watts = [], []
    for count in counts:
        x, log_t, w = curves[count]
        # Beyond the largest size time grows with bytes.
        seconds = math.exp(float(np.interp(log_bytes, x, log_t)) + max(log_bytes - x[-1], 0.0))
        if log_bytes < x[0] and curves[smallest][0][0] < x[0]:
            # Below its smallest: the latency of the curve that reaches this size, and its own cost of bytes.
            at_size, at_start = (math.exp(float(np.interp(v, *curves[smallest][:2]))) for v in (log_bytes, x[0]))
            seconds = at_size + max(seconds - at_start, 0.0) * math.exp(log_bytes - x[0])
        times.append(seconds)
        watts.append(float(np.interp(log_bytes, x, w)))
    share = [1.0 / count for count in counts]
    time_s = float(np.interp(1.0 / ctas, share[::-1], times[::-1]))
    power_w = float(np.interp(math.log(ctas), [math.log(count) for count in counts], watts))
    inside = min(curves) <= ctas <= max(curves) and log_bytes <= max(x[-1] for x, _, _ in curves.values())
    return time_s, power_w, inside


@lru_cache(maxsize=256)
def _curves(table: CollectiveTable) -> Mapping[int, tuple[Sequence[float], Sequence[float], Sequence[float]]]:
    curves: dict[int, tuple[list[float], list[float], list[float]]] = {}
    for ctas, size, seconds, watts in sorted(table.rows):
        x, t, w = curves.setdefault(ctas, ([], [], []))
        x.append(math.log(size))
        t.append(math.log(seconds))
        w.append(watts)
    full = {ctas: curve for ctas, curve in curves.items() if len(curve[0]) >= 2}
    return full or curves
