"""How long a command will take, in words, from how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

# Work that has gone on for so long says how much is left.
FIRST_S = 5.0


def in_words(seconds: float) -> str:
    """A wait in words, as far as somebody who waits cares.

    >>> in_words(4.2), in_words(170)
    ('4 s', '3 minutes')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


@dataclass(slots=True, kw_only=True)
class TimeLeft:
    """Says once, after :data:`FIRST_S`, how long the rest of ``total`` takes; begins at its first call.

    >>> times = iter([0.0, 2.0, 6.0, 9.0])
    >>> time_left = TimeLeft(what="simulating", total=80, say=print, clock=lambda: next(times))
    >>> for done in (0, 10, 20, 30):
    ...     time_left(done)
    simulating: 20 of 80 in 6 s, the others take about 18 s
    """

    what: str
    total: int
    say: Callable[[str], None]
    clock: Callable[[], float] = monotonic
    begun_s: float = -1.0
    before: int = 0  # what an earlier run has done took no time now
    due: bool = True

    def __call__(self, done: int) -> None:
        now_s = self.clock()
        if self.begun_s < 0:
            self.begun_s, self.before = now_s, done
        passed_s, new = now_s - self.begun_s, done - self.before
        if self.due and passed_s >= FIRST_S and new > 0 and done < self.total:
            self.due = False
            left = in_words(passed_s / new * (self.total - done))
            self.say(f"{self.what}: {done:,} of {self.total:,} in {in_words(passed_s)}, the others take about {left}")
