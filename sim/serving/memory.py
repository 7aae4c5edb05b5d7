"""How much key/value memory a replica has."""

from __future__ import annotations

import workloads
from sim.errors import ScenarioError
from sim.scenario.layout import layout_of
from sim.scenario.machine import Machine
from sim.scenario.memory import with_draft
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.serving.spec import ServeSpec
from workloads.memory import MemoryNeed


def memory_of(spec: ServeSpec, group: Scenario, *, context: int) -> MemoryNeed:
    """Bytes of one rank with one sequence of ``context`` tokens cached and a full step in flight."""
    model = workloads.load_model(spec.model)
    held = workloads.MemoryLoad(
        batch=1, context=context, new_tokens=spec.max_num_batched_tokens, layers=model.layers, lm_head=True
    )
    need = workloads.memory_need(model, layout_of(group), held, precision_of(group, model))
    return with_draft(need, group, model, held)


def kv_blocks(spec: ServeSpec, group: Scenario, target: Machine) -> int:
    """KV blocks that fit beside weights and activations in ``memory_share`` of a GPU's memory."""
    need = memory_of(spec, group, context=spec.block_tokens)
    room = target.gpu.memory_bytes * spec.memory_share - need.weight_bytes - need.activation_bytes
    blocks = int(room / need.kv_bytes)
    if blocks < 1:
        raise ScenarioError(
            f"{spec.model} does not fit on {target.gpu.id} with tp = {group.tp}: {need}, of which "
            f"{target.gpu.memory_bytes * spec.memory_share / 1e9:.1f} GB may be used: raise tp or memory_share"
        )
    return blocks
