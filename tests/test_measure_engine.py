"""``wattline measure --engine vllm`` on a made-up vLLM and a made-up NVML: what is started, written, compared."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

import hardware.calibrate.suite.engine_vllm as suite
from hardware.calibrate.suite import host_vllm
from sim.cli import main
from sim.scenario.spec import Scenario
from sim.validation.measure_engine import engine_of, stack_of
from sim.validation.predict import served_spec
from sim.validation.validate import validate
from tests.fake_nvml import FakeNvml
from tests.fake_vllm import FakeVllm
from workloads import load_model

TRACE = Path(__file__).parents[1] / "records/h100-sxm-80gb/traces/llama3-8b-decode-4x544.rank0.json.gz"
ONE_KEY_HEAD = Path(__file__).parents[1] / "records/h200-sxm-141gb/vllm/llama3-8b-mqa.json"
H100 = "NVIDIA H100 80GB HBM3"
DECODE = [
    "measure",
    "--engine",
    "vllm",
    "--model",
    "llama3-8b",
    "--phase",
    "decode",
    "--batch",
    "4",
    "--seq-len",
    "544",
]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """A vLLM of 1 ms a token on one H100 whose counter ticks every 10 ms."""
    fake = FakeVllm(trace=TRACE)
    fake.install(monkeypatch)
    nvml = FakeNvml(clock=time, names=[H100], power_w=500.0, tick_s=0.01)  # type: ignore[arg-type]
    nvml.nvmlDeviceGetTemperature = lambda *_: 55  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(suite, "DECODE_TOKENS", 80)
    monkeypatch.setattr(suite, "PREFILL_BATCHES", 8)
    monkeypatch.setattr(suite, "PROFILE_AFTER_S", 0.01)
    monkeypatch.setattr(suite, "PROFILE_FOR_S", 0.01)
    return fake


def measured_prompts(vllm: FakeVllm) -> set[int]:
    """Lengths of prompts after a batch of 64 and a lone prompt of each size that warm the server up."""
    largest = vllm.started[0]["max_num_batched_tokens"]
    sizes = [size for power in range(4, largest.bit_length()) for size in (2**power, 2**power + 1)]
    lone = [size for size in sizes if size < vllm.started[0]["max_model_len"]]
    assert vllm.prompts[: 8 + len(lone)] == [64] * 8 + lone
    return set(vllm.prompts[8 + len(lone) :])


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_decode_scenario_leaves_records_a_trace_and_the_comparison(
    vllm: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, traces = tmp_path / "measured.jsonl", tmp_path / "traces"
    main([*DECODE, "--out", str(out), "--traces", str(traces)])
    host, row = rows(out)
    assert (host["kind"], host["engine"], host["engine_version"]) == ("host", "vllm", "0.24.0")
    assert (row["kind"], row["gpu"], row["world"], row["batch"], row["layers"]) == (
        "model_step", "h100-sxm-80gb", 1, 4, 32,
    )  # fmt: skip
    assert row["stack"] == stack_of(None) and row["regime"] == "steady"
    assert row["latency_s"] >= 1e-3  # type: ignore[operator]  # a token a millisecond at best
    assert row["power_w"] == [pytest.approx(500.0, rel=0.5)] and row["temperature_c"] == [55]
    assert row["energy_j"] == pytest.approx(row["latency_s"] * row["power_w"][0])  # type: ignore[operator, index]
    # Prompts are short of the asked context by half of what is generated: their mean is the row's.
    assert measured_prompts(vllm) == {544 - 40} and abs(row["seq_len"] - 544) <= 20  # type: ignore[operator]
    started = vllm.started[0]
    assert started["load_format"] == "dummy" and started["enable_prefix_caching"] is False
    assert started["tensor_parallel_size"] == 1 and started["max_num_batched_tokens"] == 8192
    assert vllm.stopped == 1
    printed = capsys.readouterr().out
    assert "2 records added to" in printed
    assert "the step is predicted" in printed and "gate_up_gemm" in printed  # of the trace beside the scenario


def test_a_prefill_step_holds_the_whole_batch(vllm: FakeVllm, tmp_path: Path) -> None:
    out = tmp_path / "measured.jsonl"
    main(["measure", "--engine", "vllm", "--model", "llama3-8b", "--batch", "2", "--seq-len", "512", "--out", str(out),
          "--no-predict"])  # fmt: skip
    assert vllm.started[0]["max_num_batched_tokens"] == 1024 and "profiler_config" not in vllm.started[0]
    row = rows(out)[1]
    assert (row["phase"], row["batch"], row["seq_len"]) == ("prefill", 2, 512)
    assert measured_prompts(vllm) == {512} and vllm.prompts.count(512) == 8 * 2 + 1


def test_a_file_of_requests_is_served_for_real_and_in_simulation(
    vllm: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "requests.csv"
    requests.write_text("arrival_s,input_tokens,output_tokens\n0,64,20\n0.02,32,10\n0.03,16,1\n", encoding="utf-8")
    out = tmp_path / "measured.jsonl"
    main(["measure", str(requests), "--engine", "vllm", "--model", "llama3-8b", "--out", str(out)])
    row = rows(out)[1]
    assert vllm.stopped == 1 and vllm.started[0]["max_model_len"] == 85
    assert "cudagraph_capture_sizes" not in vllm.started[0]  # as users start it
    assert row["kind"] == "served" and row["requests"] == [[0.0, 64, 20], [0.02, 32, 10], [0.03, 16, 1]]
    assert len(row["ttft_s"]) == len(row["tpot_s"]) == 3 and row["tpot_s"][2] == 0.0  # type: ignore[arg-type, index]
    assert all(one >= 1e-3 for one in row["ttft_s"])  # type: ignore[union-attr]
    printed = capsys.readouterr().out
    for line in ("time to first token, p50", "time per output token, p99", "energy"):
        assert line in printed
    with pytest.raises(SystemExit):  # and validate passes over it with a reason
        main(["validate", str(tmp_path / "none.jsonl")])
    main(["validate", str(out), "--quiet"])


def test_a_server_in_stages_that_drafts_is_started_so(vllm: FakeVllm, tmp_path: Path) -> None:
    """Chances given the tokens before become vLLM's chances of all up to each: 0.8, 0.8 x 0.75."""
    requests = tmp_path / "requests.csv"
    requests.write_text("arrival_s,input_tokens,output_tokens\n0,64,20\n0.02,32,10\n", encoding="utf-8")
    out = tmp_path / "measured.jsonl"
    call = ["measure", str(requests), "--engine", "vllm", "--model", "llama3-70b", "--out", str(out), "--no-predict"]
    drafts = ["--speculation", "draft_model", "--draft-model", "llama3-8b", "--draft-tokens", "2", "--acceptance"]
    main([*call, "--tp", "1", *drafts, "0.8,0.75"])
    engine = vllm.started[0]["speculative_config"]
    assert engine.pop("model").endswith("draft")
    assert engine == {
        "method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8, pytest.approx(0.6)],
    }  # fmt: skip
    row = rows(out)[1]
    assert (row["speculation"], row["draft_model"], row["acceptance"]) == ("draft_model", "llama3-8b", [0.8, 0.75])
    assert served_spec(row | {"requests": ()}).chances == (0.8, 0.75)
    started = suite.arguments(suite.ServerSpec(model=tmp_path, vocabulary=9, gpus=4, stages=2))
    assert (started["tensor_parallel_size"], started["pipeline_parallel_size"]) == (2, 2)
    with pytest.raises(SystemExit):
        main([*call, "--power-cap-w", "500"])


def test_ranks_that_share_out_caches_are_started_so(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of one key head on two ranks."""
    nvml = FakeNvml(clock=time, names=[H100] * 2, power_w=500.0, tick_s=0.01)  # type: ignore[arg-type]
    nvml.nvmlDeviceGetTemperature = lambda *_: 55  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    call = ["measure", "--engine", "vllm", "--model", str(ONE_KEY_HEAD), "--tp", "2", "--no-predict"]
    for number, ranks in enumerate((["--dcp", "2"], [])):
        out = tmp_path / f"measured{number}.jsonl"
        main([*call, *ranks, "--phase", "decode", "--batch", "2", "--seq-len", "544", "--out", str(out)])
        row = rows(out)[1]
        assert (row["tp"], row.get("dcp"), row["world"]) == (2, 2 if ranks else None, 2)
        assert vllm.started[-1].get("decode_context_parallel_size") == row.get("dcp")
        assert vllm.started[-1]["tensor_parallel_size"] == 2 and "lora_adapters" not in row
    requests, served = tmp_path / "requests.csv", tmp_path / "served.jsonl"
    requests.write_text("arrival_s,input_tokens,output_tokens\n0,64,20\n0.02,32,10\n", encoding="utf-8")
    main([*call[:1], str(requests), *call[1:], "--dcp", "2", "--out", str(served)])
    assert vllm.started[-1]["decode_context_parallel_size"] == 2
    assert served_spec(rows(served)[1] | {"requests": ()}).dcp == 2


def test_adapters_of_a_step_are_asked_for_in_turn(vllm: FakeVllm, tmp_path: Path) -> None:
    out = tmp_path / "measured.jsonl"
    main([*DECODE, "--layers", "1", "--lora-adapters", "3", "--max-lora-rank", "8", "--lora-targets", "qkv_proj,o_proj",
          "--out", str(out), "--no-predict"])  # fmt: skip
    started = vllm.started[0]
    assert (started["enable_lora"], started["max_loras"], started["max_lora_rank"]) == (True, 3, 8)
    assert sorted(vllm.adapters) == ["adapter-0", "adapter-1", "adapter-2"] == sorted(set(map(str, vllm.asked[-4:])))
    shapes = {name.rsplit(".", 3)[1]: tensor.shape for name, tensor in vllm.adapters["adapter-0"].items()}
    assert shapes == {"q_proj": (4096, 8), "k_proj": (1024, 8), "v_proj": (1024, 8), "o_proj": (4096, 8)}
    row = rows(out)[1]
    assert (row["lora_adapters"], row["max_lora_rank"], row["lora_targets"]) == (3, 8, ["qkv_proj", "o_proj"])
    (_, predicted) = validate((out,))
    assert predicted.predicted is not None


def test_adapters_of_requests_are_those_that_they_name(vllm: FakeVllm, tmp_path: Path) -> None:
    """Four of eight requests ask for one of five, a step for two at most; what they asked for is on record."""
    requests, out = tmp_path / "requests.csv", tmp_path / "served.jsonl"
    lines = [f"0.0{number},64,4,{name}\n" for number, name in enumerate(["a", "", "b", "c", "", "a", "", ""])]
    requests.write_text("arrival_s,input_tokens,output_tokens,adapter\n" + "".join(lines), encoding="utf-8")
    main(["measure", str(requests), "--engine", "vllm", "--model", "llama3-8b", "--layers", "1", "--max-lora-rank", "8",
          "--lora-adapters", "5", "--max-loras", "2", "--out", str(out)])  # fmt: skip
    assert (vllm.started[0]["max_loras"], len(vllm.adapters)) == (2, 5)
    row = rows(out)[1]
    assert row["adapters"] == [0, -1, 1, 2, -1, 0, -1, -1]
    assert vllm.asked[-8:] == ["adapter-0", None, "adapter-1", "adapter-2", None, "adapter-0", None, None]
    spec = served_spec(row | {"requests": ()})
    assert (spec.lora_adapters, spec.max_loras, spec.max_lora_rank) == (5, 2, 8)
    bare = {name: value for name, value in row.items() if "lora" not in name and name != "adapters"}
    out.write_text(
        "".join(json.dumps(one) + "\n" for one in (row, bare, row | {"adapters": [0]}, row | {"adapters": [5] * 8})),
        encoding="utf-8",
    )
    adapted, plain, short, high = validate((out,))
    assert adapted.predicted is not None and plain.predicted is not None
    assert adapted.predicted.latency_s > 1.02 * plain.predicted.latency_s
    assert high.skipped is not None and "give the number of each request's" in high.skipped
    assert short.skipped == "adapters = [0]: give the number of each request's, -1 for none"


@pytest.mark.parametrize("target", ["up_proj", "experts"])
def test_adapters_of_experts_are_refused(target: str, tmp_path: Path) -> None:
    scenario = Scenario.of(model="qwen3-30b-a3b", lora_adapters=1, lora_targets=(target,))
    with pytest.raises(Exception, match=f"lora_targets = {target}: (vLLM is measured with q_proj, k_proj|.* has)"):
        engine_of(scenario, tmp_path, None)


def test_without_vllm_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.chdir(tmp_path)
    for argv in ([*DECODE, "--gpu", "h100"], ["calibrate", "--engine", "vllm", "--gpu", "h100"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and "wattline[vllm]" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"power_cap_w": 500}, "power_cap_w = 500.0: vLLM is measured with power_cap_w = None only"),
        (
            {"phase": "generate", "output_len": 4},
            "phase = 'generate': vLLM is measured in prefill, decode, or on requests",
        ),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype = 'fp8_e4m3': vLLM is measured with kv_dtype = None only"),
        (
            {"tp": 2, "overlap": "two_batch", "batch": 2},
            "overlap = 'two_batch': vLLM is measured with overlap = 'chunks'",
        ),
        ({"dtype": "fp16"}, "dtype = 'fp16': vLLM is measured in bf16 and fp8_e4m3"),
        ({"model": "qwen3-30b-a3b", "ep": 2, "ep_mode": "all_to_all"}, "give tp = ep and ep_mode = 'all_reduce'"),
        ({"model": "deepseek-v3"}, "give its Hugging Face config.json as --model"),
    ],
)
def test_what_vllm_is_not_measured_with_is_refused(fields: dict[str, object], said: str, tmp_path: Path) -> None:
    scenario = Scenario.of(**({"model": "llama3-8b"} | fields))
    with pytest.raises(Exception, match=said.replace("(", r"\(")):
        engine_of(scenario, tmp_path, None)


@pytest.mark.parametrize(("name", "kind"), [("llama3-70b", "llama"), ("qwen3-30b-a3b", "qwen3_moe")])
def test_the_config_that_vllm_reads_is_the_model(name: str, kind: str, tmp_path: Path) -> None:
    scenario = Scenario.of(model=name, phase="decode", layers=4, tp=2, ep=2 if "moe" in kind else 1,
                           ep_mode="all_reduce" if "moe" in kind else None)  # fmt: skip
    engine, work = engine_of(scenario, tmp_path, None)
    assert (engine.gpus, engine.expert_parallel) == (2, "moe" in kind) and isinstance(work, suite.Decode)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_hidden_layers"]) == (kind, 4)
    model, again = load_model(name), load_model(str(tmp_path / "config.json"))
    for size in ("d_model", "q_heads", "kv_heads", "head_dim", "d_ff", "vocab", "experts", "top_k"):
        assert getattr(again, size) == getattr(model, size), size


def test_the_suite_measures_lone_prompts_of_a_narrow_model(vllm: FakeVllm, tmp_path: Path) -> None:
    out = tmp_path / "host.jsonl"
    host_vllm.main(["--out", str(out), "--gpu", "h200-sxm-141gb", "--only", "dense-8"])
    assert vllm.stopped == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] for row in found] == list(host_vllm.TOKENS)
    assert {row["layers"] for row in found} == {8} and {row["machine"] for row in found} == {"0"}
    assert all(len(row["ttft_s"]) == 30 and row["latency_s"] >= 1e-3 for row in found)
