"""Hugging Face ``config.json``: the fields that size a model, checked; a key that is not understood is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inputs.texts import parse_json, shown
from workloads.config_keys import check_keys, checked_types, families
from workloads.errors import WorkloadError
from workloads.family import family_model
from workloads.family_file import FamilyFile, family_files
from workloads.fields import flag, name_of, positive
from workloads.layer_norm import LAYER_NORM, layer_norm_model
from workloads.mixers import Latent
from workloads.model import ModelSpec, with_block
from workloads.params import weight_bytes
from workloads.positions import max_positions, slides_everywhere, window_of
from workloads.precision import plain
from workloads.quantised_modules import Scheme
from workloads.quantization import TYPED, precision_of, scheme_of
from workloads.vision import VISION_LANGUAGE, vision_language_model
from workloads.work import DType

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "granite"})
EXPERTS = frozenset({"qwen2_moe", "qwen3_moe", "mixtral"})
LATENT = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})
KNOWN = DENSE | EXPERTS | LATENT | LAYER_NORM | VISION_LANGUAGE
# Choices of experts that are priced: the best of all, or of the best groups.
_ROUTES = ("greedy", "group_limited_greedy", "noaux_tc")


def parse_config(text: str, *, where: str, family: FamilyFile | None = None) -> ModelSpec:
    """A model from its configuration: Llama, Mistral, Qwen2, Qwen3, Phi-3, Granite, Mixtral, Qwen2-MoE, Qwen3-MoE,
    DeepSeek-V2/V3, Kimi K2, GPT-2, OPT, BERT, ViT, Nemotron-H, LLaVA.
    """
    data = parse_json(text, where, WorkloadError, unique_keys=True)
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: a configuration is an object, found {type(data).__name__}")
    return read_config(data, where=where, family=family)


def read_config(data: dict[str, Any], *, where: str, family: FamilyFile | None = None) -> ModelSpec:
    """:func:`parse_config` of what is parsed already."""
    kind = data.get("model_type")
    own = family or (family_files().get(kind) if isinstance(kind, str) else None)
    if own is not None and (family is not None or _by_data(data, str(kind))):
        return _of_family(data, own, where)
    if not isinstance(kind, str) or kind not in KNOWN:
        near = difflib.get_close_matches(str(kind).lower(), supported_types(), n=1) if isinstance(kind, str) else []
        hint = f"did you mean '{near[0]}'?" if near else "'wattline models --all' lists those that are"
        raise WorkloadError(
            f"{where}: model_type = {shown(kind)} is not supported: {hint} (a family.toml beside it adds one)"
        )
    precision, scheme = precision_of(data, where=where), scheme_of(data, where=where)
    check_keys(data, kind, where)
    if kind in VISION_LANGUAGE:
        return vision_language_model(data, where=where, read=read_config)  # reads its scheme with its text
    model = layer_norm_model(data, where=where) if kind in LAYER_NORM else _gated_model(data, kind, where)
    return replace(_stored(model, scheme), family=kind, precision=precision)


def supported_types() -> tuple[str, ...]:
    """Every ``model_type`` of a whole model that is read, sorted."""
    own = {kind for kind, family in family_files().items() if "tower" not in family.table["source"]}
    return tuple(sorted(KNOWN | (own - {"llava_pixtral"})))


def how_checked(kind: str) -> tuple[str, str]:
    """How well what is read of a ``model_type`` was checked, and why it is not run (empty: it is).

    >>> how_checked("whisper")
    ('sizes by the published parameter count; runs unchecked: none was measured', '')
    """
    if kind in KNOWN:
        return checked_types().get(kind, "sizes by published counts; runs unchecked: none was measured"), ""
    table = family_files()[kind].table
    return table["checked"], table.get("refused", "")


def _by_data(data: dict[str, Any], kind: str) -> bool:
    """Whether a family of a TOML reads this configuration: Python reads the same type with other parts."""
    seen = data.get("vision_config")
    if kind in VISION_LANGUAGE:
        return isinstance(seen, dict) and seen.get("model_type") == "pixtral"
    return kind not in KNOWN


def _of_family(data: dict[str, Any], family: FamilyFile, where: str) -> ModelSpec:
    """A model of a family that is data."""
    precision, scheme = precision_of(data, where=where), scheme_of(data, where=where)
    model = family_model(data, family, where=where, read=read_config)
    if "language" not in family.table or any(key in data for key in TYPED):
        model = replace(model, precision=precision)
    return replace(_stored(model, scheme), family=str(data["model_type"]))


def _stored(model: ModelSpec, scheme: Scheme | None) -> ModelSpec:
    """The model as a scheme stores it; one that holds for none of its products is refused."""
    if scheme is None:
        return model
    precision = scheme.over(model.layers, tied=model.tied_embeddings)
    if precision.kv is DType.BF16 and weight_bytes(model, precision) == weight_bytes(model, plain(DType.BF16)):
        raise WorkloadError(f"{scheme.where}: {scheme.method} holds for none of this model's products: take it out")
    return replace(model, quantised=precision)


def _gated_model(data: dict[str, Any], kind: str, where: str) -> ModelSpec:
    """Grouped-query or latent attention around gated feed-forwards or experts."""

    def size(name: str, default: Any = None) -> int:
        value = data.get(name)
        return positive(default if value is None else value, name, where)

    _refuse_other_arithmetic(data, where)
    heads = size("num_attention_heads")
    width = size("hidden_size")
    layers = size("num_hidden_layers")
    fields: dict[str, Any] = {}
    if kind in EXPERTS:
        fields |= {
            "experts": size("num_local_experts" if kind == "mixtral" else "num_experts"),
            "top_k": size("num_experts_per_tok"),
        }
        if kind == "qwen2_moe":
            fields["shared_d_ff"] = size("shared_expert_intermediate_size")
    if kind in LATENT:
        fields |= _latent_fields(data, kind, size, where)
    elif data.get("head_dim") is None and width % heads:
        raise WorkloadError(f"{where}: hidden_size = {width} is not a multiple of num_attention_heads = {heads}")
    return with_block(
        ModelSpec(
            id=name_of(data, where),
            source=str(data.get("_source") or where),
            d_model=width,
            layers=layers,
            q_heads=heads,
            kv_heads=heads if kind in LATENT else size("num_key_value_heads", heads),
            head_dim=size("v_head_dim") if kind in LATENT else size("head_dim", width // heads),
            d_ff=size("intermediate_size" if kind in DENSE | {"mixtral"} else "moe_intermediate_size"),
            vocab=size("vocab_size"),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            tied_embeddings=flag(data, "tie_word_embeddings", where),
            max_positions=max_positions(data, where),
            window=window_of(data, kind, layers, where),
            window_everywhere=slides_everywhere(data, kind),
            **fields,
        )
    )


def _latent_fields(data: dict[str, Any], kind: str, size: Callable[..., int], where: str) -> dict[str, Any]:
    """Latent attention, shared and dense parts of DeepSeek-V2/V3; ``q_lora_rank`` null means none."""
    fields: dict[str, Any] = {
        "latent": Latent(
            q_rank=size("q_lora_rank") if data.get("q_lora_rank") is not None else 0,
            kv_rank=size("kv_lora_rank"),
            nope_dim=size("qk_nope_head_dim"),
            rope_dim=size("qk_rope_head_dim"),
        ),
        "experts": size("n_routed_experts"),
        "top_k": size("num_experts_per_tok"),
    }
    whole = fields["latent"].nope_dim + fields["latent"].rope_dim
    if data.get("qk_head_dim") not in (None, whole):
        raise WorkloadError(
            f"{where}: qk_head_dim = {shown(data['qk_head_dim'])}: is qk_nope_head_dim + qk_rope_head_dim = {whole}"
        )
    if data.get("n_shared_experts") not in (None, 0):
        fields["shared_d_ff"] = size("n_shared_experts") * size("moe_intermediate_size")
    if data.get("first_k_dense_replace") not in (None, 0):
        fields |= {"dense_layers": size("first_k_dense_replace"), "dense_d_ff": size("intermediate_size")}
    route = data.get("topk_method") or ("greedy" if kind == "deepseek_v2" else "noaux_tc")
    if route not in _ROUTES:
        raise WorkloadError(f"{where}: topk_method = {shown(route)}: known are {', '.join(_ROUTES)}")
    if route != "greedy" and size("n_group", 1) > 1:
        fields |= {"route_groups": size("n_group"), "top_groups": size("topk_group")}
    return fields


def _refuse_other_arithmetic(data: dict[str, Any], where: str) -> None:
    """Values that mean other kernels than the Llama-like layer has; absent ones mean the family's usual layer."""
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise WorkloadError(f"{where}: hidden_act = {shown(activation)}: gated layers are priced with 'silu' only")
    dense = data.get("mlp_only_layers")
    if dense not in (None, []):
        raise WorkloadError(f"{where}: mlp_only_layers = {shown(dense)}: all layers must be alike")
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        step = data.get(name, 1)
        if step not in (None, 1) or isinstance(step, bool):
            raise WorkloadError(f"{where}: {name} = {shown(step)}: all layers must be alike: only 1 is supported")


assert frozenset(families()) >= KNOWN
