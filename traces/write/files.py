"""Files that are whole or not there, and paths that name something else than a file."""

from __future__ import annotations

import gzip
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, cast

from traces.errors import TraceError

GZIP_LEVEL = 1  # level 6 takes three times as long for a sixth less


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes become the file at ``path`` when the block ends well; else all stays as it was.

    Links are followed: the file that they lead to is replaced. It keeps its mode and owner; a new one has what the
    umask leaves. Devices, pipes, and the file that is our own standard output or error are written to as they are:
    there is nothing to replace. Raises :class:`OSError`.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is not None and (own := _standard_stream(found)) is not None:
        with os.fdopen(os.dup(own), "wb") as stream:
            yield stream
        return
    if found is not None and not stat.S_ISREG(found.st_mode):
        with path.open("wb") as stream:
            yield stream
        return
    target = path.resolve()
    if found is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, os.strerror(13), str(path))
    temporary = target.with_name(f".wattline-{os.getpid()}-{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        with os.fdopen(handle, "wb") as stream:
            if found is not None:
                with suppress(PermissionError):  # only root may give files away
                    os.fchown(handle, found.st_uid, found.st_gid)
                os.fchmod(handle, stat.S_IMODE(found.st_mode))
            yield stream
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _standard_stream(found: os.stat_result) -> int | None:
    """The number of our standard output or error where ``found`` is what it leads to."""
    for number in (1, 2):
        with suppress(OSError):  # it is closed
            if os.path.samestat(os.fstat(number), found):
                return number
    return None


def write_pieces(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write ``pieces`` to ``path``, compressed when it ends in .gz; equal pieces give equal bytes.

    Raises :class:`TraceError` when the path cannot be written; whatever is raised, no half-written file is left.
    """
    try:
        with whole_file(path) as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0) as packed:
                    _write(cast(BinaryIO, packed), pieces)
            else:
                _write(raw, pieces)
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot write trace '{path}': {reason}") from None
    return path


def _write(stream: BinaryIO, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        stream.write(piece)


def installed(module: str) -> bool:
    """Whether ``module`` could be imported; nothing but the packages around it is.

    >>> installed("json"), installed("no_such_package.part")
    (True, False)
    """
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package around it
        return False


def check_package(module: str, package: str, path: Path, *, kind: str = "trace file ") -> None:
    """Refuse, before there is anything to write, a file whose format needs a package that is not installed."""
    if not installed(module):
        raise TraceError(f"{kind}'{path}' needs the package {package}: pip install 'wattline[formats]'")
