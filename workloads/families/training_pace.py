"""How much longer a training framework's kernels take than those that the laws know."""

from __future__ import annotations

from dataclasses import replace

from workloads.program import Kernel, Phase
from workloads.work import AttentionWork, ElementwiseWork, GemmWork, GroupedGemmWork

# Time of a training framework's kernels (eager, of 2023: FlashAttention of before Hopper, elementwise passes one by
# one) over that of the kernels that the laws know: fitted on the eight rows of 760M and 1B models of LLM-foundry's
# public table that tests/test_training.py names. Its rows of 3B, 7B and 13B gave nothing.
PRODUCT_PACE = 1.44
ATTENTION_PACE = 4.3
POINTWISE_PACE = 2.4


def paced(phase: Phase) -> Phase:
    """``phase`` at the pace of a training framework's kernels."""
    segments = (
        replace(one, kernels=tuple(replace(kernel, pace=_pace(kernel)) for kernel in one.kernels))
        for one in phase.segments
    )
    return replace(phase, segments=tuple(segments))


def _pace(kernel: Kernel) -> float:
    match kernel.work:
        case GemmWork() | GroupedGemmWork():
            return PRODUCT_PACE
        case AttentionWork():
            return ATTENTION_PACE
        case ElementwiseWork():
            return POINTWISE_PACE
    return 1.0
