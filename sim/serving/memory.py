"""How much key/value memory a replica has."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import workloads
from sim.errors import ScenarioError
from sim.scenario.machine import Machine
from sim.scenario.memory import MOST_GPUS, slots, with_draft
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from sim.serving.spec import ServeSpec
from workloads.memory import MemoryNeed


def memory_of(spec: ServeSpec, group: Scenario, *, context: int) -> MemoryNeed:
    """Bytes of the fullest rank with one sequence of ``context`` tokens cached and a full step in flight."""
    return max(stage_needs(spec, group, context=context), key=lambda need: need.bytes)


def stage_needs(spec: ServeSpec, group: Scenario, *, context: int) -> list[MemoryNeed]:
    """Bytes of a rank of each stage."""
    resolved = resolve_scenario(group)
    model, layout = resolved.language_model, resolved.layout
    layers = group.layers or model.layers
    held = workloads.MemoryLoad(
        batch=1, context=context, new_tokens=spec.max_num_batched_tokens, layers=layers, lm_head=True
    )
    needs = workloads.stage_needs(model, layout, held, resolved.precision)
    if group.lora_adapters:
        mine = [layout.stage_layers(layers, stage) for stage in range(layout.pp)]
        needs = [need.plus(slots(resolved, own)) for need, own in zip(needs, mine, strict=True)]
    if model.vision is not None:  # images that were encoded and not yet read
        kept = workloads.DType.BF16.bytes * model.d_model * float(spec.max_num_batched_tokens)
        needs[0] = replace(needs[0], activation_bytes=needs[0].activation_bytes + kept)
    alone = resolved.of(group.model_copy(update={"pp": 1}))  # drafts are made on the last stage
    needs[-1] = with_draft(needs[-1], alone, held)
    return needs


def kv_blocks(spec: ServeSpec, group: Scenario, target: Machine) -> int:
    """KV blocks that fit beside weights and activations in ``memory_share`` of a GPU's memory, on every stage."""
    usable = target.gpu.memory_bytes * spec.memory_share
    fewest = math.inf
    for need in stage_needs(spec, group, context=spec.own_block_tokens(group)):
        room = usable - need.weight_bytes - need.activation_bytes
        blocks = int(room / need.kv_bytes) if need.kv_bytes else math.inf
        if room < 0 or blocks < 1:
            more = (f", {name} = {degree}" for name in ("cp", "dcp", "pp") if (degree := getattr(group, name)) > 1)
            degrees = f"tp = {group.tp}{''.join(more)}"
            raise ScenarioError(
                f"{spec.model} does not fit on {target.gpu.id} with {degrees}: {need}, of which "
                f"{usable / 1e9:.1f} GB may be used: {_remedy(spec, usable)}"
            )
        fewest = min(fewest, blocks)
    return int(fewest)


def _remedy(spec: ServeSpec, usable_bytes: float) -> str:
    """The replica of fewest GPUs whose fullest stage fits: more tensor (or expert) ranks up to 8, then more stages."""
    for gpus in (2**power for power in range(MOST_GPUS.bit_length())):
        for degree in (width for width in (8, 4, 2, 1) if width <= gpus):
            wide = {"ep": degree} | ({"tp": degree} if spec.tp > 1 else {}) if spec.ep > 1 else {"tp": degree}
            degrees = wide | ({"pp": gpus // degree} if gpus > degree else {})
            with suppress(ScenarioError, workloads.WorkloadError):
                larger = ServeSpec.of(**spec.model_dump(exclude_unset=True) | degrees)
                if memory_of(larger, larger.group(), context=spec.block_tokens).bytes <= usable_bytes:
                    return f"the smallest replica that fits is {', '.join(f'{k} {v}' for k, v in degrees.items())}"
    slots = "max_loras, max_lora_rank or " if spec.lora_adapters else ""
    return f"raise memory_share, or lower {slots}max_num_batched_tokens"
