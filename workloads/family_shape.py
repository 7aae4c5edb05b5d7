"""What the tables of a family's file hold, checked before anything reads them: one line for what is another thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.fields import refuse_unknown


class FieldShape(NamedTuple):
    """What a value must be, and in words."""

    fits: Callable[[Any], bool]
    words: str


def _expression(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int | float) or (isinstance(value, list) and all(map(_expression, value)))


def _list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _table(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _rows(length: int) -> Callable[[Any], bool]:
    return lambda value: _list(value, lambda row: _list(row, _expression) and len(row) == length)


TEXT = FieldShape(_text, "a text")
TEXTS = FieldShape(lambda value: _list(value, _text), "a list of texts")
EXPRESSION = FieldShape(
    lambda value: isinstance(value, str | int), "a number, true or false, or an expression in quotes"
)
SWITCH = FieldShape(lambda value: isinstance(value, bool), "true or false")
EXPRESSIONS = FieldShape(lambda value: _table(value, _expression), "a table of numbers and expressions, none empty")
LISTS = FieldShape(lambda value: _table(value, lambda one: isinstance(one, list)), "a table of lists")
TABLE = FieldShape(lambda value: isinstance(value, dict), "a table")
NODES = FieldShape(
    lambda value: _table(value, lambda nodes: _list(nodes, lambda node: isinstance(node, dict))) and bool(value),
    "a list of nodes for each kind of layer",
)
CHECKS = FieldShape(
    lambda value: _list(value, lambda one: _table(one, _text) and set(one) == {"that", "why"}),
    "tables of that and why",
)
STACK = {
    "sizes": EXPRESSIONS, "axes": EXPRESSIONS, "latent": EXPRESSIONS, "state_space": EXPRESSIONS, "layer": NODES,
    "layer_sizes": EXPRESSIONS, "per_layer": LISTS, "kind": EXPRESSION, "tied_embeddings": EXPRESSION,
    "causal": EXPRESSION, "extra_parameters": EXPRESSION, "positions": EXPRESSION,
    "learned_positions": SWITCH,
}  # fmt: skip
SHAPES = STACK | {
    "like": TEXT, "source": TEXT, "checked": TEXT, "refused": TEXT, "model_types": TEXTS, "architectures": TEXTS,
    "ignored": TEXTS, "required": TEXTS, "absent": EXPRESSIONS, "defaults": EXPRESSIONS, "terms": EXPRESSIONS,
    "draft_parameters": EXPRESSION, "drafts_published": SWITCH,
    "modules": LISTS,
    "only": LISTS, "nested": LISTS, "check": CHECKS, "language": TABLE, "vision": TABLE, "encoder": TABLE,
}  # fmt: skip
ENCODER = STACK | {"front": FieldShape(_rows(3), "a list of [depth, width, rows a token]")}
LANGUAGE = {"key": TEXT, "model_type": TEXT, "types": TABLE, "defaults": TABLE}
VISION = STACK | {
    "key": TEXT, "tower": TEXT, "types": TABLE, "defaults": TABLE, "terms": EXPRESSIONS, "ignored": TEXTS,
    "patches": EXPRESSION, "tokens": EXPRESSION, "grid": EXPRESSIONS,
    "projector": FieldShape(_rows(2), "a list of [depth, width]"),
}  # fmt: skip


PARTS = {
    "encoder": (ENCODER, ("sizes", "layer")),
    "language": (LANGUAGE, ("key", "model_type")),
    "vision": (VISION, ("key", "patches", "tokens", "projector")),
}


def check_shapes(table: dict[str, Any], where: str) -> None:
    """Refuse fields of a family that are unknown, or another thing than they should be."""
    _check(table, SHAPES, where)
    for name, (shapes, _) in PARTS.items():
        _check(table.get(name, {}), shapes, f"{where}: {name}")


def check_whole(table: Mapping[str, Any], where: str) -> None:
    """Refuse a family, over the one that it is like, that lacks a field."""
    needed: dict[str, tuple[str, ...]] = {
        "": ("model_types",) if "language" in table else ("model_types", "sizes", "layer")
    }
    needed |= {name: names for name, (_, names) in PARTS.items() if name in table}
    for part, names in needed.items():
        for name in names:
            if not (table[part] if part else table).get(name):
                words = (PARTS[part][0] if part else SHAPES)[name].words
                raise WorkloadError(f"{where}: {part + '.' if part else ''}{name} is missing: give {words}")


def _check(table: dict[str, Any], shapes: Mapping[str, FieldShape], where: str) -> None:
    refuse_unknown(table, tuple(shapes), where)
    for name, value in table.items():
        if not shapes[name].fits(value):
            raise WorkloadError(f"{where}: {name} = {shown(value)}: give {shapes[name].words}")
