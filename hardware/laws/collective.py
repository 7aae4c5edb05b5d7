"""Collectives as kernels: their terms by algorithm, and what they take from other kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.collective_time import (
    DEFAULT_CTAS,
    SMALL_BYTES,
    CollectiveCoefficients,
    bus_bytes,
    default_ctas,
    loop_of,
    moving_s,
    seconds_within,
)
from hardware.laws.in_switch import IN_SWITCH_FROM, InSwitch, in_switch_bytes, in_switch_s
from hardware.laws.nccl import RINGS, added_from, protocol
from hardware.laws.routes import (
    DIRECT_CTAS,
    NVLS_TREE,
    Span,
    between_nodes,
    direct_bytes,
    direct_choice,
    direct_s,
    pcie_bus_bytes_per_s,
    tree_s,
)
from hardware.laws.sizes import CollectiveSizes
from hardware.laws.terms import KernelTerms
from hardware.scheduling import scheduling

# SMs in the weight of a flow that holds none.
LEAST_SMS = 1e-9
# Bytes of a send between two ranks for each block that the library takes, and its most blocks (docs/laws.md, "Blocks by
# default"; sendrecv_ring rows of collective.jsonl and pair.jsonl).
BYTES_PER_SEND_CTA, MOST_SEND_CTAS = 256 * 2**10, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How kernels slow one another down, fitted by ``python -m sim.validation.contention`` on kernel rows.

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


# Before sim.validation.contention has run: kernels take nothing from one another but SMs.
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

    A reduce-scatter of n chunks reads its own n, receives n - 1, reads these and writes one; an all-gather receives
    n - 1, reads and stores them and reads one; an all-reduce is both. Other operations receive, read, store and read
    each byte once.

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


def send_blocks(buffer_bytes: int) -> int:
    """Blocks that the library gives one point-to-point transfer, at most 32.

    >>> send_blocks(8), send_blocks(4 * 2**20), send_blocks(2**30)
    (1, 16, 32)
    """
    return min(MOST_SEND_CTAS, max(1, buffer_bytes // BYTES_PER_SEND_CTA))


def even_buffer(world: int, sent_bytes: int, received_bytes: int) -> int:
    """The buffer of an even all-to-all in which a rank moves as many bytes as in its busier direction.

    Through a switch only a rank's totals count, not their destinations.

    >>> even_buffer(4, 300, 600)
    800
    """
    return round(max(sent_bytes, received_bytes) * world / (world - 1))


@lru_cache(maxsize=65536)
def collective_base_terms(
    coefficients: CollectiveCoefficients,
    sharing: Sharing,
    sizes: CollectiveSizes,
    gpu: GpuSpec,
    *,
    adder: InSwitch | None = None,
) -> KernelTerms:
    """Terms of one collective: loop cost as measured, or its cost inside a step.

    ``adder``: the additions of the switch of these ranks; None without such a switch.
    """
    c = coefficients
    op, world, buffer_bytes, ctas, in_graph = sizes.op, sizes.world, sizes.buffer_bytes, sizes.ctas, sizes.in_graph
    algorithm, span, clusters, sms = sizes.algorithm, sizes.span, gpu.clusters, gpu.sms
    if world < 2:
        raise HardwareError(f"{op} over {world} rank: a collective needs at least 2")
    if ctas == 0:
        return _copy_engine_terms(c, sharing, sizes, gpu)
    blocks = default_ctas(op) if ctas is None else ctas
    one_node = span is None or span.nodes == 1
    over_pcie = not gpu.link_bytes_per_s
    if algorithm == "auto":
        # Serving engines read peers over PCIe where there is one (vLLM's custom_all_reduce.py).
        reads_peers = one_node and (world == 2 or not over_pcie)
        algorithm = direct_choice(world, buffer_bytes) if reads_peers else "library"
    moved, hbm_bytes = bus_bytes(op, world, buffer_bytes), 0.0
    _, loop_w, measured = loop_of(c, op, world, buffer_bytes, blocks)
    moved_s = beyond_bytes = 0.0
    taken = algorithm

    def inside(name: str, ranks: int, size: float) -> float:
        if not over_pcie:
            return seconds_within(c, name, ranks, size, blocks, in_graph)
        latency_s = seconds_within(c, name, ranks, min(size, SMALL_BYTES), blocks, in_graph)
        sent = size if name == "send" else bus_bytes(name, ranks, size)
        return latency_s + sent / pcie_bus_bytes_per_s(ranks, gpu.pcie_bytes_per_s)

    if algorithm in ("one_shot", "two_shot"):
        if not one_node:
            raise HardwareError(f"all_reduce = '{algorithm}' reads peers of one node, these {world} ranks span several")
        floor_s = direct_s(algorithm, world, buffer_bytes, gpu.link_bytes_per_s or gpu.pcie_bytes_per_s)
        moved = direct_bytes(algorithm, world, buffer_bytes)
        blocks, measured = min(blocks, DIRECT_CTAS), False
        clusters = False  # only NCCL's kernels were seen to start in clusters
    elif span is not None and not one_node:
        if algorithm == "nvls" and adder is None:
            raise HardwareError(_no_switch(world))
        # With blocks of one's own the library adds nothing in switches, unless it is told to.
        large = buffer_bytes >= added_from(span.per_node, c.slower_link, c.library)
        adds = adder if (ctas is None and large) or algorithm == "nvls" else None
        way = between_nodes(op, algorithm, span, buffer_bytes, inside, adds)
        floor_s, beyond_bytes, measured, taken = way.time_s, way.beyond_bytes, False, way.name
        if taken == NVLS_TREE and adder is not None:
            blocks, moved, hbm_bytes = adder.blocks, in_switch_bytes(span.per_node, buffer_bytes), 2.0 * buffer_bytes
    elif algorithm == "tree":
        chain = Span(nodes=1, per_node=world, nic_bytes_per_s=math.inf, nic_latency_s=0.0)
        floor_s, measured = tree_s(chain, buffer_bytes, inside), False
    else:
        floor_s = inside(op, world, buffer_bytes)
        moved_s = moving_s(c, op, world, buffer_bytes, blocks, in_graph)
        taken = "ring" if op == "broadcast" else "pairs"
        if op in RINGS:
            taken = f"ring {protocol(op, world, buffer_bytes, c.slower_link, c.library)}"
        if op == "all_reduce" and algorithm == "nvls" and adder is None:
            raise HardwareError(_no_switch(world))
        if op == "all_reduce" and adder is not None and algorithm in ("library", "nvls"):
            # The library's tuner decides by lines of its own, not by what takes least.
            chosen = ctas is None and buffer_bytes >= added_from(world, c.slower_link, c.library)
            if algorithm == "nvls" or chosen:
                blocks = adder.blocks if ctas is None else ctas
                added_s = in_switch_s(adder, world, buffer_bytes)
                floor_s, moved_s, measured, taken = added_s, 0.0, False, "nvls"
                moved = in_switch_bytes(world, buffer_bytes)
                hbm_bytes = 2.0 * buffer_bytes  # read once for the switch, and the sum written
    if in_graph:
        power_w, energy_j = c.step_power_w, c.bus_byte_energy_j * moved + c.call_energy_j
    else:
        power_w, energy_j = 0.0, loop_w * floor_s
    per_block, waiting_w = sharing.sms_per_cta, c.waiting_power_w
    if op == "send":
        blocks = send_blocks(buffer_bytes) if ctas is None else ctas
        waiting_w = c.waiting_power_w * blocks / DEFAULT_CTAS
    cluster = scheduling().collective_cluster
    if clusters and blocks < cluster:
        per_block *= 2.0
    held = min(blocks * per_block, float(sms))
    return KernelTerms(
        floor_s=floor_s,
        blocks=min(blocks, int(sms / per_block)),
        cycles_per_block=0.0,
        quantised=False,
        sms_per_block=per_block,
        cluster=cluster if clusters and blocks % cluster == 0 else 1,
        link_bytes=moved,
        beyond_bytes=beyond_bytes,
        hbm_bytes=hbm_bytes or sharing.traffic_scale * ring_traffic(op, world) * moved,
        link_energy_j=energy_j,
        sm_power_w=power_w * sms / held,
        waiting_power_w=waiting_w,
        hbm_weight_per_sm=sharing.hbm_weight_per_sm * sharing.sms_per_cta / per_block,
        beside_slowdown=sharing.beside_slowdown,
        moving_cycles=moved_s * gpu.max_clock_hz,
        extrapolated=not measured,
        way=taken,
    )


def _no_switch(world: int) -> str:
    return (
        f"all_reduce = 'nvls' is added in an NVSwitch of Hopper or later, over {IN_SWITCH_FROM} ranks or more of one "
        f"node: these {world} ranks have none"
    )


def _copy_engine_terms(
    c: CollectiveCoefficients, sharing: Sharing, sizes: CollectiveSizes, gpu: GpuSpec
) -> KernelTerms:
    """An exchange by copy engines: time and energy of the library's, no SMs; not measured by us."""
    if not sizes.op.startswith("send"):
        raise HardwareError(f"{sizes.op}: copy engines move data and cannot add: give it blocks")
    kernels = collective_base_terms(c, sharing, replace(sizes, ctas=None, algorithm="library", span=None), gpu)
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
        way="copy engine",
    )
