"""``serve(spec)``: replicas, router and traffic put together and run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

import workloads
from sim.errors import ScenarioError
from sim.layout import layout_of
from sim.machine import Machine, machine, machine_of
from sim.scenario import Scenario
from sim.serving.clock import SloClock, clocks_mhz
from sim.serving.kv import BlockPool
from sim.serving.power import Governor
from sim.serving.price import Cost, StepPrices
from sim.serving.records import Log, Served
from sim.serving.replica import PhaseCaps, Replica
from sim.serving.requests import Request
from sim.serving.result import ServeResult
from sim.serving.router import LeastLoaded, Router, router_of
from sim.serving.scheduler import Limits, Scheduler
from sim.serving.scheduler import Sequence as InFlight
from sim.serving.spec import ServeSpec
from workloads.memory import MemoryNeed

# A replica that is killed: (second, number of the replica).
Kill = tuple[float, int]


def serve(
    spec: ServeSpec | None = None,
    /,
    *,
    kills: Sequence[Kill] = (),
    progress: Callable[[int, int], None] | None = None,
    **fields: Any,
) -> ServeResult:
    """Serve a spec's traffic and return what became of it. ``progress`` hears of requests done, and of how many.

    >>> from sim.serving import serve
    >>> run = serve(model="llama3-8b", requests=20, rate_per_s=10.0, input_tokens=200, output_tokens=8)
    >>> bool(run.requests["done_s"].notna().all())
    True
    """
    if spec is None:
        spec = ServeSpec.of(**fields)
    server = _Server(spec=spec, traffic=spec.traffic(), progress=progress or (lambda *_: None))
    return server.run(kills)


@dataclass(kw_only=True, slots=True, eq=False)
class _Server:
    spec: ServeSpec
    traffic: list[Request]
    progress: Callable[[int, int], None]
    env: simpy.Environment = field(default_factory=simpy.Environment)
    log: Log = field(default_factory=Log)
    served: dict[int, Served] = field(default_factory=dict)
    finished: int = 0
    front: list[Replica] = field(default_factory=list)  # whole requests, or prompts alone
    back: list[Replica] = field(default_factory=list)  # those that go on with prompts of others
    router: Router = field(init=False)
    over: simpy.Event = field(init=False)
    _queue: list[Request] = field(default_factory=list)  # of a closed loop
    _transfer: dict[int, Cost] = field(default_factory=dict)
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.router = router_of(self.spec.router)
        self.over = self.env.event()
        self.served = {request.number: Served(request=request) for request in self.traffic}

    def run(self, kills: Sequence[Kill]) -> ServeResult:
        spec = self.spec
        self.machine = machine_of(spec.group())
        self._build()
        for at_s, number in kills:
            if not 0 <= number < len(self.front) + len(self.back):
                raise ScenarioError(
                    f"kills: there is no replica {number}, the last is {len(self.front) + len(self.back) - 1}"
                )
            self.env.process(self._killer(at_s, number))
        for replica in (*self.front, *self.back):
            self.env.process(replica.run())
        if spec.concurrency is None:
            self.env.process(self._arrive())
        else:
            self._queue = self.traffic[::-1]
            for _ in range(min(spec.concurrency, len(self.traffic))):
                self._next()
        self.env.run(until=self.over)
        for replica in (*self.front, *self.back):
            if replica.alive:
                replica.idle_until_now()
        self.log.served = [self.served[request.number] for request in self.traffic]
        return ServeResult(spec=spec, machine=self.machine, log=self.log, end_s=self.env.now)

    def _build(self) -> None:
        spec = self.spec
        limits = Limits(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            prefix_caching=spec.prefix_caching,
            preemption=spec.preemption,
        )
        self.back = self._replicas(spec.replicas, spec.group(), limits, first=spec.prefill_replicas)
        if not spec.prefill_replicas:
            self.front, self.back = self.back, []
            return
        prompts = Limits(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            prefix_caching=spec.prefix_caching,
            prefill_only=True,
        )
        self.front = self._replicas(spec.prefill_replicas, spec.group(prefill=True), prompts, first=0)
        for replica in self.front:
            replica.handover = self._hand_over

    def _replicas(self, count: int, group: Scenario, limits: Limits, *, first: int) -> list[Replica]:
        spec, target = self.spec, machine_of(group)
        prices = StepPrices(scenario=group, machine=target)  # replicas are equal: they share what is known
        rungs = self._rungs(prefill=limits.prefill_only)
        blocks = spec.kv_blocks or kv_blocks(spec, group, target)
        longest = max(self.traffic, key=lambda r: r.input_tokens + r.output_tokens)
        if longest.input_tokens + longest.output_tokens > blocks * spec.block_tokens:
            raise ScenarioError(
                f"request {longest.number} needs {longest.input_tokens} + {longest.output_tokens} tokens of KV cache, "
                f"a replica holds {blocks * spec.block_tokens}: raise tp or memory_share, or lower length_scale"
            )
        pieced = next((r.block_tokens for r in self.traffic if r.prefix), spec.block_tokens)
        if pieced % spec.block_tokens:
            raise ScenarioError(
                f"block_tokens = {spec.block_tokens}: must divide the trace's blocks of {pieced} tokens"
            )
        kv_bytes = _need(spec, group, context=1).kv_bytes
        return [
            Replica(
                number=first + number,
                env=self.env,
                prices=prices,
                scheduler=Scheduler(limits=limits, pool=BlockPool(blocks=blocks, block_tokens=spec.block_tokens)),
                governor=Governor(machine=target, gpus=group.world),
                log=self.log,
                served=self.served,
                host_s=spec.host_ms * 1e-3,
                clock=self._clock(rungs),
                caps=self._caps(target),
                swap_s_per_token=kv_bytes / target.gpu.pcie_bytes_per_s,
                done=self._done,
            )
            for number in range(count)
        ]

    def _rungs(self, *, prefill: bool) -> tuple[StepPrices, ...]:
        """Prices at the clocks that a replica may choose; none where its clock is fixed."""
        if self.spec.clock_policy == "fixed":
            return ()
        groups = [self.spec.group(prefill=prefill, sm_clock_mhz=mhz) for mhz in clocks_mhz(self.machine.gpu)]
        return tuple(StepPrices(scenario=group, machine=machine_of(group)) for group in groups)

    def _clock(self, rungs: tuple[StepPrices, ...]) -> SloClock | None:
        spec = self.spec
        if not rungs or spec.slo_tpot_s is None:
            return None
        return SloClock(
            rungs=rungs,
            tpot_s=spec.slo_tpot_s,
            ttft_s=spec.slo_ttft_s,
            hold_s=spec.clock_hold_s,
            host_s=spec.host_ms * 1e-3,
        )

    def _caps(self, target: Machine) -> PhaseCaps | None:
        prefill_w, decode_w = self.spec.prefill_power_cap_w, self.spec.power_cap_w or target.gpu.tdp_w
        if prefill_w is None or not self.spec.phase_caps:
            return None
        return PhaseCaps(prefill=target.limits.under(prefill_w), decode=target.limits.under(decode_w))

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        for request in self.traffic:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._route(InFlight(request=request, target=request.input_tokens))

    def _next(self) -> None:
        """A closed loop sends its next request now."""
        request = self._queue.pop()
        late = Request(
            number=request.number,
            arrival_s=self.env.now,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            priority=request.priority,
        )
        self.served[request.number].request = late
        self._route(InFlight(request=late, target=late.input_tokens))

    def _route(self, sequence: InFlight) -> None:
        living = [replica for replica in self.front if replica.alive]
        if not living:
            raise ScenarioError("every replica that takes requests has been killed: leave one")
        self.router.choose(sequence.request, living).add(sequence)

    def _done(self, sequence: InFlight) -> None:  # noqa: ARG002 - one callback for all who count
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
        cost = self._transfer_cost(sequence.computed)
        self.log.transfer_j += cost.energy_j
        yield self.env.timeout(cost.time_s)
        living = [replica for replica in self.back if replica.alive]
        if not living:
            raise ScenarioError("every replica that goes on with prompts has been killed: leave one")
        sequence.kept = "here"
        LeastLoaded().choose(sequence.request, living).add(sequence)

    def _transfer_cost(self, tokens: int) -> Cost:
        """Every rank sends its part to its counterpart; joules over all of them, idle power left out."""
        step = self.spec.block_tokens
        whole = -(-tokens // step) * step
        known = self._transfer.get(whole)
        if known is None:
            known = self._transfer[whole] = transfer_cost(self.spec, whole)
        return known

    def _killer(self, at_s: float, number: int) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(at_s)
        replicas = [*self.front, *self.back]
        for lost in replicas[number].kill():
            self.served[lost.request.number].moves += 1
            again = InFlight(request=lost.request, target=lost.target, generated=lost.generated)
            again.last_token_s, again.preemptions = lost.last_token_s, lost.preemptions
            self._route(again)


def _need(spec: ServeSpec, group: Scenario, *, context: int) -> MemoryNeed:
    """Bytes of one rank with one sequence of ``context`` tokens cached and a full step in flight."""
    model = workloads.load_model(spec.model)
    return workloads.memory_need(
        model,
        layout_of(group),
        batch=1,
        context=context,
        new_tokens=spec.max_num_batched_tokens,
        layers=model.layers,
        lm_head=True,
        dtype=workloads.DType(spec.dtype),
    )


def kv_blocks(spec: ServeSpec, group: Scenario, target: Machine) -> int:
    """KV blocks that fit beside weights and activations in ``memory_share`` of a GPU's memory."""
    need = _need(spec, group, context=spec.block_tokens)
    room = target.gpu.memory_bytes * spec.memory_share - need.weight_bytes - need.activation_bytes
    blocks = int(room / need.kv_bytes)
    if blocks < 1:
        raise ScenarioError(
            f"{spec.model} does not fit on {target.gpu.id} with tp = {spec.tp}: {need}, of which "
            f"{target.gpu.memory_bytes * spec.memory_share / 1e9:.1f} GB may be used: raise tp or memory_share"
        )
    return blocks


def transfer_cost(spec: ServeSpec, tokens: int) -> Cost:
    """Time and energy above idle of moving the KV cache of ``tokens`` from the first prefill replica to the last one.

    Each rank sends its part at once; the two replicas may stand on different nodes.
    """
    group = spec.group()
    world = group.world * (spec.replicas + spec.prefill_replicas)
    target = machine(group.gpu, group.node, world, spec.power_cap_w, False, group.sm_clock_mhz, False, group.profile)
    kv_bytes = _need(spec, group, context=tokens).kv_bytes
    prices = StepPrices(scenario=group, machine=target)
    cost = prices.send(round(kv_bytes), ranks=(0, world - group.world))
    idle_j = 2 * cost.time_s * target.model.idle_w(target.model.max_clock_hz)
    return Cost(time_s=cost.time_s, energy_j=group.world * max(0.0, cost.energy_j - idle_j))
