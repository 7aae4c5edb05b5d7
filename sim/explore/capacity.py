"""How many GPUs, how cut, at which clock: the servers that serve a trace under a service-level objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hardware.catalog import load_gpu
from sim.errors import SimError
from sim.explore.workers import Batch, Lines, Pool
from sim.serving import ServeSpec, serve
from sim.serving.clock import clocks_mhz
from sim.serving.requests import Traffic
from workloads.errors import WorkloadError

# Changes to a plain server that have a name.
POLICIES: dict[str, dict[str, str]] = {"slo_clock": {"clock_policy": "slo"}, "autoscale": {"autoscale": "requests"}}


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
            "status": data["status"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Servers that keep the objective for a share of the requests, and the two that one asks for."""

    servers: tuple[Server, ...]
    fewest: Server
    frugal: Server


@dataclass(frozen=True, slots=True, kw_only=True)
class _DegreeSearch:
    """The servers of one tensor-parallel degree; ``why`` says what stopped the search where none is good."""

    spec: ServeSpec
    tp: int
    max_gpus: int
    within: float

    def run(self) -> tuple[int, list[Server], str]:
        """Halve in on the replicas, then lower the clock, at that number of replicas and one more."""
        tried: dict[int, Server] = {}
        traffic = self.spec.traffic()

        def at_top(replicas: int) -> Server:
            if replicas not in tried:
                tried[replicas] = _served(self.spec, {"tp": self.tp, "replicas": replicas}, traffic)
            return tried[replicas]

        try:
            most = self._most_replicas()
            if not most:
                return self.tp, [], f"tp = {self.tp}: a replica takes more than max_gpus = {self.max_gpus}"
            share = at_top(most).share
        except (SimError, WorkloadError) as error:  # does not fit, or does not divide
            return self.tp, [], str(error)
        if share < self.within:
            return self.tp, [], f"tp = {self.tp}, replicas = {most} serves {share:.1%} in time, not {self.within:.1%}"
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at_top(middle).share >= self.within else (middle, high)
        good = []
        for replicas in range(high, min(high + 1, most) + 1):
            good.append(at_top(replicas))
            for clock_mhz in _lower_clocks(self.spec):
                changes = {"tp": self.tp, "replicas": replicas, "sm_clock_mhz": clock_mhz}
                server = _served(self.spec, changes, traffic)
                if server.share < self.within:
                    break
                good.append(server)
        return self.tp, good, ""

    def _most_replicas(self) -> int:
        """As many as fit beside those for prompts, whatever else a replica is split over."""
        given = self.spec.model_dump(exclude_unset=True) | {"tp": self.tp}
        few = self.spec.min_replicas
        gpus, more = (ServeSpec.of(**given | {"replicas": replicas}).gpus for replicas in (few, few + 1))
        each = more - gpus
        return max(0, self.max_gpus - (gpus - few * each)) // each


def _search(tasks: Sequence[_DegreeSearch]) -> list[tuple[int, list[Server], str]]:
    """What a worker does."""
    return [task.run() for task in tasks]


def capacity(
    spec: ServeSpec,
    *,
    max_gpus: int = 8,
    within: float = 0.99,
    pool: Pool | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Capacity:
    """The fewest GPUs, and the lowest energy, that keep ``spec``'s objective for ``within`` of its requests.

    Tensor-parallel degrees are searched side by side on the workers of ``pool``. For each that fits, replicas are
    halved in on (more of them never serve fewer requests in time); then clocks fall until the objective breaks.
    ``say`` hears of each degree.
    """
    if spec.slo_ttft_s is None and spec.slo_tpot_s is None:
        raise SimError("a plan needs an objective: give slo_ttft_s, slo_tpot_s or both")
    if spec.concurrency is not None:
        raise SimError(f"concurrency = {spec.concurrency}: a closed loop waits for its server, plan for a rate")
    degrees = [tp for tp in (1, 2, 4, 8) if tp <= max_gpus]
    tasks = [[_DegreeSearch(spec=spec, tp=tp, max_gpus=max_gpus, within=within)] for tp in degrees]
    found: dict[int, list[Server]] = {}
    why: dict[int, str] = {}
    for results in _mapped(_search, tasks, pool):
        for tp, servers, reason in results:
            found[tp], why[tp] = servers, reason
            say(f"tp = {tp}: {reason or f'{len(servers)} servers keep the objective'}")
    good = [server for tp in degrees for server in found[tp]]
    if not good:
        last = [why[tp] for tp in degrees if why[tp]][-1]
        raise SimError(f"no server of up to {max_gpus} {spec.gpu} keeps the objective: {last}")
    return Capacity(
        servers=tuple(good),
        fewest=min(good, key=lambda s: (s.summary["gpus"], s.summary["energy_j"])),
        frugal=min(good, key=lambda s: s.summary["energy_j"]),
    )


def compare(spec: ServeSpec, others: Sequence[dict[str, Any]], *, pool: Pool | None = None) -> list[Server]:
    """The same traffic under ``spec`` and under each set of changes to it, on the workers of ``pool``."""
    cases = [(number, spec, changes) for number, changes in enumerate(({}, *others))]
    results = [result for batch in _mapped(_compared, [[case] for case in cases], pool) for result in batch]
    return [server for _, server in sorted(results, key=lambda result: result[0])]


def _compared(cases: Sequence[tuple[int, ServeSpec, dict[str, Any]]]) -> list[tuple[int, Server]]:
    """What a worker does."""
    return [(number, _served(spec, changes)) for number, spec, changes in cases]


def _mapped(function: Callable[[Batch], Lines], batches: Sequence[Batch], pool: Pool | None) -> Iterable[Lines]:
    """On the workers of a sweep, or right here where there is but one."""
    if pool is None or min(pool.jobs, len(batches)) == 1:
        return map(function, batches)
    return pool.map(function, batches)


def _served(spec: ServeSpec, changes: dict[str, Any], traffic: Traffic | None = None) -> Server:
    fields = spec.model_dump(exclude_unset=True) | changes
    return Server(changes=changes, summary=serve(ServeSpec.of(**fields), traffic=traffic).summary)


def _lower_clocks(spec: ServeSpec) -> list[float]:
    """Clocks below the highest, falling; none where the clock is not ours to choose."""
    if spec.sm_clock_mhz is not None or spec.clock_policy == "slo":
        return []
    return clocks_mhz(load_gpu(spec.gpu))[-2::-1]
