"""The overlap study as a picture and as one self-contained page whose points open their timelines."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from sim.explore.overlap import OverlapPoint, advice, blocks, transform
from sim.output.files import write_atomically
from sim.run.runner import simulate
from sim.scenario.spec import Scenario

# Layers in the timelines that a page carries: enough to see one hand over to the next, small enough for any grid.
PAGE_LAYERS = 2


def write_plot(points: Sequence[OverlapPoint], path: Path) -> None:
    """Energy over latency per token, the front joined (PNG or SVG by the file's ending)."""
    write_atomically(path, _plot(points, path.suffix[1:]))


def write_page(
    points: Sequence[OverlapPoint],
    path: Path,
    *,
    default: OverlapPoint | None = None,
    step: Callable[[], None] = lambda: None,
) -> None:
    """The page: advice (``default`` as there), picture, table; points open timelines that the page carries."""
    timelines = []
    for point in points:
        with tempfile.TemporaryDirectory() as folder:
            timelines.append(base64.b64encode(first_layers_trace(point.scenario, Path(folder))).decode())
        step()
    picture = _plot(points, "svg").decode()
    rows = "".join(
        f"<tr{' class=front' if p.on_front else ''}><td><a href='#t{i}'>{escape(p.label)}</a></td>"
        f"<td>{p.latency_s * 1e3:.3f}</td><td>{p.energy_j:.2f}</td><td>{p.energy_j_per_token * 1e3:.3f}</td>"
        f"<td>{p.exposed_communication_s * 1e3:.3f}</td><td>{p.status}</td></tr>"
        for i, p in enumerate(points)
    )
    carried = "".join(
        f"<script type='application/octet-stream' id='t{i}' data-name='{escape(p.label, quote=True)}'>{data}</script>"
        for i, (p, data) in enumerate(zip(points, timelines, strict=True))
    )
    template = (files("sim.explore") / "overlap_page.html").read_text(encoding="utf-8")
    page = (
        template.replace("{{advice}}", escape(advice(points, default)))
        .replace("{{layers}}", str(PAGE_LAYERS))
        .replace("{{picture}}", picture[picture.index("<svg") :])
        .replace("{{rows}}", rows)
        .replace("{{timelines}}", carried)
    )
    write_atomically(path, page.encode())


def first_layers_trace(scenario: Scenario, folder: Path) -> bytes:
    """A compressed Chrome trace of the scenario's first layers, every kernel as events; made in ``folder``."""
    layers = min(scenario.layers or PAGE_LAYERS, PAGE_LAYERS)
    run = simulate(scenario.model_copy(update={"layers": layers, "ignore_memory": True}))
    return run.to_chrome(folder / "timeline.json.gz").read_bytes()


def _plot(points: Sequence[OverlapPoint], kind: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.5, 5.0), constrained_layout=True)
    for name in sorted({transform(p.scenario) for p in points}):
        part = [(i, p) for i, p in enumerate(points) if transform(p.scenario) == name]
        drawn = axis.scatter(
            [p.latency_s_per_token * 1e6 for _, p in part],
            [p.energy_j_per_token * 1e3 for _, p in part],
            s=[60 if p.on_front else 25 for _, p in part],
            label=name,
        )
        drawn.set_urls([f"#t{i}" for i, _ in part])
    edge = sorted((p.latency_s_per_token * 1e6, p.energy_j_per_token * 1e3, p) for p in points if p.on_front)
    axis.plot([x for x, _, _ in edge], [y for _, y, _ in edge], color="black", linewidth=0.8)
    for x, y, p in edge:
        axis.annotate(blocks(p.scenario), (x, y), xytext=(5, 5), textcoords="offset points", fontsize=7)
    axis.set_xlabel("latency per token (us)")
    axis.set_ylabel("energy per token (mJ, all GPUs)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=130)
    plt.close(figure)
    return buffer.getvalue()
