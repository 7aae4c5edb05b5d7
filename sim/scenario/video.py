"""Scenarios of phase ``denoise``: the run of a diffusion transformer that they describe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import workloads
from hardware.gpu import GpuSpec
from sim.errors import MemoryShortError
from sim.scenario.spec import Scenario
from workloads.diffusion import DitSpec, dit_memory_bytes, load_dit, parse_video, reuse_cache_bytes, video_tokens
from workloads.passes import load_passes
from workloads.reuse import computed_steps
from workloads.stack import load_stack

if TYPE_CHECKING:
    from workloads.families.dit_video import VideoRun

VIDEO_STEPS = 50  # Wan2.1, FLUX.1-dev and HunyuanVideo by default

Model = workloads.ModelSpec | DitSpec


def model_of(scenario: Scenario) -> Model:
    """The model of ``scenario``: a language model, or a diffusion transformer in phase ``denoise``."""
    if scenario.phase == "denoise":
        return load_dit(scenario.model)
    return workloads.load_model(scenario.model)


def video_run(scenario: Scenario, spec: DitSpec) -> VideoRun:
    """What ``scenario`` runs, its defaults filled in.

    >>> fields = {"model": "wan2.1-14b", "phase": "denoise", "video": "1280x720x81", "cp": 8, "reuse": "rate:0.58"}
    >>> run = video_run(Scenario.of(**fields), load_dit("wan2.1-14b"))
    >>> run.tokens, len(run.computed), sum(run.computed), run.ulysses
    (75600, 50, 21, 8)
    """
    from workloads.families.dit_video import VideoRun  # 5 ms that language models do without

    video = parse_video(scenario.video) if scenario.video is not None else None
    steps = scenario.steps or (VIDEO_STEPS if video is not None else 1)
    stack = load_stack(scenario.stack)
    ulysses = scenario.ulysses or (scenario.cp if scenario.cp_mode == "ulysses" else 1)
    return VideoRun(
        spec=spec,
        tokens=video_tokens(spec, video) if video is not None else scenario.seq_len,
        video=video,
        computed=computed_steps(scenario.reuse, steps) if scenario.reuse is not None else (True,) * steps,
        reuses=scenario.reuse is not None,
        videos=scenario.batch,
        guidance=scenario.guidance,
        ulysses=ulysses,
        ring=scenario.cp // ulysses,
        layers=scenario.layers,
        unfused=None if stack.passes is None else load_passes(stack.passes),
        flash_2=stack.flash_2,
    )


def memory_bytes(run: VideoRun) -> float:
    """Bytes of each rank."""
    return dit_memory_bytes(
        run.spec, tokens=run.videos * run.tokens, ranks=run.group, branches=run.at_once // run.videos, reuse=run.reuses
    )


def video_summary(scenario: Scenario) -> dict[str, Any]:
    """Counts and bytes of a denoising run; the reuse cache is that of all ranks."""
    spec = load_dit(scenario.model)
    run = video_run(scenario, spec)
    return {
        "latent_tokens": run.tokens,
        "steps": len(run.computed),
        "computed_steps": sum(run.computed),
        "memory_bytes_per_gpu": memory_bytes(run),
        "reuse_cache_bytes": reuse_cache_bytes(spec, run.videos * run.tokens) if run.reuses else 0,
    }


def check_video_memory(scenario: Scenario, spec: DitSpec, gpu: GpuSpec) -> None:
    """Raise :class:`MemoryShortError` when the transformer and its activations exceed a GPU's memory."""
    need = memory_bytes(video_run(scenario, spec))
    if need > gpu.memory_bytes:
        raise MemoryShortError(
            f"{spec.id} does not fit on {gpu.id}: weights {spec.parameters() * 2 / 1e9:.1f} + activations and cached "
            f"residuals {(need - spec.parameters() * 2) / 1e9:.1f} = {need / 1e9:.1f} GB a GPU, it has "
            f"{gpu.memory_bytes / 1e9:.0f} GB: raise cp, lower batch, or --ignore-memory"
        )
