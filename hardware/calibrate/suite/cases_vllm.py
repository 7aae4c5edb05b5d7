"""Kernels of a real vLLM installation, one planned row each; imported only where ``vllm`` can be.

Written for vLLM 0.24: the calls are those that its layers make (Triton experts, FlashAttention 3 on a paged cache,
CUTLASS scaled products, Inductor's fused elementwise kernels, custom all-reduce, the sampler), so that a row times
what a server runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hardware.calibrate.suite.case import Case
from hardware.calibrate.suite.cases_vllm_experts import expert_helper, experts_case
from hardware.calibrate.suite.cases_vllm_lora import adapter_case
from hardware.calibrate.suite.timing import Bench, capture, steady, together
from hardware.errors import HardwareError

Row = Mapping[str, Any]
PAGE_TOKENS = 16
# Splits over the cache that vLLM allows while it captures graphs (attention_config of 0.24).
GRAPH_SPLITS = 32
# Tokens of the step with which the server compiles: its largest, by default.
FULL_STEP_TOKENS = 8192
_KEPT_BUFFERS_BYTES = 256 << 20
_ALL_REDUCES = 200


def build_vllm(bench: Bench, row: Row) -> Case:
    """The work of a row whose kind begins with ``vllm_``."""
    match row["kind"]:
        case "vllm_experts":
            return experts_case(bench, row)
        case "vllm_attention":
            return _attention(bench, row)
        case "vllm_scaled_gemm":
            return _scaled_gemm(bench, row)
        case "vllm_quantise":
            return _quantise(bench, row)
        case "vllm_cache_write":
            return _cache_write(bench, row)
        case "vllm_compiled":
            return _compiled(bench, row)
        case "vllm_gate":
            return _gate(bench, row)
        case "vllm_act" | "vllm_expert_sum":
            return expert_helper(bench, row)
        case "vllm_sample":
            return _sample(bench, row)
        case "vllm_adapter":
            return adapter_case(bench, row)
        case other:
            raise HardwareError(f"the suite has no kernel of vLLM '{other}'")


def _attention(bench: Bench, row: Row) -> Case:
    """FlashAttention 3 over a paged cache: one query token a sequence (decode), or ``seq_len`` of ``kv_len``."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    torch, device = bench.torch, bench.device
    batch, heads, kv_heads, size = row["batch"], row["q_heads"], row["kv_heads"], row["head_dim"]
    decode = row["phase"] == "decode"
    queries = 1 if decode else row["seq_len"]
    context = row.get("kv_len", row["seq_len"])
    eight = row["kv_dtype"] == "fp8_e4m3"
    dtype = torch.float8_e4m3fn if eight else torch.bfloat16
    pages = -(-context // PAGE_TOKENS)
    cached = 2 * batch * context * kv_heads * size * (1 if eight else 2)
    copies = min(16, max(1, -(-_KEPT_BUFFERS_BYTES // cached))) if decode else 1
    caches = [bench.randn(2, batch * pages, PAGE_TOKENS, kv_heads, size).to(dtype) for _ in range(copies)]
    table = torch.randperm(batch * pages, device=device).to(torch.int32).view(batch, pages)
    q = bench.randn(batch * queries, heads, size).to(dtype)
    out = bench.empty(batch * queries, heads, size)
    used = torch.full((batch,), context, device=device, dtype=torch.int32)
    starts = torch.arange(0, (batch + 1) * queries, queries, device=device, dtype=torch.int32)
    splits = GRAPH_SPLITS if decode else 0
    unit = torch.ones((batch, kv_heads), device=device, dtype=torch.float32) if eight else None
    planned = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=queries,
        max_seqlen_k=context,
        num_heads_q=heads,
        num_heads_kv=kv_heads,
        headdim=size,
        cache_seqlens=used,
        qkv_dtype=dtype,
        cu_seqlens_q=starts,
        page_size=PAGE_TOKENS,
        causal=True,
        num_splits=splits,
    )

    def launch(i: int) -> object:
        cache = caches[i % copies]
        return flash_attn_varlen_func(
            q=q,
            k=cache[0],
            v=cache[1],
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=queries,
            seqused_k=used,
            max_seqlen_k=context,
            softmax_scale=size**-0.5,
            causal=True,
            block_table=table,
            scheduler_metadata=planned,
            fa_version=3,
            num_splits=splits,
            q_descale=unit,
            k_descale=unit,
            v_descale=unit,
        )

    return Case(launch=launch, rotate=copies, kernels_each=2 if decode else 1)


def _scaled_gemm(bench: Bench, row: Row) -> Case:
    """CUTLASS FP8 product: activations scaled per token and weights per tensor, or both by blocks of 128."""
    from vllm import _custom_ops as ops

    torch, device = bench.torch, bench.device
    m, n, k, block = row["m"], row["n"], row["k"], row["scales"] == "block"
    weights = [(w * 50).to(torch.float8_e4m3fn) for w in bench.weights(n, k, span_bytes=512 << 20)]
    ones = functools.partial(torch.ones, device=device, dtype=torch.float32)
    if block:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        x, scale_a = per_token_group_quant_fp8(bench.randn(m, k), 128, column_major_scales=True)
        scale_b = ones((-(-n // 128), k // 128)).t()
    else:
        x, scale_a, scale_b = bench.randn(m, k).to(torch.float8_e4m3fn), ones((m, 1)), ones((1,))

    def launch(i: int) -> object:
        return ops.cutlass_scaled_mm(x, weights[i % len(weights)].t(), scale_a, scale_b, torch.bfloat16)

    return Case(launch=launch, rotate=len(weights))


def _quantise(bench: Bench, row: Row) -> Case:
    """bf16 activations to FP8 with a scale a token, or a scale for each 128 of a token."""
    x = bench.randn(row["tokens"], row["width"])
    if row["scales"] == "block":
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        return Case(launch=lambda _: per_token_group_quant_fp8(x, 128, column_major_scales=True))
    from vllm import _custom_ops as ops

    return Case(launch=lambda _: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True))


def _cache_write(bench: Bench, row: Row) -> Case:
    from vllm import _custom_ops as ops

    torch, device, tokens, heads = bench.torch, bench.device, row["tokens"], row["kv_heads"]
    qkv = bench.randn(tokens, 6 * heads, 128)
    pages = max(4096, 2 * -(-tokens // PAGE_TOKENS))
    cache = bench.empty(2, pages, PAGE_TOKENS, heads, 128)
    slots = torch.randperm(pages * PAGE_TOKENS, device=device)[:tokens]
    unit = torch.ones((), device=device, dtype=torch.float32)

    def launch(_: int) -> object:
        return ops.reshape_and_cache_flash(
            qkv[:, :heads], qkv[:, heads : 2 * heads], cache[0], cache[1], slots, "auto", unit, unit
        )

    return Case(launch=launch)


def _compiled(bench: Bench, row: Row) -> Case:
    """What Inductor makes of the elementwise parts of a layer; ``how`` names them.

    As the server compiles them (``sizes`` = "any"): once, for any number of tokens, tuned on a full step of
    :data:`FULL_STEP_TOKENS`. Rows without ``sizes`` were compiled for their own number. ``combined``: kernels that
    depend on nothing of one another are one, as the server asks for (queries and keys rotated).
    """
    torch, any_size = bench.torch, row.get("sizes") == "any"
    if any_size:
        torch._dynamo.reset()  # else a width that differs from the last row's becomes a variable too
    function, inputs = _elementwise_part(bench, row, row["tokens"])
    options = {"combo_kernels": True, "benchmark_combo_kernel": True} if row.get("combined") else None
    ready = torch.compile(function, dynamic=None if any_size else False, options=options)
    if any_size:
        full_step = _elementwise_part(bench, row, FULL_STEP_TOKENS)[1]
        for tensor in full_step:
            if tensor.shape[0] == FULL_STEP_TOKENS and (tensor.ndim > 1 or not tensor.is_floating_point()):  # no gain
                torch._dynamo.mark_dynamic(tensor, 0)
        ready(*full_step)
    return Case(launch=lambda _: ready(*inputs))


def _elementwise_part(bench: Bench, row: Row, tokens: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function of a row of :func:`_compiled`, and its inputs for ``tokens``; tokens come first in every tensor."""
    torch, device, width = bench.torch, bench.device, row["width"]
    finest = 448.0

    def norm(x: Any, residual: Any, gain: Any) -> tuple[Any, Any]:
        total = x.float() + residual.float()
        scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * gain, total.to(x.dtype)

    def silu(gate_up: Any) -> Any:
        half = gate_up.shape[-1] // 2
        return torch.nn.functional.silu(gate_up[..., :half]) * gate_up[..., half:]

    def eight(y: Any) -> tuple[Any, Any]:
        scale = (y.abs().amax(-1, keepdim=True).float() / finest).clamp(min=1e-10)
        return (y.float() * scale.reciprocal()).clamp(-finest, finest).to(torch.float8_e4m3fn), scale

    def norm_eight(x: Any, residual: Any, gain: Any) -> tuple[Any, ...]:
        y, total = norm(x, residual, gain)
        return (*eight(y), total)

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def rope(qkv: Any, positions: Any, table: Any) -> tuple[Any, Any]:
        queries = (width // 128 - row["kv_heads"]) * 128
        cos, sin = (part.unsqueeze(-2) for part in table.index_select(0, positions).chunk(2, dim=-1))
        return tuple(
            turned(part.unflatten(-1, (-1, 128)), cos, sin).flatten(1)
            for part in (qkv[:, :queries], qkv[:, queries:width])
        )

    def rotated_alone(x: Any, cos: Any, sin: Any) -> Any:
        return turned(x, cos, sin)

    match row["how"]:
        case "add_rmsnorm" | "add_rmsnorm_fp8" as how:
            inputs = (bench.randn(tokens, width), bench.randn(tokens, width), bench.randn(width))
            return norm if how == "add_rmsnorm" else norm_eight, inputs
        case "silu_mul":
            return silu, (bench.randn(tokens, 2 * width),)
        case "silu_mul_fp8":
            return lambda y: eight(silu(y)), (bench.randn(tokens, 2 * width),)
        case "quantise":
            return eight, (bench.randn(tokens, width),)
        case "rope" if "kv_heads" in row:
            qkv = bench.randn(tokens, width + 128 * row["kv_heads"])
            positions = torch.arange(tokens, device=device) % 4096
            return rope, (qkv, positions, bench.randn(FULL_STEP_TOKENS + 1, 128))
        case "rope":
            cos, sin = bench.randn(tokens, 1, 64), bench.randn(tokens, 1, 64)
            return rotated_alone, (bench.randn(tokens, width // 128, 128), cos, sin)
        case other:
            raise HardwareError(f"the suite has no compiled kernel of vLLM '{other}'")


def _gate(bench: Bench, row: Row) -> Case:
    from vllm import _custom_ops as ops

    torch, device, tokens = bench.torch, bench.device, row["tokens"]
    logits = bench.randn(tokens, row["experts"])
    weights = torch.empty(tokens, row["top_k"], device=device, dtype=torch.float32)
    ids = torch.empty(tokens, row["top_k"], device=device, dtype=torch.int32)
    index = torch.empty(tokens, row["top_k"], device=device, dtype=torch.int32)
    return Case(launch=lambda _: ops.topk_softmax(weights, ids, index, logits, True))


def _sample(bench: Bench, row: Row) -> Case:
    """From bf16 logits to a token a sequence: the cast, Gumbel noise with argmax by blocks, the final argmax."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    torch, device, rows = bench.torch, bench.device, row["rows"]
    logits = bench.randn(rows, row["width"])
    index = torch.arange(rows, device=device, dtype=torch.int32)
    temperature = torch.full((rows,), float(row["temperature"]), device=device)
    seed = torch.zeros(rows, device=device, dtype=torch.int64)
    place = torch.arange(rows, device=device, dtype=torch.int64)

    def launch(_: int) -> object:
        return gumbel_sample(logits.float(), index, temperature, seed, place, apply_temperature=True)

    return Case(launch=launch, kernels_each=4)


def measure_vllm_all_reduce(bench: Bench, row: Row) -> dict[str, Any]:
    """vLLM's own all-reduce (one or two stages over peer memory), many in one graph."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    torch = bench.torch
    group = torch.distributed.new_group(backend="gloo")
    own = CustomAllreduce(group, bench.device)
    if own.disabled:
        raise HardwareError("vLLM's custom all-reduce is disabled on this machine")
    x = bench.randn(row["bytes"] // 2)

    def body() -> None:
        for _ in range(_ALL_REDUCES):
            own.custom_all_reduce(x)

    try:
        with own.capture():
            replay = capture(bench, body)
        return together(bench, steady(bench, replay, _ALL_REDUCES))
    finally:
        bench.synchronize()
        own.close()
