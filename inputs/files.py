"""Bytes and lines of a user's file, compressed or not, in bounded memory.

``what`` the file is to be is for messages; ``refusal`` is the exception of the package that asks.
"""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from inputs.texts import Refusal

GZIP = b"\x1f\x8b"
TEXT_LIMIT_BYTES = 1 << 26  # a scenario, grid, model, GPU or profile is far smaller
STREAM_LIMIT_BYTES = 1 << 30  # of lines, after decompression
LINE_LIMIT_BYTES = 1 << 22
# Real traces and requests grow 5 to 30 times: what grows more was made to.
GROWTH_LIMIT, GROWTH_FREE_BYTES = 100, 1 << 24


def check_regular(path: Path, what: str, refusal: Refusal) -> None:
    """Refuse what has no end or blocks: pipes, devices, sockets."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise refusal(_unreadable(path, what, error)) from None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # reading a folder says so itself
        return
    kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
    kind = next((name for is_kind, name in kinds if is_kind(mode)), "no file")
    raise refusal(f"cannot read {what} '{path}': it is {kind}: give a regular file")


def read_text(path: Path, what: str, refusal: Refusal) -> str:
    """The UTF-8 text of a small file, without the mark that some editors put before it."""
    check_regular(path, what, refusal)
    try:
        with path.open("rb") as stream:
            data = stream.read(TEXT_LIMIT_BYTES + 1)
        if len(data) > TEXT_LIMIT_BYTES:
            raise refusal(f"cannot read {what} '{path}': over {TEXT_LIMIT_BYTES >> 20} MiB: is it the right file?")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal(f"cannot read {what} '{path}': not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise refusal(_unreadable(path, what, error)) from None


def contents(*paths: Path | str | None) -> tuple[object, ...]:
    """What tells one state of users' files from another, for memos of what was read of them: their bytes.

    None, a missing file and one that :func:`read_text` would refuse have no state.
    """
    return tuple(None if path is None else _content(Path(path)) for path in paths)


def _content(path: Path) -> bytes | None:
    try:
        known = path.stat()
        return path.read_bytes() if stat.S_ISREG(known.st_mode) and known.st_size <= TEXT_LIMIT_BYTES else None
    except (OSError, ValueError):
        return None


@contextmanager
def open_bytes(path: Path, what: str, refusal: Refusal) -> Iterator[BinaryIO]:
    """``path`` for reading, decompressed if it is gzip by content; a damaged or cut one is refused where it breaks."""
    check_regular(path, what, refusal)
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
    except EOFError:
        raise refusal(f"cannot read {what} '{path}': truncated gzip file: copy or download it again") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise refusal(f"cannot read {what} '{path}': damaged gzip file ({error}): copy it again") from None
    except OSError as error:
        raise refusal(_unreadable(path, what, error)) from None


def check_growth(path: Path, what: str, refusal: Refusal, seen_bytes: int, file_bytes: int) -> None:
    """Refuse a compressed file of which ``seen_bytes`` came out, and no end yet, where that is out of proportion."""
    if seen_bytes > GROWTH_FREE_BYTES and seen_bytes > GROWTH_LIMIT * file_bytes:
        raise refusal(
            f"cannot read {what} '{path}': it grows more than {GROWTH_LIMIT}-fold as it is decompressed: decompress it "
            "yourself if that is right"
        )


def read_lines(path: Path, what: str, refusal: Refusal) -> Iterator[tuple[int, str]]:
    """Lines that hold something, numbered from 1, of a text that need not fit in memory.

    A line ends at a line feed alone: JSON lines may hold any other separator.
    """
    with open_bytes(path, what, refusal) as stream:
        number, seen, size = 0, 0, path.stat().st_size
        while line := stream.readline(LINE_LIMIT_BYTES + 1):
            number, seen = number + 1, seen + len(line)
            if len(line) > LINE_LIMIT_BYTES:
                raise refusal(f"{path}, line {number}: over {LINE_LIMIT_BYTES >> 20} MiB: is it a text of lines?")
            check_growth(path, what, refusal, seen, size)
            if seen > STREAM_LIMIT_BYTES:
                raise refusal(f"{path}: over {STREAM_LIMIT_BYTES >> 20} MiB of text: give a part of it")
            if line.isspace():
                continue
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise refusal(f"{path}, line {number}: not UTF-8 text (byte {error.start} of the line)") from None


def _unreadable(path: Path, what: str, error: OSError | ValueError) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"cannot read {what} '{path}': {reason}"
