"""What advice would save, by the simulator: the trace replayed as it was and with the advice followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.errors import SimError
from sim.replay.boards import gpu_id_of
from sim.replay.changes import Changes
from sim.replay.own import RunConditions
from sim.replay.setting import ReplayTimes
from sim.replay.study import replay_capture
from sim.scenario.machine import machine
from traces.advised import Advice
from traces.capture import Capture
from traces.classify import COMMUNICATION, Classes

ROWS_LIMIT = 100_000  # of work: a replay of more takes minutes
LEAST = 0.01  # of the span: advice whose simulation saves less is not given
FOLLOWED = {
    "host-bound": (Changes(launch="graph", regime="cold"),),
    "exposed-collectives": (Changes(chunks=2), Changes(chunks=4)),
    "exposed-small-collectives": (Changes(faster={COMMUNICATION: 2.0}),),
}


def with_savings(capture: Capture, classes: Classes, found: Sequence[Advice]) -> list[Advice]:
    """``found`` with microseconds (of the longest rank) and joules (of all GPUs) that following it saves.

    What the simulator finds to save nothing is left out.
    """
    priced = [_saving(capture, classes, advice) for advice in found]
    return [advice for advice in priced if advice is not None]


def _saving(capture: Capture, classes: Classes, advice: Advice) -> Advice | None:
    ways = FOLLOWED.get(advice.rule)
    gpu = gpu_id_of(capture)
    if ways is None or len(capture.work) > ROWS_LIMIT or (gpu is None and advice.rule == "exposed-collectives"):
        return replace(advice, saves_j=_idle_j(capture, advice, gpu))
    own = RunConditions.of(capture)
    if gpu is None or (own is not None and own.steady):  # what was steady stays so
        ways = tuple(replace(changes, regime=None) for changes in ways)
    try:
        results = [replay_capture(capture, classes, changes) for changes in ways]
    except SimError:
        return advice
    best = min(results, key=lambda result: _span_us(result.simulated))
    before_us, after_us = _span_us(best.unchanged), _span_us(best.simulated)
    if before_us - after_us < LEAST * before_us:
        return None
    before_j, after_j = best.unchanged.energy_j, best.simulated.energy_j
    saves_j = None if before_j is None or after_j is None else before_j - after_j
    saves_us = before_us - after_us
    if advice.rule == "host-bound" and advice.saves_us is not None and saves_us > advice.saves_us:
        # A graph also ends waits for ranks that the trace lacks; the host costs no more than its GPU idles.
        part = advice.saves_us / saves_us
        saves_us, saves_j = advice.saves_us, None if saves_j is None else part * saves_j
    return replace(advice, saves_us=saves_us, saves_j=saves_j)


def _span_us(outcome: ReplayTimes) -> float:
    return max(times.span_us for times in outcome.ranks)


def _idle_j(capture: Capture, advice: Advice, gpu: str | None) -> float | None:
    """Joules of GPUs that idle for so long less: all of a group's wait for the last of its ranks."""
    if gpu is None or advice.saves_us is None or advice.rule == "clock-throttling":
        return None
    target = machine(gpu)
    idle_w = target.curve.idle_w(target.model.max_clock_hz)
    return idle_w * advice.saves_us * 1e-6 * (len(capture.ranks) if advice.rule == "rank-skew" else 1)
