"""What a collective and the computation beside it take from one another: predict it, fit it, check it.

``python -m sim.validation.contention RECORDS... --profile FILE`` fits the ``sharing`` section of a profile on
*together* rows (kernel level only) and prints how well a number of blocks is predicted that the fit left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.laws.collective import Sharing
from hardware.profile import dump_profile, read_profile
from sim.output.files import write_atomically
from sim.scenario.machine import Machine, machine
from sim.validation.lanes import Beside, beside_waiting, together
from sim.validation.records import Record, RecordError, read_records

Floats = NDArray[np.float64]
# Coefficients that the fit moves, with their bounds; the SMs of a block come from the grids in profiler traces.
BOUNDS = {
    "beside_slowdown": (1.0, 4.0),
    "hbm_weight_per_sm": (0.1, 10.0),
    "traffic_scale": (0.5, 2.0),
    "mixed_hbm_share": (0.7, 1.0),
}


def measured(record: Record) -> Beside:
    """What a together row measured, mean over ranks."""
    m = record.measured
    return Beside(
        a_alone_s=m["a_alone_s"],
        b_alone_s=m["b_alone_s"],
        a_together_s=float(np.mean(m["a_together_s"])),
        b_together_s=float(np.mean(m["b_together_s"])),
    )


def machine_with_sharing(gpu: str, world: int, sharing: Sharing) -> Machine:
    """The machine of ``gpu`` with other sharing coefficients."""
    base = machine(gpu, world)
    return replace(
        base,
        profile=replace(base.profile, sharing=sharing),
        model=replace(base.model, mixed_hbm_share=sharing.mixed_hbm_share),
    )


def errors(record: Record, sharing: Sharing) -> list[float]:
    """Predicted over measured seconds less one: both sides of a together row, the GEMM of a waiting row."""
    target = machine_with_sharing(record.inputs["gpu"], record.inputs["world"], sharing)
    if record.kind == "waiting":
        return [beside_waiting(record.inputs, target)[0] / record.measured["latency_s"] - 1.0]
    predicted, seen = together(record.inputs, target), measured(record)
    return [predicted.a_together_s / seen.a_together_s - 1.0, predicted.b_together_s / seen.b_together_s - 1.0]


def residuals(rows: Sequence[Record], sharing: Sharing) -> Floats:
    """Logs of predicted over measured seconds."""
    return np.log1p([error for record in rows for error in errors(record, sharing)])


def fit(rows: Sequence[Record], start: Sharing, *, steps: int = 5) -> tuple[Sharing, dict[str, float]]:
    """Bounded least squares of :data:`BOUNDS` in ``steps`` steps; standard errors from the Jacobian at the end.

    Losses grow linearly beyond 10 %: rows in a regime that the engine misses must not bend the others.
    """
    names = list(BOUNDS)

    def of(x: Floats) -> Sharing:
        values: dict[str, Any] = dict(zip(names, map(float, x), strict=True))
        return replace(start, **values)

    low, high = (np.array([BOUNDS[n][i] for n in names]) for i in (0, 1))
    x0 = np.clip([getattr(start, n) for n in names], low + 1e-6, high - 1e-6)
    found = least_squares(
        lambda x: residuals(rows, of(x)).ravel(), x0, bounds=(low, high), diff_step=0.03, loss="soft_l1",
        f_scale=0.1, max_nfev=steps, x_scale=x0,
    )  # fmt: skip
    spread = float(np.sqrt(2 * found.cost / max(1, found.fun.size - len(names))))
    standard = spread * np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)))
    return of(found.x), {n: float(f"{e:.3g}") for n, e in zip(names, standard, strict=True)}


def leave_one_out(rows: Sequence[Record], start: Sharing) -> Iterator[tuple[int, int, Floats]]:
    """For each number of blocks: its together rows, and the mean absolute errors of both sides without its rows."""
    for ctas in sorted({r.inputs["ctas"] for r in rows if r.kind == "together"}):
        held = [r for r in rows if r.inputs.get("ctas") == ctas and r.kind == "together"]
        rest, _ = fit([r for r in rows if r.inputs.get("ctas") != ctas], start, steps=2)
        yield ctas, len(held), np.mean(np.abs([errors(record, rest) for record in held]), axis=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the ``sharing`` section of a profile and write it back; everything else in the file stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--profile", required=True, type=Path)
    arguments = parser.parse_args(argv)
    profile = read_profile(arguments.profile)
    rows = [
        record
        for path in arguments.records
        for record in read_records(path)
        if record.kind in ("together", "waiting") and record.inputs["gpu"] == profile.gpu
    ]
    if not rows:
        raise RecordError(f"no together rows of {profile.gpu} in {', '.join(map(str, arguments.records))}")
    sharing, standard = fit(rows, profile.sharing)
    left_out = {
        ctas: (count, round(float(both[0]), 4), round(float(both[1]), 4))
        for ctas, count, both in leave_one_out(rows, sharing)
    }
    names = sorted(path.name for path in arguments.records)
    sharing = replace(
        sharing,
        source=f"{len(rows)} rows of {', '.join(names)}; sms_per_cta from grids in profiler traces",
        command=f"python -m sim.validation.contention {' '.join(names)} --profile {arguments.profile.name}",
        standard_errors=standard,
        left_out=left_out,
        row_digests=tuple(sorted(record.digest for record in rows)),
    )
    write_atomically(arguments.profile, dump_profile(replace(profile, sharing=sharing)).encode())
    for ctas, (count, a, b) in left_out.items():
        print(f"{ctas:3d} blocks left out: {count:3d} rows, computation {100 * a:5.1f} %, collective {100 * b:5.1f} %")


if __name__ == "__main__":
    main()
