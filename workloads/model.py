"""Models: sizes with sources, an optional op list, loaded strictly from TOML or a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from inputs.same import Same
from workloads.errors import WorkloadError
from workloads.image_grid import ImageGrid
from workloads.kernel_names import Elementwise
from workloads.mixers import Latent, StateSpaceSizes
from workloads.ops import Attention, Block, Experts, Pointwise, axes_of
from workloads.precision import Precision

MOST_LAYERS, MOST_EXPERTS = 10_000, 4096  # tens of times those of any public model
OF_LAYERS = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "d_ff")  # sizes that layers may have of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as sizes and a block. ``d_ff`` is the width of one expert in a mixture of experts.

    ``shared_d_ff`` is the width of the shared experts together, ``dense_d_ff`` that of the feed-forwards of layers
    without experts, ``expert_width`` that of what routed experts read (0: the model's). With ``route_groups`` a token
    chooses its experts among those of its ``top_groups`` best groups. With ``latent``, ``head_dim`` is the size of a
    value; else ``v_head_dim`` is (0: that of a key). All layers run ``block``; where they differ, ``pattern`` has one
    letter a layer, and ``parts`` what each letter means: letter, name, block. A block has sizes of its own where they
    are not the model's: :meth:`of` has both.

    ``max_positions`` are those it was made for (0: not known), ``learned_positions`` says that there are no others.
    ``precision`` is that of the stored
    weights, ``quantised`` how those of a quantised checkpoint's products are stored instead. ``axes`` are sizes of axes
    of the model's own, ``extra_parameters`` weights that no node has, ``encoder`` what its cross attention reads,
    ``front`` an encoder's products before its layers (depth, width, rows a token), and ``refused`` why it is sized but
    not run. Encoders of ``learned_positions`` always read ``max_positions`` tokens. ``draft_parameters`` are those of
    layers that predict further tokens, which only a step that drafts with them runs; ``drafts_published``: published
    totals count them. ``modules`` are names of its modules in lists of quantised ones, where they are not the usual.
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
    dense_d_ff: int = 0
    route_groups: int = 0
    top_groups: int = 0
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
    pattern: str = ""
    parts: tuple[tuple[str, str, Block], ...] = ()
    block: Block = field(default_factory=Block)
    axes: tuple[tuple[str, int], ...] = ()
    extra_parameters: int = 0
    encoder: ModelSpec | None = None
    front: tuple[tuple[int, int, int], ...] = ()
    refused: str = ""
    v_head_dim: int = 0
    expert_width: int = 0
    draft_parameters: int = 0
    drafts_published: bool = False
    modules: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def sizes(self) -> dict[str, int]:
        """Sizes by einsum axis (batch and lengths are not the model's)."""
        sizes = {
            "m": self.d_model,
            "H": self.q_heads,
            "K": self.kv_heads,
            "r": self.q_heads // self.kv_heads,
            "h": self.head_dim,
            "j": self.v_head_dim or self.head_dim,
            "f": self.d_ff,
            "v": self.vocab,
        }
        if self.experts:
            sizes |= {
                "l": self.routed_width,
                "e": self.experts,
                "k": self.top_k,
                "u": self.shared_d_ff,
                "d": self.dense_d_ff,
            }
        if self.latent:
            latent = self.latent
            sizes |= {"q": latent.q_rank, "c": latent.kv_rank, "n": latent.nope_dim, "p": latent.rope_dim}
        if self.state_space:
            space = self.state_space
            sizes |= {"i": space.heads * space.head_dim, "g": space.groups * space.state, "t": space.heads}
        return sizes | dict(self.axes)

    def of(self, block: Block) -> ModelSpec:
        """The model with the sizes of a layer that are not the model's own."""
        return _with_sizes(Same(self), block.sizes) if block.sizes else self

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Layers that differ."""
        return tuple(block for _, _, block in self.parts) or (self.block,)

    @property
    def routed(self) -> tuple[Experts, ...]:
        """Experts of layers that differ."""
        return tuple(node for block in self.blocks for node in block.nodes if isinstance(node, Experts))

    @property
    def windows(self) -> frozenset[int]:
        """Windows of any layers."""
        found = {block.attention.window for block in self.blocks if block.attention is not None}
        return frozenset(found) - {0}

    @property
    def qk_norm(self) -> bool:
        """Whether heads are normed before they are turned."""
        return any(isinstance(one, Pointwise) and one.op is Elementwise.RMSNORM for one in self.block.nodes)

    def attending(self, layers: range) -> int:
        """How many of ``layers`` cache keys and values of their own."""
        return sum(len(run) for _, block, run in self.layer_groups(layers) if block.caches)

    def mixing(self, layers: range) -> int:
        """How many of ``layers`` keep a state."""
        return sum(len(run) for _, block, run in self.layer_groups(layers) if block.keeps_state)

    def caching(self, layers: range, context: int = 1) -> tuple[tuple[ModelSpec, int], ...]:
        """Runs of ``layers`` that keep keys and values: their sizes, and the tokens that they keep of a sequence of
        ``context``, all together."""
        runs = ((block, len(run), block.attention) for _, block, run in self.layer_groups(layers) if block.caches)
        return tuple((self.of(block), count * kept_of(context, one.window)) for block, count, one in runs if one)

    def crossing(self, layers: range) -> int:
        """How many of ``layers`` attend to the encoder's tokens, and so keep keys and values of these."""
        return sum(
            len(run) * sum(isinstance(node, Attention) and node.cross for node in block.nodes)
            for _, block, run in self.layer_groups(layers)
        )

    def encoder_tokens(self, asked: int | None, seq_len: int) -> int:
        """Tokens of a sequence that the encoder reads: all that it has places for, or as many as are ``asked`` for, or
        as many as the decoder's."""
        if self.encoder is None:
            return 0
        return self.encoder.max_positions if self.encoder.learned_positions else asked or seq_len

    @property
    def cached_elements_per_token(self) -> int:
        """Elements of the KV cache a token and layer.

        >>> from workloads import load_model
        >>> load_model("deepseek-v3").cached_elements_per_token, load_model("llama3-8b").cached_elements_per_token
        (576, 2048)
        """
        return self.latent.cached_dim if self.latent else self.kv_heads * self.key_and_value

    @property
    def routed_width(self) -> int:
        """Elements of a row that travels to an expert and back."""
        return self.expert_width or self.d_model

    @property
    def key_and_value(self) -> int:
        """Elements of one head's key and value."""
        return self.head_dim + (self.v_head_dim or self.head_dim)

    def layer_groups(self, layers: range) -> tuple[tuple[str, Block, range], ...]:
        """Layers ``layers`` as runs of equal ones: name, block, which."""
        if self.pattern:
            known = {letter: (name, part) for letter, name, part in self.parts}
            runs = [(letter, list(run)) for letter, run in groupby(layers, key=lambda layer: self.pattern[layer])]
            return tuple((*known[letter], range(run[0], run[-1] + 1)) for letter, run in runs)
        return (("layer", self.block, layers),) if layers else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """An image encoder: its layers over ``patches`` tokens an image, ``tokens`` of which the language model reads.

    ``projector``: widths in and out of the products between the two, GELU before the last one. ``grid`` says how many
    patches and tokens an image of another size has, where it has others.
    """

    model: ModelSpec
    patches: int
    tokens: int
    projector: tuple[tuple[int, int], ...]
    extra_parameters: int = 0
    grid: ImageGrid | None = None

    def of_image(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Patches and tokens of an image of ``size`` (width, height) pixels; None, or without a ``grid``: the usual
        ones."""
        return (self.patches, self.tokens) if self.grid is None or size is None else self.grid.sized(*size)


@lru_cache(maxsize=4096)
def _with_sizes(of: Same[ModelSpec], sizes: tuple[tuple[str, int], ...]) -> ModelSpec:
    """One object for each set of sizes, as what prices layers knows a model by which object it is."""
    own = dict(sizes)
    given: dict[str, Any] = {name: own.pop(name) for name in OF_LAYERS if name in own}
    return replace(of.held, axes=tuple((dict(of.held.axes) | own).items()), **given)


def kept_of(context: int, window: int) -> int:
    """Tokens of a context that attention over ``window`` (0: all) reads."""
    return min(context, window) if window else context


def check_axes(model: ModelSpec) -> ModelSpec:
    """``model``, or an error that names a node's axis that it has no size of."""
    for block in model.blocks:
        known = {axis for axis, size in model.of(block).sizes().items() if size} | {"b", "s", "z"}
        for node in block.nodes:
            for axis in axes_of(node):
                if axis not in known:
                    raise WorkloadError(
                        f"{model.id}: {node.name}: size of axis '{axis}' is missing: give it under [axes], or the size "
                        "that it stands for"
                    )
    return model


def check_sizes(model: ModelSpec) -> ModelSpec:
    """``model``, or an error that names the sizes that do not fit one another."""
    for name, most in (("layers", MOST_LAYERS), ("experts", MOST_EXPERTS)):
        if getattr(model, name) > most:
            raise WorkloadError(f"{model.id}: {name} = {getattr(model, name)}: at most {most} are simulated")
    for one in (model, *map(model.of, model.blocks)):
        if one.q_heads % one.kv_heads:
            raise WorkloadError(f"{model.id}: q_heads = {one.q_heads} is not a multiple of kv_heads = {one.kv_heads}")
    if bool(model.experts) != bool(model.top_k) or model.top_k > model.experts:
        raise WorkloadError(
            f"{model.id}: experts = {model.experts} with top_k = {model.top_k}: give both, top_k at most experts"
        )
    _check_groups(model)
    return check_axes(model)


def _check_groups(model: ModelSpec) -> None:
    groups, top = model.route_groups, model.top_groups
    if not groups and not top:
        return
    if not 0 < top <= groups or model.experts % max(groups, 1) or model.top_k > top * (model.experts // groups):
        raise WorkloadError(
            f"{model.id}: route_groups = {groups} with top_groups = {top}: groups must divide the {model.experts} "
            f"experts, and the best ones hold top_k = {model.top_k}"
        )
