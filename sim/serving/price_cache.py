"""Prices of parts on disk: one SQLite file, shared by processes at once, for as long as the code is the same.

Each price lies under a digest of all that it rests on: the model, GPU, profile and layout by content, and the source
of wattline itself, so that nothing stored can be old. The file holds numbers only; one that cannot be read is set
aside with a line, and made anew. ``WATTLINE_CACHE`` names another folder, ``off`` stores and reads nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from sim.serving.cost import Cost

Known = dict[tuple[str, int, int, float], Cost]
VARIABLE, OFF = "WATTLINE_CACHE", "off"
# Layout of the file; another one is made anew.
FORMAT = 1
# How long a process waits for another one's write, and the size beyond which a file begins anew.
WAIT_S, MOST_BYTES = 10.0, 256 << 20
COLUMNS = (
    "digest TEXT, part TEXT, size INTEGER, context INTEGER, target_w REAL, time_s REAL, energy_j REAL, cycles REAL, "
    "row_check INTEGER"
)
SOURCES = ("hardware", "inputs", "sim", "workloads")


@dataclass(frozen=True, slots=True)
class StoredPrices:
    """The stored prices of one table; without a ``file`` there are none."""

    file: Path | None
    digest: str

    def read(self) -> Known:
        """All of them."""
        if self.file is None or not self.file.exists():
            return {}
        found: Known = {}
        with _ignored(self.file), _opened(self.file, make=False) as stored:
            for *row, check in stored.execute("SELECT * FROM prices WHERE digest = ?", (self.digest,)):
                if _check(*row) != check:
                    raise sqlite3.DatabaseError("damaged row")
                _, part, size, context, target_w, time_s, energy_j, cycles = row
                found[part, size, context, target_w] = Cost(time_s=time_s, energy_j=energy_j, cycles=cycles)
            return found
        return {}

    def write(self, prices: Known) -> None:
        """Add ``prices``; what another process has added since stays."""
        if self.file is None:
            return
        rows = [(self.digest, *key, cost.time_s, cost.energy_j, cost.cycles) for key, cost in prices.items()]
        with _ignored(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.file.exists() and self.file.stat().st_size > MOST_BYTES:
                self.file.unlink(missing_ok=True)
            with _opened(self.file, make=True) as stored:
                stored.executemany(
                    "INSERT OR IGNORE INTO prices VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [(*row, _check(*row)) for row in rows],
                )


def stored_prices(content: str) -> StoredPrices:
    """Those of a table that rests on ``content``."""
    folder = cache_folder()
    if folder is None:
        return StoredPrices(None, "")
    digest = hashlib.sha256(f"{_code()}\n{content}".encode()).hexdigest()
    return StoredPrices(folder / f"prices-{FORMAT}.sqlite", digest)


def cache_folder() -> Path | None:
    """Where prices are kept: ``WATTLINE_CACHE``, or ``wattline`` in the user's cache; None where it is off."""
    named = os.environ.get(VARIABLE)
    if named == OFF:
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "wattline"
    except RuntimeError:  # nobody's home
        return None


@contextmanager
def switched_off() -> Iterator[None]:
    """Nothing is stored or read meanwhile, in processes that are started now neither."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = OFF
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@cache
def _code() -> str:
    """A digest of the source that prices come from, and of what rounds their last bits."""
    digest = hashlib.sha256(f"{platform.machine()} {sys.version_info[:2]} {np.__version__}".encode())
    root = Path(__file__).parents[2]
    for package in SOURCES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in (".py", ".toml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


@contextmanager
def _opened(file: Path, *, make: bool) -> Iterator[sqlite3.Connection]:
    """The file within one transaction; one without prices is refused, or its table made."""
    with closing(sqlite3.connect(file, timeout=WAIT_S, isolation_level=None)) as stored:
        stored.execute("BEGIN IMMEDIATE" if make else "BEGIN")
        (version,) = stored.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT) or not (version or make):
            raise sqlite3.DatabaseError(f"format {version}, not {FORMAT}")
        if not version:
            stored.execute(f"CREATE TABLE prices ({COLUMNS}, PRIMARY KEY (digest, part, size, context, target_w))")
            stored.execute(f"PRAGMA user_version = {FORMAT}")
        yield stored
        stored.execute("COMMIT")


def _check(*values: object) -> int:
    """Of a row's values: a damaged byte in one is found."""
    return zlib.crc32(repr(values).encode())


@contextmanager
def _ignored(file: Path) -> Iterator[None]:
    """What is wrong with the file is said in a line, and prices are worked out as without it."""
    try:
        yield
    except sqlite3.OperationalError as error:  # locked for long, full, not to be written
        _say(f"prices on disk are not used: {file}: {error}")
    except sqlite3.DatabaseError as error:
        _say(f"prices on disk are made anew: {file}: {error}")
        file.unlink(missing_ok=True)
    except OSError as error:
        _say(f"prices on disk are not used: {file}: {error.strerror or error}")


@cache
def _say(text: str) -> None:
    print(f"wattline: {text}", file=sys.stderr)
