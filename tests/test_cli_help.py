"""What the command line says to somebody new: mistakes and remedies, help, completion, narrow and plain output."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sim.cli import COMMANDS, app, main
from sim.cli.examples import EXAMPLES
from sim.cli.help import OTHER_NAMES, OWN_PANELS, PANELS
from tests.docs_commands import parse

ROOT = Path(__file__).parents[1]

# -- mistakes --------------------------------------------------------------------------------------------------

# What somebody new types, and what of the remedy the one line must hold.
MISTAKES = {
    "wattline simulate": "model is missing: give one, such as llama3-8b",
    "wattline simluate llama3-8b": "did you mean 'simulate'?",
    "wattline run llama3-8b": "did you mean 'simulate'?",
    "wattline help simulate": "give --help after a command",
    "wattline version": "give 'wattline --version'",
    "wattline --model llama3-8b": "a command comes first, as in 'wattline simulate llama3-8b'",
    "wattline simulate llama3": "fits several models: llama3-405b, llama3-70b, llama3-8b: name one",
    "wattline simulate lama3-8b": "did you mean 'llama3-8b'?",
    "wattline simulate meta-llama/Llama-9-900B": "download its config.json and give that file",
    "wattline models someone/else-7b": "download its config.json and give that file",
    "wattline simulate llama3-8b llama3-70b": "unexpected 'llama3-70b': for example, wattline simulate llama3-8b",
    "wattline simulate llama3-8b --model llama3-70b": "give one model",
    "wattline simulate wan2.1-14b": "use phase = 'denoise'",
    "wattline simulate notes.txt": "give a scenario's .toml or .json file, or a model's id",
    "wattline simulate missing.toml": "cannot read scenario 'missing.toml'",
    "wattline simulate typo.toml": "unknown key 'bathc' in typo.toml: did you mean 'batch'?",
    "wattline simulate half.json": "half.json, line 1: not valid JSON",
    "wattline simulate llama3-8b --gpu a100": "name one",
    "wattline simulate llama3-8b --gpu h1000": "did you mean 'h100-sxm-80gb'?",
    "wattline simulate llama3-8b --gpu 4090": "did you mean 'rtx-4090-24gb'?",
    "wattline simulate llama3-8b --gpus 4": "it is --tp here",
    "wattline simulate llama3-8b --tensor-parallel-size 4": "it is --tp here",
    "wattline simulate llama3-8b --batch-size 4": "it is --batch here",
    "wattline serve --model llama3-8b --dp 2": "it is --replicas here",
    "wattline simulate llama3-8b --input-len 512": "it is --seq-len here",
    "wattline simulate llama3-8b --max-tokens 9": "it is --output-len here",
    "wattline simulate llama3-8b --power-cap 500": "it is --power-cap-w here",
    "wattline simulate llama3-8b --clock 1410": "it is --sm-clock-mhz here",
    "wattline simulate llama3-8b --chunks 4": "it is --overlap-chunks here",
    "wattline serve llama3-8b --qps 4": "it is --rate-per-s here",
    "wattline plan llama3-70b --num-gpus 16": "it is --gpus here",
    "wattline simulate llama3-8b --tp 3": "does not divide the 32 query heads of llama3-8b: use 1, 2, 4, 8, 16, 32",
    "wattline simulate llama3-8b --tp four": "give digits alone",
    "wattline simulate llama3-8b --seq-len 4k": "give digits alone, such as 4096",
    "wattline simulate llama3-8b --power-cap-w 500W": "give a number alone, without a unit",
    "wattline simulate llama3-8b --power-cap-w 10": "is not above the idle power",
    "wattline simulate llama3-8b --sm-clock-mhz 1.4": "345 to 1980 MHz",
    "wattline simulate llama3-8b --batch -1": "input should be greater than 0",
    "wattline simulate llama3-8b --output-len 128": "use 'generate'",
    "wattline simulate llama3-8b --phase generate": "output_len is missing",
    "wattline simulate llama3-8b --phase prompt": "is not one of 'prefill', 'decode'",
    "wattline simulate llama3-8b --dtype fp4": "is how weights are stored: give --weight-dtype int4_g128",
    "wattline simulate llama3-8b --overlap-chunks 4": "needs tp of at least 2",
    "wattline simulate qwen3-30b-a3b --ep 4": "needs ep_mode: 'all_reduce' or 'all_to_all'",
    "wattline simulate llama3-70b": "the smallest layout that fits is tp 2",
    "wattline simulate llama3-8b --stack vLLM": "did you mean 'vllm'?",
    "wattline simulate llama3-8b --trace": "for example, wattline simulate llama3-8b",
    "wattline simulate llama3-8b --trace run.txt": "name it .json, .json.gz, .pftrace",
    "wattline simulate llama3-8b --trace nowhere/run.json": "no folder 'nowhere'",
    "wattline simulate llama3-8b --report run.pdf": "a report is written as .html",
    "wattline plan llama3-8b --gpus 1 --slo-ttft-s 1000ms": "give a number alone, without a unit",
    "wattline plan llama3-70b --gpus 1": "no deployment of llama3-70b on 1 x h100-sxm-80gb",
    "wattline serve": "model is missing: give one",
    "wattline overlap --model llama3-70b --overlap chunk": "is not one of chunks, ring_exchange",
    "wattline overlap llama3-70b --chunks 1;2": "is not a list of whole numbers like 1,2,4",
    "wattline sweep": "for example, wattline sweep grid.toml --out rows.parquet",
    "wattline sweep grid.toml": "for example, wattline sweep grid.toml --out rows.parquet",
    "wattline pareto missing.parquet": "cannot read 'missing.parquet'",
    "wattline inspect": "for example, wattline inspect trace.json.gz",
    "wattline inspect notes.txt": "is it a Chrome or Kineto JSON trace?",
    "wattline inspect other.json": "export it with export_chrome_trace",
    "wattline kernel gem": "did you mean 'gemm'?",
    "wattline kernel gemm --m 8": "for example, wattline kernel gemm --m 8192 --n 8192",
    "wattline gpus h100 h200": "unexpected 'h200'",
    "wattline dit --model llama3-8b": "known: flux.1-dev",
    "wattline ui --port 99999": "is not in the range",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files that mistakes name."""
    (tmp_path / "typo.toml").write_text('model = "llama3-8b"\nbathc = 2\n', encoding="utf-8")
    (tmp_path / "half.json").write_text('{"model": ', encoding="utf-8")
    (tmp_path / "other.json").write_text('{"a": 1}', encoding="utf-8")
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "grid.toml").write_text('[base]\nmodel = "llama3-8b"\n[grid]\ntp = [1, 2]\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", MISTAKES)
def test_a_natural_mistake_is_one_line_with_the_remedy(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(line)[1:])
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (2, "")
    assert said.err.startswith("wattline: ") and said.err.count("\n") == 1
    assert MISTAKES[line] in said.err


def test_names_of_other_tools_lead_to_options_that_there_are() -> None:
    known = {parameter.name for _, command in commands() for parameter in command.params}
    assert {name for names in OTHER_NAMES.values() for name in names} <= known


# -- help ------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by its name, those of groups too."""
    for name in COMMANDS:
        command = app.get_command(click.Context(app), name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {one}", inner) for one, inner in command.commands.items())


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_described_and_every_command_has_examples(name: str) -> None:
    assert [p.name for p in ALL[name].params if isinstance(p, click.Option) and not p.help] == []
    if name == "kernel":  # its kinds have them
        return
    text = CliRunner().invoke(app, [*name.split(), "--help"]).stdout
    for line in EXAMPLES[name]:
        assert f"  {line}\n" in text
        assert parse(shlex.split(line)) or name == "ui"
        assert line.startswith(f"wattline {name}")


def test_options_stand_in_panels() -> None:
    text = CliRunner().invoke(app, ["simulate", "--help"]).stdout
    headings = re.findall(r"^(\w.*):$", text, flags=re.MULTILINE)
    assert headings == [*(panel for panel in PANELS if panel in headings), "Examples"] and len(headings) >= 8
    named = {name for names in PANELS.values() for name in names} | {name for _, name in OWN_PANELS}
    known = {parameter.name for command in ALL.values() for parameter in command.params} | {"help"}
    assert named <= known


# -- completion ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("simulate --model llama3-", {"llama3-8b", "llama3-70b", "llama3-405b"}),
        ("simulate llama3-", {"llama3-8b", "llama3-70b", "llama3-405b"}),
        ("plan llama3-7", {"llama3-70b"}),
        ("serve --model qwen3-30", {"qwen3-30b-a3b"}),
        ("simulate --gpu h100-", {"h100-sxm-80gb", "h100-pcie-80gb", "h100-nvl-94gb"}),
        ("kernel gemm --gpu h20", {"h20-sxm-96gb", "h200-sxm-141gb"}),
        ("overlap --gpu a100-s", {"a100-sxm-40gb", "a100-sxm-80gb"}),
        ("simulate --stack v", {"vllm"}),
        ("sim", {"simulate"}),
    ],
)
def test_ids_are_completed(line: str, offered: set[str]) -> None:
    words = ["wattline", *line.split()]
    environment = {
        **os.environ,
        "_WATTLINE_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "PYTHONPATH": str(ROOT),
    }
    start = "from sim.cli import app; app(prog_name='wattline')"
    ended = subprocess.run([sys.executable, "-c", start], env=environment, capture_output=True, text=True, check=True)
    assert {item.partition(",")[2] for item in ended.stdout.split()} == offered


def test_a_shell_that_reads_the_script_offers_ids(tmp_path: Path) -> None:
    """Bash itself, as its user meets it: the script is sourced, the function that it names fills COMPREPLY."""
    command = tmp_path / "wattline"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from sim.cli import main; main()" "$@"\n', "utf-8")
    command.chmod(0o755)
    asked = (
        "source <(_WATTLINE_COMPLETE=bash_source wattline); "
        "COMP_WORDS=(wattline serve --model qwen3-30); COMP_CWORD=3; "
        '"$(complete -p wattline | sed "s/.*-F \\([^ ]*\\).*/\\1/")" wattline qwen3-30 --model; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["bash", "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["qwen3-30b-a3b"]


# -- where it is read ------------------------------------------------------------------------------------------

RUN = "simulate llama3-70b --tp 2 --layers 1 --seq-len 256 --ignore-memory"


def on_terminal(line: str, columns: int, **environment: str) -> str:
    """What a terminal of so many columns gets to see."""
    ours, theirs = pty.openpty()
    given = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environment}
    start = f"from sim.cli import main; main({line.split()!r})"
    child = subprocess.Popen([sys.executable, "-c", start], stdout=theirs, stderr=subprocess.STDOUT, env=given)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert child.wait() == 0, seen
    return seen.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colour_unless_it_asks_for_none() -> None:
    colour = re.compile(r"\x1b\[(?:\d;)*(?:3[0-8]|9[0-7])")
    assert colour.search(on_terminal(RUN, 80))
    assert not colour.search(on_terminal(RUN, 80, NO_COLOR="1"))


@pytest.mark.parametrize("line", [RUN, "gpus", "kernel gemm --m 512 --n 512 --k 512", "memory llama3-70b --tp 4"])
def test_a_narrow_terminal_loses_no_figure(line: str) -> None:
    """Of 40 columns: nothing is cut off with an ellipsis, and no line is longer."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_terminal(line, 40))
    assert "…" not in text
    assert max(len(part) for part in re.split(r"[\r\n]", text)) <= 40


@pytest.mark.parametrize("line", [RUN, "gpus", "models", "kernel gemm --m 512 --n 512 --k 512"])
def test_without_a_terminal_no_line_ends_in_blanks(line: str) -> None:
    text = CliRunner().invoke(app, line.split()).stdout
    assert text and not re.search(r"[ \t]+$", text, flags=re.MULTILINE) and "\x1b" not in text


def test_one_gpu_is_shown_with_the_source_of_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gpus", "h100", "--json"])
    found = json.loads(capsys.readouterr().out)
    sms = next(row for row in found["figures"] if row["figure"] == "sms")
    assert (found["id"], sms["value"]) == ("h100-sxm-80gb", 132) and sms["source"]
    main(["gpus", "h100"])
    assert "h100-sxm-80gb: H100-SXM5-80GB, hopper" in capsys.readouterr().out
