"""How often the quickest layout is not the most frugal one.

``python -m sim.studies.questions.optima --out docs/studies/optima.md`` writes the page.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hardware.catalog import load_gpu
from sim.errors import MemoryShortError
from sim.run.runner import simulate
from sim.studies.fidelity_tables import percent, table
from sim.studies.prose import prose
from sim.studies.questions.page import CLOSED_FORM, command, head

GPUS = ("a100-sxm-80gb", "h100-sxm-80gb")
MODELS = ("llama3-8b", "llama3-70b")
BATCHES = (1, 4, 16, 64)
# Input and output tokens.
LENGTHS = ((512, 64), (1024, 512), (4096, 256))
NODE = 8
LAYOUTS = tuple((tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp * pp <= NODE)
PHASES = ("prefill", "decode step", "request")
PUBLISHED = 0.20

Layout = tuple[int, int]
Costs = Mapping[Layout, tuple[float, float]]  # latency (s) and energy (J, all GPUs) by layout
Account = Callable[[Costs], Costs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optima:
    """What scenarios say of one way to count; shares of scenarios, excesses as means over them.

    ``dear``: the quickest layout needs over 2 % more energy than the best one, about what predictions are worth.
    """

    scenarios: int
    differ: float
    dear: float
    energy_excess: float
    time_excess: float
    commonest: tuple[Layout, Layout]


def costs(
    gpu: str, model: str, batch: int, tokens_in: int, tokens_out: int
) -> dict[str, dict[Layout, tuple[float, float]]]:
    """Costs of every layout that fits, by phase; a request is its prefill and all decode steps at the mean context."""
    found: dict[str, dict[Layout, tuple[float, float]]] = {phase: {} for phase in PHASES}
    for tp, pp in LAYOUTS:
        with suppress(MemoryShortError):
            common: dict[str, Any] = {"model": model, "gpu": gpu, "tp": tp, "pp": pp, "batch": batch}
            # The decode step first: its cache is the longer one, and what does not fit is left out whole.
            decode = simulate(phase="decode", seq_len=tokens_in + tokens_out // 2, **common, shortcuts=True)
            prefill = simulate(phase="prefill", seq_len=tokens_in, **common, shortcuts=True)
            steps = tokens_out - 1
            found["prefill"][tp, pp] = (prefill.latency_s, prefill.energy_j)
            found["decode step"][tp, pp] = (decode.latency_s, decode.energy_j)
            found["request"][tp, pp] = (
                prefill.latency_s + steps * decode.latency_s,
                prefill.energy_j + steps * decode.energy_j,
            )
    return found


def in_use(layouts: Costs) -> Costs:
    """Only the GPUs that the layout uses are counted."""
    return layouts


def whole_node(idle_w: float) -> Account:
    """The other GPUs of a node of eight wait, each at ``idle_w``."""

    def count(layouts: Costs) -> Costs:
        return {
            (tp, pp): (time_s, energy_j + (NODE - tp * pp) * idle_w * time_s)
            for (tp, pp), (time_s, energy_j) in layouts.items()
        }

    return count


def all_used(layouts: Costs) -> Costs:
    """Only layouts over all eight GPUs."""
    return {(tp, pp): cost for (tp, pp), cost in layouts.items() if tp * pp == NODE}


def optima(scenarios: Iterable[Costs]) -> Optima:
    """Compare the quickest with the most frugal layout of each scenario that has two layouts or more.

    >>> two = {(1, 1): (2.0, 10.0), (2, 1): (1.0, 12.0)}
    >>> result = optima([two, {(1, 1): (1.0, 5.0), (2, 1): (2.0, 9.0)}])
    >>> result.differ, round(result.energy_excess, 3)
    (0.5, 0.1)
    """
    pairs = []
    for layouts in scenarios:
        if len(layouts) > 1:
            quick = min(layouts, key=lambda layout: layouts[layout][0])
            frugal = min(layouts, key=lambda layout: layouts[layout][1])
            dearer = layouts[quick][1] / layouts[frugal][1] - 1.0
            slower = layouts[frugal][0] / layouts[quick][0] - 1.0
            pairs.append((quick, frugal, dearer, slower))
    count = len(pairs)
    return Optima(
        scenarios=count,
        differ=sum(quick != frugal for quick, frugal, _, _ in pairs) / count,
        dear=sum(dearer > 0.02 for _, _, dearer, _ in pairs) / count,
        energy_excess=sum(dearer for _, _, dearer, _ in pairs) / count,
        time_excess=sum(slower for _, _, _, slower in pairs) / count,
        commonest=Counter((quick, frugal) for quick, frugal, _, _ in pairs).most_common(1)[0][0],
    )


def page(models: Sequence[str] = MODELS, batches: Sequence[int] = BATCHES) -> str:
    """The page as Markdown."""
    lines, verdicts = [], []
    for gpu in GPUS:
        runs = [costs(gpu, m, b, *lengths) for m, b, lengths in itertools.product(models, batches, LENGTHS)]
        accounts: dict[str, Account] = {
            "GPUs in use": in_use,
            "all 8, others idle": whole_node(load_gpu(gpu).idle_w),
            "layouts of 8": all_used,
        }
        for name, account in accounts.items():
            shares = []
            for phase in PHASES:
                counted = optima(account(run[phase]) for run in runs)
                shares.append(counted.differ)
                lines.append(
                    (
                        gpu.split("-")[0].upper(),
                        name,
                        phase,
                        str(counted.scenarios),
                        percent(counted.differ),
                        percent(counted.dear),
                        percent(counted.energy_excess),
                        percent(counted.time_excess),
                        " and ".join(f"TP{tp} PP{pp}" for tp, pp in counted.commonest),
                    )
                )
            agrees = (
                "agrees" if min(shares) > PUBLISHED else "differs" if max(shares) <= PUBLISHED else "agrees in part"
            )
            verdicts.append(f"- {name} on `{gpu}`: {agrees}: ours {_range(shares)}, published over {PUBLISHED:.0%}.")
    names = (
        "GPU", "counted", "phase", "n", "differ, %", "dear, %", "energy above best, %", "time above best, %",
        "commonest: quickest and most frugal",
    )  # fmt: skip
    parts = [
        head("How often the quickest layout is not the most frugal", "optima", GPUS, QUESTION),
        table(names, lines, left=3, text_last=True) + "\n\n" + LEGEND,
        "## Against the published figure\n\n" + "\n".join(verdicts),
        WHY,
    ]
    return "\n\n".join(parts) + "\n"


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%}" if min(shares) < max(shares) else f"{max(shares):.0%}"


QUESTION = (
    f"{CLOSED_FORM} reports that in over 20 % of configurations the layout of least latency is not the layout of "
    "least energy. Its GPUs, and whether its layouts use equally many of them, we could not read; both decide the "
    "answer. We take Llama-3-8B and 70B, batch 1 to 64, three pairs of input and output lengths, tensor and pipeline "
    "degrees up to eight GPUs together, and count in three ways."
)
LEGEND = prose("optima", "legend")
WHY = prose("optima", "why")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    return command("optima", page, argv)


if __name__ == "__main__":
    sys.exit(main())
