"""Everything ``sim`` refuses to do, as exceptions with one-line messages."""

from __future__ import annotations

from inputs.errors import WattlineError


class SimError(WattlineError):
    """Base of every error of the root package; the message names the field, the value and the remedy."""


class ScenarioError(SimError):
    """A scenario that cannot be run as written."""


class MemoryShortError(ScenarioError):
    """A scenario that needs more memory than its GPUs have."""


class DeadlockError(SimError):
    """Nothing can progress: names the collective, who arrived and who is missing."""


class LivelockError(SimError):
    """Time stands still: one instant was updated too often."""


class FoldError(SimError):
    """Ranks or layers that were asked to be simulated once are not equal: says which obligation failed."""
