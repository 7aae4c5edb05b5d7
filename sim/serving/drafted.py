"""Batching where drafted tokens are checked: a running sequence yields as many tokens a step as pass, and one more.

How many pass is drawn for each request by itself, step by step: the same whatever runs beside it. A step takes room for
all that it checks; what did not pass is written over by the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.serving.inflight import Sequence
from sim.serving.scheduler import Scheduler

# Draws of what passes are apart from those of arrivals, lengths and ways.
PASSING_DRAWS = 4
DRAWN_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """``chances`` of each drafted token to pass where all before it did."""

    chances: tuple[float, ...]
    seed: int

    def passing(self, request: int) -> Iterator[int]:
        """How many drafted tokens of a request pass in its first step, its second, and so on.

        >>> list(zip(Acceptance(chances=(1.0, 1.0, 0.0), seed=0).passing(7), range(3)))
        [(2, 0), (2, 1), (2, 2)]
        """
        rng = np.random.default_rng([self.seed, PASSING_DRAWS, request])
        fails = -np.cumprod(np.array(self.chances))  # the chance that each passes, with all before it, falls
        while True:
            yield from np.searchsorted(fails, -rng.random(DRAWN_AT_ONCE), side="left").tolist()


@dataclass(kw_only=True, slots=True, eq=False)
class DraftedScheduler(Scheduler):
    """A scheduler whose running sequences differ in what they yield, so that each is looked at in every step."""

    acceptance: Acceptance

    def beside(self) -> Scheduler:
        """One more batch in flight."""
        return DraftedScheduler(
            limits=self.limits, pool=self.pool, prefilling=self.prefilling, _waiting=self._waiting,
            acceptance=self.acceptance,
        )  # fmt: skip

    def steady_steps(self) -> int:
        """No two steps are alike."""
        return 1

    def _yield(self, steps: int) -> list[Sequence]:
        self.step += steps
        done = []
        for sequence in list(self.running.values()):
            assert sequence.passing is not None
            count = min(next(sequence.passing) + 1, sequence.request.output_tokens - sequence.generated)
            sequence.computed += count
            sequence.generated += count
            self.cached_tokens += count
            if sequence.generated >= sequence.request.output_tokens:
                self._stop(sequence)
                self.memory.free(sequence)
                done.append(sequence)
        return done

    def _reach(self, sequence: Sequence) -> int:
        request = sequence.request
        return min(sequence.computed + self.limits.checked_tokens, request.input_tokens + request.output_tokens)

    def _longest(self) -> int:
        return max((sequence.computed for sequence in self.running.values()), default=0)

    def _make_room(self) -> None:
        for sequence in sorted(self.running.values(), key=lambda one: one.order):
            while sequence.joined >= 0:
                need = self.memory.missing(sequence, self._reach(sequence))
                if self.pool.take(need):
                    sequence.blocks += need
                    break
                idle = [other for other in self.prefilling if not other.under_way]
                self._evict(max([*self.running.values(), *idle], key=lambda s: s.order))

    def _start(self, sequence: Sequence, *, grown: bool = False) -> None:  # noqa: ARG002 - blocks are counted as taken
        sequence.joined = self.step
        sequence.passing = sequence.passing or self.acceptance.passing(sequence.request.number)
        self.running[sequence.request.number] = sequence
        self.cached_tokens += sequence.computed
        self.joined(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.cached_tokens -= sequence.computed
        sequence.joined = -1
        del self.running[sequence.request.number]
        self.left(sequence)
