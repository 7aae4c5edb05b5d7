"""Everything ``hardware`` refuses to do, as one exception with one-line messages."""

from __future__ import annotations

from inputs.errors import WattlineError


class HardwareError(WattlineError):
    """Bad catalog entry, profile or law input; the message names the field, the value and the remedy."""
