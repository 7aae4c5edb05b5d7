"""What a collective and the computation beside it take from one another: predict it, fit it, check it.

``python -m sim.validation.contention RECORDS... --profile FILE`` fits the ``sharing`` section of a profile on
*together* rows (kernel level only) and prints how well a number of blocks is predicted that the fit left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.laws.collective import Sharing
from hardware.profile import dump_profile, read_profile
from sim.build.cost import Pricer, expected_maximum
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass, KernelGraph
from sim.output.files import write_atomically
from sim.scenario.machine import Machine, machine
from sim.validation.records import Record, RecordError, read_records
from workloads.program import Kernel
from workloads.work import AttentionWork, CollectiveOp, CollectiveWork, Elementwise, ElementwiseWork, GemmWork, Work

Inputs = Mapping[str, Any]
Floats = NDArray[np.float64]
OPS = {
    "rs": CollectiveOp.REDUCE_SCATTER,
    "ar": CollectiveOp.ALL_REDUCE,
    "ag": CollectiveOp.ALL_GATHER,
    "aa": CollectiveOp.ALL_TO_ALL,
    "sr": CollectiveOp.SEND_RECV,
}
# Repetitions of the longer side that a prediction runs, and the share of them it lets pass before it looks.
REPETITIONS, WARM_UP = 14, 0.3
# Coefficients that the fit moves, with their bounds; the SMs of a block come from the grids in profiler traces.
BOUNDS = {
    "beside_slowdown": (1.0, 4.0),
    "hbm_weight_per_sm": (0.1, 10.0),
    "traffic_scale": (0.5, 2.0),
    "mixed_hbm_share": (0.7, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Seconds a repetition of both sides, alone and together."""

    a_alone_s: float
    b_alone_s: float
    a_together_s: float
    b_together_s: float

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Of the computation and of the collective."""
        return self.a_together_s / self.a_alone_s, self.b_together_s / self.b_alone_s


def computation(inputs: Inputs, what: str) -> Work:
    """The compute side of a contention row."""
    match what:
        case "gemm":
            m, n, k = inputs["gemm_mnk"]
            return GemmWork(m=m, n=n, k=k)
        case "copy":
            moved = inputs["copy_bytes_moved"]
            return ElementwiseWork(op=Elementwise.COPY, rows=1, width=moved, bytes_moved=moved)
        case "attention":
            return AttentionWork(
                batch=inputs["batch"],
                q_len=inputs["seq_len"],
                kv_len=inputs["seq_len"],
                q_heads=inputs["q_heads"],
                kv_heads=inputs["kv_heads"],
                head_dim=inputs["head_dim"],
                causal=bool(inputs["causal"]),
            )
    raise ValueError(f"a = {what!r}: one of gemm, copy, attention")


def collective(name: str, world: int, buffer_bytes: int) -> CollectiveWork:
    """The collective of a contention row by its name.

    >>> collective("rs8", 2, 1024).ctas
    8
    """
    if name[:2] not in OPS or not name[2:].isdigit():
        raise ValueError(f"b = {name!r}: two letters of {', '.join(OPS)} and a block count")
    return CollectiveWork(op=OPS[name[:2]], ranks=tuple(range(world)), buffer_bytes=buffer_bytes, ctas=int(name[2:]))


def together(inputs: Inputs, target: Machine) -> Beside:
    """Both sides of one row on ``target``, each in a loop of its own on every rank, by the engine."""
    work = computation(inputs, str(inputs["a"]))
    beside = collective(str(inputs["b"]), target.world, int(inputs["comm_bytes"]))
    pricer = Pricer.of_loops(target)
    a = pricer.price(Kernel(name="a", work=work, flops=0.0, bytes_moved=0.0))
    b = pricer.price(Kernel(name="b", work=beside, flops=0.0, bytes_moved=0.0, priority=-1))
    b = replace(b, lead_s=target.profile.launch.graph_gap_s)  # within it, blocks that wait get the SMs
    alone_a, _ = _loop(target, a, None, 1, 0, target.limits.slow_limit_w)
    _, alone_b = _loop(target, None, b, 0, 1, target.limits.slow_limit_w)
    a_s, b_s = _steady_s(target, a, b, alone_a, alone_b)
    return Beside(a_alone_s=alone_a, b_alone_s=alone_b, a_together_s=a_s, b_together_s=b_s)


def beside_waiting(inputs: Inputs, target: Machine) -> tuple[float, float, float]:
    """A GEMM in a loop, alone or beside a receive whose sender never comes: seconds, watts, mean clock in Hz."""
    m, n, k = inputs["gemm_mnk"]
    receive = CollectiveWork(op=CollectiveOp.SEND, ranks=(0, 1), buffer_bytes=inputs["bytes"], ctas=inputs.get("ctas"))
    pricer = Pricer(profile=target.profile, gpu=target.gpu, gap_s=0.0, world=target.world, cluster=target.cluster)
    gemm, wait = (
        pricer.price(Kernel(name="", work=work, flops=0.0, bytes_moved=0.0))
        for work in (GemmWork(m=m, n=n, k=k), receive)
    )
    held = min(wait.terms.blocks * wait.terms.sms_per_block, target.gpu.sms - 1.0) if inputs.get("waits") else 0.0
    spins_w = wait.terms.waiting_power_w if held else 0.0
    graph = graph_of_lanes(1, [gemm], [[0] * 8])
    low, high = 0.5 * target.limits.slow_limit_w, target.limits.fast_limit_w
    seconds, watts, clock_hz = 0.0, math.inf, 0.0
    tried = high
    for _ in range(14):
        core = Core(graph, [FluidModel(target.model, graph.classes, [])], [tried], [target.gpu.sms - held])
        records = Engine(core).run()
        seconds = records.end_ps * 1e-12
        watts = core.gpus[0].energy_j / seconds + spins_w
        ends = np.append(np.asarray(records.step_time_ps)[1:], records.end_ps)
        clocks = [records.states[s].clock_hz for s in records.step_state]
        clock_hz = float(np.average(clocks, weights=ends - np.asarray(records.step_time_ps)))
        if watts <= target.limits.slow_limit_w:
            low = tried
        else:
            high = tried
        if low >= target.limits.fast_limit_w:
            break
        tried = 0.5 * (low + high)
    return seconds / 8, watts, clock_hz


def _steady_s(target: Machine, a: KernelClass, b: KernelClass, a_s: float, b_s: float) -> tuple[float, float]:
    """Both sides at the highest power target whose mean power keeps the slow limit; lanes end about together."""
    limit_w, top = target.limits.slow_limit_w, target.limits.fast_limit_w
    seen, watts = (a_s, b_s), math.inf
    low, high, tried = 0.5 * limit_w, top, top
    for attempt in range(7):
        longer = max(seen)
        n_a, n_b = (min(400, math.ceil(REPETITIONS * longer / each)) for each in seen)
        seen, watts = _loops(target, a, b, n_a, n_b, tried)
        if attempt == 0:
            continue  # only says how long the lanes are
        if watts <= limit_w:
            low = tried
        else:
            high = tried
        if low >= top:
            break
        tried = 0.5 * (low + high)
    return seen


def _loop(
    target: Machine, a: KernelClass | None, b: KernelClass | None, n_a: int, n_b: int, limit_w: float
) -> tuple[float, float]:
    """One kernel alone: its seconds at the settled clock."""
    kernel = a or b
    assert kernel is not None
    graph = graph_of_lanes(1, [kernel], [[0] * max(n_a, n_b)])
    core = Core(graph, [FluidModel(target.model, graph.classes, [])], [limit_w])
    seconds = Engine(core).run().end_ps * 1e-12
    return seconds, seconds


def _loops(
    target: Machine, a: KernelClass, b: KernelClass, n_a: int, n_b: int, limit_w: float
) -> tuple[tuple[float, float], float]:
    """Seconds a repetition while both ran, and mean watts of a GPU; chips lie apart as their spread says."""
    world = target.world
    lag = expected_maximum(world) * target.profile.spread.throttled_time
    chips = [
        replace(a, name=f"a{r}", terms=replace(a.terms, scale=a.terms.scale * (1.0 - lag * r))) for r in range(world)
    ]
    graph = graph_of_lanes(world, [*chips, b], [lane for r in range(world) for lane in ([r] * n_a, [world] * n_b)])
    core = Core(graph, [FluidModel(target.model, graph.classes, [])] * world, [limit_w] * world)
    records = Engine(core).run()
    end = np.zeros(graph.kernels)
    end[np.asarray(records.span_op)] = np.asarray(records.span_end_ps) * 1e-12
    both = min(end[list(ops)].max() for ops in graph.queue_ops)
    power = math.fsum(records.span_energy_j) / world / (records.end_ps * 1e-12)
    means: list[list[float]] = [[], []]
    for queue, ops in enumerate(graph.queue_ops):
        kept = end[list(ops)]
        kept = kept[(kept >= WARM_UP * both) & (kept <= both * (1 + 1e-12))]
        means[queue % 2].append((kept[-1] - kept[0]) / (len(kept) - 1))
    return (float(np.mean(means[0])), float(np.mean(means[1]))), power


def graph_of_lanes(gpus: int, classes: list[KernelClass], lanes: list[list[int]]) -> KernelGraph:
    """Loops without edges: lanes of class indices, as many for each GPU; collectives meet in order."""
    op_class = [c for lane in lanes for c in lane]
    starts = np.concatenate([[0], np.cumsum([len(lane) for lane in lanes])]).tolist()
    each = len(lanes) // gpus
    op_collective = [-1] * len(op_class)
    members: list[tuple[int, ...]] = []
    shared = [q for q, lane in enumerate(lanes) if classes[lane[0]].collective]
    for i in range(len(lanes[shared[0]]) if shared else 0):
        members.append(tuple(starts[q] + i for q in shared))
        for op in members[-1]:
            op_collective[op] = i
    return KernelGraph(
        gpus=gpus,
        classes=tuple(classes),
        op_class=op_class,
        op_gpu=[q // each for q, lane in enumerate(lanes) for _ in lane],
        op_queue=[q for q, lane in enumerate(lanes) for _ in lane],
        op_segment=[0] * len(op_class),
        op_collective=op_collective,
        queue_gpu=tuple(q // each for q in range(len(lanes))),
        queue_stream=tuple(q % each for q in range(len(lanes))),
        queue_ops=tuple(range(starts[q], starts[q + 1]) for q in range(len(lanes))),
        successors={},
        predecessor_count={},
        collective_members=members,
        segments=(("contention", "loop", 0),),
    )


def measured(record: Record) -> Beside:
    """What a together row measured, mean over ranks."""
    m = record.measured
    return Beside(
        a_alone_s=m["a_alone_s"],
        b_alone_s=m["b_alone_s"],
        a_together_s=float(np.mean(m["a_together_s"])),
        b_together_s=float(np.mean(m["b_together_s"])),
    )


def on(gpu: str, world: int, sharing: Sharing) -> Machine:
    """The machine of ``gpu`` with other sharing coefficients."""
    base = machine(gpu, world)
    return replace(
        base,
        profile=replace(base.profile, sharing=sharing),
        model=replace(base.model, mixed_hbm_share=sharing.mixed_hbm_share),
    )


def errors(record: Record, sharing: Sharing) -> list[float]:
    """Predicted over measured seconds less one: both sides of a together row, the GEMM of a waiting row."""
    target = on(record.inputs["gpu"], record.inputs["world"], sharing)
    if record.kind == "waiting":
        return [beside_waiting(record.inputs, target)[0] / record.measured["latency_s"] - 1.0]
    predicted, seen = together(record.inputs, target), measured(record)
    return [
        predicted.a_together_s / seen.a_together_s - 1.0,
        predicted.b_together_s / seen.b_together_s - 1.0,
    ]


def residuals(rows: Sequence[Record], sharing: Sharing) -> Floats:
    """Logs of predicted over measured seconds."""
    return np.log1p([error for record in rows for error in errors(record, sharing)])


def fit(rows: Sequence[Record], start: Sharing, *, steps: int = 5) -> tuple[Sharing, dict[str, float]]:
    """Bounded least squares of :data:`BOUNDS` in ``steps`` steps; standard errors from the Jacobian at the end.

    Losses grow linearly beyond 10 %: rows in a regime that the engine misses must not bend the others.
    """
    names = list(BOUNDS)

    def of(x: Floats) -> Sharing:
        values: dict[str, Any] = dict(zip(names, map(float, x), strict=True))
        return replace(start, **values)

    low, high = (np.array([BOUNDS[n][i] for n in names]) for i in (0, 1))
    x0 = np.clip([getattr(start, n) for n in names], low + 1e-6, high - 1e-6)
    found = least_squares(
        lambda x: residuals(rows, of(x)).ravel(), x0, bounds=(low, high), diff_step=0.03, loss="soft_l1",
        f_scale=0.1, max_nfev=steps, x_scale=x0,
    )  # fmt: skip
    spread = float(np.sqrt(2 * found.cost / max(1, found.fun.size - len(names))))
    standard = spread * np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)))
    return of(found.x), {n: float(f"{e:.3g}") for n, e in zip(names, standard, strict=True)}


def leave_one_out(rows: Sequence[Record], start: Sharing) -> Iterator[tuple[int, int, Floats]]:
    """For each number of blocks: its together rows, and the mean absolute errors of both sides without its rows."""
    for ctas in sorted({r.inputs["ctas"] for r in rows if r.kind == "together"}):
        held = [r for r in rows if r.inputs.get("ctas") == ctas and r.kind == "together"]
        rest, _ = fit([r for r in rows if r.inputs.get("ctas") != ctas], start, steps=2)
        yield ctas, len(held), np.mean(np.abs([errors(record, rest) for record in held]), axis=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the ``sharing`` section of a profile and write it back; everything else in the file stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--profile", required=True, type=Path)
    arguments = parser.parse_args(argv)
    profile = read_profile(arguments.profile)
    rows = [
        record
        for path in arguments.records
        for record in read_records(path)
        if record.kind in ("together", "waiting") and record.inputs["gpu"] == profile.gpu
    ]
    if not rows:
        raise RecordError(f"no together rows of {profile.gpu} in {', '.join(map(str, arguments.records))}")
    sharing, standard = fit(rows, profile.sharing)
    left_out = {
        ctas: (count, round(float(both[0]), 4), round(float(both[1]), 4))
        for ctas, count, both in leave_one_out(rows, sharing)
    }
    names = sorted(path.name for path in arguments.records)
    sharing = replace(
        sharing,
        source=f"{len(rows)} rows of {', '.join(names)}; sms_per_cta from grids in profiler traces",
        command=f"python -m sim.validation.contention {' '.join(names)} --profile {arguments.profile.name}",
        standard_errors=standard,
        left_out=left_out,
        row_digests=tuple(sorted(record.digest for record in rows)),
    )
    write_atomically(arguments.profile, dump_profile(replace(profile, sharing=sharing)).encode())
    for ctas, (count, a, b) in left_out.items():
        print(f"{ctas:3d} blocks left out: {count:3d} rows, computation {100 * a:5.1f} %, collective {100 * b:5.1f} %")


if __name__ == "__main__":
    main()
