"""What a command writes goes where its path leads, whole or not at all, and never over what it reads."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from sim.cli import COMMANDS
from sim.cli.paths import EITHER, FOLDER, INPUT, OUTPUT
from sim.explore import sweep as sweeping
from sim.output.files import OutputError, check_outputs
from tests.command_kit import run
from traces.errors import TraceError
from traces.write.files import write_pieces

SMALL = {"model": "llama3-8b", "layers": 1, "seq_len": 128, "lm_head": False}
FILES = {
    "s.json": json.dumps(SMALL),
    "grid.toml": '[base]\nmodel = "llama3-8b"\nlayers = 1\nlm_head = false\n[grid]\nseq_len = [64, 128]\n',
    "overlap.toml": '[base]\nmodel = "llama3-70b"\nlayers = 1\n[grid]\ntp = [2]\n',
    "serve.toml": 'model = "llama3-8b"\nrequests = 4\n',
    "rows.csv": "scenario_id,model,error\nx,llama3-8b,\n",
    "trace.json": '{"traceEvents": []}',
    "record.jsonl": '{"kind": "gemm"}\n',
    "named.json": json.dumps(SMALL | {"profile": "profile.json"}),
    "profile.json": "{}",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- inputs are no outputs -------------------------------------------------------------------------------------

# Commands with an output, and the input that it leads to.
OVER_INPUTS = [
    ("s.json", ["simulate", "s.json", "--trace", "OUT.json"]),
    ("s.json", ["simulate", "s.json", "--kernels", "OUT.csv"]),
    ("s.json", ["simulate", "s.json", "--report", "OUT.html"]),
    ("s.json", ["simulate", "s.json", "--trace-layout", "hta", "--trace", "FOLDER/rank0.pt.trace.json.gz"]),
    ("s.json", ["simulate", "s.json", "--chakra", "FOLDER/wattline.0.et"]),
    ("profile.json", ["simulate", "named.json", "--trace", "OUT.json"]),
    ("profile.json", ["simulate", "s.json", "--profile", "profile.json", "--trace", "OUT.json"]),
    ("serve.toml", ["serve", "serve.toml", "--out", "OUT.csv"]),
    ("serve.toml", ["serve", "serve.toml", "--timeline", "OUT.json"]),
    ("rows.csv", ["serve", "--model", "llama3-8b", "--trace", "rows.csv", "--power", "OUT.csv"]),
    ("record.jsonl", ["validate", "record.jsonl", "--csv", "OUT.csv"]),
    ("record.jsonl", ["validate", "record.jsonl", "--plot", "OUT.png"]),
    ("overlap.toml", ["overlap", "overlap.toml", "--csv", "OUT.csv"]),
    ("overlap.toml", ["overlap", "overlap.toml", "--html", "OUT.html"]),
    ("grid.toml", ["sweep", "grid.toml", "--out", "OUT.csv"]),
    ("grid.toml", ["sweep", "grid.toml", "--out", "rows2.csv", "JOURNAL"]),
    ("rows.csv", ["pareto", "rows.csv", "--plot", "OUT.png"]),
    ("rows.csv", ["pareto", "rows.csv", "--html", "OUT.html"]),
    ("rows.csv", ["tornado", "rows.csv", "--plot", "OUT.svg"]),
    ("trace.json", ["replay", "trace.json", "--trace", "OUT.json"]),
    ("trace.json", ["replay", ".", "--trace", "OUT.json"]),
    ("grid.toml", ["fit", "grid.toml", "--rows", "OUT.csv"]),
    ("grid.toml", ["fit", "grid.toml", "--out", "OUT.json"]),
    ("record.jsonl", ["calibrate", "--from", "record.jsonl", "--gpu", "h100", "--out", "OUT.json"]),
    ("record.jsonl", ["calibrate", "--from", ".", "--gpu", "h100", "--out", "OUT.json"]),
]


@pytest.mark.parametrize("link", ["symbolic", "hard"])
@pytest.mark.parametrize(
    ("victim", "words"), OVER_INPUTS, ids=[" ".join(words[:1] + words[-2:]) for _, words in OVER_INPUTS]
)
def test_an_output_that_is_an_input_is_refused(
    victim: str, words: list[str], link: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = []
    for word in words:
        place, _, inside = word.partition("/")
        if place == "FOLDER":
            (folder / "made").mkdir()
            path, word = folder / "made" / inside, "made"
        elif word.startswith("OUT."):
            path = folder / word
        elif word == "JOURNAL":
            path, word = folder / "rows2.csv.journal", ""
        else:
            arguments.append(word)
            continue
        if link == "symbolic":
            path.symlink_to(folder / victim)
        else:
            path.hardlink_to(folder / victim)
        arguments += [word] if word else []
    code, out, err = run(arguments, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("wattline: cannot write '") and "input" in err
    assert {name: (folder / name).read_text(encoding="utf-8") for name in FILES} == FILES


def test_an_input_by_its_own_name_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["simulate", "s.json", "--trace", "./s.json"], capsys)
    assert (code, err) == (2, "wattline: cannot write 's.json': it is an input: give another file\n")
    assert (folder / "s.json").read_text(encoding="utf-8") == FILES["s.json"]


def test_two_outputs_in_one_file_are_refused(folder: Path) -> None:
    (folder / "b.csv").symlink_to("a.csv")
    with pytest.raises(OutputError, match="they are one file"):
        check_outputs([Path("a.csv"), Path("b.csv")])
    check_outputs([Path("/dev/null"), Path("/dev/null"), Path("a.csv"), None])


def test_links_in_a_circle_and_names_too_long_are_refused_before_the_run(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    long = tmp_path / f"{'x' * 300}.json"
    for path, why in ((loop, "Too many levels of symbolic links"), (long, "File name too long")):
        with pytest.raises(OutputError, match=f"cannot write '{path}': {why}"):
            check_outputs([path])


def test_every_path_of_every_command_is_read_or_written() -> None:
    """A path of neither kind would escape the checks above."""

    def commands(command: click.Command) -> Iterator[click.Command]:
        yield command
        if isinstance(command, click.Group):
            for one in command.commands.values():
                yield from commands(one)

    seen = 0
    for name in COMMANDS:
        for command in commands(importlib.import_module(f"sim.cli.{name}").command):
            kinds = [parameter.type for parameter in command.params if isinstance(parameter.type, click.Path)]
            assert all(kind in (INPUT, OUTPUT, FOLDER, EITHER) for kind in kinds), name
            if OUTPUT in kinds or FOLDER in kinds:
                assert type(command).__name__ == "PathCommand", name
            seen += len(kinds)
    assert seen > 30


# -- a full disk, a closed pipe --------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, a write fails half-way, whoever the user is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "s.json", "--trace", "t.json"],
        ["simulate", "s.json", "--trace", "t.json.gz"],
        ["simulate", "s.json", "--trace", "t.pftrace"],
        ["simulate", "s.json", "--trace-layout", "hta", "--trace", "t"],
        ["simulate", "s.json", "--kernels", "t.csv"],
        ["simulate", "s.json", "--kernels", "t.parquet"],
        ["simulate", "s.json", "--chakra", "t"],
        ["simulate", "s.json", "--report", "t.html"],
        ["serve", "serve.toml", "--power", "t.csv"],
        ["overlap", "overlap.toml", "--chunks", "1", "--ctas", "8", "--plot", "t.png"],
        ["sweep", "grid.toml", "--out", "t.csv", "--jobs", "1"],
        ["sweep", "grid.toml", "--out", "t.parquet", "--jobs", "1"],
    ],
    ids=lambda arguments: " ".join(arguments[-2:]),
)
def test_a_full_disk_is_one_line_and_leaves_no_half_file(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(100):
        code, out, err = run([*arguments, "--quiet"], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("wattline: cannot write") and "File too large" in err
    kept = {str(p.relative_to(Path.cwd())) for p in Path.cwd().rglob("*") if p.is_file()} - set(FILES)
    assert kept <= {f"{arguments[3]}.journal"}  # rows that are done


@pytest.mark.usefixtures("folder")
def test_a_sweep_on_a_full_disk_goes_on_when_there_is_room(capsys: pytest.CaptureFixture[str]) -> None:
    line = len(sweeping.run_batch([("x", SMALL)])[0])
    with files_of_at_most(line + line // 2):
        code, _, err = run(["sweep", "grid.toml", "--out", "t.csv", "--jobs", "1"], capsys)
    assert (code, err) == (2, f"wattline: cannot write '{Path.cwd() / 't.csv.journal'}': File too large\n")
    code, out, _ = run(["sweep", "grid.toml", "--out", "t.csv", "--jobs", "1", "--json"], capsys)
    assert code == 0 and (json.loads(out)["rows"], json.loads(out)["resumed"]) == (2, 1)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", [["simulate", "s.json", "--json"], ["simulate", "s.json"], ["gpus"], ["--help"]])
def test_a_full_disk_behind_standard_output_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = run(arguments, capsys)
    assert (code, err) == (2, "wattline: cannot write the output: No space left on device\n")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "s.json", "--json"],
        ["simulate", "s.json"],
        ["gpus"],
        ["--help"],
        ["simulate", "--help"],
        ["--version"],
    ],
)
def test_a_closed_pipe_ends_in_silence_as_its_signal_would(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        code, _, err = run(arguments, capsys)
    assert (code, err) == (141, "")


# -- what an option needs --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "s.json", "--chakra", "et"], "'et' needs the package protobuf: pip install 'wattline[formats]'"),
        (
            ["simulate", "s.json", "--trace", "t.pftrace"],
            "trace file 't.pftrace' needs the package perfetto: pip install 'wattline[formats]'",
        ),
        (
            ["simulate", "s.json", "--report", "r.html"],
            "--report needs plotly and jinja2: pip install 'wattline[report]'",
        ),
        (
            ["serve", "serve.toml", "--report", "r.html"],
            "--report needs plotly and jinja2: pip install 'wattline[report]'",
        ),
        (
            ["serve", "serve.toml", "--timeline", "t.pftrace.gz"],
            "trace file 't.pftrace.gz' needs the package perfetto: pip install 'wattline[formats]'",
        ),
        (
            ["replay", "trace.json", "--trace", "t.pftrace"],
            "trace file 't.pftrace' needs the package perfetto: pip install 'wattline[formats]'",
        ),
        (["pareto", "rows.csv", "--html", "p.html"], "--html needs the extra: pip install 'wattline[explore]'"),
        (["fit", "grid.toml", "--search"], "--search needs the extra: pip install 'wattline[search]'"),
        (["fit", "grid.toml", "--more", "grid.toml"], "--more needs the extra: pip install 'wattline[explore]'"),
    ],
    ids=lambda value: " ".join(value[2:3]) if isinstance(value, list) else "",
)
def test_a_missing_extra_is_told_before_the_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_package(name: str) -> None:
        if "." in name:
            raise ModuleNotFoundError(name)  # as of a part of a package that is not there

    monkeypatch.setattr("traces.write.files.find_spec", no_package)
    for where in ("sim.run.runner.simulate", "sim.serving.serve", "sim.replay.study.replay_trace"):
        monkeypatch.setattr(where, None)
    assert run(arguments, capsys) == (2, "", f"wattline: {message}\n")
    assert {p.name for p in Path.cwd().iterdir()} == set(FILES)


@pytest.mark.usefixtures("folder")
def test_a_trace_error_names_the_path() -> None:
    with pytest.raises(TraceError, match=r"cannot write trace 'no/t\.json': No such file or directory"):
        write_pieces(Path("no/t.json"), [b""])
