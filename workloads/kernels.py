"""One node on one rank: local sizes, and the kernel that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import groupby

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp, Elementwise, EngineOp
from workloads.model import ModelSpec
from workloads.ops import Attention, Group, Op
from workloads.parallel import Layout
from workloads.precision import Precision, Product
from workloads.program import Kernel
from workloads.storage import Storage
from workloads.work import AttentionWork, CollectiveWork, DType, ElementwiseWork, GemmWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step of a model on one rank: ``batch`` sequences of ``new_tokens``, each attending to ``context``.

    ``context_slice`` is the rank's place in a ring of tokens, ``precision`` that of the layers at hand, ``source`` the
    tokens of an encoder that a sequence attends to.
    """

    model: ModelSpec
    layout: Layout
    batch: int
    new_tokens: int
    context: int
    context_slice: int = 0
    source: int = 0
    precision: Precision = field(default_factory=Precision)

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return self.batch * self.new_tokens

    @property
    def q_heads(self) -> int:
        """Query heads of one rank."""
        return self.model.q_heads // self.layout.tp

    @property
    def kv_heads(self) -> int:
        """Key/value heads of one rank; replicated where there are fewer than ranks."""
        return max(1, self.model.kv_heads // self.layout.tp)

    def heads_whole(self) -> Shape:
        """The same step where every rank of the tensor group holds all heads."""
        return replace(self, layout=replace(self.layout, tp=1))

    def local_sizes(self, parallel: str | None) -> dict[str, int]:
        """Sizes by axis on one rank when ``parallel`` is sharded over the tensor-parallel ranks."""
        sizes = self.model.sizes() | {"b": self.batch, "s": self.new_tokens, "z": self.context}
        if parallel in ("H", "K"):  # a rank's key/value heads and their query heads, however the latter are written
            sizes["K"] = self.kv_heads
            sizes["H"] = self.q_heads
            sizes["r"] = self.q_heads // self.kv_heads
        elif parallel == "s":  # rows of all sequences lie side by side
            sizes |= {"b": 1, "s": math.ceil(self.tokens / self.layout.tp)}
        elif parallel is not None:
            sizes[parallel] = math.ceil(sizes[parallel] / self.layout.tp)
        return sizes

    def over(self, group: Group) -> Shape:
        """The same step where a node is split over ``group`` instead of the tensor group."""
        return self if group == "tensor" else replace(self, layout=replace(self.layout, tp=self.layout.group))


def weighted_kernels(name: str, ops: tuple[Op, ...], shape: Shape, *, fused: bool = True) -> list[Kernel]:
    """The products of ops that share their input, with weights and activations as ``shape.precision`` has them.

    Activations of fewer than 16 bits are quantised once, in a kernel before. Ops whose operands are stored otherwise
    are kernels of their own, and so are all where ``fused`` is False.
    """
    groups = [tuple(group) for _, group in groupby(ops, key=shape.precision.of)] if fused else [(op,) for op in ops]
    kernels = []
    narrow = next((op for op in ops if not shape.precision.of(op).activations.plain), None)
    if narrow is not None:
        rows, _, depth = narrow.einsum.gemm(shape.local_sizes(narrow.parallel))
        rows *= narrow.einsum.count(shape.local_sizes(narrow.parallel))
        kernels.append(quantise_kernel(name, rows, depth, shape.precision.of(narrow)))
    for group in groups:
        part = name if len(groups) == 1 else f"{group[0].label.lower()}_gemm"
        kernels.append(stored_kernel(part, group, shape, shape.precision.of(group[0])))
    return kernels


def quantise_kernel(name: str, rows: int, width: int, product: Product) -> Kernel:
    """16-bit activations to what ``product`` reads, scales included, before the kernel ``name``."""
    moved = rows * width * DType.BF16.bytes + product.activations.bytes_of(rows, width)
    return elementwise_kernel(f"cast_{name}", Elementwise.CAST_FP8, rows, width, moved)


def stored_kernel(
    name: str, ops: tuple[Op, ...], shape: Shape, product: Product, *, tokens: int | None = None
) -> Kernel:
    """:func:`gemm_kernel` with operands as ``product`` has them."""
    return gemm_kernel(name, ops, shape, product.multiplies, tokens=tokens, weights=product.stored)


def gemm_kernel(
    name: str,
    ops: tuple[Op, ...],
    shape: Shape,
    dtype: DType,
    *,
    tokens: int | None = None,
    weights: Storage | None = None,
) -> Kernel:
    """One matrix product for ops that share their input: their columns stand side by side.

    ``tokens`` replaces the rows (a chunk, or a slice under sequence parallelism); ``weights`` as in ``GemmWork``.
    """
    if ops[0].einsum.of_activations:
        return _activation_product(name, ops, shape)
    rows = depth = columns = 0
    flops, counts = 0.0, set()
    for op in ops:
        sizes = shape.local_sizes(op.parallel)
        rows, n, depth = op.einsum.gemm(sizes)
        columns += n
        flops += op.einsum.flops(sizes)
        counts.add(op.einsum.count(sizes))  # weights that are one matrix for each point of an axis
    if len(counts) > 1:
        raise WorkloadError(
            f"{name}: {' and '.join(op.label for op in ops)} are not as many products: give each a node"
        )
    if tokens is not None:
        flops *= tokens / rows
        rows = tokens
    work = GemmWork(m=rows, n=columns, k=depth, count=counts.pop(), dtype=dtype, weights=weights)
    return Kernel(name=name, work=work, flops=flops, bytes_moved=float(product_bytes(work)))


def product_bytes(work: GemmWork) -> int:
    """Bytes of a product of activations and weights: both operands, and a result of 16 bits at least."""
    element = Storage(element=work.dtype.value)
    operands = element.bytes_of(work.m, work.k) + (work.weights or element).bytes_of(work.n, work.k)
    return work.count * (operands + max(work.dtype.bits, DType.BF16.bits) // 8 * work.m * work.n)


def _activation_product(name: str, ops: tuple[Op, ...], shape: Shape) -> Kernel:
    """A product of two activations, 16-bit both: one for each point of the axes that they share (sequences, heads)."""
    (one,) = ops
    sizes = shape.local_sizes(one.parallel)
    m, n, k = one.einsum.gemm(sizes)
    return product_kernel(name, m, n, k, count=one.einsum.count(sizes))


def product_kernel(name: str, m: int, n: int, k: int, *, count: int = 1, dtype: DType = DType.BF16) -> Kernel:
    """``count`` products ``m x k`` by ``k x n`` in one kernel, their inputs and results of ``dtype``."""
    return Kernel(
        name=name,
        work=GemmWork(m=m, n=n, k=k, count=count, dtype=dtype, out_dtype=dtype),
        flops=2.0 * count * m * n * k,
        bytes_moved=float(dtype.bytes * count * (m * k + n * k + m * n)),
    )


def attention_kernel(node: Attention, shape: Shape) -> Kernel:
    """The flash kernel of scores and values: FLOPs of both einsums where no mask lies, bytes of Q, K, V and output."""
    if node.cross:
        shape = replace(shape, context=shape.source)
    sizes = shape.local_sizes("K")
    queries = node.scores.einsum.input_elements(0, sizes)
    keys = node.scores.einsum.input_elements(1, sizes) + node.values.einsum.input_elements(1, sizes)
    output = node.values.einsum.output_elements(sizes)
    decode = shape.new_tokens == 1
    kv = shape.precision.kv
    window = 0 if node.cross else node.window
    kv_len, causal = shape.context, shape.model.causal and not decode and not node.cross
    if window and shape.context > window:
        kv_len, causal = seen_keys(shape.new_tokens, shape.context, window), False
        if decode:
            keys = keys * kv_len // shape.context
    work = AttentionWork(
        batch=shape.batch,
        q_len=shape.new_tokens,
        kv_len=kv_len,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.model.head_dim,
        v_head_dim=shape.model.v_head_dim or None,
        causal=causal,
        kv_dtype=kv if kv.bits != DType.BF16.bits else DType.BF16,
    )
    moved = DType.BF16.bytes * (queries + output) + kv.bytes * keys
    return Kernel(name=node.name, work=work, flops=work.flops, bytes_moved=float(moved))


def seen_keys(new_tokens: int, context: int, window: int) -> int:
    """Keys that each of the last ``new_tokens`` of ``context`` sees within ``window``, on average and rounded up.

    >>> seen_keys(1, 8192, 4096), seen_keys(8192, 8192, 4096)
    (4096, 3073)
    """
    short = max(0, min(window, context) - (context - new_tokens))  # tokens with fewer keys than the window before them
    missing = short * window - sum((context - new_tokens + 1, context - new_tokens + short)) * short // 2
    return -(-(new_tokens * window - missing) // new_tokens)


def elementwise_kernel(
    name: str, op: Elementwise, rows: int, width: int, bytes_moved: int, *, blocks: int | None = None
) -> Kernel:
    """A memory-bound kernel over 16-bit elements; one FLOP an element, for the record."""
    return Kernel(
        name=name,
        work=ElementwiseWork(op=op, rows=rows, width=width, bytes_moved=bytes_moved, blocks=blocks),
        flops=float(rows * width),
        bytes_moved=float(bytes_moved),
    )


def host_kernel(name: str, seconds: float, engine: str, *, stream: int = 0) -> Kernel:
    """Time in which the host of ``engine`` launches kernels: beside those on another stream the longer counts."""
    work = ElementwiseWork(op=EngineOp.HOST, rows=round(1e6 * seconds), width=1, bytes_moved=0, engine=engine)
    return Kernel(name=name, work=work, flops=0.0, bytes_moved=0.0, stream=stream)


def host_seconds(kernel: Kernel) -> float:
    """The seconds of a :func:`host_kernel`; 0 of any other.

    >>> host_seconds(host_kernel("host", 2e-3, "vllm")), host_seconds(permute_kernel("sort", 8, 8))
    (0.002, 0.0)
    """
    match kernel.work:
        case ElementwiseWork(op=EngineOp.HOST, rows=microseconds):
            return 1e-6 * microseconds
        case _:
            return 0.0


def permute_kernel(name: str, rows: int, width: int) -> Kernel:
    """A copy of 16-bit elements that sorts runs of rows by rank, before or after an all-to-all."""
    return elementwise_kernel(name, Elementwise.PERMUTE_COPY, rows, width, 2 * rows * width * DType.BF16.bytes)


def exchange_kernel(
    name: str, ranks: tuple[int, ...], elements: int, op: CollectiveOp = CollectiveOp.ALL_TO_ALL
) -> Kernel:
    """A collective over a buffer of 16-bit ``elements``."""
    buffer = elements * DType.BF16.bytes
    work = CollectiveWork(op=op, ranks=ranks, buffer_bytes=buffer)
    return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(buffer))
