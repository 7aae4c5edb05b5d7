"""Write whole files or nothing, and refuse before a run what could not be written after it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import SimError
from sim.output.spreadsheet import to_csv
from traces.write.files import installed, whole_file

if TYPE_CHECKING:
    import pandas as pd

TABLE_ENDINGS = (".parquet", ".csv")
PICTURE_ENDINGS = (".png", ".svg")


class OutputError(SimError):
    """A result that cannot be written where the user asked."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to what ``path`` names: readers of a file never see a half-written one."""
    try:
        with whole_file(path) as stream:
            stream.write(data)
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error}") from None


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """Refuse files in folders that do not exist, folders, two outputs in one file, and files that are inputs."""
    files = [path for path in outputs if path is not None]
    for path in files:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError as error:  # links in a circle, a name too long
            raise OutputError(f"cannot write '{path}': {error.strerror}") from None
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise OutputError(f"cannot write '{path}': it is a folder")
        if not path.absolute().parent.is_dir():
            raise OutputError(f"cannot write '{path}': no folder '{path.parent}'")
        if not os.access(path.resolve().parent if found is None else path, os.W_OK):
            raise OutputError(f"cannot write '{path}': Permission denied")
    for path, other in combinations(files, 2):
        if path.resolve() == other.resolve() and (_stat(path) is None or _identity(path) is not None):
            raise OutputError(f"cannot write both '{path}' and '{other}': they are one file")
    check_not_inputs(files, inputs)


def check_folder(path: Path) -> None:
    """Refuse a file where a folder of files is to be written."""
    found = _stat(path)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise OutputError(f"cannot write files into '{path}': it is a file: give a folder")


def check_not_inputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuse to write to a file that is read, whatever the links that lead to it."""
    existing = {key: path for path in outputs if path is not None and (key := _identity(path)) is not None}
    if not existing:
        return
    for given in inputs:
        for path in (given, *_inside(given)) if given is not None else ():
            if (key := _identity(path)) in existing:
                what = f"the input '{path}'" if path != existing[key] else "an input"
                raise OutputError(f"cannot write '{existing[key]}': it is {what}: give another file")


def _identity(path: Path) -> tuple[int, int] | None:
    """What all names of a regular file have in common; None of anything else."""
    found = _stat(path)
    return (found.st_dev, found.st_ino) if found is not None and stat.S_ISREG(found.st_mode) else None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _inside(folder: Path) -> Iterator[Path]:
    for where, _, names in os.walk(folder):
        yield from (Path(where) / name for name in names)


def files_named(value: Any) -> set[Path]:
    """Files that texts somewhere in ``value`` (tables, lists) name: models, GPUs, profiles, routings.

    >>> files_named({"model": "llama3-8b", "layers": 4, "routing": ["file:no such file"]})
    set()
    """
    texts: set[str] = set()
    _texts(value, texts)
    candidates = (Path(part) for text in texts for part in {text, text.partition(":")[2]} if part)
    return {path for path in candidates if _identity(path) is not None}


def _texts(value: Any, found: set[str]) -> None:
    match value:
        case int() | float() | None:  # most of a grid's values: told at once
            pass
        case str() | Path():
            found.add(str(value))
        case Mapping():
            for item in value.values():
                _texts(item, found)
        case list() | tuple():
            for item in value:
                _texts(item, found)
        case _:
            pass


def check_table_ending(path: Path) -> None:
    """Refuse a table file that is neither Parquet nor CSV."""
    if path.suffix not in TABLE_ENDINGS:
        raise OutputError(f"'{path}': a table is written as .parquet or .csv")


def check_sweep_ending(path: Path) -> None:
    """Refuse a file of a sweep that is neither Parquet nor CSV."""
    if path.suffix not in TABLE_ENDINGS:
        raise SimError(f"'{path}': a sweep is written as .parquet or .csv")


def check_picture_ending(path: Path) -> None:
    """Refuse a picture file that is neither PNG nor SVG."""
    if path.suffix not in PICTURE_ENDINGS:
        raise OutputError(f"'{path}': a picture is written as .png or .svg")


def check_page_ending(path: Path, option: str, what: str) -> None:
    """Refuse a page that a browser would not open."""
    if path.suffix not in (".html", ".htm"):
        raise OutputError(f"{option} '{path}': a {what} is written as .html")


def check_extra(option: str, extra: str, *modules: str) -> None:
    """Refuse an option that needs packages which are not installed, with the extra that brings them."""
    if not all(map(installed, modules)):
        raise SimError(f"{option} needs the extra: pip install 'wattline[{extra}]'")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write ``table`` as Parquet or CSV, by the file's ending."""
    check_table_ending(path)
    if path.suffix == ".csv":
        write_atomically(path, to_csv(table))
        return
    import fastparquet

    try:
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "table.parquet"
            fastparquet.write(str(part), table, compression="ZSTD", write_index=False)
            data = part.read_bytes()
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error} (in the temporary folder)") from None
    write_atomically(path, data)
