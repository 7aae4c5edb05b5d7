"""The kinds of whole runs that were measured, their sizes, and how far off predictions of them were.

They are data (``hardware/data/checked_runs.toml``, written by ``python -m sim.studies.checked_runs``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from sim.scenario.kind import KEY, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Measured whole runs of one kind: how many, in which files, at which sizes, and how far off predictions were.

    Errors are shares, the mean of the absolute ones and the worst; None where no row measured that output.
    """

    kind: Kind
    rows: int
    files: tuple[str, ...]
    latency_error: tuple[float, float] | None
    energy_error: tuple[float, float] | None

    def words(self) -> str:
        """The errors in words."""
        parts = [
            f"{name} {100 * found[0]:.2g} % off in the mean, {100 * found[1]:.2g} % at worst"
            for name, found in (("latency", self.latency_error), ("energy", self.energy_error))
            if found is not None
        ]
        runs = "one unseen run" if self.rows == 1 else f"{self.rows} unseen runs"
        return f"{', '.join(parts)}, on {runs} of this kind" if parts else f"no figure from {runs} of this kind"


@lru_cache(maxsize=1)
def checked_runs() -> tuple[Checked, ...]:
    """All measured kinds."""
    text = (files("hardware") / "data" / "checked_runs.toml").read_text(encoding="utf-8")
    return tuple(_checked(entry) for entry in tomllib.loads(text)["checked"])


def _checked(entry: Mapping[str, Any]) -> Checked:
    errors = {name: entry.get(name) for name in ("latency_error", "energy_error")}
    return Checked(
        kind=Kind(
            key={name: entry[name] for name in KEY},
            sizes={name: (low, high) for name, (low, high) in entry["sizes"].items()},
        ),
        rows=entry["rows"],
        files=tuple(entry["files"]),
        **{name: None if found is None else (found[0], found[1]) for name, found in errors.items()},
    )


def measured_kind(asked: Kind) -> tuple[Checked | None, list[str]]:
    """The rows of the kind that is asked for, else in which respect rows that come nearest differ."""
    known, missing = _nearest(tuple(asked.key[name] for name in KEY))
    return known, list(missing)


@lru_cache(maxsize=256)
def _nearest(key: tuple[str, ...]) -> tuple[Checked | None, Sequence[str]]:
    rows = list(checked_runs())
    for place, (name, value) in enumerate(zip(KEY, key, strict=True)):
        fitting = [row for row in rows if row.kind.key[name] == value]
        if not fitting:
            if name == "gpu":
                return None, [f"no whole run on {value} was measured"]
            seen = " | ".join(dict.fromkeys(row.kind.key[name] for row in rows))
            alike = ", ".join(key[:place])
            return None, [f"no whole run with {name} = {value} was measured ({alike}: {seen})"]
        rows = fitting
    return rows[0], []


def unmeasured_sizes(asked: Kind, measured: Kind) -> list[str]:
    """Sizes that leave the measured range."""
    found = []
    for name, (value, _) in asked.sizes.items():
        if name not in measured.sizes:
            found.append(f"{name} = {value:g} was never set in a measurement")
            continue
        low, high = measured.sizes[name]
        if not low <= value <= high:
            span = f"{low:g} alone" if low == high else f"{low:g} to {high:g}"
            found.append(f"{name} = {value:g} (measured: {span})")
    return found


@lru_cache(maxsize=32)
def other_kinds(gpu: str) -> str:
    """How far off runs of the kinds that were measured on a GPU are, each in the mean; empty where none was."""
    rows = [row for row in checked_runs() if row.kind.key["gpu"] == gpu]
    parts = []
    for name, found in (
        ("latency", [row.latency_error[0] for row in rows if row.latency_error]),
        ("energy", [row.energy_error[0] for row in rows if row.energy_error]),
    ):
        if found:
            parts.append(f"{name} {100 * min(found):.2g} to {100 * max(found):.2g} %")
    return f"other kinds of run, {len(rows)} measured on it, are off by {' and '.join(parts)}" if parts else ""
