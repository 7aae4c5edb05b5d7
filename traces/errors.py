"""Everything ``traces`` refuses to do, as one exception with one-line messages."""

from __future__ import annotations

from inputs.errors import WattlineError


class TraceError(WattlineError):
    """A trace that cannot be read or written; the message names the place and the remedy."""
