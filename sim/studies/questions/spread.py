"""How far energy spreads over layouts and batches.

``python -m sim.studies.questions.spread --out docs/studies/spread.md`` writes the page.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sim.errors import MemoryShortError
from sim.run.runner import simulate
from sim.studies.fidelity_tables import percent, table
from sim.studies.prose import prose
from sim.studies.questions.page import ENERGYLENS, Phase, command, head, verdict

GPUS = ("a100-sxm-80gb", "h100-sxm-80gb")
DEGREES = (2, 4, 8)
LENGTHS = (256, 1024, 4096, 8192)
# The published exploration: prefill to batch 64, decode to batch 16; a decode to 64 beside it.
GRIDS: tuple[tuple[Phase, tuple[int, ...]], ...] = (
    ("prefill", (1, 2, 4, 8, 16, 32, 64)),
    ("decode", (1, 2, 4, 8, 16)),
    ("decode", (1, 2, 4, 8, 16, 32, 64)),
)
PUBLISHED_SPREAD = {"prefill": 1.47, "decode": 52.9}
PUBLISHED_SHARE = 0.23
# A spread within this of the published one agrees: the configurations behind that are not known.
CLOSE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration: energy per token (J, all GPUs), and the shares of energy and GPU time of all-reduces."""

    tp: int
    batch: int
    seq_len: int
    energy_j_per_token: float
    all_reduce: float
    all_reduce_time: float


def points(gpu: str, phase: Phase, batches: Sequence[int]) -> list[Point]:
    """Llama-3-70B in every tensor-parallel degree, batch and length that fits in memory."""
    found = []
    for tp, batch, seq_len in itertools.product(DEGREES, batches, LENGTHS):
        with suppress(MemoryShortError):
            run = simulate(
                model="llama3-70b", gpu=gpu, tp=tp, phase=phase, batch=batch, seq_len=seq_len, shortcuts=True
            )
            energy_j, gpu_s = run.sums_by("family")["communication"]
            found.append(
                Point(
                    tp=tp,
                    batch=batch,
                    seq_len=seq_len,
                    energy_j_per_token=run.energy_j / run.tokens,
                    all_reduce=energy_j / run.energy_j,
                    all_reduce_time=gpu_s / (tp * run.latency_s),
                )
            )
    return found


def spread(found: Sequence[Point]) -> float:
    """The most energy per token over the least."""
    energies = [point.energy_j_per_token for point in found]
    return max(energies) / min(energies)


def spreads(found: Sequence[Point], same: Callable[[Point], object]) -> list[float]:
    """The spread within each group of points that ``same`` maps to one value, where there are several of them.

    >>> rest = {"seq_len": 1, "all_reduce": 0.0, "all_reduce_time": 0.0}
    >>> four = [Point(tp=t, batch=b, energy_j_per_token=t / b, **rest) for t in (2, 4) for b in (1, 8)]
    >>> spreads(four, lambda point: point.tp), spreads(four, lambda point: point.batch)
    ([8.0, 8.0], [2.0, 2.0])
    """
    members: dict[object, list[Point]] = {}
    for point in found:
        members.setdefault(same(point), []).append(point)
    return [spread(group) for group in members.values() if len(group) > 1]


def page(grids: Sequence[tuple[Phase, tuple[int, ...]]] = GRIDS) -> str:
    """The page as Markdown."""
    runs = [(gpu, phase, batches, points(gpu, phase, batches)) for gpu in GPUS for phase, batches in grids]
    lines = []
    verdicts = []
    for gpu, phase, batches, found in runs:
        name = f"{phase}, batch {batches[0]} to {batches[-1]}"
        eight = [point for point in found if point.tp == 8]
        shares = [point.all_reduce for point in eight]
        lines.append(
            (
                gpu.split("-")[0].upper(),
                name,
                str(len(found)),
                f"{spread(found):.2f}",
                _range(spreads(found, lambda point: point.seq_len)),
                _range(spreads(found, lambda point: (point.tp, point.seq_len))),
                _range(spreads(found, lambda point: (point.batch, point.seq_len))),
                f"{percent(min(shares))} to {percent(max(shares))}",
                f"{percent(min(p.all_reduce_time for p in eight))} to {percent(max(p.all_reduce_time for p in eight))}",
            )
        )
        published, ours = PUBLISHED_SPREAD[phase], spread(found)
        agrees = "agrees" if abs(ours / published - 1.0) <= CLOSE else "differs"
        verdicts.append(
            f"- {name} on `{gpu}`, spread: {agrees}: published up to {published:g} times, ours up to {ours:.3g} "
            f"({100 * (ours / published - 1):+.0f} %); all-reduces at TP8: "
            f"{verdict(PUBLISHED_SHARE, min(shares), max(shares), '{:.1%}'.format)}."
        )
    names = (
        "GPU", "grid", "n", "all", "at one length", "by batch alone", "by TP alone", "all-reduces at TP8, % of J",
        "% of time",
    )  # fmt: skip
    parts = [
        head("How far energy spreads over layouts and batches", "spread", GPUS, QUESTION),
        table(names, lines, left=2) + "\n\n" + LEGEND,
        "## Against the published figures\n\n" + "\n".join(verdicts),
        WHY,
    ]
    return "\n\n".join(parts) + "\n"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


QUESTION = (
    f"{ENERGYLENS} finds that energy per token differs by up to 1.47 times in prefill and 52.9 times in decode between "
    "configurations, and that all-reduces take 23 % of the energy of Llama-3-70B on eight A100s. Which configurations "
    "the two factors span we could not read; its set-up says TP 2, 4 and 8, prefill of 256 to 8,192 tokens at batch 1 "
    "to 64, decode at batch 1 to 16. We take Llama-3-70B over these, and decode to batch 64 too; what does not fit in "
    "memory is left out."
)
LEGEND = prose("spread", "legend")
WHY = prose("spread", "why")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    return command("spread", page, argv)


if __name__ == "__main__":
    sys.exit(main())
