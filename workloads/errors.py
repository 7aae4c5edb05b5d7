"""Everything ``workloads`` refuses to do, as one exception with one-line messages."""

from __future__ import annotations


class WorkloadError(Exception):
    """Bad einsum, model or layout; the message names the field, the value and the remedy."""
