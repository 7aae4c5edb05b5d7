"""What kind of run a scenario is, and its sizes: by these, measured rows and new scenarios are distinguished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import workloads
from inputs.same import Same
from sim.scenario.layout import layout_of
from sim.scenario.operators import setting
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.video import video_run
from workloads.diffusion import load_dit
from workloads.families.ring import RingAttention
from workloads.model import ModelSpec
from workloads.ops import Block, decoder_block, expert_feed, gated_feed

# In the order in which a user would look for the nearest measured kind.
KEY = ("gpu", "phase", "family", "dtype", "stack", "launch", "regime", "layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """``key`` says what kind (a text for each of KEY), ``sizes`` how large: least and greatest of each size.

    ``tokens`` are those of all sequences: of a prompt, cached, or latent ones.
    """

    key: Mapping[str, str]
    sizes: Mapping[str, tuple[float, float]]


def kind_of(scenario: Scenario, gpu: str) -> Kind:
    """Kind and sizes of ``scenario`` on the card ``gpu``."""
    family, sizes = _video(scenario) if scenario.phase == "denoise" else _language(scenario)
    sizes["batch"] = scenario.batch
    if scenario.overlap_chunks > 1:
        sizes["overlap_chunks"] = scenario.overlap_chunks
    if scenario.comm_ctas is not None:
        sizes["comm_ctas"] = scenario.comm_ctas
    cuts = [setting(text) for _, text in scenario.overlap_ops or ()]
    of_cuts = {
        "overlap_chunks": [one.chunks for one in cuts if one.chunks > 1],
        "comm_ctas": [one.comm_ctas for one in cuts if one.comm_ctas is not None],
    }
    if scenario.lora_adapters:
        sizes["lora_adapters"], sizes["max_lora_rank"] = scenario.lora_adapters, scenario.max_lora_rank
        sizes["max_loras"] = scenario.max_loras or scenario.lora_adapters
    if scenario.chip_temperature_c is not None:
        sizes["chip_temperature_c"] = scenario.chip_temperature_c
    return Kind(
        key={
            "gpu": gpu,
            "phase": scenario.phase,
            "family": family,
            "dtype": _types(scenario),
            "stack": scenario.stack,
            "launch": scenario.launch,
            "regime": scenario.regime,
            "layout": layout_words(scenario),
        },
        sizes={name: (float(value), float(value)) for name, value in sizes.items()}
        | {name: (float(min(found)), float(max(found))) for name, found in of_cuts.items() if found},
    )


def _types(scenario: Scenario) -> str:
    """The one type of all operands, or each operand's."""
    if scenario.phase == "denoise":
        return scenario.dtype
    precision = precision_of(scenario)
    return scenario.dtype if precision.uniform else precision.words()


def layout_words(scenario: Scenario) -> str:
    """Degrees above one and how they work together, settings of single operators included.

    >>> layout_words(Scenario.of(model="llama3-8b", tp=2, sequence_parallel=True))
    'tp 2, sequence parallel'
    """
    layout = layout_of(scenario)
    parts = [f"{name} {degree}" for name in ("tp", "pp", "dp") if (degree := getattr(layout, name)) > 1]
    if layout.pp > 1:
        parts.append(f"{layout.micro_batches} micro-batches")
    if layout.ep > 1:
        parts.append(f"ep {layout.ep} {layout.ep_mode}")
    if layout.cp > 1:
        parts.append(f"cp {layout.cp} {scenario.cp_mode}")
    if layout.dcp > 1:
        parts.append(f"dcp {layout.dcp}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    if scenario.speculation is not None:
        parts.append(f"{scenario.speculation} drafts")
    if scenario.lora_adapters:
        parts.append("adapters")
    if scenario.overlap_ops:
        stages = any(setting(text).stage is not None for _, text in scenario.overlap_ops)
        parts.append("overlap by operator" + (" in stages" if stages else ""))
    return ", ".join(parts) or "one GPU"


def family_of(model: ModelSpec) -> str:
    """The family of a language model, as far as its layers are other work than another family's.

    >>> [family_of(workloads.load_model(name)) for name in ("llama3-8b", "qwen3-30b-a3b", "gpt2")]
    ['dense', 'mixture of experts', 'other layers']
    """
    return _family_of(Same(model))


@lru_cache(maxsize=64)
def _family_of(one: Same[ModelSpec]) -> str:
    model = one.held
    if model.vision is not None:
        return "vision-language"
    if model.mixing(range(model.layers)):
        return "hybrid"
    if not model.causal:
        return "encoder"
    if model.latent is not None:
        return "latent attention"
    if model.experts:
        if model.shared_d_ff or model.dense_d_ff or model.route_groups:
            return "mixture of experts with more"
        usual = decoder_block(expert_feed(), qk_norm=model.qk_norm)
        return "mixture of experts" if _alike(model, usual) else "other layers with experts"
    return "dense" if _alike(model, decoder_block(*gated_feed(), qk_norm=model.qk_norm)) else "other layers"


def _alike(model: ModelSpec, usual: Block) -> bool:
    """Whether all layers are ``usual``, but for windows, which are said apart."""
    return all(block.without_windows == usual for block in model.blocks)


def _language(scenario: Scenario) -> tuple[str, dict[str, float]]:
    model = workloads.load_model(scenario.model)
    sizes: dict[str, float] = {
        "seq_len": scenario.seq_len,
        "tokens": scenario.batch * (scenario.seq_len + (scenario.output_len or 0)),
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "head_dim": model.head_dim,
        "q_heads_per_kv_head": model.q_heads / model.kv_heads,
    }
    if scenario.output_len is not None:
        sizes["output_len"] = scenario.output_len
    if model.experts:
        sizes |= {"experts": model.experts, "top_k": model.top_k, "expert_skew": scenario.expert_skew}
    if scenario.tokens_per_ep_rank is not None:
        rows = scenario.tokens_per_ep_rank
        sizes["busiest_rank_over_mean"] = max(rows) * len(rows) / max(sum(rows), 1)
    family = family_of(model)
    context = scenario.seq_len + (scenario.output_len or 0)
    if any(context > window for window in model.windows):
        family += " over a window"
    if scenario.routing is not None and scenario.routing != "uniform":
        law, _, value = scenario.routing.partition(":")
        if law == "zipf":
            sizes["expert_skew"] = float(value)
        else:
            family += f" routed by {law}"
    return family, sizes


def _video(scenario: Scenario) -> tuple[str, dict[str, float]]:
    spec = load_dit(scenario.model)
    run = video_run(scenario, spec)
    blocks = [name for name in ("cross", "double", "single") if getattr(spec, f"{name}_layers")]
    sizes: dict[str, float] = {
        "tokens": scenario.batch * run.tokens,
        "steps": len(run.computed),
        "d_model": spec.d_model,
        "d_ff": spec.d_ff,
        "head_dim": spec.head_dim,
    }
    return f"diffusion transformer of {' and '.join(blocks)} layers", sizes


def ring_kind(gpu: str, layout: str, attention: RingAttention, *, world: int, seq_len: int) -> Kind:
    """Attention alone on a ring."""
    way = ("backward" if attention.backward else "forward") + ("" if attention.causal else " without a mask")
    sizes = {"seq_len": float(seq_len)}
    sizes |= {name: float(getattr(attention, name)) for name in ("q_heads", "kv_heads", "head_dim")}
    return Kind(
        key={
            "gpu": gpu,
            "phase": f"ring attention, {way}",
            "family": "attention alone",
            "dtype": "bf16",
            "stack": "reference-torch",
            "launch": "eager",
            "regime": "steady",
            "layout": f"cp {world} {layout}",
        },
        sizes={name: (value, value) for name, value in sizes.items()},
    )
