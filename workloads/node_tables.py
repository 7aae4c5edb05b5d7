"""Nodes of a layer from TOML tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from inputs.texts import shown
from workloads.einsum import AXES, OWN_AXES
from workloads.errors import WorkloadError
from workloads.fields import positive, refuse_unknown
from workloads.kernel_names import Elementwise
from workloads.ops import (
    Attention,
    EagerPass,
    Gemm,
    Indexer,
    Node,
    Op,
    Overlap,
    Pointwise,
    StateSpace,
    expert_feed,
    latent_attention,
    op,
)

INDEXER = ("heads", "head_dim", "top_keys")
_OVERLAP = ("overlap_stage", "comm_ctas", "chunks")
KINDS = ("gemm", "attention", "pointwise", "experts", "latent_attention", "indexer", "state_space")


def nodes_of(entries: Any, where: str) -> tuple[Node, ...]:
    """The nodes of a layer, in order."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise WorkloadError(f"{where}: block = {shown(entries)}: give [[block]] tables")
    return tuple(_node(entry, f"{where}: block {i + 1}") for i, entry in enumerate(entries))


def _node(entry: dict[str, Any], where: str) -> Node:
    kind = entry.get("node")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise WorkloadError(f"{where}: name = {shown(name)}: give a text")
    match kind:
        case "gemm":
            refuse_unknown(entry, ("node", "name", "ops", "source", "one_matrix", "tied", *_OVERLAP), where)
            ops = entry.get("ops")
            if not isinstance(ops, list) or not ops:
                raise WorkloadError(f"{where}: ops is missing: give a list of {{ label, pattern, parallel }}")
            source = _source(entry, "source", where)
            one, tied = _switch(entry, "one_matrix", where), _switch(entry, "tied", where)
            parts = tuple(_op(item, where) for item in ops)
            gemm = Gemm(name=name, ops=parts, source=source, one_matrix=one, tied=tied)
            return replace(gemm, overlap=_overlap(entry, f"{where}: {name}"))
        case "attention":
            refuse_unknown(
                entry,
                (
                    "node",
                    "name",
                    "scores",
                    "values",
                    "parallel",
                    "window",
                    "cross",
                    "eager",
                    "cache",
                    "keys_are_values",
                ),
                where,
            )
            own = {*str(entry.get("scores")), *str(entry.get("values"))} - {*"bsKHrhjz,->"}
            if own and {type(entry.get(part)) for part in ("scores", "values")} == {str}:
                raise WorkloadError(
                    f"{where}: axis {shown(min(own))}: attention is over heads H, or K with r, of size h (values: j), "
                    "tokens s and context z"
                )
            window = entry.get("window", 0)
            if isinstance(window, bool) or not isinstance(window, int) or window < 0:
                raise WorkloadError(f"{where}: window = {shown(window)}: give the tokens that are attended to, or 0")
            scores, values = (
                _op({"label": part, "pattern": entry.get(part), "parallel": entry.get("parallel")}, where)
                for part in ("scores", "values")
            )
            eager = entry.get("eager", ["scale", "mask", "softmax_fp32"])
            if not isinstance(eager, list) or not {*eager} <= {*get_args(EagerPass)}:
                raise WorkloadError(f"{where}: eager = {shown(eager)}: known are {', '.join(get_args(EagerPass))}")
            cross = _switch(entry, "cross", where)
            made = Attention(name=name, scores=scores, values=values, window=window, cross=cross, eager=tuple(eager))
            return replace(made, shared="cache" in entry, keys_are_values=_switch(entry, "keys_are_values", where))
        case "pointwise":
            refuse_unknown(entry, ("node", "name", "op", "axis", "beside"), where)
            if entry.get("op") not in [e.value for e in Elementwise]:
                raise WorkloadError(
                    f"{where}: op = {shown(entry.get('op'))}: known are {', '.join(e.value for e in Elementwise)}"
                )
            axis = entry.get("axis", "f")
            if not isinstance(axis, str) or not axis or not {*axis} <= {*AXES, *OWN_AXES}:
                raise WorkloadError(f"{where}: axis = {shown(axis)}: give one axis, for example 'f', or several: 'Hh'")
            return Pointwise(name=name, op=Elementwise(entry["op"]), axis=axis, beside=_source(entry, "beside", where))
        case "experts":
            refuse_unknown(entry, ("node", "name", "shared", "gated", "latent", "source"), where)
            shared, gated = _switch(entry, "shared", where), _switch(entry, "gated", where, default=True)
            feed = expert_feed(shared=shared, gated=gated, latent=_switch(entry, "latent", where))
            return replace(feed, source=_source(entry, "source", where))
        case "latent_attention":
            refuse_unknown(entry, ("node", "name", "q_latent", "top_keys", "source"), where)
            top_keys = entry.get("top_keys", 0) and positive(entry["top_keys"], "top_keys", where)
            latent = latent_attention(_switch(entry, "q_latent", where, default=True), top_keys)[0]
            return replace(latent, source=_source(entry, "source", where))
        case "indexer":
            refuse_unknown(entry, ("node", "name", *INDEXER), where)
            return Indexer(name=name, **{key: positive(entry.get(key), key, where) for key in INDEXER})
        case "state_space":
            refuse_unknown(entry, ("node", "name"), where)
            return StateSpace(name=name)
    raise WorkloadError(f"{where}: node = {shown(kind)}: known are {', '.join(KINDS)}")


def _overlap(entry: dict[str, Any], where: str) -> Overlap | None:
    """How a product and its collective are cut; one that is alone in its stage needs no ``overlap_stage``."""
    given = {key: entry[key] for key in _OVERLAP if key in entry}
    if not given:
        return None
    if "chunks" not in given:
        raise WorkloadError(f"{where}: {', '.join(given)} without chunks: give the pieces along tokens")
    sizes = {key: positive(value, key, where) for key, value in given.items()}
    return Overlap(chunks=sizes["chunks"], comm_ctas=sizes.get("comm_ctas"), stage=sizes.get("overlap_stage"))


def _source(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise WorkloadError(f"{where}: {key} = {shown(value)}: give the name of an earlier node")
    return value


def _switch(entry: dict[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    value = entry.get(name, default)
    if not isinstance(value, bool):
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give true or false")
    return value


def _op(item: Any, where: str) -> Op:
    if not isinstance(item, dict) or not isinstance(item.get("pattern"), str):
        raise WorkloadError(f"{where}: an op is {{ label, pattern, parallel }}, found {shown(item)}")
    refuse_unknown(item, ("label", "pattern", "parallel"), where)
    parallel = item.get("parallel")
    if parallel is not None and (not isinstance(parallel, str) or len(parallel) != 1):
        raise WorkloadError(f"{where}: parallel = {shown(parallel)}: give one axis of the pattern, for example 'H'")
    try:
        made = op(item["pattern"], label=str(item.get("label", item["pattern"])), parallel=parallel)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None
    operands = len(made.einsum.inputs)
    if operands != 2:
        raise WorkloadError(
            f"{where}: '{made.einsum.pattern}': a product has two operands, this one {operands}: write one node after "
            "another, each with a pattern of two"
        )
    return made
