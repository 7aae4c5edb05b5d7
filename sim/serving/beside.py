"""Steps of two kinds on one GPU, each on its own SMs: what they take from one another while both run.

One layer of a step with prompts and layers of a decode step run side by side on the engine, each stream on its own
partition, until the first of the two is done. From that run come how much longer each takes than alone (they share
memory, links, power and clock), and what the GPUs draw. Sizes are taken in steps of a factor of the square root of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sim.build.lower import lower
from sim.engine.fluid import FluidModel
from sim.run.plan import classifier
from sim.scenario.partition import Partitions, partitioned
from sim.serving.cost import Batch
from sim.serving.price import StepPrices
from sim.shortcuts.pieces import Piece, Played
from workloads.families.ragged_groups import Group
from workloads.program import Kernel, Phase, Program, RankProgram, Segment, in_turn

PHASES = ("prefill", "decode")
# Layers of the slower side that run beside the other, and layers of the quicker one at most.
SLOW_LAYERS, MOST_LAYERS = 2, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsBeside:
    """While both run: each side's time over that alone at the fast limit, watts and SM clock (Hz) of a GPU."""

    slower: tuple[float, float]
    power_w: float
    clock_hz: float

    def toward(self, other: StepsBeside, share: float) -> StepsBeside:
        """The point ``share`` of the way to ``other``."""
        a, b = self.slower, other.slower
        return StepsBeside(
            slower=(a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])),
            power_w=self.power_w + share * (other.power_w - self.power_w),
            clock_hz=self.clock_hz + share * (other.clock_hz - self.clock_hz),
        )


@dataclass(frozen=True, slots=True)
class StepPairSizes:
    """Tokens of prompts and the context that they see, sequences that decode and their mean context."""

    prompt_tokens: int
    prompt_context: int
    decoding: int
    context: int

    @classmethod
    def of(cls, prompts: Batch, decoding: Batch) -> StepPairSizes:
        """Those of two batches."""
        tokens = prompts.prompt_tokens
        seen = sum(chunk.context * chunk.tokens for chunk in prompts.chunks) / tokens
        rows = decoding.decoding + decoding.prompt_tokens  # some lost their memory and are computed anew
        mean = (decoding.cached + sum(chunk.context * chunk.tokens for chunk in decoding.chunks)) / rows
        return cls(near(tokens), max(near(tokens), near(seen)), near(rows), near(mean))

    @property
    def groups(self) -> tuple[Group, Group]:
        """What each side attends to."""
        tokens = self.prompt_tokens
        return (
            Group(
                phase="prefill" if tokens > 1 else "decode", sequences=1, new_tokens=tokens, context=self.prompt_context
            ),
            Group(phase="decode", sequences=self.decoding, new_tokens=1, context=self.context),
        )


@dataclass(kw_only=True, eq=False)
class BesidePrices:
    """What two kinds of steps, priced by ``alone`` on partitions of equal GPUs, take from one another."""

    alone: tuple[StepPrices, StepPrices]
    partitions: Partitions
    _known: dict[tuple[StepPairSizes, int], StepsBeside] = field(default_factory=dict)
    _layers: dict[tuple[int, Group], tuple[tuple[tuple[Kernel, ...], ...], float]] = field(default_factory=dict)

    def at(self, prompts: Batch, decoding: Batch, target_w: float) -> StepsBeside:
        """The two steps beside each other with each GPU held at or below ``target_w``."""
        sizes = StepPairSizes.of(prompts, decoding)
        at, share = self.alone[0].targets(target_w)
        found = self._at(sizes, at)
        return found.toward(self._at(sizes, at - 1), share) if share else found

    def _at(self, sizes: StepPairSizes, target: int) -> StepsBeside:
        known = self._known.get((sizes, target))
        if known is None:
            known = self._known[sizes, target] = self._run(sizes, self.alone[0].target_w(target))
        return known

    def _layer(self, side: int, group: Group) -> tuple[tuple[tuple[Kernel, ...], ...], float]:
        """The kernels of one layer on each rank, and their seconds alone on the side's SMs at the fast limit."""
        known = self._layers.get((side, group))
        if known is None:
            layers = tuple(
                max(rank.phases[0].segments, key=lambda one: one.repeat).kernels
                for rank in self.alone[side].programs.layers_of([group]).ranks
            )
            run = self._played([(side, layers, SLOW_LAYERS)], self.alone[side].target_w(0))
            known = self._layers[side, group] = (layers, run.end_ps * 1e-12 / SLOW_LAYERS)
        return known

    def _run(self, sizes: StepPairSizes, target_w: float) -> StepsBeside:
        sides = [self._layer(side, group) for side, group in enumerate(sizes.groups)]
        slowest_s = max(seconds for _, seconds in sides)
        counts = [min(MOST_LAYERS, math.ceil(SLOW_LAYERS * slowest_s / seconds)) for _, seconds in sides]
        streams = [(side, layers, count) for side, ((layers, _), count) in enumerate(zip(sides, counts, strict=True))]
        played = self._played(streams, target_w)
        records, sizes_of = played.records, [len(layers[0]) for layers, _ in sides]
        # Layer ends of the first rank's two streams: its kernels are numbered stream by stream.
        end_s = np.zeros(sizes_of[0] * counts[0] + sizes_of[1] * counts[1])
        op = np.frombuffer(records.span_op, dtype=np.int64)
        mine = op < len(end_s)
        end_s[op[mine]] = np.frombuffer(records.span_end_ps, dtype=np.int64)[mine] * 1e-12
        first = end_s[: sizes_of[0] * counts[0]][sizes_of[0] - 1 :: sizes_of[0]]
        second = end_s[sizes_of[0] * counts[0] :][sizes_of[1] - 1 :: sizes_of[1]]
        both_s = float(min(first[-1], second[-1]))
        slower = [
            both_s / float(np.interp(both_s, [0.0, *ends], np.arange(len(ends) + 1))) / seconds
            for ends, (_, seconds) in zip((first, second), sides, strict=True)
        ]
        until_ps = round(both_s * 1e12)
        world = self.alone[0].scenario.world
        joules = math.fsum(played.energy_until_j(gpu, until_ps) for gpu in range(world))
        cycles = _cycles_until(played, until_ps)
        return StepsBeside(slower=(slower[0], slower[1]), power_w=joules / both_s / world, clock_hz=cycles / both_s)

    def _played(self, streams: Sequence[tuple[int, tuple[tuple[Kernel, ...], ...], int]], target_w: float) -> Played:
        """Layers on each side's stream, so many each, all ranks by events."""
        machine = self.alone[0].machine
        ranks = tuple(
            RankProgram(
                phases=(
                    Phase(
                        name="beside",
                        segments=(
                            Segment(
                                name="layers",
                                kernels=tuple(
                                    replace(kernel, stream=side)
                                    for side, layers, count in streams
                                    for kernel in in_turn(*[layers[rank]] * count)
                                ),
                            ),
                        ),
                    ),
                )
            )
            for rank in range(self.alone[0].scenario.world)
        )
        graph = partitioned(lower(Program(ranks=ranks), classifier(machine, eager=False)), self.partitions)
        piece = Piece(graph, FluidModel(machine.model, graph.classes, []))
        return piece.play((target_w,) * graph.gpus, events=True)


def _cycles_until(played: Played, until_ps: int) -> float:
    """SM clock cycles of the first GPU."""
    records = played.records
    steps = zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)
    own = [(time_ps, records.states[state].clock_hz) for gpu, time_ps, state in steps if gpu == 0]
    ends = [*(time_ps for time_ps, _ in own[1:]), records.end_ps]
    return math.fsum(
        max(0, min(end, until_ps) - begin) * 1e-12 * clock_hz for (begin, clock_hz), end in zip(own, ends, strict=True)
    )


def near(size: float) -> int:
    """The nearest size of the grid, in whole units: two to a factor of two.

    >>> [near(size) for size in (1, 3, 100, 1000, 5000)]
    [1, 3, 91, 1024, 5793]
    """
    return max(1, round(math.exp2(round(2.0 * math.log2(max(size, 1.0))) / 2.0)))
