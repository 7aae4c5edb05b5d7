"""Does the prediction choose right? Order and choice among records that differ only in how they overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sim.validation.validate import Row

GROUP = ("gpu", "model", "tp", "batch", "seq_len", "layers")
MIN_ROWS = 6
# Pairs closer than this in measurement are not distinguished (repeats differ by 1 to 2 %).
DISTINCT = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """One group and one output: pairs in the right order, the choice's excess over the true best, and how often
    the chunk count chosen for a given number of CTAs is within 1 % of the best, beside two habits."""

    group: dict[str, Any]
    output: str
    pairs: int
    pairs_right: int
    choice_excess: float
    chunk_cases: int
    chunk_right: int
    one_chunk_right: int
    most_chunks_right: int


def orderings(rows: Sequence[Row]) -> list[Ordering]:
    """Figures for every group of at least six overlap rows that have both sides."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "overlap_chunks" in row.record.inputs and row.predicted is not None:
            groups.setdefault(tuple(row.record.inputs.get(field) for field in GROUP), []).append(row)
    found = []
    for key, members in groups.items():
        for output in ("latency_s", "energy_j"):
            known = [row for row in members if row.error(output) is not None]
            if len(known) >= MIN_ROWS:
                found.append(_ordering(dict(zip(GROUP, key, strict=True)), output, known))
    return found


def _ordering(group: dict[str, Any], output: str, rows: list[Row]) -> Ordering:
    def measured(row: Row) -> float:
        return float(row.measured[output])

    def predicted(row: Row) -> float:
        return float(getattr(row.predicted, output))

    pairs = [(a, b) for a, b in combinations(rows, 2) if abs(measured(a) / measured(b) - 1.0) > DISTINCT]
    right = sum((measured(a) < measured(b)) == (predicted(a) < predicted(b)) for a, b in pairs)
    best = min(map(measured, rows))
    by_ctas: dict[Any, list[Row]] = {}
    for row in rows:
        if row.record.inputs.get("overlap_ops"):  # chunks and blocks of each product: no case of one number for all
            continue
        by_ctas.setdefault(row.record.inputs.get("comm_ctas"), []).append(row)
    cases = [part for part in by_ctas.values() if len(part) > 1]

    def good(choose: Callable[[list[Row]], Row]) -> int:
        return sum(measured(choose(part)) <= 1.01 * min(map(measured, part)) for part in cases)

    def chunks(row: Row) -> int:
        return int(row.record.inputs["overlap_chunks"])

    return Ordering(
        group=group,
        output=output,
        pairs=len(pairs),
        pairs_right=right,
        choice_excess=measured(min(rows, key=predicted)) / best - 1.0,
        chunk_cases=len(cases),
        chunk_right=good(lambda part: min(part, key=predicted)),
        one_chunk_right=good(lambda part: min(part, key=chunks)),
        most_chunks_right=good(lambda part: max(part, key=chunks)),
    )
