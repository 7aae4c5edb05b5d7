"""The kernels the suite launches, on tensors that already exist; plain PyTorch stands in off the GPU.

Every call launches exactly one kernel on a GPU (``topk_sum`` and ``index_add`` launch what their records
say), so a row times what its kind names. Off the GPU (dry runs on the ``meta`` or ``cpu`` device) Triton
kernels are replaced by PyTorch expressions of the same shapes.
"""

from __future__ import annotations

from typing import Any

from hardware.errors import HardwareError

Tensor = Any

_SILU_BLOCK = 1024
_CAST_BLOCK = 1024
_STAMP_WARPS = 1
_SPIN_HZ = 1.98e9


class Kernels:
    """Launchers of the reference stack's kernels on one device; ``sms`` is the GPU's number of SMs."""

    def __init__(self, torch: Any, *, on_gpu: bool, sms: int) -> None:
        self._torch = torch
        self._on_gpu = on_gpu
        self.sms = sms
        self._triton: Any = None
        if on_gpu:
            try:
                from hardware.calibrate.suite import triton_kernels
            except ImportError as error:
                raise HardwareError(
                    f"the suite needs Triton on a GPU ({error}): install the triton that belongs to your torch"
                ) from None
            self._triton = triton_kernels

    def add_rmsnorm(self, x: Tensor, residual: Tensor, gain: Tensor, out: Tensor) -> None:
        """residual += x; out = RMSNorm(residual) * gain, over rows of [tokens, width] bf16."""
        tokens, width = x.shape
        if self._on_gpu:
            block = 1 << (width - 1).bit_length()
            self._triton._add_rms[(tokens,)](x, residual, gain, out, width, 1e-5, block=block, num_warps=8)
            return
        residual.add_(x)
        scale = self._torch.rsqrt(residual.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        out.copy_((residual.float() * scale * gain.float()).to(out.dtype))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = SiLU(gate) * up, where each row of ``gate_up`` is gate then up, [tokens, 2 x width] bf16."""
        tokens, width = out.shape
        if self._on_gpu:
            grid = (tokens, -(-width // _SILU_BLOCK))
            self._triton._silu_mul[grid](gate_up, out, width, block=_SILU_BLOCK, num_warps=4)
            return
        gate, up = gate_up[:, :width], gate_up[:, width:]
        out.copy_(self._torch.nn.functional.silu(gate) * up)

    def rope(self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
        """Rotate the first ``heads`` heads of each row of [tokens, heads x 2 x half] bf16 in place.

        ``cos`` and ``sin`` are [positions, half] float32; token t takes position t modulo positions.
        """
        positions, half = cos.shape
        if self._on_gpu:
            self._triton._rope[(qkv.shape[0], heads)](qkv, cos, sin, qkv.stride(0), positions, half=half, num_warps=1)
            return
        view = qkv[:, : heads * 2 * half].view(qkv.shape[0], heads, 2, half)
        index = self._torch.arange(qkv.shape[0], device=qkv.device) % positions
        c, s = cos[index][:, None, :], sin[index][:, None, :]
        low, high = view[:, :, 0].float(), view[:, :, 1].float()
        rotated = self._torch.stack((low * c - high * s, high * c + low * s), dim=2)
        view.copy_(rotated.to(qkv.dtype))

    def cast_fp8(self, x: Tensor, out: Tensor, inverse_scale: float = 1.0) -> None:
        """out = x * inverse_scale as FP8 E4M3, saturating at +-448; ``inverse_scale`` is per tensor."""
        if self._on_gpu:
            count = x.numel()
            self._triton._cast_fp8[(-(-count // _CAST_BLOCK),)](
                x, out, count, float(inverse_scale), block=_CAST_BLOCK, num_warps=4
            )
            return
        out.copy_((x.float() * inverse_scale).clamp(-448.0, 448.0).to(out.dtype))

    def stamp(self, slot: Tensor) -> None:
        """Write (SM cycles, nanoseconds) of every SM into ``slot``, [sms, 2] int64; one warp an SM."""
        if self._on_gpu:
            self._triton._stamp[(self.sms,)](slot, self.sms, num_warps=_STAMP_WARPS)

    def linear(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x [m, k] by weight [n, k], bf16: cuBLAS as PyTorch calls it."""
        if out is not None:
            return self._torch.mm(x, weight.t(), out=out)
        return self._torch.nn.functional.linear(x, weight)

    def linear_fp8(self, x: Tensor, weight: Tensor, one: Tensor, *, fast_accumulation: bool = False) -> Tensor:
        """x [m, k] by weight [n, k], both FP8 with per-tensor scales, output bf16: cuBLASLt.

        ``fast_accumulation`` keeps sums in the tensor cores' own registers; PyTorch does not unless asked.
        """
        return self._torch._scaled_mm(
            x, weight.t(), scale_a=one, scale_b=one, out_dtype=self._torch.bfloat16, use_fast_accum=fast_accumulation
        )

    def spin(self, seconds: float) -> None:
        """One block that only counts cycles for about ``seconds`` at the maximum clock."""
        if self._on_gpu:
            self._torch.cuda._sleep(max(1, int(seconds * _SPIN_HZ)))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """Flash attention of [batch, heads, tokens, head_dim]; PyTorch picks its backend (cuDNN on Hopper)."""
        grouped = q.shape[1] != k.shape[1]
        return self._torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def grouped_gemm(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Rows of x [rows, k] by their expert's weight [experts, k, n]; ``ends`` are cumulative row counts."""
        return self._torch._grouped_mm(x, weight, offs=ends)

    def gather(self, x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows ``index`` of x."""
        return self._torch.index_select(x, 0, index, out=out) if out is not None else x.index_select(0, index)

    def index_add(self, x: Tensor, gate: Tensor, index: Tensor, out: Tensor) -> None:
        """out = 0; out[index] += x * gate: what a rank of all-reduce expert parallelism does."""
        out.zero_()
        out.index_add_(0, index, x * gate)

    def topk_sum(self, x: Tensor, gate: Tensor, top_k: int) -> Tensor:
        """Sum over each token's ``top_k`` rows of x * gate."""
        return (x * gate).view(-1, top_k, x.shape[1]).sum(1)

    def gelu(self, x: Tensor) -> Tensor:
        """GELU, tanh form."""
        return self._torch.nn.functional.gelu(x, approximate="tanh")
