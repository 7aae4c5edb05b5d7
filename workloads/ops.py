"""The language of models: ops, fusion groups, overlap attributes, and blocks of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from workloads.einsum import Einsum, parse
from workloads.work import Elementwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Cut a producer/consumer pair into ``chunks`` along tokens and give communication ``sms`` SMs."""

    chunks: int
    sms: int | None = None


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

    @property
    def reduces(self) -> bool:
        """True when its shards are partial sums."""
        return self.ops[0].einsum.reduction(self.ops[0].parallel) == "all_reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scores and values fused into one flash kernel: scores never touch HBM."""

    name: str
    scores: Op
    values: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """A memory-bound kernel over the tokens."""

    name: str
    op: Elementwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Router, dispatch, per-expert gated feed-forward and combine."""

    router: Op
    up: tuple[Op, ...]
    down: Op


Node = Gemm | Attention | Pointwise | Experts


def fuse(name: str, *ops: Op, overlap: Overlap | None = None) -> Gemm:
    """One kernel for several ops on the same input."""
    return Gemm(name=name, ops=ops, overlap=overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Nodes in order, repeated for every layer."""

    nodes: tuple[Node, ...] = field(default=())


def block(*nodes: Node) -> Block:
    """A layer from its nodes."""
    return Block(nodes=nodes)


def llama_block(*, experts: bool) -> Block:
    """The Llama-like layer: grouped-query attention and a gated feed-forward, or experts."""
    feed: tuple[Node, ...]
    if experts:
        feed = (
            Experts(
                router=op("bsm,em->bse", label="router"),
                up=(op("bskm,emf->bskf", label="gate"), op("bskm,emf->bskf", label="up")),
                down=op("bskf,emf->bskm", label="down"),
            ),
        )
    else:
        feed = (
            fuse(
                "gate_up_gemm",
                op("bsm,mf->bsf", parallel="f", label="gate"),
                op("bsm,mf->bsf", parallel="f", label="up"),
            ),
            Pointwise(name="silu_mul", op=Elementwise.SILU_MUL),
            fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down")),
        )
    return block(
        Pointwise(name="add_rmsnorm_attn", op=Elementwise.ADD_RMSNORM),
        fuse(
            "qkv_gemm",
            op("bsm,mHh->bsHh", parallel="H", label="Q"),
            op("bsm,mKh->bsKh", parallel="K", label="K"),
            op("bsm,mKh->bsKh", parallel="K", label="V"),
        ),
        Pointwise(name="rope", op=Elementwise.ROPE),
        Attention(
            name="attention",
            scores=op("bKrsh,bKzh->bKrsz", parallel="K", label="scores"),
            values=op("bKrsz,bKzh->bKrsh", parallel="K", label="values"),
        ),
        fuse("o_gemm", op("bsHh,mHh->bsm", parallel="H", label="O")),
        Pointwise(name="add_rmsnorm_ff", op=Elementwise.ADD_RMSNORM),
        *feed,
    )
