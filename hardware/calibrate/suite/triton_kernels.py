"""Triton kernels of the reference stack; imported only where a GPU is present.

Grid and block of each kernel are those seen in profiler traces of the reference stack
(measurements/kineto): ``_add_rms`` one program of 256 threads a row, ``_silu_mul`` one of 128 threads per
1024 outputs, ``_rope`` one warp per token and head.
"""

# Triton's decorator is untyped and its kernels are compiled, not run, by Python.
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator,assignment,operator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add_rms(x_ptr, residual_ptr, gain_ptr, out_ptr, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block)
    inside = cols < width
    at = row * width + cols
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, x.to(tl.bfloat16), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    gain = tl.load(gain_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale * gain).to(tl.bfloat16), mask=inside)


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * block + tl.arange(0, block)
    inside = cols < width
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + cols, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=inside)


@triton.jit
def _rope(qkv_ptr, cos_ptr, sin_ptr, row_stride, positions, half: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, half)
    at = token * row_stride + head * 2 * half + cols
    cos = tl.load(cos_ptr + (token % positions) * half + cols)
    sin = tl.load(sin_ptr + (token % positions) * half + cols)
    low = tl.load(qkv_ptr + at).to(tl.float32)
    high = tl.load(qkv_ptr + at + half).to(tl.float32)
    tl.store(qkv_ptr + at, (low * cos - high * sin).to(tl.bfloat16))
    tl.store(qkv_ptr + at + half, (high * cos + low * sin).to(tl.bfloat16))


@triton.jit
def _cast_fp8(x_ptr, out_ptr, count, inverse_scale, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse_scale
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    tl.store(out_ptr + at, x.to(tl.float8e4nv), mask=inside)


@triton.jit
def _stamp(out_ptr, sms):
    """Each program writes its SM's cycle counter and the GPU's nanosecond counter to that SM's slot."""
    one = tl.full((1,), 0, tl.int32)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [one], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [one], dtype=tl.int64, is_pure=False, pack=1)
    nanoseconds = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [one], dtype=tl.int64, is_pure=False, pack=1
    )
    inside = sm < sms
    tl.store(out_ptr + 2 * sm, cycles, mask=inside)
    tl.store(out_ptr + 2 * sm + 1, nanoseconds, mask=inside)
