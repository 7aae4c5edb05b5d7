"""The format that a file's name asks for."""

from __future__ import annotations

from pathlib import Path

from traces.errors import TraceError
from traces.records import Trace
from traces.write.chrome import write_chrome
from traces.write.files import check_package
from traces.write.perfetto import SUFFIXES, write_perfetto


def check_ending(path: Path) -> None:
    """Refuse, before there is a trace, a name of no known format, or of one that lacks its package."""
    if not path.name.endswith((*SUFFIXES, ".json", ".json.gz")):
        raise TraceError(f"trace file '{path}': name it .json, .json.gz, .pftrace or .pftrace.gz")
    if path.name.endswith(SUFFIXES):
        check_package("perfetto", "perfetto", path)


def write_trace(trace: Trace, path: Path) -> Path:
    """Write ``trace`` in Perfetto's own format (.pftrace, .pftrace.gz) or as Chrome trace (.json, .json.gz)."""
    return write_perfetto(trace, path) if path.name.endswith(SUFFIXES) else write_chrome(trace, path)
