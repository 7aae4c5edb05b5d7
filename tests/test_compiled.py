"""The compiled engine gives the same bytes as the modules of Python that it is compiled from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "records/h200-sxm-141gb/traces"
PACKAGES = ("sim", "workloads", "hardware", "traces", "inputs", "tests")


def _compiler() -> str | None:
    """The C compiler that setuptools would call, if there is one."""
    return shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0])


def _hashes(tree: Path) -> dict[str, Any]:
    """What ``tests.engine_hashes`` of a tree prints."""
    asked = [sys.executable, "-m", "tests.engine_hashes", str(TRACES)]
    run = subprocess.run(
        asked, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_runs_of_the_compiled_engine_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        pytest.skip("needs mypyc (a part of mypy) and setuptools: pip install mypy setuptools")
    if _compiler() is None:
        pytest.skip("needs a C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs the C headers of Python")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    build = [sys.executable, str(ROOT / "compiled/build.py"), "--into", str(tmp_path), "--optimise", "0"]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pure, compiled = _hashes(ROOT), _hashes(tmp_path)
    assert (pure.pop("engine"), compiled.pop("engine")) == ("pure Python", "compiled")
    assert len(pure) >= 16
    far = 2**62  # beyond it an integer of compiled code is no machine word
    assert compiled["late"] == [[far - 3, "all-reduce", 32.0], [far - 3, "product", 100.0], [far + 2, "copy", 20.0]]
    assert compiled == pure
