"""How far a model reaches: positions it was made for, tables of them, and windows of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.fields import flag, positive
from workloads.model import ModelSpec

# Ways of stretching rotary positions whose factor max_position_embeddings does not hold already.
_STRETCHES = ("linear", "dynamic", "yarn")
# Others, which turn the same heads by other angles: as many operations (transformers 4.57 and 5, vLLM 0.11).
_ROTATIONS = (*_STRETCHES, "default", "longrope", "su", "llama3", "mrope", "ntk", "deepseek_yarn", "proportional")
_ATTENTIONS = ("full_attention", "sliding_attention")
# transformers 4.57: MistralConfig slides over 4,096 tokens unless the file says null.
_MISTRAL_WINDOW = 4096


def check_reach(model: ModelSpec, tokens: int) -> None:
    """Refuse ``tokens`` a sequence where there is no such position, or where attention would be cut to a window.

    Rotary positions go on for ever: a run beyond ``max_positions`` is marked, see :func:`beyond`.
    """
    if model.learned_positions and tokens > model.max_positions:
        raise WorkloadError(
            f"seq_len: {tokens} tokens are more than the {model.max_positions} learned positions of {model.id}: give "
            f"at most {model.max_positions}"
        )
    if model.window and not model.window_everywhere and tokens > model.window:
        raise WorkloadError(
            f"seq_len: {model.id} attends over a window of {model.window} tokens (sliding_window), which is not "
            f"modelled for {tokens} tokens: give at most {model.window}, or set sliding_window to null for full "
            "attention"
        )


def beyond(model: ModelSpec, tokens: int) -> bool:
    """Whether ``tokens`` a sequence are more than the model was made for, as far as its file says."""
    return 0 < model.max_positions < tokens


def max_positions(data: Mapping[str, Any], where: str, *, partial: bool = False) -> int:
    """``max_position_embeddings``, stretched where ``rope_scaling`` says so; 0: the file does not say. With ``partial``
    heads may be turned in part.

    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> max_positions({"max_position_embeddings": 32768, "rope_scaling": yarn}, "config.json")
    131072
    """
    most = data.get("max_position_embeddings")
    length = 0 if most is None else positive(most, "max_position_embeddings", where)
    for key in ("rope_scaling", "rope_parameters"):
        table = data.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise WorkloadError(f"{where}: {key} = {shown(table)}: give a table, or null")
        turned = table.get("partial_rotary_factor", 1)
        if turned != 1 and not partial:
            raise WorkloadError(f"{where}: {key}.partial_rotary_factor = {shown(turned)}: whole heads are priced only")
        length = max(length, _stretched(table, length, f"{where}: {key}"))
    return length


def _stretched(table: Mapping[str, Any], length: int, where: str) -> int:
    """Positions under one way of turning heads, 0 where it adds none; an unknown way is refused."""
    kind = table.get("rope_type", table.get("type"))
    if kind is not None and kind not in _ROTATIONS:
        raise WorkloadError(f"{where}: rope_type = {shown(kind)}: known are {', '.join(_ROTATIONS)}")
    factor = table.get("factor")
    if kind not in _STRETCHES or factor is None or not length:
        return 0
    if type(factor) not in (int, float) or not 1 <= factor <= 1e4:
        raise WorkloadError(f"{where}: factor = {shown(factor)}: give a number from 1 to 10000")
    base = table.get("original_max_position_embeddings")
    made_for = length if base is None else positive(base, f"original_max_position_embeddings of {where}", where)
    return int(factor * made_for)


def window_of(data: Mapping[str, Any], kind: str, layers: int, where: str) -> int:
    """Tokens of the attention window if any layer has one; 0: none slides.

    Qwen slides from ``max_window_layers`` on where ``use_sliding_window`` says so, the others over a window that is
    given; ``layer_types`` names the layers that do.
    """
    types = data.get("layer_types")
    if types is not None and (
        not isinstance(types, list) or len(types) != layers or any(kind not in _ATTENTIONS for kind in types)
    ):
        raise WorkloadError(
            f"{where}: layer_types = {shown(types)}: give one of {', '.join(_ATTENTIONS)} for each of the "
            f"num_hidden_layers = {layers}"
        )
    slides = types is not None and "sliding_attention" in types
    window = data.get("sliding_window", _MISTRAL_WINDOW if kind == "mistral" else None)
    if "qwen" in kind:
        first = data.get("max_window_layers")
        some = first in (None, 0) or positive(first, "max_window_layers", where) < layers
        slides |= flag(data, "use_sliding_window", where) and window is not None and some
    else:
        slides |= window is not None
    return positive(window, "sliding_window", where) if slides else 0


def slides_everywhere(data: Mapping[str, Any], kind: str) -> bool:
    """Whether every layer attends over the window, where there is one.

    >>> slides_everywhere({"sliding_window": 4096}, "mistral")
    True
    """
    types = data.get("layer_types")
    if data.get("sliding_window", _MISTRAL_WINDOW if kind == "mistral" else None) is None:
        return False
    if types is not None:
        return all(kind == "sliding_attention" for kind in types)
    return "qwen" not in kind or data.get("max_window_layers") in (None, 0)
