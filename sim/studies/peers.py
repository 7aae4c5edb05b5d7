"""What open peers predict for three pieces of work, beside our own predictions, as one page.

``python -m sim.studies.peers --out docs/peers.md``. The peers' figures are those of our own runs of them
on two busy cores; ours are made when the page is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.output.files import write_atomically
from sim.run.runner import simulate
from sim.scenario.spec import Scenario
from sim.studies.command import exit_code
from sim.studies.fidelity_tables import table
from sim.studies.prose import prose

WORKS: Mapping[str, Mapping[str, object]] = {
    "W1": {"model": "llama3-8b", "batch": 1, "seq_len": 4096},
    "W2": {"model": "llama3-70b", "batch": 2, "seq_len": 4096, "tp": 4},
    "W3": {"model": "llama3-70b", "phase": "decode", "batch": 32, "seq_len": 2048, "tp": 4},
}
GPUS = {"H100": "h100-sxm-80gb", "H200": "h200-sxm-141gb", "A100": "a100-sxm-80gb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One peer on one GPU: milliseconds of each work, seconds of a run, and what stands in the way of comparing."""

    name: str
    gpu: str
    ms: tuple[float | None, float | None, float | None]
    run: str
    note: str = ""


PEERS: Sequence[Peer] = (
    Peer(name="AIConfigurator, TensorRT-LLM 1.3rc20", gpu="H100", ms=(97.5, 525.4, 19.35), run="2.4-3.7"),
    Peer(name="AIConfigurator, vLLM 0.24", gpu="H100", ms=(90.1, 561.1, 18.37), run="3-5"),
    Peer(name="AIConfigurator, SGLang 0.5.14", gpu="H100", ms=(94.1, 560.3, 18.25), run="3-4"),
    Peer(name="GenZ 0.0.16, efficiency 1", gpu="H100", ms=(75.4, 386.6, 13.07), run="3"),
    Peer(
        name="llm-analysis, efficiency 1", gpu="H100", ms=(61.5, 330.0, 11.8), run="0.001",
        note="feed-forward width of another model",
    ),
    Peer(name="Calculon", gpu="H100", ms=(188.6, 815.8, None), run="0.3", note="no grouped heads, no decode"),
    Peer(name="BLIS roofline", gpu="H100", ms=(103.8, 479.0, 9.2), run="0.03", note="W2: when the last request ends"),
    Peer(name="BLIS trained", gpu="H100", ms=(39.8, 136.0, 20.3), run="0.03", note="W1, W2 below the compute bound"),
    Peer(name="ASTRA-sim roofline", gpu="H100", ms=(67.9, 411.4, 16.1), run="0.06", note="on a graph that we wrote"),
    Peer(name="TrioSim", gpu="H100", ms=(97.4, 451.6, 16.26), run="0.25", note="fed with AIConfigurator's times"),
    Peer(name="AIConfigurator, TensorRT-LLM", gpu="H200", ms=(90.5, 523.0, 15.29), run="3-6"),
    Peer(name="AIConfigurator (git), vLLM 0.22", gpu="H200", ms=(100.6, 532.4, 14.03), run="3-5"),
    Peer(name="InferSim", gpu="H200", ms=(176.5, 999.0, 14.65), run="0.25"),
    Peer(name="AIConfigurator, TensorRT-LLM", gpu="A100", ms=(269.0, 1390.0, 33.2), run="2-4"),
    Peer(name="AIConfigurator, vLLM", gpu="A100", ms=(259.0, 1308.0, 35.0), run="2-4"),
    Peer(name="GenZ, efficiency 1", gpu="A100", ms=(239.0, 1209.5, 20.95), run="3"),
    Peer(name="LLMCompass", gpu="A100", ms=(None, 1397.0, 68.0), run="365"),
    Peer(name="Vidur", gpu="A100", ms=(297.1, 1458.0, 40.1), run="7, first 1100", note="attention from other tables"),
)  # fmt: skip

HEAD = prose("peers", "head")

ENERGY = prose("peers", "energy")


def page() -> str:
    """The whole page as Markdown."""
    lines, joules = [], []
    for label, gpu in GPUS.items():
        runs = [simulate(Scenario.of(gpu=gpu, ignore_memory=True, **work), shortcuts=True) for work in WORKS.values()]
        ours = tuple(run.latency_s * 1e3 for run in runs)
        rests_on = [run.standing.status for run in runs]
        lines.append(("**wattline**", label, *(_ms(value) for value in ours), "", ", ".join(rests_on)))
        lines += [(p.name, label, *(_ms(value) for value in p.ms), p.run, p.note) for p in PEERS if p.gpu == label]
        for name, run in zip(WORKS, runs, strict=True):
            watts = sum(run.power_w_per_gpu) / run.gpus
            joules.append(
                (label, name, f"{run.energy_j:.1f}", f"{watts:.0f}", f"{run.sm_clock_hz_per_gpu[0] / 1e6:.0f}")
            )
    head = ("simulator", "GPU", *(f"{name} ms" for name in WORKS), "run s", "note")
    return (
        "\n\n".join(
            (
                HEAD,
                "## Milliseconds\n\n" + table(head, lines, left=2, text_last=True),
                ENERGY,
                "Ours, all GPUs together:\n\n" + table(("GPU", "work", "J", "W a GPU", "SM MHz"), joules, left=2),
            )
        )
        + "\n"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m sim.studies.peers", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/peers.md"))
    given = parser.parse_args(argv)
    return exit_code("peers", lambda: write_atomically(given.out, page().encode()))


if __name__ == "__main__":
    sys.exit(main())
