"""Do the intervals hold what they say? ``python -m sim.studies.coverage FOLDER... --out docs/studies/uncertainty.md``.

Whole-model rows, which no fit has seen, against the 90 % intervals of their predictions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware.profile import BASE_GPU
from hardware.uncertainty import HOST_SLOWEST, SLOW_LIMIT_LOG_ERROR, STATUS_LOG_ERROR, WEAK_LOG_ERROR, left_out
from sim.explore.uncertainty import DRAWS, LEVEL, SEED, intervals
from sim.output.files import write_atomically
from sim.run.runner import simulate
from sim.studies.command import exit_code
from sim.studies.fidelity import record_files
from sim.studies.fidelity_tables import percent, table
from sim.studies.prose import prose
from sim.validation.predict import scenario_of
from sim.validation.records import read_records

KINDS = frozenset({"model_step", "generate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCheck:
    """One row: its group, and for latency and energy whether the interval holds it and the half width (a share)."""

    status: str
    gpus: int
    phase: str
    latency: tuple[bool, float]
    energy: tuple[bool, float] | None


def interval_checks(paths: Sequence[Path]) -> list[IntervalCheck]:
    """Every whole-model row of ``paths`` once, by its inputs' own scenario."""
    found: dict[str, IntervalCheck] = {}
    for path in paths:
        for record in read_records(path):
            if record.kind not in KINDS or record.digest in found:
                continue
            run = simulate(scenario_of({k: v for k, v in record.inputs.items() if v is not None}), shortcuts=True)
            one, measured = intervals(run), record.measured
            energy_j = measured.get("energy_j")
            inside = one.holds(latency_s=measured["latency_s"], energy_j=energy_j or 0.0)
            found[record.digest] = IntervalCheck(
                status=run.machine.status,
                gpus=run.gpus,
                phase=run.scenario.phase + (" (eager)" if run.scenario.launch == "eager" else ""),
                latency=(inside[0], (one.latency_s[1] - one.latency_s[0]) / (2 * run.latency_s)),
                energy=(inside[1], (one.energy_j[1] - one.energy_j[0]) / (2 * run.energy_j)) if energy_j else None,
            )
    return list(found.values())


def coverage_table(rows: Sequence[IntervalCheck]) -> str:
    """Rows held and half widths by group, each status in all first."""
    groups: dict[tuple[str, str, str], list[IntervalCheck]] = {}
    for row in rows:
        groups.setdefault((row.status, "all", "all"), []).append(row)
    for row in sorted(rows, key=lambda row_key: (row_key.status, row_key.gpus, row_key.phase)):
        groups.setdefault((row.status, str(row.gpus), row.phase), []).append(row)
    lines = []
    for (status, gpus, phase), group in groups.items():
        energies = [row.energy for row in group if row.energy is not None]
        cells = [status, gpus, phase, str(len(group))]
        for of in ([row.latency for row in group], energies):
            inside, width = sum(hit for hit, _ in of), sum(w for _, w in of)
            cells += (
                [f"{inside} of {len(of)}", percent(inside / len(of)), percent(width / len(of))] if of else ["-"] * 3
            )
        lines.append(cells)
    names = ("profile", "GPUs", "phase", "n", "latency held", "%", "half width %", "energy held", "%", "half width %")
    return table(names, lines, left=3)


def page(rows: Sequence[IntervalCheck]) -> str:
    """The page as Markdown."""
    families = [(name, str(e.n), percent(e.time), percent(e.power)) for name, e in left_out(BASE_GPU).items()]
    widened = (f"{percent(e)} % ({status})" for status, e in STATUS_LOG_ERROR.items() if e)
    return PAGE.format(
        draws=DRAWS,
        seed=SEED,
        level=f"{100 * LEVEL:.0f}",
        coverage=coverage_table(rows),
        weak=WEAK_LOG_ERROR,
        families=table(("family", "rows", "time", "power"), families, left=1),
        limit=percent(SLOW_LIMIT_LOG_ERROR),
        slowest=HOST_SLOWEST,
        widened=" and ".join(widened),
    )


PAGE = prose("coverage", "page") + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m sim.studies.coverage", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="the Markdown page to write")
    arguments = parser.parse_args(argv)

    def write() -> None:
        rows = interval_checks([path for folder in arguments.folders for path in record_files(folder)])
        write_atomically(arguments.out, page(rows).encode())
        print(coverage_table(rows))

    return exit_code("coverage", write)


if __name__ == "__main__":
    sys.exit(main())
