"""The named plans; and a file of records is one: its rows, to be measured again, here or on another machine.

``calibrate`` and ``calibrate_multi`` are what a user's GPU gets. Shapes are those of Llama-3 8B and 70B (whole and
split over 2, 4, 8 GPUs), Qwen3-30B-A3B and Wan2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hardware.calibrate.suite.host_issue import WORKS
from hardware.calibrate.suite.plan import (
    HOST,
    MIB,
    PlannedRow,
    asked,
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
    load,
    moe_small,
    overlap,
    permute_copy,
    ring,
    small,
    step,
    together,
)
from hardware.calibrate.suite.plans_vllm import vllm
from hardware.errors import HardwareError
from inputs.suggest import nearest

RECORDS = ".jsonl"  # what the name of a file of records ends with
PlanMaker = Callable[[int], list[PlannedRow]]
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
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
        attention("decode", 8, 2048),
        attention("prefill", 1, 1000),
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


def checks() -> list[PlannedRow]:
    """Points that earlier records hold too: they say whether this machine and this suite agree with them."""
    return [
        gemm(1, 6144, 4096),
        gemm(256, 4096, 4096),
        copy(256 * MIB),
        attention("decode", 8, 2048),
        attention("prefill", 1, 2048),
        elementwise("rope", 1024, 40),
    ]


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
    rows += [attention("prefill", 1, s) for s in (512, 1000, 4096, 8192)]
    rows += [attention("prefill", 1, s, (8, 1)) for s in (2048, 16384)]
    rows += [attention("prefill", 1, 4096, causal=False, kv_len=4096)]
    rows += [attention("decode", b, s) for b, s in ((1, 2048), (1, 8192), (32, 512), (32, 2048), (32, 8192))]
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


def eight(world: int) -> list[PlannedRow]:
    """A node of eight GPUs: collectives by size and blocks, Llama-3-70B, Qwen3-30B-A3B both ways, overlap, rings.

    Its predictions are committed before any such run (docs/predictions/eight.jsonl).
    """
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv_ring")
    sizes = (16 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
    counts = (None, 2, 4, 8, 16, 32)
    tp = {"tp": world}
    expert = ({"tp": world, "ep": world, "ep_mode": "all_reduce"}, {"ep": world, "ep_mode": "all_to_all"})
    prompts = ((1, 1024), (2, 4096))
    return [
        *HOST,
        *(collective(op, size, ctas) for op in ops for size in sizes for ctas in counts),
        *(collective(op, size, None, "loop") for op in ops for size in (16 * 1024, 4 * MIB, 64 * MIB)),
        *(step("llama3-70b", n, "prefill", b, s, **tp) for n in (8, 80) for b, s in ((1, 1024), (1, 4096), (2, 4096))),
        *(step("llama3-70b", n, "decode", b, 2048, **tp) for n in (8, 80) for b in (1, 8, 32, 128)),
        *(step("qwen3-30b-a3b", 12, "prefill", b, s, **way) for way in expert for b, s in prompts),
        *(step("qwen3-30b-a3b", 12, "decode", b, 2048, **way) for way in expert for b in (8, 32, 128)),
        *(
            step("llama3-70b", 4, "prefill", 2, 4096, **overlap(world, chunks, ctas))
            for chunks in (1, 2, 4)
            for ctas in (4, 8, 16, 32)
        ),
        *(ring(layout, tokens, 32, 8) for layout in ("contiguous", "striped") for tokens in (65536, 262144)),
    ]


# name -> (least number of GPUs, maker)
PLANS: dict[str, tuple[int, PlanMaker]] = {
    "smoke": (1, smoke),
    "calibrate": (1, calibrate),
    "calibrate_multi": (2, calibrate_multi),
    "host_issue": (1, host_issue),
    "eight": (8, eight),
    "vllm": (1, vllm),
}


def planned(name: str, *, world: int = 1) -> list[PlannedRow]:
    """The rows of plan ``name`` for ``world`` GPUs, or those of a file of records that are of so many.

    >>> planned("smoke")[0]
    {'kind': 'host', 'world': 1}
    """
    if name.endswith(RECORDS):
        return [row for row in map(asked, load(Path(name))) if _world_of(row) == world]
    least, make = _plan(name)
    if world < least:
        raise HardwareError(f"plan '{name}' needs at least {least} GPUs, world = {world}: pass --world {least}")
    rows = [_ordered(row, world) for row in make(world)]
    return [row for i, row in enumerate(rows) if row not in rows[:i]]


def least_world(name: str) -> int:
    """The fewest GPUs that plan ``name`` needs."""
    if name.endswith(RECORDS):
        return min(map(_world_of, load(Path(name))), default=1)
    return _plan(name)[0]


def _world_of(row: PlannedRow) -> int:
    """GPUs that a row takes; steps of models need not say."""
    return int(row.get("world") or max(row.get("tp", 1), row.get("ep", 1)))


def _plan(name: str) -> tuple[int, PlanMaker]:
    if name not in PLANS:
        hint = nearest(name, PLANS, f"known: {', '.join(PLANS)}, or a file of records ({RECORDS})")
        raise HardwareError(f"unknown plan '{name}': {hint}")
    return PLANS[name]


def _ordered(row: PlannedRow, world: int) -> PlannedRow:
    return {"kind": row["kind"], "world": row.get("world", world), **row}
