"""A replica in the steady state of a load: how long its steps take, how long prompts wait, what it draws.

Sequences that decode yield a token a step. Each asks for one prompt in as many steps as it generates tokens, so that a
share of the steps holds prompts; the others only decode. How many hold how many, and how long prompts wait, is the
stationary state of a queue (:mod:`sim.explore.plan.queue`): ``wattline serve`` plays the same out request by request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.explore.plan.queue import BulkQueue, Floats, bulk_queue
from sim.explore.plan.stages import StagedPrices
from sim.serving.cost import Batch, Chunk, Cost
from sim.serving.part_prices import TARGET_STEP, TARGET_STEPS

# The share of requests whose time to first token is to be within the target.
WITHIN = 0.99
# Standard deviations above the mean that this share of a normal law stays below.
SIGMAS = 2.326
# Beyond this share of its capacity a queue is taken to grow without end: the waiting time's tail has no use.
MOST_LOAD = 0.95
# Prompts that one step takes at most, and rounds in which shares of steps, power and pace come to agree.
MOST_PROMPTS = 32
ROUNDS = 3
STAGED_ROUNDS = 8  # where batches in flight hold one another up


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyReplica:
    """A replica at a load: requests a second, mean time a token, power a GPU (W), the share of its steps (or time) that
    prompts take, and what times to first token and a token :data:`WITHIN` of the requests stay below.
    """

    load_per_s: float
    tpot_s: float
    tpot_within_s: float
    power_w: float
    ttft_s: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What requests ask of each of ``replicas`` that share them: tokens in and out; and what these are: tokens of a
    step, cap of a GPU's mean power, host time a step. ``batches`` are in flight at once in each, in as many ``stages``
    or more.
    """

    input_len: int
    output_len: int
    step_tokens: int
    cap_w: float
    host_s: float
    replicas: int = 1
    batches: int = 1
    stages: int = 1

    def in_stages(self, stages: int, sequences: int) -> ReplicaLoad:
        """What each of the batches in flight meets in a pipeline over which ``sequences`` are spread."""
        batches = min(stages, sequences)
        return replace(self, batches=batches, stages=stages)

    def held_up(self, weights: Sequence[float], times_s: Sequence[float]) -> list[float]:
        """Steps with ``times_s`` alone, each so often. Batches follow one another through all stages in order: the
        longest of those in flight keeps the pace of all.

        >>> load = ReplicaLoad(input_len=1, output_len=2, step_tokens=9, cap_w=700.0, host_s=0.0, batches=2, stages=2)
        >>> load.held_up([0.75, 0.25], [1.0, 5.0])
        [2.0, 5.0]
        """
        reached, before, chances = 0.0, 0.0, []
        for time_s, weight in sorted(zip(times_s, weights, strict=True)):
            reached += weight
            below = min(1.0, max(0.0, reached)) ** (self.batches - 1)  # all others take at most as long
            chances.append((time_s, below - before))
            before = below
        return [sum(chance * max(own, time_s) for time_s, chance in chances) for own in times_s]


def decoding_and_prompts(prices: StagedPrices, load: ReplicaLoad, sequences: int) -> SteadyReplica | None:
    """A replica that prefills and decodes, ``sequences`` of the latter at once; None where prompts cannot keep up.

    Each sequence asks for one prompt in ``output_len`` - 1 steps. Whole prompts share a step as far as it has room;
    longer ones take pieces of several steps, one after another. Of batches in flight in a pipeline each is looked at
    by itself, with its part of the sequences and of the prompts; a longer one holds up those behind it.
    """
    load = load.in_stages(prices.batches, sequences)
    sequences = math.ceil(sequences / load.batches)
    room = load.step_tokens - sequences
    a_step = sequences / (load.output_len - 1)  # prompts
    most = room // load.input_len
    if most < 1:
        return _in_pieces(prices, load, sequences, a_step)
    most = min(most, MOST_PROMPTS)
    if a_step >= MOST_LOAD * most:
        return None
    batches = [_batch(load, sequences, prompts=count) for count in sorted({0, 1, most})]
    weights = [1.0 - a_step, a_step, 0.0][: len(batches)]
    queue = None
    for _ in range(ROUNDS if load.batches == 1 else STAGED_ROUNDS):
        steps = list(zip(weights, batches, strict=True))
        costs = capped(prices, steps, load)
        alone_s = [cost.time_s + load.host_s for cost in costs]
        times_s = _by_prompts(load.held_up(weights, alone_s), most)
        step_s = queue.mean_step_s if queue is not None else float(times_s[0] + a_step * (times_s[1] - times_s[0]))
        queue = bulk_queue(a_step / step_s, times_s, streams=load.replicas)
        if queue is None:
            return None
        weights = _at_nodes(queue, most)[: len(batches)]
    assert queue is not None
    return SteadyReplica(
        load_per_s=load.batches * a_step / queue.mean_step_s,
        tpot_s=queue.mean_step_s,
        tpot_within_s=_tpot_within_s(load, sequences, queue.mean_step_s, alone_s[1] - alone_s[0]),
        power_w=_power(prices, steps, costs, load, queue.mean_step_s),
        ttft_s=queue.waits_s(WITHIN),
        busy=a_step / most,
    )


def _tpot_within_s(load: ReplicaLoad, sequences: int, step_s: float, prompt_s: float) -> float:
    """The time a token that :data:`WITHIN` of the requests stay below: others see more prompts come while they decode.

    As many prompts come as there are ``sequences``, give or take the root of that over the replicas; each takes
    ``prompt_s`` more, in which still others come.
    """
    more = SIGMAS * math.sqrt(sequences / load.replicas)
    prompt_s *= load.batches  # those of other batches hold up this one
    share = min(MOST_LOAD, sequences * prompt_s / ((load.output_len - 1) * step_s))
    return step_s + more * prompt_s / (load.output_len - 1) / (1.0 - share)


def _in_pieces(prices: StagedPrices, load: ReplicaLoad, sequences: int, a_step: float) -> SteadyReplica | None:
    """Prompts longer than a step: they queue for its room one after another (M/D/1)."""
    pieces = _pieces(load.input_len, load.step_tokens - sequences)
    if pieces is None or a_step * len(pieces) >= MOST_LOAD:
        return None
    cached = sequences * (load.input_len + load.output_len // 2)
    steps = [(1.0 - a_step * len(pieces), _batch(load, sequences, prompts=0))]
    for piece in pieces:
        batch = Batch(decoding=sequences, cached=cached, chunks=(piece,), ending=int(piece is pieces[-1]))
        steps.append((a_step, batch))
    costs = capped(prices, steps, load)
    weights = [weight for weight, _ in steps]
    times_s = load.held_up(weights, [cost.time_s + load.host_s for cost in costs])
    step_s = sum(weight * time_s for weight, time_s in zip(weights, times_s, strict=True))
    prompt_s = sum(times_s[1:])
    busy = a_step * len(pieces)
    return SteadyReplica(
        load_per_s=load.batches * a_step / step_s,
        tpot_s=step_s,
        tpot_within_s=_tpot_within_s(load, sequences, step_s, prompt_s - len(pieces) * costs[0].time_s),
        power_w=_power(prices, steps, costs, load, step_s),
        ttft_s=costs[0].time_s + waiting_s(prompt_s, a_step / step_s * prompt_s) + prompt_s,
        busy=busy,
    )


def prompts_alone(prices: StagedPrices, load: ReplicaLoad, load_per_s: float) -> SteadyReplica | None:
    """A replica for prompts alone under ``load_per_s``; None where they come faster than it computes them."""
    idle_w = prices.machine.model.idle_w(prices.machine.model.max_clock_hz)
    most = min(load.step_tokens // load.input_len, MOST_PROMPTS)
    if most < 1:
        pieces = _pieces(load.input_len, load.step_tokens) or []
        steps = [(1.0, Batch(chunks=(piece,), ending=int(piece is pieces[-1]))) for piece in pieces]
        costs = capped(prices, steps, load)
        prompt_s = sum(cost.time_s + load.host_s for cost in costs)
        busy = load_per_s * prompt_s
        ttft_s = waiting_s(prompt_s, busy) + prompt_s
    else:
        steps = [(1.0, _batch(load, 0, prompts=count)) for count in sorted({1, most})]
        costs = capped(prices, steps[-1:], load)
        first = capped(prices, steps[:1], load)
        nodes = [0.0, *(cost.time_s + load.host_s for cost in (*(first if most > 1 else ()), *costs))]
        queue = bulk_queue(load_per_s, _by_prompts(nodes, most), idle=True, streams=load.replicas)
        if queue is None:
            return None
        busy = queue.busy
        ttft_s = queue.waits_s(WITHIN)
        steps = steps[-1:]
    if busy >= MOST_LOAD:
        return None
    power_w = busy * _power(prices, steps, costs, load) + (1.0 - busy) * idle_w
    return SteadyReplica(
        load_per_s=load_per_s, tpot_s=0.0, tpot_within_s=0.0, power_w=power_w, ttft_s=ttft_s, busy=busy
    )


def _batch(load: ReplicaLoad, sequences: int, *, prompts: int) -> Batch:
    whole = Chunk(tokens=load.input_len, context=load.input_len)
    cached = sequences * (load.input_len + load.output_len // 2)
    return Batch(decoding=sequences, cached=cached, chunks=(whole,) * prompts, ending=prompts)


def _by_prompts(nodes: Sequence[float], most: int) -> Floats:
    """Seconds of a step by its prompts, linear between the ``nodes`` at none, one and ``most``."""
    return np.interp(np.arange(most + 1), sorted({0, 1, most}), nodes)


def _at_nodes(queue: BulkQueue, most: int) -> list[float]:
    """Shares of the steps at none, one and ``most`` prompts, those between divided by where they lie."""
    count = np.bincount(queue.taken, queue.share, most + 1)
    if most == 1:
        return [float(count[0]), float(count[1])]
    inner = np.arange(1, most + 1)
    up = (inner - 1) / (most - 1)
    return [float(count[0]), float(count[1:] @ (1.0 - up)), float(count[1:] @ up)]


def decoding_alone(prices: StagedPrices, load: ReplicaLoad, sequences: int) -> SteadyReplica:
    """A replica that gets sequences with their first token, ``sequences`` of them at once."""
    batch = _batch(load, sequences, prompts=0)
    (cost,) = capped(prices, [(1.0, batch)], load)
    tpot_s = cost.time_s + load.host_s
    load_per_s = sequences / ((load.output_len - 1) * tpot_s)
    power_w = _power(prices, [(1.0, batch)], [cost], load)
    fuller = _batch(load, math.ceil(sequences + SIGMAS * math.sqrt(sequences / load.replicas)), prompts=0)
    (slower,) = capped(prices, [(1.0, fuller)], load)
    return SteadyReplica(
        load_per_s=load_per_s,
        tpot_s=tpot_s,
        tpot_within_s=slower.time_s + load.host_s,
        power_w=power_w,
        ttft_s=0.0,
        busy=1.0,
    )


def waiting_s(service_s: float, busy: float) -> float:
    """What :data:`WITHIN` of the requests wait at most before their service, in an M/D/1 queue.

    The tail of the waiting time is taken as ``busy`` x exp(-t / tau) with tau = service / (2 (1 - busy)), which gives
    the queue's exact mean (Pollaczek and Khinchine) and its decay under heavy load.

    >>> waiting_s(0.1, 0.005), round(waiting_s(0.1, 0.5), 3), waiting_s(0.1, 1.0)
    (0.0, 0.391, inf)
    """
    if busy >= 1.0:
        return math.inf
    beyond = 1.0 - WITHIN
    return max(0.0, math.log(busy / beyond)) * service_s / (2.0 * (1.0 - busy)) if busy > beyond else 0.0


def capped(prices: StagedPrices, steps: Sequence[tuple[float, Batch]], load: ReplicaLoad) -> list[Cost]:
    """Costs of the steps at the power target where their mean power, by the share each has of the steps, is the cap.

    That is what the slow limiter holds the mean at. Where no target is low enough, the lowest.
    """

    cap_w = load.cap_w

    def at(target: float) -> list[Cost]:
        target_w = (1.0 - target * TARGET_STEP) * prices.machine.limits.fast_limit_w
        return [prices.whole(batch, target_w) for _, batch in steps]

    def drawn_w(costs: Sequence[Cost]) -> float:
        return _power(prices, steps, costs, load)

    costs = at(0)
    if math.isinf(cap_w) or drawn_w(costs) <= cap_w:
        return costs
    # Power falls about as its target does: from there to the two neighbours on whose sides the cap lies.
    high = min(TARGET_STEPS, math.ceil((1.0 - cap_w / drawn_w(costs)) / TARGET_STEP))
    while high < TARGET_STEPS and drawn_w(at(high)) > cap_w:
        high += 1
    while high > 1 and drawn_w(at(high - 1)) <= cap_w:
        high -= 1
    low = high - 1
    over, under = drawn_w(at(low)), drawn_w(at(high))
    share = (over - cap_w) / (over - under) if over > under else 1.0
    return at(low + min(1.0, share) * (high - low))


def _power(
    prices: StagedPrices,
    steps: Sequence[tuple[float, Batch]],
    costs: Sequence[Cost],
    load: ReplicaLoad,
    step_s: float = 0.0,
) -> float:
    """Mean watts of a GPU; it idles while the host works, and where batches held one another up to ``step_s``."""
    energy_j = sum(weight * cost.energy_j for (weight, _), cost in zip(steps, costs, strict=True))
    time_s = sum(weight * (cost.time_s + load.host_s) for (weight, _), cost in zip(steps, costs, strict=True))
    idle_w = prices.machine.model.idle_w(prices.machine.model.max_clock_hz)
    idle_s = load.host_s
    if load.stages > 1:
        work_s, time_s = time_s - load.host_s, max(time_s, step_s)
        idle_s = time_s - load.batches * work_s / load.stages
    return (load.batches * energy_j / prices.world + idle_s * idle_w) / time_s


def _pieces(input_len: int, room: int) -> list[Chunk] | None:
    """A prompt cut into equal pieces of at most ``room`` tokens; None where there is no room.

    >>> [(piece.tokens, piece.context) for piece in _pieces(5, 3) or []], _pieces(5, 0)
    ([(3, 3), (2, 5)], None)
    """
    if room < 1:
        return None
    count = math.ceil(input_len / room)
    ends = [math.ceil(input_len * (number + 1) / count) for number in range(count)]
    return [Chunk(tokens=end - begin, context=end) for begin, end in zip([0, *ends], ends, strict=False)]
