"""Commands that pages name without their output: what they read, how they are made small, which are only parsed."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import re
import runpy
import shutil
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import click

from sim.cli import app, main
from tests.docs import ROOT, blocks

# What is appended, the last of a flag wins, so that a run takes about a second.
SMALL: dict[str, tuple[str, ...]] = {
    "simulate": ("--layers", "2", "--quiet"),
    "serve": ("--requests", "20", "--quiet"),
    "overlap": ("--layers", "1", "--tp", "2", "--batch", "1", "--chunks", "1,2", "--ctas", "8", "--quiet"),
    "sweep": ("--jobs", "1", "--quiet"),
    "ring": ("--seq-lens", "16384"),
    "dit": ("--steps", "10", "--cp", "1,2"),
    "validate": ("--quiet",),
}
# Parsed only: options and values are checked, nothing runs.
PARSED: dict[str, str] = {
    "fit": "simulates 493 scenarios and judges ten splits: minutes; tests/test_closed_form.py fits small ones",
    "ui": "serves a page until it is ended; tests/test_ui.py drives it",
    "measure": "needs GPUs",  # tests/test_measure_engine.py runs it on made-up ones
    "calibrate": "five minutes of measuring, or a fit of all records (tests/test_hardware_fit.py)",
    "serve --plan": "tries servers until none is better: minutes; tests/test_serving_plan.py has small ones",
    "serve --compare": "several whole runs of the same traffic; tests/test_serving_plan.py has small ones",
    "simulate --video": "denoising steps of whole videos; tests/test_dit.py has small ones",
    "inspect run.sqlite": "needs an export of Nsight Systems (tests/test_traces_read.py makes small ones)",
    "ring --phase train": "whole models, forward and backward: 20 s; tests/test_ring.py has attention alone",
    "ring --published": "needs a table that is not ours to copy",
}
# Words that stand for something of the reader's.
PLACEHOLDERS = re.compile(r"^[A-Z]{2,}(\.[A-Za-z.]+)?(\.\.\.)?$|^\.\.\.$|^NAME$")


def why_parsed(words: Sequence[str]) -> str | None:
    """Why a command is not run, if so."""
    if any(PLACEHOLDERS.match(word) for word in words[2:]) and words[1] != "simulate":
        return "a word stands for something of the reader's"
    line = " ".join(words[1:])
    for start, reason in PARSED.items():
        name, _, option = start.partition(" ")
        if words[1] == name and option in line:
            return reason
    return None


def small(words: Sequence[str]) -> list[str]:
    """Arguments of ``words`` with few layers or requests; ``...`` is a small model."""
    given = []
    for word in words[1:]:
        given += ["--model", "llama3-8b"] if word == "..." else [word]
    if "--help" in given or "select-proxy" in given:
        return given
    named = "--model" in given or (len(given) > 1 and not given[1].startswith("-"))
    if words[1] == "simulate" and "--gpu" in given and not named:  # a GPU of the reader's, for any model
        given += ["--model", "llama3-8b"]
    extra = list(SMALL.get(words[1], ()))
    if "--pp" in given or "--window" in given or "nemotron" in " ".join(given):
        extra = ["--layers", "8", "--quiet"]
    return [*given, *extra]


def parse(words: Sequence[str]) -> bool:
    """Check names and values of a command's options; whether it is complete.

    What is not there is not asked for: text names commands and options by themselves.
    """
    match words:
        case ["wattline", name, *rest]:
            command = app.get_command(click.Context(app), name)
            assert command is not None, name
            rest = [word for word in rest if not PLACEHOLDERS.match(word)]
            while isinstance(command, click.Group) and rest and rest[0] in command.commands:
                command = command.commands[rest.pop(0)]
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    command.make_context(name, rest)
            except click.UsageError as error:
                match error.__cause__ or error:
                    case click.MissingParameter():
                        return False
                    case click.BadOptionUsage() as told:
                        assert told.message.endswith("requires an argument."), words
                        return False
                raise
            except click.exceptions.Exit as stop:  # after --help
                assert stop.exit_code == 0
        case ["python", "-m", module, *rest]:
            _parse_script(lambda: runpy.run_module(module, run_name="__main__"), rest)
        case ["python", script, *rest]:
            assert (ROOT / script).is_file(), script
            if "ArgumentParser" in (ROOT / script).read_text(encoding="utf-8"):
                _parse_script(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), rest)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        case ["pip", "install", what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            name, _, extra = what.rstrip("]").partition("[")
            assert name == "wattline" and extra in extras["optional-dependencies"], what
        case _:
            raise AssertionError(f"{words}: say in tests/docs_commands.py how to check it")
    return len(words) > 2 or words[-1] in ("gpus", "models")


class _ParsedError(Exception):
    pass


def _parse_script(run: object, arguments: Sequence[str]) -> None:
    """Run a script up to where its arguments are known to be right."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: None = None) -> None:
        real(self, args, namespace)
        raise _ParsedError

    with (
        mock.patch.object(sys, "argv", ["script", *arguments]),
        mock.patch.object(sys, "path", [str(ROOT / "benchmarks"), *sys.path]),  # as of a script that lies there
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(_ParsedError),
    ):
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)  # others import it
        assert callable(run)
        run()
        raise AssertionError(f"{arguments}: nothing parsed them")


# -- what the commands of the pages read -----------------------------------------------------------------------

TRAFFIC = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.000000,{300 + 40 * second},{20 + second}\n" for second in range(40)
)
GRID = """[base]
model = "llama3-8b"
layers = 1
lm_head = false
seq_len = 128
[grid]
tp = [2]
batch = [1, 2]
"""


def prepare(folder: Path) -> None:
    """Write, into the current ``folder``, small files under the names that pages use."""
    scenario = {"model": "llama3-8b", "layers": 1, "seq_len": 128}
    Path("run.json").write_text(json.dumps(scenario), encoding="utf-8")
    Path("run.toml").write_text('model = "llama3-8b"\nlayers = 1\nseq_len = 128\n', encoding="utf-8")
    Path("server.toml").write_text('model = "llama3-8b"\nrequests = 4\n', encoding="utf-8")
    Path("grid.toml").write_text(GRID, encoding="utf-8")
    Path("AzureLLMInferenceTrace_conv.csv").write_text(TRAFFIC, encoding="utf-8")
    Path("metrics.csv").write_text("a,output_change\n1,2\n2,3\n3,5\n", encoding="utf-8")
    for block in blocks("docs/howto.md"):
        for name, key in (("mine.toml", "mine-13b"), ("mycard.toml", "mycard-48gb")):
            if block.language == "toml" and key in block.text:
                Path(name).write_text(block.text, encoding="utf-8")
    config = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "head_dim": 128,
    }  # fmt: skip
    Path("hf").mkdir()
    for path in (Path("config.json"), Path("hf/config.json")):
        path.write_text(json.dumps(config), encoding="utf-8")
    two = ["simulate", "--model", "llama3-8b", "--layers", "1", "--seq-len", "128", "--tp", "2", "--quiet", "--json"]
    with contextlib.redirect_stdout(io.StringIO()):
        main([*two, "--trace", "ranks", "--trace-layout", "hta"])
        main(["sweep", "grid.toml", "--out", "rows.parquet", "--jobs", "1", "--quiet"])
    for rank in (0, 1):
        shutil.copy(f"ranks/rank{rank}.pt.trace.json.gz", f"rank{rank}.json.gz")
    for name in ("trace", "before", "after"):
        shutil.copy("rank0.json.gz", f"{name}.json.gz")
    shutil.copy("rows.parquet", "clocks.parquet")
    records = sorted((ROOT / "records/h100-sxm-80gb/validation").glob("*.jsonl"))[0]
    lines = records.read_text(encoding="utf-8").splitlines()[:8]
    for name in ("records.jsonl", "mine.jsonl"):
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert gzip.decompress(Path("trace.json.gz").read_bytes()) and folder.samefile(Path.cwd())
