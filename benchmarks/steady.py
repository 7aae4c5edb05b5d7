"""Caps that hold, and more work that is not cheaper: ``python benchmarks/steady.py [--generations N] [--pipelines N]``.

Generations and pipelines drawn over GPUs, models, caps and clocks, each beside neighbours that differ in one thing:
a watt more of cap, 15 MHz more of locked clock, a token, a layer, a sequence more. Prints how often a mean power
passes its cap, and how often and how far a neighbour comes out cheaper than it may; the worst with their scenarios.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hardware.catalog import load_gpu
from sim import simulate
from sim.errors import SimError
from sim.result.report import status_text
from sim.result.timeline import Timeline

GPUS = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "a100-sxm-80gb", "h100-pcie-80gb", "l40s-48gb")
MODELS = ("llama3-8b", "qwen3-8b", "qwen3-30b-a3b", "qwen2-1.5b", "llama3-70b")
CAP_SLACK, SLACK = 1.002, 0.005


class Finding(NamedTuple):
    """One bar missed: by how much, of what kind and where."""

    kind: str
    excess: float
    fields: dict[str, Any]


def generation(draw: random.Random, gpus: Sequence[str] = GPUS, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """A generation of short or long prompts and answers."""
    fields = _common(draw, gpus, models) | {
        "phase": "generate",
        "batch": _size(draw, 1, 48),
        "seq_len": _size(draw, 100, 4096),
        "output_len": _size(draw, 2, 160),
    }
    if draw.random() < 0.25:
        fields["tp"] = 2
    return fields


def pipeline(draw: random.Random, gpus: Sequence[str] = GPUS, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """A pipeline of two or four stages."""
    fields = _common(draw, gpus, models) | {
        "phase": draw.choice(("prefill", "prefill", "decode")),
        "batch": 4 * _size(draw, 1, 16),
        "seq_len": _size(draw, 100, 2048),
        "pp": draw.choice((2, 2, 4)),
    }
    fields["layers"] = draw.choice((4, 6, 8, 12))
    if draw.random() < 0.5:
        fields["micro_batches"] = draw.choice((2, 4))
    return fields


def _common(draw: random.Random, gpus: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    gpu = draw.choice(gpus)
    fields: dict[str, Any] = {
        "model": draw.choice(models), "gpu": gpu, "layers": draw.choice((4, 8, 16, 24)), "ignore_memory": True,
    }  # fmt: skip
    if draw.random() < 0.7:
        fields["power_cap_w"] = float(round(load_gpu(gpu).tdp_w * draw.uniform(0.45, 0.99)))
    if draw.random() < 0.2:
        fields["sm_clock_mhz"] = draw.choice((1005, 1200, 1350))
    if draw.random() < 0.2:
        fields["launch"] = "eager"
    return fields


def _size(draw: random.Random, least: int, most: int) -> int:
    """A whole number, small ones as often as large ones."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def neighbours(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Scenarios a little further on, and in what."""
    if "power_cap_w" in fields:
        yield "watt", fields | {"power_cap_w": fields["power_cap_w"] + 1.0}
    if "sm_clock_mhz" in fields:
        yield "clock", fields | {"sm_clock_mhz": fields["sm_clock_mhz"] + 15}
    if "output_len" in fields:
        yield "token", fields | {"output_len": fields["output_len"] + 1}
    yield "layer", fields | {"layers": fields["layers"] + fields.get("pp", 1)}
    if "pp" in fields:  # as many micro-batches as before
        fields = {"micro_batches": fields["pp"]} | fields
    yield "sequence", fields | {"batch": fields["batch"] + fields.get("micro_batches", 1)}


def run(fields: dict[str, Any]) -> Timeline | None:
    """The scenario's run; None where it is refused by name."""
    try:
        return simulate(**fields)
    except SimError:
        return None


def findings(fields: dict[str, Any]) -> Iterator[Finding]:
    """Bars that one scenario or its neighbours miss; a refusal is one too."""
    base = run(fields)
    if base is None:
        yield Finding(kind="refused", excess=0.0, fields=fields)
        return
    yield from _cap(base, fields)
    for kind, other in neighbours(fields):
        more = run(other)
        if more is None:
            yield Finding(kind="refused", excess=0.0, fields=other)
            continue
        yield from _cap(more, other)
        longer, dearer = more.latency_s / base.latency_s - 1.0, more.energy_j / base.energy_j - 1.0
        if kind in ("watt", "clock"):
            if longer > SLACK:
                yield Finding(kind=f"{kind}: longer", excess=longer, fields=fields)
            continue
        if longer < -SLACK:
            yield Finding(kind=f"{kind}: faster", excess=-longer, fields=fields)
        if dearer < -SLACK:
            yield Finding(kind=f"{kind}: cheaper", excess=-dearer, fields=fields)


def _cap(run: Timeline, fields: dict[str, Any]) -> Iterator[Finding]:
    """A cap passed, unless the clock is the lowest: that is said."""
    cap_w = fields.get("power_cap_w", run.machine.gpu.tdp_w)
    over = max(run.power_w_per_gpu) / cap_w - 1.0
    if over > CAP_SLACK - 1.0 and "cannot be held" not in status_text(run):
        yield Finding(kind="cap", excess=over, fields=fields)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=300)
    parser.add_argument("--pipelines", type=int, default=160)
    parser.add_argument("--seed", type=int, default=15)
    arguments = parser.parse_args()
    for name, draws, of in (
        ("generations", arguments.generations, generation),
        ("pipelines", arguments.pipelines, pipeline),
    ):
        draw, began = random.Random(arguments.seed), time.perf_counter()
        found = []
        for _ in range(draws):
            for finding in findings(of(draw)):
                found.append(finding)
                print(f"{finding.kind} {finding.excess:.2%} {finding.fields}", file=sys.stderr, flush=True)
        print(f"{draws} {name}, {time.perf_counter() - began:.0f} s")
        for kind in sorted({finding.kind for finding in found}):
            own = sorted((f for f in found if f.kind == kind), key=lambda f: -f.excess)
            print(f"  {kind}: {len(own)}, worst {own[0].excess:.2%}")
            for finding in own[:4]:
                print(f"    {finding.excess:.2%} {finding.fields}")


if __name__ == "__main__":
    main()
