"""Paths of a command line: which are read and which are written, and what is refused of them before a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sim.cli.help import Helped

INPUT = click.Path(path_type=Path)


class Written(click.Path):
    """The path of a file, or a folder of files, that a command writes; None: another option says which."""

    def __init__(self, *, folder: bool | None = False) -> None:
        super().__init__(path_type=Path)
        self.folder = folder


OUTPUT = Written()
FOLDER = Written(folder=True)
EITHER = Written(folder=None)


class PathCommand(Helped):
    """A command that refuses outputs which cannot be written, or are its own inputs, before it runs."""

    def invoke(self, ctx: click.Context) -> Any:
        """Check the paths, then run."""
        from sim.output.files import check_folder, check_outputs

        check_outputs(written(ctx), _read(ctx))
        for folder in written(ctx, folder=True):
            check_folder(folder)
        return super().invoke(ctx)


def written(ctx: click.Context, *, folder: bool = False) -> list[Path]:
    """The files, or the folders, that the options of a command name as outputs."""
    return [
        path
        for parameter in ctx.command.params
        if isinstance(parameter.type, Written) and parameter.type.folder is folder
        for path in _values(ctx, parameter)
        if isinstance(path, Path)
    ]


def keep_inputs(fields: Any, *more: Path) -> None:
    """Refuse outputs of the running command, and ``more`` of them, that are inputs or files which these name.

    ``fields`` are what the input files said.
    """
    from sim.output.files import check_not_inputs, files_named

    ctx = click.get_current_context()
    check_not_inputs([*written(ctx), *more], [*_read(ctx), *files_named(fields)])


def _read(ctx: click.Context) -> Iterator[Path]:
    from sim.output.files import files_named

    for parameter in ctx.command.params:
        if isinstance(parameter.type, Written):
            continue
        for value in _values(ctx, parameter):
            if isinstance(value, Path):
                yield value
            else:
                yield from files_named(value)


def _values(ctx: click.Context, parameter: click.Parameter) -> list[Any]:
    value = ctx.params.get(parameter.name or "")
    return list(value) if isinstance(value, tuple | list) else [value]
