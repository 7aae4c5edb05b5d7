"""Nodes of a layer from TOML tables."""

from __future__ import annotations

from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.fields import refuse_unknown
from workloads.ops import Attention, Gemm, Node, Op, Pointwise, op
from workloads.work import Elementwise


def nodes_of(entries: Any, where: str) -> tuple[Node, ...]:
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
            refuse_unknown(entry, ("node", "name", "ops"), where)
            ops = entry.get("ops")
            if not isinstance(ops, list) or not ops:
                raise WorkloadError(f"{where}: ops is missing: give a list of {{ label, pattern, parallel }}")
            return Gemm(name=name, ops=tuple(_op(item, where) for item in ops))
        case "attention":
            refuse_unknown(entry, ("node", "name", "scores", "values", "parallel"), where)
            scores, values = (
                _op({"label": part, "pattern": entry.get(part), "parallel": entry.get("parallel")}, where)
                for part in ("scores", "values")
            )
            return Attention(name=name, scores=scores, values=values)
        case "pointwise":
            refuse_unknown(entry, ("node", "name", "op"), where)
            if entry.get("op") not in [e.value for e in Elementwise]:
                raise WorkloadError(
                    f"{where}: op = {shown(entry.get('op'))}: known are {', '.join(e.value for e in Elementwise)}"
                )
            return Pointwise(name=name, op=Elementwise(entry["op"]))
    raise WorkloadError(f"{where}: node = {shown(kind)}: known are gemm, attention, pointwise")


def _op(item: Any, where: str) -> Op:
    if not isinstance(item, dict) or not isinstance(item.get("pattern"), str):
        raise WorkloadError(f"{where}: an op is {{ label, pattern, parallel }}, found {shown(item)}")
    refuse_unknown(item, ("label", "pattern", "parallel"), where)
    parallel = item.get("parallel")
    if parallel is not None and (not isinstance(parallel, str) or len(parallel) != 1):
        raise WorkloadError(f"{where}: parallel = {shown(parallel)}: give one axis of the pattern, for example 'H'")
    try:
        return op(item["pattern"], label=str(item.get("label", item["pattern"])), parallel=parallel)
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None
