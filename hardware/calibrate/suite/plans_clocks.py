"""Plan ``clocks``: the same kernels at the maximum clock and at that of a capped step."""

from __future__ import annotations

from hardware.calibrate.suite.plan import (
    HOST,
    MIB,
    PlannedRow,
    at_clock,
    attention,
    cat,
    copy,
    elementwise,
    gemm,
    grouped,
    moe_small,
    permute_copy,
)


def clocks(_: int) -> list[PlannedRow]:
    """Each kernel alone and between heavy products; last, a pair of stamps with nothing between."""
    kernels = [elementwise("rope", tokens, heads) for tokens, heads in ((1024, 40), (4096, 40), (8192, 40), (8192, 36))]
    kernels += [elementwise("silu_mul", tokens, 14336) for tokens in (64, 2048, 8192)]
    kernels += [elementwise("add_rmsnorm", tokens, width) for tokens, width in ((64, 8192), (4096, 8192), (8192, 4096))]
    kernels += [elementwise("gelu", 4096, 8960), elementwise("cast_fp8", 4096, 4096)]
    kernels += [attention("prefill", 2, 4096, 32, 4), attention("prefill", 1, 4096, 32, 8)]
    kernels += [attention("prefill", 1, 1000, 32, 8)]
    kernels += [attention("decode", 32, 2048, 32, 4), attention("decode", 16, 2048, 32, 8)]
    kernels += [attention("decode", 1, 8192, 32, 8)]
    kernels += [copy(256 * MIB), copy(16 * MIB), cat(8192, 5120, 4), permute_copy(4096, 48, 2)]
    kernels += [moe_small(kind, rows) for kind in ("gather", "index_add", "topk_sum") for rows in (2048, 16384)]
    kernels += [grouped(which, 128, tokens) for tokens in (128, 4096) for which in ("gate_up", "down")]
    kernels += [gemm(m, n, k) for m in (1, 16, 64, 128, 256) for n, k in ((28672, 8192), (6144, 4096))]
    kernels += [gemm(m, n, k) for m in (512, 1024, 3000) for n, k in ((6144, 4096), (4096, 14336))]
    kernels += [gemm(1024, 8192, 8192, "fp8_e4m3"), gemm(64, 28672, 4096, "fp8_e4m3")]
    rows = [at_clock(kernel, where) for kernel in kernels for where in ("alone", "capped")]
    return [HOST[0], *rows, at_clock({"kind": "nothing"}, "alone")]
