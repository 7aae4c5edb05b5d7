"""The A100 comparison: eager models at every clock against public measurements, written as one page.

``python -m sim.studies.a100 PUBLIC [--measurements FOLDER] [--out docs/studies/a100.md]``. PUBLIC holds
``energaizer/dvfs.csv``, ``energaizer/a100.csv`` and ``dvfs_vf_idle.csv``; the folder of measurements holds our own
``gemm.jsonl`` and ``attention.jsonl`` of an H100.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from sim.output.files import write_atomically
from sim.studies.a100_hopper import KernelError, hopper_profile, kernel_errors
from sim.studies.a100_power import (
    MODELS,
    PARTS,
    Estimate,
    Floats,
    Job,
    PublicMeasurement,
    estimate,
    fit_scales,
    read_runs,
    refit,
)
from sim.studies.command import exit_code
from sim.studies.fidelity_tables import percent, table
from sim.studies.prose import prose

# The three jobs whose every clock is bound by the GPU for 70 ms and more: what "large" means here.
LARGE = tuple(
    Job(model=model, dtype="bf16", batch=batch, seq_len=length)
    for model, batch, length in (("bert-large", 32, 512), ("gpt2", 32, 512), ("opt-1.3b", 8, 2048))
)
STEP_HZ = 90e6
BARS = {"sweep": 0.08, "refit": 0.035, "fixed": 0.10, "hopper": 0.07}

Power = Callable[[PublicMeasurement], float]


def left_out(fixed: Sequence[PublicMeasurement]) -> Mapping[str, Floats]:
    """Scales for each model, fitted on the runs of all the others."""
    return {model: fit_scales([run for run in fixed if run.job.model != model]) for model in MODELS.values()}


def by_job(runs: Sequence[PublicMeasurement]) -> dict[Job, list[PublicMeasurement]]:
    """Runs of each job, slowest clock first."""
    jobs: dict[Job, list[PublicMeasurement]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.clock_hz):
        jobs[run.job].append(run)
    return dict(jobs)


def best_clocks(runs: Sequence[PublicMeasurement], power_w: Power) -> tuple[float, float]:
    """The clock of least energy among ``runs`` of one job: measured, and predicted (Hz)."""
    measured = min(runs, key=lambda run: run.power_w * run.time_s)
    predicted = min(runs, key=lambda run: power_w(run) * estimate(run.job, run.clock_hz).time_s)
    return measured.clock_hz, predicted.clock_hz


def page(sweep: Sequence[PublicMeasurement], fixed: Sequence[PublicMeasurement], hopper: Sequence[KernelError]) -> str:
    """The whole page as Markdown."""
    scales = left_out(fixed)
    estimates = {run: estimate(run.job, run.clock_hz) for run in (*sweep, *fixed)}

    def forecast(run: PublicMeasurement) -> float:
        return estimates[run].power_w()

    def others(run: PublicMeasurement) -> float:
        return estimates[run].power_w(scales[run.job.model])

    refitted = {run: watts for runs in by_job(sweep).values() for run, watts in zip(runs, refit(runs)[2], strict=True)}
    sweep_error, fixed_error = mean_error(sweep, others), mean_error(fixed, others)
    refit_error = mean_error(sweep, refitted.__getitem__)
    clocks = {job: best_clocks(runs, others) for job, runs in by_job(sweep).items()}
    apart = max(abs(clocks[job][0] - clocks[job][1]) for job in LARGE)
    bars = [
        ("power over the clock sweep, model left out", sweep_error, BARS["sweep"]),
        ("the same, two constants a job refitted", refit_error, BARS["refit"]),
        ("power at 900 MHz, model left out", fixed_error, BARS["fixed"]),
    ]
    if hopper:
        bars.append(("H100 kernel power from A100 data alone", mean_kernel_error(hopper), BARS["hopper"]))
    lines = [(name, percent(error), percent(bar), "yes" if error <= bar else "no") for name, error, bar in bars]
    lines.append(
        (
            "clock of least energy, three large jobs: farthest apart",
            f"{apart / 1e6:.0f} MHz",
            "90 MHz",
            "yes" if apart <= STEP_HZ else "no",
        )
    )
    parts = [
        HEAD.format(sweep=len(sweep), fixed=len(fixed)),
        "## Against the bars\n\n" + table(("what", "error", "bar", "met"), lines, left=1),
        FITTED.format(scales=_scales(scales)),
        "## Power by model\n\n" + _by_model({"sweep": sweep, "900 MHz": fixed}, forecast, others, estimates),
        "## Clock of least energy\n\n" + CLOCKS + "\n\n" + _clocks(clocks),
        "## Two constants a job\n\n" + REFIT + "\n\n" + _refits(by_job(sweep)),
    ]
    if hopper:
        parts.append("## H100 kernels from the A100\n\n" + HOPPER + "\n\n" + _hopper(hopper))
    return "\n\n".join(parts) + "\n"


def mean_error(runs: Sequence[PublicMeasurement], power_w: Power) -> float:
    """Mean absolute relative error of power."""
    return float(np.mean([abs(power_w(run) / run.power_w - 1.0) for run in runs]))


def mean_kernel_error(errors: Sequence[KernelError]) -> float:
    """The same over kernel rows."""
    return float(np.mean([abs(error.power) for error in errors]))


def _scales(scales: Mapping[str, Floats]) -> str:
    lines = [(model, *(f"{value:.2f}" for value in found)) for model, found in sorted(scales.items())]
    return table(("left out", *PARTS), lines, left=1)


def _by_model(
    sets: Mapping[str, Sequence[PublicMeasurement]],
    forecast: Power,
    others: Power,
    estimates: Mapping[PublicMeasurement, Estimate],
) -> str:
    lines = []
    for name, runs in sets.items():
        groups: dict[tuple[str, str], list[PublicMeasurement]] = defaultdict(list)
        for run in runs:
            groups[run.job.model, run.job.dtype].append(run)
        for (model, dtype), some in [*sorted(groups.items()), (("all", ""), list(runs))]:
            times = [estimates[run].time_s / run.time_s - 1.0 for run in some]
            signed = [others(run) / run.power_w - 1.0 for run in some]
            figures = (
                mean_error(some, others), float(np.mean(signed)), max(abs(e) for e in signed),
                mean_error(some, forecast), float(np.mean(np.abs(times))), float(np.mean(times)),
            )  # fmt: skip
            lines.append((name, f"{model} {dtype}".strip(), str(len(some)), *(percent(value) for value in figures)))
    head = ("runs", "model", "n", "power", "bias", "worst", "nothing fitted", "time", "time bias")
    return table(head, lines, left=2)


def _clocks(clocks: Mapping[Job, tuple[float, float]]) -> str:
    lines = [
        (str(job), "yes" if job in LARGE else "", *(f"{clock / 1e6:.0f}" for clock in clocks[job]))
        for job in sorted(clocks, key=str)
    ]
    return table(("job", "large", "measured MHz", "predicted MHz"), lines, left=2)


def _refits(jobs: Mapping[Job, Sequence[PublicMeasurement]]) -> str:
    lines = []
    for job in sorted(jobs, key=str):
        k, d, watts = refit(jobs[job])
        errors = [abs(power_w / run.power_w - 1.0) for power_w, run in zip(watts, jobs[job], strict=True)]
        lines.append((str(job), f"{k:.0f}", f"{d:.0f}", percent(float(np.mean(errors))), percent(max(errors))))
    return table(("job", "k W", "d W", "mean", "worst"), lines, left=1)


def _hopper(errors: Sequence[KernelError]) -> str:
    lines = []
    for file in sorted({error.file for error in errors}):
        for capped in (True, False):
            some = [error.power for error in errors if (error.file, error.capped) == (file, capped)]
            if some:
                figures = (float(np.mean(np.abs(some))), float(np.mean(some)), float(np.max(np.abs(some))))
                lines.append((file, "at the cap" if capped else "below", str(len(some)), *map(percent, figures)))
    return table(("file", "power", "n", "mean", "bias", "worst"), lines, left=2)


HEAD = prose("a100", "head")

FITTED = prose("a100", "fitted")

CLOCKS = """Among the clocks that were run. Small jobs are bound by the host's launches, whose pace on that machine is
not known: there energy is flat over the clock and its least means little."""

REFIT = """P = idle(f) + k (V/V0)^2 f/f0 + d with k and d fitted to the clocks of each job: how far voltage and idle
curve alone carry."""

HOPPER = prose("a100", "hopper")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m sim.studies.a100", description=__doc__)
    parser.add_argument("public", type=Path, help="folder of public data")
    parser.add_argument("--measurements", type=Path, help="folder of H100 kernel records")
    parser.add_argument("--out", type=Path, default=Path("docs/studies/a100.md"))
    given = parser.parse_args(argv)

    def write() -> None:
        sweep, fixed = (read_runs(given.public / "energaizer" / f"{name}.csv") for name in ("dvfs", "a100"))
        hopper = []
        if given.measurements is not None:
            profile = hopper_profile(fit_scales(fixed), given.public / "dvfs_vf_idle.csv")
            hopper = kernel_errors(profile, [given.measurements / f"{n}.jsonl" for n in ("gemm", "attention")])
        write_atomically(given.out, page(sweep, fixed, hopper).encode())

    return exit_code("a100", write)


if __name__ == "__main__":
    sys.exit(main())
