"""Bad files and odd values: each is one clear line and exit code 2, never a traceback or a silent wrong answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.cli import COMMANDS
from sim.output.console import one_line
from tests.test_cli import run

MODEL = (
    'id = "mine"\nsource = "s"\nd_model = 512\nlayers = 2\nq_heads = 4\nkv_heads = 2\nhead_dim = 128\nd_ff = 1024\n'
    "vocab = 1000\n"
)
GEMM = {"kind": "gemm", "gpu": "h100-sxm-80gb", "world": 1, "m": 64, "n": 64, "k": 64, "dtype": "bf16"}
FILES = {
    "negative.toml": 'model = "llama3-8b"\nbatch = -2\n',
    "text.toml": 'model = "llama3-8b"\nbatch = "many"\n',
    "nomodel.toml": "batch = 2\n",
    "empty.jsonl": "\n",
    "list.jsonl": "[1]\n",
    "text.jsonl": json.dumps(GEMM | {"latency_s": "fast"}) + "\n",
    "block.toml": f"{MODEL}block = 3\n",
    "axis.toml": MODEL + '[[block]]\nnode = "gemm"\nname = "g"\nops = [{ pattern = "bsm,mx->bsx" }]\n',
    "shard.toml": MODEL + '[[block]]\nnode = "gemm"\nname = "g"\nops = [{ pattern = "bsm,mf->bsf", parallel = 3 }]\n',
    "types.json": '{"model_type": ["llama"]}',
    "half.json": "{",
    "gpu.toml": "id",
    "node.toml": 'id = "n"\ninterconnect = "string"\n',
}
LAYER = ["simulate", "--model", "llama3-8b", "--layers", "1", "--seq-len", "128"]
TP2 = [*LAYER, "--tp", "2", "--sequence-parallel"]
EXPERTS = ["simulate", "--model", "qwen3-30b-a3b", "--layers", "1"]
KERNEL = ["kernel", "gemm", "--m", "8", "--n", "8", "--k", "8"]
AXES = "b s z m H K r h j f e k l v d u q c n p i g t"
BAD = [
    (
        ["frobnicate"],
        f"unknown command 'frobnicate': known: {', '.join(COMMANDS)}",
    ),
    (["simulate", "negative.toml"], "negative.toml: batch = -2: input should be greater than 0"),
    (
        ["simulate", "text.toml"],
        "text.toml: batch = 'many': input should be a valid integer, unable to parse string as an integer",
    ),
    (
        ["simulate", "nomodel.toml"],
        "nomodel.toml: model is missing: give one, such as llama3-8b ('wattline models' lists them)",
    ),
    (["simulate", "."], "cannot read scenario '.': Is a directory"),
    ([*LAYER, "--seq-len", "0"], "scenario: seq_len = 0: input should be greater than 0"),
    ([*LAYER, "--layers", "0"], "scenario: layers = 0: input should be greater than 0"),
    ([*LAYER, "--tp", "5000"], "scenario: tp = 5000: input should be less than or equal to 4096"),
    (
        [*LAYER, "--dtype", "int4"],
        "Invalid value for '--dtype': 'int4' is how weights are stored: give --weight-dtype int4_g128, nvfp4, ...",
    ),
    ([*LAYER, "--ep-mode", "all_reduce"], "scenario: ep_mode = 'all_reduce' needs ep of at least 2"),
    ([*LAYER, "--sequence-parallel"], "scenario: sequence_parallel = true needs tp of at least 2"),
    ([*TP2, "--phase", "decode"], "scenario: sequence_parallel = true is for phase 'prefill', not 'decode'"),
    ([*TP2, "--overlap-chunks", "7"], "overlap_chunks = 7: does not divide the 128 tokens over tp = 2 ranks"),
    (
        [*TP2, "--dtype", "fp8_e4m3"],
        "dtype = 'fp8_e4m3': sequence_parallel layers have 16-bit kernels only: use bf16",
    ),
    (
        [*TP2, "--stack", "paged-kv"],
        "stack = 'paged-kv': sequence_parallel is known for stack 'reference-torch' only",
    ),
    (
        [*EXPERTS, "--ep", "3", "--ep-mode", "all_reduce"],
        "ep = 3 does not divide the 128 experts of qwen3-30b-a3b: use 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    (
        [*EXPERTS, "--tp", "4", "--ep", "2", "--ep-mode", "all_reduce"],
        "scenario: ep = 2 with tp = 4: tp must be 1 or equal to ep in ep_mode 'all_reduce'",
    ),
    ([*LAYER, "--tokens-per-ep-rank", "1,2"], "scenario: tokens_per_ep_rank has 2 entries, ep is 1: one a rank"),
    (
        [*LAYER, "--tokens-per-ep-rank", "1,b"],
        "Invalid value for '--tokens-per-ep-rank': '1,b' is not a list of whole numbers like 30,34",
    ),
    ([*LAYER, "--power-cap-w", "inf"], "scenario: power_cap_w = inf: input should be a finite number"),
    ([*LAYER, "--sm-clock-mhz", "100"], "sm_clock_mhz = 100 is outside what h100-sxm-80gb runs: 345 to 1980 MHz"),
    ([*LAYER, "--sm-clock-mhz", "-5"], "scenario: sm_clock_mhz = -5.0: input should be greater than 0"),
    ([*LAYER, "--trace", "half.json/t.json"], "cannot write 'half.json/t.json': no folder 'half.json'"),
    (  # cut to 300 characters
        [*LAYER, "--trace", f"{'x' * 300}.json"],
        f"cannot write '{'x' * 155}...{'x' * 64}.json': File name too long",
    ),
    (
        [*LAYER, "--trace", "half.json", "--trace-layout", "hta"],
        "cannot write files into 'half.json': it is a file: give a folder",
    ),
    (
        [*LAYER, "--gpu", "a100-sxm-80gb", "--dtype", "fp8_e4m3"],
        "dtype = 'fp8_e4m3': a100-sxm-80gb has no GEMM figures for it; known: bf16, fp32, int8",
    ),
    (
        [*LAYER, "--gpu", "gpu.toml"],
        "gpu.toml: not valid TOML: Expected '=' after a key in a key/value pair (at end of document)",
    ),
    (
        [*LAYER, "--node", "node.toml"],
        "node.toml: interconnect = 'string': known are nvswitch, nvlink-mesh, pcie",
    ),
    (["simulate", "--model", "block.toml"], "block.toml: block = 3: give [[block]] tables"),
    (
        ["simulate", "--model", "axis.toml"],
        f"axis.toml: block 1: 'bsm,mx->bsx': unknown axis 'x'; known axes are {AXES}",
    ),
    (
        ["simulate", "--model", "shard.toml"],
        "shard.toml: block 1: parallel = 3: give one axis of the pattern, for example 'H'",
    ),
    (
        ["simulate", "--model", "types.json"],
        "types.json: model_type = ['llama'] is not supported: 'wattline models --all' lists those that are (a "
        "family.toml beside it adds one)",
    ),
    (
        ["simulate", "--model", "half.json"],
        "half.json, line 1: not valid JSON: Expecting property name enclosed in double quotes",
    ),
    (["simulate", "--model", "./"], "cannot read model 'config.json': No such file or directory"),
    (["validate", "empty.jsonl"], "no records in empty.jsonl: a record is one JSON object a line"),
    (["validate", "list.jsonl"], "list.jsonl, line 1: a record is an object with a text field 'kind'"),
    (["validate", "text.jsonl"], "text.jsonl, line 1: latency_s = 'fast': give a number or null"),
    (["validate", "."], "cannot read records '.': Is a directory"),
    ([*KERNEL, "--power-cap-w", "nan"], "power_cap_w = nan is not above the idle power of h100-sxm-80gb, 72.3 W"),
    (
        ["kernel", "collective", "--op", "all_reduce", "--bytes", "8", "--world", "8", "--ctas", "1000"],
        "Invalid value for '--ctas': 1000 is not in the range 1<=x<=128.",
    ),
    ([*KERNEL, "--sm-clock", "nan"], "sm_clock_mhz = nan is outside what h100-sxm-80gb runs: 345 to 1980 MHz"),
    (
        ["kernel", "attention", "--seq-len", "8", "--q-heads", "3", "--kv-heads", "2"],
        "q-heads = 3 is not a multiple of kv-heads = 2",
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a)[:60] for a, _ in BAD])
def test_one_clear_line(arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(arguments, capsys)
    assert (code, out, err) == (2, "", one_line(f"wattline: {message}") + "\n")  # at most 300 characters
    assert {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir()} == FILES  # nothing new, nothing changed


def test_choices_of_a_missing_option_come_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["kernel", "elementwise", "--rows", "1", "--width", "1"], capsys)
    assert code == 2 and err.startswith("wattline: Missing option '--op'. Choose from: ") and err.count("\n") == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("files", [["--trace", "x.txt"], ["--trace", "no/x.json"], ["--kernels", "no/x.csv"]])
def test_files_that_cannot_be_written_are_refused_before_anything_runs(
    files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.run.runner.simulate", None)
    code, _, err = run([*LAYER, *files], capsys)
    assert code == 2 and err.count("\n") == 1 and files[1] in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into every folder")
def test_a_folder_that_may_not_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shut").mkdir(mode=0o500)
    code, _, err = run([*LAYER, "--trace", "shut/t.json"], capsys)
    assert (code, err) == (2, "wattline: cannot write trace 'shut/t.json': Permission denied\n")


@pytest.mark.parametrize("arguments", [[], ["kernel"]])
def test_no_command_shows_the_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(arguments, capsys)
    assert (out + err).startswith("Usage:") and "Commands:" in out + err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"m": None}, "field 'm' is missing"),
        ({"n": "wide"}, "n = 'wide': give a positive whole number"),
        ({"k": -64}, "k = -64: give a positive whole number"),
        ({"dtype": "int3"}, "'int3' is not a valid DType"),
        ({"gpu": "h1000"}, "unknown gpu 'h1000': did you mean 'h100-sxm-80gb'?"),
    ],
)
def test_a_record_that_cannot_be_predicted_says_why_and_the_others_go_on(
    change: dict[str, object], reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (GEMM | change, GEMM)))
    code, out, _ = run(["validate", "rows.jsonl", "--json"], capsys)
    bad, good = json.loads(out)["rows"]
    assert (code, bad["skipped"], good["skipped"]) == (0, reason, None)
    assert good["predicted"]["latency_s"] > 0


def test_json_documents_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run([*LAYER, "--phase", "generate", "--output-len", "3", "--json"], capsys)
    assert sorted(json.loads(out)) == [
        "bubble_s", "clock_limit_hz_per_gpu", "clock_search", "context_bucket_error", "context_buckets",
        "decode_energy_j", "derived_kernels",
        "detail", "detail_why", "energy_j", "energy_j_by_class", "energy_j_by_phase",
        "energy_j_per_gpu",
        "energy_j_per_request", "energy_j_per_token",
        "energy_to_first_token_j", "energy_wh_per_request", "energy_wh_per_token", "events_kernels", "expected_error",
        "exposed_communication_by_kind", "exposed_communication_s", "extrapolated_kernels", "files", "flops",
        "flops_per_hbm_byte", "gpu", "hbm_bytes", "kernels",
        "latency_s", "mbu", "memory_bytes_per_gpu", "mfu", "mfu_at_clock", "mfu_type", "model",
        "positions", "power_target_w_per_gpu", "power_w_per_gpu", "precision", "scenario", "simpy_events",
        "sm_clock_hz_per_gpu", "status", "status_notes", "status_of_card", "status_reasons", "tokens",
        "tokens_per_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user", "tpot_s",
        "trace", "ttft_s",
    ]  # fmt: skip


def test_the_process_itself_keeps_the_contract(tmp_path: Path) -> None:
    """Once through a real process: stdout is one line of JSON, stderr is empty, and a mistake is exit code 2."""
    command = [sys.executable, "-c", "from sim.cli import main; main()"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    good = subprocess.run([*command, *LAYER, "--json"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (good.returncode, good.stderr, good.stdout.count("\n")) == (0, "", 1)
    assert json.loads(good.stdout)["scenario"]["seq_len"] == 128
    bad = subprocess.run([*command, "simulate"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    told = "wattline: scenario: model is missing: give one, such as llama3-8b ('wattline models' lists them)\n"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", told)


def test_ways_of_an_all_reduce_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    collective = ["kernel", "collective", "--op", "all_reduce", "--bytes", "65536", "--world", "8", "--json"]
    seconds = [
        json.loads(run([*collective, "--algorithm", way], capsys)[1])["settled"]["latency_s"]
        for way in ("library", "auto")
    ]
    assert seconds[1] < seconds[0]
    code, _, err = run(["kernel", "collective", "--op", "broadcast", "--bytes", "1", "--world", "2",
                        "--algorithm", "tree"], capsys)  # fmt: skip
    assert (code, err) == (2, "wattline: --algorithm tree: only an all_reduce has several ways, not broadcast\n")
