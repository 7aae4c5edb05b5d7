"""Prompts that wait for the next step, and are all computed in it: a queue with service in bulk, solved exactly.

At the start of a step ``k`` prompts wait; the step takes as many as it has room for, and those that arrive meanwhile
(Poisson) wait for the next one. ``k`` is a Markov chain, whose stationary state gives how often steps hold how many
prompts and how long an arriving prompt waits for the end of its own step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, xlog1py, xlogy  # scipy.stats takes half a second more to load

Floats = NDArray[np.float64]
# Waiting prompts beyond those of this many full steps are left out.
FULL_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BulkQueue:
    """The stationary state: ``share[k]`` of the steps begin with ``k`` prompts waiting; of which each step takes at
    most ``len(times_s) - 1``, in ``times_s[number taken]`` seconds. ``idle`` servers begin with the first arrival. The
    queue is one of ``streams`` that share the arrivals.
    """

    load_per_s: float
    times_s: Floats
    share: Floats
    idle: bool
    streams: int

    @property
    def taken(self) -> NDArray[np.int64]:
        """Prompts that a step takes, by how many wait."""
        return np.minimum(np.arange(len(self.share)), len(self.times_s) - 1)

    @property
    def mean_step_s(self) -> float:
        """The mean time from the start of a step to the start of the next one."""
        pauses = self.share[0] / self.load_per_s if self.idle else 0.0
        return float(self.share @ self.times_s[self.taken] + pauses)

    @property
    def busy(self) -> float:
        """The share of the time in which a server that may be idle is not."""
        return 1.0 - float(self.share[0]) / self.load_per_s / self.mean_step_s if self.idle else 1.0

    def waits_s(self, within: float) -> float:
        """From arrival to the end of its own step (s), for a share ``within`` of the prompts."""
        most = len(self.times_s) - 1
        durations = self.times_s[self.taken]
        others = np.arange(FULL_STEPS * most + 1)
        chance = arrivals(self.load_per_s * durations, len(others), self.streams)
        weight = (self.share * durations)[:, None] * chance
        ahead = np.arange(len(self.share)) - self.taken
        # Taken to be the last of those that arrive in the same step: late by less than a step where not all fit.
        count = ahead[:, None] + others[None, :] + 1
        rest = count % most
        service = (count // most) * self.times_s[most] + np.where(rest > 0, self.times_s[rest], 0.0)
        left = np.broadcast_to(durations[:, None], weight.shape)
        if self.idle:
            weight = np.append(weight, self.share[0] / self.load_per_s)
            service, left = np.append(service, self.times_s[1]), np.append(left, 0.0)
        weight, service, left = weight.ravel() / weight.sum(), service.ravel(), left.ravel()

        def below(t: float) -> float:
            inside = np.where(left > 0, (t - service) / np.where(left > 0, left, 1.0), (t >= service) * 1.0)
            return float(weight @ np.clip(inside, 0.0, 1.0))

        low, high = 0.0, float((service + left).max())
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if below(middle) >= within else (middle, high)
        return high


def arrivals(means: Floats, states: int, streams: int) -> Floats:
    """Chances of 0, 1, ... arrivals, a row for each of ``means``, at one of ``streams`` servers that share them.

    Requests in all are Poisson. A router that deals them out in turn (or to the least loaded) makes each server's
    stream more even: its variance is the mean over ``streams``, as of a binomial law.

    >>> arrivals(np.array([1.0]), 4, 1).round(3).tolist(), arrivals(np.array([1.5]), 4, 2).round(3).tolist()
    ([[0.368, 0.368, 0.184, 0.061]], [[0.125, 0.375, 0.375, 0.125]])
    """
    count, mean = np.arange(states)[None, :], means[:, None]
    if streams == 1:
        return np.asarray(np.exp(xlogy(count, mean) - gammaln(count + 1.0) - mean))
    chance = 1.0 - 1.0 / streams
    trials = mean / chance
    low = np.floor(trials)
    # Between two whole numbers of trials, a mixture of both.
    below, above = (_binomial(count, number, chance) for number in (low, low + 1.0))
    return np.asarray((1.0 - trials + low) * below + (trials - low) * above)


def _binomial(count: NDArray[np.int64], number: Floats, chance: float) -> Floats:
    """Chances of ``count`` successes in a whole ``number`` of trials."""
    failures = np.maximum(number - count, 0.0)
    ways = gammaln(number + 1.0) - gammaln(count + 1.0) - gammaln(failures + 1.0)
    return np.where(count <= number, np.exp(ways + xlogy(count, chance) + xlog1py(failures, -chance)), 0.0)


def bulk_queue(load_per_s: float, times_s: Floats, *, idle: bool = False, streams: int = 1) -> BulkQueue | None:
    """The stationary state of a queue; None where prompts come faster than full steps take them.

    >>> alone = bulk_queue(2.0, np.array([0.0, 0.1]), idle=True)  # one at a time: M/D/1
    >>> round(alone.busy, 6)
    0.2
    """
    most = len(times_s) - 1
    if load_per_s * float(times_s[most]) >= most:
        return None
    states = FULL_STEPS * most + 1
    taken = np.minimum(np.arange(states), most)
    step = np.zeros((states, states))
    chance = arrivals(load_per_s * times_s[taken], states, streams)
    for k in range(states):
        ahead = k - int(taken[k])
        step[k, ahead:] = chance[k, : states - ahead]
        step[k, -1] += 1.0 - step[k].sum()
    if idle:
        step[0] = 0.0
        step[0, 1] = 1.0
    system = np.vstack([(step.T - np.eye(states))[:-1], np.ones(states)])
    share = np.linalg.solve(system, np.append(np.zeros(states - 1), 1.0))
    return BulkQueue(load_per_s=load_per_s, times_s=times_s, share=np.maximum(share, 0.0), idle=idle, streams=streams)
