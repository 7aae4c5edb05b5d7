"""Natural mistakes of a new user: each is answered at once, in one line that says what would be right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sim.cli import main

FILES = {
    "notes.txt": "hello",
    "s.yaml": "model: llama3-8b\n",
    "s.json": json.dumps({"model": "llama3-8b"}),
    "half.jsonl": json.dumps({"kind": "gemm", "m": 1}) + "\n",
    "f.toml": '[base]\nmodel = "llama3-8b"\nphase = "generate"\noutput_len = 4\n[grid]\nbatch = [1, 2]\n',
    "a.csv": "a,b\n1,2\n",
    "x.parquet": "x",
    "report.nsys-rep": "x",
    "g.toml": '[base]\nmodel = "llama3-8b"\n',
}
MISTAKES = [
    # a file of another kind
    ("simulate s.yaml", "'s.yaml': give a scenario's .toml or .json file, or a model's id"),
    ("simulate notes.txt", "'notes.txt': give a scenario's .toml or .json file, or a model's id"),
    ("sweep s.json --out r.csv", "s.json: 'model' belongs under [base], and lists of values under [grid]"),
    ("fit s.json", "s.json: 'model' belongs under [base], and lists of values under [grid]"),
    ("calibrate --from notes.txt --gpu h100", "notes.txt, line 1: not valid JSON: Expecting value"),
    (
        "calibrate --from half.jsonl --gpu h100",
        "half.jsonl: some row lacks the field 'gpu', which a fit of its kind needs",
    ),
    # an output that cannot be
    ("plan llama3-8b --launch notes.txt", "cannot write files into 'notes.txt': it is a file: give a folder"),
    ("overlap llama3-70b --tp 2 --html study.pdf", "--html 'study.pdf': a page is written as .html"),
    # a replica for prompts: its own fields, whatever the scenario made of them is called
    (
        "serve llama3-8b --prefill-tp 3 --prefill-replicas 1",
        "prefill_tp = 3 does not divide the 32 query heads of llama3-8b: use 1, 2, 4, 8, 16, 32",
    ),
    (
        "serve qwen3-30b-a3b --prefill-ep 3 --ep 2 --ep-mode all_to_all --prefill-replicas 1",
        "prefill_ep = 3 does not divide the 128 experts of qwen3-30b-a3b: use 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    (
        "serve llama3-8b --prefill-power-cap-w 900",
        "prefill_power_cap_w = 900 is beyond h100-sxm-80gb, which takes at most 700 W: give at most that, or leave it "
        "out",
    ),
    (
        "serve llama3-8b --tp 3 --prefill-tp 2 --prefill-replicas 1",
        "tp = 3 does not divide the 32 query heads of llama3-8b: use 1, 2, 4, 8, 16, 32",
    ),
    ("serve llama3-8b --pp 33", "pp = 33: 32 layers fill at most 32 stages: use pp = 32 or less"),
    # words of other tools, or in other units
    ("plan llama3-8b --ttft-ms 500", "unknown option '--ttft-ms': it is --slo-ttft-s here, in seconds"),
    (
        "plan llama3-8b --tp 2",
        "unknown option '--tp': a plan tries every way to cut the GPUs: give --gpus alone",
    ),
    (
        "ui --host 0.0.0.0",
        "unknown option '--host': the page answers 127.0.0.1 only: from another machine, ssh -L 8061:127.0.0.1:8061",
    ),
    ("ui lama3-8b", "unknown model 'lama3-8b': did you mean 'llama3-8b'?"),
    ("models --search llama", "unknown option '--search': give a model to see it: wattline models llama3-8b"),
    ("simulate llama3-8b --vocab 10", "unknown option '--vocab': see 'wattline simulate --help'"),
    ("simulate llama3-8b -tp 4", "unknown option '-tp': write it with two dashes, --tp"),
    ("kernel gem --m 8", "unknown command 'gem': did you mean 'gemm'?"),
    (
        "simulate llama3-8b --dtype int4",
        "Invalid value for '--dtype': 'int4' is how weights are stored: give --weight-dtype int4_g128, nvfp4, ...",
    ),
    (
        "simulate llama3-8b --gpu 8xH100",
        "unknown gpu '8xH100': give 'h100', and how many by the layout (tp 8), or as gpus",
    ),
    (
        "simulate llama3-8b --gpu ada",
        "gpu = 'ada' fits several GPUs: l4-24gb, l40s-48gb, rtx-4090-24gb: name one",
    ),
    # over all commands: files of another kind, options of another command, what does not fit
    (
        "compare a.csv",
        "trace 'a.csv': a table, but not one of kernels with their times (of rocprof or nsys stats): rows of a sweep "
        "are for wattline pareto and best, records for wattline validate",
    ),
    ("compare run.json.gz --model llama3-8b --rank 3", "rank = 3: the trace's ranks are 0: give one of them"),
    ("gpus h1000", "unknown gpu 'h1000': did you mean 'h100-sxm-80gb'?"),
    ("gpus --gpu h100", "unknown option '--gpu': give a GPU to see it: wattline gpus h100"),
    (
        "plan llama3-405b --gpus 1",
        "no deployment of llama3-405b on 1 x h100-sxm-80gb: llama3-405b does not fit on h100-sxm-80gb "
        "with tp = 1: weights 811.7 + KV cache 0.0 + activations 3.7 = 815.4 GB a GPU, of which 72.0 GB "
        "may be used: the smallest replica that fits is tp 8, pp 2",
    ),
    (
        "plan llama3-8b --gpus 3 --slo-ttft-s 0.0001",
        "no deployment of llama3-8b on 3 x h100-sxm-80gb: no load keeps the targets: a request alone "
        "takes a TTFT of 49 ms at least: give more slo_ttft_s, or another gpu",
    ),
    (
        "plan llama3-8b --gpus 2 --slo-tpot-s 0.0001 --slo-ttft-s 0.001",
        "no deployment of llama3-8b on 2 x h100-sxm-80gb: no load keeps the targets: a request alone "
        "takes a TTFT of 30.4 ms and a TPOT of 4.4 ms at least: give more slo_ttft_s and slo_tpot_s, or "
        "another gpu",
    ),
    ("plan llama3-8b --objective cost", "scenario: objective = cost: needs price_per_gpu_hour"),
    (
        "plan llama3-8b --trace a.csv",
        "a.csv: columns a, b: need arrival_s, input_tokens, output_tokens (Azure: TIMESTAMP, "
        "ContextTokens, GeneratedTokens; or those of BurstGPT, Vidur, Splitwise, Bailian, Mooncake)",
    ),
    (
        "plan llama3-8b --gpus 1 --rate-per-s 1000000",
        "rate_per_s = 1e+06: no deployment of llama3-8b on 1 x h100-sxm-80gb carries it within the "
        "targets: 12.2 is the most (1 x tp 1, 120 sequences each, 2,048 tokens a step): give more gpus",
    ),
    (
        "serve llama3-70b --requests 5",
        "llama3-70b does not fit on h100-sxm-80gb with tp = 1: weights 141.1 + KV cache 0.0 + "
        "activations 2.0 = 143.1 GB a GPU, of which 72.0 GB may be used: the smallest replica that fits "
        "is tp 2",
    ),
    (
        "serve llama3-8b --concurrency 4 --rate-per-s 3",
        "scenario: concurrency = 4 contradicts rate_per_s: give one of them",
    ),
    ("serve llama3-8b --rate 5", "unknown option '--rate': it is --rate-per-s here"),
    ("serve llama3-8b --input-len 100", "unknown option '--input-len': it is --input-tokens here"),
    ("serve llama3-8b --plan", "a plan needs an objective: give slo_ttft_s, slo_tpot_s or both"),
    (
        "serve llama3-8b --plan --slo-ttft-s 1 --price-per-kwh 0.2",
        "prices are of one server: leave --plan and --compare out, or ask 'wattline plan'",
    ),
    (
        "serve llama3-8b --requests 5 --kill 3",
        "Invalid value for '--kill': '3' is not SECOND:REPLICA: give two numbers, like 1.5:2",
    ),
    ("fit f.toml --samples 6", "samples = 6: the closed form has 12 coefficients a phase: give more"),
    ("simulate", "scenario: model is missing: give one, such as llama3-8b ('wattline models' lists them)"),
    (
        "simulate llama3-70b",
        "llama3-70b does not fit on h100-sxm-80gb: weights 141.1 + KV cache 0.7 + activations 0.5 = "
        "142.3 GB a GPU, it has 80 GB: the smallest layout that fits is tp 2; or --ignore-memory",
    ),
    ("simulate llama3-8b --prefill", "unknown option '--prefill': it is --phase prefill here"),
    ("simulate llama3-8b --seq_len 4", "unknown option '--seq_len': it is --seq-len here"),
    (
        "simulate llama3-8b --seq-len 4k",
        "Invalid value for '--seq-len': '4k' is not a valid integer: give digits alone, such as 4096",
    ),
    (
        "simulate llama3-8b --json out.json",
        "unexpected 'out.json': --json prints on standard output: write it with > out.json",
    ),
    (
        "simulate llama3-8b --batch 1,2,4",
        "Invalid value for '--batch': '1,2,4' is not a valid integer: one number; for several, wattline sweep",
    ),
    (
        "simulate llama3-8b --output-len 20",
        "scenario: output_len = 20 has no meaning in phase 'prefill': use 'generate'",
    ),
    (
        "simulate llama3-8b --power-cap-w 700W",
        "Invalid value for '--power-cap-w': '700W' is not a valid float: give a number alone, without a unit",
    ),
    ("simulate llama3-8b --trace out/", "trace file 'out': name it .json, .json.gz, .pftrace or .pftrace.gz"),
    ("simulate llama3-8b --gpus 4", "unknown option '--gpus': it is --tp here"),
    ("simulate llama3-8b --window 1:2", "--window is for --trace and --kernels: give one of them"),
    (
        "simulate deepseek-r1 --tp 8",
        "deepseek-r1 does not fit on h100-sxm-80gb: weights 85.1 + KV cache 0.1 + activations 0.1 = 85.4 "
        "GB a GPU, it has 80 GB: the smallest layout that fits is tp 8, pp 2; or --ignore-memory",
    ),
    (
        "memory llama3-70b --gpu-memory 80",
        "unknown option '--gpu-memory': it is the GPU's: give --gpu, an id ('wattline gpus' lists them) "
        "or a .toml file",
    ),
    ("overlap llama3-70b --tp 1", "an overlap study needs TP or EP of at least 2: one GPU has nothing to communicate"),
    ("sweep g.toml", "Missing option '--out': for example, wattline sweep grid.toml --out rows.parquet"),
    (
        "sweep a.csv --out r.csv",
        "a.csv: not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 2)",
    ),
    ("pareto a.csv", "'a.csv' is not a table that 'wattline sweep' wrote: column error is missing"),
    ("inspect run.json.gz --rank 7", "rank = 7: the trace has none of it: its ranks are 0"),
    (
        "inspect x.parquet",
        "trace 'x.parquet': a table, but not one of kernels with their times (of rocprof or nsys stats): rows of a "
        "sweep are for wattline pareto and best, records for wattline validate",
    ),
    (
        "inspect report.nsys-rep",
        "trace 'report.nsys-rep': a report of Nsight Systems: nsys export --type sqlite report.nsys-rep",
    ),
    ("replay run.json.gz --gpu h300", "unknown gpu 'h300': see 'wattline gpus'"),
    ("ui --model llama3-8b", "unknown option '--model': give the model alone: wattline ui llama3-8b"),
    ("llama3-8b", "unknown command 'llama3-8b': a command comes first, as in 'wattline simulate llama3-8b'"),
    ("dit --model wan2.1-14b --gpus 4", "unknown option '--gpus': it is --cp here"),
    (
        "dit --model wan2.1-14b --reuse 0.5",
        "reuse = '0.5': give steps:1-10,13,16, rate:0.58 or metric:FILE.csv,COLUMN,THRESHOLD",
    ),
    (
        "kernel gemm --m 128",
        "Missing option '--n': for example, wattline kernel gemm --m 8192 --n 8192 --k 8192 --sweep",
    ),
    ("ring --world 3", "ranks = 3: 16384 tokens are not 3 equal parts: use 2, 4, 8, 16"),
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one rank."""
    path = tmp_path_factory.mktemp("trace") / "run.json.gz"
    main(["simulate", "llama3-8b", "--layers", "1", "--seq-len", "128", "--trace", str(path), "--quiet"])
    return path


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_one_line_names_the_remedy(
    words: str,
    line: str,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if words.startswith("ui lama"):
        pytest.importorskip("dash", reason="pip install 'wattline[ui]'")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copy(trace, tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    told = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert [one for one in told if not one.startswith("fitting")] == [f"wattline: {line}"]


def test_a_sweep_whose_rows_fail_says_why_the_first_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({"base": {"model": "llama3-8b"}, "grid": {"tp": [3]}}), encoding="utf-8")
    main(["sweep", str(grid), "--out", str(tmp_path / "r.csv"), "--jobs", "1"])
    said = capsys.readouterr()
    assert said.err.startswith("the first that failed: tp = 3 does not divide the 32 query heads of llama3-8b")
    assert said.out.startswith("1 rows in ")
