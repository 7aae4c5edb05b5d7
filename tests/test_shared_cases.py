"""Every small input of ``../shared/cases`` that once ended wrongly: right, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.file_fuzz import end_of, fault_of
from tests.traces_kit import SHARED

CASES = SHARED / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no {CASES}: set WATTLINE_SHARED to the folder above it")


def _commands(path: Path, out: Path) -> list[list[str]]:
    """What reads a file of this name."""
    name = str(path)
    match path.name.removeprefix("m_").split("_")[0]:
        case "requests" | "req":
            return [["serve", "--model", "llama3-8b", "--requests", "3", "--trace", name]]
        case "records" | "rec":
            return [["validate", name]]
        case "scenario":
            return [["simulate", name]]
        case "model":
            return [["simulate", "--model", name, "--ignore-memory"]]
        case "gpu":
            return [["simulate", "--model", "llama3-8b", "--layers", "1", "--gpu", name]]
        case "grid" | "orphans" | "where.toml" | "where2.toml":
            return [["sweep", name, "--out", str(out), "--jobs", "1", "--quiet"]]
        case _:
            return [["inspect", name], ["replay", name]]


def test_no_case_ends_in_a_traceback_or_in_many_lines(tmp_path: Path) -> None:
    folders = [CASES / name for name in ("fuzz", "traces", "requests")]
    found = {}
    for path in sorted(one for folder in folders for one in folder.iterdir()):
        out = tmp_path / f"{path.name}.csv"
        commands = _commands(path, out) if path.parent.name != "requests" else [
            ["serve", "--model", "llama3-8b", "--requests", "3", "--trace", str(path)]
        ]  # fmt: skip
        if path.name == "rules.toml":
            commands = [["inspect", str(CASES / "traces" / "sglang_moe_decode.json"), "--rules", str(path)]]
        for command in commands:
            if (fault := fault_of(*end_of(command))) is not None:
                found[f"{command[0]} {path.name}"] = fault
    assert found == {}
