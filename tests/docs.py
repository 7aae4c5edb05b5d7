"""The printed blocks of README.md and docs/: found, run, compared, and written anew.

``python -m tests.docs`` runs every command that a page shows with its output and says what differs;
``python -m tests.docs --write`` puts the real output in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from sim.cli import main as wattline

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
)
# A comment before a block says why it is not run; pages that others keep are named here, by the block's first words.
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")
NOT_RUN_ELSEWHERE = {
    (
        "docs/fidelity.md",
        "family        left out",
    ): "a part of what crossval prints in minutes; test_fidelity.py has it",
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
ELIDED = "..."
COLUMNS = 106  # of the terminal that pages show


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command of a block, as words, and the lines that the page prints below it; None: it shows no output."""

    words: tuple[str, ...]
    shown: str  # its own lines, as written
    printed: tuple[str, ...] | None

    @property
    def command(self) -> str:
        """In one line."""
        return shlex.join(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: where it is, its language, its lines, and why it is not run, if so."""

    page: str
    line: int
    start: int
    end: int
    language: str
    text: str
    not_run: str | None

    @property
    def shell(self) -> bool:
        """Whether it shows commands."""
        return self.language in ("", "console", "sh", "bash")

    def steps(self) -> list[Step]:
        """Its commands. With ``$`` before them, what follows is their output; without, every line is a command."""
        prompted = any(line.startswith("$ ") for line in self.text.splitlines())
        steps: list[Step] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if prompted and not line.startswith("$ "):
                if steps:
                    steps[-1] = replace(steps[-1], printed=(*(steps[-1].printed or ()), line))
                continue
            shown = line
            while shown.endswith("\\"):
                shown += "\n" + next(lines)
            words = shlex.split(shown.removeprefix("$ ").replace("\\\n", " "), comments=True)
            if words:
                steps.append(Step(words=tuple(words), shown=shown, printed=None))
        return [step if any(step.printed or ()) else replace(step, printed=None) for step in steps]


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The fenced blocks of ``page``."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    found = []
    for match in _FENCE.finditer(text):
        reason = NOT_RUN.search(text[: match.start()].rpartition("\n\n")[2])
        known = [why for (of, head), why in NOT_RUN_ELSEWHERE.items() if of == page and match[2].startswith(head)]
        found.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                start=match.start(2),
                end=match.end(2),
                language=match[1],
                text=match[2],
                not_run=reason[1] if reason else next(iter(known), None),
            )
        )
    return found


def mentions(page: str) -> list[tuple[str, ...]]:
    """Commands in the text of ``page``, between backticks, as words; bare names of commands are not among them."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = []
    for match in re.finditer(r"`((?:wattline|python|make|pip) [^`]+)`", text):
        first, *others = match[1].split(" | ")  # as of "wattline kernel gemm | grouped"
        found += [shlex.split(first), *([*shlex.split(first)[:2], other.strip()] for other in others)]
    return list(dict.fromkeys(map(tuple, found)))


# -- running ---------------------------------------------------------------------------------------------------


def run(words: Sequence[str]) -> str:
    """What ``wattline ...`` prints in the current folder."""
    return outcome(words)[1]


def outcome(words: Sequence[str]) -> tuple[int, str]:
    """The exit code of ``wattline ...``, and its standard output, with the message where it is refused."""
    assert words[0] == "wattline", words
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sim.cli.console.PIPE_WIDTH", COLUMNS),
    ):
        try:
            wattline(list(words[1:]))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue() + (err.getvalue() if code else "")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary current folder that holds what commands read of the repository."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as made:
        for name in ("records", "benchmarks"):
            (Path(made) / name).symlink_to(ROOT / name)
        os.chdir(made)
        try:
            yield Path(made)
        finally:
            os.chdir(before)


# -- comparing -------------------------------------------------------------------------------------------------


def same_line(printed: str, real: str) -> bool:
    """Equal text; numbers equal within the digits that ``printed`` has. Widths of columns may differ.

    >>> same_line("latency  204.2 ms", "latency   204.3 ms"), same_line("latency 204.2 ms", "latency 204.4 ms")
    (True, False)
    >>> same_line("289 kernels", "290 kernels"), same_line("-0.1 %", "+0.1 %")
    (False, False)
    """
    if _skeleton(printed) != _skeleton(real):
        return False
    return all(_close(a, b) for a, b in zip(_NUMBER.findall(printed), _NUMBER.findall(real), strict=True))


def _skeleton(line: str) -> str:
    """The line without its numbers and without what only sets columns apart."""
    return re.sub(r"([━─═])\1+", r"\1", re.sub(r"\s+", " ", _NUMBER.sub("#", line))).strip()


def _close(printed: str, real: str) -> bool:
    one, other = (float(text.replace(",", "")) for text in (printed, real))
    mantissa, _, exponent = printed.partition("e")
    _, point, digits = mantissa.partition(".")
    if not point and not exponent:
        return one == other
    last = 10.0 ** (int(exponent or 0) - len(digits))
    return abs(one - other) <= 1.000001 * last


def differences(printed: Sequence[str], real: Sequence[str]) -> list[str]:
    """Where ``real`` output is not what is ``printed``; a line of ``...`` stands for any lines."""
    wanted, got = _stripped(printed), _stripped(real)
    if ELIDED not in wanted:
        pairs = list(zip(wanted, got, strict=False))
        found = [f"- {a}\n+ {b}" for a, b in pairs if not same_line(a, b)]
        found += [f"- {line}" for line in wanted[len(got) :]] + [f"+ {line}" for line in got[len(wanted) :]]
        return found
    at, found, anywhere = 0, [], False
    for line in wanted:
        if line == ELIDED:
            anywhere = True
            continue
        places = range(at, len(got)) if anywhere else range(at, min(at + 1, len(got)))
        place = next((i for i in places if same_line(line, got[i])), None)
        if place is None:
            near = difflib.get_close_matches(line, got[at:], n=1, cutoff=0.6)
            found.append(f"- {line}" + "".join(f"\n+ {one}" for one in near))
            anywhere = True
            continue
        at, anywhere = place + 1, False
    if not anywhere:
        found += [f"+ {line}" for line in got[at:]]
    return found


def renewed(printed: Sequence[str], real: Sequence[str]) -> list[str]:
    """The lines that the page should print: the real ones; those that ``...`` leaves out stay left out."""
    got = _stripped(real)
    if ELIDED not in _stripped(printed):
        return got
    lines, at = [], 0
    for line in _stripped(printed):
        if line == ELIDED:
            lines.append(line)
            continue
        rest = got[at:]
        same = [i for i, one in enumerate(rest) if _skeleton(one) == _skeleton(line)]
        if not same:
            near = difflib.get_close_matches(line, rest, n=1, cutoff=0.6)
            same = [rest.index(near[0])] if near else []
        if same:
            lines.append(rest[same[0]])
            at += same[0] + 1
    return lines if at == len(got) or lines[-1:] == [ELIDED] else [*lines, ELIDED]


def _stripped(lines: Sequence[str]) -> list[str]:
    """Without blanks at ends of lines and empty lines at both ends."""
    text = "\n".join(line.rstrip() for line in lines).strip("\n")
    return text.split("\n") if text else []


def check(page: str, *, write: bool = False) -> list[str]:
    """Run the commands of ``page`` that print something; what differs. With ``write`` the page is put right."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    told, pieces, done = [], [], 0
    with folder():
        for block in blocks(page, text):
            if not block.shell or block.not_run or not any(step.printed for step in block.steps()):
                continue
            lines = []
            for step in block.steps():
                lines.append(step.shown)
                real = run(step.words).splitlines()
                if step.printed is not None:
                    changed = differences(step.printed, real)
                    told += [f"{page}:{block.line}: {step.command}\n" + "\n".join(changed)] if changed else []
                    lines += renewed(step.printed, real) if changed else _stripped(step.printed)
            pieces += [text[done : block.start], "\n".join(lines) + "\n"]
            done = block.end
    if write and told:
        path.write_text("".join([*pieces, text[done:]]), encoding="utf-8")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where pages are stale and stay so."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE", help="such as docs/howto.md [default: all]")
    parser.add_argument("--write", action="store_true", help="put the real output into the pages")
    given = parser.parse_args(arguments)
    told = [one for page in given.pages for one in check(page, write=given.write)]
    print("\n\n".join(told) or "every printed block is what its command prints")
    return int(bool(told) and not given.write)


if __name__ == "__main__":
    sys.exit(main())
