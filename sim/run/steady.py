"""Where the limiters leave repeated work of even power: one clock for all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hardware.clock import ClockLimits
from sim.engine.governor import Limiter
from sim.engine.running import GpuModel, HeldClock
from sim.result.looks import Looks
from sim.run.clock_search import ClockSearch, PowerSearch, SearchRule, look
from sim.run.guide import PROOFS, GuidedSearch, PowerGuide
from sim.shortcuts.clocks import CLOCK_GRID_HZ, top_step
from sim.shortcuts.pieces import Repeated, RepeatedPiece, mean_w_at, play_governed

# Coarse steps first: clocks that other caps and scenarios have met too, and several GPUs move each other's power.
RULE = SearchRule(grid_hz=CLOCK_GRID_HZ, coarse=10)
# Where a search begins, of the maximum clock: near where big products settle on an H100 at its TDP.
FIRST_SHARE = 0.73
# GPUs that wait for each other move each other's power: so often is what was found looked at again, and what is too
# much by more than this share made less.
MOST_TRIMS, POWER_SLACK = 12, 0.001


def governed(
    sequence: Sequence[Repeated], limits: ClockLimits, gpus: int, *, repetitions: int
) -> tuple[list[RepeatedPiece], list[float]]:
    """Repetitions with the limiters acting in time; the parts are the last one's."""
    limiter = Limiter(limits, gpus=gpus)
    for _ in range(repetitions - 1):
        play_governed(sequence, limiter)
    parts = play_governed(sequence, limiter)
    return parts, limiter.targets_w()


def seconds_of(parts: Sequence[RepeatedPiece]) -> float:
    """How long the parts of a run take together."""
    return sum(part.repeat * part.played.records.end_ps for part in parts) * 1e-12


def mean_w(parts: Sequence[RepeatedPiece]) -> list[float]:
    """The mean power of each GPU over the parts of a run."""
    length_s = seconds_of(parts)
    gpus = range(len(parts[0].played.energy_j))
    return [sum(part.repeat * part.played.energy_j[gpu] for part in parts) / length_s for gpu in gpus]


def steady_clocks(
    sequence: Sequence[Repeated],
    limits: ClockLimits,
    gpus: int,
    guide: PowerGuide | None = None,
    looks: Looks | None = None,
) -> list[HeldClock]:
    """The clock of each GPU at which the mean power of back-to-back repetitions meets the slow limit.

    See :func:`held_clocks`. Work of one GPU that overlaps is looked at where a ``guide`` of its sequence says; several
    move each other's power, so that where their searches end depends on the way there. ``looks`` counts the way.
    """
    scheduled = any(part.piece.serial is None for part in sequence)
    guide = guide or PowerGuide(sequence) if scheduled and gpus == 1 else None
    looks = looks or Looks()

    def at(clocks_hz: list[float]) -> list[float]:
        held = tuple([HeldClock(clock_hz, limits.fast_limit_w) for clock_hz in clocks_hz])
        looks.engine_runs += len({id(step.piece) for step in sequence if not step.piece.known(held)})
        if guide is not None:
            guide.run(held[0])
        return mean_w_at(sequence, held)

    model, guided = sequence[0].piece.model.gpu, None
    if guide is not None and limits.slow_limit_w < math.inf:
        guide.retime(looks)
        guided = GuidedSearch(guide, model, limits.slow_limit_w, guide.expected_w(limits.fast_limit_w))
    found = held_clocks(at, limits, model, gpus, guided=guided, slow_top=scheduled)
    if guide is not None and guided is not None and guide.walked:
        looks.fell_back += max(0, guided.looked - PROOFS)
    return [HeldClock(clock_hz, limits.fast_limit_w) for clock_hz in found]


def held_clocks(
    at: Callable[[list[float]], list[float]],
    limits: ClockLimits,
    model: GpuModel,
    gpus: int,
    *,
    guided: GuidedSearch | None = None,
    slow_top: bool = False,
) -> list[float]:
    """The clock of each GPU at which its mean power, ``at`` all clocks, meets the slow limit.

    A point of the 2 MHz grid (the limiter's dithering between its own, coarser steps) whose mean power is within the
    slow limit while the next point's is not. A ``guided`` search (of one GPU) looks at fewer clocks.
    ``slow_top``: the highest clock takes longest to work out.
    """
    found = [model.max_clock_hz] * gpus
    limit_w = limits.slow_limit_w
    if math.isinf(limit_w):
        return found
    searches: Sequence[PowerSearch]
    if guided is not None:
        searches = [guided]
    else:
        first_hz, top = FIRST_SHARE * model.max_clock_hz, top_step(model)
        halving = [ClockSearch(model, limit_w, RULE, first_hz=first_hz, high=top) for _ in range(gpus)]
        searches = halving
        if slow_top:
            look(searches, at)  # at the top the fast limiter acts too
        if not slow_top or any(search.low for search in halving):
            for search, power in zip(halving, at(found), strict=True):
                search.high_w = power if search.high_w == math.inf else search.high_w
        if all(search.high_w <= limit_w for search in halving):
            return found
    while not all(search.settled for search in searches):
        look(searches, at)
    found = [search.clock_hz for search in searches]
    for _ in range(MOST_TRIMS):
        over = [max(0.0, power / limit_w - 1.0 - POWER_SLACK) for power in at(found)]
        if not any(over):
            break
        # Power goes with the cube of the clock at most.
        less = [math.ceil(excess * hz / 3.0 / CLOCK_GRID_HZ) for hz, excess in zip(found, over, strict=True)]
        found = [max(model.min_clock_hz, hz - n * CLOCK_GRID_HZ) for hz, n in zip(found, less, strict=True)]
    return found
