"""Ring attention: keys and values travel round the ranks while each block of them is attended to.

Contiguous: rank r holds the r-th part of the sequence; under a causal mask it has nothing to do for parts after its
own, and waits. Striped (arXiv 2311.09431): rank r holds every n-th token, so that every round is causal for everyone.
Zigzag: rank r holds the r-th part from the front and the r-th from the back of 2 n parts; every round but its own is
half a block of scores for everyone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, assert_never

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.layer_passes.rounds import gradients_home
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange, RankSplit
from workloads.ops import attention
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import ATTENTION_GRADIENT, AttentionWork, CollectiveWork, DType, ElementwiseWork

# Every rank reads the keys and values of all: a gather, of which rounds are a schedule.
GATHER = next(
    node
    for node in shard((attention(),), RankSplit(context=("gathered",)), returns=False)
    if isinstance(node, Exchange)
)
RingLayout = Literal["contiguous", "striped", "zigzag"]
LAYOUTS: tuple[RingLayout, ...] = ("contiguous", "striped", "zigzag")
COMM_STREAM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Attention of ``batch`` sequences over a ring: each of ``ranks`` holds ``block`` tokens of every sequence.

    ``merges``: partial outputs are added up after each round. ``backward``: scores and gradients cost two forward
    passes of each block; keys, values and, a round later, their gradients (32 bit) travel, the latter home again.
    ``gather`` is what the rounds are a schedule of.
    """

    layout: RingLayout
    ranks: tuple[int, ...]
    block: int
    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    causal: bool = True
    merges: bool = False
    backward: bool = False
    gather: Exchange = GATHER

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by axis of what one rank gives to the others."""
        return {"b": self.batch, "K": self.kv_heads, "s": self.block, "h": self.head_dim}

    @property
    def alike(self) -> bool:
        """True when every rank runs the same kernels."""
        return self.layout == "striped" or not self.causal


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAttention:
    """Attention of one sequence, forward or ``backward``: its heads, their size, whether later tokens are masked."""

    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Scores of one round on one rank: ``queries`` x ``keys``, of which ``pairs`` are not masked."""

    queries: int
    keys: int
    masked: bool
    pairs: int


def round_of(layout: RingLayout, *, rank: int, owner: int, block: int, causal: bool = True) -> Round:
    """What ``rank`` computes on the keys of ``owner``, with ``block`` tokens a rank; no pairs: nothing.

    >>> [round_of("contiguous", rank=1, owner=owner, block=4).pairs for owner in range(3)]
    [16, 10, 0]
    >>> [round_of("striped", rank=1, owner=owner, block=4).pairs for owner in range(3)]
    [10, 10, 6]
    >>> [round_of("zigzag", rank=1, owner=owner, block=4).pairs for owner in range(3)]
    [8, 10, 8]
    """
    whole = Round(queries=block, keys=block, masked=False, pairs=block * block)
    triangle = replace(whole, masked=True, pairs=block * (block + 1) // 2)
    if not causal:
        return whole
    if owner == rank:
        return triangle
    match layout:
        case "contiguous":
            return whole if owner < rank else Round(queries=block, keys=block, masked=True, pairs=0)
        case "striped":  # tokens of later ranks come after ours of the same stripe: without the diagonal
            return triangle if owner < rank else replace(triangle, pairs=block * (block - 1) // 2)
        case "zigzag":
            # Keys of an earlier owner: only their front half is in the past; of a later one: only our back half is
            # after them.
            half = replace(whole, pairs=block * (block // 2))
            return replace(half, keys=block // 2) if owner < rank else replace(half, queries=block // 2)
    assert_never(layout)


def tile_scores(queries: int, keys: int, masked: bool, tile: tuple[int, int]) -> tuple[int, int]:
    """Scores that whole tiles of (queries, keys) compute, and those of tiles that lie behind the mask and are skipped.

    A tile is skipped when its last query comes before its first key: a block of 4,096 tokens saves nothing with tiles
    of 2,048 x 4,096, a quarter with 2,048 x 2,048 (arXiv 2311.09431).

    >>> tile_scores(4096, 4096, True, (2048, 4096)), tile_scores(4096, 4096, True, (2048, 2048))
    ((16777216, 0), (12582912, 4194304))
    """
    high, wide = min(tile[0], queries), min(tile[1], keys)
    rows, columns = -(-queries // high), -(-keys // wide)
    met = sum(min(columns, -(-min((i + 1) * high, queries) // wide)) for i in range(rows)) if masked else rows * columns
    return met * high * wide, (rows * columns - met) * high * wide


def ring_kernels(ring: Ring, place: int, *, first: tuple[int, ...] = ()) -> list[Kernel]:
    """One rank's rounds; its neighbour's block travels on a second stream while its own is computed.

    ``first`` is what the first transfer and attention wait for; ``after`` counts from the first of these kernels.
    """
    count = len(ring.ranks)
    home = gradients_home(ring.gather)
    kernels: list[Kernel] = []
    passed = attended = done = -1  # the last transfer and attention of this rank; the last that made gradients

    def send(name: str, exchange: Exchange, after: tuple[int, ...]) -> int:
        buffer = exchange.elements(ring.sizes) * exchange.element_bytes
        work = CollectiveWork(op=CollectiveOp.SEND_RECV, ranks=ring.ranks, buffer_bytes=buffer)
        kernels.append(
            Kernel(name=name, work=work, flops=0.0, bytes_moved=float(buffer), stream=COMM_STREAM, after=after)
        )
        return len(kernels) - 1

    for turn in range(count):
        before = (passed,) if passed >= 0 else first
        if turn < count - 1:
            passed = send("send_kv", ring.gather, (attended,) if attended >= 0 else first)
        if ring.backward and turn:
            send("send_kv_grad", home, (done,) if done >= 0 else first)
        work = round_of(ring.layout, rank=place, owner=(place - turn) % count, block=ring.block, causal=ring.causal)
        if not work.pairs:
            continue
        kernels.append(_attention(ring, work, before))
        if ring.merges and attended >= 0:
            kernels.append(_merge(ring, work.queries))
        attended = done = len(kernels) - 1
    if ring.backward:
        send("send_kv_grad", home, (done,))
    return kernels


def build_ring(layout: RingLayout, attention: RingAttention, *, ranks: int, seq_len: int) -> Program:
    """Attention of one sequence of ``seq_len`` tokens over a ring of ``ranks``; outputs are not merged.

    >>> attention = RingAttention(q_heads=32, kv_heads=8, head_dim=128)
    >>> program = build_ring("contiguous", attention, ranks=2, seq_len=8192)
    >>> [len(rank.phases[0].segments[0].kernels) for rank in program.ranks]
    [2, 3]
    """
    if layout not in LAYOUTS:
        raise WorkloadError(f"layout = '{layout}': known are {', '.join(LAYOUTS)}")
    check_parts(layout, ranks=ranks, seq_len=seq_len)
    ring = Ring(
        layout=layout,
        ranks=tuple(range(ranks)),
        block=seq_len // ranks,
        q_heads=attention.q_heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        causal=attention.causal,
        backward=attention.backward,
    )

    def rank_program(rank: int) -> RankProgram:
        segment = Segment(name="ring", kernels=tuple(ring_kernels(ring, rank)))
        return RankProgram(phases=(Phase(name="backward" if attention.backward else "prefill", segments=(segment,)),))

    return Program(ranks=tuple(rank_program(rank) for rank in ring.ranks))


def check_parts(layout: RingLayout, *, ranks: int, seq_len: int) -> None:
    """Refuse a sequence that the ring's ranks cannot share evenly."""
    parts = 2 * ranks if layout == "zigzag" else ranks
    if ranks < 2 or seq_len % parts:
        fitting = [str(n) for n in (2, 4, 8, 16) if seq_len % (n * parts // ranks) == 0]
        why = f"{seq_len} tokens are not {parts} equal parts" if ranks > 1 else "a ring has at least 2"
        raise WorkloadError(f"ranks = {ranks}: {why}: use {', '.join(fitting) or 'other lengths'}")


def _attention(ring: Ring, work: Round, after: tuple[int, ...]) -> Kernel:
    heads, size = ring.q_heads, ring.head_dim
    moved = DType.BF16.bytes * ring.batch * size * 2 * (heads * work.queries + ring.kv_heads * work.keys)
    attention = AttentionWork(
        batch=ring.batch,
        q_len=work.queries,
        kv_len=work.keys,
        q_heads=heads,
        kv_heads=ring.kv_heads,
        head_dim=size,
        causal=work.masked,
    )
    flops = attention.flops_per_pair * work.pairs  # stripes of later ranks lie behind the diagonal too
    forward = Kernel(name="attention", work=attention, flops=flops, bytes_moved=float(moved), after=after)
    return attention_gradient(forward) if ring.backward else forward


def attention_gradient(kernel: Kernel) -> Kernel:
    """What makes the gradients of a forward attention's inputs: five products for its two."""
    assert isinstance(kernel.work, AttentionWork)
    flops = ATTENTION_GRADIENT * kernel.flops
    work = replace(kernel.work, backward=True)
    return replace(kernel, name=f"{kernel.name}_grad", work=work, flops=flops)


def _merge(ring: Ring, queries: int) -> Kernel:
    """A round's 16-bit output into the 32-bit sum, scaled by both rounds' softmax sums."""
    rows, width = ring.batch * queries, ring.q_heads * ring.head_dim
    moved = rows * width * (DType.BF16.bytes + 2 * DType.FP32.bytes)
    work = ElementwiseWork(op=Elementwise.COPY, rows=rows, width=width, bytes_moved=moved)
    return Kernel(name="merge_out", work=work, flops=2.0 * rows * width, bytes_moved=float(moved))
