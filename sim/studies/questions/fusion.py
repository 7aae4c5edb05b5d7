"""What fused kernels save: ``python -m sim.studies.questions.fusion --out docs/studies/fusion.md``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.studies.fidelity_tables import percent, table
from sim.studies.prose import prose
from sim.studies.questions.page import ENERGYLENS, Phase, command, head, verdict

Launch = Literal["graph", "eager"]

GPUS = ("a100-sxm-80gb", "h100-sxm-80gb")
PUBLISHED = {"prefill": 0.0437, "decode": 0.0818}
# Batches and lengths within those of the published exploration (prefill to 8192 tokens and batch 64, decode to 16).
CASES: tuple[tuple[Phase, Launch, int, int], ...] = (
    ("prefill", "graph", 1, 256),
    ("prefill", "graph", 1, 1024),
    ("prefill", "graph", 1, 4096),
    ("prefill", "graph", 8, 1024),
    ("prefill", "graph", 16, 2048),
    ("decode", "graph", 1, 1024),
    ("decode", "graph", 1, 4096),
    ("decode", "graph", 8, 1024),
    ("decode", "graph", 16, 1024),
    ("decode", "graph", 16, 4096),
    ("decode", "eager", 1, 1024),
    ("decode", "eager", 16, 4096),
)
EAGER = " (eager)"
# Kernels by the fusion that they belong to, from their names in either stack.
FUSIONS = {
    "sum and norm": ("add_rmsnorm",),
    "QKV, gate and up": ("qkv_", "q_", "k_", "v_", "gate_", "up_"),
    "gate and activation": ("silu_mul",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One scenario run without and with fusion; shares are of the unfused run (1 - fused / unfused)."""

    gpu: str
    phase: Phase
    launch: Launch
    batch: int
    seq_len: int
    unfused_j: float
    energy: float
    time: float
    parts: dict[str, float]
    kernels: tuple[int, int]
    power_w: tuple[float, float]


def saving(gpu: str, phase: Phase, launch: Launch, batch: int, seq_len: int) -> Saving:
    """Llama-3-70B on four GPUs, as eager PyTorch runs it and with sums, weights and gates fused.

    ``parts`` are the energies that each group of kernels saves, as shares of the unfused run.

    >>> one = saving("h100-sxm-80gb", "decode", "graph", 1, 1024)
    >>> one.energy > 0, one.kernels[0] > one.kernels[1]
    (True, True)
    """
    unfused, fused = (
        simulate(
            model="llama3-70b",
            gpu=gpu,
            tp=4,
            phase=phase,
            launch=launch,
            batch=batch,
            seq_len=seq_len,
            stack=stack,
            shortcuts=True,
        )
        for stack in ("unfused-torch", "reference-torch")
    )
    before, after = (_by_fusion(run) for run in (unfused, fused))
    return Saving(
        gpu=gpu,
        phase=phase,
        launch=launch,
        batch=batch,
        seq_len=seq_len,
        unfused_j=unfused.energy_j,
        energy=1.0 - fused.energy_j / unfused.energy_j,
        time=1.0 - fused.latency_s / unfused.latency_s,
        parts={name: (before[name] - after[name]) / unfused.energy_j for name in before},
        kernels=(unfused.outcome.kernels // 4, fused.outcome.kernels // 4),
        power_w=(unfused.power_w_per_gpu[0], fused.power_w_per_gpu[0]),
    )


def _by_fusion(run: Timeline) -> dict[str, float]:
    """Joules of all GPUs by group of FUSIONS; what belongs to none is ``other``."""
    sums = dict.fromkeys((*FUSIONS, "other"), 0.0)
    for kernel, (energy_j, _) in run.sums_by("kernel").items():
        sums[next((name for name, begins in FUSIONS.items() if kernel.startswith(begins)), "other")] += energy_j
    return sums


def page(cases: Sequence[tuple[Phase, Launch, int, int]] = CASES) -> str:
    """The page as Markdown."""
    rows = [saving(gpu, *case) for gpu in GPUS for case in cases]
    lines = [
        (
            row.gpu.split("-")[0].upper(),
            f"{row.phase}{EAGER if row.launch == 'eager' else ''}, batch {row.batch}, {row.seq_len}",
            f"{row.unfused_j:.1f}",
            percent(row.energy),
            percent(row.time),
            *(percent(row.parts[name]) for name in FUSIONS),
            f"{row.kernels[0]:,} to {row.kernels[1]:,}",
            f"{row.power_w[0]:.0f} to {row.power_w[1]:.0f}",
        )
        for row in rows
    ]
    return (
        "\n\n".join([head("Fused against unfused kernels", "fusion", GPUS, QUESTION), _table(lines), _answer(rows)])
        + "\n"
    )


QUESTION = (
    f"{ENERGYLENS} reports that fusion saves 4.37 % of the energy of a prefill and 8.18 % of a decode of Llama-3-70B "
    "on four A100s. We could not read which fusions it means, at which batch and length. Ours are those that leave "
    "eager PyTorch: residual sum and norm in one kernel; Q, K and V, and gate and up, in one product each; activation "
    "and gate in one kernel. Attention is fused on both sides. Stacks: `unfused-torch` (not validated) and "
    "`reference-torch`."
)


def _table(lines: Sequence[Sequence[str]]) -> str:
    names = ("GPU", "scenario", "unfused J", "energy saved %", "time saved %", *FUSIONS, "kernels a GPU", "W a GPU")
    return (
        table(names, lines, left=2)
        + "\n\nThe three fusions in per cent of the unfused energy; what is left of the saving is the change of all "
        "other kernels and of idling."
    )


def _answer(rows: Sequence[Saving]) -> str:
    points = []
    for phase, launch in dict.fromkeys((row.phase, row.launch) for row in rows):
        for gpu in GPUS:
            mine = [row.energy for row in rows if (row.gpu, row.phase, row.launch) == (gpu, phase, launch)]
            text = verdict(PUBLISHED[phase], min(mine), max(mine), lambda x: f"{100 * x:.2f} %")
            points.append(f"- {phase.capitalize()}{EAGER if launch == 'eager' else ''} on `{gpu}`: {text}.")
    return "## Against the published figures\n\n" + "\n".join(points) + "\n\n" + WHY


WHY = prose("fusion", "why")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    return command("fusion", page, argv)


if __name__ == "__main__":
    sys.exit(main())
