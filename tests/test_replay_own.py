"""Our own traces: replayed as they are they equal the file, and what-ifs start from the state that was recorded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.cli import main
from sim.replay.changes import Changes, ReplayError
from sim.replay.report import as_document, notes_of
from sim.replay.stated import work_of
from sim.replay.study import Replayed, replay_trace
from sim.result.trace import TraceWindow, write_timeline
from sim.run.runner import simulate
from tests.traces_kit import kernel, launch, write
from workloads.work import RoutedGemmWork

EIGHT = {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "layers": 4}
PREFILL = EIGHT | {"batch": 2, "seq_len": 2048, "tp": 2}
DECODE = EIGHT | {"phase": "decode", "batch": 4, "seq_len": 2048, "layers": 2}
EXPERTS = DECODE | {"model": "qwen3-30b-a3b", "batch": 16, "tp": 2}


def _replayed(path: Path, fields: dict[str, Any], /, name: str = "run.json.gz", **changes: Any) -> Replayed:
    return replay_trace([write_timeline(simulate(**fields), path / name)], Changes(**changes))


SCENARIOS: dict[str, dict[str, Any]] = {
    "prefill": PREFILL,
    "decode": EIGHT | {"phase": "decode", "batch": 16, "seq_len": 1024},
    "generate": EIGHT | {"phase": "generate", "batch": 2, "seq_len": 256, "output_len": 3},
    "eager": EIGHT | {"seq_len": 256, "launch": "eager"},
    "cold": PREFILL | {"regime": "cold"},
    "locked": PREFILL | {"sm_clock_mhz": 1410.0},
    "capped": PREFILL | {"power_cap_w": 450.0},
    "full": PREFILL | {"detail": "full"},
    "folded": PREFILL | {"detail": "folded"},
    "chunks": PREFILL | {"sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8},
    "pipeline": EIGHT | {"tp": 2, "pp": 2, "batch": 4, "seq_len": 512},
    "context": EIGHT | {"cp": 2, "cp_mode": "zigzag", "seq_len": 4096},
    "train": EIGHT | {"phase": "train", "tp": 2, "seq_len": 1024},
    "experts": {"model": "qwen3-30b-a3b", "layers": 2, "tp": 2, "ep": 2, "ep_mode": "all_to_all", "seq_len": 512},
    "exchange kernels": {
        "model": "qwen3-30b-a3b",
        "gpu": "h200-sxm-141gb",
        "layers": 2,
        "phase": "decode",
        "batch": 16,
        "seq_len": 512,
        "ep": 4,
        "dp": 4,
        "ep_mode": "all_to_all",
        "ep_kernels": "low_latency",
    },
    "speculation": EIGHT
    | {"phase": "decode", "batch": 8, "seq_len": 512, "speculation": "eagle", "draft_tokens": 3, "acceptance": (0.8,)},
    "two nodes": EIGHT | {"tp": 16, "seq_len": 512, "network": "one-switch"},
    "slice": EIGHT | {"gpu": "h100:3g.40gb", "seq_len": 512},
    "replicas": EIGHT | {"dp": 2, "tp": 2, "batch": 4, "seq_len": 512},
    "ring": EIGHT | {"cp": 4, "cp_mode": "striped", "seq_len": 4096},
    "partitions": PREFILL
    | {
        "sequence_parallel": True,
        "overlap_chunks": 2,
        "comm_ctas": 8,
        "sm_partitions": {"compute": 116, "comm": 16},
    },
    "operators": PREFILL | {"sequence_parallel": True, "overlap_ops": {"o_gemm": "4x8"}},
    "engine": EIGHT | {"phase": "decode", "batch": 16, "seq_len": 1024, "stack": "vllm"},
    "denoise": {"model": "wan2.1-1.3b", "gpu": "h100-sxm-80gb", "layers": 2, "phase": "denoise", "cp": 2},
    "fp8 on another board": EIGHT | {"gpu": "h200-sxm-141gb", "dtype": "fp8_e4m3", "seq_len": 1024},
}


@pytest.mark.parametrize("fields", SCENARIOS.values(), ids=SCENARIOS)
def test_an_unchanged_replay_is_the_run(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = simulate(**fields)
    result = replay_trace([write_timeline(run, tmp_path / "run.json.gz")])
    for measured, again in zip(result.measured, result.unchanged.ranks, strict=True):
        assert again.span_us == pytest.approx(measured.span_us, rel=1e-3)
        assert again.overlap_us == pytest.approx(measured.overlap_us, rel=0.01, abs=0.05)
    assert result.unchanged.energy_j == pytest.approx(run.energy_j, rel=0.01)
    assert result.unchanged.power_w_per_rank == pytest.approx(run.power_w_per_gpu, rel=0.01)


def test_a_file_a_rank_thinned_counters_and_perfettos_format_replay_too(tmp_path: Path) -> None:
    """The launches that files a rank hold for other readers stand for no host."""
    run = simulate(**PREFILL)
    for path in (
        write_timeline(run, tmp_path / "run.pftrace"),
        write_timeline(run, tmp_path / "ranks", layout="hta"),
        write_timeline(run, tmp_path / "thin.json", part=TraceWindow(counter_ms=0.5)),
    ):
        result = replay_trace([path])
        assert result.unchanged.ranks[0].span_us == pytest.approx(result.measured[0].span_us, rel=1e-3)
        assert result.unchanged.energy_j == pytest.approx(run.energy_j, rel=0.01)


SLOWER = ({"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1005.0})
WHAT_IFS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # the run recorded, what a replay changes, what a new run has in its place
    "a graph as a graph": (PREFILL, {"launch": "graph"}, {}),
    "steady as steady": (PREFILL, {"regime": "steady"}, {}),
    "nothing faster": (PREFILL, {"faster": {"gemm": 1.0}}, {}),
    "a lower cap": (PREFILL, {"power_cap_w": 450.0}, {"power_cap_w": 450.0}),
    "the cap raised": (PREFILL | {"power_cap_w": 450.0}, {"power_cap_w": 600.0}, {"power_cap_w": 600.0}),
    "the cap lifted": (PREFILL | {"power_cap_w": 450.0}, {"power_cap_w": 700.0}, {"power_cap_w": 700.0}),
    "a lower lock": (PREFILL | {"sm_clock_mhz": 1410.0}, {"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1005.0}),
    "a lock of its own": (PREFILL, {"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1005.0}),
    "a lock lifted": (PREFILL | {"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1980.0}, {"sm_clock_mhz": 1980.0}),
    "decode capped": (SCENARIOS["decode"], {"power_cap_w": 350.0}, {"power_cap_w": 350.0}),
    "adapters slower": (DECODE | {"lora_adapters": 2}, {"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1005.0}),
    "experts slower": (EXPERTS, {"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1005.0}),
    "an engine slower": (PREFILL | {"stack": "vllm", "dtype": "fp8_e4m3"}, *SLOWER),
    "an engine's experts slower": (EXPERTS | {"stack": "vllm", "tp": 1}, *SLOWER),
    "4-bit weights slower": (DECODE | {"weight_dtype": "int4_g128"}, *SLOWER),
    "gathered keys slower": (
        DECODE | {"cp": 2, "cp_mode": "all_gather"},
        {"sm_clock_mhz": 1005.0},
        {"sm_clock_mhz": 1005.0},
    ),
    "a ring slower": (EIGHT | {"cp": 4, "cp_mode": "striped", "seq_len": 32_768, "layers": 2}, *SLOWER),
    "sums in the switch slower": (PREFILL | {"tp": 8}, *SLOWER),  # a law of other GPUs has them follow the clock
    "sums between nodes slower": (SCENARIOS["two nodes"], *SLOWER),
    "a decoder slower": (
        {"model": "flux.1-dev", "phase": "denoise", "video": "256x256", "steps": 1, "layers": 2},
        *SLOWER,
    ),
    "chunks capped": (SCENARIOS["chunks"], {"power_cap_w": 450.0}, {"power_cap_w": 450.0}),
    "eager slower": (SCENARIOS["eager"], {"sm_clock_mhz": 1005.0}, {"sm_clock_mhz": 1005.0}),
    "eager as a graph": (SCENARIOS["eager"], {"launch": "graph"}, {"launch": "graph"}),
}


@pytest.mark.parametrize(("fields", "changes", "instead"), WHAT_IFS.values(), ids=WHAT_IFS)
def test_a_what_if_of_a_steady_run_is_the_other_run(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], instead: dict[str, Any]
) -> None:
    simulated = _replayed(tmp_path, fields, **changes).simulated
    other = simulate(**fields | instead)
    span_s = float(other.kernels["end_s"].max() - other.kernels["start_s"].min())
    assert simulated.ranks[0].span_us == pytest.approx(span_s * 1e6, rel=0.01)
    assert simulated.energy_j == pytest.approx(other.energy_j, rel=0.02)


def test_a_steady_run_asked_cold_leaves_its_settled_clocks_and_says_what_it_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_timeline(simulate(**EIGHT, batch=8, seq_len=2048), tmp_path / "steady.json.gz")
    main(["replay", str(path), "--regime", "cold", "--json"])
    data = json.loads(capsys.readouterr().out)
    before_us, after_us = (data["ranks"][0][key]["span_us"] for key in ("unchanged", "simulated"))
    assert after_us < 0.95 * before_us  # 700 W held it below its highest clocks
    assert any("changed: " in note and "more than its limit of 700 W" in note for note in data["notes"])
    assert data["status"] == "unchecked"
    assert data["status_reasons"] == ["what a steady run does cold was never measured"]


def test_a_replay_is_known_no_better_than_the_run_and_the_sizes_in_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_timeline(simulate(**EIGHT, phase="train", seq_len=1024), tmp_path / "train.json.gz")
    main(["replay", str(path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["status"] == "unchecked" and "phase = train" in data["status_reasons"][0]
    product = {"External id": 1} | kernel("nvjet_tst_128x128", 10, 50)
    board = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    foreign = write(tmp_path / "foreign.json", [product], **board)
    main(["replay", str(foreign), "--sm-clock", "1980"])
    said = " ".join(capsys.readouterr().out.split())
    assert "h100-sxm-80gb (unchecked), 0 kernels by recorded shape" in said
    assert "unchecked: no kernel's sizes are in the trace: each is taken for one of its class" in said


def test_every_kernel_of_experts_and_adapters_is_known_by_its_sizes(tmp_path: Path) -> None:
    """Grouped products were stand-ins of unknown bound, and adapters copies: a lower clock hardly slowed them."""
    image = {"model": "flux.1-dev", "phase": "denoise", "video": "256x256", "steps": 1, "layers": 2}
    for fields in (EXPERTS, EXPERTS | {"stack": "vllm"}, DECODE | {"lora_adapters": 2}, image):
        result = _replayed(tmp_path, fields)
        assert result.unsure == 0 and result.span_range_us is None
        collective = int((result.capture.work.collective >= 0).sum())
        assert result.by_shape == len(result.capture.work) - collective


SOUND = (("family", "gemm"), ("engine", "vllm"), ("experts", 128), ("inner", 768), ("tokens", 16), ("rows", 128),
         ("distinct", 81), ("tiles", ((16, 81.0), (32, 81.0))), ("n", 1536), ("k", 2048))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", 1e12),
        ("tokens", "x"),
        ("rows", 0),
        ("tiles", ((1,),)),
        ("tiles", 5),
        ("tiles", ((-1, 2),)),
        ("n", -3),
    ],
)
def test_sizes_that_no_kernel_has_are_not_taken(name: str, value: object) -> None:
    assert isinstance(work_of(SOUND), RoutedGemmWork)
    assert work_of(tuple((dict(SOUND) | {name: value}).items())) is None  # type: ignore[arg-type]


def test_partitions_under_a_change_are_said_to_be_changed_as_whole_gpus(tmp_path: Path) -> None:
    fields = PREFILL | {"sm_partitions": "compute=112,comm=16"}
    word = "kernels on SM partitions change here as they would on the whole GPU"
    for changes, there in (({"sm_clock_mhz": 1200.0}, True), ({"hide_communication": True}, False)):
        standing = _replayed(tmp_path, fields, **changes).standing
        assert standing is not None and (word in standing.reasons) is there
        assert standing.status == "unchecked"


def test_a_cap_only_ever_speeds_up_as_it_rises_and_is_kept(tmp_path: Path) -> None:
    path = write_timeline(simulate(**PREFILL, power_cap_w=500.0), tmp_path / "run.json.gz")
    spans, watts = [], []
    for cap_w in (400.0, 450.0, 500.0, 550.0, 600.0, 700.0):
        outcome = replay_trace([path], Changes(power_cap_w=cap_w)).simulated
        spans.append(outcome.ranks[0].span_us)
        watts.append(max(outcome.power_w_per_rank) / cap_w)
    assert spans == sorted(spans, reverse=True)
    assert max(watts) <= 1.002
    assert spans[2] == pytest.approx(simulate(**PREFILL, power_cap_w=500.0).latency_s * 1e6, rel=1e-3)


def test_a_faster_kernel_of_a_capped_run_leaves_power_to_the_others(tmp_path: Path) -> None:
    """Without its communication a capped run draws more, so its clock falls: the mean stays within the cap."""
    result = _replayed(tmp_path, PREFILL, hide_communication=True)
    assert max(result.simulated.power_w_per_rank) <= 700.0 * 1.002
    alone_us = result.measured[0].span_us - result.measured[0].exposed_us
    assert result.simulated.ranks[0].span_us > 1.02 * alone_us


def test_means_above_the_board_and_misses_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = EIGHT | {"batch": 8, "seq_len": 2048, "regime": "cold"}
    path = write_timeline(simulate(**fields), tmp_path / "cold.json.gz")
    result = replay_trace([path])
    (note,) = notes_of(result)
    assert result.unchanged.power_w is not None and result.unchanged.power_w > 710.0
    assert note == (
        f"replayed: {result.unchanged.power_w:.0f} W a GPU is more than its limit of 700 W: as the trace has it: a "
        "short run at the clocks of its limiters"
    )
    main(["replay", str(path)])
    assert "is more than its limit of 700 W" in " ".join(capsys.readouterr().out.split())
    document = as_document(_replayed(tmp_path, PREFILL))
    assert document["notes"] == [] and document["energies_from"] == "trace"
    assert document["unchanged_power_w"] < document["board_power_w"] == 700.0


def test_a_replay_that_misses_its_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that began 400 us after its launch and its predecessor, for no reason that the trace holds."""
    events = [
        launch(0, 1), kernel("gemm", 10, 100, correlation=1), launch(3, 2), kernel("gemm", 510, 100, correlation=2)
    ]  # fmt: skip
    path = write(tmp_path / "t.json", events)
    main(["replay", str(path), "--json"])
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note == (
        "the unchanged replay misses the file's span of rank 0 by -66.5%: compare what-ifs with the replay, not with "
        "the file"
    )
    main(["replay", str(path)])
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("span_us", "overlap_us", "said"),
    [
        (99.1, 41.1, None),  # 0.9 and 2.7 %: within the bar, and nothing is said
        (98.9, 40.0, "span of rank 0 by +1.1%"),
        (101.2, 40.0, "span of rank 0 by -1.2%"),
        (100.0, 38.8, "overlap of rank 0 by +3.1%"),
        (100.0, 0.0, "overlap of rank 0 by +40.0 us"),
    ],
)
def test_a_replay_is_flagged_beyond_1_percent_of_span_or_3_of_overlap(
    tmp_path: Path, span_us: float, overlap_us: float, said: str | None
) -> None:
    result = replay_trace([write(tmp_path / "t.json", [launch(0, 1), kernel("gemm", 10, 100, correlation=1)])])
    outcome = result.unchanged
    again = replace(outcome.ranks[0], span_us=100.0, overlap_us=40.0)
    measured = replace(again, span_us=span_us, overlap_us=overlap_us)
    notes = notes_of(replace(result, measured=[measured], unchanged=replace(outcome, ranks=[again])))
    rest = ": compare what-ifs with the replay, not with the file"
    missed = [note for note in notes if note.startswith("the unchanged replay misses")]
    assert missed == ([] if said is None else [f"the unchanged replay misses the file's {said}{rest}"])


def test_steps_and_kernels_of_a_served_run_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "--model", "llama3-8b", "--tp", "2", "--requests", "4", "--rate-per-s", "8",
             "--input-tokens", "128", "--output-tokens", "4", "--json"]  # fmt: skip
    energies = []
    for name, more in (("steps", []), ("kernels", ["--kernels", "0:9"])):
        path = tmp_path / f"{name}.json.gz"
        main([*words, "--timeline", str(path), *more])
        capsys.readouterr()
        result = replay_trace([path])
        assert result.gpu == "h100-sxm-80gb"
        assert result.unchanged.ranks[0].span_us == pytest.approx(result.measured[0].span_us, rel=1e-3)
        energies.append(result.unchanged.energy_j)
    assert energies[0] == pytest.approx(energies[1], rel=0.02)
    slower = replay_trace([tmp_path / "kernels.json.gz"], Changes(sm_clock_mhz=1005.0))
    assert slower.simulated.ranks[0].computation_us > 1.02 * slower.measured[0].computation_us
    with pytest.raises(ReplayError, match="steps of a served run and no kernels"):
        replay_trace([tmp_path / "steps.json.gz"], Changes(sm_clock_mhz=1005.0))


def test_a_rank_of_ours_alone_keeps_its_joules(tmp_path: Path) -> None:
    run = simulate(**PREFILL)
    write_timeline(run, tmp_path / "ranks", layout="hta")
    result = replay_trace([tmp_path / "ranks" / "rank1.pt.trace.json.gz"])
    assert result.unchanged.energy_j == pytest.approx(run.energy_j_per_gpu[1], rel=0.01)
    assert math.isclose(result.unchanged.ranks[0].span_us, result.measured[0].span_us, rel_tol=1e-3)


def test_a_raised_cap_is_the_limit_that_counts(tmp_path: Path) -> None:
    result = _replayed(tmp_path, PREFILL | {"power_cap_w": 450.0}, power_cap_w=600.0)
    assert result.simulated.power_w == pytest.approx(600.0, rel=0.01)
    assert notes_of(result) == []
