"""Kernel names of today's engines, each in its class: the names are those of public sources and traces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from traces.classify import OTHER, built_in, class_of, load_rules

LINES = (Path(__file__).parent / "kernel_names.txt").read_text(encoding="utf-8").splitlines()
NAMES = [tuple(line.split(" ", 1)) for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("cls", "name"), NAMES, ids=[name[:60] for _, name in NAMES])
def test_a_kernel_is_of_its_class(cls: str, name: str) -> None:
    assert class_of(name) == cls


def test_there_are_600_names_of_all_classes() -> None:
    count = Counter(cls for cls, _ in NAMES)
    assert len(set(NAMES)) == len(NAMES) >= 600
    assert set(count) == {rule.cls for rule in built_in()} | {OTHER}
    assert min(many for cls, many in count.items() if cls != OTHER) >= 40


def test_what_no_rule_knows_is_other_and_a_users_rule_comes_first(tmp_path: Path) -> None:
    assert class_of("my_secret_sauce") == "other"
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "secret|fused_moe"\nclass = "mlp"\n')
    assert [class_of(name, load_rules(rules)) for name in ("my_secret_sauce", "fused_moe_kernel")] == ["mlp", "mlp"]
