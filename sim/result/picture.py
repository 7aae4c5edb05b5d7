"""Power and clock of a run over time, as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from sim.output.files import check_picture_ending, write_atomically
from sim.result.run import Run


def power_figure(run: Run, path: Path | None) -> Any:
    """A matplotlib figure of two panels, watts and MHz of each GPU by ms; also written to ``path`` if one is given."""
    if path is not None:
        check_picture_ending(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = run.power
    for gpu, rows in steps.groupby("gpu"):
        above.step(rows["start_s"] * 1e3, rows["power_w"], where="post", linewidth=0.8, label=f"GPU {gpu}")
        below.step(rows["start_s"] * 1e3, rows["sm_clock_hz"] / 1e6, where="post", linewidth=0.8)
    above.set(ylabel="W", title=f"{run.scenario.model}, {run.gpus} x {run.machine.gpu.id}")
    below.set(xlabel="ms", ylabel="SM MHz")
    if run.gpus > 1:
        above.legend(fontsize="small", ncols=4)
    for axis in (above, below):
        axis.grid(alpha=0.3)
    if path is not None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix[1:], dpi=130)
        write_atomically(path, buffer.getvalue())
    return figure
