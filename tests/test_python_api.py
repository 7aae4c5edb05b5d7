"""wattline from Python and in notebooks: types, errors, tables, pictures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import sim
from sim import Scenario, WattlineError, serve, simulate, sweep
from sim.result.report import energy_rows, figures
from sim.scenario.fields import ScenarioFields
from tests.config_kit import MIXTRAL

LAYER = {"model": "llama3-8b", "layers": 1, "seq_len": 128}


def test_keywords_of_simulate_are_the_fields_of_a_scenario() -> None:
    assert list(ScenarioFields.__annotations__) == list(Scenario.model_fields)
    hints = get_type_hints(ScenarioFields)
    for name in ("phase", "overlap", "all_reduce", "pp_schedule", "regime", "detail", "launch"):
        assert get_args(hints[name]) == get_args(Scenario.model_fields[name].annotation), name


def test_a_users_script_is_checked_by_mypy(tmp_path: Path) -> None:
    good = "from sim import Timeline, simulate\nrun: Timeline = simulate(model='llama3-8b', tp=2, phase='decode')\n"
    bad = "from sim import simulate\nsimulate(model='llama3-8b', phase='decoding')\nsimulate(model='x', bathc=2)\n"
    for name, text in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    ended = {
        name: subprocess.run(
            [*command, str(tmp_path / f"{name}.py")], capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        for name in ("good", "bad")
    }
    assert ended["good"].stdout == "" and ended["good"].returncode == 0
    assert 'Argument "phase" to "simulate"' in ended["bad"].stdout and '"bathc"' in ended["bad"].stdout


def test_every_refusal_has_one_base() -> None:
    for bad in ({"model": "lama"}, {"model": "llama3-8b", "gpu": "h1000"}, {"model": "llama3-8b", "batch": 0}):
        with pytest.raises(WattlineError) as error:
            simulate(**bad)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    for package in ("sim", "hardware", "workloads", "traces", "inputs"):
        assert (Path(sim.__file__).parents[1] / package / "py.typed").exists()


def test_a_run_in_a_notebook(tmp_path: Path) -> None:
    run = simulate(**LAYER, tp=2)  # type: ignore[arg-type]
    shown = run._repr_html_()
    assert shown.startswith("<div><p><b>llama3-8b</b> prefill, batch 1") and "&lt;" not in shown
    text = repr(run)
    for cell in re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", shown):  # what the text says, in cells
        assert all(word in text for word in unescape(cell).split()), cell
    assert shown.count("<tr>") == shown.count("</tr>") == len(figures(run)) + 1 + len(energy_rows(run))
    assert run.summary()["latency_s"] == run.latency_s == run.ttft_s and run.tpot_s is None
    figure = run.plot(tmp_path / "power.png")
    ends_ms = {round(float(patch.get_data().edges[-1]), 9) for axis in figure.axes for patch in axis.patches}
    assert ends_ms == {round(run.latency_s * 1e3, 9)}
    assert len(figure.axes) == 2 and (tmp_path / "power.png").stat().st_size > 5_000
    decode = simulate(**LAYER, phase="decode")  # type: ignore[arg-type]
    assert (decode.ttft_s, decode.tpot_s) == (None, decode.latency_s)
    assert decode.tokens_per_s == pytest.approx(1 / decode.latency_s)


def test_a_sweep_is_a_table(tmp_path: Path) -> None:
    grid = {"base": LAYER, "grid": {"batch": [1, 2], "tp": [1, 2]}}
    table = sweep(grid, jobs=1, out=tmp_path / "rows.csv")
    assert sorted(zip(table["batch"], table["tp"], strict=True)) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert table["energy_j"].gt(0).all() and table["error"].isna().all() and (tmp_path / "rows.csv").exists()


def test_serving_from_the_same_place() -> None:
    assert serve(model="llama3-8b", requests=5).summary["requests"] == 5


def test_files_that_change_in_a_session_are_read_anew(tmp_path: Path) -> None:
    model, gpu, rows = tmp_path / "m.json", tmp_path / "g.toml", tmp_path / "rows.csv"
    shipped = files("hardware") / "data" / "gpus" / "h100-sxm-80gb.toml"
    own = shipped.read_text(encoding="utf-8").replace('id = "h100-sxm-80gb"', 'id = "mine"')  # so that figures count
    gpu.write_text(own, encoding="utf-8")
    model.write_text(json.dumps(MIXTRAL), encoding="utf-8")
    rows.write_text("expert,rows\n" + "\n".join(f"{i},10" for i in range(8)) + "\n", encoding="utf-8")
    fields = {
        "model": str(model),
        "gpu": str(gpu),
        "phase": "decode",
        "batch": 64,
        "seq_len": 512,
        "layers": 2,
        "ep": 2,
    }
    fields |= {"routing": str(rows), "ignore_memory": True, "ep_mode": "all_to_all"}
    found = [simulate(**fields)]
    rows.write_text("expert,rows\n0,35\n" + "\n".join(f"{i},5" for i in range(1, 8)) + "\n", encoding="utf-8")
    found.append(simulate(**fields))
    gpu.write_text(own.replace("{ value = 3350000000000.0", "{ value = 1350000000000.0"), encoding="utf-8")
    found.append(simulate(**fields))
    model.write_text(json.dumps(MIXTRAL | {"intermediate_size": 8192}), encoding="utf-8")
    found.append(simulate(**fields))
    latencies = [run.latency_s for run in found]
    assert latencies[1] != latencies[0]
    assert latencies[2] > 1.3 * latencies[1]
    assert latencies[3] < 0.8 * latencies[2]
