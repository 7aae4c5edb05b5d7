"""The chunking study: how many chunks, how many blocks for communication, at which batch and tensor parallelism."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from sim.errors import SimError
from sim.output import write_atomically
from sim.runner import simulate
from sim.scenario import Scenario
from sim.studies.pareto import front
from sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPoint:
    """One schedule and what it costs (s, J over all GPUs)."""

    scenario: Scenario
    latency_s: float
    energy_j: float
    energy_j_per_token: float
    exposed_communication_s: float
    on_front: bool
    trace: Path | None = None

    @property
    def label(self) -> str:
        """How a user would say it."""
        s = self.scenario
        ctas = "the library's" if s.comm_ctas is None else s.comm_ctas
        cut = "sequential" if s.overlap_chunks == 1 else f"{s.overlap_chunks} chunks"
        return f"TP{s.tp}, batch {s.batch}, {cut}, {ctas} CTAs"


def scenarios(
    base: dict[str, Any], *, chunks: Sequence[int], ctas: Sequence[int | None], batch: Sequence[int], tp: Sequence[int]
) -> list[Scenario]:
    """The grid, in order of tp, batch, CTAs, chunks; schedules that do not divide the tokens are left out."""
    found = []
    for degree, size, blocks, cut in product(tp, batch, ctas, chunks):
        fields = base | {
            "phase": "prefill",
            "sequence_parallel": True,
            "lm_head": False,
            "tp": degree,
            "batch": size,
            "comm_ctas": blocks,
            "overlap_chunks": cut,
        }
        scenario = Scenario.parse({k: v for k, v in fields.items() if v is not None}, where="overlap study")
        if (scenario.batch * scenario.seq_len) % (cut * degree) == 0:
            found.append(scenario)
    if not found:
        raise SimError("no schedule of this grid divides the tokens: choose chunks that divide batch x seq-len / tp")
    return found


def study(
    grid: Sequence[Scenario], *, traces: Path | None = None, step: Callable[[], None] = lambda: None
) -> list[OverlapPoint]:
    """Simulate the grid; with ``traces`` the timelines of the Pareto front are written there."""
    runs: list[Timeline] = []
    for scenario in grid:
        runs.append(simulate(scenario))
        step()
    # Batches do different work: the front is drawn per token.
    costs = [(run.latency_s / run.tokens, run.energy_j / run.tokens) for run in runs]
    best = set(front(costs))
    points = []
    for i, run in enumerate(runs):
        path = None
        if traces is not None and i in best:
            traces.mkdir(parents=True, exist_ok=True)
            s = run.scenario
            name = f"tp{s.tp}_b{s.batch}_chunks{s.overlap_chunks}_ctas{s.comm_ctas or 'default'}.json.gz"
            path = run.to_chrome(traces / name)
        points.append(
            OverlapPoint(
                scenario=run.scenario,
                latency_s=run.latency_s,
                energy_j=run.energy_j,
                energy_j_per_token=run.energy_j / run.tokens,
                exposed_communication_s=run.exposed_communication_s,
                on_front=i in best,
                trace=path,
            )
        )
    return points


def advice(points: Sequence[OverlapPoint]) -> str:
    """One sentence: the schedule of least latency, and what chunking gains or costs where it helps most."""
    quickest = min(points, key=lambda p: p.latency_s / (p.scenario.batch * p.scenario.seq_len))
    text = f"{quickest.label} is quickest per token"
    gains = []
    for point in points:
        if point.scenario.overlap_chunks > 1:
            same = [p for p in points if _twin(p.scenario) == _twin(point.scenario) and p.scenario.overlap_chunks == 1]
            gains += [(1.0 - point.energy_j / p.energy_j, 1.0 - point.latency_s / p.latency_s, point) for p in same]
    if gains:
        energy, latency, point = max(gains, key=lambda gain: gain[0])
        verb = "saves" if energy > 0 else "costs"
        text += (
            f"; at best chunking {verb} {abs(100 * energy):.1f} % energy and "
            f"{'saves' if latency > 0 else 'costs'} {abs(100 * latency):.1f} % time ({point.label})"
        )
    return text + "."


def _twin(scenario: Scenario) -> tuple[Any, ...]:
    return (scenario.tp, scenario.batch, scenario.comm_ctas)


def table(points: Sequence[OverlapPoint]) -> pd.DataFrame:
    """One row a schedule, the full scenario included."""
    return pd.DataFrame(
        [
            {
                **point.scenario.model_dump(exclude_none=True),
                "latency_s": point.latency_s,
                "energy_j": point.energy_j,
                "energy_j_per_token": point.energy_j_per_token,
                "exposed_communication_s": point.exposed_communication_s,
                "pareto": point.on_front,
                "trace": str(point.trace) if point.trace else None,
            }
            for point in points
        ]
    )


def write_plot(points: Sequence[OverlapPoint], path: Path) -> None:
    """Energy over latency per token, the front joined (PNG or SVG by the file's ending)."""
    write_atomically(path, _plot(points, path.suffix.lstrip(".") or "png", Path()))


def write_page(points: Sequence[OverlapPoint], path: Path) -> None:
    """A self-contained page: the picture, whose front points open their traces, and the table."""
    picture = _plot(points, "svg", path.parent).decode()
    picture = picture[picture.index("<svg") :]
    rows = "".join(
        f"<tr{' class=front' if p.on_front else ''}><td>{escape(p.label)}</td><td>{p.latency_s * 1e3:.3f}</td>"
        f"<td>{p.energy_j:.2f}</td><td>{p.energy_j_per_token * 1e3:.3f}</td>"
        f"<td>{p.exposed_communication_s * 1e3:.3f}</td></tr>"
        for p in points
    )
    style = (
        "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}"
        "table{border-collapse:collapse;width:100%}"
        "td,th{padding:.3em .6em;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}.front{font-weight:600}svg{max-width:100%;height:auto}"
    )
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'><title>wattline overlap study</title>"
        f"<style>{style}</style><h1>Overlap study</h1><p>{escape(advice(points))}</p>{picture}"
        "<p>Points of the Pareto front open their timelines; drop the file on ui.perfetto.dev.</p>"
        "<table><tr><th>schedule</th><th>latency ms</th><th>energy J</th><th>mJ per token</th>"
        f"<th>exposed communication ms</th></tr>{rows}</table></html>"
    )
    write_atomically(path, page.encode())


def _plot(points: Sequence[OverlapPoint], kind: str, base: Path) -> bytes:
    import os

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.5, 5.0), constrained_layout=True)
    for chunks in sorted({p.scenario.overlap_chunks for p in points}):
        part = [p for p in points if p.scenario.overlap_chunks == chunks]
        drawn = axis.scatter(
            [p.latency_s / (p.scenario.batch * p.scenario.seq_len) * 1e6 for p in part],
            [p.energy_j_per_token * 1e3 for p in part],
            s=[60 if p.on_front else 25 for p in part],
            label=f"{chunks} chunk{'s' if chunks > 1 else ''}",
        )
        drawn.set_urls([os.path.relpath(p.trace, base) if p.trace else None for p in part])
    edge = sorted(
        (p.latency_s / (p.scenario.batch * p.scenario.seq_len) * 1e6, p.energy_j_per_token * 1e3)
        for p in points
        if p.on_front
    )
    axis.plot(*zip(*edge, strict=True), color="black", linewidth=0.8)
    axis.set_xlabel("latency per token (us)")
    axis.set_ylabel("energy per token (mJ, all GPUs)")
    axis.grid(alpha=0.3)
    axis.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=130)
    plt.close(figure)
    return buffer.getvalue()
