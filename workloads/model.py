"""Models: sizes with sources, an optional op list, loaded strictly from TOML or a Hugging Face config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from inputs.files import read_text
from inputs.texts import parse_toml, shown
from workloads.errors import WorkloadError
from workloads.mixers import Latent, StateSpaceSizes
from workloads.ops import (
    Attention,
    Block,
    Gemm,
    Node,
    Op,
    Pointwise,
    decoder_block,
    expert_feed,
    gated_feed,
    op,
)
from workloads.precision import Precision
from workloads.quantization import quantised_beside
from workloads.work import Elementwise

SIZES = ("d_model", "layers", "q_heads", "kv_heads", "head_dim", "d_ff", "vocab")
OPTIONAL_SIZES = ("experts", "top_k", "shared_d_ff", "dense_layers", "dense_d_ff", "route_groups", "top_groups")
# A part of an id that says which size of a family it is ("-8b", "-8x7b", "-large"), unlike "-a3b", the active share.
SIZE = re.compile(r"-(\d+x)?\d+(\.\d+)?[bm](-|$)|-(tiny|small|base|medium|large|huge|xl)(-|$)")
LIMITS = ("max_positions", "window")
MOST_LAYERS, MOST_EXPERTS = 10_000, 4096  # tens of times those of any public model
LATENT_SIZES = ("kv_rank", "nope_dim", "rope_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as sizes and a block. ``d_ff`` is the width of one expert in a mixture of experts.

    The first ``dense_layers`` layers run ``dense_block`` (a feed-forward of ``dense_d_ff``), the others ``block``.
    ``shared_d_ff`` is the width of the shared experts together. With ``route_groups`` a token chooses its experts
    among those of its ``top_groups`` best groups. With ``latent``, ``head_dim`` is the size of a value. A hybrid has
    one letter a layer in ``pattern``, and what each letter means in ``parts``: letter, name, block.

    ``max_positions`` are those it was made for (0: not known), ``learned_positions`` says that there are no others.
    Attention is known in contexts within ``window`` only, where there is one. ``precision`` is that of the stored
    weights, ``quantised`` how those of a quantised checkpoint's products are stored instead.
    """

    id: str
    source: str
    d_model: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    shared_d_ff: int = 0
    dense_layers: int = 0
    dense_d_ff: int = 0
    route_groups: int = 0
    top_groups: int = 0
    qk_norm: bool = False
    latent: Latent | None = None
    tied_embeddings: bool = False
    causal: bool = True
    state_space: StateSpaceSizes | None = None
    vision: Vision | None = None
    family: str = "decoder"
    precision: str = "bf16"
    quantised: Precision | None = None
    max_positions: int = 0
    learned_positions: bool = False
    window: int = 0
    pattern: str = ""
    parts: tuple[tuple[str, str, Block], ...] = ()
    block: Block = field(default_factory=Block)
    dense_block: Block = field(default_factory=Block)

    def sizes(self) -> dict[str, int]:
        """Sizes by einsum axis (batch and lengths are not the model's)."""
        sizes = {
            "m": self.d_model,
            "H": self.q_heads,
            "K": self.kv_heads,
            "r": self.q_heads // self.kv_heads,
            "h": self.head_dim,
            "f": self.d_ff,
            "v": self.vocab,
        }
        if self.experts:
            sizes |= {"e": self.experts, "k": self.top_k, "u": self.shared_d_ff, "d": self.dense_d_ff}
        if self.latent:
            latent = self.latent
            sizes |= {"q": latent.q_rank, "c": latent.kv_rank, "n": latent.nope_dim, "p": latent.rope_dim}
        if self.state_space:
            space = self.state_space
            sizes |= {"i": space.heads * space.head_dim, "g": space.groups * space.state, "t": space.heads}
        return sizes

    def attending(self, layers: range) -> int:
        """How many of ``layers`` attend, and so cache keys and values."""
        return self.pattern[layers.start : layers.stop].count("*") if self.pattern else len(layers)

    @property
    def cached_elements_per_token(self) -> int:
        """Elements of the KV cache a token and layer.

        >>> load_model("deepseek-v3").cached_elements_per_token, load_model("llama3-8b").cached_elements_per_token
        (576, 2048)
        """
        return self.latent.cached_dim if self.latent else 2 * self.kv_heads * self.head_dim

    def layer_groups(self, layers: range) -> tuple[tuple[str, Block, range], ...]:
        """Layers ``layers`` as runs of equal ones: name, block, which."""
        if self.pattern:
            known = {letter: (name, part) for letter, name, part in self.parts}
            runs = [(letter, list(run)) for letter, run in groupby(layers, key=lambda layer: self.pattern[layer])]
            return tuple((*known[letter], range(run[0], run[-1] + 1)) for letter, run in runs)
        border = min(max(self.dense_layers, layers.start), layers.stop)
        groups = (
            ("dense layer", self.dense_block, range(layers.start, border)),
            ("layer", self.block, range(border, layers.stop)),
        )
        return tuple(group for group in groups if group[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """An image encoder: its layers over ``patches`` tokens an image, ``tokens`` of which the language model reads."""

    model: ModelSpec
    patches: int
    tokens: int


def with_block(model: ModelSpec) -> ModelSpec:
    """``model`` with the usual decoder layers where it names none of its own; checks sizes."""
    if model.layers > MOST_LAYERS:
        raise WorkloadError(f"{model.id}: layers = {model.layers}: at most {MOST_LAYERS} are simulated")
    if model.experts > MOST_EXPERTS:
        raise WorkloadError(f"{model.id}: experts = {model.experts}: at most {MOST_EXPERTS} are simulated")
    if model.q_heads % model.kv_heads:
        raise WorkloadError(f"{model.id}: q_heads = {model.q_heads} is not a multiple of kv_heads = {model.kv_heads}")
    if bool(model.experts) != bool(model.top_k) or model.top_k > model.experts:
        raise WorkloadError(
            f"{model.id}: experts = {model.experts} with top_k = {model.top_k}: give both, top_k at most experts"
        )
    for name in OPTIONAL_SIZES[2:]:
        if getattr(model, name) and not model.experts:
            raise WorkloadError(
                f"{model.id}: {name} = {getattr(model, name)}: is for a mixture of experts: give experts"
            )
    if bool(model.dense_layers) != bool(model.dense_d_ff) or model.dense_layers >= model.layers:
        raise WorkloadError(
            f"{model.id}: dense_layers = {model.dense_layers} with dense_d_ff = {model.dense_d_ff}: "
            f"give both, dense_layers below layers = {model.layers}"
        )
    _check_groups(model)
    if model.block.nodes:
        if model.dense_layers or model.latent:
            raise WorkloadError(f"{model.id}: dense_layers and [latent] are for the usual layers: leave [[block]] out")
        return model
    latent = model.latent
    attention = {
        "qk_norm": model.qk_norm, "latent": latent is not None, "q_latent": latent is not None and latent.q_rank > 0,
    }  # fmt: skip
    feed = (expert_feed(shared=model.shared_d_ff > 0),) if model.experts else gated_feed()
    dense = decoder_block(*gated_feed("d"), **attention) if model.dense_layers else Block()
    return replace(model, block=decoder_block(*feed, **attention), dense_block=dense)


def _check_groups(model: ModelSpec) -> None:
    groups, top = model.route_groups, model.top_groups
    if not groups and not top:
        return
    if not 0 < top <= groups or model.experts % max(groups, 1) or model.top_k > top * (model.experts // groups):
        raise WorkloadError(
            f"{model.id}: route_groups = {groups} with top_groups = {top}: groups must divide the {model.experts} "
            f"experts, and the best ones hold top_k = {model.top_k}"
        )


@lru_cache(maxsize=1)
def list_models() -> tuple[str, ...]:
    """Ids of all models in the catalog, sorted."""
    folder = files("workloads") / "data"
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith((".toml", ".json")))
    return tuple(sorted(name.rsplit(".", 1)[0] for name in names))


@lru_cache(maxsize=64)
def load_model(name: str) -> ModelSpec:
    """A model by any spelling that :func:`model_id` knows, .toml file of one's own, or Hugging Face ``config.json``.

    >>> load_model("llama3-70b").kv_heads
    8
    """
    if name.endswith((".toml", ".json")) or "/" in name:
        return _load_file(Path(name))
    wanted = model_id(name)
    folder = files("workloads") / "data"
    if (folder / f"{wanted}.json").is_file():
        return _parse(f"{wanted}.json", (folder / f"{wanted}.json").read_text(encoding="utf-8"))
    return _parse(f"{wanted}.toml", (folder / f"{wanted}.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=256)
def model_id(name: str) -> str:
    """The id of the catalog that ``name`` means: an id, or a beginning of one id that says which size it is.

    A beginning ends at a ``-``. What names a family alone (``qwen2``, ``bert``) is refused even where one size of it
    is known here, since it may mean another.

    >>> model_id("Qwen3-30b")
    'qwen3-30b-a3b'
    """
    known, wanted = list_models(), name.lower()
    if wanted in known:
        return wanted
    starts = [model for model in known if model.startswith(wanted)] if wanted else []
    whole = [model for model in starts if model.startswith(f"{wanted}-")]
    if len(whole) == 1 and not SIZE.search(whole[0].removeprefix(wanted)):
        return whole[0]
    if len(starts) > 1:
        raise WorkloadError(f"model = '{name}' fits several models: {', '.join(whole or starts)}: name one")
    if (files("workloads") / "data" / "dit" / f"{wanted}.toml").is_file():
        raise WorkloadError(f"model = '{name}' is a diffusion transformer: use phase = 'denoise'")
    near = starts or difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else "see 'wattline models'"
    raise WorkloadError(f"unknown model '{name}': {hint}")


def _load_file(path: Path) -> ModelSpec:
    if path.is_dir():
        path = path / "config.json"
    model = _parse(str(path), read_text(path, "model", WorkloadError))
    if path.suffix == ".json" and model.quantised is None:
        quantised = quantised_beside(path.parent, layers=model.layers, tied=model.tied_embeddings)
        return model if quantised is None else replace(model, quantised=quantised)
    return model


def _parse(where: str, text: str) -> ModelSpec:
    if where.endswith(".json"):
        from workloads.huggingface import parse_config

        return parse_config(text, where=where)
    return parse_model(text, where=where)


def parse_model(text: str, *, where: str) -> ModelSpec:
    """A model from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, WorkloadError)
    flags = ("tied_embeddings", "qk_norm")
    refuse_unknown(data, ("id", "source", *SIZES, *OPTIONAL_SIZES, *LIMITS, *flags, "latent", "block"), where)
    for name in ("id", "source"):
        if not isinstance(data.get(name), str) or not data[name]:
            raise WorkloadError(f"{where}: {name} = {shown(data.get(name))}: give a text")
    sizes: dict[str, Any] = {name: positive(data.get(name), name, where) for name in SIZES}
    sizes |= {name: positive(data[name], name, where) for name in (*OPTIONAL_SIZES, *LIMITS) if name in data}
    tied, qk_norm = (flag(data, name, where) for name in flags)
    return with_block(
        ModelSpec(
            id=data["id"],
            source=data["source"],
            tied_embeddings=tied,
            qk_norm=qk_norm,
            latent=_latent(data["latent"], where) if "latent" in data else None,
            block=Block(nodes=_nodes(data.get("block", []), where)),
            **sizes,
        )
    )


def flag(data: Mapping[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    """``data[name]`` as a truth value, or an error that names it."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give true or false")
    return value


def name_of(data: Mapping[str, Any], where: str) -> str:
    """What a configuration calls its model; its place where it does not."""
    name = data.get("_name_or_path")
    return name if isinstance(name, str) and name and len(name) < 100 and name.isprintable() else where


def _latent(table: Any, where: str) -> Latent:
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: latent = {shown(table)}: give a [latent] table")
    refuse_unknown(table, (*LATENT_SIZES, "q_rank"), f"{where}: latent")
    sizes = {name: positive(table.get(name), f"latent.{name}", where) for name in LATENT_SIZES}
    return Latent(q_rank=positive(table["q_rank"], "latent.q_rank", where) if "q_rank" in table else 0, **sizes)


def positive(value: Any, name: str, where: str) -> int:
    """``value`` as a positive whole number, or an error that names it."""
    if value is None:
        raise WorkloadError(f"{where}: {name} is missing: give a positive whole number")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value > 10**9:
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give a positive whole number")
    return value


def refuse_unknown(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Unknown keys are errors that suggest the nearest known one."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
            raise WorkloadError(f"{where}: unknown key {shown(key)}: {hint}")


def _nodes(entries: Any, where: str) -> tuple[Node, ...]:
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
