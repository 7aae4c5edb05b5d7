"""Timeline and roofline of an answer as plain HTML, placed in percent: the browser draws it at any width by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from sim.pages.figures import COLOURS, ROOFLINE_TITLES, roofs
from sim.pages.sums import kernel_sums, merged
from sim.result.exposure import S_PER_PS

if TYPE_CHECKING:
    from sim.result.timeline import Timeline

# Lanes of more GPUs, and more kernels than this, are a blur on a screen.
MOST_GPUS = 4
MOST_SPANS = 400
TICKS = 5  # along an axis, about
OTHER = "#8b6cd9"  # of families without a colour


def lanes(run: Timeline) -> tuple[str, str]:
    """Kernels of the stretch that takes most of the run (a layer, where layers repeat), a lane a GPU and stream."""
    outcome = run.outcome
    part = max(outcome.parts, key=lambda one: one.repeat * one.played.end_ps)
    graph, records = part.piece.graph, part.played.records
    op, start, end = (
        np.frombuffer(column, dtype=np.int64)
        for column in (records.span_op, records.span_start_ps, records.span_end_ps)
    )
    gpu = np.asarray(graph.op_gpu)[op]
    order = np.argsort(start, kind="stable")
    kept = order[gpu[order] < MOST_GPUS][:MOST_SPANS]
    begin_ps, end_ps = int(start[kept].min()), int(end[kept].max())
    unit_s, unit = _unit((end_ps - begin_ps) * S_PER_PS)
    percent = 100.0 / (end_ps - begin_ps)
    rows: dict[str, list[str]] = {}
    for number in kept.tolist():
        one, queue = int(op[number]), graph.op_queue[op[number]]
        cls, stream = graph.classes[graph.op_class[one]], graph.queue_stream[queue]
        name = f"GPU {merged(outcome.folding.classes[gpu[number]])}" + (f", stream {stream}" if stream else "")
        length = int(end[number] - start[number])
        rows.setdefault(name, []).append(
            f'<i style="left:{(int(start[number]) - begin_ps) * percent:.3f}%;width:{length * percent:.3f}%;'
            f'background:{COLOURS.get(cls.family, OTHER)}" title="{escape(cls.name)}: '
            f'{length * S_PER_PS / unit_s:.4g} {unit}"></i>'
        )
    total = (end_ps - begin_ps) * S_PER_PS / unit_s
    ticks = [(value / total, f"{value:g}") for value in nice(total)]
    drawn = "".join(
        f'<span class="who">{escape(name)}</span><div class="track">{"".join(spans)}</div>'
        for name, spans in sorted(rows.items())
    )
    note = f"One of {part.repeat} equal stretches of the run." if part.repeat > 1 else "The longest stretch of the run."
    if len(kept) < len(op):
        note += f" The first {len(kept)} of its {len(op):,} kernels."
    return f'<div class="lanes">{drawn}<span></span>{_axis(ticks, f"time, {unit}")}</div>', note


def roofline(run: Timeline) -> str:
    """Kernels by arithmetic intensity and rate, each as large as its share of the time, under the GPU's roofs."""
    sums = kernel_sums(run.outcome)
    rows = [row for row in sums if row.intensity == row.intensity]
    known, total_s = roofs(run), sum(row.time_s for row in sums)
    reach = [row.intensity for row in rows] or [1.0]
    low_x, high_x = math.log10(min(reach) / 3), math.log10(max(reach) * 3)
    rates = [row.flops / row.time_s for row in rows] or [1e12]
    low_y = math.log10(min(*rates, *(10**low_x * roof.bytes_per_s for roof in known))) - 0.1
    high_y = math.log10(max(*rates, *(roof.flops_per_s for roof in known))) + 0.15

    def across(intensity: float) -> float:
        return 100 * (math.log10(intensity) - low_x) / (high_x - low_x)

    def up(flops_per_s: float) -> float:
        return 100 * (math.log10(flops_per_s) - low_y) / (high_y - low_y)

    lines = []
    for roof in known:
        ridge = min(max(roof.flops_per_s / roof.bytes_per_s, 10**low_x), 10**high_x)
        at = [(x, min(roof.flops_per_s, x * roof.bytes_per_s)) for x in (10**low_x, ridge, 10**high_x)]
        points = " ".join(f"{across(x):.2f},{100 - up(y):.2f}" for x, y in at)
        dash = ' stroke-dasharray="3 3"' if roof.dotted else ""
        lines.append(f'<polyline points="{points}"{dash}><title>{escape(roof.label)}</title></polyline>')
    grid, marks = [], []
    for axis, low, high, scale in (("left", low_x, high_x, 0), ("bottom", low_y, high_y, 12)):
        for power in range(math.ceil(low), math.floor(high) + 1):
            place = 100 * (power - low) / (high - low)
            grid.append(f'<b class="{axis}" style="{axis}:{place:.2f}%"><span>{10.0 ** (power - scale):g}</span></b>')
    for row in rows:
        size = 8 + 30 * (row.time_s / total_s) ** 0.5
        rate, colour = row.flops / row.time_s, COLOURS.get(row.family, OTHER)
        marks.append(
            f'<i style="left:{across(row.intensity):.2f}%;bottom:{up(rate):.2f}%;width:{size:.0f}px;'
            f'height:{size:.0f}px;background:{colour}" title="{escape(row.name)} ({row.phase}): '
            f"{rate * 1e-12:.4g} TFLOP/s at {row.intensity:.4g} FLOP/byte, mean "
            f'{row.time_s / row.launches * 1e6:.4g} us, {row.energy_j / row.launches:.3g} J"></i>'
        )
    title_x, title_y = ROOFLINE_TITLES
    svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(lines)}</svg>'
    plot = f'<div class="plot">{"".join(grid)}{svg}{"".join(marks)}</div>'
    return f'<div class="roof"><small>{title_y}</small>{plot}<small class="below">{title_x}</small></div>'


def nice(total: float) -> list[float]:
    """Round values from 0 up to ``total``, about :data:`TICKS` of them.

    >>> nice(1.3), nice(870.0)
    ([0.0, 0.5, 1.0], [0.0, 200.0, 400.0, 600.0, 800.0])
    """
    rough = total / TICKS
    decade = 10.0 ** math.floor(math.log10(rough))
    step = next(decade * factor for factor in (1, 2, 5, 10) if decade * factor >= rough)
    return [round(number * step, 12) for number in range(int(total / step + 1e-9) + 1)]


def _axis(ticks: Iterable[tuple[float, str]], title: str) -> str:
    marks = "".join(f'<span style="left:{100 * place:.2f}%">{text}</span>' for place, text in ticks)
    return f'<div class="ticks">{marks}<small>{title}</small></div>'


def _unit(seconds: float) -> tuple[float, str]:
    return (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "us")
