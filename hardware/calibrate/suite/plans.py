"""The named plans. ``calibrate`` and ``calibrate_multi`` are what a user's GPU gets; the others fill gaps.

Shapes are those of Llama-3 8B and 70B (whole and split over 2, 4, 8 GPUs), Qwen3-30B-A3B and Wan2.1; sizes
of the ``gaps`` and ``pair`` plans are the ones research found missing from earlier records.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from itertools import product

from hardware.calibrate.suite.host_issue import WORKS
from hardware.calibrate.suite.plan import (
    HOST,
    MIB,
    PlannedRow,
    at_clock,
    attention,
    cat,
    collective,
    copy,
    dit,
    duty,
    elementwise,
    gemm,
    grouped,
    in_context,
    kv_write,
    moe_small,
    overlap,
    permute_copy,
    sample,
    small,
    step,
    together,
)
from hardware.calibrate.suite.plans_clocks import clocks
from hardware.calibrate.suite.plans_diffusers import diffusers
from hardware.calibrate.suite.plans_validate import chunks, eight, validate1, validate2, validate4
from hardware.calibrate.suite.plans_vllm import vllm
from hardware.errors import HardwareError

PlanMaker = Callable[[int], list[PlannedRow]]
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_70B_TP2 = ((5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336))
QWEN = ((5120, 2048), (2048, 4096))
HEAD_8B = (128256, 4096)
# Skew at which every token chooses the same experts.
ONE_SET = 1000.0
BURSTS = ((0.004, 0.06), (0.004, 0.008), (0.004, 0.002), (0.02, 0.02), (0.04, 0.0))


def smoke(world: int) -> list[PlannedRow]:
    """One row of every kind: does everything run on this machine?"""
    one_token = [
        *HOST,
        gemm(1, 6144, 4096),
        gemm(64, 4096, 4096, "fp8_e4m3"),
        copy(256 * MIB),
        permute_copy(4096, 48, 2),
        cat(2048, 5120, 4),
        kv_write(32, 8, 2048),
        elementwise("add_rmsnorm", 64, 4096),
        elementwise("silu_mul", 64, 14336),
        elementwise("gelu", 4096, 8960),
        elementwise("rope", 1024, 40),
        elementwise("cast_fp8", 4096, 4096),
        *(moe_small(kind, 2048) for kind in ("gather", "index_add", "topk_sum")),
        attention("decode", 8, 2048, 32, 8),
        attention("prefill", 1, 1000, 32, 8),
        grouped("gate_up", 128, 128),
        small("mix", 64),
        duty("gemm_64x28672x8192", 0.004, 0.008),
        at_clock(elementwise("gelu", 4096, 8960), "capped"),
        step("llama3-8b", 2, "decode", 4, 512),
        step("qwen3-30b-a3b", 2, "decode", 4, 512),
        dit("wan2.1-1.3b", 2, 4096, 1),
    ]
    if world == 1:
        return one_token
    many: list[PlannedRow] = [
        {"kind": "host"},
        {"kind": "idle"},
        *(collective(op, 4 * MIB, 8) for op in ("all_reduce", "all_gather", "reduce_scatter")),
        *(collective(op, 4 * MIB, 8) for op in ("all_to_all", "sendrecv_ring")),
        collective("all_gather", 4 * MIB, None, "loop"),
        in_context("reduce_scatter", (128, 8192, 4096), 8),
        in_context("sendrecv_ring", (128, 8192, 4096), 8),
        together("gemm", "rs8", {"gemm_mnk": [2048, 8192, 14336]}, 32 * MIB),
        step("llama3-70b", 1, "decode", 4, 512, tp=world),
        step("llama3-70b", 1, "prefill", 1, 2048, **overlap(world, 4, 8)),
    ]
    if world == 2:
        many.append(step("llama3-8b", 2, "prefill", 4, 512, pp=2, micro_batches=4))
    many.append(step("llama3-8b", 2, "prefill", 1, 2048, cp=world, ulysses=world, lm_head=False))
    return many


def gaps(_: int) -> list[PlannedRow]:
    """Single-GPU points missing from earlier records: clock, small and odd sizes, ragged attention."""
    rows = [*HOST, *checks()]
    for m in (64, 128, 1024):
        rows += [duty(f"gemm_{m}x28672x8192", burst_s, idle_s) for burst_s, idle_s in BURSTS]
    for tokens in (256, 2048):
        kernel = grouped("gate_up", 128, tokens)
        name = f"grouped_gate_up_128x{tokens}"
        rows += [duty(name, burst_s, idle_s, kernel) for burst_s, idle_s in (BURSTS[0], BURSTS[2], BURSTS[4])]
    rows += [gemm(m, n, k) for m in (2, 8, 32, 96, 192, 768, 4, 12, 384) for n, k in LLAMA_8B]
    rows += [gemm(m, n, k) for m in (8, 32, 96, 384) for n, k in LLAMA_70B_TP2]
    rows += [gemm(m, *HEAD_8B) for m in (4, 12, 32, 96)]
    rows += [gemm(m, n, k) for m in (1, 32, 128, 1024, 4096) for n, k in QWEN]
    rows += [gemm(m, 128, 2048) for m in (1, 32, 512, 4096)]
    rows += ragged_attention()
    rows += [grouped(w, 128, t) for t in (4, 16, 64, 256, 1024, 4096) for w in ("gate_up", "down")]
    rows += [grouped(w, 64, t) for t in (64, 1024) for w in ("gate_up", "down")]
    rows += [elementwise("gelu", t, ff) for t in (64, 4096, 32760) for ff in (8960, 13824)]
    rows += [elementwise("add_rmsnorm", t, w) for t in (256, 4096, 32760) for w in (1536, 5120)]
    rows += [elementwise("add_rmsnorm", t, 2048) for t in (32, 1024)]
    rows += [elementwise("rope", 32760, h) for h in (24, 80)]
    rows += [elementwise("silu_mul", t, 768) for t in (256, 16384)]
    rows += [permute_copy(t, h, 2) for t, h in ((512, 48), (4096, 48), (16380, 120))]
    rows += [cat(2048, 5120, 4), cat(8192, 5120, 4), kv_write(32, 8, 2048), kv_write(1, 8, 2048)]
    rows += [moe_small(kind, r) for kind in ("gather", "index_add", "topk_sum") for r in (256, 16384)]
    return rows + [small(part, m) for m in (1, 16, 256) for part in ("gemm", "add_rms", "silu", "mix")]


def checks() -> list[PlannedRow]:
    """Points that earlier records hold too: they say whether this machine and this suite agree with them."""
    return [
        gemm(1, 6144, 4096),
        gemm(256, 4096, 4096),
        copy(256 * MIB),
        attention("decode", 8, 2048, 32, 8),
        attention("prefill", 1, 2048, 32, 8),
        elementwise("rope", 1024, 40),
    ]


def ragged_attention() -> list[PlannedRow]:
    """Lengths that are no multiple of 128, and the heads and lengths of diffusion transformers."""
    rows = [attention("prefill", 1, s, 32, 8) for s in (1000, 1500, 3000, 6100)]
    rows += [attention("prefill", 8, 300, 32, 8), attention("prefill", 1, 1100, 64, 8)]
    rows += [attention("decode", b, s, 32, 8) for b, s in ((12, 3000), (1, 1000), (32, 700), (4, 3001))]
    rows += [attention("decode", 12, 3000, 64, 8), attention("decode", 16, 1500, 32, 4)]
    whole = ((40, (4096, 16384, 32760)), (12, (4096, 16384, 32760)), (20, (16384, 32760)), (6, (16384, 32760)))
    for heads, lengths in whole:
        rows += [attention("prefill", 1, s, heads, heads, causal=False, kv_len=s) for s in lengths]
    for heads, s in ((40, 4096), (40, 32760), (12, 4096), (12, 32760)):
        rows.append(attention("prefill", 1, s, heads, heads, causal=False, kv_len=512))
    return rows


def pair(world: int) -> list[PlannedRow]:
    """Collectives inside steps and beside work, at the block counts and sizes earlier records lack."""
    rows = [*HOST, *in_step(world)]
    for m, names in ((128, ("rs4", "rs8", "rs16", "ag8", "ag16")), (2048, ("rs4", "rs8", "rs16", "ag8", "ag16"))):
        fields = {"gemm_mnk": [m, 8192, 14336]}
        rows.append({"kind": "alone", "what": "gemm", **fields})
        rows += [together("gemm", b, fields, 32 * MIB) for b in names]
    # A point that earlier records hold too: the GEMM lost 3 %, the reduce-scatter took three times as long.
    rows.append(together("gemm", "rs4", {"gemm_mnk": [8192, 8192, 14336]}, 128 * MIB))
    heads = {"batch": 1, "seq_len": 8192, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True}
    rows.append({"kind": "alone", "what": "attention", **heads})
    rows += [together("attention", b, heads, 32 * MIB) for b in ("sr8", "sr16", "sr32")]
    sizes = (4 * MIB, 32 * MIB, 256 * MIB)
    moves = ("all_to_all", "sendrecv_ring")
    rows += [collective(op, b, c) for op, c, b in product(moves, (8, 16, 32, 4, 2), sizes)]
    more = (MIB, 16 * MIB, 64 * MIB)
    gathers = ("all_gather", "reduce_scatter")
    rows += [collective(op, b, c) for op, c, b in product(gathers, (8, 16, 4), more)]
    known = ("all_gather", "all_reduce", "reduce_scatter")
    rows += [collective(op, b, None) for b in (65536, 4 * MIB) for op in known]
    return [*rows, collective("all_gather", 65536, None, "loop")]


def in_step(world: int) -> list[PlannedRow]:
    """A collective after the output projection of Llama-3 70B split over ``world`` GPUs."""
    k = 8192 // world
    sizes = (4, 32, 128, 512, 2048, 4096)
    rows = [in_context(op, (m, 8192, k)) for m in sizes for op in ("none", "all_reduce")]
    two = ("reduce_scatter", "all_gather")
    rows += [in_context(op, (m, 8192, k), c) for c in (None, 8) for m in sizes for op in two]
    rows += [in_context(op, (m, 8192, k), c) for c in (4, 16, 32) for m in (128, 512, 2048) for op in two]
    moves = ("all_to_all", "sendrecv_ring")
    return rows + [in_context(op, (m, 8192, k)) for m in (32, 512, 2048) for op in moves]


def calibrate(_: int) -> list[PlannedRow]:
    """What a profile of one GPU is fitted from; under six minutes."""
    rows = [*HOST, *checks()]
    shapes = (*LLAMA_8B, (28672, 8192), (8192, 14336))
    rows += [gemm(m, n, k) for m in (1, 16, 64, 128, 256, 1024, 4096) for n, k in shapes]
    rows += [gemm(m, n, k, "fp8_e4m3") for m in (16, 256, 4096) for n, k in LLAMA_8B[2:]]
    rows += [copy(b * MIB) for b in (4, 32, 256, 1024)]
    for kind, sizes in (("add_rmsnorm", (4096, 8192)), ("silu_mul", (14336,)), ("rope", (40,))):
        rows += [elementwise(kind, t, size) for t in (1, 64, 1024, 8192) for size in sizes]
    rows += [elementwise("cast_fp8", t, 4096) for t in (64, 4096)]
    rows += [moe_small(kind, r) for kind in ("gather", "index_add", "topk_sum") for r in (128, 2048, 65536)]
    rows += [attention("prefill", 1, s, 32, 8) for s in (512, 1000, 4096, 8192)]
    rows += [attention("prefill", 1, s, 8, 1) for s in (2048, 16384)]
    rows += [attention("prefill", 1, 4096, 32, 8, causal=False, kv_len=4096)]
    rows += [attention("decode", b, s, 32, 8) for b, s in ((1, 2048), (1, 8192), (32, 512), (32, 2048), (32, 8192))]
    rows += [grouped(w, 128, t) for t in (1, 32, 512, 8192) for w in ("gate_up", "down")]
    for work in ("gemm_8192x8192x8192", "gemm_512x28672x8192", "gemm_128x28672x8192", "gemm_64x28672x8192"):
        rows += [duty(work, burst_s, idle_s) for burst_s, idle_s in (BURSTS[0], BURSTS[2], BURSTS[4])]
    rows += [small(part, 64) for part in ("gemm", "add_rms", "silu", "mix")]
    rows += host_issue(1)[1:]
    rows.append(
        {
            "kind": "transient",
            "model": "llama3-8b",
            "layers": 32,
            "prefill": "llama3-8b batch 2 seq_len 2048",
            "decode": "llama3-8b batch 32 seq_len 2048",
            "prefill_batch": 2,
            "decode_batch": 32,
            "seq_len": 2048,
        }
    )
    return rows


def experts(_: int) -> list[PlannedRow]:
    """Grouped GEMMs around the row counts at which PyTorch changes kernel, and with weights that stay in L2."""
    both = ("gate_up", "down")
    rows = [grouped(w, 128, t) for t in (1024, 1536, 2000, 2080, 2500, 3000, 3600, 6000) for w in both]
    rows += [grouped(w, 32, t) for t in (1024, 1500, 1900, 2300, 3000, 4096) for w in both]
    rows += [grouped(w, 64, t) for t in (256, 2000, 3000) for w in both]
    # All tokens to the same eight experts: weights small enough for L2, few or many rows each.
    sizes = [(t, k, n) for t in (1, 8, 512, 2000, 4096) for k, n in ((768, 2048), (2048, 768))]
    return rows + [
        {**grouped("down", 128, t, skew=ONE_SET), "k": k, "n": n, "resident": resident}
        for t, k, n in sizes
        for resident in (False, True)
    ]


def alternating(_: int) -> list[PlannedRow]:
    """Work that would pass the cap, with short pauses all the time: what mean power the limiter then settles at."""
    works = ("gemm_8192x8192x8192", "gemm_1024x28672x8192", "gemm_256x28672x8192")
    shapes = [(0.001, 0.1), (0.002, 0.05), (0.002, 0.1), (0.002, 0.2), (0.008, 0.1), (0.03, 0.1)]
    rows: list[PlannedRow] = [
        {"kind": "alternating", "world": 1, "work": work, "busy_s": busy_s, "pause_share": share}
        for work in works
        for busy_s, share in shapes
    ]
    return rows + [{**rows[0], "work": work, "pause_share": 0.0} for work in works]


def values(_: int) -> list[PlannedRow]:
    """One GEMM over operands of other values: what the data alone does to power, and to time under the cap."""
    kinds = {"bf16": ("normal", "zeros", "small"), "fp8_e4m3": ("normal", "zeros", "small", "bits")}
    shapes = ((4096, 4096, 14336), (256, 28672, 4096), (16, 28672, 4096))
    return [
        {**gemm(*mnk, dtype), "values": kind} for dtype, names in kinds.items() for mnk in shapes for kind in names
    ] + [{**gemm(*mnk, "fp8_e4m3"), "fast_accumulation": True} for mnk in shapes]


def sampling(_: int) -> list[PlannedRow]:
    """What a server does with the logits, over batch and vocabulary (Llama-3's and Qwen3's)."""
    few, many = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 8, 32, 128, 256)
    rows = [sample("top_p", n, 128_256) for n in (*few, 192, 384, 512)]
    rows += [sample(how, n, 128_256) for how in ("greedy", "random") for n in few]
    rows += [sample(how, n, 151_936) for how in ("top_p", "greedy", "random") for n in many]
    return [HOST[0], *rows]


def host_issue(_: int) -> list[PlannedRow]:
    """What each operation of an eager step costs the host."""
    return [HOST[0], *({"kind": "host_issue", "work": work} for work in WORKS)]


def calibrate_multi(world: int) -> list[PlannedRow]:
    """What a profile's collectives are fitted from, on all GPUs of a host."""
    rows: list[PlannedRow] = [*HOST]
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv_ring")
    sizes = (8192, 65536, 262144, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    rows += [collective(op, b, None) for op in ops for b in sizes]
    rows += [collective(op, b, c) for op in ops for c in (2, 8, 32) for b in (4 * MIB, 256 * MIB)]
    rows += in_step(world)[:24]
    fields = {"gemm_mnk": [8192, 8192, 28672 // world]}
    rows.append({"kind": "alone", "what": "gemm", **fields})
    rows += [together("gemm", b, fields, 128 * MIB) for b in ("rs2", "rs8", "rs32", "ar8")]
    moved = {"copy_bytes_moved": 256 * MIB}
    rows.append({"kind": "alone", "what": "copy", **moved})
    # Below the cap, like the copy: what each chip draws.
    rows += [{"kind": "alone", "what": "gemm", "gemm_mnk": list(mnk)} for mnk in ((1, 8192, 8192), (16, 28672, 8192))]
    return rows + [together("copy", b, moved, 128 * MIB) for b in ("rs2", "rs8", "rs32", "ar8")]


# name -> (least number of GPUs, maker)
PLANS: dict[str, tuple[int, PlanMaker]] = {
    "smoke": (1, smoke),
    "calibrate": (1, calibrate),
    "calibrate_multi": (2, calibrate_multi),
    "experts": (1, experts),
    "values": (1, values),
    "alternating": (1, alternating),
    "clocks": (1, clocks),
    "host_issue": (1, host_issue),
    "gaps": (1, gaps),
    "pair": (2, pair),
    "sampling": (1, sampling),
    "validate1": (1, validate1),
    "validate2": (2, validate2),
    "validate4": (4, validate4),
    "eight": (8, eight),
    "chunks": (2, chunks),
    "vllm": (1, vllm),
    "diffusers": (1, diffusers),
}


def planned(name: str, *, world: int = 1) -> list[PlannedRow]:
    """The rows of plan ``name`` for ``world`` GPUs.

    >>> planned("smoke")[0]
    {'kind': 'host', 'world': 1}
    """
    least, make = _plan(name)
    if world < least:
        raise HardwareError(f"plan '{name}' needs at least {least} GPUs, world = {world}: pass --world {least}")
    rows = [_ordered(row, world) for row in make(world)]
    return [row for i, row in enumerate(rows) if row not in rows[:i]]


def least_world(name: str) -> int:
    """The fewest GPUs that plan ``name`` needs."""
    return _plan(name)[0]


def _plan(name: str) -> tuple[int, PlanMaker]:
    if name not in PLANS:
        near = difflib.get_close_matches(name, PLANS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(PLANS)}"
        raise HardwareError(f"unknown plan '{name}': {hint}")
    return PLANS[name]


def _ordered(row: PlannedRow, world: int) -> PlannedRow:
    return {"kind": row["kind"], "world": row.get("world", world), **row}
