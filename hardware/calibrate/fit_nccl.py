"""Paces of NCCL's rings and exchanges: ``python -m hardware.calibrate.fit_nccl FILE``.

``FILE`` is the nccl table of aiconfigurator-core 0.12.0 (PyPI wheel, Apache-2.0; parquet or CSV with its columns).
Fitted for each architecture on its two and four GPUs with 16-bit floats (exchanges and gathers, which add nothing, also
with 8-bit integers); the rows of eight, which no fit sees, are printed beside what the fit says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from hardware.laws.nccl import RINGS, pairs_seconds, ring_seconds
from hardware.laws.nccl_data import LIBRARIES
from hardware.laws.nccl_paces import DensePace, Library, LowPace, PairPace, SimplePace

FITTED_WORLDS = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows of one architecture: GPU of the table, versions of the library whose rings are fitted, and all there are.

    With 2.27.3 and 2.29.2 the B200s took Simple where the tuner has LL128 (those of the other versions took it): the
    library turns LL128 off where NICs are far from their GPUs.
    """

    gpu: str
    fitted: tuple[str, ...]
    judged: tuple[str, ...]


SOURCES: Mapping[str, Source] = {
    "hopper": Source(gpu="h100_sxm", fitted=("2.27.3", "2.29.2"), judged=("2.27.3", "2.29.2")),
    "ampere": Source(gpu="a100_sxm", fitted=("2.27.3",), judged=("2.27.3",)),
    "blackwell": Source(gpu="b200_sxm", fitted=("2.27.5", "2.28.9"), judged=("2.27.3", "2.27.5", "2.28.9", "2.29.2")),
}
_NAMES = {"alltoall": "all_to_all"}
# Operations that move bytes of any type alike.
_COPIES = ("all_gather", "alltoall")
# Where the search begins (us, ps a byte): rings at the tuner's latencies and 250 GB/s, exchanges at 300 GB/s.
_LOW_START = (4.5, 1.0, 0.8, *(0.2,) * 3, *(0.9,) * 3, *(0.5,) * 3)
_SIMPLE_START = (12.0, 3.0, *(6.0, 4.0, 4.0), *(5.0, 3.0, 3.0))
_DENSE_START, _FENCE_START = (20.0, 0.9), 8.0
_PAIR_START = (7.0, 130.0, 0.0, 12.0, 0.0, 4.0, 26.0, 1.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of the table."""

    op: str
    world: int
    buffer_bytes: int
    seconds: float


def read_table(path: Path, gpu: str = "h100_sxm", versions: Sequence[str] = ("2.27.3", "2.29.2")) -> list[TableRow]:
    """Rows of one GPU, by version of the library; repeated ones as their mean, those of types that move alike too."""
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    floats = table.nccl_dtype.astype(str) == "half"
    chosen = table[
        (table.gpu == gpu) & table.ver.astype(str).isin(versions) & (floats | table.op_name.astype(str).isin(_COPIES))
    ].assign(buffer_bytes=table.message_size * np.where(floats, 2, 1))
    keys = ["op_name", "num_gpus", "buffer_bytes", "ver"]
    means = chosen.groupby(keys, observed=True).latency.mean().reset_index()
    columns = (means[name].tolist() for name in ("op_name", "num_gpus", "buffer_bytes", "latency"))
    return [
        TableRow(op=_NAMES.get(op, op), world=world, buffer_bytes=size, seconds=milliseconds * 1e-3)
        for op, world, size, milliseconds in zip(*columns, strict=True)
    ]


def with_rings(library: Library, x: Sequence[float]) -> Library:
    """``library`` with the rings of the fit's vector (us, and ps a byte); without a last figure fences are hidden."""

    def each(values: Sequence[float], unit: float) -> dict[str, float]:
        return {op: value * unit for op, value in zip(RINGS, values, strict=True)}

    us, ps = 1e-6, 1e-12
    low, simple, dense, fence = x[:12], x[12:20], x[20:22], x[22:]
    return replace(
        library,
        low=LowPace(
            launch_s=low[0] * us,
            block_s=low[1] * us,
            step_s=low[2] * us,
            full_s=each(low[3:6], us),
            ends=each(low[6:9], us),
            middle=each(low[9:12], us),
        ),
        simple=SimplePace(
            base_s=simple[0] * us,
            step_s=simple[1] * us,
            fence_s=fence[0] * us if fence else 0.0,
            ends=each(simple[2:5], ps),
            middle=each(simple[5:8], ps),
        ),
        dense=DensePace(base_s=dense[0] * us, share=dense[1]),
    )


def with_pairs(library: Library, x: Sequence[float]) -> Library:
    """``library`` with the exchanges of the fit's vector, three of each three figures."""
    pairs = tuple(
        PairPace(base_s=a * 1e-6, message_byte_s=b * 1e-12, sent_byte_s=c * 1e-12)
        for a, b, c in np.reshape(x, (-1, 3)).tolist()
    )
    return replace(library, pairs=pairs)


def fitted_library(name: str, table: Path) -> Library:
    """Paces of one architecture: least squares of relative errors, large ones softened; none below zero.

    A Hopper's fences are hidden by its bytes wherever its tuner takes Simple.
    """
    library, source = LIBRARIES[name], SOURCES[name]
    rings = [r for r in read_table(table, source.gpu, source.fitted) if r.op in RINGS and r.world in FITTED_WORLDS]
    pairs = [r for r in read_table(table, source.gpu, source.judged) if r.op not in RINGS and r.world in FITTED_WORLDS]

    def ring_errors(x: Any) -> list[float]:
        tried = with_rings(library, x.tolist())
        return [seconds_of(row, name, tried) / row.seconds - 1.0 for row in rings]

    def pair_errors(x: Any) -> list[float]:
        tried = with_pairs(library, x.tolist())
        return [seconds_of(row, name, tried) / row.seconds - 1.0 for row in pairs]

    start = [*_LOW_START, *_SIMPLE_START, *_DENSE_START, *(() if name == "hopper" else (_FENCE_START,))]
    softened = {"loss": "soft_l1", "f_scale": 0.05, "bounds": (0.0, np.inf)}
    found = with_rings(library, least_squares(ring_errors, start, **softened).x.tolist())
    return with_pairs(found, least_squares(pair_errors, _PAIR_START, **softened).x.tolist())


def seconds_of(row: TableRow, name: str = "hopper", library: Library | None = None) -> float:
    """What the law says of a row on the GPUs of one architecture's table, the shipped one or one of other paces."""
    link = LIBRARIES[name].slower_link
    if row.op in RINGS:
        return ring_seconds(row.op, row.world, row.buffer_bytes, link, name, library)
    return pairs_seconds(row.world, row.buffer_bytes, link, name, library)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    table = parser.parse_args().table
    for name, source in SOURCES.items():
        library = fitted_library(name, table)
        print(name)
        _print_paces(library)
        found: dict[tuple[str, int], list[str]] = {}
        for row in read_table(table, source.gpu, source.judged):
            off = seconds_of(row, name, library) / row.seconds - 1.0
            found.setdefault((row.op, row.world), []).append(f"{row.buffer_bytes / 2**20:.3g}:{100 * off:+.0f}")
        for (op, world), errors in sorted(found.items()):
            print(op, world, "fitted" if world in FITTED_WORLDS else "not fitted", "MiB:%", *errors)


def _print_paces(library: Library) -> None:
    low, simple, dense = library.low, library.simple, library.dense
    print(f"LL {low.launch_s * 1e6:.2f} us and {low.block_s * 1e6:.2f} a whole block, {low.step_s * 1e6:.2f} us a step")
    print("    more a step, further rounds' ends and middle (us):", *_each(low.full_s, low.ends, low.middle, unit=1e-6))
    print(f"LL128 {dense.base_s * 1e6:.2f} us, {dense.share:.3f} of Simple's rate")
    fence = f", {simple.fence_s * 1e6:.2f} a fence"
    print(f"Simple {simple.base_s * 1e6:.2f} us, {simple.step_s * 1e6:.2f} us a step{fence}; ps a byte:")
    print("   ", *_each(simple.ends, simple.middle, unit=1e-12))
    for pair in library.pairs:
        print(f"pairs {pair.base_s * 1e6:.2f} us, {pair.message_byte_s * 1e12:.2f}, {pair.sent_byte_s * 1e12:.2f} ps")


def _each(*figures: Mapping[str, float], unit: float) -> list[str]:
    return [f"{op} {' '.join(f'{of[op] / unit:.2f}' for of in figures)};" for op in RINGS]


if __name__ == "__main__":
    main()
