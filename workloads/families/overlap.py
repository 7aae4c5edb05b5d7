"""Sequence-parallel layers: norms on slices of the tokens, collectives before and after every pair of products."""

from __future__ import annotations

from workloads.errors import WorkloadError
from workloads.families.pairs import LayerBuilder, Pointwise, Schedule
from workloads.kernels import Shape, attention_kernel, elementwise_kernel
from workloads.ops import Attention, Experts, Gemm
from workloads.program import Kernel
from workloads.shard import shard
from workloads.work import DType, Elementwise


def overlapped_layer(shape: Shape, schedule: Schedule) -> list[Kernel]:
    """One layer as the overlap records run it, each pair of product and collective by ``schedule``.

    Norm on T/tp rows; all-gather + QKV GEMM; attention; output GEMM + reduce-scatter; norm; all-gather +
    gate-up GEMM (+ SiLU-multiply per chunk); down GEMM + reduce-scatter. With more than one chunk the i-th
    collective runs on a second, higher-priority stream while the next chunk's GEMM runs.
    """
    qkv, attention, out, up, down = _nodes(shape)
    tokens, tp, pieces = shape.tokens, shape.layout.tp, schedule.pieces
    if tokens % (pieces * tp):
        raise WorkloadError(f"overlap_chunks = {pieces}: does not divide the {tokens} tokens over tp = {tp} ranks")
    layer = LayerBuilder(shape=shape, schedule=schedule)
    model, element = shape.model, DType.BF16.bytes
    norm = Pointwise(name="add_rmsnorm_attn", op=Elementwise.ADD_RMSNORM, width=model.d_model, passes=4)
    layer.gathered("attn", qkv, layer.add(norm.kernel(tokens // tp)))
    if schedule.kind == "chunks" and pieces > 1:  # the others write into one output
        width = (shape.q_heads + 2 * shape.kv_heads) * model.head_dim
        layer.add(elementwise_kernel("concat_qkv", Elementwise.COPY, tokens, width, 2 * tokens * width * element))
    rotated = shape.q_heads + shape.kv_heads
    moved = 2 * tokens * rotated * model.head_dim * element
    layer.add(
        elementwise_kernel("rope", Elementwise.ROPE, tokens, rotated * model.head_dim, moved, blocks=tokens * rotated)
    )
    layer.add(attention_kernel(attention, shape))
    reduced = layer.scattered("attn", out)
    norm = Pointwise(name="add_rmsnorm_ff", op=Elementwise.ADD_RMSNORM, width=model.d_model, passes=4)
    silu = Pointwise(name="silu_mul", op=Elementwise.SILU_MUL, width=model.d_ff // tp, passes=3)
    layer.gathered("ff", up, layer.add(norm.kernel(tokens // tp), reduced), silu)
    layer.scattered("ff", down)
    return layer.kernels


def _nodes(shape: Shape) -> tuple[Gemm, Attention, Gemm, Gemm, Gemm]:
    """QKV product, attention, output, gate-up and down products of the plain decoder layer."""
    model = shape.model
    usual = {"add_rmsnorm_attn", "qkv_gemm", "qk_norm", "rope", "attention", "o_gemm", "add_rmsnorm_ff",
             "gate_up_gemm", "silu_mul", "down_gemm", "all_reduce_attn", "all_reduce_down"}  # fmt: skip
    other = {node.name for node in shard(model.block.nodes) if not isinstance(node, Experts)} - usual
    if model.experts or model.latent or model.pattern or other or any(shape.context > one for one in model.windows):
        raise WorkloadError(f"sequence_parallel: {model.id} has other layers than a plain decoder: use tp and ep")
    nodes = {node.name: node for node in model.block.nodes if isinstance(node, Gemm | Attention)}
    try:
        attention = nodes["attention"]
        gemms = [nodes[name] for name in ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm")]
    except KeyError as missing:
        raise WorkloadError(f"sequence_parallel: {model.id} has no node {missing} to overlap") from None
    assert isinstance(attention, Attention)
    qkv, out, up, down = (gemm for gemm in gemms if isinstance(gemm, Gemm))
    return qkv, attention, out, up, down
