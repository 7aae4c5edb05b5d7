"""Paces of NCCL's rings and exchanges: ``python -m hardware.calibrate.fit_nccl FILE``.

``FILE`` is the nccl table of aiconfigurator-core 0.12.0 (PyPI wheel, Apache-2.0; parquet or CSV with its columns).
Fitted on two and four H100s with 16-bit floats, NCCL 2.27.3 and 2.29.2, and for other architectures one figure, by
which their latencies are longer, likewise; the rows of eight, which no fit sees, are printed beside what the fit says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, minimize_scalar

from hardware.laws.nccl import (
    AS_FITTED,
    LL128_SHARE,
    PAIRS,
    RING,
    RINGS,
    TUNED_S,
    PairPace,
    Protocol,
    RingPace,
    Slower,
    pairs_seconds,
    ring_seconds,
)

FITTED_WORLDS = (2, 4)
# GPU of the table, versions of the library, and how many times slower than an H100's its links are.
OTHERS = {
    "ampere": ("a100_sxm", ("2.27.3",), 1.5),
    "blackwell": ("b200_sxm", ("2.27.3", "2.28.9", "2.29.2"), 0.5),
}
_NAMES = {"alltoall": "all_to_all"}
# Where the search begins: rings at the tuner's latencies and 250 GB/s, exchanges at 300 GB/s. Microseconds, ps a byte.
_RING_START: Mapping[Protocol, tuple[float, float]] = {"LL": (8.0, 7.0), "Simple": (4.0, 3.0)}
_PAIR_START = (7.0, 130.0, 0.0, 12.0, 0.0, 4.0, 26.0, 1.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of the table."""

    op: str
    world: int
    buffer_bytes: int
    seconds: float


def read_table(path: Path, gpu: str = "h100_sxm", versions: Sequence[str] = ("2.27.3", "2.29.2")) -> list[TableRow]:
    """Rows of 16-bit floats of one GPU, by version of the library; repeated ones as their mean."""
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    chosen = table[(table.gpu == gpu) & table.ver.astype(str).isin(versions) & (table.nccl_dtype == "half")]
    means = chosen.groupby(["op_name", "num_gpus", "message_size", "ver"]).latency.mean().reset_index()
    columns = (means[name].tolist() for name in ("op_name", "num_gpus", "message_size", "latency"))
    return [
        TableRow(op=_NAMES.get(op, op), world=world, buffer_bytes=2 * elements, seconds=milliseconds * 1e-3)
        for op, world, elements, milliseconds in zip(*columns, strict=True)
    ]


def ring_paces(x: Sequence[float]) -> dict[Protocol, RingPace]:
    """Paces from the fit's vector (us, and ps a byte): LL and Simple of their own; LL128 a base of its own.

    Two sizes of one operation ran in LL128 on four GPUs: its steps are Simple's in the tuner's proportion, its bytes
    in its share of the rate.
    """
    count = len(RINGS)

    def pace(values: Sequence[float]) -> RingPace:
        ends, middle = values[2 : 2 + count], values[2 + count :]
        return RingPace(
            base_s=values[0] * 1e-6,
            step_s=values[1] * 1e-6,
            ends={op: v * 1e-12 for op, v in zip(RINGS, ends, strict=True)},
            middle={op: v * 1e-12 for op, v in zip(RINGS, middle, strict=True)},
        )

    each = 2 + 2 * count
    low, simple = pace(x[:each]), pace(x[each : 2 * each])
    dense = RingPace(
        base_s=x[2 * each] * 1e-6,
        step_s=simple.step_s * TUNED_S["LL128"][1] / TUNED_S["Simple"][1],
        ends={op: v / LL128_SHARE for op, v in simple.ends.items()},
        middle={op: v / LL128_SHARE for op, v in simple.middle.items()},
    )
    return {"LL": low, "LL128": dense, "Simple": simple}


def pair_paces(x: Sequence[float]) -> tuple[PairPace, ...]:
    """Paces of an all-to-all from the fit's vector, three of each three figures."""
    return tuple(
        PairPace(base_s=a * 1e-6, message_byte_s=b * 1e-12, sent_byte_s=c * 1e-12)
        for a, b, c in np.reshape(x, (-1, 3)).tolist()
    )


def fit_rings(rows: Sequence[TableRow]) -> dict[Protocol, RingPace]:
    """Least squares of relative errors, large ones softened."""
    rings = [row for row in rows if row.op in RINGS and row.world in FITTED_WORLDS]
    start: list[float] = []
    for name, (ends, middle) in _RING_START.items():
        start += [s * 1e6 for s in TUNED_S[name]]
        start += [ends * (1 + (op == "all_reduce")) for op in RINGS]
        start += [middle * (1 + (op == "all_reduce")) for op in RINGS]
    start.append(TUNED_S["LL128"][0] * 1e6)

    def errors(x: Any) -> list[float]:
        paces = ring_paces(x.tolist())
        return [seconds_of(row, rings=paces) / row.seconds - 1.0 for row in rings]

    return ring_paces(least_squares(errors, start, loss="soft_l1", f_scale=0.05).x.tolist())


def fit_pairs(rows: Sequence[TableRow]) -> tuple[PairPace, ...]:
    """The all-to-alls, likewise; no figure below zero."""
    pairs = [row for row in rows if row.op == "all_to_all" and row.world in FITTED_WORLDS]

    def errors(x: Any) -> list[float]:
        paces = pair_paces(x.tolist())
        return [seconds_of(row, pairs=paces) / row.seconds - 1.0 for row in pairs]

    return pair_paces(least_squares(errors, _PAIR_START, loss="soft_l1", f_scale=0.05, bounds=(0.0, np.inf)).x.tolist())


def fit_steps(rows: Sequence[TableRow], slower_link: float) -> float:
    """By which factor latencies are longer than an H100's: least mean of relative errors, each at most a half."""
    seen = [row for row in rows if row.world in FITTED_WORLDS]

    def off(factor: float) -> float:
        slower = Slower(link=slower_link, steps=factor)
        return sum(min(abs(seconds_of(row, slower) / row.seconds - 1.0), 0.5) for row in seen)

    return float(minimize_scalar(off, bounds=(0.7, 3.0), method="bounded").x)


def seconds_of(
    row: TableRow,
    slower: Slower = AS_FITTED,
    *,
    rings: Mapping[Protocol, RingPace] = RING,
    pairs: tuple[PairPace, ...] = PAIRS,
) -> float:
    """What the law says of a row, the shipped one or one of other paces."""
    if row.op in RINGS:
        return ring_seconds(row.op, row.world, row.buffer_bytes, slower, rings)
    return pairs_seconds(row.world, row.buffer_bytes, slower, pairs)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    table = parser.parse_args().table
    rows = read_table(table)
    paces, exchanges = fit_rings(rows), fit_pairs(rows)
    for name, pace in paces.items():
        print(name, f"{pace.base_s * 1e6:.2f} us, {pace.step_s * 1e6:.2f} us a step; ps a byte, ends and middle:")
        print("   ", ", ".join(f"{op} {pace.ends[op] * 1e12:.2f} {pace.middle[op] * 1e12:.2f}" for op in RINGS))
    for pair in exchanges:
        print(f"pairs {pair.base_s * 1e6:.2f} us, {pair.message_byte_s * 1e12:.2f}, {pair.sent_byte_s * 1e12:.2f} ps")
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        off = seconds_of(row, rings=paces, pairs=exchanges) / row.seconds - 1.0
        found.setdefault((row.op, row.world), []).append(f"{row.buffer_bytes / 2**20:.3g}:{100 * off:+.0f}")
    for (op, world), errors in sorted(found.items()):
        print(op, world, "fitted" if world in FITTED_WORLDS else "not fitted", "MiB:%", *errors)
    for architecture, (gpu, versions, slower_link) in OTHERS.items():
        print(architecture, f"{fit_steps(read_table(table, gpu, versions), slower_link):.2f} times an H100's latencies")


if __name__ == "__main__":
    main()
