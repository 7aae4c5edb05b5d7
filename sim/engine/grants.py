"""Rules of who gets which SMs, and the words for a run in which nobody does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from hardware.laws.terms import KernelTerms, time_s
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.state import Entry, Flow, Gpu, Split

# Tiles that a block takes by its number, before it fetches any. Products beside held SMs take the rounds that follow
# from it, 139 of 147 within 5 % (records/h200-sxm-141gb/placement).
OWN_TILES = 2
# SMs that must be free before a collective's clusters of four blocks start: two neighbouring pairs of one GPC, of which
# two free pairs of 66 are none, three are (the same records).
CLUSTER_SMS = 6

# Rounds beyond which those that are all alike are not gone through one by one.
MANY_ROUNDS = 100_000


def first_sms(entry: Entry, terms: KernelTerms) -> float:
    """SMs that a waiting kernel begins with now: all it wants, else what whole clusters of its blocks can use."""
    free = entry.gpu.free
    if entry.flow.collective >= 0:
        return more_sms(entry, terms)
    if entry.wanted <= free:
        return entry.wanted
    return free - free % (terms.sms_per_block * terms.cluster)


def more_sms(entry: Entry, terms: KernelTerms) -> float:
    """SMs that further blocks of a kernel can start on.

    Where few are free, blocks of a collective run one after the other: 32 ended beside a kernel that left them 6 SMs.
    """
    free, want = entry.gpu.free, entry.wanted - entry.held
    if entry.flow.collective < 0:
        return min(want, free)
    return room(want, free, scattered=entry.gpu.scattered, cluster=terms.cluster, sms_per_block=terms.sms_per_block)


def room(want: float, free: float, *, scattered: float, cluster: int, sms_per_block: float = 1.0) -> float:
    """SMs of ``free`` that a collective starts on, which wants ``want``; its blocks come ``cluster`` at a time.

    ``scattered`` ones are no two pairs of one GPC.

    >>> [room(12.0, free, scattered=free, cluster=4) for free in (4.0, 6.0, 10.0, 12.0)]
    [0.0, 4.0, 8.0, 12.0]
    """
    if cluster == 1:
        return min(want, free - free % sms_per_block)
    size = cluster * sms_per_block
    if free < CLUSTER_SMS:
        return want if want <= free - scattered else 0.0
    return want if want <= free else size * ((free - CLUSTER_SMS) // size + 1.0)


def split_off(entry: Entry, terms: KernelTerms, sms: float, whole: float, clock_hz: float) -> Entry:
    """The blocks of ``entry`` beyond ``sms``: they start when more are free, with tiles of their own.

    ``whole`` is what all blocks ask for. Where memory sets the pace, tiles of a last, thin round take the time of their
    arithmetic alone (28 us after 86 in a product of 128 rows, waiting.jsonl).
    """
    split = entry.split
    if split is None:
        slots = whole / terms.sms_per_block
        rounds = math.ceil(terms.blocks / slots - 1e-9)
        round_s = (time_s(terms, sms=whole, sm_clock_hz=clock_hz) - terms.floor_s) / rounds
        own = min(OWN_TILES, rounds)
        fetched = max(0.0, terms.blocks - own * slots)
        split = entry.split = Split(
            rounds=rounds,
            own=own,
            fetched=fetched,
            full=min(1.0, terms.blocks / slots - (own - 1)),
            thin=min(1.0, terms.cycles_per_block / clock_hz / round_s),
            fill=rounds * slots / terms.blocks if fetched else 1.0,  # else every part goes through all rounds
        )
    late = Entry(entry.op, entry.class_id, entry.gpu, Flow(-1, 1), entry.wanted - sms, 0)
    late.key = entry.key
    late.split = split
    split.parts += 1
    entry.wanted = sms
    return late


@dataclass(slots=True)
class Turns:
    """What ``slots`` blocks fetch that are ready after ``ready`` rounds; ``last`` are busy in the last (``lasts``)."""

    ready: float
    slots: float
    fetched: float = 0.0
    last: float = 0.0
    lasts: float = 1.0


def fetch(parts: Sequence[Turns], tiles: float, thin: float = 1.0) -> None:
    """Hand ``tiles`` to whichever of ``parts`` is ready first; a last round of few takes ``thin`` of one at least.

    >>> parts = [Turns(ready=2.0, slots=100.0), Turns(ready=2.4, slots=32.0)]
    >>> fetch(parts, 164)
    >>> [(part.ready, part.fetched, part.last) for part in parts]
    [(4.0, 132.0, 32.0), (3.4, 32.0, 32.0)]
    """
    ready = [(part.ready, order) for order, part in enumerate(parts)]
    heapify(ready)
    slots = sum(part.slots for part in parts)
    while tiles > 1e-6:
        if (
            0.0 < MANY_ROUNDS * slots < tiles and max(ready)[0] - ready[0][0] <= 1.0
        ):  # from here on each in turn, for long
            rounds = tiles // slots - 1.0
            for part in parts:
                part.ready, part.fetched = part.ready + rounds, part.fetched + rounds * part.slots
            ready = [(at + rounds, order) for at, order in ready]
            tiles -= rounds * slots
        part = parts[ready[0][1]]
        part.last = min(part.slots, tiles)
        part.fetched += part.last
        tiles -= part.last
        part.lasts = 1.0 if part.last == part.slots else max(thin, part.last / part.slots)
        part.ready += part.lasts
        heapreplace(ready, (part.ready, ready[0][1]))


def share_out(split: Split, terms: KernelTerms, now_ps: int) -> None:
    """Set how long each part of a kernel still runs: its own tiles, then what it fetches before the others do.

    What a flow has left is in units of the rounds that the whole kernel takes, all its blocks at once. Joules go by
    tiles: each part is billed for those it has still to do, evenly over the rounds that it still goes through.
    """
    pool = split.fetched
    turns: list[Turns] = []
    for part in split.begun:
        flow = part.flow
        flow.left = max(0.0, flow.left - flow.rate * (now_ps - flow.updated_ps))
        flow.updated_ps = now_ps
        slots, before = part.sms / terms.sms_per_block, part.gone
        part.gone = max(0.0, part.rounds - flow.left * split.rounds)
        begun = math.floor(part.gone + 1e-6) + 1
        part.billed += part.fill / split.fill * slots * (part.gone - before)
        if not 0.0 < part.rounds <= begun:  # else it is in its last round, which no other part changes
            part.fetched = slots * max(0, begun - split.own)
            part.rounds = float(max(split.own, begun))
            part.last, part.lasts = slots * (split.full if part.rounds == split.own else 1.0), 1.0
        pool -= part.fetched
        turns.append(Turns(ready=part.rounds - part.gone, slots=slots))
    fetch(turns, pool, split.thin)
    for turn, part in zip(turns, split.begun, strict=True):
        if turn.fetched:
            part.fetched += turn.fetched
            part.rounds, part.last, part.lasts = part.gone + turn.ready, turn.last, turn.lasts
        part.flow.left = turn.ready / split.rounds
        if split.rounds > split.own:
            tiles = turn.slots * split.own + part.fetched - part.billed
            part.fill = split.fill * tiles / (turn.slots * (part.rounds - part.gone))
        part.flow.due_ps = -1  # its end is another now


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


def last_round(entry: Entry, terms: KernelTerms, wanted: float) -> tuple[float, float]:
    """What an entry's last round is of its kernel's time, and the SMs that it needs."""
    if entry.split is not None:
        return entry.lasts / entry.split.rounds, entry.last * terms.sms_per_block
    blocks, slots = terms.blocks * entry.sms / wanted, entry.sms / terms.sms_per_block
    rounds = math.ceil(blocks / slots - 1e-9)
    return 1.0 / rounds, (blocks - (rounds - 1) * slots) * terms.sms_per_block


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
