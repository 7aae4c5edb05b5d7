"""Arithmetic in data files: names, whole numbers, lists and texts, worked out without running anyone's code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from inputs.texts import expression_tree
from workloads.errors import WorkloadError


def _share(whole: int, parts: int) -> int:
    """``/``: a division that must come out even, as widths over heads do."""
    if whole % parts:
        raise ValueError(f"{whole} is not a multiple of {parts}")
    return whole // parts


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: _share, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


def _count(within: Any, one: Any, start: int = 0) -> int:
    """How often ``one`` stands in a text or list, from place ``start`` on."""
    return list(within)[start:].count(one)


def _of_layer(value: Any, layer: int) -> Any:
    """What a key says of a layer: an entry of its list, or the one value that all layers have."""
    return value[layer] if isinstance(value, list) else value


def _last(within: list[Any], one: Any, end: int) -> int:
    """The place of the last ``one`` before place ``end`` of a list."""
    return max(place for place, entry in enumerate(within[:end]) if entry == one)


def _split(text: Any) -> list[str]:
    """Entries of a list that a file writes as one text, between commas."""
    if not isinstance(text, str):
        raise TypeError(f"{str(text)[:30]!r} is no text")
    return [one.strip() for one in text.split(",")]


def _get(table: Any, key: str, otherwise: Any) -> Any:
    """An entry of a table inside the configuration, or what its absence means."""
    if table is not None and not isinstance(table, dict):
        raise TypeError(f"{str(table)[:30]!r} is no table")
    value = None if table is None else table.get(key)
    return otherwise if value is None else value


_CALLS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "len": len,
    "int": int,
    "sum": sum,
    "str": str,
    "count": _count,
    "of_layer": _of_layer,
    "last": _last,
    "split": _split,
    "get": _get,
}
_LONGEST = 400


@lru_cache(maxsize=2048)
def parse(text: str) -> ast.expr:
    """The tree of an expression; what is no arithmetic is refused."""
    try:
        tree = expression_tree(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise WorkloadError(f"'{text}' is no expression") from None
    if len(text) > _LONGEST:
        raise WorkloadError(f"'{text[:40]}...' is longer than {_LONGEST} letters")
    return tree


def names(text: str) -> frozenset[str]:
    """Names that an expression reads.

    >>> sorted(names("hidden_size // num_attention_heads if head_dim is None else head_dim"))
    ['head_dim', 'hidden_size', 'num_attention_heads']
    """
    found = frozenset(node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name))
    return found - {*_CALLS, "true", "false"}


def evaluate(text: str, lookup: Callable[[str], Any]) -> Any:
    """The value of an expression; ``lookup`` gives that of a name, and both sides of a choice are not looked up.

    >>> evaluate("'dense' if i < first else 'sparse'", {"i": 4, "first": 3}.__getitem__)
    'sparse'
    """
    try:
        return _value(parse(text), lookup, text)
    except (TypeError, ZeroDivisionError, IndexError, KeyError, ValueError, OverflowError) as error:
        raise WorkloadError(f"'{text}' cannot be worked out: {str(error)[:80]}") from None
    except RecursionError:
        raise WorkloadError(f"'{text}' cannot be worked out: it leads back to itself") from None


def _value(node: ast.expr, lookup: Callable[[str], Any], text: str) -> Any:
    def of(part: ast.expr) -> Any:
        return _value(part, lookup, text)

    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Name(id="true" | "false" as name):  # as TOML writes them
            return name == "true"
        case ast.Name(id=name):
            return lookup(name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [of(part) for part in parts]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            one, other = of(left), of(right)
            if isinstance(one, str | list) or isinstance(other, str | list):
                raise TypeError(f"{str(one)[:30]!r} and {str(other)[:30]!r} are no numbers")
            return _BINARY[type(op)](one, other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not of(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -of(operand)
        case ast.BoolOp(op=op, values=parts):
            found: Any = None
            for part in parts:
                found = of(part)
                if bool(found) == isinstance(op, ast.Or):
                    return found
            return found
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return of(body) if of(test) else of(orelse)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            before = of(left)
            for sign, part in zip(ops, rest, strict=True):
                after = of(part)
                if not _COMPARE[type(sign)](before, after):
                    return False
                before = after
            return True
        case ast.Subscript(value=value, slice=index):
            return of(value)[of(index)]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return _CALLS[name](*(of(part) for part in args))
    raise WorkloadError(
        f"'{text}': only arithmetic, comparisons, 'a if b else c', lists and {', '.join(_CALLS)} are known"
    )
