"""One class, one name: a reader who meets a name finds one thing behind it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("hardware", "inputs", "sim", "traces", "workloads")


def test_no_two_classes_of_the_packages_share_a_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert len(found) > 500
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
