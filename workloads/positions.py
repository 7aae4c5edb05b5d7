"""How far a model reaches: positions it was made for, and tables of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.fields import positive
from workloads.model import ModelSpec

# Ways of stretching rotary positions whose factor max_position_embeddings does not hold already.
_STRETCHES = ("linear", "dynamic", "yarn")
# Others, which turn the same heads by other angles: as many operations (transformers 4.57 and 5, vLLM 0.11).
_ROTATIONS = (*_STRETCHES, "default", "longrope", "su", "llama3", "mrope", "ntk", "deepseek_yarn", "proportional")


def check_reach(model: ModelSpec, tokens: int) -> None:
    """Refuse ``tokens`` a sequence where there is no such position.

    Rotary positions go on for ever: a run beyond ``max_positions`` is marked, see :func:`beyond`.
    """
    if model.learned_positions and tokens > model.max_positions:
        raise WorkloadError(
            f"seq_len: {tokens} tokens are more than the {model.max_positions} learned positions of {model.id}: give "
            f"at most {model.max_positions}"
        )


def beyond(model: ModelSpec, tokens: int) -> bool:
    """Whether ``tokens`` a sequence are more than the model was made for, as far as its file says."""
    return 0 < model.max_positions < tokens


def max_positions(data: Mapping[str, Any], where: str) -> int:
    """``max_position_embeddings``, stretched where ``rope_scaling`` says so; 0: the file does not say.

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
