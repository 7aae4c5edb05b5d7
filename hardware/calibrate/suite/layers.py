"""Transformer layers of the reference stack with random weights: dense or expert feed-forward, bf16 or FP8.

A step launches exactly the kernels that whole-model records describe (measurements/README.md). Weights are
each layer's own, so they come from HBM; the token stream's buffers are reused from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardware.calibrate.suite.cases import rope_tables
from hardware.calibrate.suite.routing import RoutedRows
from hardware.calibrate.suite.shapes import HEAD_DIM, ModelShape
from hardware.calibrate.suite.timing import Bench

Tensor = Any
WEIGHT_STD = 0.02  # the initializer_range of the models' public configs


class Projection:
    """One weight matrix [n, k]; in FP8 its input is cast by a kernel of its own."""

    def __init__(self, bench: Bench, n: int, k: int, *, fp8: bool = False) -> None:
        self._bench = bench
        weight = bench.randn(n, k).mul_(WEIGHT_STD)
        self._fp8 = fp8
        if fp8:
            self._one = bench.torch.ones((), device=bench.device, dtype=bench.torch.float32)
            weight = weight.mul_(1 / WEIGHT_STD).to(bench.torch.float8_e4m3fn)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, k] -> [m, n] bf16."""
        kernels, torch = self._bench.kernels, self._bench.torch
        if not self._fp8:
            return kernels.linear(x, self._weight)
        x8 = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
        kernels.cast_fp8(x, x8)
        return kernels.linear_fp8(x8, self._weight, self._one)


class Norm:
    """Fused residual add and RMSNorm with its gain."""

    def __init__(self, bench: Bench, width: int) -> None:
        self._bench = bench
        self._gain = bench.torch.ones(width, device=bench.device, dtype=bench.torch.bfloat16)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x; the normalised residual is returned."""
        out = self._bench.torch.empty_like(x)
        self._bench.kernels.add_rmsnorm(x, residual, self._gain, out)
        return out


class FeedForward:
    """Fused gate-up GEMM, SiLU-multiply, down GEMM; ``tp`` splits the width."""

    def __init__(self, bench: Bench, shape: ModelShape, *, tp: int, fp8: bool) -> None:
        self._bench = bench
        self.width = shape.ff // tp
        self.gate_up = Projection(bench, 2 * self.width, shape.width, fp8=fp8)
        self.down = Projection(bench, shape.width, self.width, fp8=fp8)

    def activate(self, gate_up: Tensor) -> Tensor:
        """SiLU(gate) * up."""
        out = self._bench.empty(gate_up.shape[0], self.width)
        self._bench.kernels.silu_mul(gate_up, out)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, width] -> [tokens, width] (a partial sum when tp > 1)."""
        return self.down(self.activate(self.gate_up(x)))


class ExpertLayer:
    """Router, gather, grouped GEMM, SiLU-multiply, grouped GEMM, and the weighted sum back to tokens.

    ``routing`` was drawn once: the kernels run on the drawn indices. With ``ep`` > 1 a rank computes its
    own slice of experts for all tokens and index-adds (``ep_mode`` all_reduce).
    """

    def __init__(self, bench: Bench, shape: ModelShape, routing: RoutedRows, *, ep: int) -> None:
        self._bench, self._shape, self._ep = bench, shape, ep
        torch = bench.torch
        own = shape.experts // ep
        self.rows = routing.rows
        self._router = Projection(bench, shape.experts, shape.width)
        self._gate_up = bench.randn(own, 2 * shape.ff, shape.width).mul_(WEIGHT_STD).transpose(1, 2)
        self._down = bench.randn(own, shape.width, shape.ff).mul_(WEIGHT_STD).transpose(1, 2)
        ends = routing.rows_per_expert.cumsum().tolist()
        self._ends = torch.tensor(ends, device=bench.device, dtype=torch.int32)
        self._token = torch.tensor(routing.token.tolist(), device=bench.device, dtype=torch.int64)
        # Row order back to token order: rows of one token next to each other.
        self._back = torch.tensor(routing.token.argsort(kind="stable").tolist(), device=bench.device)
        self._gate = bench.randn(routing.rows, 1).abs_() if not bench.dry else bench.randn(routing.rows, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, width] -> [tokens, width] (a partial sum when ep > 1)."""
        kernels, bench = self._bench.kernels, self._bench
        self._router(x)
        sent = kernels.gather(x, self._token)
        gate_up = kernels.grouped_gemm(sent, self._gate_up, self._ends)
        gated = bench.empty(self.rows, self._shape.ff)
        kernels.silu_mul(gate_up, gated)
        done = kernels.grouped_gemm(gated, self._down, self._ends)
        if self._ep == 1:
            return kernels.topk_sum(kernels.gather(done, self._back), self._gate, self._shape.top_k)
        out = bench.empty(*x.shape)
        kernels.index_add(done, self._gate, self._token, out)
        return out


class Layer:
    """Attention and feed-forward weights of one layer of one rank, and when decoding its KV cache.

    ``cache``: how many sequences it holds, and the tokens of each.
    """

    def __init__(
        self,
        bench: Bench,
        shape: ModelShape,
        *,
        tp: int,
        fp8: bool,
        cache: tuple[int, int] | None = None,
        forward: Callable[[], Any] | None = None,
    ) -> None:
        self.q_heads = shape.q_heads // tp
        self.kv_heads = max(1, shape.kv_heads // tp)
        heads = self.q_heads + 2 * self.kv_heads
        self.norm_attention = Norm(bench, shape.width)
        self.qkv = Projection(bench, heads * HEAD_DIM, shape.width, fp8=fp8)
        self.out = Projection(bench, shape.width, self.q_heads * HEAD_DIM, fp8=fp8)
        self.norm_ff = Norm(bench, shape.width)
        self.feed_forward: Any = forward() if forward is not None else FeedForward(bench, shape, tp=tp, fp8=fp8)
        self.cache: Any = None
        if cache is not None:
            batch, tokens = cache
            self.cache = bench.randn(2, batch, self.kv_heads, tokens, HEAD_DIM)

    def attend_prompt(self, bench: Bench, qkv: Tensor, batch: int) -> Tensor:
        """Causal attention over a prompt; [tokens, heads x 128] -> [tokens, q_heads x 128]."""
        tokens = qkv.shape[0]
        view = qkv.view(batch, tokens // batch, -1, HEAD_DIM)
        q, k, v = (part.transpose(1, 2) for part in view.split([self.q_heads, self.kv_heads, self.kv_heads], dim=2))
        out = bench.kernels.attention(q, k, v, causal=True)
        return out.transpose(1, 2).reshape(tokens, -1)

    def attend_token(self, bench: Bench, qkv: Tensor, cached: int) -> Tensor:
        """Write one token's K and V at the end of ``cached`` tokens and attend over them."""
        batch = qkv.shape[0]
        view = qkv.view(batch, 1, -1, HEAD_DIM)
        q, k, v = (part.transpose(1, 2) for part in view.split([self.q_heads, self.kv_heads, self.kv_heads], dim=2))
        keys, values = self.cache[0][:, :, :cached], self.cache[1][:, :, :cached]
        keys[:, :, -1:].copy_(k)
        values[:, :, -1:].copy_(v)
        out = bench.kernels.attention(q, keys, values, causal=False)
        return out.transpose(1, 2).reshape(batch, -1)


class Rotary:
    """RoPE in place on the query and key heads of a fused QKV."""

    def __init__(self, bench: Bench, positions: int) -> None:
        self._bench = bench
        self._cos, self._sin = rope_tables(bench, positions)

    def __call__(self, qkv: Tensor, heads: int) -> None:
        """Rotate the first ``heads`` heads."""
        self._bench.kernels.rope(qkv, self._cos, self._sin, heads)
