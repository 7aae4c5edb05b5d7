"""Files of families: what their tables may hold, which keys of a configuration they read, and those that come along.

The format is described, with a complete example, in docs/families.md. Files lie in ``workloads/data/families``, or as
``family.toml`` beside the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from inputs.texts import parse_toml, shown
from workloads.config_keys import Family, common_keys
from workloads.errors import WorkloadError
from workloads.expressions import names
from workloads.fields import refuse_unknown
from workloads.node_tables import INDEXER

SIZES = ("d_model", "layers", "q_heads", "kv_heads", "head_dim", "d_ff", "vocab")
MORE = ("experts", "top_k", "shared_d_ff", "dense_d_ff", "route_groups", "top_groups")
_TABLES = ("defaults", "sizes", "axes", "latent", "state_space", "layer", "only", "language", "vision", "encoder")
_FIELDS = (
    "model_types", "architectures", "source", "checked", "refused", "ignored", "required", "tied_embeddings",
    "extra_parameters", "extra_active", "causal", "learned_positions", "positions", "kind",
    "per_layer",
)  # fmt: skip
SIZED = ("window", *INDEXER, "chunks", "comm_ctas", "overlap_stage")  # sizes of nodes: numbers, or expressions
_EXPRESSIONS = ("when", "shared", *SIZED)
_OF_STACK = ("tied_embeddings", "extra_parameters", "extra_active", "causal", "positions", "kind", "front")
OF_VISION = ("patches", "tokens", "projector", "extra_parameters")
_NESTED = ("sizes", "axes", "latent", "state_space")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFile:
    """One family: its tables as they were read, checked for what they may hold, and the keys that they read."""

    where: str
    table: Mapping[str, Any]
    keys: Family

    @property
    def model_types(self) -> tuple[str, ...]:
        """The ``model_type`` values that it is for."""
        return tuple(self.table["model_types"])


def parse_family(text: str, *, where: str) -> FamilyFile:
    """A family from TOML text; a table that is not known, or an expression that is none, is refused by name."""
    table = parse_toml(text, where, WorkloadError)
    refuse_unknown(table, (*_FIELDS, *_TABLES), where)
    types = table.get("model_types")
    if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
        raise WorkloadError(f"{where}: model_types = {shown(types)}: give a list of the model_type values it is for")
    if "language" not in table:
        if not isinstance(table.get("sizes"), dict):
            raise WorkloadError(f"{where}: sizes is missing: give a [sizes] table")
        refuse_unknown(table["sizes"], (*SIZES, *MORE), f"{where}: sizes")
        if not isinstance(table.get("layer"), dict) or not table["layer"]:
            raise WorkloadError(f"{where}: layer is missing: give [[layer.NAME]] tables, the nodes of a layer")
    read = set().union(*(names(one) for one in expressions_of(table, where)))
    read = set(table.get("defaults", ())) | (set() if "language" in table else read)
    nested = {part["key"] for part in (table.get("language"), table.get("vision")) if part and "key" in part}
    known = read | nested | set(table.get("ignored", ())) | common_keys()
    return FamilyFile(
        where=where,
        table=table,
        keys=Family(
            architectures=frozenset(table["architectures"]) | {"LlamaForCausalLM"}
            if table.get("architectures")
            else frozenset(),
            known=frozenset(known - set(table.get("only", {}))),
            only={key: tuple(values) for key, values in table.get("only", {}).items()},
            required=tuple(table.get("required", ())),
        ),
    )


def expressions_of(table: Mapping[str, Any], where: str) -> list[str]:
    """All expressions of a family, in any of its tables."""
    found: list[str] = []

    def add(value: Any) -> None:
        match value:
            case str():
                found.append(value)
            case dict():
                for one in value.values():
                    add(one)
            case list():
                for one in value:
                    add(one)

    def stack(part: Mapping[str, Any]) -> None:
        """Sizes and layers of one stack of layers."""
        for name in (*_NESTED, *_OF_STACK):
            add(part.get(name, ""))
        for nodes in part.get("layer", {}).values():
            for node in nodes if isinstance(nodes, list) else ():
                for name in _EXPRESSIONS:
                    add(node.get(name, "") if isinstance(node, dict) else "")

    stack(table)
    add(table.get("defaults", {}))
    stack(table.get("encoder", {}))
    if "vision" in table:
        for name in OF_VISION:
            add(table["vision"].get(name, ""))
    found = [one for one in found if one]
    for one in found:
        try:
            names(one)
        except WorkloadError as error:
            raise WorkloadError(f"{where}: {error}") from None
    return found


@lru_cache(maxsize=1)
def family_files() -> Mapping[str, FamilyFile]:
    """Every family that comes with the package, by ``model_type``."""
    folder = files("workloads") / "data" / "families"
    found: dict[str, FamilyFile] = {}
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.name.endswith(".toml"):
            family = parse_family(entry.read_text(encoding="utf-8"), where=entry.name)
            found |= dict.fromkeys(family.model_types, family)
    return found
