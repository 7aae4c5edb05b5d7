"""Mixture-of-experts layers: router, dispatch, grouped GEMMs, combine, in both modes of the records."""

from __future__ import annotations

from dataclasses import replace

from workloads.kernels import Shape, elementwise_kernel, gemm_kernel, quantise_kernel, weighted_kernels
from workloads.ops import Experts, Gemm
from workloads.precision import Product
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
    up, down = shape.precision.of(node.up[0]), shape.precision.of(node.down)
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
    if not up.activations.plain:  # tokens are quantised once, and rows travel as experts read them
        kernels.append(quantise_kernel("gate_up_grouped", shape.tokens, width, up))
    if travels:
        kernels += [
            _gather("gather_dispatch", sent, width, up),
            _exchange("dispatch", shape, load, away=True, row_bytes=up.activations.bytes_of(1, width)),
        ]
    kernels.append(_gather("gather", rows, width, up))
    kernels += [
        _grouped("gate_up_grouped", shape, load, slots, up, n=len(node.up) * inner, k=width),
        _activation(rows, inner, gated=len(node.up) == 2),
    ]
    if not down.activations.plain:
        kernels.append(quantise_kernel("down_grouped", rows, inner, down))
    kernels.append(_grouped("down_grouped", shape, load, slots, down, n=width, k=inner))
    if layout.ep_mode == "all_reduce":
        moved = 5 * rows * width * element
        kernels.append(elementwise_kernel("index_add", Elementwise.INDEX_ADD, rows, width, moved))
        return [*kernels, *shared[-1:], _sum_over_ranks(shape)]
    if travels:
        kernels += [
            _gather("gather_return", rows, width),
            _exchange("combine", shape, load, away=False, row_bytes=width * element),
        ]
    passes = 3 * model.top_k + 1  # multiply (read, write) and sum (read) every row, write one a token
    kernels += [
        _gather("gather_back", sent, width),
        elementwise_kernel("topk_sum", Elementwise.TOPK_SUM, sent, width, passes * shape.tokens * width * element),
        *shared[-1:],
    ]
    return [*kernels, _sum_over_ranks(shape)] if layout.ep == 1 and layout.tp > 1 else kernels


# What a whole collective of an expert layer can run beside: the parts of the expert of all tokens, as far as they are.
SHARED_BESIDE = {
    "all_to_all_dispatch": ("cast_gate_up_shared_gemm", "gate_up_shared_gemm", "silu_mul_shared"),
    "all_to_all_combine": ("cast_down_shared_gemm", "down_shared_gemm"),
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
            kernels += weighted_kernels(part.name, part.ops, shape)
        else:
            width = shape.local_sizes(part.axis)[part.axis]
            passes = 3 if part.op is Elementwise.SILU_MUL else 2
            moved = passes * shape.tokens * width * DType.BF16.bytes
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


def _gather(name: str, rows: int, width: int, product: Product | None = None) -> Kernel:
    """Rows in another order, as ``product`` reads them, or in 16 bit."""
    bytes_once = rows * width * DType.BF16.bytes if product is None else product.activations.bytes_of(rows, width)
    return elementwise_kernel(name, Elementwise.GATHER, rows, width, 2 * bytes_once)


def _activation(rows: int, width: int, *, gated: bool) -> Kernel:
    name, op = ("silu_mul", Elementwise.SILU_MUL) if gated else ("activation", Elementwise.RELU)
    return elementwise_kernel(name, op, rows, width, (3 if gated else 2) * rows * width * DType.BF16.bytes)


def _grouped(name: str, shape: Shape, load: ExpertLoad, slots: int, product: Product, *, n: int, k: int) -> Kernel:
    local = slots // shape.layout.ep
    weights = load.distinct * product.weights.bytes_of(n, k)
    moved = weights + product.activations.bytes_of(load.rows, k) + DType.BF16.bytes * load.rows * n
    work = GroupedGemmWork(
        experts=local,
        n=n,
        k=k,
        dtype=product.multiplies,
        weights=product.stored,
        rows=load.rows,
        distinct=load.distinct,
        tiles128=load.tiles128,
        tiles256=load.tiles256,
        rows_beyond128=load.rows_beyond128,
    )
    return Kernel(name=name, work=work, flops=2.0 * load.rows * n * k, bytes_moved=float(moved))


def _slice(shape: Shape) -> Shape:
    """The tokens that one rank of a tensor group sends to experts: all of it hold the same, each takes a share."""
    rows = -(-shape.tokens // shape.layout.tp)
    return replace(shape, batch=rows, new_tokens=1, layout=replace(shape.layout, tp=1))


def _gathered(shape: Shape) -> Kernel:
    """The shares of a tensor group, back on all of its ranks."""
    buffer = shape.tokens * shape.model.d_model * DType.BF16.bytes
    work = CollectiveWork(op=CollectiveOp.ALL_GATHER, ranks=shape.layout.tensor_ranks, buffer_bytes=buffer)
    return Kernel(name="all_gather_ff", work=work, flops=0.0, bytes_moved=float(buffer))


def _exchange(name: str, shape: Shape, load: ExpertLoad, *, away: bool, row_bytes: int) -> Kernel:
    """Rows to their experts (``away``) or back: a rank gives its tokens' rows and takes those of its experts.

    Every rank's tokens choose alike, so that each sends 1/n of what an expert gets.
    """
    ranks = shape.layout.ranks
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
