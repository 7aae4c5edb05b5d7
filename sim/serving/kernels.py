"""The kernels of single steps, for the trace of a served run: what the first GPU of a replica runs in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sim.errors import FoldError, ScenarioError
from sim.serving.records import RunStep
from sim.shortcuts.pieces import play
from traces.records import SpanKind

# Steps whose kernels fit into a trace that people look at.
MOST_STEPS = 2000

# A kernel: stream, kind, start and end (s since the server's start), joules.
Kernel = tuple[int, SpanKind, float, float, float]


class ShownStep(NamedTuple):
    """A step with the kernels of its first GPU: those that SimPy ran, and those derived from a law of all layers."""

    step: RunStep
    ran: list[Kernel]
    derived: list[Kernel]


def kernels_of(steps: Sequence[RunStep]) -> Iterator[ShownStep]:
    """Each step with its kernels."""
    if len(steps) > MOST_STEPS:
        raise ScenarioError(f"kernels: {len(steps)} steps lie in the window, give one of at most {MOST_STEPS}")
    for step in steps:
        yield _run(step)


def _run(step: RunStep) -> ShownStep:
    """Run ``step`` kernel by kernel, times in proportion to what the whole step took.

    The proportion is within 1 % of one, as prices are of the engine, where no limiter moved during the step.
    """
    plan = step.prices.whole_step(step.batch)
    limit_w = min(step.target_w, step.prices.machine.limits.fast_limit_w)
    try:
        layout = plan.folded
    except FoldError:
        layout = plan.full
    (part,) = play(layout.sequence, (limit_w,) * len(layout.folding.classes), events=True)
    graph, records, drawing = part.piece.graph, part.played.records, step.prices.drawing(step.batch)
    tail = step.prices.tail(step.batch, step.target_w)
    op = np.frombuffer(records.span_op, dtype=np.int64)
    mine = np.asarray(graph.op_gpu)[op] == 0
    scale = (step.time_s - drawing.time_s - tail.time_s) / records.end_ps
    start_s = step.start_s + scale * np.frombuffer(records.span_start_ps, dtype=np.int64)[mine]
    end_s = step.start_s + scale * np.frombuffer(records.span_end_ps, dtype=np.int64)[mine]
    kinds = [
        SpanKind(
            name=kernel.name,
            category="kernel",
            args={"family": kernel.family, **kernel.describe},
            timed=True,
            communication=kernel.family == "communication",
        )
        for kernel in graph.classes
    ]
    ran = [
        (graph.queue_stream[graph.op_queue[number]], kinds[graph.op_class[number]], begin, end, energy_j)
        for number, begin, end, energy_j in zip(
            op[mine].tolist(),
            start_s.tolist(),
            end_s.tolist(),
            np.frombuffer(records.span_energy_j, dtype=np.float64)[mine].tolist(),
            strict=True,
        )
    ]
    derived: list[Kernel] = []
    world, end = step.prices.world, step.start_s + step.time_s - drawing.time_s
    if tail.time_s:  # of all layers together
        kind = SpanKind(name="attention_longest", category="kernel", timed=True)
        derived.append((0, kind, end - tail.time_s, end, tail.energy_j / world))
    if drawing.time_s:
        kind = SpanKind(name=f"sample_{step.prices.sampling}", category="kernel", timed=True)
        derived.append((0, kind, end, step.start_s + step.time_s, drawing.energy_j / world))
    return ShownStep(step, ran, derived)
