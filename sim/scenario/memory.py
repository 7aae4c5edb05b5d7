"""What a run needs of GPU memory: the arithmetic, the largest batch, the smallest layout; refuse what does not fit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

import workloads
from hardware.catalog import load_gpu
from hardware.gpu import GpuSpec
from hardware.mig import mig_profiles, mig_slice
from inputs.same import Keyed
from sim.errors import MemoryShortError, ScenarioError
from sim.scenario.adapters import adapters_in
from sim.scenario.resolved import Resolved
from sim.scenario.spec import Scenario
from sim.scenario.video import check_video_memory
from workloads.diffusion import DitSpec
from workloads.families.adapters import adapter_size

# Batches beyond this are not looked for.
MOST_SEQUENCES = 1 << 20
# Nor layouts of more GPUs.
MOST_GPUS = 1024
# Works whose check and need are remembered: those that a sweep is at.
MAX_ASKED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of the fullest GPU: what it needs, what it has, and the largest batch that would fit (0: none does)."""

    need: workloads.MemoryNeed
    gpu_bytes: float
    largest_batch: int

    @property
    def room_bytes(self) -> float:
        """What is left; less than nothing where it does not fit."""
        return self.gpu_bytes - self.need.bytes

    def as_json(self) -> dict[str, float]:
        """Plain values, bytes a GPU."""
        return {
            "weights": self.need.weight_bytes,
            "kv_cache": self.need.kv_bytes,
            "activations": self.need.activation_bytes,
            "gradients": self.need.gradient_bytes,
            "room": self.room_bytes,
            "gpu": self.gpu_bytes,
            "largest_batch": self.largest_batch,
        }


def memory_use(resolved: Resolved) -> MemoryUse:
    """What a scenario needs of its GPU's memory; raises as running it would, but not where it does not fit."""
    gpu = load_gpu(resolved.scenario.gpu)
    return MemoryUse(need=memory_need(resolved), gpu_bytes=gpu.memory_bytes, largest_batch=largest_batch(resolved, gpu))


def largest_batch(resolved: Resolved, gpu: GpuSpec) -> int:
    """The largest batch, a multiple of the replicas and micro-batches it is cut into, that fits with all else equal."""
    scenario = resolved.scenario
    unit = scenario.dp * (scenario.micro_batches or 1)

    def fits(units: int) -> bool:
        larger = scenario.model_copy(update={"batch": units * unit})
        return memory_need(resolved.of(larger)).bytes <= gpu.memory_bytes

    most = MOST_SEQUENCES // unit
    return unit * bisect_left(range(1, most + 1), True, key=lambda units: not fits(units))


def check_memory(resolved: Resolved, gpu: GpuSpec) -> None:
    """Raise :class:`MemoryShortError` when one rank's weights, KV cache and activations exceed its memory."""
    if isinstance(resolved.model, DitSpec):
        check_video_memory(resolved.scenario, resolved.model, gpu)
        return
    _checked_layout(Keyed(resolved.work, resolved))
    need = memory_need(resolved)
    if need.bytes > gpu.memory_bytes:
        raise MemoryShortError(
            f"{resolved.model.id} does not fit on {gpu.id}: {need}, it has {gpu.memory_bytes / 1e9:.0f} GB: "
            f"{_remedy(resolved, gpu)}; or --ignore-memory"
        )


def _remedy(resolved: Resolved, gpu: GpuSpec) -> str:
    """The largest batch that fits as it is laid out, and the fewest GPUs that hold this one."""
    ways = []
    if batch := largest_batch(resolved, gpu):
        ways.append(f"batch {batch} fits here")
    if gpu.card is not None:  # slices work alone, whatever their number
        slices = (mig_slice(gpu.card, name) for name in mig_profiles()[gpu.card.id])
        ways += [f"{one.id} holds it" for one in slices if one.memory_bytes >= memory_need(resolved).bytes][:1]
    elif smallest := smallest_layout(resolved, gpu):
        ways.append(f"the smallest layout that fits is {smallest}")
    context = "cp" if resolved.scenario.phase == "train" else "pp"
    return "; ".join(ways) if ways else f"raise tp or {context}, lower batch or layers"


def smallest_layout(resolved: Resolved, gpu: GpuSpec) -> str | None:
    """The layout of fewest GPUs that holds a scenario: more tensor (or expert) ranks up to 8, then more stages.

    >>> big = Scenario.of(model="llama3-70b", phase="decode", batch=64, seq_len=8192)
    >>> from sim.scenario.resolved import resolve_scenario
    >>> smallest_layout(resolve_scenario(big), load_gpu("h100-sxm-80gb"))
    'tp 4'
    """
    scenario = resolved.scenario
    axis = "ep" if scenario.ep > 1 else "tp"
    for gpus in (2**power for power in range(MOST_GPUS.bit_length())):
        for degree in (width for width in (8, 4, 2, 1) if width <= gpus):
            degrees = {axis: degree, "pp": gpus // degree}
            if scenario.ep > 1 and scenario.tp > 1:
                degrees["tp"] = degree
            if any(size < getattr(scenario, name) for name, size in degrees.items()):
                continue
            try:
                candidate = resolved.of(
                    Scenario.parse(scenario.model_dump(exclude_unset=True) | degrees, where="scenario")
                )
                check_layout(candidate)
            except (ScenarioError, workloads.WorkloadError):
                continue
            if memory_need(candidate).bytes <= gpu.memory_bytes:
                return ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "one GPU"
    return None


def check_layout(resolved: Resolved) -> None:
    """Raise where the model cannot be split as the scenario asks."""
    scenario, model = resolved.scenario, resolved.language_model
    new_tokens = 1 if scenario.phase == "decode" else scenario.seq_len
    if resolved.layout.spreads:
        workloads.check_served(model, resolved.layout, layers=scenario.layers, expert_copies=scenario.expert_replicas)
        return
    workloads.check_layout(
        model,
        resolved.layout,
        batch=scenario.batch,
        new_tokens=new_tokens,
        layers=scenario.layers,
        expert_copies=scenario.expert_replicas,
    )


@lru_cache(maxsize=MAX_ASKED)
def _checked_layout(asked: Keyed[Resolved]) -> None:
    """One check for all scenarios of a work; what is refused is not remembered."""
    check_layout(asked.held)


def memory_need(resolved: Resolved) -> workloads.MemoryNeed:
    """What the fullest rank holds."""
    return _need(Keyed(resolved.work, resolved))


@lru_cache(maxsize=MAX_ASKED)
def _need(asked: Keyed[Resolved]) -> workloads.MemoryNeed:
    resolved = asked.held
    return _training(resolved) if resolved.scenario.phase == "train" else _serving(resolved)


def _serving(resolved: Resolved) -> workloads.MemoryNeed:
    scenario, model = resolved.scenario, resolved.language_model
    held = workloads.MemoryLoad(
        batch=scenario.batch,
        context=scenario.seq_len + (scenario.output_len or 0),
        new_tokens=1 if scenario.phase == "decode" else scenario.seq_len,
        layers=scenario.layers or model.layers,
        lm_head=scenario.lm_head,
        expert_replicas=scenario.expert_replicas or 0,
        source_len=scenario.source_len,
    )
    need = workloads.memory_need(model, resolved.layout, held, resolved.precision)
    if scenario.lora_adapters:
        stages = [resolved.layout.stage_layers(held.layers, stage) for stage in range(resolved.layout.pp)]
        need = need.plus(max((slots(resolved, mine) for mine in stages), key=lambda one: one.bytes))
    return with_draft(need, resolved, held)


def slots(resolved: Resolved, layers: range) -> workloads.MemoryNeed:
    """What a rank holds for the scenario's adapters of its ``layers``."""
    adapters, one_bytes = adapters_in(resolved.scenario), 0.0
    if adapters is not None:
        one_bytes = adapter_size(resolved.language_model, resolved.layout, layers, adapters).rank_bytes
    room = resolved.scenario.max_loras or resolved.scenario.lora_adapters
    return workloads.MemoryNeed(weight_bytes=room * one_bytes, kv_bytes=0.0, activation_bytes=0.0)


def with_draft(need: workloads.MemoryNeed, resolved: Resolved, held: workloads.MemoryLoad) -> workloads.MemoryNeed:
    """``need`` and what drafting needs beside the model: the draft's weights and cache, or those of one more layer."""
    scenario, model, layout = resolved.scenario, resolved.language_model, resolved.layout
    if scenario.speculation in (None, "ngram"):
        return need
    if scenario.draft_model is not None:
        draft = workloads.load_model(scenario.draft_model)
        return need.plus(workloads.memory_need(draft, layout, replace(held, layers=draft.layers)))
    one, two = (
        workloads.memory_need(model, layout, replace(held, layers=layers), resolved.precision)
        for layers in (model.layers - 1, model.layers)
    )
    layer = workloads.MemoryNeed(
        weight_bytes=two.weight_bytes - one.weight_bytes, kv_bytes=two.kv_bytes - one.kv_bytes, activation_bytes=0.0
    )
    return need.plus(layer)


def _training(resolved: Resolved) -> workloads.MemoryNeed:
    scenario, model = resolved.scenario, resolved.language_model
    layers = scenario.layers or model.layers
    held = workloads.MemoryLoad(batch=scenario.batch, context=scenario.seq_len, layers=layers, lm_head=scenario.lm_head)
    options = workloads.Options(
        precision=resolved.precision,
        optimizer=scenario.optimizer,
        sharding=scenario.sharding,
        accumulate=scenario.accumulate,
    )
    return workloads.training_need(model, resolved.layout, held, options)
