"""From a scenario to the rank programs of its model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import workloads
from sim.scenario.adapters import adapters_in
from sim.scenario.operators import setting
from sim.scenario.resolved import Resolved
from sim.scenario.spec import Scenario
from sim.scenario.speculation import acceptances
from sim.scenario.video import video_run
from workloads.diffusion import DitSpec
from workloads.program import Program


def build(resolved: Resolved, *, sms_per_cta: float, contexts: Sequence[int] | None = None) -> tuple[Program, float]:
    """The rank programs of a scenario and the tokens they process or produce.

    ``sms_per_cta``: SMs that a block of a collective holds. ``contexts`` are those of the decode steps of a generation,
    where some stand for others of nearly equal context (:mod:`sim.shortcuts.context_buckets`).
    """
    scenario, model, layout = resolved.scenario, resolved.model, resolved.layout
    if isinstance(model, DitSpec):
        from workloads.families.dit_video import build_video  # 5 ms that language models do without

        run = video_run(scenario, model)
        return build_video(run), run.videos * run.tokens
    options = workloads.Options(
        layers=scenario.layers,
        lm_head=scenario.lm_head,
        dtype=workloads.DType(scenario.dtype),
        precision=resolved.precision,
        stack=scenario.stack,
        routing=routing_of(scenario),
        tokens_per_ep_rank=scenario.tokens_per_ep_rank,
        overlap=scenario.overlap,
        overlap_chunks=scenario.overlap_chunks,
        comm_ctas=scenario.comm_ctas,
        overlap_ops=tuple((name, setting(text)) for name, text in scenario.overlap_ops or ()),
        sm_margin=scenario.sm_margin,
        all_reduce=workloads.AllReduce(scenario.all_reduce),
        images=scenario.images,
        source_len=scenario.source_len,
        optimizer=scenario.optimizer,
        sharding=scenario.sharding,
        accumulate=scenario.accumulate,
        adapters=adapters_in(scenario),
        sms_per_cta=sms_per_cta,
    )
    lengths = {"batch": scenario.batch, "seq_len": scenario.seq_len}
    own_batches = layout.own_batches
    if scenario.phase == "generate":
        assert scenario.output_len is not None
        generation = workloads.Generation.of(scenario.seq_len, scenario.output_len)
        if scenario.speculation is not None:
            contexts = contexts or checked_contexts(scenario, range(scenario.seq_len, 1 << 62))
        if contexts is not None:
            generation = replace(generation, contexts=contexts)
        if scenario.speculation is not None:
            program = workloads.build_speculative_generate(
                model,
                layout,
                batch=scenario.batch,
                generation=generation,
                options=options,
                speculation=_speculation(scenario),
            )
            return program, scenario.batch * scenario.output_len * own_batches
        program = workloads.build_generate(model, layout, batch=scenario.batch, generation=generation, options=options)
        return program, scenario.batch * scenario.output_len * own_batches
    if scenario.phase == "train":
        return workloads.build_training(model, layout, options=options, **lengths), scenario.batch * scenario.seq_len
    assert scenario.phase != "denoise"
    if scenario.speculation is not None:
        speculation = _speculation(scenario)
        program = workloads.build_speculative(model, layout, options=options, speculation=speculation, **lengths)
        return program, scenario.batch * own_batches * workloads.tokens_a_step(acceptances(scenario))
    of_pass = workloads.build_spread if layout.spreads else workloads.build_program
    program = of_pass(model, layout, phase=scenario.phase, options=options, **lengths)
    per_sequence = scenario.seq_len if scenario.phase == "prefill" else 1
    return program, scenario.batch * per_sequence * own_batches


def routing_of(scenario: Scenario) -> workloads.Routing:
    """How the scenario's tokens choose experts."""
    law = scenario.routing
    return workloads.Routing(
        popularity=workloads.parse_popularity(law) if law else workloads.Zipf(exponent=scenario.expert_skew),
        seed=scenario.routing_seed,
        replicas=scenario.expert_replicas,
    )


def checked_contexts(scenario: Scenario, cached: Sequence[int]) -> tuple[int, ...]:
    """Cached tokens of each step of a generation that checks drafted ones, as many as pass on average; ``cached`` are
    those of steps that yield one token each."""
    assert scenario.output_len is not None
    each = workloads.tokens_a_step(acceptances(scenario))
    steps = math.ceil((scenario.output_len - 1) / each - 1e-9)
    return tuple(cached[int(number * each)] for number in range(steps))


def _speculation(scenario: Scenario) -> workloads.Speculation:
    draft: workloads.Drafter = "text" if scenario.speculation == "ngram" else "layer"
    if scenario.draft_model is not None:
        draft = workloads.load_model(scenario.draft_model)
    return workloads.Speculation(tokens=scenario.draft_tokens, draft=draft)
