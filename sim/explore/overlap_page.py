"""The overlap study as a picture and as one self-contained page whose points open their timelines."""

from __future__ import annotations

import base64
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from sim.explore.overlap import OverlapPoint, advice, blocks, headline_pair, transform
from sim.output.files import write_atomically
from sim.run.runner import simulate
from sim.scenario.spec import Scenario

# Layers in the timelines that a page carries: enough to see one hand over to the next, small enough for any grid.
PAGE_LAYERS = 2
# Inches of the picture on a desktop and on a phone: letters keep their size.
WIDE_IN, NARROW_IN = 8.5, 4.2
COLUMNS = ("schedule", "ms", "J", "mJ a token", "exposed ms", "status")
MINOR = ("mJ a token", "status")


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
    carried = "".join(
        f"<script type='application/octet-stream' id='t{i}' data-name='{escape(p.label, quote=True)}'>{data}</script>"
        for i, (p, data) in enumerate(zip(points, timelines, strict=True))
    )
    parts = {
        "title": escape(title(points)),
        "what": escape(_what(points)),
        "tiles": "".join(_tile(*tile) for tile in _tiles(points, default)),
        "advice": escape(advice(points, default)),
        "picture": _svg(points, WIDE_IN),
        "narrow": _svg(points, NARROW_IN),
        "layers": str(PAGE_LAYERS),
        "head": "".join(f"<th{_minor(name)}><button>{escape(name)}</button></th>" for name in COLUMNS),
        "rows": "\n".join(_row(i, p) for i, p in enumerate(points)),
        "timelines": carried,
    }
    template = (files("sim.explore") / "overlap_page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    write_atomically(path, page.encode())


def title(points: Sequence[OverlapPoint]) -> str:
    """What was studied on what.

    >>> from sim.explore.overlap import study
    >>> from sim.explore.overlap_grid import scenarios
    >>> base = {"model": "llama3-8b", "layers": 1, "seq_len": 512, "tp": 2}
    >>> title(study(scenarios(base, {"comm_ctas": [4, 8], "overlap_chunks": [1]}))[0])
    'Overlap study: llama3-8b on 2 x h100-sxm-80gb, prefill of 512 tokens'
    """
    first = points[0].scenario
    gpus = sorted({p.scenario.world for p in points})
    of = "prefill of" if first.phase == "prefill" else "decode at"
    machine = f"{' and '.join(map(str, gpus))} x {first.gpu}"
    return f"Overlap study: {first.model} on {machine}, {of} {first.seq_len:,} tokens"


def _what(points: Sequence[OverlapPoint]) -> str:
    first = points[0].scenario
    batches = ", ".join(map(str, sorted({p.scenario.batch for p in points})))
    layers = "all layers" if first.layers is None else f"{first.layers} layers"
    return f"{len(points)} schedules; batch {batches}, {layers}, {first.dtype}."


def _tiles(points: Sequence[OverlapPoint], default: OverlapPoint | None) -> list[tuple[str, str, str]]:
    """The best overlap, the best schedule in sequence, and what the one gains over the other and over the default."""
    pair = headline_pair(points)
    if pair is None:
        best = min(points, key=lambda p: p.latency_s_per_token)
        return [("quickest schedule", _cost(best), best.label)]
    overlapped, sequential = pair
    tiles = [
        ("best overlap", _cost(overlapped), overlapped.label),
        ("best in sequence", _cost(sequential), sequential.label),
        ("overlap against the best in sequence", _gain(overlapped, sequential), "of the same work"),
    ]
    if default is not None and default is not sequential:
        tiles.append(
            ("overlap against the default", _gain(overlapped, default), f"{blocks(default.scenario)}, in sequence")
        )
    return tiles


def _cost(point: OverlapPoint) -> str:
    return f"{point.latency_s * 1e3:.4g} ms, {point.energy_j:.4g} J"


def _gain(one: OverlapPoint, other: OverlapPoint) -> str:
    energy, time = one.energy_j / other.energy_j - 1.0, one.latency_s / other.latency_s - 1.0
    return f"energy {energy:+.1%}, time {time:+.1%}".replace("%", " %")


def _tile(label: str, value: str, small: str) -> str:
    return f"<div class='tile'><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(small)}</small></div>"


def _row(number: int, point: OverlapPoint) -> str:
    figures = (
        f"{point.latency_s * 1e3:.3f}",
        f"{point.energy_j:.2f}",
        f"{point.energy_j_per_token * 1e3:.3f}",
        f"{point.exposed_communication_s * 1e3:.3f}",
        point.status,
    )
    link = f"<td data-value='{number}'><a href='#t{number}'>{escape(point.label)}</a></td>"
    pairs = zip(COLUMNS[1:], figures, strict=True)
    cells = "".join(f"<td{_minor(name)}>{escape(text)}</td>" for name, text in pairs)
    return f"<tr{' class=front' if point.on_front else ''}>{link}{cells}</tr>"


def _minor(name: str) -> str:
    """Columns that narrow windows leave out."""
    return " class='minor'" if name in MINOR else ""


def _svg(points: Sequence[OverlapPoint], width_in: float) -> str:
    picture = _plot(points, "svg", width_in=width_in).decode()
    return picture[picture.index("<svg") :]


def first_layers_trace(scenario: Scenario, folder: Path) -> bytes:
    """A compressed Chrome trace of the scenario's first layers, every kernel as events; made in ``folder``."""
    layers = min(scenario.layers or PAGE_LAYERS, PAGE_LAYERS)
    run = simulate(scenario.model_copy(update={"layers": layers, "ignore_memory": True}))
    return run.to_chrome(folder / "timeline.json.gz").read_bytes()


def _plot(points: Sequence[OverlapPoint], kind: str, *, width_in: float = 8.5) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(width_in, min(5.0, width_in)), constrained_layout=True)
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
    figure.legend(fontsize=8, loc="outside lower center", ncols=max(1, int(width_in / 2)))  # never over a point
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=130)
    plt.close(figure)
    return buffer.getvalue()
