"""Write whole files or nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pandas as pd

from sim.errors import SimError
from sim.spreadsheet import to_csv

TABLE_ENDINGS = (".parquet", ".csv")


class OutputError(SimError):
    """A result that cannot be written where the user asked."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` by renaming a finished file: readers never see a half-written one."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write '{path}': {error.strerror or error}") from None


def check_folders(*paths: Path | None) -> None:
    """Refuse files in folders that do not exist."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise OutputError(f"cannot write '{path}': no folder '{path.parent}'")


def check_table_ending(path: Path) -> None:
    """Refuse a table file that is neither Parquet nor CSV."""
    if path.suffix not in TABLE_ENDINGS:
        raise OutputError(f"'{path}': a table is written as .parquet or .csv")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write ``table`` as Parquet or CSV, by the file's ending."""
    check_table_ending(path)
    if path.suffix == ".csv":
        write_atomically(path, to_csv(table))
        return
    import fastparquet

    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "table.parquet"
        fastparquet.write(str(part), table, compression="ZSTD", write_index=False)
        write_atomically(path, part.read_bytes())
