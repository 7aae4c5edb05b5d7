"""Power and clock of a run over time, as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.output.files import check_picture_ending, write_atomically
from sim.result.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def power_figure(run: Run, path: Path | None) -> Any:
    """A matplotlib figure of two panels, watts and MHz of each GPU by ms; also written to ``path`` if one is given."""
    if path is not None:
        check_picture_ending(path)
    from matplotlib.figure import Figure

    class Shown(Figure):  # without pyplot no notebook knows how to show a figure
        def _repr_png_(self) -> bytes:
            return _drawn(self, "png")

    figure = Shown(figsize=(8.5, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = run.power
    for gpu, rows in steps.groupby("gpu"):
        edges_s = [*rows["start_s"], run.latency_s]  # the last step lasts to the end
        for axis, values in ((above, rows["power_w"]), (below, rows["sm_clock_hz"] / 1e6)):
            axis.stairs(values, [edge * 1e3 for edge in edges_s], baseline=None, linewidth=0.8, label=f"GPU {gpu}")
    above.set(ylabel="W", title=f"{run.scenario.model}, {run.gpus} x {run.machine.gpu.id}")
    below.set(xlabel="ms", ylabel="SM MHz")
    if run.gpus > 1:
        above.legend(fontsize="small", ncols=4)
    for axis in (above, below):
        axis.grid(alpha=0.3)
    if path is not None:
        write_atomically(path, _drawn(figure, path.suffix[1:]))
    return figure


def _drawn(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=130)
    return buffer.getvalue()
