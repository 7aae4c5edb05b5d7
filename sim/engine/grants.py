"""Rules of who gets which SMs, and the words for a run in which nobody does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hardware.laws.terms import KernelTerms
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.state import Entry, Flow, Gpu


def late_part(entry: Entry, own: float) -> Entry:
    """Blocks that found no SM: they start when one is free, with the share ``own`` of their tiles that stays theirs.

    Those that run take over the rest, so that they have more than a block's tiles before them.
    """
    late = Entry(entry.op, entry.class_id, entry.gpu, Flow(-1, 1), entry.wanted - entry.held, 0)
    late.key = entry.key
    late.earlier = entry
    late.flow.left = min(own, entry.flow.left)
    entry.flow.left += (entry.flow.left - late.flow.left) * late.wanted / entry.held
    entry.wanted = entry.held
    return late


def join(entry: Entry, now_ps: int) -> None:
    """Late blocks begin: tiles that nobody owns are shared out again among them and those that run."""
    earlier = entry.earlier
    if earlier is None or earlier not in entry.gpu.running:
        return
    flow, late = earlier.flow, entry.flow
    flow.left = max(0.0, flow.left - flow.rate * (now_ps - flow.updated_ps))
    flow.updated_ps = now_ps
    work = flow.left * earlier.sms + late.left * entry.held
    late.left = min(max(late.left, work / (earlier.sms + entry.held)), work / entry.held)
    flow.left = (work - late.left * entry.held) / earlier.sms
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
