"""A replay as one JSON document and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.replay.boards import unknown_board
from sim.replay.study import Replayed
from traces.summary import RankTimes

# Misses of the unchanged replay that are said, as shares of the file's figures (issue 19: the bar for real traces).
MISSES = {"span_us": 0.01, "overlap_us": 0.03}
ABOVE_BOARD = 1.01  # settled limiters swing by less
FIGURES = ("span_us", "computation_us", "communication_us", "overlap_us", "exposed_us", "idle_us")


def as_document(result: Replayed) -> dict[str, Any]:
    """The fixed interface of ``--json``: microseconds; the figures at the top are those of the first rank read."""
    measured, unchanged, simulated = result.measured[0], result.unchanged.ranks[0], result.simulated.ranks[0]
    limit_w = result.simulated.limit_w
    return {
        "sources": list(result.capture.sources),
        "measured_span_us": measured.span_us,
        "simulated_span_us": simulated.span_us,
        "measured_overlap_us": measured.overlap_us,
        "simulated_overlap_us": simulated.overlap_us,
        "simulated_span_range_us": None if result.span_range_us is None else list(result.span_range_us),
        "kernels_of_unknown_work": result.unsure,
        "unchanged_span_us": unchanged.span_us,
        "unchanged_overlap_us": unchanged.overlap_us,
        "events_kernels": len(result.simulated.capture.work),
        "derived_kernels": 0,
        "simpy_events": result.simulated.simpy_events,
        "edges": result.dag.counts,
        "pause_us": result.pause_ns / 1e3,
        "unchanged_energy_j": result.unchanged.energy_j,
        "simulated_energy_j": result.simulated.energy_j,
        "unchanged_power_w": result.unchanged.power_w,
        "simulated_power_w": result.simulated.power_w,
        "board_power_w": limit_w if limit_w is not None and math.isfinite(limit_w) else None,
        "taken_from_file": dict(result.taken),
        "by_rules_span_us": result.by_rules and result.by_rules[0].span_us,
        "by_rules_overlap_us": result.by_rules and result.by_rules[0].overlap_us,
        "energies_from": None if result.unchanged.energy_j is None else "trace" if result.recorded else "laws",
        "notes": notes_of(result),
        "gpu": result.gpu,
        "other_gpu": result.other_gpu,
        "status": result.standing and result.standing.status,
        "status_reasons": list(result.standing.reasons) if result.standing else [],
        "expected_error": result.standing.expected_error if result.standing else "",
        "kernels_priced_by_shape": result.by_shape,
        "chunked_collectives": result.chunked_collectives,
        "ranks": [
            {"rank": a.rank} | {
                kind: {name: getattr(times, name) for name in FIGURES}
                for kind, times in (("measured", a), ("unchanged", b), ("simulated", c))
            }
            for a, b, c in zip(result.measured, result.unchanged.ranks, result.simulated.ranks, strict=True)
        ],
    }  # fmt: skip


def notes_of(result: Replayed) -> list[str]:
    """What to know before the figures are used: a replay that misses its file, a mean that no board sustains."""
    notes = []
    if result.gpu is None and (unknown := unknown_board(result.capture)) is not None:
        notes.append(unknown)
    if result.span_range_us is not None:
        low_us, high_us = result.span_range_us
        notes.append(
            f"{result.unsure:,} kernels are of unknown work (grouped products without sizes, or no known class): span "
            f"{low_us:,.1f} to {high_us:,.1f} us, as memory or compute bounds them; the middle is shown"
        )
    if (miss := missed(result)) is not None:
        notes.append(miss)
    outcomes = {"replayed": result.unchanged, "changed": result.simulated}
    for label, outcome in outcomes.items():
        watts = max(outcome.power_w_per_rank, default=0.0)
        if label == "changed" and outcome is result.unchanged:
            continue
        if outcome.limit_w is not None and watts > ABOVE_BOARD * outcome.limit_w:
            why = "a short trace runs at the fast limiter's clock: --regime steady gives what the board sustains"
            if result.recorded and label == "replayed":
                why = "as the trace has it: a short run at the clocks of its limiters"
            notes.append(f"{label}: {watts:.0f} W a GPU is more than its limit of {outcome.limit_w:.0f} W: {why}")
    return notes


def missed(result: Replayed) -> str | None:
    """By how much the unchanged replay misses the file, where that is more than ``MISSES``."""
    found = []
    for measured, again in zip(result.measured, result.unchanged.ranks, strict=True):
        for figure, share in MISSES.items():
            was_us, off_us = getattr(measured, figure), getattr(again, figure) - getattr(measured, figure)
            if abs(off_us) > share * was_us:
                by = f"{off_us / was_us:+.1%}" if was_us else f"{off_us:+,.1f} us"
                found.append((abs(off_us), f"{figure.removesuffix('_us')} of rank {measured.rank} by {by}"))
    if not found:
        return None
    return (
        f"the unchanged replay misses the file's {max(found)[1]}: compare what-ifs with the replay, not with the file"
    )


def print_replay(result: Replayed, console: Console) -> None:
    """The trace, its replay and the replay under changes, rank by rank."""
    edges = ", ".join(
        f"{kind} {edge['count']:,}" + (f" (confidence {edge['confidence']:.2f})" if edge["confidence"] < 1 else "")
        for kind, edge in result.dag.counts.items() if edge["count"]
    )  # fmt: skip
    console.print(f"edges: {edges}; kernels that queue pause {result.pause_ns / 1e3:.2f} us", highlight=False)
    table = Table(title="one GPU a block, unions of intervals in us", title_justify="left")
    for name in ("rank", "", *(figure.removesuffix("_us") for figure in FIGURES)):
        table.add_column(name, justify="left" if not name else "right")
    three = zip(result.measured, result.unchanged.ranks, result.simulated.ranks, strict=True)
    for measured, unchanged, simulated in three:
        _add(table, "measured", measured)
        _add(table, "replayed", unchanged)
        if result.simulated is not result.unchanged:
            _add(table, "changed", simulated)
    console.print(table)
    if result.by_rules:
        console.print(_taken(result, result.by_rules), highlight=False)
    outcomes = {"replayed": result.unchanged} | (
        {"changed": result.simulated} if result.simulated is not result.unchanged else {}
    )
    known = [
        f"{label} {outcome.energy_j:.4g} J ({outcome.power_w:.0f} W a GPU)"
        for label, outcome in outcomes.items() if outcome.energy_j is not None
    ]  # fmt: skip
    if known:
        status = result.standing and result.standing.status
        cards = " and ".join(dict.fromkeys(gpu for gpu in (result.gpu, result.other_gpu) if gpu is not None))
        laws = f"the laws of {cards} ({status}), {result.by_shape:,} kernels by recorded shape"
        source = "as the trace has it" if result.recorded else f"by {laws}"
        if result.recorded and result.gpu is not None and result.simulated is not result.unchanged:
            source += f", and as {laws} change it"
        console.print(f"energy of the GPUs in the trace: {', '.join(known)}; {source}", highlight=False)
    standing = result.standing
    by_laws = not result.recorded or result.simulated is not result.unchanged
    said = [*standing.reasons, standing.expected_error * by_laws] if standing else []
    reasons = [f"{standing.status}: {'; '.join(filter(None, said))}"] if standing and any(said) else []
    for note in reasons + notes_of(result):
        console.print(note, markup=False, highlight=False)
    console.print(
        f"through SimPy: all {len(result.simulated.capture.work):,} kernels, copies and memsets "
        f"({result.simulated.simpy_events:,} events)",
        highlight=False,
    )
    if result.chunked_collectives:
        console.print(f"collectives cut into parts: {result.chunked_collectives:,}", highlight=False)
    for row in result.capture.findings:
        console.print(f"{row.rule}: {row.count:,} (first: {row.first}): {row.remedy}", markup=False, highlight=False)


def _taken(result: Replayed, by_rules: Sequence[RankTimes]) -> str:
    """What of the unchanged replay is the file's and no prediction, and how far it is off without that."""
    taken = ", ".join(f"{what} of {rows:,}" for what, rows in result.taken.items() if rows)
    spans = [again.span_us / max(one.span_us, 1e-3) - 1.0 for one, again in zip(result.measured, by_rules, strict=True)]
    off = max(spans, key=abs)
    return (
        f"from the file: durations of {len(result.capture.work):,} pieces of work, {taken}; with durations, launches, "
        f"waits and one pause for all, the replay's span is off by {off:+.1%}"
    )


def _add(table: Table, label: str, times: RankTimes) -> None:
    table.add_row(str(times.rank), label, *(f"{getattr(times, figure):,.1f}" for figure in FIGURES))
