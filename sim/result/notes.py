"""What a run leaves out or takes as another thing, in words beside its status."""

from __future__ import annotations

from collections.abc import Iterator

import workloads
from sim.scenario.machine import Machine
from sim.scenario.spec import Scenario
from workloads.decoder import load_decoder
from workloads.diffusion import load_dit
from workloads.engine import load_engine

# A mean further above its cap is said.
CAP_SLACK = 1.002

# Decoders whose modules are not known: convolutions alone, fused with their norms. On an H200 those of FLUX.1, Wan2.1
# and HunyuanVideo were 14 ms where the modules take 86, 0.57 s of 2.80, and 0.65 of 5.83.
COARSE_DECODER = "the VAE's decoder is a lower bound, a fifth of what modules take at most: the model names none"
# Decoders of images: as many at once as were measured.
MOST_IMAGES = 8
SEVERAL_IMAGES = f"more than {MOST_IMAGES} images decoded together were not measured"
# The GPU whose kernels the laws rest on (records/h200-sxm-141gb/diffusers), where 26 decodes are off by 4.5 % at most
# in time, by 6 % in energy.
DECODER_GPU = "h200-sxm-141gb"
CARRIED_DECODER = "the VAE's decoder is extrapolated from an H200's kernels: no decode was measured on this GPU"

# Stack `vllm`: three passes of 16 layers take its host 31 ms, ten times what they take the GPU.
GRAPHED_DRAFTS = "a draft model's passes are taken for graphs here: vLLM launches them, as --phase decode and serve do"

# Kernels of gradients at the laws of forward ones; LLM-foundry's public steps: tests/test_training_public.py.
TRAINING = (
    "no kernel of gradients was measured: they run as today's forward kernels do, steps of 2023 took 1.3 to 2.3 "
    "times as long"
)
FRAMEWORK = (
    "no kernel of gradients was measured: products run as today's, attention as FlashAttention 2 without a mask; "
    "LLM-foundry's public steps took 1.0 to 1.34 times as long"
)


def cap_notes(scenario: Scenario, target: Machine, drawn_w: float | None) -> Iterator[str]:
    """What is to be said of the power limit; ``drawn_w`` is the highest mean power of a GPU."""
    held_w = target.limits.cap_w
    if scenario.regime == "steady" and drawn_w is not None and drawn_w > CAP_SLACK * held_w:
        yield f"power_cap_w = {held_w:g} cannot be held: the lowest clock still draws {drawn_w:.0f} W"


def notes_of(scenario: Scenario, target: Machine) -> Iterator[str]:
    """What is to be said of ``scenario`` on ``target``, whatever the power limit."""
    stack = workloads.load_stack(scenario.stack)
    if scenario.phase == "train":
        yield TRAINING if stack.framework is None else FRAMEWORK
    run = workloads.DType(scenario.dtype)
    if run.bits < 32 and scenario.phase != "denoise" and workloads.load_model(scenario.model).precision == "fp32":
        yield f"the file's weights are fp32, run in {run.value}: --dtype fp32 runs them as they are"
    launched = load_engine(stack.engine).host.uncaptured_drafts if stack.engine is not None else ()
    if scenario.phase == "generate" and scenario.speculation in launched:
        yield GRAPHED_DRAFTS
    if scenario.video is not None:
        decoder = load_dit(scenario.model).decoder
        if decoder is None:
            yield COARSE_DECODER
            return
        if target.gpu.id != DECODER_GPU:
            yield CARRIED_DECODER
        if scenario.batch > MOST_IMAGES and load_decoder(decoder).frames == "whole":
            yield SEVERAL_IMAGES
