"""What only our own traces hold: arrows between kernels, and counters of each GPU's clock and joules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from traces.capture import NONE, Samples
from traces.read.rows import FileRows
from traces.records import Ints

ARROW = "depends"  # flow events of this name and category "flow" join kernels
# Counters of one GPU, by the names that a run and a served run give them.
CLOCK, ENERGY = "SM clock MHz", "energy J"
COUNTERS = (CLOCK, ENERGY, "energy J per GPU")


def arrows_of(parts: Sequence[FileRows], bases: Sequence[int], ranks: Sequence[Mapping[int, int]], work: Ints) -> Ints:
    """Rows of work that arrows of the files join, before and after; ``work``: rank, start and stream of each row.

    An arrow leaves inside the span that it comes from and arrives as its target starts.
    """
    found = []
    order = np.lexsort((work[1], work[2], work[0]))
    rank, start_ns, stream = work[:, order]
    fresh = np.flatnonzero((np.diff(rank) != 0) | (np.diff(stream) != 0)) + 1
    lanes = {
        (int(rank[first]), int(stream[first])): (int(first), int(last))
        for first, last in zip([0, *fresh], [*fresh, len(rank)], strict=True)
        if first < last
    }
    for part, base, mapped in zip(parts, bases, ranks, strict=True):
        if not part.rows.arrows:
            continue
        number, half, device, own_stream, ts = np.concatenate(part.rows.arrows, axis=1)
        row = np.full(len(number), NONE, dtype=np.int64)
        for device_number, lane in np.unique(np.stack([device, own_stream]), axis=1).T.tolist():
            mine = np.flatnonzero((device == device_number) & (own_stream == lane))
            first, last = lanes.get((mapped.get(device_number, NONE), lane), (0, 0))
            at = np.searchsorted(start_ns[first:last], ts[mine] + base, side="right") - 1
            row[mine[at >= 0]] = order[first + at[at >= 0]]
        begins = {n: r for n, r in zip(number[half == 0].tolist(), row[half == 0].tolist(), strict=True) if r != NONE}
        for n, target in zip(number[half == 1].tolist(), row[half == 1].tolist(), strict=True):
            if target != NONE and n in begins and begins[n] != target:
                found.append((begins[n], target))
    return np.array(found, dtype=np.int64).reshape(-1, 2).T


def samples_of(
    parts: Sequence[FileRows], bases: Sequence[int], ranks: Sequence[Mapping[int, int]], origin_ns: int
) -> list[Samples]:
    """The counters of all files, one a name and rank, in order of time."""
    found = []
    for part, base, mapped in zip(parts, bases, ranks, strict=True):
        if not part.rows.counts:
            continue
        name, device, time_ns = np.concatenate([columns for columns, _ in part.rows.counts], axis=1)
        value = np.concatenate([values for _, values in part.rows.counts])
        for counter, one in np.unique(np.stack([name, device]), axis=1).T.tolist():
            if one not in mapped:
                continue
            mine = np.flatnonzero((name == counter) & (device == one) & np.isfinite(value))
            mine = mine[np.argsort(time_ns[mine], kind="stable")]
            found.append(
                Samples(
                    name=COUNTERS[counter], rank=mapped[one], time_ns=time_ns[mine] + base - origin_ns,
                    value=value[mine],
                )
            )  # fmt: skip
    return found
