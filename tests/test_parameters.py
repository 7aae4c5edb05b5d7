"""No function takes more than six parameters: what belongs together comes as one object of sizes or settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("hardware", "inputs", "sim", "traces", "workloads")
MOST = 6
# Options of a command are its flags; arguments of a kernel that Triton compiles are pointers.
FLAGS_OR_POINTERS = ("command(", "triton.jit")
# An entry is built once a kernel of a run: an object around its fields would be built as often.
ALLOWED = {"sim/engine/state.py: Entry.__init__"}


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions with their names, those of classes behind the class's."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{owner}{node.name}", node
        yield from functions(node, f"{node.name}." if isinstance(node, ast.ClassDef) else owner)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that have a name of their own; neither the object of a method nor ``**fields``."""
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def test_no_function_has_more_than_six_parameters() -> None:
    seen, many = 0, set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            decorators = [ast.unparse(one) for one in function.decorator_list]
            if any(word in one for one in decorators for word in FLAGS_OR_POINTERS):
                continue
            seen += 1
            if parameters(function) > MOST:
                many.add(f"{path.relative_to(ROOT)}: {name}")
    assert seen > 3000
    assert many == ALLOWED
