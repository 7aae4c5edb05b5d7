"""Families as data: the model of a configuration, from the tables that say what follows from its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inputs.texts import shown
from workloads.config_keys import Family, check_against, common_keys
from workloads.errors import WorkloadError
from workloads.expressions import evaluate, names
from workloads.family_file import MORE, OF_VISION, SIZED, SIZES, FamilyFile, expressions_of, family_files
from workloads.fields import name_of, positive
from workloads.layer_passes.lower import lower
from workloads.layer_passes.shard import shard
from workloads.mixers import Latent, StateSpaceSizes
from workloads.model import ModelSpec, Vision, check_axes
from workloads.node_tables import nodes_of
from workloads.ops import Block
from workloads.positions import max_positions

Reader = Callable[..., ModelSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """What names in expressions mean: keys of the configuration, then defaults, then names given from outside."""

    data: Mapping[str, Any]
    defaults: Mapping[str, Any]
    given: Mapping[str, Any]
    where: str

    def __call__(self, name: str) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if name in self.given:
            return self.given[name]
        if name in self.defaults:
            default = self.defaults[name]
            return evaluate(default, self) if isinstance(default, str) else default
        raise WorkloadError(f"{self.where}: {name} is missing: give it")

    def of(self, value: Any) -> Any:
        """A field of a family: an expression, or a value as it stands."""
        if not isinstance(value, str):
            return value
        try:
            return evaluate(value, self)
        except WorkloadError as error:
            text = str(error)
            if text.startswith(self.where):
                raise
            read = [f"{key} = {shown(self.data[key])}" for key in sorted(names(value)) if key in self.data]
            why = text.rsplit(": ", 1)[-1]
            raise WorkloadError(f"{self.where}: {', '.join(read[:3]) or value[:60]}: {why[:80]}") from None

    def size(self, name: str, value: Any, *, least: int = 1) -> int:
        """A whole number; a bare key is named as the file spells it."""
        found = self.of(value)
        said = value if isinstance(value, str) and value.isidentifier() else name
        if found == 0 and not isinstance(found, bool) and least == 0:
            return 0
        return positive(found, said, self.where)

    def within(self, **given: Any) -> _Values:
        """The same with more names."""
        return replace(self, given={**self.given, **given})


def family_model(data: Mapping[str, Any], family: FamilyFile, *, where: str, read: Reader) -> ModelSpec:
    """The model of a configuration; ``read`` reads a configuration of another family inside it."""
    table = family.table
    if data.get("model_type") not in family.model_types:
        raise WorkloadError(
            f"{where}: model_type = {shown(data.get('model_type'))}: {family.where} is for "
            f"{', '.join(family.model_types)}"
        )
    values = _Values(data=data, defaults=table.get("defaults", {}), given={}, where=where)
    if "language" in table:
        model = _language(data, family, where, read)
    else:
        check_against(data, str(data["model_type"]), family.keys, where)
        model = _spec(table, values, where, name_of(data, where), str(data.get("_source") or where))
    if "encoder" in table:
        given = values.within(model_width=model.d_model)
        encoder = _spec(table["encoder"], given, where, f"encoder of {model.id}", model.source)
        front = tuple(
            (given.size("front", deep), given.size("front", wide), given.size("front", rows))
            for deep, wide, rows in table["encoder"].get("front", ())
        )
        model = replace(model, encoder=replace(encoder, causal=False, front=front))
    if "vision" in table:
        model = replace(model, vision=_vision(table["vision"], model, values, where, read))
    return replace(model, refused=table.get("refused", "") or model.refused)


def _spec(table: Mapping[str, Any], values: _Values, where: str, name: str, source: str) -> ModelSpec:
    """Sizes and layers of one stack of layers."""
    sizes: dict[str, Any] = {key: values.size(key, table["sizes"].get(key), least=0 if key in MORE else 1)
             for key in (*SIZES, *(key for key in MORE if key in table["sizes"]))}  # fmt: skip
    if sizes["q_heads"] % sizes["kv_heads"]:
        raise WorkloadError(
            f"{where}: {sizes['q_heads']} query heads are not a multiple of {sizes['kv_heads']} key/value heads"
        )
    if sizes.get("experts") and not 0 < sizes.get("top_k", 0) <= sizes["experts"]:
        raise WorkloadError(f"{where}: {sizes.get('top_k', 0)} of {sizes['experts']} experts a token: at most all")
    state: dict[str, Any] = {key: values.size(key, one, least=0) if key != "rule" else one
             for key, one in table.get("state_space", {}).items()}  # fmt: skip
    if state and state["heads"] % state["groups"]:
        raise WorkloadError(
            f"{where}: {table['state_space']['heads']} = {state['heads']} is not a multiple of "
            f"{table['state_space']['groups']} = {state['groups']}"
        )
    for key in table.get("per_layer", ()):
        one = values.data.get(key)
        if one is not None and (not isinstance(one, list | str) or len(one) != sizes["layers"]):
            raise WorkloadError(f"{where}: {key} = {shown(one)}: give one for each of the {sizes['layers']} layers")
    latent = {key: values.size(key, one, least=0) for key, one in table.get("latent", {}).items()}
    kinds = table.get("layer", {})
    if not kinds or sizes["layers"] > 10_000:
        raise WorkloadError(f"{where}: layers = {sizes['layers']}: at most 10000 are simulated")
    which = [_kind(values.within(i=i), table, kinds) for i in range(sizes["layers"])]
    blocks = {}
    for kind in dict.fromkeys(which):
        nodes = [_worked_out(node, values) for node in kinds[kind] if values.of(node.get("when", True))]
        block = Block(nodes=nodes_of(nodes, f"{where}: layer.{kind}"))
        shard(lower(block.nodes))  # refuses neighbours whose annotations do not fit
        blocks[kind] = block
    letters = {kind: chr(ord("A") + number) for number, kind in enumerate(blocks)}
    positions = values.size("positions", table["positions"], least=0) if "positions" in table else None
    made = ModelSpec(
        id=name,
        source=source,
        **sizes,
        latent=Latent(**latent) if latent else None,
        state_space=StateSpaceSizes(**state) if state else None,
        axes=tuple((axis, values.size(axis, one, least=0)) for axis, one in table.get("axes", {}).items()),
        extra_parameters=values.size("extra_parameters", table.get("extra_parameters", 0), least=0),
        tied_embeddings=_truth(values, table, "tied_embeddings", default=False),
        causal=_truth(values, table, "causal", default=True),
        learned_positions=bool(table.get("learned_positions", False)),
        max_positions=positions if positions is not None else max_positions(values.data, where, partial=True),
        pattern="".join(letters[kind] for kind in which) if len(blocks) > 1 else "",
        parts=tuple((letters[kind], f"{kind} layer", block) for kind, block in blocks.items()) if len(blocks) > 1
        else (),
        block=blocks[which[0]],
    )  # fmt: skip
    return check_axes(made)


def _truth(values: _Values, table: Mapping[str, Any], name: str, *, default: bool) -> bool:
    found = values.of(table.get(name, default))
    if not isinstance(found, bool):
        raise WorkloadError(f"{values.where}: {table[name]} = {shown(found)}: give true or false")
    return found


def _kind(values: _Values, table: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    if len(kinds) == 1 and "kind" not in table:
        return next(iter(kinds))
    found = values.of(table["kind"]) if "kind" in table else None
    if found not in kinds:
        raise WorkloadError(
            f"{values.where}: layer {values.given['i']} is {shown(found)} by '{table.get('kind')}': known are "
            f"{', '.join(kinds)}"
        )
    return str(found)


def _worked_out(node: Mapping[str, Any], values: _Values) -> dict[str, Any]:
    """A node without its condition, its window and switches worked out."""
    made = {key: value for key, value in node.items() if key != "when"}
    for part in SIZED:
        if part in made:
            made[part] = values.size(part, made[part] or 0, least=0)
    if "shared" in made:
        made["shared"] = bool(values.of(made["shared"]))
    return made


def _language(data: Mapping[str, Any], family: FamilyFile, where: str, read: Reader) -> ModelSpec:
    """The language model inside a configuration: in a table of its own, or among the other keys."""
    part = family.table["language"]
    types: Mapping[str, str] = part.get("types", {})
    text: Any = data.get(part["key"])
    tops: Mapping[str, Any] = data
    if text is not None and not isinstance(text, dict):
        raise WorkloadError(f"{where}: {part['key']} = {shown(text)}: give the language model's configuration")
    inside = where
    if text is None:
        text = {key: value for key, value in data.items() if key not in family.keys.known or key in common_keys()}
        text = {key: value for key, value in text.items() if key not in ("architectures", "auto_map", "model_type")}
        tops = {key: value for key, value in data.items() if key not in text}
    else:
        inside = f"{where}: {part['key']}"
        text = {key: value for key, value in text.items() if key != "architectures"}
    check_against(tops, str(data["model_type"]), family.keys, where)
    kind = text.get("model_type") or part["model_type"]
    model = read(part.get("defaults", {}) | text | {"model_type": types.get(kind, kind)}, where=inside)
    return replace(model, id=name_of(data, where), source=str(data.get("_source") or where))


def _vision(part: Mapping[str, Any], model: ModelSpec, values: _Values, where: str, read: Reader) -> Vision:
    """The image encoder, a family of its own, and the projector from its outputs to the language model."""
    seen = values.data.get(part["key"])
    if seen is not None and not isinstance(seen, dict):
        raise WorkloadError(f"{where}: {part['key']} = {shown(seen)}: give the image encoder's configuration")
    config = dict(part.get("defaults", {}) | (seen or {}))
    kind = config.get("model_type") or part.get("tower")
    types: Mapping[str, str] = part.get("types", {})
    kind = types.get(kind, kind) if isinstance(kind, str) else kind
    tower = _own_tower(part, kind, where) if "layer" in part else _known_tower(kind)
    if tower is None or "tower" not in tower.table.get("source", ""):
        raise WorkloadError(f"{where}: {part['key']}.model_type = {shown(kind)}: is no image encoder that is known")
    given = {"language_width": model.d_model}
    inside = f"{where}: {part['key']}"
    mine = _Values(data=config, defaults=tower.table.get("defaults", {}), given=given, where=inside)
    if "layer" in part:
        check_against(config, tower.model_types[0], tower.keys, inside)
        encoder = replace(_spec(part, mine, inside, f"images of {model.id}", model.source), causal=False)
    else:
        encoder = read(config | {"model_type": tower.model_types[0], "architectures": None}, where=inside)
    both = _Values(data=values.data, defaults=values.defaults, given={}, where=where)

    def of(name: str, value: Any) -> int:
        lookup = replace(mine, given=given | {key: both(key) for key in names(str(value)) if _in(both, key, mine)})
        return lookup.size(name, value, least=0)

    return Vision(
        model=encoder,
        patches=of("patches", part["patches"]),
        tokens=of("tokens", part["tokens"]),
        projector=tuple((of("projector", one), of("projector", other)) for one, other in part["projector"]),
        extra_parameters=of("extra_parameters", part.get("extra_parameters", 0)),
    )


def _known_tower(kind: Any) -> FamilyFile | None:
    """The family of an image encoder, by its own name or the public one of its ``model_type``."""
    if not isinstance(kind, str):
        return None
    return family_files().get(kind) or family_files().get(f"_{kind.removesuffix('_model')}")


def _own_tower(part: Mapping[str, Any], kind: Any, where: str) -> FamilyFile:
    """The image encoder whose layers stand in the family itself; the image encoder's table has keys of its own."""
    name = kind if isinstance(kind, str) else "images"
    table = {key: value for key, value in part.items() if key not in ("key", "tower", "types", *OF_VISION[:3])}
    whole = {"model_types": [name], "source": "image tower"} | table
    read = set().union(*(names(one) for one in expressions_of({**whole, "vision": part}, where)))
    known = read | set(part.get("defaults", ())) | set(part.get("ignored", ())) | common_keys()
    keys = Family(architectures=frozenset(), known=frozenset(known), only={}, required=())
    return FamilyFile(where=where, table=whole, keys=keys)


def _in(both: _Values, key: str, mine: _Values) -> bool:
    """Whether ``key`` is the whole configuration's, and not the encoder's."""
    own = key in mine.data or key in mine.defaults or key in mine.given
    return not own and (both.data.get(key) is not None or key in both.defaults)
