"""Ten thousand scenarios through the command: ``python benchmarks/sweep.py [--out benchmarks/results.md]``.

Runs ``wattline sweep benchmarks/ten_thousand.toml`` on all cores into a temporary table. CPU seconds (of
all processes) over two say what two free cores would need where other work shares the machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from results import machine, put, section

GRID = Path(__file__).with_name("ten_thousand.toml")
COMMAND = "from sim.cli import main; main()"


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", type=Path, default=GRID)
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.parquet"
        words = ["sweep", str(arguments.grid), "--out", str(table), "--json"]
        done = subprocess.run([sys.executable, "-c", COMMAND, *words], check=True, stdout=subprocess.PIPE, text=True)
    got, used = json.loads(done.stdout), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    head = ("grid", "rows", "failed", "wall s", "scenarios/s", "CPU s", "CPU s / 2")
    row = (
        arguments.grid.name,
        f"{got['rows']:,}",
        f"{got['failed']}",
        f"{got['wall_s']:.1f}",
        f"{got['scenarios_per_s']:.0f}",
        f"{cpu_s:.1f}",
        f"{cpu_s / 2:.1f}",
    )
    text = section("A sweep", "python benchmarks/sweep.py", where, head, [row])
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
