"""Families as data: the model of a configuration, from the tables that say what follows from its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inputs.texts import shown
from workloads.config_keys import Family, check_against, check_nested, common_keys
from workloads.errors import WorkloadError
from workloads.expressions import evaluate, names
from workloads.family_file import (
    CACHE,
    MORE,
    OF_VISION,
    SIZED,
    SIZES,
    WORKED_OUT,
    FamilyFile,
    expressions_of,
    family_files,
)
from workloads.fields import name_of, positive
from workloads.image_grid import ImageGrid
from workloads.layer_passes.lower import lower
from workloads.layer_passes.shard import shard
from workloads.mixers import Latent, StateSpaceSizes
from workloads.model import MOST_LAYERS, ModelSpec, Vision, check_sizes
from workloads.node_tables import nodes_of
from workloads.ops import Attention, Block
from workloads.params import layer_params
from workloads.positions import max_positions
from workloads.quantization import scheme_of

Reader = Callable[..., ModelSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """What names in expressions mean: the family's terms, names given from outside, keys of the configuration, then
    defaults."""

    data: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str
    terms: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, name: str) -> Any:
        if name in self.terms:
            return self.of(self.terms[name])
        if name in self.given:
            return self.given[name]
        value = self.data.get(name)
        if value is not None:
            if isinstance(value, int) and value < 0:
                raise WorkloadError(f"{self.where}: {name} = {shown(value)}: give a whole number that is not negative")
            return value
        if name in self.defaults:
            return self.of(self.defaults[name])
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
            why = text.rsplit(": ", 1)[-1]
            raise WorkloadError(f"{self.where}: {self.read_by(value) or value[:60]}: {why[:80]}") from None

    def read_by(self, value: str) -> str:
        """Keys that an expression reads, as the configuration has them."""
        return ", ".join([f"{key} = {shown(self.data[key])}" for key in sorted(names(value)) if key in self.data][:3])

    def size(self, name: str, value: Any, *, least: int = 1, most: int = 10**9) -> int:
        """A whole number; a bare key is named as the file spells it."""
        key = value if isinstance(value, str) and value.isidentifier() else None
        said, found = key or name, None
        if key is not None and key not in self.terms and key not in self.given:
            found = self.data.get(key)
        if found is None and (key is None or key in self.terms or key in self.given or key in self.defaults):
            found = self.of(value)
        if found == 0 and not isinstance(found, bool) and least == 0:
            return 0
        return positive(found, said, self.where, most=most)

    def within(self, **given: Any) -> _Values:
        """The same with more names."""
        return replace(self, given={**self.given, **given})


def family_model(data: Mapping[str, Any], family: FamilyFile, *, where: str, read: Reader | None = None) -> ModelSpec:
    """The model of a configuration; ``read`` reads a configuration of another family inside it."""
    table = family.table
    left_out = {key: one for key, one in table.get("absent", {}).items() if key not in data}
    data = {**data, **{key: evaluate(one, data.__getitem__) if isinstance(one, str) else one
                       for key, one in left_out.items()}}  # fmt: skip
    if data.get("model_type") not in family.model_types:
        raise WorkloadError(
            f"{where}: model_type = {shown(data.get('model_type'))}: {family.where} is for "
            f"{', '.join(family.model_types)}"
        )
    values = _Values(data=data, defaults=table.get("defaults", {}), terms=table.get("terms", {}), where=where)
    for path, known in table.get("nested", {}).items():
        check_nested(data, path.split("."), known, where)
    if "language" in table:
        model = _language(data, family, values, read)
        held = values.size("extra_parameters", table.get("extra_parameters", 0), least=0, most=10**13)
        model = replace(model, extra_parameters=model.extra_parameters + held)
    else:
        check_against(data, str(data["model_type"]), family.keys, where)
        for one in table.get("check", ()):
            if not values.of(one["that"]):
                raise WorkloadError(f"{where}: {values.read_by(one['that'])}: {one['why']}")
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
    for beside in (model.encoder, None if model.vision is None else model.vision.model):
        if beside is not None and beside.routed:
            raise WorkloadError(f"{where}: {beside.id}: experts in an encoder are not simulated")
    return replace(model, refused=table.get("refused", "") or model.refused)


def _spec(table: Mapping[str, Any], values: _Values, where: str, name: str, source: str) -> ModelSpec:
    """Sizes and layers of one stack of layers."""
    sizes: dict[str, Any] = {key: values.size(key, table["sizes"].get(key), least=0 if key in MORE else 1)
             for key in (*SIZES, *(key for key in MORE if key in table["sizes"]))}  # fmt: skip
    state: dict[str, Any] = {key: values.size(key, one, least=0) if key != "rule" else one
             for key, one in table.get("state_space", {}).items()}  # fmt: skip
    if state and (not state["groups"] or state["heads"] % state["groups"]):
        raise WorkloadError(
            f"{where}: {table['state_space']['heads']} = {state['heads']} is not a multiple of "
            f"{table['state_space']['groups']} = {state['groups']}"
        )
    for key, known in table.get("per_layer", {}).items():
        one = values.data.get(key)
        if one is None:
            continue
        if not isinstance(one, list | str) or len(one) != sizes["layers"] or (known and not {*one} <= {*known}):
            what = f"one of {', '.join(map(str, known))}" if known else "one"
            raise WorkloadError(f"{where}: {key} = {shown(one)}: give {what} for each of the {sizes['layers']} layers")
    latent = {key: values.size(key, one, least=0) for key, one in table.get("latent", {}).items()}
    blocks, pattern = _layers(table, values, sizes["layers"])
    positions = values.size("positions", table["positions"], least=0) if "positions" in table else None
    made = ModelSpec(
        id=name,
        source=source,
        **sizes,
        latent=Latent(**latent) if latent.get("kv_rank") else None,
        state_space=StateSpaceSizes(**state) if state else None,
        axes=tuple((axis, values.size(axis, one, least=0)) for axis, one in table.get("axes", {}).items()),
        extra_parameters=values.size("extra_parameters", table.get("extra_parameters", 0), least=0, most=10**13),
        tied_embeddings=_truth(values, table, "tied_embeddings", default=False),
        causal=_truth(values, table, "causal", default=True),
        learned_positions=bool(table.get("learned_positions", False)),
        max_positions=positions if positions is not None else max_positions(values.data, where),
        pattern=pattern,
        parts=tuple(blocks) if pattern else (),
        block=blocks[0][2],
    )  # fmt: skip
    modules = tuple((part, tuple(names)) for part, names in table.get("modules", {}).items())
    made = replace(made, modules=modules)
    if "draft_parameters" in table:
        last = values.within(last_layer=layer_params(made, made.layers - 1))
        drafts = last.size("draft_parameters", table["draft_parameters"], least=0, most=10**13)
        made = replace(made, draft_parameters=drafts, drafts_published=table.get("drafts_published", False))
    return check_sizes(made)


def _layers(table: Mapping[str, Any], values: _Values, count: int) -> tuple[list[tuple[str, str, Block]], str]:
    """Layers that differ, each with its letter and name, and the letters of all layers; none where all are alike.

    The nodes of a layer are those of its kind; where all have one list, ``kind`` is but a name.
    """
    where, kinds = values.where, table.get("layer", {})
    if not kinds or count > MOST_LAYERS:
        raise WorkloadError(f"{where}: layers = {count}: at most {MOST_LAYERS} are simulated")
    blocks: list[tuple[str, str, Block]] = []
    letters: dict[str, str] = {}
    pattern = ""
    for i in range(count):
        here = values.within(i=i)
        kind = here.of(table["kind"]) if "kind" in table else next(iter(kinds))
        if kind not in kinds and len(kinds) > 1:
            raise WorkloadError(
                f"{where}: layer {i} is {shown(kind)} by '{table.get('kind')}': known are {', '.join(kinds)}"
            )
        nodes = kinds[kind] if len(kinds) > 1 else next(iter(kinds.values()))
        made = [_worked_out(node, here) for node in nodes if here.of(node.get("when", True))]
        for node in made:
            if node.get(CACHE) == i:
                del node[CACHE]
            elif CACHE in node:
                _check_cache(node, f"{where}: layer {i}: {node.get('name')}", pattern, blocks)
                node[CACHE] = True
        own = tuple((name, here.size(name, one)) for name, one in table.get("layer_sizes", {}).items())
        key = f"{kind} {made} {own}"
        if key not in letters:
            letters[key] = chr(ord("A") + len(letters))
            block = Block(nodes=nodes_of(made, f"{where}: layer.{kind}" if len(kinds) > 1 else where), sizes=own)
            try:
                shard(lower(block.nodes))  # refuses neighbours whose annotations do not fit
            except WorkloadError as error:
                raise WorkloadError(f"{where}: {error}") from None
            blocks.append((letters[key], "layer" if kind == "layer" else f"{kind} layer", block))
        pattern += letters[key]
    return blocks, pattern if len(blocks) > 1 else ""


def _check_cache(node: Mapping[str, Any], where: str, pattern: str, blocks: list[tuple[str, str, Block]]) -> None:
    """Refuse a cache that no earlier layer keeps, or that ends elsewhere."""
    layer = node[CACHE]
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < len(pattern):
        raise WorkloadError(f"{where}: cache = {shown(layer)}: give the number of this layer or of an earlier one")
    found = next(block for letter, _, block in blocks if letter == pattern[layer])
    window = found.attention.window if isinstance(found.attention, Attention) else None
    if not found.caches or window != node.get("window", 0):
        raise WorkloadError(
            f"{where}: cache = {layer}: that layer keeps no keys and values of its own over window = "
            f"{node.get('window', 0)}"
        )


def _truth(values: _Values, table: Mapping[str, Any], name: str, *, default: bool) -> bool:
    found = values.of(table.get(name, default))
    if not isinstance(found, bool):
        raise WorkloadError(f"{values.where}: {table[name]} = {shown(found)}: give true or false")
    return found


def _worked_out(node: Mapping[str, Any], values: _Values) -> dict[str, Any]:
    """A node without its condition, its window and switches worked out."""
    made = {key: value for key, value in node.items() if key != "when"}
    for part in SIZED:
        if part in made:
            made[part] = values.size(part, made[part] or 0, least=0)
    return made | {part: values.of(made[part]) for part in (*WORKED_OUT, CACHE) if part in made}


def _language(data: Mapping[str, Any], family: FamilyFile, values: _Values, read: Reader | None) -> ModelSpec:
    """The language model inside a configuration: in a table of its own, or among the other keys; which one is a name,
    or an expression that gives one."""
    assert read is not None
    where = values.where
    part = family.table["language"]
    types: Mapping[str, str] = part.get("types", {})
    text: Any = data.get(part["key"])
    tops: Mapping[str, Any] = data
    if text is not None and not isinstance(text, dict):
        raise WorkloadError(f"{where}: {part['key']} = {shown(text)}: give the language model's configuration")
    inside = where
    if text is None:
        outer = {*family.keys.known, *family.keys.only} - common_keys()
        text = {key: value for key, value in data.items() if key not in outer}
        text = {key: value for key, value in text.items() if key not in ("architectures", "auto_map", "model_type")}
        tops = {key: value for key, value in data.items() if key not in text}
    else:
        inside = f"{where}: {part['key']}"
        text = {key: value for key, value in text.items() if key != "architectures"}
    check_against(tops, str(data["model_type"]), family.keys, where)
    named = part["model_type"]
    kind = text.get("model_type") or (values.of(named) if " " in named else named)
    if not isinstance(kind, str):
        raise WorkloadError(f"{inside}: model_type = {shown(kind)}: give a text")
    usual = part.get("defaults", {}).get(kind, {})
    model = read(usual | text | {"model_type": types.get(kind, kind)}, where=inside)
    return replace(model, id=name_of(data, where), source=str(data.get("_source") or where))


def _vision(part: Mapping[str, Any], model: ModelSpec, values: _Values, where: str, read: Reader | None) -> Vision:
    """The image encoder, a family of its own, and the projector from its outputs to the language model."""
    assert read is not None
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
    if scheme_of(config, where=inside) is not None:
        raise WorkloadError(f"{inside}: a quantised image encoder is not simulated: take that out")
    tables = {name: tower.table.get(name, {}) for name in ("defaults", "terms")}
    mine = _Values(data=config, given=given, where=inside, **tables)
    if "layer" in part:
        check_against(config, tower.model_types[0], tower.keys, inside)
        encoder = replace(_spec(part, mine, inside, f"images of {model.id}", model.source), causal=False)
    else:
        encoder = read(config | {"model_type": tower.model_types[0], "architectures": None}, where=inside)
    both = replace(values, given={})

    def of(name: str, value: Any) -> int:
        lookup = replace(mine, given=given | {key: both(key) for key in names(str(value)) if _in(both, key, mine)})
        return lookup.size(name, value, least=0)

    grid = {name: of(name, value) for name, value in part.get("grid", {}).items()}
    return Vision(
        model=encoder,
        patches=of("patches", part["patches"]),
        tokens=of("tokens", part["tokens"]),
        projector=tuple((of("projector", one), of("projector", other)) for one, other in part["projector"]),
        extra_parameters=of("extra_parameters", part.get("extra_parameters", 0)),
        grid=ImageGrid(**grid) if grid.get("patch") else None,
    )


def _known_tower(kind: Any) -> FamilyFile | None:
    """The family of an image encoder, by its own name or the public one of its ``model_type``."""
    if not isinstance(kind, str):
        return None
    return family_files().get(kind) or family_files().get(f"_{kind.removesuffix('_model')}")


def _own_tower(part: Mapping[str, Any], kind: Any, where: str) -> FamilyFile:
    """The image encoder whose layers stand in the family itself; the image encoder's table has keys of its own."""
    name = kind if isinstance(kind, str) else "images"
    table = {key: value for key, value in part.items() if key not in ("key", "tower", "types", *OF_VISION[:4])}
    whole = {"model_types": [name], "source": "image tower"} | table
    read = set().union(*(names(one) for one in expressions_of({**whole, "vision": part}, where)))
    known = read | set(part.get("defaults", ())) | set(part.get("ignored", ())) | common_keys()
    keys = Family(architectures=frozenset(), known=frozenset(known), only={}, required=())
    return FamilyFile(where=where, table=whole, keys=keys)


def _in(both: _Values, key: str, mine: _Values) -> bool:
    """Whether ``key`` is the whole configuration's, and not the encoder's."""
    own = key in mine.data or key in mine.defaults or key in mine.given
    return not own and (both.data.get(key) is not None or key in both.defaults)
