"""Chrome-trace events from a stream of bytes, in bounded memory, mended where profilers wrote broken JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from traces.errors import TraceError
from traces.read.mend import Mended, mend

BLOCK_BYTES = 1 << 19  # what becomes of it stays in a core's cache: blocks of 2 MiB take a quarter longer
NEWLINE = ord("\n")
EVENT_LIMIT_BYTES = 1 << 26  # one event, or all that stands before or after the events, must fit
SMS_LIMIT = 1 << 16
NESTED_LIMIT = 64  # boundaries looked at for the true end of one event
# An event begins where another ends and one of the keys of the format follows.
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|bp|s)"\s*:)')
HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
Event = TypeVar("Event")


@dataclass(slots=True)
class Reading:
    """What is learnt while the events of one file stream by."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    mended: dict[str, tuple[int, str]] = field(default_factory=dict)
    line: int = 1
    truncated: bool = False

    def note(self, rule: str, where: str | None = None, count: int = 1) -> None:
        """Count one more case of ``rule``; the first place is kept."""
        seen, first = self.mended.get(rule, (0, where or f"{self.path.name}:{self.line}"))
        self.mended[rule] = (seen + count, first)


def read_events(
    stream: BinaryIO, reading: Reading, kinds_of: Callable[[Reading], Sequence[type[Event]]]
) -> Iterator[list[Event]]:
    """Lists of events decoded as what ``kinds_of`` says (``msgspec.Struct``, tried in turn) of the file's head.

    ``reading`` takes the metadata and the repairs.

    Reads ``BLOCK_BYTES`` at a time. A block is cut at its last event boundary and decoded whole; only a block
    that does not decode is walked event by event, mended, or refused with file, line and remedy.
    """
    rest = _skip_head(stream, reading)
    kinds = kinds_of(reading)
    decoders = [msgspec.json.Decoder(list[kind]) for kind in kinds]  # type: ignore[valid-type]
    while True:
        block = stream.read(BLOCK_BYTES)
        text = rest + block
        if not block:
            break
        cut = _last_boundary(text, len(rest))
        if cut is None:
            if len(text) > EVENT_LIMIT_BYTES:
                raise _refusal(reading, f"no event ends within {EVENT_LIMIT_BYTES >> 20} MiB", "is it a trace?")
            rest = text
            continue
        rest, whole = text[cut:], text[: cut + 1]
        if (events := _decoded(whole, decoders)) is not None:
            yield events
            reading.line += int(np.count_nonzero(np.frombuffer(whole, dtype=np.uint8) == NEWLINE))
        else:
            events, tail = _walk(whole, reading, kinds[-1])
            yield events
            if tail is not None:
                _read_tail(tail + rest + stream.read(EVENT_LIMIT_BYTES), reading)
                return
        comma = rest.index(b",") + 1
        reading.line += rest.count(b"\n", 0, comma)
        rest = rest[comma:]
    events, tail = _walk(text, reading, kinds[-1])
    yield events
    if tail is None:
        reading.truncated = True
        reading.note("array-without-end")
    else:
        _read_tail(tail, reading)


def _decoded(text: bytes, decoders: Sequence[msgspec.json.Decoder[list[Event]]]) -> list[Event] | None:
    """All events of ``text`` by the first decoder that takes them."""
    packed = b"[%b]" % text
    for decoder in decoders:
        try:
            return decoder.decode(packed)
        except msgspec.MsgspecError:
            continue
    return None


def _last_boundary(text: bytes, fresh_from: int) -> int | None:
    """Where the last event of ``text`` that is surely whole ends (its closing brace)."""
    for window in (1 << 14, 1 << 20, len(text)):
        last = None
        for found in BOUNDARY.finditer(text, max(0, len(text) - window)):
            last = found.start()
        if last is not None:
            return last
        if window >= len(text) - fresh_from + 64:
            return None  # what came before the fresh bytes was searched already
    return None


def _skip_head(stream: BinaryIO, reading: Reading) -> bytes:
    """Read up to the first event; what stands before it is metadata."""
    text = b""
    while True:
        block = stream.read(BLOCK_BYTES)
        text += block
        start = text.lstrip(b"\xef\xbb\xbf \t\r\n")
        if len(start) < len(text.lstrip()):
            reading.note("byte-order-mark")
        if start[:1] == b"[":
            reading.line += text.count(b"\n", 0, len(text) - len(start))
            return start[1:]
        if start and start[:1] != b"{":
            raise _refusal(reading, "does not begin with '{' or '['", "is it a Chrome or Kineto JSON trace?")
        if (found := HEAD.search(text)) is not None:
            head = text[text.index(b"{") : found.start()].rstrip().rstrip(b",")
            _take_metadata(head + b"}", reading)
            reading.line += text.count(b"\n", 0, found.end())
            return text[found.end() :]
        if not block or len(text) > EVENT_LIMIT_BYTES:
            raise _refusal(reading, "holds no 'traceEvents' array", "export it with export_chrome_trace")


def _read_tail(tail: bytes, reading: Reading) -> None:
    """What stands after the closing bracket of the events."""
    body = tail.lstrip().lstrip(b",").strip()
    if body.startswith(b"}") or not body:
        if body.strip(b"}\r\n\t ;"):
            reading.note("text-after-the-end")
        return
    if body.startswith((b"{", b"[")):
        reading.note("text-after-the-end")
        return
    _take_metadata(b"{" + body, reading)


def _take_metadata(text: bytes, reading: Reading) -> None:
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        try:
            mended = mend(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            reading.note("metadata-unreadable")
            return
        _note_all(mended, reading, reading.line)
        value = mended.value
    if isinstance(value, dict):
        for key, item in value.items():
            if key in SHAPES and not SHAPES[key](item):
                reading.note("metadata-of-wrong-type", f"{reading.path.name}: {key}")
            else:
                reading.metadata.setdefault(key, item)


def _are_devices(value: Any) -> bool:
    """A list of GPUs, each with what is read of it: a text for a name, a number of SMs."""
    return isinstance(value, list) and all(
        isinstance(event, dict)
        and isinstance(event.get("name", ""), str)
        and type(sms := event.get("numSms", 1)) is int
        and 0 < sms < SMS_LIMIT
        for event in value
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


# What readers of the metadata rely on.
SHAPES: dict[str, Callable[[Any], bool]] = {
    "deviceProperties": _are_devices, "distributedInfo": _is_table, "wattline": _is_table,
}  # fmt: skip


def _walk(text: bytes, reading: Reading, kind: type[Event]) -> tuple[list[Event], bytes | None]:
    """Events of ``text`` one by one; the second value is what follows the array's end, None if it goes on."""
    events: list[Event] = []
    begin = 0
    while begin < len(text):
        begin, reading.line = _skip_blank(text, begin, reading.line)
        if begin >= len(text):
            break
        if text[begin : begin + 1] == b"]":
            return events, text[begin + 1 :]
        end, event = _one(text, begin, reading, kind)
        if event is not None:
            events.append(event)
        reading.line += text.count(b"\n", begin, end)
        begin = end
    return events, None


def _skip_blank(text: bytes, begin: int, line: int) -> tuple[int, int]:
    """Past white space and commas."""
    end = begin
    while end < len(text) and text[end : end + 1] in b" \t\r\n,":
        end += 1
    return end, line + text.count(b"\n", begin, end)


def _one(text: bytes, begin: int, reading: Reading, kind: type[Event]) -> tuple[int, Event | None]:
    """The event at ``begin`` and where it ends: as it stands, else mended, else refused."""
    boundary = BOUNDARY.search(text, begin)
    end = len(text) if boundary is None else boundary.start() + 1
    piece = text[begin:end].decode("utf-8", "replace")
    used = _length(piece)
    if used is None and boundary is not None:  # objects inside an event's arguments may look like events
        for later in islice(BOUNDARY.finditer(text, boundary.end()), NESTED_LIMIT):
            longer = text[begin : later.start() + 1].decode("utf-8", "replace")
            if (used := _length(longer)) is not None:
                piece = longer
                break
    if used is not None:
        ends = begin + len(piece[:used].encode("utf-8", "replace"))
        return ends, _convert(json.loads(piece[:used], strict=False), reading, kind, text[begin:ends])
    try:
        mended = mend(piece)
    except (ValueError, RecursionError) as error:
        if boundary is None and piece.count("}") < piece.count("{"):
            return len(text), None  # the file was cut inside its last event
        raise _refusal(reading, f"{error}", "mend that line, or export the trace again") from None
    _note_all(mended, reading, reading.line)
    return begin + len(piece[: mended.used].encode("utf-8", "replace")), _convert(mended.value, reading, kind)


def _length(piece: str) -> int | None:
    """Characters of the JSON value at the start of ``piece``, None if it is broken."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(piece)[1]
    except (ValueError, RecursionError):
        return None


def _note_all(mended: Mended, reading: Reading, line: int) -> None:
    for rule in mended.rules:
        reading.note(rule, f"{reading.path.name}:{line}")


def _convert(value: Any, reading: Reading, kind: type[Event], text: bytes | None = None) -> Event | None:
    """``value`` as ``kind``, from the ``text`` that it was decoded from where that is sound (digits survive)."""
    if not isinstance(value, dict):
        reading.note("not-an-event")
        return None
    try:
        try:
            return msgspec.json.decode(text or b"", type=kind)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            sound = json.dumps(value)
            if text is not None and (plain := json.dumps(json.loads(sound, parse_constant=lambda _: None))) != sound:
                reading.note("bare-value")
                sound = plain
            return msgspec.json.decode(sound.encode("utf-8", "replace"), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        reading.note("field-of-wrong-type", f"{reading.path.name}:{reading.line}: {error}")
        return None


def _refusal(reading: Reading, what: str, remedy: str) -> TraceError:
    return TraceError(f"{reading.path}:{reading.line}: {what}: {remedy}")
