"""Grid files: products, ranges, zips, blocks, samples, conditions, and what is wrong with them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sim.errors import SimError
from sim.explore.conditions import Condition
from sim.explore.grid import parse_grid
from sim.explore.row import row_id

BASE = {"model": "llama3-8b"}


def points(data: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(case.fields.get(name) for name in names) for case in parse_grid(data, where="g").cases]


def test_grid_is_the_product_in_order_and_zip_moves_together() -> None:
    data = {"base": BASE, "grid": {"tp": [1, 2]}, "zip": {"batch": [1, 8], "power_cap_w": ["default", 400]}}
    assert points(data, "tp", "batch", "power_cap_w") == [(1, 1, None), (1, 8, 400), (2, 1, None), (2, 8, 400)]


def test_ranges_include_both_ends() -> None:
    grid = {"batch": {"from": 1, "to": 64, "factor": 4}, "seq_len": {"from": 1000, "to": 2000, "step": 500}}
    assert points({"base": BASE, "grid": grid}, "batch", "seq_len") == [
        (b, s) for b in (1, 4, 16, 64) for s in (1000, 1500, 2000)
    ]
    caps = points({"base": BASE, "grid": {"power_cap_w": {"from": 0.1 + 300, "to": 300.3, "step": 0.1}}}, "power_cap_w")
    assert caps == [(300.1,), (300.2,), (300.3,)]


def test_blocks_share_base_and_conditions() -> None:
    data = {
        "base": BASE,
        "where": ["batch < 8"],
        "block": [{"grid": {"batch": [1, 8]}}, {"base": {"tp": 2}, "grid": {"batch": [2, 4]}, "where": ["batch > 2"]}],
    }
    assert points(data, "tp", "batch") == [(None, 1), (2, 4)]


def test_conditions_on_inputs_leave_points_out_and_conditions_on_results_stay() -> None:
    grid = parse_grid(
        {"base": BASE, "grid": {"tp": [1, 4], "pp": [1, 4]}, "where": ["tp * pp <= 8", "ttft_s < 0.5"]}, where="g"
    )
    assert (len(grid.cases), grid.excluded) == (3, 1)
    assert {c.text for case in grid.cases for c in case.where} == {"ttft_s < 0.5"}


def test_fits_in_memory_leaves_out_what_memory_refuses_and_nothing_else() -> None:
    # 70B in bf16 are 141 GB: two GPUs of 80 GB hold the weights, one does not. tp = 3 is refused for its heads.
    data = {"base": {"model": "llama3-70b"}, "grid": {"tp": [1, 3, 4]}, "where": ["fits in memory"]}
    assert points(data, "tp") == [(3,), (4,)]


@pytest.mark.parametrize("method", ["random", "latin-hypercube"])
def test_samples_are_reproducible_and_inside(method: str) -> None:
    data: dict[str, Any] = {
        "base": BASE,
        "grid": {"seq_len": {"from": 256, "to": 511}, "tp": [1, 2, 4, 8], "power_cap_w": {"from": 300.5, "to": 700}},
        "sample": {"count": 64, "method": method, "seed": 3},
    }
    names = ("seq_len", "tp", "power_cap_w")
    drawn = points(data, *names)
    assert drawn == points(data, *names)
    assert all(256 <= s <= 511 and isinstance(s, int) and tp in (1, 2, 4, 8) and 300.5 <= w < 700 for s, tp, w in drawn)
    if method == "latin-hypercube":  # one draw in each 64th of every axis
        assert sorted((s - 256) // 4 for s, _, _ in drawn) == list(range(64))
        assert [sum(tp == t for _, tp, _ in drawn) for t in (1, 2, 4, 8)] == [16] * 4


def test_rows_are_named_by_what_they_describe() -> None:
    assert row_id({**BASE, "batch": 1}) == row_id(BASE) != row_id({**BASE, "batch": 2})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"base": {"modle": "x"}, "grid": {"tp": [1]}}, "unknown key 'modle' in g: did you mean 'model'?"),
        ({"base": BASE, "grid": {"tpp": [1]}}, "unknown key 'tpp' in g: did you mean 'tp'?"),
        ({"base": BASE, "gird": {"tp": [1]}}, "g: gird: Extra inputs are not permitted"),
        ({"base": BASE, "grid": {"tp": []}}, "g: tp: an empty list leaves nothing to run"),
        ({"base": BASE, "grid": {"tp": {"from": 4, "to": 1, "step": 1}}}, "to = 1 is below from = 4: swap them"),
        ({"base": BASE, "grid": {"tp": {"from": 1, "to": 4}}}, "grid.tp: a range without step or factor is continuous"),
        ({"base": BASE, "zip": {"tp": [1, 2], "batch": [1]}}, "zip: lists of different lengths (tp 2, batch 1)"),
        ({"base": BASE, "grid": {"tp": [1]}, "zip": {"tp": [1]}}, "g: tp varies in two places: keep one"),
        ({"base": BASE, "grid": {"tp": [1]}, "where": ["tp > 2"]}, "g: no scenario is left: 1 break the conditions"),
        ({"base": BASE, "where": ["ttftt_s < 1"]}, "unknown column 'ttftt_s': did you mean 'ttft_s'?"),
        ({"base": BASE, "where": ["tp <"]}, "condition 'tp <': invalid syntax"),
        ({"base": BASE, "where": ["__import__('os').system('true')"]}, "unknown column '__import__'"),
        ({"base": BASE, "where": ["tp.__class__ == 1"]}, "condition 'tp.__class__ == 1': "),
        ({"base": BASE, "grid": {"tp": [1]}, "block": [{}]}, "put grid, zip and sample inside the [[block]] tables"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SimError, match=re.escape(message)) as error:
        parse_grid(data, where="g")
    assert "\n" not in str(error.value)


def test_a_missing_value_meets_no_condition() -> None:
    condition = Condition.parse("not ttft_s < 0.5", known={"ttft_s"})
    assert condition.holds({"ttft_s": 0.7})
    assert not condition.holds({"ttft_s": None})
    assert not condition.holds({"ttft_s": float("nan")})


def test_every_example_of_the_page_is_a_grid() -> None:
    text = (Path(__file__).parents[1] / "docs" / "sweep.md").read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    sizes = [len(parse_grid(tomllib.loads(example), where="page").cases) for example in examples]
    assert len(sizes) == 3 and sizes[1] == 14 and sizes[2] == 200
