"""SimPy's environment over whole units of time."""

from __future__ import annotations

from simpy.core import Environment


class WholeTime(Environment):
    """Time counts whole units (picoseconds in the engine, nanoseconds in replays), so that sums of it are exact.

    >>> WholeTime(5).now
    5
    """

    _now: int

    def __init__(self, initial_time: int = 0) -> None:
        super().__init__(initial_time)

    @property
    def now(self) -> int:
        """The present."""
        return self._now
