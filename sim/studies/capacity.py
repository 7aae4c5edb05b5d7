"""How many GPUs, how cut, at which clock: the servers that serve a trace under a service-level objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hardware.catalog import load_gpu
from sim.errors import SimError
from sim.serving import ServeSpec, serve
from sim.serving.clock import clocks_mhz
from workloads.errors import WorkloadError

# Changes to a plain server that have a name.
POLICIES: dict[str, dict[str, str]] = {
    "slo_clock": {"clock_policy": "slo"},
    "autoscale": {"autoscale": "requests"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server that was tried, and what its run came to; ``changes`` are what sets it apart from the spec."""

    changes: dict[str, Any]
    summary: dict[str, Any]

    @property
    def share(self) -> float:
        """Requests within the objective."""
        return float(self.summary["slo_share"])

    @property
    def row(self) -> dict[str, Any]:
        """Its figures, flat."""
        data = self.summary
        return self.changes | {
            "gpus": data["gpus"],
            "slo_share": data["slo_share"],
            "ttft_p99_s": data["ttft_s"]["p99"],
            "tpot_p99_s": None if data["tpot_s"] is None else data["tpot_s"]["p99"],
            "energy_j_per_output_token": data["energy_j_per_output_token"],
            "energy_j_per_request": data["energy_j_per_request"],
            "power_w_per_gpu": data["power_w_per_gpu"],
            "gpu_hours": data["gpu_hours"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Servers that keep the objective for a share of the requests, and the two that one asks for."""

    servers: tuple[Server, ...]
    fewest: Server
    frugal: Server


def capacity(
    spec: ServeSpec,
    *,
    max_gpus: int = 8,
    within: float = 0.99,
    say: Callable[[str], None] = lambda _: None,
) -> Capacity:
    """The fewest GPUs, and the lowest energy, that keep ``spec``'s objective for ``within`` of its requests.

    For each tensor-parallel degree that fits, replicas are halved in on (more of them never serve fewer requests in
    time); then clocks fall, at that number of replicas and one more, until the objective breaks.
    """
    if spec.slo_ttft_s is None and spec.slo_tpot_s is None:
        raise SimError("a plan needs an objective: give slo_ttft_s, slo_tpot_s or both")
    if spec.concurrency is not None:
        raise SimError(f"concurrency = {spec.concurrency}: a closed loop waits for its server, plan for a rate")
    tried: dict[tuple[tuple[str, Any], ...], Server] = {}
    why = ""

    def run(**changes: Any) -> Server:
        key = tuple(sorted(changes.items()))
        if key not in tried:
            say(", ".join(f"{name} = {value}" for name, value in changes.items()))
            fields = spec.model_dump(exclude_unset=True) | changes
            tried[key] = Server(changes=changes, summary=serve(ServeSpec.of(**fields)).summary)
        return tried[key]

    good: list[Server] = []
    for tp in [tp for tp in (1, 2, 4, 8) if tp <= max_gpus]:
        try:
            most = run(tp=tp, replicas=max_gpus // tp)
        except (SimError, WorkloadError) as error:  # does not fit, or does not divide
            why = str(error)
            continue
        if most.share < within:
            why = f"tp = {tp}, replicas = {max_gpus // tp} serves {most.share:.1%} in time, not {within:.1%}"
            continue
        low, high = 0, max_gpus // tp
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if run(tp=tp, replicas=middle).share >= within else (middle, high)
        for replicas in range(high, min(high + 1, max_gpus // tp) + 1):
            for clock_mhz in _clocks(spec):
                server = run(tp=tp, replicas=replicas, **({} if clock_mhz is None else {"sm_clock_mhz": clock_mhz}))
                if server.share < within:
                    break
                good.append(server)
    if not good:
        raise SimError(f"no server of up to {max_gpus} {spec.gpu} keeps the objective: {why}")
    return Capacity(
        servers=tuple(good),
        fewest=min(good, key=lambda s: (s.summary["gpus"], s.summary["energy_j"])),
        frugal=min(good, key=lambda s: s.summary["energy_j"]),
    )


def compare(spec: ServeSpec, others: Sequence[dict[str, Any]]) -> list[Server]:
    """The same traffic under ``spec`` and under each set of changes to it."""
    fields = spec.model_dump(exclude_unset=True)
    return [
        Server(changes=changes, summary=serve(ServeSpec.of(**fields | changes)).summary) for changes in ({}, *others)
    ]


def _clocks(spec: ServeSpec) -> list[float | None]:
    if spec.sm_clock_mhz is not None or spec.clock_policy == "slo":
        return [None]
    return [None, *clocks_mhz(load_gpu(spec.gpu))[-2::-1]]
