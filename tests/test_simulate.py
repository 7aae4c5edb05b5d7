"""Whole runs: sums, determinism, the power cap, an independent closed form, the timeline in the real engine."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.result.report import status_text
from sim.scenario.spec import Scenario
from tests.perfetto_kit import losses, perfetto, rows

SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[1].parent / "shared"))
SMALL = {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "layers": 3}
MADE_UP = """
id = "made-up"
source = "test"
d_model = 5120
layers = 4
q_heads = 40
kv_heads = 8
head_dim = 128
d_ff = 17408
vocab = 32000
"""


@pytest.mark.parametrize(
    "fields",
    [
        SMALL,
        SMALL | {"phase": "decode", "batch": 32, "tp": 2},
        SMALL | {"phase": "generate", "seq_len": 128, "output_len": 4},
        {"model": "llama3-70b", "layers": 2, "tp": 2, "sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8,
         "seq_len": 4096},
        {"model": "qwen3-30b-a3b", "layers": 2, "tp": 2, "ep": 2, "ep_mode": "all_reduce", "expert_skew": 0.8},
        SMALL | {"launch": "eager", "seq_len": 64},
        SMALL | {"regime": "cold"},
    ],
    ids=["prefill", "decode tp2", "generate", "overlap", "experts", "eager", "cold"],
)  # fmt: skip
def test_parts_sum_to_the_whole(fields: dict[str, object]) -> None:
    run = simulate(Scenario.of(**fields))
    for by in ("family", "kernel", "phase", "gpu", "segment"):
        assert run.energy_by(by)["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)
    by_engine = math.fsum(run.records.span_energy_j) + math.fsum(run.records.idle_energy_j)
    assert by_engine == pytest.approx(run.energy_j, rel=1e-9)
    assert run.energy_until(run.latency_s) == pytest.approx(run.energy_j, rel=1e-9)
    assert len(run.kernels) == run.graph.kernels
    assert run.kernels["end_s"].max() == pytest.approx(run.latency_s, rel=1e-12)


def test_a_serial_run_equals_its_closed_form() -> None:
    """An oracle of its own: kernels one after another, each at the state that the solver gives it alone."""
    run = simulate(Scenario.of(**SMALL, phase="prefill", batch=2, seq_len=1024))
    from sim.engine.fluid import FluidModel

    model = FluidModel(run.machine.model, run.graph.classes, [])
    seconds = joules = 0.0
    for class_id, count in Counter(run.graph.op_class).items():
        terms = run.graph.classes[class_id].terms
        sms = min(terms.blocks * terms.sms_per_block, 132.0)
        state = model.solve(((class_id, sms, False, 1.0),), run.power_limit_w[0], run.clock_limit_hz[0])
        seconds += count / state.rates[0] * 1e-12
        joules += count / state.rates[0] * 1e-12 * state.power_w
    assert run.latency_s == pytest.approx(seconds, rel=5e-8)
    assert run.energy_j == pytest.approx(joules, rel=5e-8)


def test_the_cap_holds_and_costs_time(tmp_path: Path) -> None:
    model = tmp_path / "made-up.toml"
    model.write_text(MADE_UP)
    runs = {
        cap: simulate(model=str(model), gpu="h100", seq_len=2048, tp=2, power_cap_w=float(cap))
        for cap in (450, 575, 700)
    }
    free = simulate(model=str(model), gpu="h100", seq_len=2048, tp=2, uncapped=True)
    latencies = [free.latency_s, *(runs[cap].latency_s for cap in (700, 575, 450))]
    assert latencies == sorted(latencies) and latencies[0] < latencies[-1]
    for cap, run in runs.items():
        assert max(run.power_w_per_gpu) <= cap * 1.001
        assert max(run.power_w_per_gpu) > 0.97 * cap
    clocks = [runs[cap].sm_clock_hz_per_gpu[0] for cap in (450, 575, 700)]
    assert clocks == sorted(clocks)
    assert free.sm_clock_hz_per_gpu[0] == pytest.approx(1.98e9)


def test_a_run_longer_than_its_clock_counts_is_refused() -> None:
    with pytest.raises(ScenarioError, match="batch = 1000000 with seq_len = 1000000: a kernel outlasts"):
        simulate(**SMALL, batch=1_000_000, seq_len=1_000_000, ignore_memory=True)


def test_a_cap_below_the_lowest_clock_is_said_not_to_hold() -> None:
    run = simulate(**SMALL, power_cap_w=100.0)
    assert run.sm_clock_hz_per_gpu == pytest.approx((run.machine.gpu.min_clock_hz,))
    drawn = f"power_cap_w = 100 cannot be held: the lowest clock still draws {run.power_w_per_gpu[0]:.0f} W"
    assert status_text(run).endswith(drawn) and run.power_w_per_gpu[0] > 101.0
    assert "cannot be held" not in status_text(simulate(**SMALL, power_cap_w=400.0))


def test_a_locked_clock_is_kept_and_saves_energy_in_decode() -> None:
    fast = simulate(Scenario.of(**SMALL, phase="decode", batch=8))
    slow = simulate(Scenario.of(**SMALL, phase="decode", batch=8, sm_clock_mhz=1200))
    assert slow.sm_clock_hz_per_gpu == pytest.approx((1.2e9,))
    assert slow.energy_j < fast.energy_j and slow.latency_s < 1.15 * fast.latency_s


def test_generate_parts_sum() -> None:
    from sim.result.report import summary

    data = summary(simulate(Scenario.of(**SMALL, phase="generate", batch=4, seq_len=256, output_len=8)))
    assert data["tokens"] == 32
    assert data["energy_to_first_token_j"] + data["decode_energy_j"] == pytest.approx(data["energy_j"], rel=1e-9)
    assert data["ttft_s"] + 7 * data["tpot_s"] == pytest.approx(data["latency_s"], rel=1e-9)
    assert data["energy_j_per_request"] * 4 == pytest.approx(data["energy_j"], rel=1e-9)


def test_tensor_parallelism_is_faster_and_costs_energy() -> None:
    one, four = (simulate(Scenario.of(**SMALL, seq_len=4096, tp=tp)) for tp in (1, 4))
    assert four.latency_s < 0.5 * one.latency_s
    assert four.energy_j > one.energy_j
    assert one.exposed_communication_s == 0.0 < four.exposed_communication_s


def test_what_the_machine_prints_is_a_table_with_units() -> None:
    text = repr(simulate(Scenario.of(**SMALL)))
    assert all(part in text for part in ("latency", " ms", " J", " W", " MHz", "calibrated", "Where the joules go"))


def test_same_scenario_same_bytes(tmp_path: Path) -> None:
    paths = [simulate(Scenario.of(**SMALL, tp=2)).to_chrome(tmp_path / f"{i}.json.gz") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_timeline_in_the_real_perfetto_engine(tmp_path: Path) -> None:
    run = simulate(
        model="llama3-70b", gpu="h100", layers=2, tp=2, batch=2, seq_len=4096, lm_head=False, sequence_parallel=True,
        overlap_chunks=4, comm_ctas=8,
    )  # fmt: skip
    path = run.to_chrome(tmp_path / "t.json.gz")
    with perfetto(path) as engine:
        assert losses(engine) == []
        [(kernels,)] = rows(engine, "select count(*) as n from slice where category = 'kernel'")
        [(layers,)] = rows(engine, "select count(*) as n from slice where category = 'layer'")
        [(phases,)] = rows(engine, "select count(*) as n from slice where category = 'phase'")
        [(flows,)] = rows(engine, "select count(*) as n from flow")
        processes = rows(engine, "select name as name from process where name like 'GPU%' order by name")
        lanes = rows(engine, "select distinct name as name from thread where name like 'stream%' order by name")
        counters = {name for (name,) in rows(engine, "select distinct name as name from counter_track")}
        [(joules,)] = rows(
            engine,
            "select sum(v) as v from (select max(value) as v from counter join counter_track t on t.id = track_id "
            "where t.name like 'energy J%' group by track_id)",
        )
    assert kernels == run.graph.kernels
    assert (layers, phases) == (4, 2)
    assert flows == sum(len(after) for after in run.graph.successors.values()) > 0
    assert processes == [("GPU 0 (h100-sxm-80gb)",), ("GPU 1 (h100-sxm-80gb)",)]
    assert lanes == [("stream 7",), ("stream 8 (communication)",)]
    names = ("power W", "SM clock MHz", "SMs busy", "HBM GB/s", "NVLink GB/s", "energy J")
    assert all(any(counter.startswith(name) for counter in counters) for name in names)
    assert joules == pytest.approx(run.energy_j, rel=1e-6)


def test_rank_files_for_holistic_trace_analysis(tmp_path: Path) -> None:
    import gzip
    import json

    run = simulate(Scenario.of(**SMALL, tp=2))
    folder = run.to_chrome(tmp_path / "hta", layout="hta")
    for rank in (0, 1):
        document = json.loads(gzip.decompress((folder / f"rank{rank}.pt.trace.json.gz").read_bytes()))
        assert document["distributedInfo"]["rank"] == rank
        kernels = [e for e in document["traceEvents"] if e.get("cat") == "kernel"]
        launches = [e for e in document["traceEvents"] if e["name"] == "cudaLaunchKernel"]
        assert {e["pid"] for e in kernels} == {rank} and len(kernels) == run.graph.kernels // 2
        by_launch = sorted(e["args"]["correlation"] for e in launches)
        assert by_launch == sorted(e["args"]["correlation"] for e in kernels)
        assert any(e["name"].startswith("nccl") for e in kernels)


@pytest.mark.parametrize(
    ("file", "by", "latency", "energy"),
    # The bars of the project on rows that no fit has seen (mean absolute errors).
    [("model_step.jsonl", {"world": 1}, 0.02, 0.025), ("model_step.jsonl", {"world": 2}, 0.03, 0.06),
     ("overlap.jsonl", {}, 0.04, 0.05)],
)  # fmt: skip
def test_unseen_measurements_are_predicted(file: str, by: dict[str, int], latency: float, energy: float) -> None:
    path = SHARED / "measurements" / file
    if not path.is_file():
        pytest.skip(f"needs the measurement records ({path}; set WATTLINE_SHARED)")
    from sim.validation.validate import error_table, validate

    predicted = [
        row for row in validate([path]) if all(row.record.inputs.get(field) == value for field, value in by.items())
    ]
    [line] = error_table(predicted).to_dict("records")
    assert not any(row.fitted or row.skipped for row in predicted)
    assert line["latency_mape"] <= latency and line["energy_mape"] <= energy
