"""Natural mistakes of a new user: each is answered at once, in one line that says what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.cli import main

FILES = {
    "notes.txt": "hello",
    "s.yaml": "model: llama3-8b\n",
    "s.json": json.dumps({"model": "llama3-8b"}),
    "half.jsonl": json.dumps({"kind": "gemm", "m": 1}) + "\n",
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
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_one_line_names_the_remedy(
    words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if words.startswith("ui lama"):
        pytest.importorskip("dash", reason="pip install 'wattline[ui]'")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
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
