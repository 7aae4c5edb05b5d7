"""A serving engine's host where it launches a step kernel by kernel: prompts of more tokens than it captures."""

from __future__ import annotations

import workloads
from hardware.laws.terms import time_s, wanted_sms
from sim.build.lower import Classify
from sim.scenario.resolved import Resolved
from workloads.engine import load_engine
from workloads.program import Program


def engine_issue_s(
    resolved: Resolved, program: Program, classify: Classify, *, sms: int, clock_hz: float
) -> float | None:
    """Seconds a launch where the host of the stack's engine takes longer for a prompt than its kernels do.

    None where the GPU is behind: kernels then follow one another as in a graph.
    """
    scenario, layout = resolved.scenario, resolved.layout
    if scenario.phase != "prefill" or scenario.launch != "graph":
        return None
    engine = workloads.load_stack(scenario.stack).engine
    if engine is None:
        return None
    pace = load_engine(engine).host
    tokens = scenario.batch * scenario.seq_len // (layout.dp * layout.micro_batches)
    if tokens <= pace.captured_tokens:
        return None
    kernels_s, count, layers = 0.0, 0, 0
    segments = program.ranks[0].phases[0].segments
    for segment in segments:
        for kernel in segment.kernels:
            priced = classify(kernel)
            alone_s = time_s(priced.terms, sms=wanted_sms(priced.terms, float(sms)), sm_clock_hz=clock_hz)
            kernels_s += segment.repeat * (alone_s + priced.gap_s)
        count += segment.repeat * len(segment.kernels)
        layers += segment.repeat if segment.name != "lm_head" else 0
    experts = resolved.language_model.experts > 0
    host_s = pace.seconds(tokens=tokens, layers=layers, kernels=count // max(layers, 1), experts=experts)
    return host_s / count if host_s > kernels_s else None
