"""Repair of one JSON object that a profiler wrote without escaping what it should have."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

EDITS_LIMIT = 200  # an event that needs more is not an event
BARE = re.compile(r"(?:N/A|n/a|[-+]?(?:nan|inf)(?:\([^)]*\))?|[-+]?(?:NaN|Infinity)|None|undefined)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """The value, where it ended in the *given* text, and the rules that it broke."""

    value: Any
    used: int
    rules: tuple[str, ...]


def mend(text: str) -> Mended:
    r"""Decode the object at the start of ``text``, escaping and replacing what is broken.

    Repairs unescaped quotes (pytorch/kineto#1459), lone backslashes (#617), bare ``N/A`` and ``nan`` (#336),
    values left out, and trailing commas. Raises ``ValueError`` that quotes the place where it gave up.

    >>> mend('{"name": "f("x")", "pid": N/A, "args": {"path": "C:\\Users", "v": }}').value
    {'name': 'f("x")', 'pid': None, 'args': {'path': 'C:\\Users', 'v': None}}
    """
    decoder = json.JSONDecoder(strict=False)
    rules: dict[str, None] = {}
    grown = 0
    for _ in range(EDITS_LIMIT):
        try:
            value, used = decoder.raw_decode(text)
            if used <= grown:  # the repairs took more than they left: nothing of the given text was used
                raise ValueError(f"broken JSON at {text[:30]!r}")
            return Mended(value=value, used=used - grown, rules=tuple(rules))
        except json.JSONDecodeError as error:
            rule, begin, end, put = _edit(text, error)
            rules[rule] = None
            text = text[:begin] + put + text[end:]
            grown += len(put) - (end - begin)
    raise ValueError(f"an event needs more than {EDITS_LIMIT} repairs")


def _edit(text: str, error: json.JSONDecodeError) -> tuple[str, int, int, str]:
    """Rule broken, and the replacement [begin, end) -> text that mends it."""
    at = error.pos
    if "escape" in error.msg:
        slash = text.rfind("\\", 0, at + 1)
        return "lone-backslash", slash, slash, "\\"
    if (bare := BARE.match(text, at)) is not None:
        return "bare-value", at, bare.end(), "null"
    before = len(text[:at].rstrip())
    if "Expecting value" in error.msg and text[at : at + 1] in {",", "}", "]"}:
        if text[before - 1 : before] == ",":
            return "trailing-comma", before - 1, before, ""
        return "value-left-out", at, at, "null"
    if ("property name" in error.msg or "trailing comma" in error.msg) and text[at : at + 1] == "}":
        comma = text.rindex(",", 0, at)
        return "trailing-comma", comma, comma + 1, ""
    # A string ended too early: the quote before this place belongs to it.
    quote = before - 1 if text[before - 1 : before] == '"' else text.rfind('"', 0, at)
    if "':' delimiter" in error.msg:  # what looks like a key is the string's, so is the quote before the comma
        quote = text.rfind('"', 0, max(0, text.rfind('"', 0, quote)))
    elif "property name" in error.msg:
        quote = text.rfind('"', 0, max(0, text.rfind(",", 0, at)))
    if quote > 0 and ("delimiter" in error.msg or "property name" in error.msg):
        return "unescaped-quote", quote, quote, "\\"
    raise ValueError(f"broken JSON ({error.msg}) at {text[at : at + 30]!r}")
