"""The host of a stack that launches a step kernel by kernel: long prompts of a serving engine, denoising steps."""

from __future__ import annotations

from collections.abc import Sequence

import workloads
from hardware.laws.terms import time_s, wanted_sms
from sim.build.lower import Classify
from sim.scenario.resolved import Resolved
from workloads.diffusion import STEP
from workloads.engine import HostPace, load_engine
from workloads.passes import Passes, load_passes
from workloads.program import Program, Segment
from workloads.work import CollectiveWork

# A GPU this far behind its host waits for the first launches alone, which are left out: 0.13 % of 700 tokens through
# Llama 3 70B on an H200, just beyond it.
FAR_BEHIND = 0.5


def engine_issue_s(
    resolved: Resolved, program: Program, classify: Classify, *, sms: int, clock_hz: float
) -> float | None:
    """Seconds per launch of a step whose kernels may wait for the host of the stack; None where the host is far ahead.

    The step is a prompt of a serving engine, one of decoding whose drafts it captures in no graph, or a denoising step
    of a stack that launches kernel by kernel. Where the host is far ahead, kernels follow one another as in a graph.
    """
    scenario, layout = resolved.scenario, resolved.layout
    stack = workloads.load_stack(scenario.stack)
    if scenario.launch != "graph":
        return None
    if stack.passes is not None:
        step = next(phase for phase in program.ranks[0].phases if phase.name.startswith(STEP))
        kernels_s, count = _kernels_s(step.segments, classify, sms=sms, clock_hz=clock_hz)
        passes = load_passes(stack.passes)
        more = _exchange_launches(step.segments, passes) if stack.own_exchanges else 0
        host_s = (count + more) * passes.launch_s
        return host_s / count if host_s > FAR_BEHIND * kernels_s else None
    if stack.engine is None:
        return None
    pace = load_engine(stack.engine).host
    if scenario.phase == "decode" and scenario.speculation in pace.uncaptured_drafts:
        return _drafting_s(program, pace, classify, sms=sms, clock_hz=clock_hz)
    if scenario.phase != "prefill":
        return None
    tokens = scenario.batch * scenario.seq_len // (layout.dp * layout.micro_batches)
    if tokens <= pace.captured_tokens:
        return None
    segments = program.ranks[0].phases[0].segments
    kernels_s, count = _kernels_s(segments, classify, sms=sms, clock_hz=clock_hz)
    layers = sum(segment.repeat for segment in segments if segment.layers)
    experts = resolved.language_model.experts > 0
    host_s = pace.seconds(tokens=tokens, layers=layers, kernels=count // max(layers, 1), experts=experts)
    return host_s / count if host_s > FAR_BEHIND * kernels_s else None


def _drafting_s(program: Program, pace: HostPace, classify: Classify, *, sms: int, clock_hz: float) -> float | None:
    """Seconds a launch of a step whose drafts the host launches kernel by kernel, and whose check is one graph."""
    phases = program.ranks[0].phases
    kernels_s, count = _kernels_s(
        [segment for phase in phases for segment in phase.segments], classify, sms=sms, clock_hz=clock_hz
    )
    layers = [segment for segment in phases[0].segments if segment.layers]
    host_s = sum(len(segment.kernels) * segment.repeat for segment in layers) * pace.draft_kernel_s
    return host_s / count if host_s > FAR_BEHIND * kernels_s else None


def _exchange_launches(segments: Sequence[Segment], passes: Passes) -> int:
    """Launches of the host's time that Python takes for the collectives of ``segments``."""
    return sum(
        segment.repeat * passes.exchange_launches.get(kernel.work.op, 0)
        for segment in segments
        for kernel in segment.kernels
        if isinstance(kernel.work, CollectiveWork)
    )


def _kernels_s(segments: Sequence[Segment], classify: Classify, *, sms: int, clock_hz: float) -> tuple[float, int]:
    """Seconds of all kernels of ``segments`` one after the other, their pauses included, and how many they are."""
    seconds, count = 0.0, 0
    for segment in segments:
        for kernel in segment.kernels:
            priced = classify(kernel)
            alone_s = time_s(priced.terms, sms=wanted_sms(priced.terms, float(sms)), sm_clock_hz=clock_hz)
            seconds += segment.repeat * (alone_s + priced.gap_s)
        count += segment.repeat * len(segment.kernels)
    return seconds, count
