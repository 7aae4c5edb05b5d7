"""Parts of a mixture of experts as kernels of one rank: router, rows on their way, grouped products, and their sum."""

from __future__ import annotations

import math
from typing import assert_never

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp, Elementwise, EpKernels
from workloads.kernels import Shape, elementwise_kernel, gemm_kernel, quantise_kernel
from workloads.layer_passes.tree import Combine, Exchange, ExpertAct, ExpertRouter, ExpertRows, Grouped, Join
from workloads.ops import Op
from workloads.precision import Product
from workloads.program import Kernel
from workloads.routing import ExpertLoad
from workloads.storage import Storage
from workloads.work import CollectiveWork, DType, ExchangeSizes, GroupedGemmWork


def expert_kernels(
    node: ExpertRouter | ExpertRows | Grouped | ExpertAct | Combine | Join,
    shape: Shape,
    load: ExpertLoad,
    *,
    slots: int,
) -> list[Kernel]:
    """Kernels of one part; ``slots`` are expert weights over all ranks, copies included."""
    model, element = shape.model, DType.BF16.bytes
    width = model.routed_width
    match node:
        case ExpertRouter():
            return _router(node, shape)
        case ExpertRows():
            return _rows(node, shape, load)
        case Grouped():
            return _grouped(node, shape, load, slots)
        case ExpertAct():
            inner = shape.local_sizes(node.down.parallel)["f"]
            gated = node.name == "silu_mul"
            op = Elementwise.SILU_MUL if gated else Elementwise.RELU
            moved = (3 if gated else 2) * load.rows * inner * element
            return [elementwise_kernel(node.name, op, load.rows, inner, moved)]
        case Combine(partial=True):
            moved = 5 * load.rows * width * element
            return [elementwise_kernel("index_add", Elementwise.INDEX_ADD, load.rows, width, moved)]
        case Combine() if shape.layout.ep_kernels is not None:
            return []  # combine adds up what it brings home
        case Combine():
            tokens = own_tokens(shape, node.parallel)
            sent = tokens * model.top_k
            passes = 3 * model.top_k + 1  # multiply (read, write) and sum (read) every row, write one a token
            return [
                _gather("gather_back", sent, width),
                elementwise_kernel("topk_sum", Elementwise.TOPK_SUM, sent, width, passes * tokens * width * element),
            ]
        case Join():
            tokens, width = own_tokens(shape, node.parallel), model.d_model
            return [elementwise_kernel(node.name, Elementwise.COPY, tokens, width, 3 * tokens * width * element)]
    assert_never(node)


def own_tokens(shape: Shape, parallel: str | None) -> int:
    """Tokens of one rank, all or those that it takes of the ones that its tensor group shares."""
    sizes = shape.local_sizes(parallel)
    return sizes["b"] * sizes["s"]


def _router(node: ExpertRouter, shape: Shape) -> list[Kernel]:
    model = shape.model
    kernels = [gemm_kernel(node.name, (node.op,), shape, DType.BF16)]
    if model.route_groups:
        # Scores of all experts and groups: read in 32 bit, the chosen written.
        tokens = own_tokens(shape, node.op.parallel)
        moved = 2 * tokens * model.experts * DType.FP32.bytes
        kernels.append(elementwise_kernel("group_topk", Elementwise.COPY, tokens, model.experts, moved))
    return kernels


def _rows(node: ExpertRows, shape: Shape, load: ExpertLoad) -> list[Kernel]:
    """Tokens are quantised once, and rows travel as experts read them."""
    width, product = shape.model.routed_width, shape.precision.of(node.op)
    by, tokens = shape.layout.ep_kernels, own_tokens(shape, node.parallel)
    match node.name:
        case "gather_dispatch" if by is not None:
            return []  # dispatch reads tokens where they lie
        case "gather" | "gather_return" if by is EpKernels.LOW_LATENCY:
            return []  # it writes rows in the order of their experts, and combine reads them there
        case "quantise_rows" if by is not None and not product.activations.plain:
            if dispatched(shape, node.op).plain:
                return [quantise_kernel("gate_up_grouped", load.rows, width, product)]
            if by is EpKernels.LOW_LATENCY:
                return []  # it quantises what it sends
            return [quantise_kernel("gate_up_grouped", tokens, width, product)]
        case "quantise_rows" if product.activations.plain:
            return []
        case "quantise_rows":
            return [quantise_kernel("gate_up_grouped", tokens, width, product)]
        case "gather_dispatch":
            return [_gather(node.name, own_tokens(shape, "s") * shape.model.top_k, width, product)]
        case "gather":
            return [_gather(node.name, load.rows, width, product)]
        case "gather_return":
            return [_gather(node.name, load.rows, width)]
    assert_never(node.name)


def _gather(name: str, rows: int, width: int, product: Product | None = None) -> Kernel:
    """Rows in another order, as ``product`` reads them, or in 16 bit."""
    bytes_once = rows * width * DType.BF16.bytes if product is None else product.activations.bytes_of(rows, width)
    return elementwise_kernel(name, Elementwise.GATHER, rows, width, 2 * bytes_once)


def grouped_sizes(ops: tuple[Op, ...], shape: Shape) -> tuple[int, int]:
    """Columns and depth of the products of one expert."""
    found = [one.einsum.gemm(shape.local_sizes(one.parallel)) for one in ops]
    return sum(n for _, n, _ in found), found[0][2]


def _grouped(node: Grouped, shape: Shape, load: ExpertLoad, slots: int) -> list[Kernel]:
    product = shape.precision.of(node.ops[0])
    n, k = grouped_sizes(node.ops, shape)
    weights = load.distinct * product.weights.bytes_of(n, k)
    moved = weights + product.activations.bytes_of(load.rows, k) + DType.BF16.bytes * load.rows * n
    work = GroupedGemmWork(
        experts=slots // shape.layout.ep,
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
    kernel = Kernel(name=node.name, work=work, flops=2.0 * load.rows * n * k, bytes_moved=float(moved))
    cast = not node.first and not product.activations.plain  # rows of the first products were, as tokens
    return [*([quantise_kernel(node.name, load.rows, k, product)] if cast else []), kernel]


def travel_kernel(node: Exchange, shape: Shape, load: ExpertLoad) -> Kernel:
    """Rows to their experts or back: a rank gives its tokens' rows and takes those of its experts.

    Every rank's tokens choose alike, so that each sends 1/n of what an expert gets.
    """
    assert node.reader is not None
    ranks, width, away = shape.layout.ranks, shape.model.routed_width, node.travel == "away"
    activations = shape.precision.of(node.reader).activations
    row_bytes = activations.bytes_of(1, width) if away else width * DType.BF16.bytes
    own, here = own_tokens(shape, "s") * shape.model.top_k, load.rows / len(ranks)
    if shape.layout.ep_kernels is not None:
        return _exchanged(node, shape, load)
    given, taken = round((own - here) * row_bytes), round((load.rows - here) * row_bytes)
    work = CollectiveWork(
        op=CollectiveOp.ALL_TO_ALL,
        ranks=ranks,
        buffer_bytes=own * row_bytes,
        sent_bytes=max(0, given if away else taken),
        received_bytes=max(0, taken if away else given),
    )
    return Kernel(name=node.name, work=work, flops=0.0, bytes_moved=float(own * row_bytes))


def dispatched(shape: Shape, op: Op) -> Storage:
    """What ``ep_kernels`` send tokens in to the experts of ``op``."""
    activations, asked = shape.precision.of(op).activations, shape.layout.dispatch_dtype
    if asked is DType.FP8 and activations.plain:
        raise WorkloadError(
            f"dispatch_dtype = 'fp8_e4m3': experts read {activations}: use dtype 'fp8_e4m3', or leave it out"
        )
    return Storage(element=asked.value) if asked is DType.BF16 else activations


def _exchanged(node: Exchange, shape: Shape, load: ExpertLoad) -> Kernel:
    """The same by ``ep_kernels``; a rank whose experts are wanted more exchanges as if it had so many more tokens."""
    assert node.reader is not None and shape.layout.ep_kernels is not None
    away, model = node.travel == "away", shape.model
    wide = not away or dispatched(shape, node.reader).plain
    sizes = ExchangeSizes(
        tokens=max(own_tokens(shape, "s"), math.ceil(load.rows / model.top_k)),
        top_k=model.top_k,
        hidden=model.routed_width,
        dtype=DType.BF16 if wide else DType.FP8,
        kernels=shape.layout.ep_kernels,
    )
    moved = sizes.tokens * sizes.top_k * sizes.hidden * int(sizes.dtype.bytes)
    work = CollectiveWork(
        op=CollectiveOp.DISPATCH if away else CollectiveOp.COMBINE,
        ranks=shape.layout.ranks,
        buffer_bytes=moved,
        exchange=sizes,
    )
    name = node.name.replace("all_to_all", sizes.kernels.value)
    return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(moved))
