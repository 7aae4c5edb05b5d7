"""The plan ``vllm``: kernels of a real vLLM installation over the shapes that its users run."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from hardware.calibrate.suite.plan import PlannedRow, at_clock


class ExpertSizes(NamedTuple):
    """The experts of a layer, ``local`` of which are on the measured GPU."""

    experts: int
    hidden: int
    ff: int
    top_k: int
    local: int


QWEN_30B, MIXTRAL, QWEN_235B, DEEPSEEK = (
    ExpertSizes(128, 2048, 768, 8, local=128),
    ExpertSizes(8, 4096, 14336, 2, local=8),
    ExpertSizes(128, 4096, 1536, 8, local=128),
    ExpertSizes(256, 7168, 2048, 8, local=32),
)
ALL_TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
SOME_TOKENS = (1, 4, 16, 64, 192, 512, 2048, 8192)
FEW_TOKENS = (8, 64, 256, 2048)
# Heads of queries and keys a head of keys, as in Llama 3 8B.
QUERIES_AND_KEYS = 5
# Widths of Llama 3 8B on one, two and four tensor ranks, and of the residual stream of smaller and larger models.
COMPILED = (
    *product(("add_rmsnorm",), (2048, 4096, 8192)), *product(("rope",), (5120, 2560, 1280)),
    *product(("silu_mul",), (14336, 7168, 3584)), *product(("add_rmsnorm_fp8", "quantise"), (4096, 8192)),
    *product(("silu_mul_fp8",), (14336, 7168)),
)  # fmt: skip
FULL_WIDTHS = (
    ("rope", 5120), ("add_rmsnorm", 4096), ("add_rmsnorm_fp8", 4096), ("quantise", 4096), ("silu_mul", 14336),
    ("silu_mul_fp8", 14336),
)  # fmt: skip
NOTHING: PlannedRow = {"kind": "nothing", "world": 1}  # between the stamps of an at_clock row


def experts(
    sizes: ExpertSizes,
    tokens: int,
    part: str,
    *,
    dtype: str = "bf16",
    skew: float = 0.0,
    block: list[int] | None = None,
) -> PlannedRow:
    """Triton experts of one layer."""
    row: PlannedRow = {"kind": "vllm_experts", "world": 1, "part": part, "tokens": tokens, "experts": sizes.experts}
    row |= {"local": sizes.local, "hidden": sizes.hidden, "ff": sizes.ff, "top_k": sizes.top_k}
    row |= {"skew": skew, "dtype": dtype}
    return row if block is None else {**row, "block": block}


def attention(
    phase: str, batch: int, seq_len: int, heads: tuple[int, int] = (32, 8), *, kv_len: int = 0, kv_dtype: str = "bf16"
) -> PlannedRow:
    """FlashAttention 3 over a paged cache, of ``heads`` of queries and of keys."""
    q_heads, kv_heads = heads
    row: PlannedRow = {"kind": "vllm_attention", "world": 1, "phase": phase, "batch": batch, "seq_len": seq_len}
    if kv_len:
        row["kv_len"] = kv_len
    return {**row, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 128, "kv_dtype": kv_dtype}


def compiled(how: str, width: int, tokens: int) -> PlannedRow:
    """An elementwise part of a layer as the server compiles it; a rotation's width is that of queries and keys."""
    row: PlannedRow = {
        "kind": "vllm_compiled",
        "world": 1,
        "how": how,
        "tokens": tokens,
        "width": width,
        "sizes": "any",
    }
    return {**row, "kv_heads": width // 128 // QUERIES_AND_KEYS, "combined": True} if how == "rope" else row


def cache_write(tokens: int, kv_heads: int) -> PlannedRow:
    """New keys and values into their pages."""
    return {"kind": "vllm_cache_write", "world": 1, "tokens": tokens, "kv_heads": kv_heads}


def vllm(world: int) -> list[PlannedRow]:
    """Every kernel of vLLM; with two GPUs and more its all-reduce alone."""
    if world > 1:
        sizes = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8191)
        return [{"kind": "vllm_all_reduce", "world": world, "bytes": kib << 10, "dtype": "bf16"} for kib in sizes]
    rows: list[PlannedRow] = [
        experts(QWEN_30B, tokens, part) for tokens, part in product(ALL_TOKENS, ("gate_up", "down"))
    ]
    rows += [experts(QWEN_30B, tokens, "all") for tokens in SOME_TOKENS]
    for layer in (MIXTRAL, QWEN_235B, DEEPSEEK):
        rows += [experts(layer, tokens, part) for tokens, part in product(SOME_TOKENS, ("gate_up", "down"))]
        rows += [experts(layer, tokens, "all") for tokens in FEW_TOKENS]
    rows += [
        experts(QWEN_30B._replace(local=local), tokens, part)
        for tokens, part, local in product(FEW_TOKENS, ("gate_up", "down"), (64, 32))
    ]
    rows += [experts(QWEN_30B, tokens, part, skew=1.0) for tokens, part in product(FEW_TOKENS, ("gate_up", "all"))]
    rows += [
        experts(QWEN_30B, tokens, part, dtype="fp8_e4m3") for tokens, part in product(SOME_TOKENS, ("gate_up", "down"))
    ]
    blocks = [128, 128]
    rows += [
        experts(DEEPSEEK, tokens, part, dtype="fp8_e4m3", block=blocks)
        for tokens, part in product(SOME_TOKENS, ("gate_up", "down"))
    ]
    rows += [experts(DEEPSEEK, tokens, "all", dtype="fp8_e4m3", block=blocks) for tokens in FEW_TOKENS]
    decode = [(1, 512), (1, 8192), (8, 2048), (16, 1024), (32, 512), (32, 2048), (32, 4096), (32, 8192)]
    decode += [(64, 1024), (64, 4096), (128, 512), (128, 2048), (256, 512), (256, 1024)]
    rows += [attention("decode", batch, seq_len) for batch, seq_len in decode]
    rows += [attention("decode", batch, seq_len, (32, 4)) for batch, seq_len in decode[::2]]
    rows += [attention("decode", batch, seq_len, (16, 2)) for batch, seq_len in decode[1::3]]
    rows += [attention("decode", batch, seq_len, (8, 1)) for batch, seq_len in decode[::3]]
    rows += [attention("decode", batch, seq_len, kv_dtype="fp8_e4m3") for batch, seq_len in decode]
    rows += [attention("decode", batch, seq_len, (8, 1), kv_dtype="fp8_e4m3") for batch, seq_len in decode[::3]]
    prompts = [(1, 512), (16, 512), (1, 2048), (4, 2048), (2, 4096), (1, 8192)]
    rows += [attention("prefill", batch, seq_len, (heads, 8)) for (batch, seq_len), heads in product(prompts, (32, 64))]
    rows += [attention("prefill", batch, seq_len, (32, 4)) for batch, seq_len in prompts[::2]]
    rows += [attention("prefill", 1, 2048, kv_len=kv_len) for kv_len in (4096, 8192, 32768)]
    rows += [attention("prefill", batch, seq_len, kv_dtype="fp8_e4m3") for batch, seq_len in prompts[3:]]
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 7168))
    halves = ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168))  # of Llama 3 8B on two tensor ranks
    many = (1, 16, 32, 64, 128, 192, 256, 512, 2048, 8192)
    scaled = {"kind": "vllm_scaled_gemm", "world": 1}
    products = [*product(many, shapes), *product((1, 32, 64, 256), halves)]
    rows += [{**scaled, "m": m, "n": n, "k": k, "scales": "token"} for m, (n, k) in products]
    blocked = ((6144, 4096), (28672, 4096), (4096, 14336), (4096, 7168), (7168, 2048))
    rows += [
        {**scaled, "m": m, "n": n, "k": k, "scales": "block"}
        for m, (n, k) in product((1, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192), blocked)
    ]
    small = (1, 32, 128, 256, 2048, 8192)
    tiny = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
    rows += [
        {"kind": "vllm_quantise", "world": 1, "tokens": tokens, "width": width, "scales": scales}
        for tokens, width, scales in product(tiny, (4096, 14336), ("token", "block"))
    ]
    rows += [cache_write(tokens, heads) for tokens, heads in product(small, (8, 4, 2, 1))]
    rows += [compiled(how, width, tokens) for (how, width), tokens in product(COMPILED, (1, 32, 256, 2048, 8192))]
    full = [compiled(how, width, 8192) for how, width in FULL_WIDTHS] + [cache_write(8192, heads) for heads in (8, 4)]
    rows += [at_clock(one, where) for one, where in product((NOTHING, *full), ("alone", "capped"))]
    rows += [{"kind": "vllm_gate", "world": 1, "tokens": tokens, "experts": 128, "top_k": 8} for tokens in small]
    rows += [
        {"kind": kind, "world": 1, "tokens": tokens, "width": width, "top_k": 8}
        for (kind, width), tokens in product((("vllm_act", 768), ("vllm_expert_sum", 2048)), small)
    ]
    rows += [
        {"kind": "vllm_sample", "world": 1, "rows": count, "width": 128256, "temperature": temperature}
        for count, temperature in ((1, 0.0), (32, 0.0), (128, 0.0), (256, 0.0), (32, 1.0), (256, 1.0))
    ]
    return rows
