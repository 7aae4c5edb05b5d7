"""Videos compared over GPUs, guidance and reuse, and the choice of a proxy that says which steps may be reused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from sim.errors import SimError
from sim.result.prices import Prices
from sim.result.rates import rates, utilisation
from sim.run.runner import simulate
from sim.scenario.spec import Scenario
from sim.scenario.video import video_summary
from workloads.diffusion import load_dit
from workloads.reuse import metric_columns

STEP_COLUMN = "step"
LEAST_ROWS = 3  # ranks of two rows agree or disagree, whatever they are


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPoint:
    """One way to make a video (s, J of all GPUs, bytes); ``speedup`` is over every step computed, else the same."""

    gpus: int
    guidance: str
    ulysses: int
    ring: int
    reuse: str | None
    steps: int
    computed_steps: int
    latency_s: float
    energy_j: float
    speedup: float
    power_w_per_gpu: float
    energy_wh_per_request: float
    mfu: float | None
    mfu_at_clock: float | None
    mbu: float | None
    memory_bytes_per_gpu: float
    reuse_cache_bytes: int
    status: str
    status_reasons: tuple[str, ...]
    kernels: int
    events_kernels: int  # that SimPy ran
    derived_kernels: int

    def costs(self, prices: Prices) -> dict[str, float]:
        """What it costs and emits, as far as ``prices`` say."""
        return prices.of(energy_j=self.energy_j, gpu_s=self.latency_s * self.gpus, counts={})


def video_points(
    fields: dict[str, Any], *, degrees: Sequence[int], guidances: Sequence[str], reuses: Sequence[str]
) -> Iterator[VideoPoint]:
    """Every degree of context parallelism with every guidance, without reuse and with each of ``reuses``.

    A degree is as much Ulysses as the heads allow, the rest a ring.
    """
    heads = load_dit(fields["model"]).heads
    for cp, guidance in product(degrees, guidances):
        ulysses = math.gcd(heads, cp)
        mode = {"cp_mode": "ring", "ulysses": ulysses} if ulysses < cp else {}
        plain_s = 0.0
        for reuse in (None, *reuses):
            scenario = Scenario.of(**fields, **mode, phase="denoise", cp=cp, guidance=guidance, reuse=reuse)
            run = simulate(scenario)
            plain_s = plain_s or run.latency_s
            about, used = video_summary(scenario), utilisation(run)
            about.pop("latent_tokens")
            yield VideoPoint(
                gpus=run.gpus,
                guidance=guidance,
                ulysses=ulysses,
                ring=cp // ulysses,
                reuse=reuse,
                latency_s=run.latency_s,
                energy_j=run.energy_j,
                speedup=plain_s / run.latency_s,
                power_w_per_gpu=sum(run.power_w_per_gpu) / run.gpus,
                energy_wh_per_request=rates(run)["energy_wh_per_request"],
                mfu=used["mfu"],
                mfu_at_clock=used["mfu_at_clock"],
                mbu=used["mbu"],
                status=run.standing.status,
                status_reasons=run.standing.reasons,
                kernels=run.outcome.kernels,
                events_kernels=run.outcome.events_kernels,
                derived_kernels=run.outcome.derived_kernels,
                **about,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A recorded metric and its Spearman rank correlation with the reference; None where it is constant."""

    name: str
    spearman: float | None
    p_value: float | None


def rank_proxies(path: Path, reference: str) -> list[Proxy]:
    """Columns of a CSV file by how well their ranks follow ``reference``'s, the best first; constant ones last.

    A column ``step`` counts rows and is no metric.
    """
    columns = {name: values for name, values in metric_columns(path).items() if name != STEP_COLUMN}
    wanted = columns.pop(reference, None)
    if wanted is None:
        raise SimError(f"{path} has no column '{reference}': it has {', '.join(columns)}")
    if not columns or len(wanted) < LEAST_ROWS:
        raise SimError(f"{path}: give a column beside '{reference}' and at least {LEAST_ROWS} rows")
    if len(set(wanted)) == 1:
        raise SimError(f"{path}: column '{reference}' is constant: nothing can follow it")
    found = []
    for name, values in columns.items():
        rho = p_value = None
        if len(set(values)) > 1:
            result = spearmanr(values, wanted)
            rho, p_value = float(result.statistic), float(result.pvalue)
        found.append(Proxy(name=name, spearman=rho, p_value=p_value))
    return sorted(found, key=lambda proxy: (proxy.spearman is None, -(proxy.spearman or 0.0)))
