"""Conditions over scenarios and results, such as ``tp * pp <= 8`` or ``ttft_s < 0.5``, evaluated safely."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes, InvalidExpression

from inputs.suggest import nearest
from inputs.texts import expression_tree, truncated
from sim.errors import SimError

FITS = "fits in memory"
LENGTH_LIMIT, DEPTH_LIMIT = 10_000, 64  # beyond, evaluation runs out of stack
FUNCTIONS = {"min": min, "max": max, "abs": abs}
# A power of whole numbers may have millions of digits.
OPERATORS = DEFAULT_OPERATORS | {ast.Pow: lambda base, exponent: float(base) ** exponent}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One condition: arithmetic, comparisons, ``and``/``or``/``not``, ``in`` and min, max, abs over named columns.

    A column that a row has no value for (the time to first token of a decode step) does not meet any condition.

    >>> Condition.parse("tp * pp <= 8", known={"tp", "pp"}).holds({"tp": 4, "pp": 4})
    False
    """

    text: str
    names: frozenset[str]

    @classmethod
    def parse(cls, text: str, *, known: Collection[str]) -> Condition:
        """The condition ``text`` over columns among ``known``; :class:`SimError` says what is wrong with it."""
        if len(text) > LENGTH_LIMIT:
            raise SimError(f"condition '{truncated(text, 60)}': {len(text):,} characters, give at most {LENGTH_LIMIT}")
        try:
            tree = expression_tree(text.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else "nested too deeply, or a number too long"
            reason = f"{why} (write it like \"tp * pp <= 8\" or '{FITS}')"
            raise SimError(f"condition '{truncated(text, 100)}': {reason}") from None
        if _is_deep(tree):
            raise SimError(f"condition '{truncated(text, 100)}': nested more than {DEPTH_LIMIT} deep: split it in two")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(FUNCTIONS)
        for name in sorted(names - set(known)):
            raise SimError(f"condition '{text}': unknown column '{name}': {nearest(name, sorted(known))}")
        return cls(text=text.strip(), names=frozenset(names))

    @cached_property
    def _tree(self) -> ast.AST:
        return expression_tree(self.text)

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` meets the condition."""
        values = {name: row.get(name) for name in self.names}
        if any(value is None or value != value for value in values.values()):
            return False
        try:
            return bool(
                EvalWithCompoundTypes(names=values, functions=FUNCTIONS, operators=OPERATORS).eval(
                    self.text, self._tree
                )
            )
        except (InvalidExpression, TypeError, ValueError, ArithmeticError) as error:
            raise SimError(f"condition '{self.text}': {error}") from None


def _is_deep(tree: ast.AST) -> bool:
    level: list[ast.AST] = [tree]
    for _ in range(DEPTH_LIMIT):
        level = [inner for node in level for inner in ast.iter_child_nodes(node)]
    return bool(level)
