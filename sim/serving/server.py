"""``serve(spec)``: replicas, router and traffic put together and run."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import simpy

from inputs.collector import collector_paused
from sim.engine.resources.network import Network
from sim.errors import ScenarioError
from sim.scenario.machine import Machine, machine_of
from sim.serving.adapters import adapter_slots
from sim.serving.build import host_of, replicas_of, sides_of
from sim.serving.fleet import FleetBudget
from sim.serving.inflight import Sequence as InFlight
from sim.serving.records import CacheTransfer, Log, Served
from sim.serving.replica import Replica
from sim.serving.requests import Request, Traffic
from sim.serving.result import ServeResult
from sim.serving.router import LeastLoaded, Router, router_of
from sim.serving.scale import Autoscaler, Measure
from sim.serving.spec import ServeSpec
from sim.serving.tier_build import tiers_of
from sim.serving.transfers import CacheTransfers
from workloads.engine import RequestPath

# A replica that is killed: (second, number of the replica); a router that is down: (from second, to second).
Kill = tuple[float, int]
Outage = tuple[float, float]
# Ways of requests are drawn apart from arrivals and lengths.
PATH_DRAWS = 3


def serve(
    spec: ServeSpec | None = None,
    /,
    *,
    kills: Sequence[Kill] = (),
    outages: Sequence[Outage] = (),
    window: tuple[float, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
    traffic: Traffic | None = None,
    **fields: Any,
) -> ServeResult:
    """Serve a spec's traffic (or ``traffic``) and return what became of it. ``progress`` hears of requests done, and of
    how many.

    A killed replica's requests begin anew elsewhere; those that come while the router is down wait for it.
    Between the seconds of ``window`` every step is remembered, so that a trace can show its kernels.

    >>> from sim.serving import serve
    >>> run = serve(model="llama3-8b", requests=20, rate_per_s=10.0, input_tokens=200, output_tokens=8)
    >>> bool(run.requests["done_s"].notna().all())
    True
    """
    if spec is None:
        spec = ServeSpec.of(**fields)
    if window is not None and not window[0] < window[1]:
        raise ScenarioError(f"window: from {window[0]:g} s to {window[1]:g} s: give two times, the earlier first")
    traffic = spec.traffic() if traffic is None else traffic
    log = Log(window=window, unanswered=traffic.unanswered)
    server = _Server(spec=spec, traffic=traffic.requests, log=log, progress=progress or (lambda *_: None))
    run = server.run(kills, outages)
    if window is not None and not log.run_steps:
        raise ScenarioError(
            f"window: no step runs from {window[0]:g} s to {window[1]:g} s: give other times, the server ends at "
            f"{run.end_s:.4g} s"
        )
    return run


@dataclass(kw_only=True, slots=True, eq=False)
class _Server:
    spec: ServeSpec
    traffic: list[Request]
    progress: Callable[[int, int], None]
    env: simpy.Environment = field(default_factory=simpy.Environment)
    log: Log
    served: dict[int, Served] = field(default_factory=dict)
    finished: int = 0
    front: list[Replica] = field(default_factory=list)  # whole requests, or prompts alone
    back: list[Replica] = field(default_factory=list)  # those that go on with prompts of others
    router: Router = field(init=False)
    over: simpy.Event = field(init=False)
    _queue: list[Request] = field(default_factory=list)  # of a closed loop
    _held: list[InFlight] = field(default_factory=list)  # while there is no router, or no replica that serves
    _routers_down: int = 0
    _transfers: CacheTransfers | None = None  # where replicas hand over
    _path: RequestPath | None = field(init=False)
    _rng: np.random.Generator = field(init=False)
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.router = router_of(self.spec.router)
        self.over = self.env.event()
        self.served = {request.number: Served(request=request) for request in self.traffic}
        self._path = host_of(self.spec).path
        self._rng = np.random.default_rng([self.spec.seed, PATH_DRAWS])

    def run(self, kills: Sequence[Kill], outages: Sequence[Outage]) -> ServeResult:
        spec = self.spec
        with spec.own_names():
            self.machine = machine_of(spec.group())
            self._build()
        for at_s, number in kills:
            if spec.sm_partition is not None:
                raise ScenarioError(f"kills: replica {number}: not known beside sm_partition: leave one of them out")
            if not 0 <= number < len(self.front) + len(self.back):
                raise ScenarioError(
                    f"kills: there is no replica {number}, the last is {len(self.front) + len(self.back) - 1}"
                )
            if not 0 <= at_s < math.inf:
                raise ScenarioError(f"kills: replica {number} at {at_s:g} s: give a time of 0 s or later")
            self.env.process(self._killer(at_s, number))
        for from_s, to_s in outages:
            if not 0 <= from_s <= to_s < math.inf:
                raise ScenarioError(f"outages: from {from_s:g} s to {to_s:g} s: give two times, the earlier first")
            self.env.process(self._outage(from_s, to_s))
        if spec.autoscale is not None:
            self.env.process(self._autoscaler(spec.autoscale).run())
        if spec.fleet_power_w is not None:
            self.env.process(self._fleet(spec.fleet_power_w).run())
        for replica in (*self.front, *self.back):
            self.env.process(replica.run())
        if spec.concurrency is None:
            self.env.process(self._arrive())
        else:
            self._queue = self.traffic[::-1]
            for _ in range(min(spec.concurrency, len(self.traffic))):
                self._next()
        with collector_paused():
            self.env.run(until=self.over)
        for replica in (*self.front, *self.back):
            if replica.alive:
                replica.idle_until_now()
        for replica in (*self.front, *self.back):
            for prices in (replica.prices, *(replica.clock.rungs if replica.clock else ())):
                prices.table.save()
        for replica in self.front:
            if (tiers := replica.scheduler.memory.tiers) is not None:
                self.log.fetched.update({name: count * tiers.piece_tokens for name, count in tiers.found.items()})
        self.log.served = [self.served[request.number] for request in self.traffic]
        return ServeResult(spec=spec, machine=self.machine, log=self.log, end_s=self.env.now)

    def _build(self) -> None:
        spec = self.spec
        shared: dict[str, Any] = {"env": self.env, "log": self.log, "served": self.served}
        if spec.sm_partition is not None:
            fronts, backs, gpus = sides_of(spec, self.traffic, **shared)
            self.front, self.back = [*fronts], [*backs]
            for side in (*fronts, *backs):
                side.done = self._done
            for each in gpus:
                self.env.process(each.run())
            return
        others = replicas_of(spec, self.traffic, **shared)
        self.front, self.back = (others, []) if not spec.prefill_replicas else ([], others)
        if spec.prefill_replicas:
            self.front = replicas_of(spec, self.traffic, prefill=True, **shared)
            for replica in self.front:
                replica.handover = self._hand_over
            self._transfers = CacheTransfers(env=self.env, spec=spec)
        for replica in (*self.front, *self.back):
            replica.done = self._done
        tiers = tiers_of(spec, self.machine, self.traffic, self.env)
        for replica, own in zip(self.front, tiers, strict=bool(tiers)):
            replica.scheduler.memory.tiers = own
        self._add_slots()

    def _add_slots(self) -> None:
        """Each replica has slots for adapters, and tiers of its cache on the same host link."""
        spec = self.spec
        for replica in (*self.front, *self.back) if spec.lora_adapters else ():
            tiers = replica.scheduler.memory.tiers
            network = Network(self.env, ()) if tiers is None else tiers.network
            group = spec.group(prefill=replica.number < spec.prefill_replicas)
            own = adapter_slots(group, self.machine, replica.number, spec.lora_adapters, network, self.env)
            replica.take_slots(own)
            self.log.adapter_slots += own

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        for request in self.traffic:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._receive(InFlight(request=request, target=request.input_tokens))

    def _receive(self, sequence: InFlight) -> None:
        """A request comes to the engine after its way through the front end, which has no order."""
        path_s = 0.0 if self._path is None else self._path.draw(self._rng.random())
        record = self.served[sequence.request.number]
        record.received_s = self.env.now + path_s
        if path_s:
            self.env.timeout(path_s).callbacks.append(lambda _: self._route(sequence))
        else:
            self._route(sequence)

    def _next(self) -> None:
        """A closed loop sends its next request now."""
        request = self._queue.pop()
        late = replace(request, arrival_s=self.env.now)
        self.served[request.number].request = late
        self._receive(InFlight(request=late, target=late.input_tokens))

    def _route(self, sequence: InFlight) -> None:
        living = [replica for replica in self.front if replica.alive]
        if not living:
            raise ScenarioError("every replica that takes requests has been killed: leave one")
        serving = [replica for replica in living if replica.serving]
        if self._routers_down or not serving:
            self._held.append(sequence)
        else:
            self.router.choose(sequence.request, serving).add(sequence)

    def _release(self) -> None:
        """Requests that were held are sent again."""
        held, self._held = self._held, []
        for sequence in held:
            self._route(sequence)

    def _outage(self, from_s: float, to_s: float) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(from_s)
        self._routers_down += 1
        yield self.env.timeout(to_s - from_s)
        self._routers_down -= 1
        self._release()

    def _autoscaler(self, measure: Measure) -> Autoscaler:
        spec = self.spec
        scaler = Autoscaler(
            env=self.env,
            replicas=self.front,
            measure=measure,
            target=spec.autoscale_target,
            least=spec.min_replicas,
            start_up_s=spec.start_up_s,
            look_s=spec.autoscale_look_s,
            calm_s=spec.autoscale_calm_s,
            ready=self._release,
            log=self.log,
        )
        scaler.begin()
        return scaler

    def _fleet(self, budget_w: float) -> FleetBudget:
        spec = self.spec
        fleet = FleetBudget(
            env=self.env,
            replicas=[*self.front, *self.back],
            budget_w=budget_w,
            policy=spec.fleet_policy,
            look_s=spec.fleet_look_s,
            most_w=self.machine.gpu.tdp_w,
            looks=self.log.fleet_looks,
        )
        fleet.begin()
        return fleet

    def _done(self) -> None:
        self.finished += 1
        self.progress(self.finished, len(self.traffic))
        if self._queue:
            self._next()
        if self.finished == len(self.traffic):
            self.over.succeed()

    def _hand_over(self, sequence: InFlight) -> None:
        self.env.process(self._move(sequence))

    def _move(self, sequence: InFlight) -> Generator[simpy.Event, Any, None]:
        """A prompt's KV cache goes to the replica that will go on with it, over the links between the two."""
        transfers, number = self._transfers, sequence.request.number
        assert transfers is not None
        record, claimed = self.served[number], sequence.request.input_tokens + sequence.request.output_tokens
        while True:
            living = [replica for replica in self.back if replica.alive]
            if not living:
                raise ScenarioError("every replica that goes on with prompts has been killed: leave one")
            to = LeastLoaded().choose(sequence.request, living)
            to.outstanding_tokens += claimed  # others see it coming
            now_s = self.env.now
            cost = yield from transfers.move(sequence.computed, record.replica, to.number)
            moved = CacheTransfer(number=number, start_s=now_s, end_s=self.env.now, energy_j=cost.energy_j)
            self.log.transfers.append(moved)
            record.transfer_j += cost.energy_j
            if to.alive:
                break
        to.outstanding_tokens -= claimed
        sequence.kept = "here"
        to.add(sequence)

    def _killer(self, at_s: float, number: int) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(at_s)
        replicas = [*self.front, *self.back]
        for lost in replicas[number].kill():
            self.served[lost.request.number].moves += 1
            again = InFlight(request=lost.request, target=lost.target, generated=lost.generated)
            again.last_token_s, again.preemptions = lost.last_token_s, lost.preemptions
            self._route(again)
