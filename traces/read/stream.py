"""Bytes of a trace file, compressed or not, up to where the file was damaged."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from inputs.files import GZIP, check_growth, check_regular
from traces.errors import TraceError
from traces.read.events import Reading


@contextmanager
def open_trace(path: Path, reading: Reading) -> Iterator[BinaryIO]:
    """``path`` for reading, decompressed if it is gzip by content.

    Raises :class:`TraceError` where it cannot be opened or read.
    """
    check_regular(path, "trace", TraceError)
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            yield cast(BinaryIO, _Forgiving(cast(BinaryIO, stream), reading))
    except OSError as error:
        raise TraceError(f"cannot read trace '{path}': {error.strerror or error}") from None


class _Forgiving(io.RawIOBase):
    """A compressed stream that ends where the file was cut, and says so."""

    def __init__(self, stream: BinaryIO, reading: Reading) -> None:
        self.stream, self.reading, self.ended = stream, reading, False
        self.seen_bytes, self.file_bytes = 0, reading.path.stat().st_size

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes, as many as come whole."""
        if self.ended:
            return b""
        parts, left = [], size
        while left > 0:  # small reads: all that stands before the damage is kept
            try:
                part = self.stream.read(min(left, 1 << 16))
            except (EOFError, zlib.error, gzip.BadGzipFile):
                self.reading.note("compressed-file-damaged")
                self.ended = True
                break
            if not part:
                break
            parts.append(part)
            left -= len(part)
            self.seen_bytes += len(part)
            check_growth(self.reading.path, "trace", TraceError, self.seen_bytes, self.file_bytes)
        return b"".join(parts)
