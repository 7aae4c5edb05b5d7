"""One step as columns, the real one and the predicted one alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.compare.roles import PART_OF_BEFORE, precedence, role_of, short_name
from sim.result.run import Run
from traces.capture import Capture, Category
from traces.classify import Classes
from traces.own_time import own_time
from traces.records import Floats, Ints
from traces.steps import TraceStep

# A pause that a queue of kernels makes by itself; a longer one is the host's, or that of an edge between streams. A
# kernel's time counts the short one before it: profilers and laws draw the line between the two in different places.
LONGEST_OWN_PAUSE_US = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernel:
    """A kernel of a step, or what it and its helpers took together.

    ``own_us`` is the part of the step that counts as its own (kernels side by side share a moment only once),
    ``pause_us`` how long the GPU ran nothing before it. ``rows`` are its rows in the table it came from.
    """

    name: str
    cls: str
    role: str
    layer: str
    stream: int
    start_us: float
    end_us: float
    own_us: float
    pause_us: float
    rows: tuple[int, ...]

    @property
    def counted_us(self) -> float:
        """Its own time and the pause of a queue before it."""
        return self.own_us + (self.pause_us if self.pause_us <= LONGEST_OWN_PAUSE_US else 0.0)

    @property
    def duration_us(self) -> float:
        """From its start to its end, whatever ran beside it."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The kernels of a step by start; own times, pauses and ``after_us`` sum to ``step_us``."""

    kernels: tuple[StepKernel, ...]
    step_us: float
    after_us: float

    def long_pauses(self) -> list[float]:
        """Pauses (us) that no kernel's time counts, the one behind the last kernel too."""
        pauses = [kernel.pause_us for kernel in self.kernels if kernel.pause_us > LONGEST_OWN_PAUSE_US]
        return [*pauses, self.after_us] if self.after_us else pauses

    def attentions(self) -> int:
        """How many attentions there are: about one a layer."""
        return sum(kernel.cls == "attention" for kernel in self.kernels)


def real_side(capture: Capture, classes: Classes, step: TraceStep) -> Side:
    """A step of a trace. Helpers of a product or an attention (split-K sums, cleared counters) count as part of it."""
    work, rows = capture.work, step.rows
    start, end = ((column[rows] - step.begin_ns) / 1e3 for column in (work.start_ns, work.start_ns + work.dur_ns))
    labels = [classes.labels[index] for index in classes.index[rows].tolist()]
    names = [capture.names[index] for index in work.name[rows].tolist()]
    rank = np.array([precedence(label) for label in labels], dtype=np.int64)
    length_us = step.length_ns / 1e3
    shared = own_time(start, end, rank, 0.0, length_us)
    groups: list[list[int]] = []
    waiting: list[int] = []  # memsets, until a product comes on their stream
    stream, category = work.stream[rows].tolist(), work.category[rows].tolist()
    last: dict[int, list[int]] = {}
    for at, (name, label) in enumerate(zip(names, labels, strict=True)):
        before = last.get(stream[at])
        if before is not None and PART_OF_BEFORE.search(name):
            before.append(at)
            continue
        if category[at] == Category.MEMSET:
            waiting.append(at)
            continue
        clears = [row for row in waiting if stream[row] == stream[at]]
        waiting = [row for row in waiting if stream[row] != stream[at]]
        group = [*clears, at] if label == "gemm" else [at]
        groups += [[row] for row in clears if label != "gemm"]
        groups.append(group)
        last[stream[at]] = group
    groups += [[row] for row in waiting]
    kernels = []
    for group in groups:
        main = max(group, key=lambda at: end[at] - start[at])
        kernels.append(
            StepKernel(
                name=names[main],
                cls=labels[main],
                role=role_of(names[main], labels[main]),
                layer="",
                stream=stream[main],
                start_us=float(start[group[0]]),
                end_us=float(end[group[-1]]),
                own_us=float(shared.own[group].sum() + shared.pause[group[1:]].sum()),
                pause_us=float(shared.pause[group[0]]),
                rows=tuple(rows[group].tolist()),
            )
        )
    kernels.sort(key=lambda kernel: (kernel.start_us, kernel.rows))
    return Side(kernels=tuple(kernels), step_us=length_us, after_us=float(shared.after))


def predicted_side(run: Run, gpu: int) -> Side:
    """The step of ``run`` on one GPU."""
    table = run.kernels
    mine = table[table["gpu"] == gpu]
    start, end = (mine[column].to_numpy() * 1e6 for column in ("start_s", "end_s"))
    labels = mine["family"].tolist()
    rank: Ints = np.array([precedence(label) for label in labels], dtype=np.int64)
    shared = own_time(start, end, rank, 0.0, run.latency_s * 1e6)
    columns: list[Floats] = [start, end, shared.own, shared.pause]
    kernels = tuple(
        StepKernel(
            name=name,
            cls=label,
            role=role_of(name, label),
            layer=segment,
            stream=stream,
            start_us=begin,
            end_us=stop,
            own_us=own,
            pause_us=pause,
            rows=(at,),
        )
        for at, (name, label, segment, stream, begin, stop, own, pause) in enumerate(
            zip(mine["kernel"], labels, mine["segment"], mine["stream"], *(c.tolist() for c in columns), strict=True)
        )
    )
    return Side(kernels=kernels, step_us=run.latency_s * 1e6, after_us=float(shared.after))


def shown(kernel: StepKernel) -> str:
    """Its name as tables show it."""
    return short_name(kernel.name)
