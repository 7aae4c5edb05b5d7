"""A sweep in Python: a grid in, a table out."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sim.explore.grid import load_grid, parse_grid
from sim.explore.sweep import sweep as sweep_to_file
from sim.explore.table import read_table
from sim.explore.workers import Pool


def sweep(
    grid: Mapping[str, Any] | str | Path, *, jobs: int | None = None, out: str | Path | None = None
) -> pd.DataFrame:
    """Every scenario of ``grid``, one row each: its fields, its figures (SI units), and ``error`` where it has none.

    ``grid`` is what a grid file holds (docs/sweep.md), or the path of one. With ``out`` (.csv, .parquet) the table
    stays there too, and an interrupted sweep goes on where it was. ``jobs`` processes [default: one a core].

    >>> table = sweep({"base": {"model": "llama3-8b", "layers": 1}, "grid": {"batch": [1, 2]}}, jobs=1)
    >>> table["batch"].tolist(), bool(table["latency_s"].is_monotonic_increasing)
    ([1, 2], True)
    """
    cases = parse_grid(grid, where="grid") if isinstance(grid, Mapping) else load_grid(Path(grid))
    pool = Pool() if jobs is None else Pool(jobs=jobs)
    if out is not None:
        sweep_to_file(cases, Path(out), pool=pool)
        return read_table(Path(out))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        sweep_to_file(cases, path, pool=pool)
        return read_table(path)
