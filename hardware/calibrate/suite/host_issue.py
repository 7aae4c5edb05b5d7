"""What one launch costs the host in eager mode: seconds that Python and PyTorch take to issue each operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from hardware.calibrate.suite.layers import Layer, Norm, Projection, Rotary
from hardware.calibrate.suite.shapes import HEAD_DIM, shape_of
from hardware.calibrate.suite.timing import Bench

Row = Mapping[str, Any]
WORKS = (
    "linear", "linear_fp8", "add_rmsnorm", "rope", "silu_mul", "kv_copy", "attention_decode", "attention_prefill",
    "attend_token", "attend_prompt", "decode_layer", "gather", "grouped_gemm",
)  # fmt: skip
# Kernels that one call launches, where it is not one.
LAUNCHES = {"linear_fp8": 2, "attend_token": 3, "decode_layer": 11}
# Fewer than the launches that a stream may hold waiting (1,024), so that the host never waits for the GPU.
_LAUNCHES = 256
_REPEATS = 15
_WIDTH, _FF, _HEADS, _KV_HEADS, _ROWS = 4096, 14336, 32, 8, 4


def measure_host_issue(bench: Bench, row: Row) -> dict[str, Any]:
    """Median host seconds a call over launches that nothing waits for, and seconds until the GPU has done them."""
    launch = _launcher(bench, str(row["work"]))
    issue_s, done_s = [], []
    launches = 2 if bench.dry else _LAUNCHES // LAUNCHES.get(row["work"], 1)
    for _ in range(2 if bench.dry else _REPEATS):
        bench.synchronize()
        begin = time.perf_counter()
        for _ in range(launches):
            launch()
        issue_s.append((time.perf_counter() - begin) / launches)
        bench.synchronize()
        done_s.append((time.perf_counter() - begin) / launches)
    return {"host_s": statistics.median(issue_s), "done_s": statistics.median(done_s), "calls": launches}


def _launcher(bench: Bench, work: str) -> Callable[[], object]:
    """One operation of the reference stack as an eager step calls it, small enough to end before the next.

    ``attend_token`` is three launches (K and V into the cache, attention) and the views between them.
    ``decode_layer`` is all eleven of a dense layer, one after the other as a step has them: less of the host's work
    is still in its caches than when one call repeats.
    """
    x, kernels = bench.randn(_ROWS, _WIDTH), bench.kernels
    q, cache = bench.randn(_ROWS, _HEADS, 1, HEAD_DIM), bench.randn(2, _ROWS, _KV_HEADS, 256, HEAD_DIM)
    match work:
        case "linear" | "linear_fp8":
            projection = Projection(bench, _WIDTH, _WIDTH, fp8=work == "linear_fp8")
            return lambda: projection(x)
        case "add_rmsnorm":
            norm, residual = Norm(bench, _WIDTH), bench.randn(_ROWS, _WIDTH)
            return lambda: norm(x, residual)
        case "rope":
            rotary, qkv = Rotary(bench, 256), bench.randn(_ROWS, (_HEADS + 2 * _KV_HEADS) * HEAD_DIM)
            return lambda: rotary(qkv, _HEADS + _KV_HEADS)
        case "silu_mul":
            gate_up = bench.randn(_ROWS, 2 * _FF)

            def silu() -> None:
                kernels.silu_mul(gate_up, bench.empty(_ROWS, _FF))

            return silu
        case "kv_copy":
            token = bench.randn(_ROWS, _KV_HEADS, 1, HEAD_DIM)
            return lambda: cache[0][:, :, -1:].copy_(token)
        case "attention_decode":
            return lambda: kernels.attention(q, cache[0], cache[1], causal=False)
        case "attention_prefill":
            prompt = bench.randn(1, _HEADS, 128, HEAD_DIM)
            keys = bench.randn(1, _KV_HEADS, 128, HEAD_DIM)
            return lambda: kernels.attention(prompt, keys, keys, causal=True)
        case "attend_token" | "attend_prompt" | "decode_layer":
            layer = Layer(bench, shape_of("llama3-8b"), tp=1, fp8=False, cache=(_ROWS, 256))
            rows = bench.randn(_ROWS, (_HEADS + 2 * _KV_HEADS) * HEAD_DIM)
            if work == "decode_layer":
                return _decode_layer(bench, layer, x)
            if work == "attend_token":
                return lambda: layer.attend_token(bench, rows, 256)
            return lambda: layer.attend_prompt(bench, rows, 1)
        case "gather":
            index = bench.torch.zeros(32, device=bench.device, dtype=bench.torch.int64)
            return lambda: kernels.gather(x, index)
        case "grouped_gemm":
            sent, weight = bench.randn(32, 2048), bench.randn(8, 768, 2048).transpose(1, 2)
            ends = bench.torch.arange(4, 36, 4, device=bench.device, dtype=bench.torch.int32)
            return lambda: kernels.grouped_gemm(sent, weight, ends)
        case other:
            raise ValueError(f"work = {other!r}: known are {', '.join(WORKS)}")


def _decode_layer(bench: Bench, layer: Layer, x: Any) -> Callable[[], object]:
    residual, rotary = bench.randn(_ROWS, _WIDTH), Rotary(bench, 256)

    def launch() -> None:
        qkv = layer.qkv(layer.norm_attention(x, residual))
        rotary(qkv, layer.q_heads + layer.kv_heads)
        attended = layer.attend_token(bench, qkv, 256)
        layer.feed_forward(layer.norm_ff(layer.out(attended), residual))

    return launch
