"""The language of models: ops, fusion groups, overlap attributes, and blocks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from workloads.einsum import Einsum, parse
from workloads.kernel_names import Elementwise

# Kernels of unfused attention: on the queries, then on the scores.
EagerPass = Literal["scale_queries", "scale", "mask", "softmax", "softmax_fp32"]


# The ranks that split a node: a layer's tensor group, or all that share its experts.
Group = Literal["tensor", "experts"]
# The keys that attention reads: those that a rank has, or all of some heads, for which tokens were exchanged.
Keys = Literal["own", "heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Cut a product, and the collective that feeds or follows it, into ``chunks`` along tokens.

    ``comm_ctas`` are the blocks for communication, or ``sms`` its SMs; neither: the library's choice. Neighbours of one
    ``stage`` are cut together: a chunk passes through all of them before the collective sends it on.
    """

    chunks: int
    sms: int | None = None
    comm_ctas: int | None = None
    stage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One einsum with its label and the axis that tensor parallelism shards."""

    label: str
    einsum: Einsum
    parallel: str | None = None


def op(pattern: str, *, label: str, parallel: str | None = None) -> Op:
    """An op from its pattern.

    >>> op("bsm,mHh->bsHh", parallel="H", label="Q").einsum.output
    'bsHh'
    """
    einsum = parse(pattern)
    einsum.reduction(parallel)  # refuses an axis that is not there
    return Op(label=label, einsum=einsum, parallel=parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Ops on one input fused into one matrix product (their weights stand side by side)."""

    name: str
    ops: tuple[Op, ...]
    overlap: Overlap | None = None
    one_matrix: bool = False  # in the model itself, whatever the stack fuses
    source: str | None = None  # the earlier node, or the encoder, that it reads; None: the one before it
    tied: bool = False  # its weights are an earlier layer's
    group: Group = "tensor"
    fused: bool = True  # one kernel for all ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scores and values fused into one flash kernel: scores never touch HBM.

    ``eager`` is what lies between the two products where a stack does not fuse them, in order.
    """

    name: str
    scores: Op
    values: Op
    eager: tuple[EagerPass, ...] = ("scale", "mask", "softmax_fp32")
    window: int = 0  # the last so many tokens are attended to; 0: all
    cross: bool = False  # to an encoder's tokens
    keys: Keys = "own"
    shared: bool = False  # an earlier layer cached the keys and values that it reads: it makes none
    copies: bool = False  # a new token's key and value are copied into the cache by kernels of their own
    keys_are_values: bool = False  # one product makes both


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: queries and keys/values pass through low ranks, and only the latent is cached.

    ``down`` makes the latents (and the shared rotary key) on every rank, ``q_up`` the query heads from theirs.
    ``k_up`` and ``v_up`` rebuild keys and values in prefill; in decode they are absorbed into queries and outputs.
    After DeepSeek-V2 (arXiv 2405.04434, section 2.1).
    """

    name: str
    down: tuple[Op, ...]
    q_up: tuple[Op, ...]
    k_up: Op
    v_up: Op
    window: int = 0
    top_keys: int = 0  # of all that are cached, so many are read; 0: all
    source: str | None = None  # the earlier node that it reads
    copies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Scores every key of the context with small heads of its own, and keeps the ``top_keys`` best ones for attention.

    Its products are nodes before it. After DeepSeek-V3.2 (its report, section 2.1).
    """

    name: str
    heads: int
    head_dim: int
    top_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """The middle of a Mamba-2 mixer: convolution, scan over the tokens, gated norm; its state is all it keeps."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """A memory-bound kernel over the tokens; ``axis`` is its width where that is not the model's.

    ``axis`` may be several, as heads of a size are. ``beside`` is an earlier node whose output it reads too.
    ``parallel`` is the axis that its input is split along; the shard pass finds it from the nodes before. ``passes``
    is how often it moves each element, where a stack runs a part of it only. ``queries``: of heads only those, as the
    layer makes no keys; the shard pass finds that too.
    """

    name: str
    op: Elementwise
    axis: str = "f"
    beside: str | None = None
    parallel: str | None = None
    group: Group = "tensor"
    passes: int | None = None
    queries: bool = False


# Pointwise work whose width is an axis that the node names; others have the model's width, or that of a head.
WIDE = (Elementwise.SILU_MUL, Elementwise.GELU, Elementwise.GELU_TANH, Elementwise.RELU)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Router, dispatch, per-expert feed-forward and combine; ``shared`` is the expert of all tokens.

    ``up`` are gate and up, or up alone where experts have no gate.
    """

    router: Op
    up: tuple[Op, ...]
    down: Op
    shared: tuple[Gemm | Pointwise, ...] = ()
    name: str = "experts"
    source: str | None = None  # the earlier node that it reads


Node = Gemm | Attention | LatentAttention | Indexer | StateSpace | Pointwise | Experts
ENCODER = "encoder"  # as a node's source: what the encoder beside the model yields


def width_of(node: Pointwise, sizes: Mapping[str, int]) -> int:
    """Elements of a token in a pointwise node of its own width."""
    return math.prod(sizes[axis] for axis in node.axis)


def axes_of(node: Node) -> str:
    """Axes whose sizes a node needs."""
    match node:
        case Gemm():
            return "".join(op.einsum.axes for op in node.ops)
        case Attention():
            return node.scores.einsum.axes + node.values.einsum.axes
        case LatentAttention():
            return "".join(op.einsum.axes for op in (*node.down, *node.q_up, node.k_up, node.v_up))
        case StateSpace():
            return "igt"
        case Indexer():
            return ""
        case Experts():
            return "efk" + "".join(axes_of(part) for part in node.shared)
        case Pointwise():
            return node.axis if node.op in WIDE else ""
    assert_never(node)


def fuse(name: str, *ops: Op, overlap: Overlap | None = None) -> Gemm:
    """One kernel for several ops on the same input."""
    return Gemm(name=name, ops=ops, overlap=overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Nodes in order, repeated for every layer; ``sizes``: those of the layer that are not the model's, by name."""

    nodes: tuple[Node, ...] = field(default=())
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def attention(self) -> Attention | LatentAttention | None:
        """The node that attends to the layer's own tokens, if one does."""
        nodes = (node for node in self.nodes if isinstance(node, Attention | LatentAttention))
        return next((node for node in nodes if isinstance(node, LatentAttention) or not node.cross), None)

    @property
    def caches(self) -> bool:
        """Whether it keeps keys and values of the tokens."""
        return self.attention is not None and not self.shares

    @property
    def shares(self) -> bool:
        """Whether it attends to what an earlier layer keeps."""
        return isinstance(self.attention, Attention) and self.attention.shared

    @property
    def tied(self) -> bool:
        """Whether it has weights of an earlier layer."""
        return any(isinstance(node, Gemm) and node.tied for node in self.nodes)

    @property
    def without_windows(self) -> Block:
        """The same over all tokens."""
        nodes = (replace(one, window=0) if isinstance(one, Attention) else one for one in self.nodes)
        return replace(self, nodes=tuple(nodes))

    @property
    def keeps_state(self) -> bool:
        """Whether it has a state that takes the place of a cache."""
        return any(isinstance(node, StateSpace) for node in self.nodes)


def block(*nodes: Node) -> Block:
    """A layer from its nodes."""
    return Block(nodes=nodes)


def decoder_block(*feed: Node, qk_norm: bool = False, latent: bool = False, q_latent: bool = False) -> Block:
    """A decoder layer around ``feed``: grouped-query attention (``qk_norm``: heads normed before RoPE), or latent."""
    return block(
        Pointwise(name="add_rmsnorm_attn", op=Elementwise.ADD_RMSNORM),
        *(latent_attention(q_latent) if latent else _grouped_query_attention(qk_norm)),
        fuse("o_gemm", op("bsHh,mHh->bsm", parallel="H", label="O")),
        Pointwise(name="add_rmsnorm_ff", op=Elementwise.ADD_RMSNORM),
        *feed,
    )


def gated_feed(axis: str = "f", suffix: str = "") -> tuple[Gemm | Pointwise, ...]:
    """Gate and up side by side, their product, and down again; ``axis`` is the width between."""
    return (
        fuse(
            f"gate_up{suffix}_gemm",
            op(f"bsm,m{axis}->bs{axis}", parallel=axis, label="gate"),
            op(f"bsm,m{axis}->bs{axis}", parallel=axis, label="up"),
        ),
        Pointwise(name=f"silu_mul{suffix}", op=Elementwise.SILU_MUL, axis=axis),
        fuse(f"down{suffix}_gemm", op(f"bs{axis},m{axis}->bsm", parallel=axis, label="down")),
    )


def plain_feed(
    axis: str = "f", suffix: str = "", activation: Elementwise = Elementwise.RELU
) -> tuple[Gemm | Pointwise, ...]:
    """Up, an activation, and down again: a feed-forward without a gate."""
    return (
        fuse(f"up{suffix}_gemm", op(f"bsm,m{axis}->bs{axis}", parallel=axis, label="up")),
        Pointwise(name=f"activation{suffix}", op=activation, axis=axis),
        fuse(f"down{suffix}_gemm", op(f"bs{axis},m{axis}->bsm", parallel=axis, label="down")),
    )


def expert_feed(*, shared: bool = False, gated: bool = True, latent: bool = False) -> Experts:
    """Routed experts of width f, and beside them a shared one of width u; ``latent``: they read and yield width l."""
    beside = gated_feed("u", "_shared") if gated else plain_feed("u", "_shared")
    wide = "l" if latent else "m"
    gate = (op(f"bsk{wide},e{wide}f->bskf", label="gate"),) if gated else ()
    return Experts(
        router=op("bsm,em->bse", label="router"),
        up=(*gate, op(f"bsk{wide},e{wide}f->bskf", label="up")),
        down=op(f"bskf,e{wide}f->bsk{wide}", label="down"),
        shared=beside if shared else (),
    )


def qkv_gemm(*, one_matrix: bool = False) -> Gemm:
    """Queries, keys and values of one input."""
    ops = (
        op("bsm,mHh->bsHh", parallel="H", label="Q"),
        op("bsm,mKh->bsKh", parallel="K", label="K"),
        op("bsm,mKh->bsKh", parallel="K", label="V"),
    )
    return Gemm(name="qkv_gemm", ops=ops, one_matrix=one_matrix)


def attention(*eager: EagerPass) -> Attention:
    """Scores over the context and their values, for grouped heads."""
    return Attention(
        name="attention",
        scores=op("bKrsh,bKzh->bKrsz", parallel="K", label="scores"),
        values=op("bKrsz,bKzh->bKrsh", parallel="K", label="values"),
        eager=eager,
    )


def _grouped_query_attention(qk_norm: bool) -> tuple[Node, ...]:
    return (
        qkv_gemm(),
        *((Pointwise(name="qk_norm", op=Elementwise.RMSNORM),) if qk_norm else ()),
        Pointwise(name="rope", op=Elementwise.ROPE),
        attention("scale", "mask", "softmax_fp32"),
    )


def latent_attention(q_latent: bool, top_keys: int = 0) -> tuple[LatentAttention, ...]:
    source = "q" if q_latent else "m"
    q_down = (op("bsm,mq->bsq", label="Q down"),) if q_latent else ()
    return (
        LatentAttention(
            name="attention",
            down=(*q_down, op("bsm,mc->bsc", label="KV down"), op("bsm,mp->bsp", label="rotary key")),
            q_up=(
                op(f"bs{source},{source}Hn->bsHn", parallel="H", label="Q"),
                op(f"bs{source},{source}Hp->bsHp", parallel="H", label="rotary Q"),
            ),
            k_up=op("bsc,cHn->bsHn", parallel="H", label="K up"),
            v_up=op("bsc,cHh->bsHh", parallel="H", label="V up"),
            top_keys=top_keys,
        ),
    )
