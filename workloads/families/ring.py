"""Ring attention: keys and values travel round the ranks while each block of them is attended to.

Contiguous: rank r holds the r-th part of the sequence; under a causal mask it has nothing to do for parts after its
own, and waits. Striped (arXiv 2311.09431): rank r holds every n-th token, so that every round is causal for everyone.
Zigzag: rank r holds the r-th part from the front and the r-th from the back of 2 n parts; every round but its own is
half a block of scores for everyone.
"""

from __future__ import annotations

from typing import Literal

from workloads.errors import WorkloadError
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import AttentionWork, CollectiveOp, CollectiveWork, DType

RingLayout = Literal["contiguous", "striped", "zigzag"]
LAYOUTS: tuple[RingLayout, ...] = ("contiguous", "striped", "zigzag")
COMM_STREAM = 1


def build_ring(
    layout: RingLayout, *, ranks: int, seq_len: int, q_heads: int, kv_heads: int, head_dim: int, causal: bool = True
) -> Program:
    """Forward attention of one sequence of ``seq_len`` tokens over a ring of ``ranks``; outputs are not merged.

    >>> program = build_ring("contiguous", ranks=2, seq_len=8192, q_heads=32, kv_heads=8, head_dim=128)
    >>> [len(rank.phases[0].segments[0].kernels) for rank in program.ranks]
    [2, 3]
    """
    if layout not in LAYOUTS:
        raise WorkloadError(f"layout = '{layout}': known are {', '.join(LAYOUTS)}")
    parts = 2 * ranks if layout == "zigzag" else ranks
    if ranks < 2 or seq_len % parts:
        raise WorkloadError(
            f"ranks = {ranks}: a ring has at least 2, and its {parts} parts divide the {seq_len} tokens"
        )
    block = seq_len // ranks
    group = tuple(range(ranks))
    sent = 2 * kv_heads * block * head_dim * DType.BF16.bytes

    def rank_program(rank: int) -> RankProgram:
        kernels: list[Kernel] = []
        passed = attended = -1  # the last transfer and the last attention of this rank
        for turn in range(ranks):
            before = passed
            if turn < ranks - 1:
                work = CollectiveWork(op=CollectiveOp.SEND_RECV, ranks=group, buffer_bytes=sent)
                kernels.append(
                    Kernel(
                        name="send_kv",
                        work=work,
                        flops=0.0,
                        bytes_moved=float(sent),
                        stream=COMM_STREAM,
                        after=(attended,) if attended >= 0 else (),
                    )
                )
                passed = len(kernels) - 1
            owner = (rank - turn) % ranks
            if causal and layout == "contiguous" and owner > rank:
                continue
            masked = causal and (layout == "striped" or owner == rank)
            queries = keys = block
            if causal and layout == "zigzag" and owner != rank:
                # Keys of an earlier owner: only their front half is in the past; of a later one: only our back half is
                # after them.
                queries, keys = (block, block // 2) if owner < rank else (block // 2, block)
            kernels.append(_attention(queries, keys, q_heads, kv_heads, head_dim, masked, after=before))
            attended = len(kernels) - 1
        segment = Segment(name="ring", kernels=tuple(kernels))
        return RankProgram(phases=(Phase(name="prefill", segments=(segment,)),))

    if layout == "striped" or not causal:
        return Program(ranks=(rank_program(0),) * ranks)
    return Program(ranks=tuple(rank_program(rank) for rank in group))


def _attention(
    queries: int, keys: int, q_heads: int, kv_heads: int, head_dim: int, masked: bool, *, after: int
) -> Kernel:
    work = AttentionWork(
        batch=1, q_len=queries, kv_len=keys, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, causal=masked
    )
    pairs = queries * (queries + 1) / 2 if masked else queries * keys
    moved = DType.BF16.bytes * head_dim * 2 * (q_heads * queries + kv_heads * keys)
    return Kernel(
        name="attention",
        work=work,
        flops=4.0 * pairs * q_heads * head_dim,
        bytes_moved=float(moved),
        after=(after,) if after >= 0 else (),
    )
