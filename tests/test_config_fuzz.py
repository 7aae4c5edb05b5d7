"""A few hundred mutated configurations; ``python -m tests.config_fuzz --cases 2000`` tries more."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.config_fuzz import judge, run, run_families
from tests.config_kit import LLAMA


@pytest.mark.parametrize("seed", [11, 12])
def test_mutated_configurations_are_right_refused_or_marked(seed: int) -> None:
    found = Counter()
    for verdict, why, config in run(150, seed):
        assert verdict != "WRONG", f"{why}: {json.dumps(config)}"
        found[verdict] += 1
    assert found["right"] > 15
    assert found["refused"] > 60


def test_the_judge_sees_what_is_wrong() -> None:
    # A key that the product accepts although the case says it must not, and positions that run out.
    assert judge(LLAMA, refused=True, tokens=512) == ("WRONG", "accepted")
    assert judge(LLAMA, refused=False, tokens=512) == ("right", "")
    assert judge(LLAMA, refused=False, tokens=131_073) == ("marked", "")
    assert judge(LLAMA | {"vocab_size": None}, refused=False, tokens=512) == ("refused", "")


@pytest.mark.parametrize("seed", [21, 22])
def test_mutated_families_are_right_or_refused(seed: int) -> None:
    found = Counter()
    for verdict, why, config in run_families(150, seed):
        assert verdict != "WRONG", f"{why}: {json.dumps(config)}"
        found[verdict] += 1
    assert found["right"] > 20
    assert found["refused"] > 50
