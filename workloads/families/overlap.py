"""Sequence-parallel layers with communication cut along tokens and run beside the GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workloads.errors import WorkloadError
from workloads.kernels import Shape, attention_kernel, elementwise_kernel, gemm_kernel
from workloads.ops import Attention, Gemm, Pointwise
from workloads.program import Kernel
from workloads.work import CollectiveOp, CollectiveWork, DType, Elementwise

COMM_STREAM = 1
COMM_PRIORITY = -1  # lower runs first, as in CUDA


@dataclass(slots=True)
class _Layer:
    """Kernels in launch order, with the index of each as it is added."""

    kernels: list[Kernel] = field(default_factory=list)

    def add(self, kernel: Kernel, after: tuple[int, ...] = ()) -> int:
        self.kernels.append(replace(kernel, after=after))
        return len(self.kernels) - 1


def overlapped_layer(shape: Shape, chunks: int, ctas: int | None) -> list[Kernel]:
    """One layer as the overlap records run it; one chunk is sequential in one stream.

    Norm on T/tp rows; all-gather + QKV GEMM; attention; output GEMM + reduce-scatter; norm; all-gather +
    gate-up GEMM (+ SiLU-multiply per chunk); down GEMM + reduce-scatter. With more than one chunk the i-th
    collective runs on a second, higher-priority stream while the next chunk's GEMM runs.
    """
    tokens, tp = shape.tokens, shape.layout.tp
    if tokens % (chunks * tp):
        raise WorkloadError(f"overlap_chunks = {chunks}: does not divide the {tokens} tokens over tp = {tp} ranks")
    if shape.model.experts or shape.model.latent:
        raise WorkloadError(
            f"sequence_parallel: the layers of {shape.model.id} are not the plain decoder's: use tp and ep"
        )
    nodes = {node.name: node for node in shape.model.block.nodes if isinstance(node, Gemm | Attention | Pointwise)}
    try:
        qkv, out, up, down = (nodes[name] for name in ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm"))
        attention = nodes["attention"]
    except KeyError as missing:
        raise WorkloadError(f"sequence_parallel: {shape.model.id} has no node {missing} to overlap") from None
    assert isinstance(attention, Attention)
    assert isinstance(qkv, Gemm) and isinstance(out, Gemm) and isinstance(up, Gemm) and isinstance(down, Gemm)
    layer = _Layer()
    width, element = shape.model.d_model, DType.BF16.bytes
    silu_width = shape.model.d_ff // tp

    def norm(name: str, after: tuple[int, ...]) -> int:
        rows = tokens // tp
        kernel = elementwise_kernel(name, Elementwise.ADD_RMSNORM, rows, width, 4 * rows * width * element)
        return layer.add(kernel, after)

    def silu(rows: int) -> Kernel:
        return elementwise_kernel("silu_mul", Elementwise.SILU_MUL, rows, silu_width, 3 * rows * silu_width * element)

    rows = tokens // chunks

    def gathered(name: str, node: Gemm, normed: int, *, with_silu: bool) -> None:
        """All-gather of each chunk, then its GEMM."""
        gathers: list[int] = []
        for i in range(chunks):
            comm = _collective(f"all_gather_{name}", CollectiveOp.ALL_GATHER, shape, rows, chunks, ctas)
            gathers.append(layer.add(comm, (normed,) if i == 0 and chunks > 1 else ()))
            layer.add(gemm_kernel(node.name, node.ops, shape, DType.BF16, tokens=rows), _cross(gathers[i], chunks))
            if with_silu:
                layer.add(silu(rows))

    def scattered(name: str, node: Gemm) -> int:
        """GEMM of each chunk, then its reduce-scatter; returns the last one."""
        last = -1
        for _ in range(chunks):
            made = layer.add(gemm_kernel(node.name, node.ops, shape, DType.BF16, tokens=rows))
            comm = _collective(f"reduce_scatter_{name}", CollectiveOp.REDUCE_SCATTER, shape, rows, chunks, ctas)
            last = layer.add(comm, _cross(made, chunks))
        return last

    normed = norm("add_rmsnorm_attn", ())
    gathered("attn", qkv, normed, with_silu=False)
    heads = shape.q_heads + 2 * shape.kv_heads
    if chunks > 1:
        qkv_width = heads * shape.model.head_dim
        moved = 2 * tokens * qkv_width * element
        layer.add(elementwise_kernel("concat_qkv", Elementwise.COPY, tokens, qkv_width, moved))
    rotated = shape.q_heads + shape.kv_heads
    rope_width = rotated * shape.model.head_dim
    layer.add(
        elementwise_kernel(
            "rope",
            Elementwise.ROPE,
            tokens,
            rope_width,
            2 * tokens * rope_width * element,
            blocks=tokens * rotated,
        )
    )
    layer.add(attention_kernel(attention, shape))
    reduced = scattered("attn", out)
    normed = norm("add_rmsnorm_ff", _cross(reduced, chunks))
    gathered("ff", up, normed, with_silu=True)
    scattered("ff", down)
    return layer.kernels


def _cross(index: int, chunks: int) -> tuple[int, ...]:
    """A dependency that only needs saying when communication has its own stream."""
    return (index,) if chunks > 1 else ()


def _collective(name: str, op: CollectiveOp, shape: Shape, rows: int, chunks: int, ctas: int | None) -> Kernel:
    buffer = rows * shape.model.d_model * DType.BF16.bytes
    return Kernel(
        name=name,
        work=CollectiveWork(op=op, ranks=shape.layout.ranks, buffer_bytes=buffer, ctas=ctas),
        flops=0.0,
        bytes_moved=float(buffer),
        stream=COMM_STREAM if chunks > 1 else 0,
        priority=COMM_PRIORITY if chunks > 1 else 0,
    )
