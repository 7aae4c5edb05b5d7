"""Diffusion transformers: tokens, kernels, whole videos, reuse, published figures, and our own records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.cli import main
from sim.errors import ScenarioError
from sim.result.timeline import Timeline
from sim.scenario.video import video_summary
from sim.validation.validate import validate
from workloads.diffusion import load_dit, parse_video, video_tokens
from workloads.errors import WorkloadError
from workloads.families.dit_layers import build_denoise
from workloads.program import Program
from workloads.reuse import computed_steps
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


WAN_14B = {"model": "wan2.1-14b", "gpu": "a100-sxm-80gb", "phase": "denoise", "video": "1280x720x81"}
WAN_1B = {"model": "wan2.1-1.3b", "gpu": "a100-sxm-80gb", "phase": "denoise", "video": "832x480x81"}


def video(fields: dict[str, Any], **more: Any) -> Timeline:
    return simulate(**{"guidance": "sequential", **fields, **more})


def before_the_decoder(run: Timeline) -> tuple[float, float]:
    """Seconds and joules of all GPUs but for the decoder's."""
    decoder = run.energy_by("phase").loc["decode video"]
    return run.latency_s - decoder["duration_s"], run.energy_j - decoder["energy_j"]


# Seconds on 1, 2, 4, 8 A100s from the README of Wan-Video/Wan2.1.
WAN_14B_S = {1: 3342.6, 2: 1722.0, 4: 886.1, 8: 469.9}


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_seconds_of_wan_14b_on_a100s_by_public_kernel_times(cp: int) -> None:
    assert video(WAN_14B, cp=cp).latency_s == pytest.approx(WAN_14B_S[cp], rel=0.07)


def test_scaling_of_wan_14b_over_a100s() -> None:
    ours = {cp: video(WAN_14B, cp=cp).latency_s for cp in WAN_14B_S}
    for cp, per_cent in ((2, 97), (4, 94), (8, 89)):
        assert abs(100 * ours[1] / (cp * ours[cp]) - per_cent) < 5.0


def test_work_of_a_forward_pass() -> None:
    """6.52 PFLOP by counting products and attention of Wan2.1-14B at 720p."""
    forward = build_denoise(load_dit("wan2.1-14b"), tokens=75_600)
    assert flops(forward) == pytest.approx(6.52e15, rel=2e-3)


@pytest.mark.parametrize(
    ("fields", "cp", "computed", "speedup"), [(WAN_14B, 8, 21, 2.34), (WAN_14B, 8, 20, 2.45), (WAN_1B, 1, 26, 1.89)]
)
def test_reuse_reaches_what_was_published(fields: dict[str, Any], cp: int, computed: int, speedup: float) -> None:
    """GalaxyDiT's 2.37x lies between 21 and 20 computed steps of 50, its 1.87x at 26; the rest is the first block.

    Before the decoder, which takes as long either way: with it the whole call is 2.22, 2.32 and 1.81 times as fast.
    """
    plain = video(fields, cp=cp)
    reused = video(fields, cp=cp, reuse=f"rate:{1 - computed / 50:g}")
    assert video_summary(reused.scenario)["computed_steps"] == computed
    (whole_s, whole_j), (less_s, less_j) = before_the_decoder(plain), before_the_decoder(reused)
    assert whole_s / less_s == pytest.approx(speedup, abs=0.01)
    assert whole_j / less_j == pytest.approx(speedup, rel=0.02)
    assert 0.93 * speedup < plain.latency_s / reused.latency_s < speedup
    assert speedup < 50 / computed  # what is reused is not free


def test_cached_residuals() -> None:
    """2.88 GiB of Wan2.1-14B at 720p, shared by the ranks."""
    run = video(WAN_14B, cp=8, steps=5, reuse="rate:0.4")
    about = video_summary(run.scenario)
    assert about["reuse_cache_bytes"] == 4 * 75_600 * 5120 * 2
    assert round(about["reuse_cache_bytes"] / 2**30, 2) == 2.88
    without = video_summary(video(WAN_14B, cp=8, steps=5).scenario)
    assert about["memory_bytes_per_gpu"] - without["memory_bytes_per_gpu"] == about["reuse_cache_bytes"] / 8


def test_guidance_costs_a_second_branch() -> None:
    small = {**WAN_1B, "gpu": "h100-sxm-80gb", "steps": 4}
    one, batch, after, beside = (
        before_the_decoder(video(small, guidance=guidance))[0]
        for guidance in ("none", "batch", "sequential", "parallel")
    )
    extra = video({**small, "video": None, "seq_len": 32_760}, guidance="none").latency_s  # steps alone
    assert batch - one == pytest.approx(extra, rel=0.05) == after - one
    assert one < beside < one + 0.05 * extra
    assert video(small, guidance="parallel").gpus == 2


def test_rings_beside_ulysses() -> None:
    """12 heads do not divide by 8: four Ulysses ranks, rings of two; the parts add up to the whole."""
    run = video(WAN_1B, cp=8, ulysses=4, cp_mode="ring", steps=3, guidance="none")
    assert run.energy_by("kernel")["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)
    assert {"send_kv", "merge_out", "all_to_all_qkv"} <= set(run.energy_by("kernel").index)
    full = video(WAN_1B, cp=8, ulysses=4, cp_mode="ring", steps=3, guidance="none", detail="full")
    assert full.latency_s == run.latency_s and full.energy_j == pytest.approx(run.energy_j, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "wan2.1-14b"}, "model = 'wan2.1-14b' is a diffusion transformer: use phase = 'denoise'"),
        ({"model": "llama3-8b", "phase": "denoise"}, "unknown diffusion transformer 'llama3-8b'"),
        ({"model": "llama3-8b", "steps": 3}, "steps = 3 is for phase 'denoise', not 'prefill'"),
        ({**WAN_14B, "tp": 2}, "tp = 2 has no meaning in phase 'denoise'"),
        ({**WAN_14B, "images": 2}, "images = 2 has no meaning in phase 'denoise': give batch = 2"),
        ({**WAN_14B, "routing_seed": 2}, "routing_seed = 2 has no meaning in phase 'denoise': leave it out"),
        ({**WAN_14B, "seq_len": 5}, "seq_len = 5 contradicts video = '1280x720x81'"),
        ({**WAN_14B, "video": "1280x720x80"}, "frames = 80: wan2.1-14b makes one and a multiple of 4: give 77"),
        ({**WAN_14B, "video": "tall"}, "video = 'tall': give WIDTHxHEIGHTxFRAMES like 1280x720x81"),
        ({**WAN_14B, "cp": 4, "ulysses": 3, "cp_mode": "ring"}, "ulysses = 3 with cp = 4: give cp = 3, or a multiple"),
        ({**WAN_14B, "cp": 16}, "ulysses = 16, ring = 1: ulysses must divide the 40 heads"),
        ({**WAN_14B, "cp": 16}, "both together the 75600 tokens: use ulysses = 1, 2, 4, 5, 8, 10"),
        (
            {"model": "flux.1-dev", "phase": "denoise", "video": "1280x720x81"},
            "video = 1280x720x81: flux.1-dev makes single images: give 1280x720",
        ),
        (
            {"model": "flux.1-dev", "phase": "denoise", "video": "1024x1024", "cp": 3},
            "both together the 4096 tokens and 512 text tokens: use ulysses = 1, 2, 4, 8",
        ),
        (
            {"model": "flux.1-dev", "phase": "denoise", "video": "1024x1024", "cp": 7, "cp_mode": "ring"},
            "4096 tokens and 512 text tokens: use ring = 1, 2, 4, 8, 16",
        ),
        ({**WAN_14B, "gpu": "l4-24gb"}, "wan2.1-14b does not fit on l4-24gb: weights 28.5 + activations"),
        ({**WAN_14B, "reuse": "rate:0.9"}, "give the share of reused steps, 0 to 0.8 of 50 steps"),
        ({**WAN_14B, "reuse": "steps:1-9,30"}, "step 10 is among the first 10, which are never reused"),
        ({**WAN_14B, "reuse": "steps:1-60"}, "'1-60' is not within 1 to 50"),
        ({**WAN_14B, "reuse": "often"}, "reuse = 'often': give steps:1-10,13,16, rate:0.58 or metric:"),
        ({**WAN_14B, "reuse": "metric:no.csv,change,1"}, "cannot read metrics 'no.csv': No such file"),
    ],
)
def test_videos_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, WorkloadError), match=re.escape(message)):
        simulate(**fields)


def test_a_threshold_on_a_metric(tmp_path: Path) -> None:
    """Changes of 1, 1, 4, 1, 1, 1 after the first 20 %: computed where they add up to 2 since the last one."""
    path = tmp_path / "changes.csv"
    path.write_text("step,change\n" + "".join(f"{i},{c}\n" for i, c in enumerate([9, 9, 1, 1, 4, 1, 1, 1, 0, 0])))
    computed = computed_steps(f"metric:{path},change,2", 10)
    assert [i for i, now in enumerate(computed) if now] == [0, 1, 3, 4, 6]
    with pytest.raises(WorkloadError, match=r"has 10 rows, the run 5 steps"):
        computed_steps(f"metric:{path},change,2", 5)


def test_the_dit_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        "wan2.1-1.3b",
        "--video",
        "832x480x81",
        "--steps",
        "10",
        "--cp",
        "1,8",
        "--reuse",
        "rate:0.4",
    ]
    main(["dit", *arguments, "--json"])
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(p["gpus"], p["ulysses"], p["ring"], p["computed_steps"]) for p in points] == [
        (1, 1, 1, 10), (1, 1, 1, 6), (8, 4, 2, 10), (8, 4, 2, 6)
    ]  # fmt: skip
    assert [p["events_kernels"] == p["kernels"] for p in points] == [True, True, True, True]
    assert not any(p["derived_kernels"] for p in points)
    assert points[0]["speedup"] == 1.0 and points[1]["speedup"] > 1.3
    path = tmp_path / "metrics.csv"
    path.write_text("step,change,latent,text,flat\n1,0.5,9,1,3\n2,0.4,7,3,3\n3,0.1,5,2,3\n4,0.2,6,4,3\n")
    main(["dit", "select-proxy", str(path), "--reference", "change", "--json"])
    proxies = json.loads(capsys.readouterr().out)["proxies"]
    assert [(p["name"], p["spearman"]) for p in proxies] == [
        ("latent", pytest.approx(1.0)), ("text", pytest.approx(-0.4)), ("flat", None)
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        main(["dit", "select-proxy", str(path), "--reference", "quality"])
    assert stop.value.code == 2 and "has no column 'quality': it has change, latent" in capsys.readouterr().err


@pytest.mark.parametrize("fields", [{}, {"stack": "diffusers"}, {"cp": 2, "guidance": "none"}])
def test_a_decoder_behind_capped_steps_has_a_clock_of_its_own(fields: dict[str, Any]) -> None:
    """Below the cap it runs as if there were none, and so in every detail; the steps hold the cap."""
    image = {"model": "flux.1-dev", "gpu": "h200-sxm-141gb", "phase": "denoise", "video": "1024x1024", "batch": 2}
    image |= {"steps": 3, "layers": 6, **fields}
    free, capped = video(image, uncapped=True, detail="full"), video(image, detail="full")
    (free_s, _), (own_s, own_j) = (
        run.energy_by("phase").loc["decode video", ["duration_s", "energy_j"]] for run in (free, capped)
    )
    assert own_s == pytest.approx(free_s, rel=1e-3)  # the fast limit holds a few kernels
    steps = [f"denoise {step}" for step in (1, 2, 3)]
    step_j, step_s = capped.energy_by("phase").loc[steps, ["energy_j", "duration_s"]].sum()
    assert capped.clock_limit_hz[0] < 1.9e9 and step_j < free.energy_by("phase").loc[steps, "energy_j"].sum()
    assert own_j / own_s < 700.0 * capped.gpus and step_j / step_s < 715.0 * capped.gpus
    same = video(image, shortcuts=True) if "cp" not in fields else video(image)
    assert (same.latency_s, same.energy_j) == pytest.approx((capped.latency_s, capped.energy_j), rel=1e-9)


def test_a_long_decoder_holds_the_cap() -> None:
    """On an A100 it would draw 439 W at the clock of the steps."""
    run = video(WAN_14B, steps=2, guidance="none", shortcuts=True)
    joules, seconds = run.energy_by("phase").loc["decode video", ["energy_j", "duration_s"]]
    assert seconds > 10.0 and 390.0 < joules / seconds < 400.0
