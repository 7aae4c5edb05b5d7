"""Write whole files or nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sim.errors import SimError


class OutputError(SimError):
    """A result that cannot be written where the user asked."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` by renaming a finished file: readers never see a half-written one."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error}") from None
