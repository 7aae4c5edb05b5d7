"""Every benchmark of wattline alone, one after another: ``python benchmarks/everything.py [--out FILE]``.

``compiled.py`` is none of them: it takes two environments.

About ten minutes on two free cores. Each one owns its section of the page and says there how to run it alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = ("engine", "detail", "retiming", "sweep", "shell", "trace_write", "trace_read", "serving")


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    arguments = parser.parse_args()
    for name in arguments.only:
        print(f"-- {name}", flush=True)
        subprocess.run([sys.executable, HERE / f"{name}.py", "--out", arguments.out], check=True)


if __name__ == "__main__":
    main()
