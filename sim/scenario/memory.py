"""Refuse what does not fit in GPU memory, with the arithmetic shown."""

from __future__ import annotations

import workloads
from hardware.gpu import GpuSpec
from sim.errors import MemoryShortError
from sim.scenario.layout import layout_of
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.video import Model, check_video_memory
from workloads.diffusion import DitSpec


def check_memory(scenario: Scenario, model: Model, gpu: GpuSpec) -> None:
    """Raise :class:`MemoryShortError` when one rank's weights, KV cache and activations exceed its memory."""
    if isinstance(model, DitSpec):
        check_video_memory(scenario, model, gpu)
        return
    layout = layout_of(scenario)
    new_tokens = 1 if scenario.phase == "decode" else scenario.seq_len
    workloads.check_layout(model, layout, batch=scenario.batch, new_tokens=new_tokens, layers=scenario.layers)
    need = _training(scenario, model) if scenario.phase == "train" else _serving(scenario, model, new_tokens)
    if need.bytes > gpu.memory_bytes:
        raise MemoryShortError(
            f"{model.id} does not fit on {gpu.id}: {need}, it has {gpu.memory_bytes / 1e9:.0f} GB: "
            f"raise tp or {'cp' if scenario.phase == 'train' else 'pp'}, lower batch or layers, or --ignore-memory"
        )


def _serving(scenario: Scenario, model: workloads.ModelSpec, new_tokens: int) -> workloads.MemoryNeed:
    return workloads.memory_need(
        model,
        layout_of(scenario),
        batch=scenario.batch,
        context=scenario.seq_len + (scenario.output_len or 0),
        new_tokens=new_tokens,
        layers=scenario.layers or model.layers,
        lm_head=scenario.lm_head,
        precision=precision_of(scenario, model),
        expert_replicas=scenario.expert_replicas or 0,
    )


def _training(scenario: Scenario, model: workloads.ModelSpec) -> workloads.MemoryNeed:
    return workloads.training_need(
        model,
        layout_of(scenario),
        batch=scenario.batch,
        seq_len=scenario.seq_len,
        layers=scenario.layers or model.layers,
        lm_head=scenario.lm_head,
    )
