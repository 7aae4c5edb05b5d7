"""Files of families: what their tables may hold, which keys of a configuration they read, and those that come along.

The format is described, with a complete example, in docs/families.md. Files lie in ``workloads/data/families``, or as
``family.toml`` beside the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any, get_args, get_type_hints

from inputs.texts import parse_toml, shown, toml_list
from workloads.config_keys import Family, common_keys
from workloads.errors import WorkloadError
from workloads.expressions import names
from workloads.family_shape import check_shapes, check_whole
from workloads.fields import refuse_unknown
from workloads.mixers import Latent, StateSpaceSizes
from workloads.model import OF_LAYERS
from workloads.node_tables import INDEXER

SIZES = ("d_model", "layers", "q_heads", "kv_heads", "head_dim", "d_ff", "vocab")
MORE = ("experts", "top_k", "shared_d_ff", "dense_d_ff", "route_groups", "top_groups", "v_head_dim", "expert_width")
CACHE = "cache"  # the number of the layer whose keys and values an attention reads; its own: it makes them
SIZED = ("window", *INDEXER, "chunks", "comm_ctas", "overlap_stage")  # sizes of nodes: numbers, or expressions
WORKED_OUT = (
    "shared",
    "gated",
    "q_latent",
    "one_matrix",
    "eager",
    "keys_are_values",
    "tied",
)  # what else of a node may be an expression
_EXPRESSIONS = ("when", CACHE, *WORKED_OUT, *SIZED)
_OF_STACK = ("tied_embeddings", "extra_parameters", "causal", "positions", "kind", "front", "draft_parameters")
OF_VISION = ("patches", "tokens", "projector", "grid", "extra_parameters")
_NESTED = ("sizes", "axes", "latent", "state_space", "layer_sizes")
_OUTER = frozenset({"i", "last_layer", "language_width", "model_width"})  # names that are no keys of a configuration


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
    own = parse_toml(text, where, WorkloadError)
    check_shapes(own, where)
    table = _with_base(own, where)
    check_whole(table, where)
    for stack, name in ((table, where), (table.get("encoder", {}), f"{where}: encoder")):
        refuse_unknown(stack.get("sizes", {}), (*SIZES, *MORE), f"{name}: sizes")
        refuse_unknown(stack.get("layer_sizes", {}), (*OF_LAYERS, *stack.get("axes", ())), f"{name}: layer_sizes")
        for part, sizes in (("state_space", StateSpaceSizes), ("latent", Latent)):
            if part in stack:
                _check_sizes_of(stack[part], sizes, f"{name}: {part}")
    read = set().union(*(names(one) for one in expressions_of(table, where)))
    read = {*table.get("defaults", ()), *table.get("per_layer", ())} | (set() if "language" in table else read)
    nested = {part["key"] for part in (table.get("language"), table.get("vision")) if part and "key" in part}
    known = (read | nested | set(table.get("ignored", ()))) - _OUTER - set(table.get("terms", ())) | common_keys()
    return FamilyFile(
        where=where,
        table=table,
        keys=Family(
            # Checkpoints that a converter wrote name Llama's class whatever they are.
            architectures=frozenset(
                [*table["architectures"], "LlamaForCausalLM"] if table.get("architectures") else ()
            ),
            known=frozenset(known - set(table.get("only", {}))),
            only={key: tuple(values) for key, values in table.get("only", {}).items()},
            required=tuple(table.get("required", ())),
        ),
    )


def _check_sizes_of(table: dict[str, Any], sizes: type[StateSpaceSizes | Latent], where: str) -> None:
    """Refuse a table that does not give ``sizes``."""
    refuse_unknown(table, tuple(one.name for one in fields(sizes)), where)
    for one in fields(sizes):
        if one.name not in table and one.default is MISSING:
            raise WorkloadError(f"{where}.{one.name} is missing: give a number or an expression")
    rules = get_args(get_type_hints(StateSpaceSizes)["rule"])
    if table.get("rule", rules[0]) not in rules:
        raise WorkloadError(f"{where}.rule = {shown(table['rule'])}: known are {', '.join(rules)}")


def _with_base(table: dict[str, Any], where: str) -> dict[str, Any]:
    """A family over the one that it is ``like``: its own fields instead, tables entry by entry, layers whole."""
    like = table.get("like")
    if like is None:
        return table
    known = _texts()
    if like not in known:
        raise WorkloadError(f"{where}: like = {shown(like)}: known are {', '.join(known)}")
    base = _with_base(parse_toml(known[like], like, WorkloadError), like)
    whole = {key: value for key, value in base.items() if key not in ("model_types", "like")} | table
    both = [key for key in base if isinstance(base[key], dict) and isinstance(table.get(key), dict) and key != "layer"]
    checks = [*base.get("check", ()), *table.get("check", ())]
    return whole | {key: base[key] | table[key] for key in both} | ({"check": checks} if checks else {})


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
    for name in ("defaults", "terms"):
        add(table.get(name, {}))
    for one in table.get("check", ()):
        add(one["that"])
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
def _texts() -> Mapping[str, str]:
    """Files of families that come with the package, by name."""
    folder = files("workloads") / "data" / "families"
    found = sorted((one for one in folder.iterdir() if one.name.endswith(".toml")), key=lambda one: one.name)
    return {one.name.removesuffix(".toml"): one.read_text(encoding="utf-8") for one in found}


class _Families(Mapping[str, FamilyFile]):
    """Families by ``model_type``; a file is read once a family of it is asked for (all of them take half a second)."""

    def __init__(self) -> None:
        self._files = {kind: name for name, text in _texts().items() for kind in toml_list(text, "model_types")}

    def __getitem__(self, kind: str) -> FamilyFile:
        return _of_file(self._files[kind])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@lru_cache(maxsize=1)
def family_files() -> Mapping[str, FamilyFile]:
    """Every family that comes with the package, by ``model_type``."""
    return _Families()


@lru_cache(maxsize=128)
def _of_file(name: str) -> FamilyFile:
    return parse_family(_texts()[name], where=f"{name}.toml")
