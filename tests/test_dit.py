"""Diffusion transformers: tokens, kernels, and our own records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.studies.validate import validate
from workloads.diffusion import load_dit, parse_video, video_tokens
from workloads.errors import WorkloadError
from workloads.families.dit import build_denoise
from workloads.program import Program
from workloads.work import AttentionWork

VALIDATION = Path(__file__).parents[1] / "records/h100-sxm-80gb/validation"


def flops(program: Program) -> float:
    return sum(k.flops * s.repeat for r in program.ranks for p in r.phases for s in p.segments for k in s.kernels)


def test_video_tokens() -> None:
    wan = load_dit("wan2.1-14b")
    assert video_tokens(wan, parse_video("1280x720x81")) == 75_600
    assert video_tokens(load_dit("wan2.1-1.3b"), parse_video("832x480x81")) == 32_760
    with pytest.raises(WorkloadError, match=r"height = 721: wan2.1-14b cuts it into cells of 16: give a multiple"):
        video_tokens(wan, parse_video("1280x721x81"))


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
    with pytest.raises(WorkloadError, match=r"ulysses = 3, ring = 1: ulysses must divide the 40 heads of wan2\.1-14b"):
        build_denoise(wan, tokens=16_384, ulysses=3)


def test_our_own_records(tmp_path: Path) -> None:
    """Rows in no fit, on 1, 2 and 4 H100s and one H200."""
    lines = [line for path in sorted(VALIDATION.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["kind"] == "dit_step"), encoding="utf-8")
    for row in validate([path]):
        assert row.skipped is None
        assert abs(row.error("latency_s") or 0.0) < 0.06, row.record.inputs
        assert abs(row.error("energy_j") or 0.0) < 0.06, row.record.inputs
