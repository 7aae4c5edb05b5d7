"""Nodes of a decoder as the kernels that a serving engine makes of them (:mod:`workloads.engine`)."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from workloads.engine import Pass, ServingEngine, load_engine
from workloads.families.moe import grouped_sizes
from workloads.kernel_names import CollectiveOp, Elementwise, EngineOp
from workloads.kernels import Shape, attention_kernel, elementwise_kernel, gemm_kernel, host_kernel
from workloads.layer_passes.tree import Combine, ExpertAct, ExpertRouter, ExpertRows, Grouped, SampleToken
from workloads.ops import Attention, Gemm, Op, Pointwise, width_of
from workloads.program import Kernel
from workloads.routing import SMALL_TILES, ExpertLoad
from workloads.work import AttentionWork, CollectiveWork, DType, ElementwiseWork, GemmWork, RoutedGemmWork


def pass_kernel(name: str, engine: ServingEngine, one: Pass, rows: int, width: int) -> Kernel:
    """A memory-bound kernel of the engine over ``rows`` x ``width`` elements."""
    return _own(name, engine, one.op, rows, width, one.element_bytes * rows * width)


def _own(name: str, engine: ServingEngine, op: EngineOp, rows: int, width: int, bytes_moved: int) -> Kernel:
    work = ElementwiseWork(op=op, rows=rows, width=width, bytes_moved=bytes_moved, engine=engine.id)
    return Kernel(name=name, work=work, flops=float(rows * width), bytes_moved=float(bytes_moved))


def pointwise_kernels(node: Pointwise, shape: Shape, engine: ServingEngine, *, experts: bool) -> list[Kernel]:
    """A norm, rotation or activation; the one before a router stays in 16 bit. None: the libraries' kernel runs."""
    dtype = shape.precision.product.multiplies
    before_router = experts and node.name == "add_rmsnorm_ff"
    one = engine.pass_of(node.op.value, DType.BF16 if before_router else dtype)
    if one is None:
        return []
    heads, size = shape.q_heads + (0 if node.queries else shape.kv_heads), shape.model.head_dim
    match node.op:
        case Elementwise.ADD_RMSNORM:
            return [pass_kernel(node.name, engine, one, shape.tokens, shape.model.d_model)]
        case Elementwise.RMSNORM:
            return [pass_kernel(node.name, engine, one, shape.tokens, heads * size)]
        case Elementwise.ROPE:
            return [pass_kernel(node.name, engine, one, shape.tokens, heads * size)]
        case _:
            return [pass_kernel(node.name, engine, one, shape.tokens, width_of(node, shape.local_sizes(node.parallel)))]


def product_kernels(node: Gemm, shape: Shape, engine: ServingEngine) -> list[Kernel]:
    """A product, its input quantised first where nothing before it has done so."""
    dtype = shape.precision.product.multiplies
    product = _product(node.name, node.ops, shape, engine, dtype)
    kernels = [product]
    if dtype is DType.FP8 and node.name in engine.quantised_alone:
        assert isinstance(product.work, GemmWork)
        kernels.insert(0, pass_kernel(f"quantise_{node.name}", engine, engine.quantise, shape.tokens, product.work.k))
    return kernels


def _product(name: str, ops: tuple[Op, ...], shape: Shape, engine: ServingEngine, dtype: DType) -> Kernel:
    kernel = gemm_kernel(name, ops, shape, dtype)
    if dtype is DType.FP8:
        assert isinstance(kernel.work, GemmWork)
        kernel = replace(kernel, work=replace(kernel.work, engine=engine.id, scales="token"))
    return kernel


def own_where_small(kernel: Kernel, engine: ServingEngine) -> Kernel:
    """A collective as the engine runs it: all-reduces of small buffers by its own kernel."""
    work = kernel.work
    assert isinstance(work, CollectiveWork)
    if work.op is not CollectiveOp.ALL_REDUCE or work.buffer_bytes > engine.own_all_reduce_bytes:
        return kernel
    return replace(kernel, work=replace(work, engine=engine.id))


def engine_attention(node: Attention, shape: Shape, engine: ServingEngine) -> list[Kernel]:
    """Flash attention over the pages of the cache, where a layer's new keys and values were written before it."""
    return [*written_keys(node, shape, engine), paged_attention(node, shape, engine)]


def paged_attention(node: Attention, shape: Shape, engine: ServingEngine) -> Kernel:
    """Flash attention over the pages of the cache."""
    kernel = attention_kernel(node, shape)
    assert isinstance(kernel.work, AttentionWork)
    return replace(kernel, work=replace(kernel.work, engine=engine.id))


def written_keys(node: Attention, shape: Shape, engine: ServingEngine) -> list[Kernel]:
    """Keys and values of all tokens of a step on their way into the cache; an encoder keeps none."""
    if node.shared or not shape.model.causal:
        return []
    written = shape.kv_heads * shape.model.key_and_value
    return [pass_kernel("cache_write", engine, engine.cache, shape.tokens, written)]


def engine_part(
    node: ExpertRouter | ExpertRows | Grouped | ExpertAct | Combine | SampleToken,
    shape: Shape,
    load: ExpertLoad | None,
    engine: ServingEngine,
) -> list[Kernel]:
    """Router, choice, sorting, the two products over sorted rows with the activation between, and the sum; and what
    draws a token from the logits and prepares the next step."""
    model, layout, tokens = shape.model, shape.layout, shape.tokens
    around, width, chosen = engine.experts, model.routed_width, tokens * model.top_k
    match node:
        case ExpertRouter():
            return [gemm_kernel(node.name, (node.op,), shape, DType.BF16)]
        case ExpertRows(name="gather"):
            gate = tokens * (around.gate_bytes[0] * model.experts + around.gate_bytes[1] * model.top_k)
            kernels = [_own("gate", engine, EngineOp.GATE, tokens, model.experts, gate)]
            if chosen > around.unsorted_share * model.experts:
                kernels.append(_own("sort_rows", engine, EngineOp.SORT, tokens, 1, 0))
            if layout.ep > 1:
                kernels.append(_own("map_experts", engine, EngineOp.MAP, tokens, 1, 0))
            return kernels
        case ExpertRows():
            return []
        case Grouped():
            assert load is not None
            return _grouped(node, shape, load, engine)
        case ExpertAct():
            inner = shape.local_sizes(node.down.parallel)["f"]
            moved = around.act_bytes * chosen * inner
            return [_own("silu_mul", engine, EngineOp.EXPERT_ACT, chosen, inner, moved)]
        case Combine():
            moved = DType.BF16.bytes * (model.top_k + 1) * tokens * width
            copied = around.copy_bytes * tokens * width
            return [
                _own("expert_sum", engine, EngineOp.EXPERT_SUM, tokens, width, moved),
                elementwise_kernel("copy_experts", Elementwise.COPY, tokens, width, copied),
            ]
        case SampleToken():
            return _sample(shape, engine)
    assert_never(node)


def _grouped(node: Grouped, shape: Shape, load: ExpertLoad, engine: ServingEngine) -> list[Kernel]:
    dtype = shape.precision.product.multiplies
    n, k = grouped_sizes(node.ops, shape)
    name = "gate_up_experts" if node.first else "down_experts"
    rows = shape.tokens if node.first else shape.tokens * shape.model.top_k
    inner = shape.local_sizes(node.ops[0].parallel)["f"]
    tiles = (*zip(SMALL_TILES, load.small_tiles, strict=True), (128, load.tiles128))
    work = RoutedGemmWork(
        engine=engine.id,
        experts=shape.model.experts // shape.layout.ep,
        inner=inner,
        tokens=shape.tokens,
        rows=load.rows,
        distinct=load.distinct,
        tiles=tiles,
        n=n,
        k=k,
        dtype=dtype,
    )
    moved = dtype.bytes * (load.distinct * n * k + load.rows * k) + DType.BF16.bytes * load.rows * n
    product = Kernel(name=name, work=work, flops=2.0 * load.rows * n * k, bytes_moved=float(moved))
    if dtype is not DType.FP8:
        return [product]
    return [pass_kernel(f"quantise_{name}", engine, engine.experts.quantise, rows, k), product]


def _sample(shape: Shape, engine: ServingEngine) -> list[Kernel]:
    """A token a sequence from the logits of all ranks together, and what prepares the next step."""
    rows, vocabulary = shape.batch, shape.model.vocab
    kernels = []
    if shape.layout.tp > 1:
        copied = 2 * rows * vocabulary * DType.BF16.bytes
        kernels.append(elementwise_kernel("copy_logits", Elementwise.COPY, rows, vocabulary, copied))
    moved = engine.sample_bytes * rows * vocabulary
    kernels += [
        _own("sample", engine, EngineOp.SAMPLE_GREEDY, rows, vocabulary, moved),
        _own("next_step", engine, EngineOp.SMALL, engine.small_kernels, 1, 0),
    ]
    if shape.layout.dcp > 1:
        kernels.append(host_kernel("host_lengths", engine.host.cache_shards_s, engine.id))
    return kernels


def engine_of(stack_engine: str | None) -> ServingEngine | None:
    """The engine behind a stack, if one is."""
    return None if stack_engine is None else load_engine(stack_engine)
