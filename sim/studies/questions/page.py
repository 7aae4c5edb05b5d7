"""What every page of :mod:`sim.studies.questions` shares: its head, its command line, how figures are compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from hardware.catalog import load_gpu
from hardware.profile import profile_for
from sim.output.files import write_atomically
from sim.studies.command import exit_code

Phase = Literal["prefill", "decode"]
ENERGYLENS = "EnergyLens (arXiv [2605.14249](https://arxiv.org/abs/2605.14249))"
CLOSED_FORM = "EnergyLens, the closed form (arXiv [2605.10556](https://arxiv.org/abs/2605.10556))"


def head(title: str, name: str, gpus: Sequence[str], question: str) -> str:
    """Title, command, what the numbers rest on, and the question."""
    lines = [f"- {_rests_on(gpu)}" for gpu in gpus]
    return "\n\n".join(
        [
            f"# {title}",
            f"Written by `python -m sim.studies.questions.{name} --out docs/studies/{name}.md`; do not edit.",
            question,
            "What the numbers rest on:\n\n" + "\n".join(lines),
        ]
    )


def _rests_on(gpu: str) -> str:
    profile = profile_for(load_gpu(gpu))
    return f"`{profile.gpu}`, {profile.status}: {profile.expected_error().rstrip('.')}"


def verdict(published: float, low: float, high: float, shown: Callable[[float], str]) -> str:
    """How a published figure lies to the range of ours, in words.

    >>> verdict(2.0, 1.0, 3.0, "{:.1f}".format)
    'agrees: 2.0 lies within ours, 1.0 to 3.0'
    >>> verdict(4.0, 1.0, 3.0, "{:.1f}".format)
    'differs: 4.0 is above ours, 1.0 to 3.0'
    """
    ours = f"{shown(low)} to {shown(high)}" if shown(low) != shown(high) else shown(low)
    if low <= published <= high:
        return f"agrees: {shown(published)} lies within ours, {ours}"
    return f"differs: {shown(published)} is {'above' if published > high else 'below'} ours, {ours}"


def command(name: str, page: Callable[[], str], argv: Sequence[str] | None = None) -> int:
    """Command line of a study: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m sim.studies.questions.{name}")
    parser.add_argument("--out", type=Path, required=True, help="the Markdown page to write")
    arguments = parser.parse_args(argv)
    return exit_code(name, lambda: write_atomically(arguments.out, page().encode()))
