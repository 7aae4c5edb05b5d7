"""The measuring suite without a GPU: plans, resuming, routing, and a dry run where torch exists."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hardware.calibrate.suite import run
from hardware.calibrate.suite.cases import build
from hardware.calibrate.suite.comm import QuietComm, part_bytes
from hardware.calibrate.suite.duty import measure_host, work_row
from hardware.calibrate.suite.meter import CounterTick, DryMeter, slope_w
from hardware.calibrate.suite.plan import done_already, estimated_s
from hardware.calibrate.suite.plans import PLANS, least_world, planned
from hardware.calibrate.suite.race import collective_of
from hardware.calibrate.suite.routing import draw_routing
from hardware.calibrate.suite.worker import SuiteOptions, append, block_counts, gpu_id_of
from hardware.errors import HardwareError

MEASURED = {"latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "period_s", "iter_s", "clock_mhz"}
MEASURED |= {"a_alone_s", "b_alone_s", "a_together_s", "b_together_s", "log", "marks", "columns"}
COUNTED = {
    "rows",
    "distinct",
    "max_rows",
    "tiles128",
    "tiles64",
    "tiles256",
    "n_per_burst",
    "bursts",
    "tokens_per_ep_rank",
}
HOST_FACTS = {"name", "limit_w", "max_sm", "max_mem", "driver", "torch", "nccl", "uuids"}
# What planned rows say beyond the fields of earlier records of their kind.
MORE = {
    "gemm": {"values", "fast_accumulation"},
    "grouped_gemm": {"resident"},
    "small_kernels": {"m"},
    "in_context": {"ctas"},
    "collective": {"launch"},
    "duty": {"kernel"},
    "transient": {"model", "layers", "prefill_batch", "decode_batch", "seq_len"},
    "alone": {"batch", "seq_len", "q_heads", "kv_heads", "head_dim", "causal"},
    "together": {"batch", "seq_len", "q_heads", "kv_heads", "head_dim", "causal"},
    "model_step": {"launch", "cp", "ulysses", "pp", "micro_batches"},
}
H100 = Path(__file__).parents[1] / "records" / "h100-sxm-80gb"
GAPS, PAIR = f"{H100}/calibration/gaps/gaps.jsonl", f"{H100}/calibration/pair/pair.jsonl"
SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[1].parent / "shared")) / "measurements"


@pytest.mark.parametrize(
    ("name", "world", "most_s"),
    [("calibrate", 1, 360), (GAPS, 1, 420), (f"{H100}/validation/one_gpu.jsonl", 1, 150), (PAIR, 2, 400)],
)
def test_plans_fit_their_time(name: str, world: int, most_s: float) -> None:
    assert sum(map(estimated_s, planned(name, world=world))) < most_s


@pytest.mark.parametrize("name", PLANS)
def test_planned_rows_are_distinct_and_survive_json(name: str) -> None:
    rows = planned(name, world=max(2, least_world(name)))
    assert json.loads(json.dumps(rows)) == rows
    for i, row in enumerate(rows):
        assert not done_already(row, rows[:i])


@pytest.mark.parametrize("path", sorted(H100.parent.glob("*/*/**/*.jsonl")), ids=lambda path: path.stem)
def test_a_file_of_records_is_the_plan_of_its_rows(path: Path) -> None:
    rows, records = planned(str(path), world=least_world(str(path))), run.load(path)
    assert rows and all(done_already(row, records) for row in rows)
    assert not any(row.keys() & (MEASURED | {"tiles128", "gemm_s", "seconds", "host_s"}) for row in rows)


def test_a_misspelled_plan_names_the_nearest() -> None:
    with pytest.raises(HardwareError, match="unknown plan 'calibrat': did you mean 'calibrate'"):
        planned("calibrat")
    with pytest.raises(HardwareError, match="needs at least 2 GPUs"):
        planned("calibrate_multi", world=1)


@pytest.mark.parametrize("name", PLANS)
def test_rows_have_the_fields_of_earlier_records(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no measurements at {SHARED}")
    fields: dict[str, list[set[str]]] = {}
    for path in SHARED.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            counted = COUNTED if record["kind"] in ("grouped_gemm", "duty", "model_step") else set()
            inputs = set(record) - MEASURED - counted - HOST_FACTS - {"gpu"}
            if inputs not in fields.setdefault(record["kind"], []):
                fields[record["kind"]].append(inputs)
    for row in planned(name, world=max(2, least_world(name))):
        if row["kind"] in fields:
            mine = set(row) - MORE.get(row["kind"], set())
            known = [one - MORE.get(row["kind"], set()) for one in fields[row["kind"]]]
            # A contention row names the sizes of its own neighbour only.
            beside = row["kind"] in ("together", "alone")
            assert mine in known or (beside and any(mine <= one for one in known)), row


def test_resume_skips_what_a_file_holds_and_cuts_a_half_written_line(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    rows = planned("calibrate")
    append(out, {"gpu": "x", **rows[2], "latency_s": 0.1, "power_w": [math.nan]})
    with out.open("a") as file:
        file.write('{"kind": "model_step", "lat')
    records = run.load(out)
    assert records == [{"gpu": "x", **rows[2], "latency_s": 0.1, "power_w": [None]}]
    assert out.read_text().endswith("}\n")
    assert run.pending(rows, records) == [row for row in rows if row != rows[2]]


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    out.write_text('{"kind": "idle"}\n{oops}\n')
    with pytest.raises(HardwareError, match="line 2: not valid JSON"):
        run.load(out)


def test_only_refuses_a_kind_the_plan_lacks() -> None:
    with pytest.raises(HardwareError, match="--only gem: the plan has"):
        run.pending(planned(GAPS), [], ["gem"])
    assert {row["kind"] for row in run.pending(planned(GAPS), [], ["duty", "idle"])} == {"duty", "idle"}


def test_routing_counts_by_hand() -> None:
    everyone = draw_routing(tokens=130, experts=4, top_k=4, skew=0.0)
    assert everyone.facts() == {
        "rows": 520,
        "distinct": 4,
        "max_rows": 130,
        "tiles128": 8,
        "tiles64": 12,
        "tiles256": 4,
    }
    slice_ = [draw_routing(tokens=64, experts=8, top_k=2, skew=0.8, own=range(f, f + 4), seed=3) for f in (0, 4)]
    assert sum(part.rows for part in slice_) == 128
    assert draw_routing(tokens=2000, experts=128, top_k=8, skew=1.2).facts()["max_rows"] > 2 * 125
    assert list(everyone.token[:130]) == list(range(130))
    with pytest.raises(HardwareError, match="top_k = 9"):
        draw_routing(tokens=1, experts=8, top_k=9, skew=0.0)


def test_power_is_the_slope_between_ticks() -> None:
    ticks = [CounterTick(at_s=0.1 * n + 0.03, energy_j=70.0 * n) for n in range(20)]
    assert slope_w(ticks, 0.5, 1.2) == pytest.approx(700.0)
    assert slope_w(ticks, 0.5, 0.6) is None


def test_names() -> None:
    assert collective_of("sr16") == ("sendrecv_ring", 16)
    with pytest.raises(HardwareError, match="contention name 'xx4'"):
        collective_of("xx4")
    assert gpu_id_of("NVIDIA H200") == "h200-sxm-141gb"
    assert gpu_id_of("NVIDIA RTX 6000 Ada Generation") == "rtx-6000-ada-generation"
    assert part_bytes("reduce_scatter", 1024, 2) == 512
    with pytest.raises(HardwareError, match="unknown collective"):
        part_bytes("gossip", 1024, 2)
    assert block_counts(planned(PAIR, world=2)) == [None, 2, 4, 8, 16, 32]
    kernel = {"kind": "grouped_gemm", "tokens": 8}
    assert work_row({"kind": "duty", "work": "grouped_gate_up_128x8", "kernel": kernel}) == kernel


def test_a_host_row_names_the_cards_in_the_order_of_ranks() -> None:
    cuda = SimpleNamespace(
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        get_device_properties=lambda rank: SimpleNamespace(uuid=f"card-{rank}"),
    )
    bench: Any = SimpleNamespace(
        meter=DryMeter(), torch=SimpleNamespace(cuda=cuda, __version__="2.11.0"), comm=QuietComm(world=2), dry=False
    )
    row = measure_host(bench)
    assert row.keys() == HOST_FACTS
    assert (row["uuids"], row["nccl"]) == (["card-0", "card-1"], "2.28.9")


def test_measuring_without_torch_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed here")
    assert run.main(["--plan", "smoke", "--out", str(tmp_path / "a.jsonl")]) == 2
    assert "measuring needs PyTorch" in capsys.readouterr().err


class Normal(float):
    """A tensor of normal numbers, by its standard deviation."""

    def __mul__(self, factor: float) -> Normal:
        return Normal(float(self) * factor)

    def to(self, _: object) -> Normal:
        return self


def operands(**fields: object) -> tuple[float, float]:
    """Standard deviations of both operands that a planned product is launched on."""
    seen: list[tuple[float, float]] = []
    bench: Any = SimpleNamespace(
        torch=SimpleNamespace(ones=lambda *_, **__: None, float32=None, float8_e4m3fn=None),
        device="none",
        randn=lambda *_: Normal(1.0),
        empty=lambda *_: None,
        weights=lambda *_, **__: [Normal(0.02)],
        kernels=SimpleNamespace(
            linear=lambda x, w, _: seen.append((x, w)), linear_fp8=lambda x, w, *_, **__: seen.append((x, w))
        ),
    )
    build(bench, {"kind": "gemm", "m": 16, "n": 16, "k": 16, **fields}).launch(0)
    return seen[0]


def test_small_values_are_a_fiftieth_of_the_usual_ones_in_either_type() -> None:
    for dtype in ("bf16", "fp8_e4m3"):
        usual, small = operands(dtype=dtype), operands(dtype=dtype, values="small")
        assert small == pytest.approx((usual[0] / 50, usual[1] / 50))


@pytest.mark.parametrize(("dtype", "values"), [("bf16", "tiny"), ("bf16", "bits"), ("fp8_e4m3", "tiny")])
def test_values_that_the_suite_does_not_make_are_refused(dtype: str, values: str) -> None:
    with pytest.raises(HardwareError, match=f"values = '{values}': normal, zeros or small, and bits in FP8"):
        operands(dtype=dtype, values=values)


@pytest.mark.parametrize(("name", "world"), [("smoke", 1), ("smoke", 2)])
def test_a_dry_run_checks_every_row_and_resumes(tmp_path: Path, name: str, world: int) -> None:
    if not importlib.util.find_spec("torch"):
        pytest.skip("no torch: a dry run checks shapes with it")
    out = tmp_path / "dry.jsonl"
    gained = run.run_plan(name, SuiteOptions(out=out, world=world, dry=True))
    assert gained == len(planned(name, world=world))
    assert all(record["dry_run"] for record in run.load(out))
    assert run.run_plan(name, SuiteOptions(out=out, world=world, dry=True)) == 0
