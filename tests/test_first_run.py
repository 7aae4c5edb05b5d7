"""The first run of a shell: what it does not wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = ["simulate", "llama3-8b", "--layers", "1", "--quiet"]
LIBRARIES = {"pandas", "scipy", "networkx", "matplotlib", "joblib", "fastparquet", "plotly", "distributed"}
OTHERS = {
    "hardware.calibrate",
    "sim.explore",
    "sim.pages",
    "sim.replay",
    "sim.serving",
    "sim.validation",
    "traces.records",
    "traces.write.chakra",
    "workloads.families.dit_video",
    "workloads.families.ragged",
    "workloads.families.speculation",
    "workloads.families.training",
}


def printed(script: str) -> str:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "kept_out"),
    [
        (RUN, LIBRARIES | OTHERS),
        (["--help"], LIBRARIES | OTHERS | {"numpy", "pydantic", "rich", "workloads", "hardware"}),
    ],
)
def test_a_command_imports_what_it_needs(words: list[str], kept_out: set[str]) -> None:
    script = f"import sys; from sim.cli import main\nmain({words})\nprint(*sys.modules)"
    assert kept_out & set(printed(script).split()) == set()


def test_what_was_imported_is_never_looked_through() -> None:
    # What is registered first is called last: after the command's own.
    script = f"""
import atexit, gc
looks = []
atexit.register(lambda: print(gc.get_freeze_count() > 50_000, len(gc.get_objects()) < 100, len(looks)))
from sim.cli import main
gc.collect(); gc.callbacks.append(lambda phase, about: looks.append(about["generation"]) if phase == "start" else None)
main({RUN})
"""
    assert printed(script) == "True True 0"


def test_every_name_of_workloads_is_there() -> None:
    # Some load when they are asked for.
    assert printed("import workloads; print(set(workloads.__all__) - set(dir(workloads)))") == "set()"
    assert printed("from workloads import *; print(build_training.__name__, Group.__name__)") == "build_training Group"
    script = "import workloads; print(all(hasattr(workloads, name) for name in workloads.__all__))"
    assert printed(script) == "True"
    with pytest.raises(AttributeError, match="module 'workloads' has no attribute 'build_ragde'"):
        _ = __import__("workloads").build_ragde
