"""A model of one's own from a TOML file: sizes with their source, and an optional list of nodes."""

from __future__ import annotations

from typing import Any

from inputs.texts import parse_toml, shown
from workloads.einsum import OWN_AXES
from workloads.errors import WorkloadError
from workloads.fields import flag, positive, refuse_unknown
from workloads.layer_passes.lower import lower
from workloads.layer_passes.shard import shard
from workloads.mixers import Latent
from workloads.model import OPTIONAL_SIZES, ModelSpec, with_block
from workloads.node_tables import nodes_of
from workloads.ops import Block

SIZES = ("d_model", "layers", "q_heads", "kv_heads", "head_dim", "d_ff", "vocab")
LIMITS = ("max_positions", "window")
LATENT_SIZES = ("kv_rank", "nope_dim", "rope_dim")


def parse_model(text: str, *, where: str) -> ModelSpec:
    """A model from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, WorkloadError)
    flags = ("tied_embeddings", "qk_norm")
    refuse_unknown(data, ("id", "source", *SIZES, *OPTIONAL_SIZES, *LIMITS, *flags, "latent", "axes", "block"), where)
    for name in ("id", "source"):
        if not isinstance(data.get(name), str) or not data[name]:
            raise WorkloadError(f"{where}: {name} = {shown(data.get(name))}: give a text")
    sizes: dict[str, Any] = {name: positive(data.get(name), name, where) for name in SIZES}
    sizes |= {name: positive(data[name], name, where) for name in (*OPTIONAL_SIZES, *LIMITS) if name in data}
    tied, qk_norm = (flag(data, name, where) for name in flags)
    nodes = nodes_of(data.get("block", []), where)
    try:
        shard(lower(nodes))  # refuses neighbours whose annotations do not fit
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None
    return with_block(
        ModelSpec(
            id=data["id"],
            source=data["source"],
            tied_embeddings=tied,
            qk_norm=qk_norm,
            latent=_latent(data["latent"], where) if "latent" in data else None,
            block=Block(nodes=nodes),
            axes=_axes(data.get("axes", {}), where),
            window_everywhere="window" in data,
            **sizes,
        )
    )


def _axes(table: Any, where: str) -> tuple[tuple[str, int], ...]:
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: axes = {shown(table)}: give an [axes] table")
    for axis in table:
        if axis not in OWN_AXES:
            raise WorkloadError(
                f"{where}: axes: {shown(axis)}: an axis of your own is an upper-case letter but H and K"
            )
    return tuple((axis, positive(size, f"axes.{axis}", where)) for axis, size in table.items())


def _latent(table: Any, where: str) -> Latent:
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: latent = {shown(table)}: give a [latent] table")
    refuse_unknown(table, (*LATENT_SIZES, "q_rank"), f"{where}: latent")
    sizes = {name: positive(table.get(name), f"latent.{name}", where) for name in LATENT_SIZES}
    return Latent(q_rank=positive(table["q_rank"], "latent.q_rank", where) if "q_rank" in table else 0, **sizes)
