"""Fronts and choices over a sweep's table, and the commands behind them."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sim.cli import main
from sim.explore.choice import Objective, command_of, objectives_of, scenario_of
from sim.explore.grid import parse_grid
from sim.explore.pareto import front
from sim.explore.picture import write_page
from sim.explore.sweep import sweep
from sim.explore.table import read_table
from sim.explore.tornado import Effect, effects
from sim.explore.workers import Pool
from sim.scenario.spec import Scenario


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two phases of Llama-3-8B at every third clock, and one row that fails."""
    out = tmp_path_factory.mktemp("sweep") / "clocks.parquet"
    data = {
        "base": {"model": "llama3-8b", "batch": 4},
        "block": [
            {"grid": {"phase": ["prefill", "decode"], "sm_clock_mhz": {"from": 705, "to": 1980, "step": 255}}},
            {"grid": {"tp": [3]}},
        ],
    }
    sweep(parse_grid(data, where="test"), out, pool=Pool(jobs=1))
    return out


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    main([*args, "--json"])
    return json.loads(capsys.readouterr().out)


def test_front_is_what_no_point_dominates() -> None:
    rng = random.Random(5)
    points = [tuple(float(rng.randrange(12)) for _ in range(3)) for _ in range(300)]

    def dominated(p: tuple[float, ...]) -> bool:
        return any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)

    assert front(points) == [i for i, p in enumerate(points) if not dominated(p)]
    assert front([]) == [] and front([(1.0, 1.0), (1.0, 1.0)]) == [0, 1]


def test_energy_optimal_clock_is_low_in_decode_and_high_in_prefill(
    clocks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Decode waits for memory, which the SM clock does not slow down; prefill's tensor time follows the clock.
    found = run(["best", str(clocks), "--objective", "energy", "--within", "5"], capsys)
    clock = {row["phase"]: row["sm_clock_mhz"] for row in found["best"]}
    assert found["rows"] == 12
    assert clock["decode"] == 705 and clock["prefill"] >= 1215
    table = read_table(clocks)
    for row in found["best"]:
        same = table[(table["phase"] == row["phase"]) & table["error"].isna()]
        allowed = same[same["latency_s"] <= 1.05 * same["latency_s"].min()]
        assert row["energy_j_per_token"] == pytest.approx(allowed["energy_j_per_token"].min(), rel=1e-12)


def test_fronts_are_drawn_for_each_piece_of_work(clocks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(["pareto", str(clocks)], capsys)["front"]
    for phase in ("prefill", "decode"):
        mine = sorted({(r["latency_s"], r["energy_j_per_token"]) for r in rows if r["phase"] == phase})
        assert mine and all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(mine))
    everything = run(["pareto", str(clocks), "--by", ""], capsys)["front"]
    assert {row["scenario_id"] for row in everything} <= {row["scenario_id"] for row in rows}


def test_where_and_factors(clocks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(["best", str(clocks), "--where", "tpot_s < 1", "--objective", "carbon", "--carbon-g-per-kwh", "300"],
                 capsys)["best"]  # fmt: skip
    assert row["phase"] == "decode"
    assert row["carbon_g_per_million_tokens"] == pytest.approx(row["energy_j_per_token"] / 3.6 * 300)
    (row,) = run(["best", str(clocks), "--where", "phase == 'decode'", "--objective", "cost",
                  "--price-per-gpu-hour", "2"], capsys)["best"]  # fmt: skip
    assert row["cost_per_million_tokens"] == pytest.approx(2 / 3600 * 1e6 / row["tokens_per_s"])


def test_the_command_of_a_row_gives_the_row(clocks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = run(["best", str(clocks), "--where", "phase == 'decode'"], capsys)["best"]
    assert row["command"] == "wattline simulate --model llama3-8b --phase decode --batch 4 --sm-clock-mhz 705"
    again = run(row["command"].split()[1:], capsys)
    assert again["energy_j"] == pytest.approx(row["energy_j"], rel=1e-12)


def test_scenarios_come_back_from_their_rows(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "layers": 1, "ep": 2, "ep_mode": "all_to_all", "tokens_per_ep_rank": [3, 5],
        "phase": "decode", "batch": 4, "lm_head": False,
    }  # fmt: skip
    for ending in ("csv", "parquet"):
        out = tmp_path / f"r.{ending}"
        sweep(
            parse_grid({"base": fields, "grid": {"power_cap_w": ["default", 450.5]}}, where="t"), out, pool=Pool(jobs=1)
        )
        first, second = (scenario_of(row) for _, row in read_table(out).iterrows())
        assert first == Scenario.of(**fields) and second == Scenario.of(**fields, power_cap_w=450.5)
    assert command_of(second).endswith("--tokens-per-ep-rank 3,5 --power-cap-w 450.5")


def test_pictures_and_a_page_that_needs_no_network(
    clocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    page, svg = tmp_path / "front.html", tmp_path / "front.svg"
    run(["pareto", str(clocks), "--plot", str(svg), "--html", str(page)], capsys)
    assert "energy per token" in svg.read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    assert "wattline simulate --model llama3-8b --phase decode" in text and "plotly_click" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)


def test_a_series_keeps_one_hue_on_its_front_and_off_it(clocks: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    table = read_table(clocks)
    table = table[table["error"].isna()]
    halves = pd.Series([place % 2 == 0 for place in range(len(table))], index=table.index)
    write_page(table, halves, objectives_of("latency,energy", table), ("phase",), tmp_path / "front.html")
    text = (tmp_path / "front.html").read_text(encoding="utf-8")
    drawn = re.findall(r'"line":\{"color":"(#\w{6})"\},"marker":\{"color":"(#\w{6})"', text)
    assert all(line == marker for line, marker in drawn)
    assert len(drawn) == 2 * table["phase"].nunique() and len(set(drawn)) == table["phase"].nunique()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["best", "{}", "--objective", "enrgy"], "unknown objective 'enrgy': did you mean 'energy'?"),
        (["best", "{}", "--objective", "cost"], "objective 'cost' needs --price-per-kwh or --price-per-gpu-hour"),
        (["best", "{}", "--where", "ttft < 1"], "condition 'ttft < 1': unknown column 'ttft': did you mean 'ttft_s'?"),
        (["best", "{}", "--where", "ttft_s < 0"], "no row of 13 that meets 'ttft_s < 0': 1 failed; loosen the"),
        (["pareto", "{}", "--by", "phse"], "--by: unknown column 'phse': did you mean 'phase'?"),
        (["pareto", "{}", "--plot", "x.gif"], "'x.gif': a picture is written as .png or .svg"),
        (["pareto", "{}", "--plot", "x.png", "--objectives", "energy"], "a picture needs two objectives"),
        (["pareto", "none.parquet"], "cannot read 'none.parquet': No such file or directory"),
        (["pareto", "bad.csv"], "'bad.csv' is not a table that 'wattline sweep' wrote: column error is missing"),
        (["pareto", "bad.parquet"], "'bad.parquet' is not a table that 'wattline sweep' wrote"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str],
    message: str,
    clocks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    Path("bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SystemExit) as stop:
        main([arg.replace("{}", str(clocks)) for arg in args])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wattline: {message}") and error.count("\n") == 1


def test_a_tornado_ranks_inputs_by_what_they_move(
    clocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A prefill makes 2,048 tokens of what a decode step makes one: phase matters most, the clock far less.
    svg = tmp_path / "tornado.svg"
    found = run(["tornado", str(clocks), "--plot", str(svg)], capsys)
    first, second = found["inputs"]
    assert (first["field"], first["low_at"], first["high_at"]) == ("phase", "prefill", "decode")
    assert second["field"] == "sm_clock_mhz" and 1 < second["swing"] < 2 < first["swing"]
    table = read_table(clocks)
    decode, prefill = (table[(table["phase"] == p) & table["error"].isna()] for p in ("decode", "prefill"))
    ratio = np.exp(np.log(decode["energy_j_per_token"]).mean() - np.log(prefill["energy_j_per_token"]).mean())
    assert first["swing"] == pytest.approx(ratio)
    assert "sm_clock_mhz" in svg.read_text(encoding="utf-8")


def energies_over(column: list[float | None]) -> list[Effect]:
    """Effects in rows that differ in one input, of energies from 1 to 2 J."""
    rows = pd.DataFrame({"sm_clock_mhz": column, "energy_j": np.linspace(1.0, 2.0, len(column))})
    return effects(rows, Objective(name="e", column="energy_j", title="J"))


def test_rows_without_a_value_are_a_level_beside_ranges() -> None:
    (found,) = energies_over([None] * 4 + [600.0 + 60 * i for i in range(16)])
    assert (found.low_at, found.high_at) == ("default", "1275 to 1500")


def test_a_value_that_most_rows_share_makes_no_single_range() -> None:
    (found,) = energies_over([600.0] * 30 + [660.0 + 60 * i for i in range(9)])
    assert (found.low_at, found.high_at) == ("600", "1140")


def test_nothing_varied_is_said(clocks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tornado", str(clocks), "--where", "phase == 'decode'", "--where", "sm_clock_mhz == 705"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "wattline: nothing varies in these 1 rows: sweep at least one field\n"
