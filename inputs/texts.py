"""TOML and JSON texts as values that any reader can handle: finite numbers, whole ones of 64 bits, no deep nesting.

``where`` names the origin of a text in messages; ``refusal`` is the exception of the package that asks.
"""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

Refusal = Callable[[str], Exception]
DEPTH_LIMIT = 64
SURROGATE = re.compile("[\ud800-\udfff]")
WHOLE_LIMIT = 1 << 63
SHOWN = 70
DIGITS = "a number of thousands of digits: give one of at most 64 bits"


def toml_list(text: str, name: str) -> list[str]:
    """The list ``name`` of one of the package's own TOML files, without reading the rest of it; empty if it has none.

    >>> toml_list('id = "h100"\\naliases = ["h100", "hopper"]\\n[table]\\n', "aliases")
    ['h100', 'hopper']
    """
    found = re.search(rf"^{name}\s*=\s*\[[^\]]*\]", text, re.MULTILINE)
    return [] if found is None else list(tomllib.loads(found[0])[name])


def parse_toml(text: str, where: str, refusal: Refusal) -> dict[str, Any]:
    """The table of a TOML text."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise refusal(f"{where}: not valid TOML: {truncated(str(error), 200)}") from None
    except RecursionError:
        raise refusal(f"{where}: not valid TOML: nested too deeply (at most {DEPTH_LIMIT})") from None
    except ValueError:
        raise refusal(f"{where}: not valid TOML: {DIGITS}") from None
    _check(table, where, refusal)  # TOML has nan and inf: what they mean is for the reader to say
    return table


def parse_json(text: str, where: str, refusal: Refusal, *, one_line: bool = False, unbounded: str = "") -> Any:
    """The value of a JSON text; the text of ``one_line`` has its number in ``where``.

    A key that stands twice in one object of a file is refused, instead of its last value being taken.
    ``unbounded`` is a key that may hold Infinity, which Python writes into JSON and JSON does not know.

    >>> parse_json("[1, NaN]", "x.json", ValueError)
    Traceback (most recent call last):
        ...
    ValueError: x.json: not valid JSON: NaN is no number of JSON: give a finite one, or null
    """
    try:
        found = f'"{unbounded}"' in text and unbounded
        value = (_OPEN_JSON if found else _JSON).decode(text)
    except json.JSONDecodeError as error:
        line = "" if one_line else f", line {error.lineno}"
        raise refusal(f"{where}{line}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise refusal(f"{where}: not valid JSON: nested too deeply (at most {DEPTH_LIMIT})") from None
    except _NotJsonError as error:
        raise refusal(f"{where}: not valid JSON: {error}") from None
    except ValueError:
        raise refusal(f"{where}: not valid JSON: {DIGITS}") from None
    _check(value, where, refusal, finite=True, unbounded=unbounded)
    return value


def expression_tree(text: str) -> ast.expr:
    """The tree of an expression, without what Python warns of in it (``1not``), which would reach the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(text, mode="eval").body


def shown(value: object) -> str:
    """``value`` as a message quotes it.

    >>> shown("gelu"), shown([3])
    ("'gelu'", '[3]')
    """
    try:
        return truncated(repr(value), SHOWN)
    except (ValueError, RecursionError):  # a number of thousands of digits, tables in tables
        return f"a {type(value).__name__} that is too large to print"


def truncated(text: str, limit: int) -> str:
    """``text``, its middle left out where it is longer than ``limit``.

    >>> truncated("a" * 100, 20)
    'aaaaaaaaaaa...aaaaaa'
    """
    head, tail = limit * 3 // 5 - 1, limit * 3 // 10
    return text if len(text) <= limit else f"{text[:head]}...{text[-tail:]}"


class _NotJsonError(ValueError):
    """NaN or Infinity in a JSON text, or a key twice where once is meant."""


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJsonError(f"{name} is no number of JSON: give a finite one, or null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once each."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _NotJsonError(f"key {shown(next(n for n in names if names.count(n) > 1))} stands twice")
    return found


_JSON = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_once)
_OPEN_JSON = json.JSONDecoder(object_pairs_hook=_once)


def _check(value: Any, where: str, refusal: Refusal, *, finite: bool = False, unbounded: str = "") -> None:
    """Refuse what no field of any file can mean. A walk without recursion: the depth is what is checked."""
    left: list[tuple[Any, str, int]] = [({"": value}, "", 0)]
    while left:
        table, place, depth = left.pop()
        if depth > DEPTH_LIMIT:
            raise refusal(f"{where}: {truncated(place, SHOWN)}: nested too deeply (at most {DEPTH_LIMIT})")
        for key, item in table.items() if isinstance(table, dict) else enumerate(table):
            inner = f"{place}.{key}" if place else str(key)
            if isinstance(item, dict | list):
                left.append((item, inner, depth + 1))
            elif isinstance(item, str) and not item.isascii() and SURROGATE.search(item):
                raise refusal(f"{where}: {_named(inner)}{shown(item)}: a lone surrogate is no text")
            elif isinstance(item, int) and not -WHOLE_LIMIT <= item < WHOLE_LIMIT:
                raise refusal(f"{where}: {_named(inner)}{shown(item)}: give a number of at most 64 bits")
            elif finite and isinstance(item, float) and not math.isfinite(item):
                if unbounded in inner.split(".") and not math.isnan(item):
                    continue
                raise refusal(f"{where}: {_named(inner)}{item}: give a finite number")


def _named(place: str) -> str:
    return f"{truncated(place, SHOWN)} = " if place else ""
