"""wattline beside other distributions that have packages of the same names: refused at import, in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sim import neighbours

ROOT = Path(__file__).parents[1]
OURS = ("sim", "inputs", "workloads", "hardware", "traces")
IMPORT = "import sim; print(sim.Scenario.of(model='llama3-8b').batch)"
COMMAND = "import sys; sys.argv = ['wattline', 'models']; from sim.cli import main; main(['models'])"


def ran(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Python with only these folders, and what is installed, to import from."""
    environment = {"PYTHONPATH": ":".join(map(str, path)), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True)


@pytest.mark.parametrize("name", ["traces", "hardware", "workloads", "inputs"])
def test_a_package_before_ours_on_the_path_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("VERSION = '0.7.0'\n", encoding="utf-8")
    ended = ran(IMPORT, tmp_path, ROOT)
    where = tmp_path / name / "__init__.py"
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: the package '{name}' is another distribution's ({where}): install wattline in an environment of "
        "its own, such as 'uv tool install' or a fresh venv makes"
    )
    command = ran(COMMAND, tmp_path, ROOT)
    assert (command.returncode, command.stdout) == (2, "")
    assert command.stderr.startswith(f"wattline: the package '{name}' is") and command.stderr.count("\n") == 1


def test_a_package_written_over_ours_is_refused(tmp_path: Path) -> None:
    """As pip does with the wheel of ``traces``: its ``__init__.py`` replaced, our modules still beside it."""
    for name in OURS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert ran(IMPORT, tmp_path).stdout == "1\n"
    (tmp_path / "traces" / "__init__.py").write_text("from traces.timeseries import TimeSeries\n", encoding="utf-8")
    ended = ran(IMPORT, tmp_path)
    assert "the package 'traces' is another distribution's" in ended.stderr.splitlines()[-1]


def test_a_package_taken_away_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip leaves it that uninstalls the other distribution again."""
    monkeypatch.setattr(neighbours, "find_spec", lambda _name: None)
    with pytest.raises(ImportError, match="is missing, taken away with another distribution's: install wattline in an"):
        neighbours.check_neighbours()
