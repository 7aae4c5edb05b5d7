"""Expert products of vLLM (Triton's fused_moe) and their helpers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.calibrate.suite.case import Case
from hardware.calibrate.suite.timing import Bench

Row = Mapping[str, Any]
INPUT_SETS = 8


def experts_case(bench: Bench, row: Row) -> Case:
    """Experts of one layer: the whole chain (``part`` all), or one of its two products alone.

    ``experts`` chosen among, ``local`` of them here; ``routing`` draws ``top_k`` different ones a token with
    probability ~ rank^-skew, a new draw each repetition.
    """
    from vllm.model_executor.layers.fused_moe import fused_moe as fm
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
    from vllm.triton_utils import tl

    torch, device = bench.torch, bench.device
    experts, local, hidden, ff = row["experts"], row["local"], row["hidden"], row["ff"]
    tokens, top_k, eight = row["tokens"], row["top_k"], row["dtype"] == "fp8_e4m3"
    block = list(row["block"]) if row.get("block") else None
    w1, w2 = _weights(bench, local, 2 * ff, hidden, eight), _weights(bench, local, hidden, ff, eight)
    scales = [_scales(bench, w, block) for w in (w1, w2)] if eight else [None, None]
    quant = fp8_w8a8_moe_quant_config(w1_scale=scales[0], w2_scale=scales[1], block_shape=block) if eight else None
    x = bench.randn(tokens, hidden)
    chance = torch.arange(1, experts + 1, device=device, dtype=torch.float32) ** -float(row["skew"])
    chance = chance[torch.randperm(experts, device=device)]
    sets = [torch.multinomial(chance.expand(tokens, -1), top_k).to(torch.int32) for _ in range(INPUT_SETS)]
    weights = torch.rand(tokens, top_k, device=device, dtype=torch.float32)
    where = None
    if local < experts:
        where = torch.full((experts,), -1, device=device, dtype=torch.int32)
        where[:local] = torch.arange(local, device=device, dtype=torch.int32)
    config = fm.try_get_optimal_moe_config(
        w1.size(), w2.size(), top_k, "fp8_w8a8" if eight else None, tokens, block_shape=block
    )
    rows = [torch.bincount(tensors.flatten().long(), minlength=experts)[:local] for tensors in sets]
    facts = {
        "rows": sum(int(row.sum()) for row in rows) / INPUT_SETS,
        "distinct": sum(int((row > 0).sum()) for row in rows) / INPUT_SETS,
        "tiles": sum(int((-(-row // config["BLOCK_SIZE_M"])).sum()) for row in rows) / INPUT_SETS,
        "config": config,
    }
    if row["part"] == "all":

        def chain(i: int) -> object:
            return fm.fused_experts(
                x,
                w1,
                w2,
                weights,
                sets[i % INPUT_SETS],
                global_num_experts=experts,
                expert_map=where,
                quant_config=quant,
            )

        return Case(launch=chain, rotate=INPUT_SETS, kernels_each=8, facts=facts)
    down = row["part"] == "down"
    a = bench.randn(tokens * top_k, ff) if down else x
    w, scale, each = (w2, scales[1], 1) if down else (w1, scales[0], top_k)
    out = bench.empty(tokens, top_k, w.size(1))
    a8, a_scale = moe_kernel_quantize_input(
        A=a,
        A_scale=None,
        quant_dtype=torch.float8_e4m3fn if eight else None,
        per_act_token_quant=False,
        block_shape=block,
    )
    sorted_sets = [fm._prepare_expert_assignment(tensors, config, tokens, top_k, experts, where) for tensors in sets]

    def product(i: int) -> object:
        token_ids, expert_ids, padded = sorted_sets[i % INPUT_SETS]
        return fm.dispatch_fused_moe_kernel(
            a8,
            w,
            out,
            a_scale,
            scale,
            None,
            weights,
            token_ids,
            expert_ids,
            padded,
            down,
            each,
            config,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=eight,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            block_shape=block,
        )

    return Case(launch=product, rotate=INPUT_SETS, facts=facts)


def _weights(bench: Bench, count: int, n: int, k: int, eight: bool) -> Any:
    """Random weights [count, n, k], made expert by expert so that FP8 ones need no bf16 copy of all."""
    torch = bench.torch
    dtype = torch.float8_e4m3fn if eight else torch.bfloat16
    out = torch.empty(count, n, k, device=bench.device, dtype=dtype)
    for i in range(count):
        weight = bench.randn(n, k)
        out[i] = (weight if eight else weight * 0.02).to(dtype)
    return out


def _scales(bench: Bench, weight: Any, block: list[int] | None) -> Any:
    torch = bench.torch
    count, n, k = weight.shape
    shape = (count,) if block is None else (count, -(-n // block[0]), -(-k // block[1]))
    return torch.full(shape, 0.02, device=bench.device, dtype=torch.float32)


def expert_helper(bench: Bench, row: Row) -> Case:
    """SiLU-multiply over routed rows, or the sum over a token's experts, as the expert chain calls them."""
    from vllm import _custom_ops as ops

    torch, tokens, width, top_k = bench.torch, row["tokens"], row["width"], row["top_k"]
    if row["kind"] == "vllm_act":
        gate_up, out = bench.randn(tokens * top_k, 2 * width), bench.empty(tokens * top_k, width)
        return Case(launch=lambda _: torch.ops._C.silu_and_mul(out, gate_up))
    rows, out = bench.randn(tokens, top_k, width), bench.empty(tokens, width)
    return Case(launch=lambda _: ops.moe_sum(rows, out))
