"""Plans of whole models: what predictions are held against, and what no fit may see."""

from __future__ import annotations

from hardware.calibrate.suite.plan import HOST, MIB, PlannedRow, collective, dit, generate, overlap, ring, step


def validate1(_: int) -> list[PlannedRow]:
    """Whole models on one GPU at sizes that no record has."""
    return [
        *HOST,
        step("llama3-8b", 32, "prefill", 3, 1536),
        step("llama3-8b", 32, "decode", 12, 3000),
        generate("llama3-8b", 32, 4, 512, 64),
        step("llama3-8b", 32, "decode", 12, 3000, dtype="fp8_e4m3"),
        step("llama3-8b", 32, "decode", 4, 1000, launch="eager"),
        step("llama3-8b", 32, "prefill", 1, 3000),
        step("llama3-8b", 32, "prefill", 1, 2048),
        step("llama3-70b", 8, "prefill", 1, 3000),
        step("llama3-70b", 8, "decode", 48, 1500),
        step("qwen3-30b-a3b", 24, "decode", 16, 1500, expert_skew=0.0),
        step("qwen3-30b-a3b", 24, "prefill", 1, 3000, expert_skew=0.0),
        dit("wan2.1-1.3b", 30, 8192, 1),
        dit("wan2.1-14b", 8, 8192, 1),
        step("llama3-8b", 32, "prefill", 2, 1500, dtype="fp8_e4m3"),
    ]


def validate2(world: int) -> list[PlannedRow]:
    """Whole models on several GPUs at sizes and layouts that no record has."""
    rows = [
        *HOST,
        step("llama3-8b", 32, "prefill", 1, 8192, cp=world, ulysses=world, lm_head=False),
        step("llama3-70b", 8, "prefill", 1, 3000, tp=world),
        step("llama3-70b", 8, "decode", 48, 1500, tp=world),
        step("llama3-8b", 32, "decode", 12, 3000, tp=world),
        generate("llama3-8b", 32, 4, 512, 64, tp=world),
        step("llama3-70b", 8, "prefill", 1, 4096, **overlap(world, 1, 8)),
        step("llama3-70b", 8, "prefill", 1, 4096, **overlap(world, 2, 8)),
        step("llama3-70b", 8, "prefill", 1, 4096, **overlap(world, 4, 8)),
        step("llama3-70b", 8, "prefill", 1, 4096, **overlap(world, 4, 4)),
        step("llama3-70b", 4, "prefill", 3, 2048, **overlap(world, 2, 16)),
        step("llama3-70b", 4, "prefill", 3, 2048, **overlap(world, 1, None)),
        dit("wan2.1-1.3b", 30, 8192, world),
        dit("wan2.1-14b", 8, 16384, world),
        ring("striped", 24576, 32, 8),
        ring("contiguous", 24576, 32, 8),
        step("qwen3-30b-a3b", 12, "decode", 16, 1500, tp=world, ep=world, ep_mode="all_reduce", expert_skew=0.4),
    ]
    if world == 2:
        rows.insert(3, step("llama3-8b", 32, "prefill", 4, 2048, pp=2, micro_batches=4))
    return rows


def validate4(world: int) -> list[PlannedRow]:
    """Whole models on four GPUs: tensor, expert and context parallel, overlap, full depth, ring, diffusion."""
    tp, ep = {"tp": world}, {"tp": world, "ep": world, "ep_mode": "all_reduce"}
    return [
        *HOST,
        *(step("llama3-70b", 8, "prefill", b, s, **tp) for b, s in ((1, 512), (1, 2048), (2, 3072))),
        *(step("llama3-70b", 8, "decode", b, s, **tp) for b, s in ((1, 2048), (16, 2048), (64, 1024))),
        step("llama3-8b", 32, "prefill", 1, 1536, **tp),
        step("llama3-8b", 32, "decode", 24, 1024, **tp),
        *(step("qwen3-30b-a3b", 12, "prefill", 1, s, **ep, expert_skew=k) for s, k in ((2048, 0.0), (1024, 0.5))),
        *(step("qwen3-30b-a3b", 12, "decode", b, 1024, **ep, expert_skew=k) for b, k in ((8, 0.0), (64, 0.5))),
        *(
            step("llama3-70b", 4, "prefill", 2, 2048, **overlap(world, chunks, ctas))
            for chunks, ctas in ((1, None), (1, 8), (2, 8), (4, 8), (2, 4), (4, 16))
        ),
        step("llama3-70b", 4, "prefill", 1, 2048, **overlap(world, 2, 8)),
        step("llama3-8b", 32, "prefill", 1, 8192, cp=world, ulysses=world, lm_head=False),
        ring("striped", 32768, 32, 8),
        ring("contiguous", 32768, 32, 8),
        dit("wan2.1-1.3b", 30, 16384, world),
        dit("wan2.1-14b", 8, 16384, world),
        step("llama3-70b", 80, "prefill", 1, 3072, **tp),
        step("llama3-70b", 80, "decode", 16, 2048, **tp),
    ]


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


def chunks(world: int) -> list[PlannedRow]:
    """Chunked overlap of short prompts: what each further chunk of a collective costs (run with ``--traces``)."""
    return [
        step("llama3-70b", 4, "prefill", 1, tokens, **overlap(world, count, 8))
        for tokens in (512, 1024, 2048, 4096)
        for count in (1, 2, 4)
    ]
