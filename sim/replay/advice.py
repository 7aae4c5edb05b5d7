"""What advice would save, by the simulator: the trace replayed as it was and with the advice followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.errors import SimError
from sim.replay.boards import gpu_id_of
from sim.replay.changes import Changes
from sim.replay.setting import ReplayTimes
from sim.replay.study import replay_capture
from sim.scenario.machine import machine
from traces.advice import Advice
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
    told = [_saving(capture, classes, one) for one in found]
    return [one for one in told if one is not None]


def _saving(capture: Capture, classes: Classes, one: Advice) -> Advice | None:
    ways = FOLLOWED.get(one.rule)
    gpu = gpu_id_of(capture)
    if ways is None or len(capture.work) > ROWS_LIMIT or (gpu is None and one.rule == "exposed-collectives"):
        return replace(one, saves_j=_idle_j(capture, one, gpu))
    try:
        results = [
            replay_capture(capture, classes, changes if gpu else replace(changes, regime=None)) for changes in ways
        ]
    except SimError:
        return one
    best = min(results, key=lambda result: _span_us(result.simulated))
    before_us, after_us = _span_us(best.unchanged), _span_us(best.simulated)
    if before_us - after_us < LEAST * before_us:
        return None
    before_j, after_j = best.unchanged.energy_j, best.simulated.energy_j
    saves_j = None if before_j is None or after_j is None else before_j - after_j
    return replace(one, saves_us=before_us - after_us, saves_j=saves_j)


def _span_us(outcome: ReplayTimes) -> float:
    return max(times.span_us for times in outcome.ranks)


def _idle_j(capture: Capture, one: Advice, gpu: str | None) -> float | None:
    """Joules of GPUs that idle for so long less: all of a group's wait for the last of its ranks."""
    if gpu is None or one.saves_us is None or one.rule == "clock-throttling":
        return None
    target = machine(gpu)
    idle_w = target.curve.idle_w(target.model.max_clock_hz)
    return idle_w * one.saves_us * 1e-6 * (len(capture.ranks) if one.rule == "rank-skew" else 1)
