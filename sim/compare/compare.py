"""A real step and its prediction, kernel by kernel: what each takes on both sides and what of the error is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sim.compare.align import Pairs, align
from sim.compare.sides import Side, StepKernel, predicted_side, real_side, shown
from sim.errors import SimError
from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.scenario.spec import Scenario
from traces.capture import Capture
from traces.classify import Classes, classify, load_rules
from traces.read.load import Window, read_trace
from traces.steps import TraceStep, TraceSteps, joined, steps_of

PAUSES = "long pauses"
MOST_PAIRS = 50_000_000  # of a real and a predicted kernel that are thought of


class CompareError(SimError):
    """A trace and a scenario that cannot be laid side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A kernel of the step on both sides; None on the side that has it not."""

    real: StepKernel | None
    predicted: StepKernel | None
    layer: str

    @property
    def real_us(self) -> float:
        """Its part of the real step."""
        return 0.0 if self.real is None else self.real.counted_us

    @property
    def predicted_us(self) -> float:
        """Its part of the predicted step."""
        return 0.0 if self.predicted is None else self.predicted.counted_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Kernels of one name, or the pauses, summed over the step; ``real_names`` by time."""

    kernel: str
    cls: str
    real_names: tuple[str, ...]
    real_count: int
    predicted_count: int
    real_us: float
    predicted_us: float

    @property
    def difference_us(self) -> float:
        """Predicted less real."""
        return self.predicted_us - self.real_us


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """One step of a trace beside ``run``; every sum over ``lines`` or ``pairs`` and pauses is a step."""

    run: Timeline
    capture: Capture
    classes: Classes
    rank: int
    steps: TraceSteps
    step: TraceStep
    real: Side
    predicted: Side
    pairs: Sequence[Pair]
    lines: Sequence[Line]

    @property
    def error(self) -> float:
        """Predicted over real step time less one."""
        return self.predicted.step_us / self.real.step_us - 1.0

    def share(self, line: Line) -> float | None:
        """The line's part of the step's error: 1 is all of it. None where there is no error to speak of."""
        total = self.predicted.step_us - self.real.step_us
        return None if abs(self.error) < 1e-4 else line.difference_us / total

    def all_paired(self, cls: str) -> bool:
        """Whether nothing of a class that takes time is left over on either side."""
        alone = [pair for pair in self.pairs if pair.real is None or pair.predicted is None]
        kernels = [
            kernel
            for pair in alone
            for kernel in (pair.real, pair.predicted)
            if kernel is not None and kernel.cls == cls
        ]
        return sum(kernel.counted_us for kernel in kernels) <= 0.01 * self.real.step_us

    def worst(self) -> Line:
        """The line that makes most of the error, or misses most where misses cancel."""
        signed = 1.0 if self.error > 0 else -1.0
        return max(self.lines, key=lambda line: signed * line.difference_us)


def compare_trace(
    paths: Sequence[Path],
    scenario: Scenario,
    *,
    rank: int | None = None,
    window: Window | None = None,
    rules: Path | None = None,
) -> Comparison:
    """Simulate ``scenario`` and lay its step beside the repeated step of the trace in ``paths``.

    Of several ranks the first is taken unless ``rank`` names one. Raises :class:`CompareError` where the scenario is
    more than one step.
    """
    return compare_capture(read_trace(list(paths), window), scenario, rank=rank, rules=rules)


def compare_capture(
    capture: Capture, scenario: Scenario, *, rank: int | None = None, rules: Path | None = None
) -> Comparison:
    """As :func:`compare_trace` does, of a trace that has been read."""
    if scenario.phase == "generate":
        raise CompareError("phase = 'generate': a trace is compared with one step: give phase prefill or decode")
    classes = classify(capture, load_rules(rules) if rules is not None else ())
    if rank is None:
        rank = capture.ranks[0]
    elif rank not in capture.ranks:
        raise CompareError(
            f"rank = {rank}: the trace's ranks are {', '.join(map(str, capture.ranks))}: give one of them"
        )
    run = simulate(scenario)
    return lay_beside(run, capture, classes, rank)


def lay_beside(run: Timeline, capture: Capture, classes: Classes, rank: int) -> Comparison:
    """``run`` beside the step of one rank of ``capture``: of several ways to find it, the one that fits best."""
    predicted = predicted_side(run, rank if rank < run.gpus else 0)
    found: tuple[float, TraceSteps, TraceStep, Side, Pairs] | None = None
    *ways, whole = steps_of(capture, rank)
    tried = [way for way in ways if way.how == ways[0].how]
    # Kernels of one step alone repeat too, layer by layer.
    once = real_side(capture, classes, whole.median()).attentions() < 2 * predicted.attentions()
    if not tried or (once and tried[0].how == "period"):
        tried.append(whole)
    for way in tried:
        layers = real_side(capture, classes, way.median()).attentions()
        times = round(predicted.attentions() / layers) if layers and way.how == "period" else 1
        steps = joined(way, times) if times > 1 else way
        step = steps.median()
        real = real_side(capture, classes, step)
        if not real.step_us:
            raise CompareError(f"rank {rank} of the trace runs for no time: it holds no step to compare")
        if len(real.kernels) * len(predicted.kernels) > MOST_PAIRS:
            raise CompareError(
                f"the step has {len(real.kernels):,} kernels in the trace and {len(predicted.kernels):,} in the "
                "prediction: give --window around one step, or --layers"
            )
        pairs, worth = align(real.kernels, predicted.kernels)
        if found is None or worth > found[0]:
            found = worth, steps, step, real, pairs
    assert found is not None
    _, steps, step, real, places = found
    paired = _paired(real, predicted, places)
    return Comparison(
        run=run,
        capture=capture,
        classes=classes,
        rank=rank,
        steps=steps,
        step=step,
        real=real,
        predicted=predicted,
        pairs=paired,
        lines=_lines(real, predicted, paired),
    )


def _paired(real: Side, predicted: Side, places: Pairs) -> list[Pair]:
    """Every kernel of both sides once, by its real start, or where it should have been."""
    partner = dict(places)
    taken = set(partner.values())
    scale = real.step_us / predicted.step_us
    keyed: list[tuple[float, int, Pair]] = []
    for at, kernel in enumerate(real.kernels):
        other = predicted.kernels[partner[at]] if at in partner else None
        keyed.append(
            (kernel.start_us, 0, Pair(real=kernel, predicted=other, layer="" if other is None else other.layer))
        )
    # A kernel that only the prediction has stands behind the last pair before it.
    behind = 0.0
    of_predicted = {b: a for a, b in places}
    for at, kernel in enumerate(predicted.kernels):
        if at in taken:
            behind = real.kernels[of_predicted[at]].start_us
        else:
            place = behind if behind else kernel.start_us * scale
            keyed.append((place, 1, Pair(real=None, predicted=kernel, layer=kernel.layer)))
    keyed.sort(key=lambda entry: entry[:2])
    layer, pairs = "", []
    for _, _, pair in keyed:
        layer = pair.layer or layer
        pairs.append(replace(pair, layer=layer))
    return pairs


def _lines(real: Side, predicted: Side, pairs: Sequence[Pair]) -> list[Line]:
    """Pairs summed by predicted kernel, else by real one, the largest first; pauses last."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        key = ("predicted", pair.predicted.name) if pair.predicted is not None else ("real", _real_name(pair))
        groups.setdefault(key, []).append(pair)
    lines = []
    for (_, name), members in groups.items():
        times: dict[str, float] = {}
        for pair in members:
            if pair.real is not None:
                times[shown(pair.real)] = times.get(shown(pair.real), 0.0) + pair.real_us
        first = members[0].predicted or members[0].real
        assert first is not None
        lines.append(
            Line(
                kernel=name,
                cls=first.cls,
                real_names=tuple(sorted(times, key=lambda name: -times[name])),
                real_count=sum(pair.real is not None for pair in members),
                predicted_count=sum(pair.predicted is not None for pair in members),
                real_us=sum(pair.real_us for pair in members),
                predicted_us=sum(pair.predicted_us for pair in members),
            )
        )
    lines.sort(key=lambda line: -max(line.real_us, line.predicted_us))
    pauses = Line(
        kernel=PAUSES,
        cls="",
        real_names=(),
        real_count=len(real.long_pauses()),
        predicted_count=len(predicted.long_pauses()),
        real_us=sum(real.long_pauses()),
        predicted_us=sum(predicted.long_pauses()),
    )
    return [*lines, pauses]


def _real_name(pair: Pair) -> str:
    assert pair.real is not None
    return shown(pair.real)
