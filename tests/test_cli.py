"""The command line: one JSON document, exact one-line errors with exit code 2, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_kit import run

HF = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "intermediate_size": 1024, "vocab_size": 1000,
}  # fmt: skip
FILES = {
    "key.toml": b'model = "llama3-8b"\nbathc = 4\n',
    "half.json": b'{"model": ',
    "half.toml": b"model = ",
    "binary.toml": b"\xff\xfe\x00",
    "list.json": b"[1]",
    "nokind.jsonl": b'{"kind": 3}\n',
    "half.jsonl": b'{"kind": "host"}\n{"kind": "ge',
    "config.json": b'{"model_type": "gpt9"}',
    "negative.json": json.dumps(HF | {"intermediate_size": -1}).encode(),
    "missing.json": json.dumps({k: v for k, v in HF.items() if k != "vocab_size"}).encode(),
    "model.toml": b'id = "x"\nsource = "s"\nd_model = 512\nlayers = 2\nq_heads = 8\nkv_haeds = 8\n',
    "gpu.toml": b'id = "x"\nname = "X"\narchitecture = "a"\nlink = "none"\nsms = 132\n',
}
DENSE = ["simulate", "--model", "llama3-8b", "--layers", "2"]
BAD = [
    (["simulte"], "unknown command 'simulte': did you mean 'simulate'?"),
    (["simulate"], "scenario: model is missing: give one, such as llama3-8b ('wattline models' lists them)"),
    (["simulate", "--bathc", "3"], "No such option '--bathc'. Did you mean '--batch'?"),
    (["simulate", "--model", "llama9"], "unknown model 'llama9': did you mean 'llama-7b'?"),
    (
        ["simulate", "--model", "llama3"],
        "model = 'llama3' fits several models: llama3-405b, llama3-70b, llama3-8b: name one",
    ),
    ([*DENSE, "--gpu", "h1000"], "unknown gpu 'h1000': did you mean 'h100-sxm-80gb'?"),
    ([*DENSE, "--gpu", "a100-pcie"], "gpu = 'a100-pcie' fits several GPUs: a100-pcie-40gb, a100-pcie-80gb: name one"),
    (["simulate", "key.toml"], "unknown key 'bathc' in key.toml: did you mean 'batch'?"),
    (["simulate", "half.json"], "half.json, line 1: not valid JSON: Expecting value"),
    (["simulate", "half.toml"], "half.toml: not valid TOML: Invalid value (at end of document)"),
    (["simulate", "binary.toml"], "cannot read scenario 'binary.toml': not UTF-8 text (byte 0)"),
    (["simulate", "list.json"], "list.json: a scenario is a table of fields, found list"),
    (["simulate", "none.toml"], "cannot read scenario 'none.toml': No such file or directory"),
    ([*DENSE, "--batch", "0"], "scenario: batch = 0: input should be greater than 0"),
    ([*DENSE, "--batch", "-3"], "scenario: batch = -3: input should be greater than 0"),
    (
        [*DENSE, "--batch", "x"],
        "Invalid value for '--batch': 'x' is not a valid integer: give digits alone, such as 4096",
    ),
    (
        [*DENSE, "--seq-len", "999999999999"],
        "scenario: seq_len = 999999999999: input should be less than or equal to 100000000",
    ),
    ([*DENSE, "--tp", "3"], "tp = 3 does not divide the 32 query heads of llama3-8b: use 1, 2, 4, 8, 16, 32"),
    (
        [*DENSE, "--tp", "2", "--ep", "2", "--ep-mode", "all_reduce"],
        "ep = 2: llama3-8b has no experts: use tp",
    ),
    (
        ["simulate", "--model", "qwen3-30b-a3b", "--ep", "2"],
        "scenario: ep = 2 needs ep_mode: 'all_reduce' or 'all_to_all'",
    ),
    ([*DENSE, "--output-len", "4"], "scenario: output_len = 4 has no meaning in phase 'prefill': use 'generate'"),
    (
        [*DENSE, "--phase", "generate"],
        "scenario: output_len is missing: phase 'generate' needs the number of tokens to generate",
    ),
    (
        [*DENSE, "--overlap-chunks", "4"],
        "scenario: overlap_chunks = 4 needs tp of at least 2: only its collectives can be cut",
    ),
    ([*DENSE, "--power-cap-w", "50"], "power_cap_w = 50 is not above the idle power of h100-sxm-80gb, 72.3 W"),
    ([*DENSE, "--power-cap-w", "nan"], "scenario: power_cap_w = nan: input should be a finite number"),
    (
        [*DENSE, "--uncapped", "--power-cap-w", "500"],
        "scenario: uncapped = true contradicts power_cap_w = 500: give one of them",
    ),
    (
        [*DENSE, "--sm-clock-mhz", "3000"],
        "sm_clock_mhz = 3000 is outside what h100-sxm-80gb runs: 345 to 1980 MHz",
    ),
    (
        ["simulate", "--model", "llama3-405b"],
        "llama3-405b does not fit on h100-sxm-80gb: weights 811.7 + KV cache 1.1 + activations 0.9 = 813.7 GB a GPU, "
        "it has 80 GB: the smallest layout that fits is tp 8, pp 2; or --ignore-memory",
    ),
    ([*DENSE, "--trace", "nowhere/x.json"], "cannot write 'nowhere/x.json': no folder 'nowhere'"),
    ([*DENSE, "--trace", "x.txt"], "trace file 'x.txt': name it .json, .json.gz, .pftrace or .pftrace.gz"),
    ([*DENSE, "--stack", "reference-troch"], "unknown stack 'reference-troch': did you mean 'reference-torch'?"),
    ([*DENSE, "--node", "hgx-9"], "unknown node 'hgx-9': did you mean 'hgx-8'?"),
    (
        [*DENSE, "--phase", "trian"],
        "Invalid value for '--phase': 'trian' is not one of 'prefill', 'decode', 'generate', 'denoise', 'train'.",
    ),
    (
        ["simulate", "--model", "config.json"],
        "config.json: model_type = 'gpt9' is not supported: did you mean 'gpt2'? (a family.toml beside it adds one)",
    ),
    (
        ["simulate", "--model", "negative.json"],
        "negative.json: intermediate_size = -1: give a positive whole number",
    ),
    (["simulate", "--model", "missing.json"], "missing.json: vocab_size is missing: give a positive whole number"),
    (["simulate", "--model", "model.toml"], "model.toml: unknown key 'kv_haeds': did you mean 'kv_heads'?"),
    (["simulate", "--model", "none.toml"], "cannot read model 'none.toml': No such file or directory"),
    (
        [*DENSE, "--gpu", "gpu.toml"],
        "gpu.toml: sms = 132 has no source: give { value, source, confidence }",
    ),
    (["validate"], "Missing argument 'FILES...': for example, wattline validate records.jsonl --by world,phase"),
    (["validate", "none.jsonl"], "cannot read records 'none.jsonl': No such file or directory"),
    (["validate", "nokind.jsonl"], "nokind.jsonl, line 1: a record is an object with a text field 'kind'"),
    (
        ["validate", "half.jsonl"],
        "half.jsonl, line 2: not valid JSON: Unterminated string starting at",
    ),
    (["kernel", "gemm", "--m", "0", "--n", "1", "--k", "1"], "Invalid value for '--m': 0 is not in the range x>=1."),
    (
        ["overlap", "--model", "llama3-70b", "--chunks", "1,x"],
        "Invalid value for '--chunks': '1,x' is not a list of whole numbers like 1,2,4",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(arguments, capsys)
    assert (code, out, err) == (2, "", f"wattline: {message}\n")
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)  # nothing half-written


def test_simulate_json_is_one_document_on_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*DENSE, "--json", "--quiet", "--trace", "t.json.gz"], capsys)
    assert (code, err, out.count("\n")) == (0, "", 1)
    document = json.loads(out)
    assert document["gpu"] == "h100-sxm-80gb" and document["status"] == "calibrated"
    assert document["trace"] == "t.json.gz" and (folder / "t.json.gz").exists()
    assert sum(document["energy_j_by_class"].values()) == pytest.approx(document["energy_j"], rel=1e-9)


def test_flags_win_over_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ok.toml").write_text('model = "llama3-8b"\nlayers = 2\nbatch = 1\n')
    _, out, _ = run(["simulate", "ok.toml", "--batch", "3", "--json"], capsys)
    assert json.loads(out)["scenario"]["batch"] == 3


def test_validate_json_keeps_its_contract(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"kind": "gemm", "gpu": "h100-sxm-80gb", "world": 1, "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16",
         "latency_s": 2.05e-4, "power_w": [700.0], "energy_j": 0.1435, "sm_clock_mhz": [1380]},
        {"kind": "mystery", "gpu": "h100-sxm-80gb", "world": 1},
        {"kind": "model_step", "gpu": "h100-sxm-80gb", "world": 1, "model": "llama3-8b", "layers": 2,
         "phase": "prefill", "batch": 1, "seq_len": 512, "tp": 1, "ep": 1, "lm_head": True, "dtype": "bf16"},
    ]  # fmt: skip
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = run(["validate", "records.jsonl", "--json"], capsys)
    assert (code, err, out.count("\n")) == (0, "", 1)
    document = json.loads(out)
    first, unknown, unmeasured = document["rows"]
    assert first["line"] == 1 and first["kind"] == "gemm" and first["fitted"] is False
    assert first["predicted"]["latency_s"] == pytest.approx(2.05e-4, rel=0.05)
    assert set(first["measured"]) == set(first["predicted"]) == {"latency_s", "energy_j", "power_w", "sm_clock_mhz"}
    assert unknown["skipped"] == "unknown kind 'mystery'" and unknown["predicted"]["latency_s"] is None
    assert unmeasured["measured"]["latency_s"] is None and unmeasured["predicted"]["latency_s"] > 0
    assert {"file", "kind", "by", "n", "latency_mape", "latency_max_ape", "energy_mape", "energy_max_ape"} <= set(
        document["groups"][0]
    )


def test_catalogs_list_everything(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(["gpus", "--json"], capsys)
    assert {"a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb"} <= {row["id"] for row in json.loads(out)["gpus"]}
    _, out, _ = run(["models", "--json"], capsys)
    assert {"llama3-8b", "llama3-70b", "llama3-405b"} <= {row["id"] for row in json.loads(out)["models"]}


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    assert all(name in out for name in ("simulate", "overlap", "kernel", "validate", "gpus", "models"))
