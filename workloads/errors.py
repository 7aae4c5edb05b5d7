"""Everything ``workloads`` refuses to do, as one exception with one-line messages."""

from __future__ import annotations

from inputs.errors import WattlineError


class WorkloadError(WattlineError):
    """Bad einsum, model or layout; the message names the field, the value and the remedy."""
