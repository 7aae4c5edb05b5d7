"""Whole files or nothing."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from traces.errors import TraceError

GZIP_LEVEL = 1  # level 6 takes three times as long for a sixth less


def write_pieces(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write ``pieces`` to ``path``, compressed when it ends in .gz; equal pieces give equal bytes.

    Raises :class:`TraceError` when the path cannot be written; whatever is raised, no half-written file is left.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise TraceError(f"cannot write trace '{path}': {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0) as out:
                    for piece in pieces:
                        out.write(piece)
            else:
                for piece in pieces:
                    raw.write(piece)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except (OSError, zlib.error) as error:
        Path(temporary).unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot write trace '{path}': {reason}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
