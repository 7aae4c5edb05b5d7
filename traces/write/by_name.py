"""The format that a file's name asks for."""

from __future__ import annotations

from pathlib import Path

from traces.records import Trace
from traces.write.chrome import write_chrome
from traces.write.perfetto import SUFFIXES, write_perfetto


def write_trace(trace: Trace, path: Path) -> Path:
    """Write ``trace`` in Perfetto's own format (.pftrace, .pftrace.gz) or as Chrome trace (.json, .json.gz)."""
    return write_perfetto(trace, path) if path.name.endswith(SUFFIXES) else write_chrome(trace, path)
