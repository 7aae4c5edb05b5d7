"""Ring attention and video diffusion: counts, conservation, published bounds, and our own records."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from sim.cli import main
from sim.studies.validate import validate
from workloads.errors import WorkloadError
from workloads.families.dit import build_denoise, load_dit, video_tokens
from workloads.families.ring import LAYOUTS, RingLayout, build_ring
from workloads.program import Program
from workloads.work import AttentionWork, CollectiveWork

VALIDATION = Path(__file__).parents[1] / "records/h100-sxm-80gb/validation"


def flops(program: Program) -> float:
    return sum(k.flops * s.repeat for r in program.ranks for p in r.phases for s in p.segments for k in s.kernels)


def rounds(layout: RingLayout, ranks: int, block: int) -> list[list[float]]:
    """Attention FLOPs by rank and round."""
    program = build_ring(layout, ranks=ranks, seq_len=ranks * block, q_heads=1, kv_heads=1, head_dim=1)
    table = []
    for rank in program.ranks:
        kernels = rank.phases[0].segments[0].kernels
        sends = [i for i, kernel in enumerate(kernels) if isinstance(kernel.work, CollectiveWork)]
        assert len(sends) == ranks - 1
        turns = [0.0] * ranks
        for kernel in kernels:
            if not isinstance(kernel.work, CollectiveWork):  # an attention waits for the transfer of the turn before
                turns[sends.index(kernel.after[0]) + 1 if kernel.after else 0] = kernel.flops
        table.append(turns)
    return table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_same_scores(layout: RingLayout) -> None:
    """n (n + 1) / 2 of them, n * n without a mask; a backward pass costs two forward ones."""
    sizes = {"ranks": 4, "seq_len": 4096, "q_heads": 2, "kv_heads": 2, "head_dim": 8}
    assert flops(build_ring(layout, **sizes)) == 4 * 2 * 8 * 4096 * 4097 / 2
    assert flops(build_ring(layout, **sizes, causal=False)) == 4 * 2 * 8 * 4096**2
    assert flops(build_ring(layout, **sizes, backward=True)) == 2 * flops(build_ring(layout, **sizes))


def test_gradients_travel_home() -> None:
    """Keys and values pass n - 1 times in 16 bit, their gradients n times in 32 bit, each after it was computed."""
    kernels = build_ring("zigzag", ranks=4, seq_len=4096, q_heads=2, kv_heads=2, head_dim=8, backward=True)
    rank = kernels.ranks[1].phases[0].segments[0].kernels
    moved = [(k.name, k.bytes_moved) for k in rank if isinstance(k.work, CollectiveWork)]
    block = 2 * 2 * 1024 * 8
    assert sorted(moved) == [("send_kv", 2.0 * block)] * 3 + [("send_kv_grad", 4.0 * block)] * 4
    for index, kernel in enumerate(rank):
        if kernel.name == "send_kv_grad":
            assert [rank[before].name for before in kernel.after] == ["attention_kv_grad"]
            assert kernel.after[0] < index


def test_contiguous_leaves_a_triangle_of_waiting_ranks() -> None:
    table = rounds("contiguous", 4, 64)
    assert [[turn > 0 for turn in rank] for rank in table] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]
    with_diagonal, without = 4 * 64 * 65 / 2, 4 * 64 * 63 / 2
    assert rounds("striped", 4, 64)[1] == [with_diagonal, with_diagonal, without, without]
    assert {sum(rank) for rank in rounds("zigzag", 4, 64)} == {sum(rounds("zigzag", 4, 64)[0])}


def test_striped_speed_up_bounds_of_the_paper(shared: Path) -> None:
    """All 103 theoretical maxima of arXiv 2311.09431 from the programs' own work, communication hidden.

    A round lasts as long as its busiest rank. Beside attention: two feed-forward matrices and one head, as there;
    attention counts twice on A100 (TF32 against bf16).
    """
    path = shared / "public" / "striped_attention_speedups.csv"
    sizes = {"1B": (2048, 5504, 22), "3B": (3200, 8640, 26), "7B": (4096, 11008, 32)}
    seen = 0
    for row in csv.DictReader(path.open(encoding="utf-8")):
        ranks = int(row["ring_devices"])
        block = int(row["seq_len"]) // ranks
        width, ff, layers = sizes[row["model"]]
        other = block * (layers * (8 * width**2 + 4 * width * ff) + 2 * 32000 * width)
        weight = 2 if row["device"].startswith("A100") else 1
        longest = {
            layout: sum(max(turn) for turn in zip(*rounds(layout, ranks, block), strict=True)) * width * layers
            for layout in ("contiguous", "striped")
        }
        bound = (other + weight * longest["contiguous"]) / (other + weight * longest["striped"])
        assert bound == pytest.approx(float(row["theoretical_max_speedup"]), abs=0.005), row
        seen += 1
    assert seen == 103


def test_video_tokens() -> None:
    wan = load_dit("wan2.1-14b")
    assert video_tokens(wan, frames=81, height=720, width=1280) == 75_600
    assert video_tokens(load_dit("wan2.1-1.3b"), frames=81, height=480, width=832) == 32_760
    with pytest.raises(WorkloadError, match=r"height = 721: wan2.1-14b cuts it into cells of 16: give a multiple"):
        video_tokens(wan, frames=81, height=721, width=1280)


def test_ulysses_ranks_share_the_work_of_a_step() -> None:
    wan = load_dit("wan2.1-14b")
    whole, split = (build_denoise(wan, tokens=16_384, layers=2, ulysses=n) for n in (1, 4))
    text = 2.0 * 512 * 2 * 5120 * 5120 * 2  # every rank makes the text's keys and values
    assert flops(split) == pytest.approx(flops(whole) + 3 * text, rel=1e-3)
    names = [k.name for k in split.ranks[0].phases[0].segments[0].kernels]
    assert names[:8] == [
        "add_rmsnorm_attn", "qkv_gemm", "rope", "permute_qkv", "all_to_all_qkv", "attention", "all_to_all_out",
        "permute_out",
    ]  # fmt: skip
    works = [k.work for k in split.ranks[0].phases[0].segments[0].kernels if isinstance(k.work, AttentionWork)]
    assert [(w.q_len, w.kv_len, w.q_heads) for w in works] == [(16_384, 16_384, 10), (4096, 512, 40)]
    with pytest.raises(WorkloadError, match="ulysses = 3: must divide the 16384 tokens and the 40 heads"):
        build_denoise(wan, tokens=16_384, ulysses=3)


@pytest.mark.parametrize(("kind", "latency", "energy"), [("dit_step", 0.06, 0.06), ("ring_attention", 0.07, 0.08)])
def test_our_own_records(tmp_path: Path, kind: str, latency: float, energy: float) -> None:
    """Rows in no fit, on 1, 2 and 4 GPUs."""
    rows = [
        line
        for name in ("one_gpu", "two_gpus", "four_gpus")
        for line in (VALIDATION / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        if json.loads(line)["kind"] == kind
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    for row in validate([path]):
        assert row.skipped is None
        assert abs(row.error("latency_s") or 0.0) < latency, row.record.inputs
        assert abs(row.error("energy_j") or 0.0) < energy, row.record.inputs


def test_the_ring_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["ring", "--world", "2", "--seq-lens", "16384", "--json"])
    points = {p["layout"]: p for p in json.loads(capsys.readouterr().out)["points"]}
    assert points["striped"]["speedup"] > 1.1 and points["contiguous"]["speedup"] == 1.0
    waiting, working = points["contiguous"]["power_w_per_gpu"]
    assert waiting < 0.8 * working
    with pytest.raises(SystemExit) as stop:
        main(["ring", "--world", "3"])
    assert stop.value.code == 2
    assert "ranks = 3: a ring has at least 2, and its 3 parts divide the 16384 tokens" in capsys.readouterr().err
