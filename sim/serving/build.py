"""Replicas as a spec describes them, put together from its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import simpy

import workloads
from sim.build.program import routing_of
from sim.errors import ScenarioError
from sim.scenario.layout import layout_of
from sim.scenario.machine import Machine, machine_of
from sim.scenario.partition import Partitions
from sim.scenario.spec import Scenario
from sim.serving.beside import PHASES, BesidePrices
from sim.serving.clock import PhaseClock, SloClock, clocks_mhz
from sim.serving.drafted import Acceptance, DraftedScheduler
from sim.serving.host import HostTime, host_time
from sim.serving.images import room_for
from sim.serving.inflight import Limits
from sim.serving.kv import BlockPool
from sim.serving.launched import LaunchedAhead
from sim.serving.memory import kv_blocks, memory_of
from sim.serving.pipeline import PipelineReplica, batch_slots
from sim.serving.power import ReplicaGovernor
from sim.serving.price import StepPrices
from sim.serving.records import Log, Served
from sim.serving.replica import PhaseCaps, Replica
from sim.serving.requests import Request
from sim.serving.scheduler import Scheduler
from sim.serving.shared import ReplicaSide, SharedGpus
from sim.serving.spec import ServeSpec
from sim.serving.stages import ReplicaStage, handoffs, stage_prices
from sim.serving.untold import Untold
from workloads.families.engine import engine_of


def check_room(spec: ServeSpec, group: Scenario, traffic: Sequence[Request], blocks: int) -> None:
    """Raise where a request's cache exceeds ``blocks`` of a replica, or pieces of prompts are no whole blocks."""
    own_tokens = spec.own_block_tokens(group)
    check_reach(spec, traffic)
    longest = max(traffic, key=lambda r: r.input_tokens + r.output_tokens)
    if longest.input_tokens + longest.output_tokens > blocks * own_tokens:
        raise ScenarioError(
            f"request {longest.number} needs {longest.input_tokens} + {longest.output_tokens} tokens of KV cache, "
            f"a replica holds {blocks * own_tokens}: raise "
            f"{'tp or memory_share' if spec.kv_blocks is None else 'kv_blocks'}, or lower length_scale"
        )
    pieced = next((r.block_tokens for r in traffic if r.prefix), own_tokens)
    if pieced % own_tokens:
        ranks = own_tokens // spec.block_tokens
        spread = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ScenarioError(
            f"block_tokens = {spec.block_tokens}{spread}: must divide the trace's blocks of {pieced} tokens"
        )


def check_reach(spec: ServeSpec, traffic: Sequence[Request]) -> None:
    """Raise where a request is longer than the model's table of positions, or than its window."""
    model = workloads.load_model(spec.model)
    longest = max(traffic, key=lambda r: r.input_tokens + r.output_tokens)
    tokens = longest.input_tokens + longest.output_tokens - 1
    try:
        workloads.check_reach(model, tokens)
        for window in sorted(model.windows):
            if tokens > window:  # the mean of contexts that a step is priced at says nothing about windows
                raise workloads.WorkloadError(
                    f"seq_len: {model.id} attends over a window of {window} tokens, which a server is not simulated "
                    f"with for {tokens} tokens"
                )
    except workloads.WorkloadError as error:
        raise ScenarioError(f"request {longest.number}: {error}") from None


def _target(spec: ServeSpec, group: Scenario) -> Machine:
    """The machine of one replica."""
    target = machine_of(group)
    if target.gpu.card is not None and spec.replicas + spec.prefill_replicas > 1:
        raise ScenarioError(f"gpu = {target.gpu.id}: servers on slices of one card share its watts: give one replica")
    return target


def replicas_of(
    spec: ServeSpec,
    traffic: Sequence[Request],
    *,
    env: simpy.Environment,
    log: Log,
    served: dict[int, Served],
    prefill: bool = False,
) -> list[Replica]:
    """The replicas of ``spec`` that serve whole requests (or go on with prompts), or with ``prefill`` prompts alone."""
    group = spec.group(prefill=prefill)
    copies = routing_of(group).replicas
    workloads.check_served(workloads.load_model(spec.model), layout_of(group), expert_copies=copies)
    target = _target(spec, group)
    blocks = spec.kv_blocks or kv_blocks(spec, group, target)
    check_room(spec, group, traffic, blocks)
    # Replicas are equal: they share what is known.
    prices = stage_prices(spec, group)
    limits = Limits(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        prefix_caching=spec.prefix_caching,
        preemption="recompute" if prefill else spec.preemption,
        prefill_only=prefill,
        checked_tokens=prices[0].each,
        max_loras=group.lora_adapters,
        batch_seqs=math.ceil(spec.max_num_seqs / spec.pp) if spec.pp_batches == "even" else math.inf,
        tells_longest=spec.attention == "per_sequence",
    )
    rungs = _rungs(spec, target, prefill=prefill)
    kv_bytes = memory_of(spec, group, context=1).kv_bytes
    made: list[Replica] = []
    for place in range(spec.prefill_replicas if prefill else spec.replicas):
        number = place if prefill else spec.prefill_replicas + place
        scheduler = _scheduler(spec, limits, BlockPool(blocks=blocks, block_tokens=spec.own_block_tokens(group)))
        scheduler.images = room_for(traffic, spec.max_num_batched_tokens)
        stages = [
            ReplicaStage(
                number=stage,
                prices=own,
                governor=ReplicaGovernor(machine=own.machine, gpus=own.world),
                turn=simpy.Resource(env),
                ahead=LaunchedAhead(host=replace(host_of(spec), plans_ahead=False)),  # once a batch has come
            )
            for stage, own in enumerate(prices)
        ]
        parts: dict[str, Any] = {
            "number": number,
            "env": env,
            "prices": prices[0],
            "scheduler": scheduler,
            "governor": stages[0].governor,
            "log": log,
            "served": served,
            "host": host_of(spec),
            "clock": _phase_clock(spec, prices[0]) or _clock(spec, rungs),
            "caps": _caps(spec, target),
            "swap_s_per_token": kv_bytes / target.gpu.pcie_bytes_per_s,
        }
        if group.pp == 1:
            host = parts["host"]
            one_process = host.plans_ahead and host.pace is not None and group.world == 1  # vLLM's uniproc executor
            made.append(Replica(**parts, untold=Untold(env=env, log=log) if one_process else None))
        else:
            slots = batch_slots(scheduler, group.pp)
            made.append(PipelineReplica(stages=stages, handoffs=handoffs(spec, group, number), slots=slots, **parts))
    return made


def _scheduler(spec: ServeSpec, limits: Limits, pool: BlockPool) -> Scheduler:
    if spec.speculation is None:
        return Scheduler(limits=limits, pool=pool)
    return DraftedScheduler(limits=limits, pool=pool, acceptance=Acceptance(chances=spec.chances, seed=spec.seed))


def sides_of(
    spec: ServeSpec, traffic: Sequence[Request], *, env: simpy.Environment, log: Log, served: dict[int, Served]
) -> tuple[list[ReplicaSide], list[ReplicaSide], list[SharedGpus]]:
    """The replicas of ``spec`` whose GPUs are split: sides for prompts, sides that decode, and what each two share."""
    group = spec.group()
    target = _target(spec, group)
    blocks = spec.kv_blocks or kv_blocks(spec, group, target)
    check_room(spec, group, traffic, blocks)
    sms = dict(spec.sm_partition or ())
    sizes = tuple((name, sms[name]) for name in PHASES)
    # A side's steps have one stream, which runs on its partition; side by side each has a stream of its own.
    cuts = [Partitions(sms=sizes, streams=((0, name),), gpu=target.gpu) for name in PHASES]
    first, second = (
        StepPrices(scenario=group, machine=target, sampling=spec.sampling, attention=spec.attention, partitions=cut)
        for cut in cuts
    )
    both = Partitions(sms=sizes, streams=tuple(enumerate(PHASES)), gpu=target.gpu)
    prices = BesidePrices(alone=(first, second), partitions=both)
    kv_bytes = memory_of(spec, group, context=1).kv_bytes
    fronts: list[ReplicaSide] = []
    backs: list[ReplicaSide] = []
    gpus: list[SharedGpus] = []
    for number in range(spec.replicas):
        pool = BlockPool(blocks=blocks, block_tokens=spec.own_block_tokens(group))
        shared = SharedGpus(env=env, governor=ReplicaGovernor(machine=target, gpus=group.world), prices=prices)
        front, back = (
            ReplicaSide(
                number=number + place * spec.replicas,
                env=env,
                prices=prices.alone[place],
                scheduler=Scheduler(
                    limits=Limits(
                        max_num_seqs=spec.max_num_seqs,
                        max_num_batched_tokens=spec.max_num_batched_tokens,
                        prefix_caching=spec.prefix_caching,
                        preemption="recompute" if place == 0 else spec.preemption,
                        prefill_only=place == 0,
                    ),
                    pool=pool,
                ),
                governor=shared.governor,
                log=log,
                served=served,
                host=host_of(spec),
                swap_s_per_token=kv_bytes / target.gpu.pcie_bytes_per_s,
                shared=shared,
                side=place,
                sms=sizes[place][1],
            )
            for place in range(len(PHASES))
        )
        front.other, back.other = back, front
        front.handover = back.goes_on
        fronts.append(front)
        backs.append(back)
        gpus.append(shared)
    return fronts, backs, gpus


def host_of(spec: ServeSpec) -> HostTime:
    """The host that ``spec`` names, on its stack."""
    known = host_time(spec.host, spec.host_ms * 1e-3, engine_of(workloads.load_stack(spec.own_stack).engine))
    pace = known.pace
    if pace is None:
        return known
    pace = pace.slower(spec.host_pace)
    if spec.captured_tokens is not None:
        pace = replace(pace, captured_tokens=spec.captured_tokens)
    # A step whose drafts it launches is planned once the one before is over (a warning of vLLM 0.24 says so).
    return replace(known, pace=pace, plans_ahead=known.plans_ahead and spec.speculation not in pace.uncaptured_drafts)


def _rungs(spec: ServeSpec, target: Machine, *, prefill: bool) -> tuple[StepPrices, ...]:
    """Prices at the clocks that a replica may choose; none where its clock is fixed."""
    if spec.clock_policy == "fixed":
        return ()
    groups = [spec.group(prefill=prefill, sm_clock_mhz=mhz) for mhz in clocks_mhz(target.gpu)]
    return tuple(
        StepPrices(scenario=group, machine=machine_of(group), sampling=spec.sampling, attention=spec.attention)
        for group in groups
    )


def _phase_clock(spec: ServeSpec, decode: StepPrices) -> PhaseClock | None:
    if not spec.phase_clocks:
        return None
    (prefill,) = stage_prices(spec, spec.group(sm_clock_mhz=spec.prefill_sm_clock_mhz))
    return PhaseClock(prefill=prefill, decode=decode)


def _clock(spec: ServeSpec, rungs: tuple[StepPrices, ...]) -> SloClock | None:
    if not rungs or spec.slo_tpot_s is None:
        return None
    return SloClock(
        rungs=rungs, tpot_s=spec.slo_tpot_s, ttft_s=spec.slo_ttft_s, hold_s=spec.clock_hold_s, host=host_of(spec)
    )


def _caps(spec: ServeSpec, target: Machine) -> PhaseCaps | None:
    prefill_w, decode_w = spec.prefill_power_cap_w, spec.power_cap_w or target.gpu.tdp_w
    if prefill_w is None or not spec.phase_caps:
        return None
    machine_of(spec.group().model_copy(update={"power_cap_w": prefill_w}))  # refuses a cap that the GPU does not take
    return PhaseCaps(prefill=target.limits.under(prefill_w), decode=target.limits.under(decode_w))
