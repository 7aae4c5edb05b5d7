"""Single-GPU kernels of the suite: one planned row becomes something to launch, then a measured row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware.calibrate.suite.case import Case
from hardware.calibrate.suite.cases_diffusers import build_diffusers
from hardware.calibrate.suite.cases_sampling import sampling_case
from hardware.calibrate.suite.cases_vllm import build_vllm
from hardware.calibrate.suite.routing import EXPERTS, TOP_K, draw_routing
from hardware.calibrate.suite.timing import Bench, repeated, steady, together
from hardware.errors import HardwareError

Row = Mapping[str, Any]
HEAD_DIM = 128
_KEPT_BUFFERS_BYTES = 256 << 20


def measure_kernel(bench: Bench, row: Row) -> dict[str, Any]:
    """Measured fields (and counts) of a planned kernel row."""
    case = build(bench, row)
    replay, count = repeated(
        bench, lambda i: _ignore(case.launch(i)), kernels_each=case.kernels_each, rotate=case.rotate
    )
    return {**case.facts, **together(bench, steady(bench, replay, count))}


def build(bench: Bench, row: Row) -> Case:
    """The work of a kernel row, with its tensors allocated."""
    match row["kind"]:
        case "gemm":
            return _gemm(bench, row)
        case "copy":
            return _copy(bench, row["bytes_moved"])
        case "permute_copy":
            return _permute_copy(bench, row["tokens"], row["heads"], row["parts"])
        case "cat":
            return _cat(bench, row["tokens"], row["width"], row["parts"])
        case "add_rmsnorm":
            return _add_rmsnorm(bench, row["tokens"], row["width"])
        case "silu_mul":
            return _silu_mul(bench, row["tokens"], row["width"])
        case "gelu":
            return _gelu(bench, row["tokens"], row["width"])
        case "rope":
            return _rope(bench, row["tokens"], row["heads"])
        case "cast_fp8":
            return _cast_fp8(bench, row["tokens"], row["width"])
        case "kv_write":
            return _kv_write(bench, row["batch"], row["kv_heads"], row["seq_len"])
        case "gather" | "index_add" | "topk_sum":
            return _moe_small(bench, row["kind"], row["rows"], row["width"])
        case "sample":
            return sampling_case(bench, row["how"], row["rows"], row["width"])
        case "attention":
            return _attention(bench, row)
        case "grouped_gemm":
            return _grouped(bench, row)
        case "small_kernels":
            return _small(bench, row["work"], row["m"])
        case str(kind) if kind.startswith("vllm_"):
            return build_vllm(bench, row)
        case str(kind) if kind.startswith("diffusers_"):
            return build_diffusers(bench, row)
        case other:
            raise HardwareError(f"the suite has no kernel kind '{other}'")


def _gemm(bench: Bench, row: Row) -> Case:
    m, n, k, dtype, values = row["m"], row["n"], row["k"], row["dtype"], row.get("values", "normal")
    kernels, x, fast = bench.kernels, bench.randn(m, k), bool(row.get("fast_accumulation"))
    if dtype == "bf16":
        x, weights = valued(bench, x, values), [valued(bench, w, values) for w in bench.weights(n, k)]
        out = bench.empty(m, n)
        return Case(launch=lambda i: kernels.linear(x, weights[i % len(weights)], out), rotate=len(weights))
    if dtype == "fp8_e4m3":
        unit = bench.torch.ones((), device=bench.device, dtype=bench.torch.float32)
        x8 = _fp8(bench, x, values)
        # The pool is bf16; FP8 weights of half the bytes need twice the copies to leave the cache.
        eights = [_fp8(bench, w * 50, values) for w in bench.weights(n, k, span_bytes=512 << 20)]

        def launch(i: int) -> object:
            return kernels.linear_fp8(x8, eights[i % len(eights)], unit, fast_accumulation=fast)

        return Case(launch=launch, rotate=len(eights))
    raise HardwareError(f"dtype = '{dtype}': the suite measures GEMMs in bf16 and fp8_e4m3")


def valued(bench: Bench, x: Any, values: str) -> Any:
    """``x`` with other values: zeros, or a fiftieth (``small``)."""
    match values:
        case "zeros":
            return bench.torch.zeros_like(x)
        case "small":
            return x * 0.02
        case "normal":
            return x
    raise HardwareError(f"values = '{values}': normal, zeros or small, and bits in FP8")


def _fp8(bench: Bench, x: Any, values: str) -> Any:
    """``x`` as FP8 E4M3; with values ``bits`` every finite code is as likely as any other."""
    torch = bench.torch
    if values == "bits":
        codes = torch.randint(0, 126, x.shape, device=bench.device, dtype=torch.uint8)
        signs = torch.randint(0, 2, x.shape, device=bench.device, dtype=torch.uint8) << 7
        return (codes | signs).view(torch.float8_e4m3fn)
    return valued(bench, x, values).to(torch.float8_e4m3fn)


def _copy(bench: Bench, bytes_moved: int) -> Case:
    source, target = bench.randn(bytes_moved // 4), bench.empty(bytes_moved // 4)
    return Case(launch=lambda _: target.copy_(source))


def _permute_copy(bench: Bench, tokens: int, heads: int, parts: int) -> Case:
    source = bench.randn(tokens, parts, heads // parts * HEAD_DIM)
    target = bench.empty(parts, tokens, heads // parts * HEAD_DIM)
    return Case(launch=lambda _: target.copy_(source.transpose(0, 1)))


def _cat(bench: Bench, tokens: int, width: int, parts: int) -> Case:
    pieces = [bench.randn(tokens // parts, width) for _ in range(parts)]
    out = bench.empty(tokens, width)
    return Case(launch=lambda _: bench.torch.cat(pieces, out=out))


def _add_rmsnorm(bench: Bench, tokens: int, width: int) -> Case:
    x, residual, out = bench.randn(tokens, width), bench.randn(tokens, width), bench.empty(tokens, width)
    gain = bench.randn(width)
    return Case(launch=lambda _: bench.kernels.add_rmsnorm(x, residual, gain, out))


def _silu_mul(bench: Bench, tokens: int, width: int) -> Case:
    gate_up, out = bench.randn(tokens, 2 * width), bench.empty(tokens, width)
    return Case(launch=lambda _: bench.kernels.silu_mul(gate_up, out))


def _gelu(bench: Bench, tokens: int, width: int) -> Case:
    x = bench.randn(tokens, width)
    return Case(launch=lambda _: bench.kernels.gelu(x))


def rope_tables(bench: Bench, positions: int) -> tuple[Any, Any]:
    """Cosine and sine of rotary angles, [positions, 64] float32."""
    torch = bench.torch
    exponent = torch.arange(0, HEAD_DIM, 2, device=bench.device, dtype=torch.float32) / HEAD_DIM
    angle = torch.arange(positions, device=bench.device, dtype=torch.float32)[:, None] / 5e5**exponent
    return angle.cos(), angle.sin()


def _rope(bench: Bench, tokens: int, heads: int) -> Case:
    qkv = bench.randn(tokens, heads * HEAD_DIM)
    cos, sin = rope_tables(bench, tokens)
    return Case(launch=lambda _: bench.kernels.rope(qkv, cos, sin, heads))


def _cast_fp8(bench: Bench, tokens: int, width: int) -> Case:
    x = bench.randn(tokens, width)
    out = bench.torch.empty(tokens, width, device=bench.device, dtype=bench.torch.float8_e4m3fn)
    return Case(launch=lambda _: bench.kernels.cast_fp8(x, out))


def _kv_write(bench: Bench, batch: int, kv_heads: int, seq_len: int) -> Case:
    """One of the two small copies of a decode step: a token's K (or V) into the last place of the cache."""
    cache = bench.empty(batch, kv_heads, seq_len, HEAD_DIM)
    qkv = bench.randn(batch, 1, 6 * kv_heads, HEAD_DIM)
    new = qkv[:, :, :kv_heads].transpose(1, 2)
    return Case(launch=lambda _: cache[:, :, -1:].copy_(new))


def _moe_small(bench: Bench, kind: str, rows: int, width: int) -> Case:
    torch, kernels = bench.torch, bench.kernels
    tokens = max(1, rows // TOP_K)
    gate = bench.randn(rows, 1)
    index = torch.arange(rows, device=bench.device) % tokens
    if kind == "gather":
        x = bench.randn(tokens, width)
        return Case(launch=lambda _: kernels.gather(x, index))
    x = bench.randn(rows, width)
    if kind == "topk_sum":
        return Case(launch=lambda _: kernels.topk_sum(x, gate, min(TOP_K, rows)), kernels_each=2)
    out = bench.empty(tokens, width)
    return Case(launch=lambda _: kernels.index_add(x, gate, index, out), kernels_each=3)


def attention_inputs(
    bench: Bench, *, batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int
) -> tuple[Any, Any, Any]:
    """q, k, v as a step lays them out: slices of a fused QKV for a prompt, a cache for one query token."""
    if q_len == kv_len:
        qkv = bench.randn(batch, q_len, q_heads + 2 * kv_heads, HEAD_DIM)
        q, k, v = (part.transpose(1, 2) for part in qkv.split([q_heads, kv_heads, kv_heads], dim=2))
        return q, k, v
    q = bench.randn(batch, q_len, q_heads, HEAD_DIM).transpose(1, 2)
    if q_len == 1:
        cache = bench.randn(2, batch, kv_heads, kv_len, HEAD_DIM)
        return q, cache[0], cache[1]
    kv = bench.randn(batch, kv_len, 2 * kv_heads, HEAD_DIM)
    k, v = (part.transpose(1, 2) for part in kv.split([kv_heads, kv_heads], dim=2))
    return q, k, v


def _attention(bench: Bench, row: Row) -> Case:
    seq_len = row["seq_len"]
    decode = row["phase"] == "decode"
    sizes = {
        "batch": row["batch"],
        "q_len": 1 if decode else seq_len,
        "kv_len": row.get("kv_len", seq_len),
        "q_heads": row["q_heads"],
        "kv_heads": row["kv_heads"],
    }
    cached = 4 * sizes["batch"] * sizes["kv_len"] * sizes["kv_heads"] * HEAD_DIM
    # A decode step reads every layer's own cache, so a cache that fits in L2 must rotate.
    copies = min(32, -(-_KEPT_BUFFERS_BYTES // cached)) if decode else 1
    inputs = [attention_inputs(bench, **sizes) for _ in range(copies)]
    causal = bool(row["causal"])
    return Case(launch=lambda i: bench.kernels.attention(*inputs[i % copies], causal=causal), rotate=copies)


def _grouped(bench: Bench, row: Row) -> Case:
    experts, k, n = row["experts"], row["k"], row["n"]
    routing = draw_routing(tokens=row["tokens"], experts=EXPERTS, top_k=TOP_K, skew=row["skew"], own=range(experts))
    torch = bench.torch
    ends = torch.tensor(routing.rows_per_expert.cumsum().tolist(), device=bench.device, dtype=torch.int32)
    x = bench.randn(routing.rows, k)
    # Few experts hit of many: as many copies as the pool holds, so that L2 keeps none of them.
    few = 4 * int((routing.rows_per_expert > 0).sum()) < experts
    span = 0 if row.get("resident") else (2 << 30) if few else (256 << 20)
    # Stored [experts, n, k] and used transposed, as a fused projection's weight is.
    weights = [w.transpose(1, 2) for w in bench.weights(experts, n, k, span_bytes=span)]
    return Case(
        launch=lambda i: bench.kernels.grouped_gemm(x, weights[i % len(weights)], ends),
        rotate=len(weights),
        kernels_each=2,
        facts=routing.facts(),
    )


def _small(bench: Bench, work: str, m: int) -> Case:
    """A chain of a decode layer's small kernels, or one of its parts; ``work`` names it."""
    kernels, width, ff = bench.kernels, 4096, 14336
    weights = bench.weights(width, width)
    x, residual, gain = bench.randn(m, width), bench.randn(m, width), bench.randn(width)
    normed, y = bench.empty(m, width), bench.randn(m, width)
    gate_up, gated = bench.randn(m, 2 * ff), bench.empty(m, ff)

    def gemm(i: int) -> None:
        kernels.linear(normed, weights[i % len(weights)], y)

    def rms(_: int) -> None:
        kernels.add_rmsnorm(x, residual, gain, normed)

    def silu(_: int) -> None:
        kernels.silu_mul(gate_up, gated)

    parts = {"gemm": (gemm,), "add_rms": (rms,), "silu": (silu,), "mix": (rms, gemm, silu, rms, gemm)}
    name = next((p for p in parts if work.startswith(p)), None)
    if name is None:
        raise HardwareError(f"small_kernels work '{work}' starts with none of {', '.join(parts)}")
    chosen = parts[name]

    def launch(i: int) -> None:
        for j, part in enumerate(chosen):
            part(2 * i + (j > 1))

    return Case(launch=launch, rotate=len(weights), kernels_each=len(chosen))


def _ignore(_: object) -> None:
    """Launches return tensors that nobody reads; dropping them here returns them to the graph's pool."""
