"""Rules of who gets which SMs, and the words for a run in which nobody does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hardware.laws.terms import KernelTerms, time_s
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.state import Entry, Flow, Gpu


def late_part(entry: Entry, terms: KernelTerms, whole: float, clock_hz: float) -> Entry:
    """Blocks that found no SM: they start when one is free. Until then those that run take on their tiles too.

    Blocks fetch tiles one after the other (in profiler traces a product of 11 rounds, 32 blocks of which started 0.8
    rounds late, took 0.8 rounds longer, and one with 4 blocks 3.7 rounds late only 0.7). A quantity of 1 that a flow
    has left is the rounds that the whole kernel would take. Where memory sets the pace, tiles of a last, thin
    round take the time of their arithmetic alone (28 us after 86 in a product of 128 rows, waiting.jsonl).
    """
    rounds = math.ceil(terms.blocks * terms.sms_per_block / whole - 1e-9)
    slots = (entry.wanted / terms.sms_per_block, entry.held / terms.sms_per_block)
    late = Entry(entry.op, entry.class_id, entry.gpu, Flow(-1, 1), entry.wanted - entry.held, 0)
    late.key = entry.key
    late.earlier = entry
    late.tiles = round(terms.blocks * entry.wanted / whole * min(entry.flow.left, 1.0))
    late.rounds = rounds
    even = late.tiles / slots[1]
    round_s = (time_s(terms, sms=whole, sm_clock_hz=clock_hz) - terms.floor_s) / rounds
    arithmetic = min(1.0, terms.cycles_per_block / clock_hz / round_s)
    entry.flow.left = late.alone = min(math.ceil(even - 1e-9), even + arithmetic) / rounds
    late.flow.left = 0.0  # unless tiles are left when they start
    entry.wanted = entry.held
    return late


def join(entry: Entry, terms: KernelTerms, now_ps: int) -> None:
    """Late blocks begin: they and those that run fetch what tiles are left, whole ones, until there are none."""
    earlier = entry.earlier
    if earlier is None or earlier not in entry.gpu.running:
        return
    flow = earlier.flow
    flow.left = max(0.0, flow.left - flow.rate * (now_ps - flow.updated_ps))
    flow.updated_ps = now_ps
    early, late = earlier.sms / terms.sms_per_block, entry.held / terms.sms_per_block
    gone = (entry.alone - flow.left) * entry.rounds  # rounds since the first blocks began
    # The first moment at which whole tiles of both are enough, from that at which fractions would be.
    end = (entry.tiles + late * gone) / (early + late)
    while early * math.floor(end + 1e-9) + late * math.floor(end - gone + 1e-9) < entry.tiles:
        end = min(math.floor(end + 1e-9) + 1.0, gone + math.floor(end - gone + 1e-9) + 1.0)
    flow.left = max(math.floor(end + 1e-9) - gone, math.ceil(gone - 1e-9) - gone) / entry.rounds
    entry.flow.left = math.floor(end - gone + 1e-9) / entry.rounds
    flow.due_ps = -1  # its end is another now


def displace(gpu: Gpu, entry: Entry, want: float, classes: Sequence[KernelClass]) -> None:
    """A kernel of higher priority takes the SMs of fluid ones: their blocks end at once, all but one SM's."""
    for victim in gpu.running:
        terms = classes[victim.class_id].terms
        if terms.shrink == "fluid" and victim.key[0] > entry.key[0] and gpu.free < want:
            take = min(victim.held - terms.sms_per_block, want - gpu.free)
            if take > 0.0:
                victim.held -= take
                victim.sms = victim.held
                gpu.free += take


def last_round(terms: KernelTerms, sms: float, wanted: float) -> tuple[int, float]:
    """Rounds of tiles that those blocks of a kernel go through that hold ``sms``, and SMs the last round needs."""
    blocks, slots = terms.blocks * sms / wanted, sms / terms.sms_per_block
    rounds = math.ceil(blocks / slots - 1e-9)
    return rounds, (blocks - (rounds - 1) * slots) * terms.sms_per_block


def deadlock_message(graph: KernelGraph, flows: Mapping[int, Flow], gpus: Sequence[Gpu], left: int) -> str:
    """Which collective waits, who arrived and who is missing."""
    for collective, flow in sorted(flows.items()):
        if flow.missing:
            arrived = sorted(e.gpu.index for e in flow.entries)
            missing = sorted({graph.op_gpu[o] for o in graph.collective_members[collective]} - set(arrived))
            op = graph.collective_members[collective][0]
            name = graph.classes[graph.op_class[op]].name
            queued = sorted(g.index for g in gpus for e in g.waiting if e.flow is flow)
            where = f"; GPUs {queued} wait for SMs" if queued else ""
            return (
                f"deadlock with {left} kernels left: collective {collective} ({name}) has GPUs "
                f"{arrived}, misses {missing}{where}"
            )
    stuck = [e.op for g in gpus for e in g.waiting]
    if stuck:
        return f"deadlock with {left} kernels left: kernel {stuck[0]} waits for SMs nobody returns"
    return f"deadlock with {left} kernels left: every one waits for another (cyclic dependencies)"
