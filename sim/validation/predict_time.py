"""Predict records whose load comes and goes: bursts with pauses (duty) and the first seconds (transient).

Both run a timed schedule through the engine with the limiters acting in time. What is taken from a record is
when the host launched what; every time, clock and watt is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.build.cost import Pricer
from sim.build.lower import lower
from sim.build.program import build
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.governor import Limiter
from sim.engine.record import Recorder
from sim.run.repetition import machine_for
from sim.scenario.machine import Machine
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from workloads.kernel_names import Elementwise
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import AttentionWork, DType, ElementwiseWork, GemmWork, Work

Inputs = Mapping[str, Any]
Floats = NDArray[np.float64]
# A duty record repeats its bursts this long before it is metered, and keeps so many iterations of each burst.
WARM_UP_S = 1.0
KEPT_ITERATIONS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLaunch:
    """Segments that the host launches together at ``start_s``; they begin later if the GPU is still busy."""

    name: str
    start_s: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedRun:
    """A timed run on one GPU: kernels in order (s), where each launch's kernels begin, power and clock steps."""

    start_s: Floats
    end_s: Floats
    first_kernel: NDArray[np.int64]
    step_s: Floats
    step_power_w: Floats
    step_clock_hz: Floats
    idle_w: float

    @property
    def launch_s(self) -> Floats:
        """Seconds from one launch's end to the next one's, pauses of the GPU left out."""
        last = self.end_s[self.first_kernel[1:] - 1]
        return np.asarray(last - np.maximum(self.start_s[self.first_kernel[:-1]], np.append(0.0, last[:-1])))

    def energy_j(self, begin_s: float, end_s: float) -> float:
        """Joules between two moments; before and after the run the GPU idles."""
        return self._integral(self.step_power_w, begin_s, end_s, self.idle_w)

    def clock_hz(self, begin_s: float, end_s: float) -> float:
        """Mean SM clock between two moments within the run."""
        return self._integral(self.step_clock_hz, begin_s, end_s, 0.0) / (end_s - begin_s)

    def _integral(self, values: Floats, begin_s: float, end_s: float, outside: float) -> float:
        edges = self.step_s
        widths = np.minimum(edges[1:], end_s) - np.maximum(edges[:-1], begin_s)
        inside = float(np.maximum(widths, 0.0) @ values)
        beyond = max(0.0, end_s - max(begin_s, edges[-1])) + max(0.0, min(end_s, edges[0]) - begin_s)
        return float(inside + beyond * outside)


def run_schedule(target: Machine, launches: Sequence[TimedLaunch], *, gap_s: float) -> TimedRun:
    """Run ``launches`` on one GPU that has been idle, limiters acting; kernels pause ``gap_s`` between them."""
    phases = tuple(Phase(name=launch.name, segments=launch.segments) for launch in launches)
    pricer = Pricer(profile=target.profile, gpu=target.gpu, gap_s=gap_s, cluster=target.cluster)
    graph = lower(Program(ranks=(RankProgram(phases=phases),)), pricer.price)
    sizes = [sum(len(s.kernels) * s.repeat for s in launch.segments) for launch in launches]
    issue = np.repeat([round(launch.start_s * 1e12) for launch in launches], sizes)
    limiter = Limiter(target.limits, gpus=1)
    core = Core(
        replace(graph, issue_ps=issue.tolist()), [FluidModel(target.model, graph.classes, [])], limiter.targets_w()
    )
    records = Engine(core, limiter).run()
    return _run_of(records, sizes, target.model.idle_w(target.model.max_clock_hz))


def _run_of(records: Recorder, sizes: Sequence[int], idle_w: float) -> TimedRun:
    order = np.argsort(records.span_op)
    states = [records.states[s] for s in records.step_state]
    return TimedRun(
        start_s=np.asarray(records.span_start_ps)[order] * 1e-12,
        end_s=np.asarray(records.span_end_ps)[order] * 1e-12,
        first_kernel=np.concatenate([[0], np.cumsum(sizes)]),
        step_s=np.append(records.step_time_ps, records.end_ps) * 1e-12,
        step_power_w=np.array([state.power_w for state in states]),
        step_clock_hz=np.array([state.clock_hz for state in states]),
        idle_w=idle_w,
    )


def duty(inputs: Inputs) -> dict[str, Any]:
    """Bursts of one kernel: mean iteration (s), joules of a burst and its pause, watts, clock in the bursts.

    The slow limiter swings about once a second; the record's bursts meet it at an unknown phase, so that the
    prediction is the mean over its bursts.
    """
    target = _one_gpu(inputs)
    work = work_of(str(inputs["work"]))
    count, bursts, period_s = int(inputs["n_per_burst"]), int(inputs["bursts"]), float(inputs["period_s"])
    warm = round(WARM_UP_S / period_s)
    kernel = Kernel(name=str(inputs["work"]), work=work, flops=0.0, bytes_moved=0.0)
    burst = (Segment(name="burst", kernels=(kernel,), repeat=count),)
    run = run_schedule(
        target,
        [TimedLaunch(name="burst", start_s=i * period_s, segments=burst) for i in range(warm + bursts)],
        gap_s=0.0,
    )
    start_s, end_s = run.start_s.reshape(-1, count), run.end_s.reshape(-1, count)
    kept = min(count, KEPT_ITERATIONS)
    iterations_s = (end_s - start_s)[warm:, :kept]
    clocks_hz = [run.clock_hz(begin, end) for begin, end in zip(start_s[warm:, 0], end_s[warm:, kept - 1], strict=True)]
    begin_s = warm * period_s
    power_w = run.energy_j(begin_s, begin_s + bursts * period_s) / (bursts * period_s)
    return {
        "latency_s": float(iterations_s.mean()),
        "energy_j": power_w * period_s,
        "power_w": [power_w],
        "sm_clock_mhz": [float(np.mean(clocks_hz)) / 1e6],
    }


def transient(inputs: Inputs) -> dict[str, Any]:
    """The first seconds of load: busy seconds of all steps, joules and mean watts of the whole log, no one clock."""
    run = transient_run(inputs)
    duration_s = float(inputs["duration_s"])
    energy_j = run.energy_j(0.0, duration_s)
    return {
        "latency_s": float(run.launch_s.sum()),
        "energy_j": energy_j,
        "power_w": [energy_j / duration_s],
        "sm_clock_mhz": None,
    }


def transient_run(inputs: Inputs) -> TimedRun:
    """The engine's run of a transient record's schedule: one launch a step, on a chip as cool as an idle one."""
    target = _one_gpu(inputs)
    cool = target.curve.at(target.curve.leakage_free_c)
    target = replace(target, curve=cool, model=replace(target.model, idle_w=cool.idle_w))
    segments = {phase: _segments(str(inputs[phase]), phase, target) for phase in ("prefill", "decode")}
    launches = [
        TimedLaunch(name=work, start_s=float(start_s), segments=segments[work])
        for work, start_s, steps in inputs["schedule"]
        for _ in range(steps)
    ]
    return run_schedule(target, launches, gap_s=target.profile.launch.graph_gap_s)


def _segments(described: str, phase: str, target: Machine) -> tuple[Segment, ...]:
    """Segments of one step from words like ``llama3-8b batch 2 seq_len 2048``."""
    model, *words = described.split()
    sizes = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    scenario = Scenario.parse(
        {"model": model, "gpu": target.gpu.id, "phase": phase, "ignore_memory": True} | sizes, where="record"
    )
    program, _ = build(resolve_scenario(scenario), sms_per_cta=target.profile.sharing.sms_per_cta)
    return program.ranks[0].phases[0].segments


def _one_gpu(inputs: Inputs) -> Machine:
    # A transient record logs one GPU, however many did the same beside it.
    return machine_for(inputs, 1)


def work_of(name: str) -> Work:
    """The kernel that a duty record's ``work`` names.

    >>> work_of("gemm_512x28672x8192").m
    512
    >>> work_of("copy_512MiB").bytes_moved
    536870912
    """
    family, _, rest = name.partition("_")
    match family:
        case "gemm":
            m, n, k = (int(size) for size in rest.split("x"))
            return GemmWork(m=m, n=n, k=k, dtype=DType.BF16)
        case "copy":
            moved = int(rest.removesuffix("MiB")) * 2**20
            return ElementwiseWork(op=Elementwise.COPY, rows=1, width=moved, bytes_moved=moved)
        case "attention":
            mask, *parts = rest.split("_")
            sizes = {part.rstrip("0123456789"): int(part.lstrip("bshkv")) for part in parts}
            return AttentionWork(
                batch=sizes["b"],
                q_len=sizes["s"],
                kv_len=sizes["s"],
                q_heads=sizes["h"],
                kv_heads=sizes["kv"],
                head_dim=128,
                causal=mask == "causal",
            )
        case _:
            raise ValueError(f"work = {name!r}: a duty record's work begins with gemm_, copy_ or attention_")
