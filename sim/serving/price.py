"""What a server's step costs: the engine's own time and energy, part by part, remembered and interpolated.

A step's kernels follow one another on one stream, so that its cost is the sum over its parts: what is done to all
tokens at once, the attention of each group of sequences, the vocabulary head. Each part is run by the engine at a
few sizes and power targets (:class:`PartPrices`); between them cost is linear. ``tests/test_serving.py`` holds whole
steps of random batches within 1 % of the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import workloads
from hardware.laws.uneven import UnevenContexts, longest_tail_s
from hardware.sampling import Sampling, sampling_cost
from sim.errors import ScenarioError
from sim.run.plan import Plan
from sim.serving.buckets import context_ends
from sim.serving.cost import NOTHING, Batch, Cost, Joules, StepCost
from sim.serving.part_prices import PartPrices
from sim.serving.parts import played
from sim.serving.step_programs import joined
from workloads.engine import HostPace

# Whether a step's attention cuts long sequences up, so that the mean context stands for all, or waits for the longest.
Schedule = Literal["balanced", "per_sequence"]


@dataclass(kw_only=True, eq=False)
class StepPrices(PartPrices):
    """Prices of steps on one group of GPUs: of batches, by the prices of their parts."""

    sampling: Sampling | None = None  # how each rank draws tokens from the logits
    attention: Schedule = "balanced"
    # What drafts the tokens that the scenario's steps check; None: nothing that the GPUs run.
    draft: StepPrices | None = None
    _drawn: dict[int, Cost] = field(default_factory=dict)
    _last: Batch | None = None
    _last_costs: dict[int, StepCost] = field(default_factory=dict)
    _last_sums: dict[int, Cost] = field(default_factory=dict)
    # The contexts run between which the mean context of the batch lies, and how far it is to the second.
    _between: tuple[int, int] = (0, 0)
    _share: float = 0.0
    # Of a batch that only decodes: sequences, tokens with adapters, adapters; and those with the lower context.
    _rest: tuple[int, int, int] = (0, 0, 0)
    _alike: tuple[int, int, int, int] = (0, 0, 0, 0)
    _even: dict[tuple[tuple[int, int, int], int], Cost] = field(default_factory=dict)  # by the rest and target
    # Attention of so many sequences at both ends of a range of contexts, by sequences, lower end and target.
    _ranges: dict[tuple[int, int, int], tuple[Cost, Cost]] = field(default_factory=dict)
    # The same after the rest of a step that only decodes, where these are all that it takes: by what it is and target.
    _ends: dict[tuple[tuple[int, int, int, int], int], tuple[Cost, Cost, Cost]] = field(default_factory=dict)
    # And by power target (W), then by what it is, where these are the same at both targets that it lies between.
    _level: dict[float, dict[tuple[int, int, int, int], tuple[Cost, Cost, Cost]]] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Batches in flight at once."""
        return 1

    def step(self, batch: Batch, target_w: float = math.inf) -> StepCost:
        """The cost of ``batch`` with each GPU held at or below ``target_w`` (inf: the fast limit)."""
        at, share = self.targets(target_w)
        cost = self._at(batch, at)
        return cost.toward(self._at(batch, at - 1), share) if share else cost

    def joules(self, batch: Batch, target_w: float = math.inf) -> Joules:
        """The joules of :meth:`step`: quicker."""
        at, share = self._places.get(target_w) or self.targets(target_w)
        cost = self._at(batch, at)
        return cost.joules(self._at(batch, at - 1), share) if share else cost.joules()

    def whole(self, batch: Batch, target_w: float = math.inf) -> Cost:
        """The sum of :meth:`step`, without its parts: quicker."""
        if batch is not self._last:
            self._begin(batch)
        decodes = self._share and not batch.chunks  # only, somewhere between two contexts
        if decodes and (level := self._level.get(target_w)) and (ends := level.get(self._alike)):
            return ends[0].and_between(ends[1], ends[2], self._share)
        at, share = self._places.get(target_w) or self.targets(target_w)
        known = self._last_sums
        cost = known.get(at) or self._sum_at(batch, at)
        if not share:
            return cost
        cost = cost.toward(known.get(at - 1) or self._sum_at(batch, at - 1), share)
        ends = self._ends.get((self._alike, at)) if decodes else None
        if ends and ends == self._ends.get((self._alike, at - 1)):  # neither target holds its kernels back
            self._level.setdefault(target_w, {})[self._alike] = ends
        return cost

    def _at(self, batch: Batch, target: int) -> StepCost:
        """The cost at a target that is run: 1 - ``target`` steps of the fast limit."""
        if batch is not self._last:
            self._begin(batch)
        known = self._last_costs.get(target)
        if known is None:
            known = self._last_costs[target] = self._priced(batch, target)
        return known

    def _sum_at(self, batch: Batch, target: int) -> Cost:
        """The sum of :meth:`_at` of the batch at hand; of steps that only decode without its parts."""
        if batch.chunks:
            cost = self._at(batch, target).whole
        elif self._share and (ends := self._ends.get((self._alike, target))):
            cost = ends[0].and_between(ends[1], ends[2], self._share)
        else:
            cost = self._decoding_only(batch, target)
        self._last_sums[target] = cost
        return cost

    def _begin(self, batch: Batch) -> None:
        self._last = batch
        self._last_costs.clear()
        self._last_sums.clear()
        if batch.decoding:
            mean = batch.cached / batch.decoding
            low, high = self._between
            if not low < mean < high:
                low, high = self._between = context_ends(mean)
            self._share = (mean - low) / (high - low) if mean > low else 0.0
            self._rest = (batch.decoding, batch.adapted, batch.adapters)
            self._alike = (*self._rest, low)

    def _decoding_only(self, batch: Batch, target: int) -> Cost:
        decoding, low = batch.decoding, self._between[0]
        even = self._even.get((self._rest, target))
        if even is None:  # what does not depend on the contexts
            even = self._rows("shared", self.programs.own_tokens(batch), target) + self._head(batch, target)
            if batch.adapters:
                even += self._adapted(batch, target)
            self._even[self._rest, target] = even
        cost = even + self._decoding(batch, target)
        if self.draft is not None:
            cost += NOTHING.toward(self.draft._drafting(batch, target), self.each - 1)
        elif self._share and self.attention == "balanced":
            self._ends[self._alike, target] = (even, *self._ranges[decoding, low, target])
        return cost

    def _drafting(self, batch: Batch, target: int) -> Cost:
        """What these prices, of what drafts, say of one pass of a batch that only decodes."""
        if batch is not self._last:
            self._begin(batch)
        known = self._last_sums.get(target)
        return self._sum_at(batch, target) if known is None else known

    def _priced(self, batch: Batch, target: int) -> StepCost:
        tokens = self.programs.own_tokens(batch)
        shared = self._known_rows.get(("shared", tokens, target, 0)) or self._rows("shared", tokens, target)
        if batch.adapters:
            shared += self._adapted(batch, target)
        cost = StepCost(
            shared,
            self._prompts(batch, target),
            self._decoding(batch, target) if batch.decoding else NOTHING,
            self._head(batch, target),
        )
        for draft in self._drafts(batch):
            assert self.draft is not None
            one = self.draft._at(draft, target)
            cost = cost.plus(one if draft.chunks else one._replace(prompts=(NOTHING,) * len(batch.chunks)))
        return cost

    def _drafts(self, batch: Batch) -> list[Batch]:
        """What drafts a step's tokens, pass by pass: the first one reads the prompts too, for the draft's own cache."""
        if self.draft is None:
            return []
        alone = batch._replace(chunks=(), ending=0)
        first = batch._replace(ending=0) if batch.chunks else alone
        return [first, *[alone] * (self.each - 2)] if batch.decoding else [first]

    def _head(self, batch: Batch, target: int) -> Cost:
        scored = batch.decoding * self.each + batch.ending if self.programs.scores else 0
        if not scored:
            return NOTHING
        cost = self._known_rows.get(("head", scored, target, 0)) or self._rows("head", scored, target)
        return cost if self.sampling is None else cost + self.drawing(batch)

    def _decoding(self, batch: Batch, target: int) -> Cost:
        """The attention of the sequences that decode."""
        low, high = self._between
        if self._share:
            ends = self._ranges.get((batch.decoding, low, target))
            if ends is None:
                at_low, at_high = (self._part("decode", batch.decoding, context, target) for context in (low, high))
                ends = self._ranges[batch.decoding, low, target] = (at_low, at_high)
            cost = ends[0].toward(ends[1], self._share)
        else:
            cost = self._part("decode", batch.decoding, low, target)
        return cost if self.attention == "balanced" else cost + self._tail(batch, cost)

    def whole_step(self, batch: Batch) -> Plan:
        """The kernels of ``batch`` and of what drafts its tokens, all in one run."""
        step = self.programs.step(batch)
        for draft in reversed(self._drafts(batch)):
            assert self.draft is not None
            step = joined(self.draft.programs.step(draft), step)
        for patches, count in batch.images.items() if self.programs.sees else ():
            step = joined(self.programs.images(count, patches), step)
        return self._plan(step)

    def exact(self, batch: Batch, target_w: float = math.inf) -> Cost:
        """The engine's cost of the whole step in one run; nothing is interpolated."""
        cost = played(self.whole_step(batch), min(target_w, self.machine.limits.fast_limit_w))
        return cost + self.tail(batch, target_w) + self.drawing(batch)

    def tail(self, batch: Batch, target_w: float = math.inf) -> Cost:
        """What the longest context adds to the attention of a step whose sequences are taken for equal otherwise."""
        even = batch._replace(longest=0)
        return self._tail(batch, self.step(even, target_w).decoding) if batch.decoding else NOTHING

    def _tail(self, batch: Batch, even: Cost) -> Cost:
        """The GPUs are taken to idle while the last blocks run: their bytes are in the ``even`` cost."""
        if self.attention == "balanced" or not batch.longest:
            return NOTHING
        try:
            layers, kv_heads, token_bytes = self.programs.attention_heads
        except ScenarioError as error:
            raise ScenarioError(f"attention = {self.attention}: {error}: leave it at balanced") from None
        contexts = UnevenContexts(
            batch=batch.decoding,
            mean=batch.cached / batch.decoding / self._spread,
            longest=-(-batch.longest // self._spread),
            kv_heads=kv_heads,
            token_bytes=token_bytes,
        )
        time_s = layers * longest_tail_s(contexts, even_s=even.time_s / layers, sms=self.sms)
        clock_hz = self.machine.model.max_clock_hz
        energy_j = time_s * self.machine.model.idle_w(clock_hz) * self.world
        return Cost(time_s=time_s, energy_j=energy_j, cycles=time_s * clock_hz)

    def drawing(self, batch: Batch) -> Cost:
        """Drawing the tokens that ``batch`` yields: every rank holds all logits and draws by itself."""
        rows = batch.decoding * self.each + batch.ending
        greedy = workloads.load_stack(self.scenario.stack).engine is not None  # among the engine's own kernels
        if self.sampling is None or not rows or not self.programs.scores or (greedy and self.sampling == "greedy"):
            return NOTHING
        known = self._drawn.get(rows)
        if known is None:
            vocabulary = workloads.load_model(self.scenario.model).vocab
            time_s, energy_j = sampling_cost(self.sampling, rows, vocabulary, self.machine.gpu)
            if greedy:
                known_s, known_j = sampling_cost("greedy", rows, vocabulary, self.machine.gpu)
                time_s, energy_j = time_s - known_s, energy_j - known_j
            cycles = time_s * self.machine.model.max_clock_hz
            known = Cost(time_s=time_s, energy_j=energy_j * self.world, cycles=cycles)
            self._drawn[rows] = known
        return known

    def launching_s(self, pace: HostPace, batch: Batch) -> float:
        """The host's time for what of ``batch`` it launches piece by piece: none where all of it is graphs."""
        launched_s = 0.0
        if batch.chunks:
            layers, kernels, experts = self.programs.launches
            if batch.adapters:
                kernels += self.programs.adapter_launches
            kernels += self.programs.exchange_launches(batch.chunks)
            tokens = self.programs.own_tokens(batch)
            launched_s += pace.seconds(tokens=tokens, layers=layers, kernels=kernels, experts=experts)
        if images := batch.images if self.programs.sees else {}:  # the encoder is no graph
            launched_s += pace.uncaptured_s(layers=len(images), kernels=self.programs.image_launches, experts=False)
        if self.draft is not None and self.scenario.speculation in pace.uncaptured_drafts:
            layers, kernels, experts = self.draft.programs.launches
            each_s = pace.drafting_s(layers=layers, kernels=kernels, experts=experts)
            launched_s += len(self._drafts(batch)) * each_s
        return launched_s
