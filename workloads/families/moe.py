"""Mixture-of-experts layers: router, dispatch, grouped GEMMs, combine, in both modes of the records."""

from __future__ import annotations

from dataclasses import replace

from workloads.kernels import Shape, elementwise_kernel, gemm_kernel
from workloads.ops import Experts, Gemm
from workloads.program import Kernel
from workloads.routing import ExpertLoad
from workloads.work import CollectiveOp, CollectiveWork, DType, Elementwise, GroupedGemmWork


def expert_kernels(node: Experts, shape: Shape, load: ExpertLoad, *, slots: int) -> list[Kernel]:
    """Kernels of one rank; ``slots`` are expert weights over all ranks, copies included.

    ``all_reduce``: all tokens everywhere, own experts, index-add, all-reduce. ``all_to_all``: own tokens travel to
    their experts and back around the grouped GEMMs. Without expert parallelism ``tp`` splits every expert's width,
    and an all-reduce adds the ranks' parts.
    """
    model, layout = shape.model, shape.layout
    if layout.ep_mode == "all_to_all" and layout.tp > 1:
        return [*expert_kernels(node, _slice(shape), load, slots=slots), _gathered(shape)]
    width, element = model.d_model, DType.BF16.bytes
    sent = shape.tokens * model.top_k  # rows of this rank's own tokens
    rows = load.rows
    inner = expert_width(shape)
    kernels = [gemm_kernel("router_gemm", (node.router,), shape, DType.BF16)]
    if model.route_groups:
        # Scores of all experts and groups: read in 32 bit, the chosen written.
        moved = 2 * shape.tokens * model.experts * DType.FP32.bytes
        kernels.append(elementwise_kernel("group_topk", Elementwise.COPY, shape.tokens, model.experts, moved))
    shared = shared_kernels(node, shape)
    kernels += shared[:-1]
    travels = layout.ep_mode == "all_to_all"
    if travels:
        kernels += [
            _gather("gather_dispatch", sent, width),
            _exchange("dispatch", shape, load, away=True),
        ]
    kernels.append(_gather("gather", rows, width))
    kernels += [
        _grouped("gate_up_grouped", shape, load, slots, n=2 * inner, k=width),
        elementwise_kernel("silu_mul", Elementwise.SILU_MUL, rows, inner, 3 * rows * inner * element),
        _grouped("down_grouped", shape, load, slots, n=width, k=inner),
    ]
    if layout.ep_mode == "all_reduce":
        moved = 5 * rows * width * element
        kernels.append(elementwise_kernel("index_add", Elementwise.INDEX_ADD, rows, width, moved))
        return [*kernels, *shared[-1:], _sum_over_ranks(shape)]
    if travels:
        kernels += [
            _gather("gather_return", rows, width),
            _exchange("combine", shape, load, away=False),
        ]
    passes = 3 * model.top_k + 1  # multiply (read, write) and sum (read) every row, write one a token
    kernels += [
        _gather("gather_back", sent, width),
        elementwise_kernel("topk_sum", Elementwise.TOPK_SUM, sent, width, passes * shape.tokens * width * element),
        *shared[-1:],
    ]
    return [*kernels, _sum_over_ranks(shape)] if layout.ep == 1 and layout.tp > 1 else kernels


# What a whole collective of an expert layer can run beside: the parts of the expert of all tokens.
SHARED_BESIDE = {
    "all_to_all_dispatch": ("gate_up_shared_gemm", "silu_mul_shared"),
    "all_to_all_combine": ("down_shared_gemm",),
}


def shared_kernels(node: Experts, shape: Shape) -> list[Kernel]:
    """The expert of all tokens, and adding it to the routed ones' output.

    Where all ranks hold all tokens it is split over them like a feed-forward and joins their all-reduce.
    """
    layout = shape.layout
    if layout.ep_mode == "all_reduce":
        shape = replace(shape, layout=replace(layout, tp=layout.ep))
    kernels: list[Kernel] = []
    for part in node.shared:
        if isinstance(part, Gemm):
            kernels.append(gemm_kernel(part.name, part.ops, shape, DType.BF16))
        else:
            width = shape.local_sizes(part.axis)[part.axis]
            moved = 3 * shape.tokens * width * DType.BF16.bytes
            kernels.append(elementwise_kernel(part.name, part.op, shape.tokens, width, moved))
    if kernels:
        width = shape.model.d_model
        moved = 3 * shape.tokens * width * DType.BF16.bytes
        kernels.append(elementwise_kernel("add_shared", Elementwise.COPY, shape.tokens, width, moved))
    return kernels


def expert_width(shape: Shape) -> int:
    """Feed-forward width of an expert on one rank: its own where ranks hold whole experts, else its share."""
    return shape.local_sizes("f" if shape.layout.ep == 1 else None)["f"]


def _sum_over_ranks(shape: Shape) -> Kernel:
    buffer = shape.tokens * shape.model.d_model * DType.BF16.bytes
    work = CollectiveWork(op=CollectiveOp.ALL_REDUCE, ranks=shape.layout.ranks, buffer_bytes=buffer)
    return Kernel(name="all_reduce_ff", work=work, flops=0.0, bytes_moved=float(buffer))


def _gather(name: str, rows: int, width: int) -> Kernel:
    return elementwise_kernel(name, Elementwise.GATHER, rows, width, 2 * rows * width * DType.BF16.bytes)


def _grouped(name: str, shape: Shape, load: ExpertLoad, slots: int, *, n: int, k: int) -> Kernel:
    local = slots // shape.layout.ep
    element = DType.BF16.bytes
    return Kernel(
        name=name,
        work=GroupedGemmWork(
            experts=local,
            n=n,
            k=k,
            rows=load.rows,
            distinct=load.distinct,
            tiles128=load.tiles128,
            tiles256=load.tiles256,
            rows_beyond128=load.rows_beyond128,
        ),
        flops=2.0 * load.rows * n * k,
        bytes_moved=float(element * (load.distinct * n * k + load.rows * (n + k))),
    )


def _slice(shape: Shape) -> Shape:
    """The tokens that one rank of a tensor group sends to experts: all of it hold the same, each takes a share."""
    rows = -(-shape.tokens // shape.layout.tp)
    return replace(shape, batch=rows, new_tokens=1, layout=replace(shape.layout, tp=1))


def _gathered(shape: Shape) -> Kernel:
    """The shares of a tensor group, back on all of its ranks."""
    buffer = shape.tokens * shape.model.d_model * DType.BF16.bytes
    work = CollectiveWork(op=CollectiveOp.ALL_GATHER, ranks=shape.layout.tensor_ranks, buffer_bytes=buffer)
    return Kernel(name="all_gather_ff", work=work, flops=0.0, bytes_moved=float(buffer))


def _exchange(name: str, shape: Shape, load: ExpertLoad, *, away: bool) -> Kernel:
    """Rows to their experts (``away``) or back: a rank gives its tokens' rows and takes those of its experts.

    Every rank's tokens choose alike, so that each sends 1/n of what an expert gets.
    """
    ranks, row_bytes = shape.layout.ranks, shape.model.d_model * DType.BF16.bytes
    own, here = shape.tokens * shape.model.top_k, load.rows / len(ranks)
    given, taken = round((own - here) * row_bytes), round((load.rows - here) * row_bytes)
    work = CollectiveWork(
        op=CollectiveOp.ALL_TO_ALL,
        ranks=ranks,
        buffer_bytes=own * row_bytes,
        sent_bytes=max(0, given if away else taken),
        received_bytes=max(0, taken if away else given),
    )
    return Kernel(name=f"all_to_all_{name}", work=work, flops=0.0, bytes_moved=float(own * row_bytes))
