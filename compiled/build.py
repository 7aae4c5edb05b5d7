"""Compiles the modules of the engine with mypyc: ``python compiled/build.py --into FOLDER``; see docs/compiled.md.

Modules are compiled from copies in a folder of their own, beside which nothing else of the packages stands: what they
take from elsewhere (SimPy, the laws) stays Python, and is not analysed. There alone ``sim.engine.simpy_base`` are the
classes of ``sim.engine.native_base``: classes of C, where SimPy's are classes of Python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Every module that extends a class of another one of these has to be here too: classes of C take no others as heirs.
MODULES = (
    "sim/engine/native_base.py",
    "sim/engine/simpy_base.py",
    "sim/engine/between.py",
    "sim/engine/core.py",
    "sim/engine/driver.py",
    "sim/engine/noting.py",
    "sim/engine/recorded.py",
    "sim/engine/recorded_blocks.py",
    "sim/engine/recorded_driver.py",
    "sim/engine/resources/arbitration.py",
    "sim/engine/resources/bandwidth.py",
    "sim/engine/resources/copy_engine.py",
    "sim/engine/resources/grid.py",
    "sim/engine/resources/hbm.py",
    "sim/engine/resources/link_port.py",
    "sim/engine/resources/network.py",
    "sim/engine/resources/sm_pool.py",
    "sim/engine/resources/stream.py",
    "sim/engine/resources/tiles.py",
    "sim/engine/running.py",
    "sim/engine/state.py",
    "sim/engine/ties.py",
    "sim/engine/time.py",
)
BASES = ("Event", "Put", "Get", "BaseResource", "Environment")  # that simpy_base has
CONFIG = """[tool.mypy]
python_version = "3.11"
no_site_packages = true
ignore_missing_imports = true
disable_error_code = ["misc", "no-redef"]
"""


def stage(root: Path, into: Path) -> list[str]:
    """Copy what is compiled; returns the paths of the modules in ``into``."""
    for name in MODULES:
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, path)
    for package in {parent for name in MODULES for parent in Path(name).parents if parent != Path()}:
        (into / package / "__init__.py").touch()
    names = ", ".join(f"Native{base} as {base}" for base in BASES)
    (into / "sim/engine/simpy_base.py").write_text(f"from sim.engine.native_base import {names}\n", encoding="utf-8")
    (into / "mypy.toml").write_text(CONFIG, encoding="utf-8")
    return list(MODULES)


def build(into: Path, *, optimise: int = 3, root: Path = ROOT) -> list[Path]:
    """Compile the modules of ``root``; returns the shared libraries, in the folders of their packages in ``into``."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    into, before = into.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        modules = stage(root.resolve(), Path(folder))
        os.chdir(folder)
        try:
            extensions = mypycify(
                ["--config-file", "mypy.toml", "--cache-dir", os.devnull, *modules],
                opt_level=str(optimise),
                group_name="wattline",
            )
            for extension in extensions:
                if os.name == "posix":  # as CPython rounds: every product and every sum by itself
                    extension.extra_compile_args += ["-ffp-contract=off"]
            command = build_ext(Distribution({"name": "wattline", "ext_modules": extensions}))
            command.build_lib, command.build_temp = str(into), str(Path(folder, "temp"))
            command.parallel = os.cpu_count()
            command.ensure_finalized()
            command.run()
            return [Path(path) for path in command.get_outputs()]
        finally:
            os.chdir(before)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder for the shared libraries")
    parser.add_argument("--optimise", type=int, default=3, help="level of the C compiler's optimisation")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    for path in build(arguments.into, optimise=arguments.optimise):
        print(path)


if __name__ == "__main__":
    main()
