"""The requests of the published servers: what is published of them comes out of the generator."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "published_servers.py"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_servers", PATH)
    assert spec is not None and spec.loader is not None
    module = sys.modules["published_servers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tail_of_conversations_solves_for_turns_and_prompts(published: ModuleType) -> None:
    share, length = published.going_on()
    rng = np.random.default_rng(0)
    more = np.where(rng.random(400_000) < share, rng.geometric(1.0 / length, 400_000), 0)
    turns = 1 + more
    assert turns.mean() == pytest.approx(published.TURNS, rel=0.01)
    each = turns * (turns + 1) / 2 * published.SAID + turns * (turns - 1) / 2 * published.ANSWERED
    assert each.sum() / turns.sum() == pytest.approx(published.PROMPT, rel=0.03)


def test_a_turn_begins_with_what_was_said_before(published: ModuleType) -> None:
    row = published.PUBLISHED[5]
    found = published.requests(row)
    assert len(found) == 1024 * row.repeats
    assert np.mean([one["input_length"] for one in found]) == pytest.approx(published.PROMPT, rel=0.02)
    assert np.mean([one["output_length"] for one in found]) == pytest.approx(row.output_tokens, rel=0.05)
    seen: set[int] = set()
    for one, before in zip(found[1:1024], found, strict=False):
        assert len(one["hash_ids"]) == one["input_length"] // published.BLOCK_TOKENS
        shared = [block for block in one["hash_ids"] if block in seen or block in before["hash_ids"]]
        assert shared == one["hash_ids"][: len(shared)] == before["hash_ids"][: len(shared)]
        seen.update(before["hash_ids"])
    assert found[1024:] == found[:1024]


def test_a_small_server_is_held_against_the_windows_own_figures(published: ModuleType) -> None:
    """Energy over the window is the meter's: power times its length, over the tokens that it saw."""
    row = replace(published.PUBLISHED[0], sequences=64)
    run = published.served(row, "greedy", cached=True)
    token_j, power_w = published.steady(run, row.sequences)
    first = np.sort(run.requests["first_token_s"].to_numpy())
    seconds = first[len(first) - 65] - first[63]
    tokens_per_s = power_w / token_j
    assert tokens_per_s * seconds == pytest.approx(run.requests["output_tokens"].sum(), rel=0.2)
    assert 0.75 * 64 / run.summary["itl_s"]["mean"] < tokens_per_s < 1.05 * 64 / run.summary["itl_s"]["mean"]
    assert run.requests["hit_tokens"].mean() > 400
