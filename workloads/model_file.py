"""A model of one's own from a TOML file: sizes with their source, and an optional list of nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inputs.texts import parse_toml, shown
from workloads.einsum import OWN_AXES
from workloads.errors import WorkloadError
from workloads.family import family_model
from workloads.family_file import SIZES, family_files
from workloads.fields import flag, positive, refuse_unknown
from workloads.model import ModelSpec

OPTIONAL_SIZES = ("experts", "top_k", "shared_d_ff", "dense_layers", "dense_d_ff", "route_groups", "top_groups")
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
    family = family_files()["_decoder"]
    table = dict(family.table) | {"axes": _axes(data.get("axes", {}), where)}
    window = sizes.pop("window", 0)
    if data.get("block"):
        for name in ("dense_layers", "latent"):
            if name in data:
                raise WorkloadError(f"{where}: {name} is for the usual layers: leave [[block]] out")
        usual = {"window": window} if window else {}
        entries = data["block"]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise WorkloadError(f"{where}: block = {shown(entries)}: give [[block]] tables")
        table["layer"] = {"layer": [usual | one if one.get("node") == "attention" else one for one in entries]}
    latent = _latent(data["latent"], where) if "latent" in data else {}
    config = {"model_type": "_decoder", "_name_or_path": data["id"], "_source": data["source"], "window_size": window,
              "tied_embeddings": tied, "normed": qk_norm, **sizes, **latent}  # fmt: skip
    return family_model(config, replace(family, table=table), where=where)


def _axes(table: Any, where: str) -> dict[str, int]:
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: axes = {shown(table)}: give an [axes] table")
    for axis in table:
        if axis not in OWN_AXES:
            raise WorkloadError(
                f"{where}: axes: {shown(axis)}: an axis of your own is an upper-case letter but H and K"
            )
    return {axis: positive(size, f"axes.{axis}", where) for axis, size in table.items()}


def _latent(table: Any, where: str) -> dict[str, int]:
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: latent = {shown(table)}: give a [latent] table")
    refuse_unknown(table, (*LATENT_SIZES, "q_rank"), f"{where}: latent")
    given = [name for name in (*LATENT_SIZES, "q_rank") if name in table or name != "q_rank"]
    return {name: positive(table.get(name), f"latent.{name}", where) for name in given}
