"""Everything ``hardware`` refuses to do, as one exception with one-line messages."""

from __future__ import annotations


class HardwareError(Exception):
    """Bad catalog entry, profile or law input; the message names the field, the value and the remedy."""
