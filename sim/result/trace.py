"""A timeline as a trace: one process a GPU, a lane a stream, layers and phases as enclosing slices, counters."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sim.result.network import port_use
from sim.result.run import Run
from sim.scenario.layout import layout_of
from traces.errors import TraceError
from traces.records import Counter, Lane, SpanKind, Spans, Trace
from traces.write.by_name import write_trace
from traces.write.chrome import write_chrome
from traces.write.library_names import with_library_names
from traces.write.window import averaged, window
from workloads.families.pipeline import RECEIVE_STREAM, SEND_STREAM
from workloads.placement import place_of

# Lanes above the streams that show what a kernel belongs to.
PHASE_LANE, LAYER_LANE, FIRST_STREAM = 1, 2, 7
STREAM_ROLES = {0: "", 1: " (communication)", SEND_STREAM: " (send)", RECEIVE_STREAM: " (receive)"}
COUNTERS = (
    ("power", "W", "power_w", 1.0),
    ("SM clock", "MHz", "sm_clock_hz", 1e-6),
    ("SMs busy", "", "sms_busy", 1.0),
    ("HBM", "GB/s", "hbm_bytes_per_s", 1e-9),
    ("NVLink", "GB/s", "link_bytes_per_s", 1e-9),
)
# Ports of the network that get a counter: those that carry most.
MOST_PORTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWindow:
    """What of a timeline is written: a window (ms), and counters with one value every ``counter_ms`` at most.

    ``names``: of kernels, ours or those of the libraries that run them.
    """

    window_ms: tuple[float, float] | None = None
    counter_ms: float | None = None
    names: Literal["ours", "library"] = "ours"

    def of(self, run: Run, only_gpu: int | None = None) -> Trace:
        """That much of the trace of ``run``, of all GPUs or of one."""
        trace = to_trace(run, only_gpu=only_gpu)
        if self.names == "library":
            trace = with_library_names(trace, run.machine.gpu.architecture)
        if self.window_ms is not None:
            begin_ps, end_ps = (round(edge * 1e9) for edge in self.window_ms)
            trace = window(trace, begin_ps, end_ps)
        return trace if self.counter_ms is None else averaged(trace, max(1, round(self.counter_ms * 1e9)))


def write_timeline(
    run: Run, path: Path, *, layout: Literal["one", "hta"] = "one", part: TraceWindow | None = None
) -> Path:
    """Write ``run`` to ``path``, in Perfetto's format (.pftrace) or as Chrome trace (.json).

    ``hta`` writes one Chrome file a rank into the folder ``path``.
    """
    part = part or TraceWindow()
    if layout == "one":
        return write_trace(part.of(run), path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(f"cannot write traces into folder '{path}': {error.strerror or error}") from None
    for gpu in range(run.graph.gpus):
        write_chrome(part.of(run, gpu), path / f"rank{gpu}.pt.trace.json.gz", launches=True)
    return path


def to_trace(run: Run, *, only_gpu: int | None = None) -> Trace:
    """The trace of all GPUs, or of one as its own rank file."""
    graph, records = run.graph, run.records
    gpus = range(graph.gpus) if only_gpu is None else [only_gpu]
    lanes: list[Lane] = []
    lane_of_queue: dict[int, int] = {}
    outer: dict[tuple[int, int], int] = {}
    for gpu in gpus:
        for tid, name in ((PHASE_LANE, "phases"), (LAYER_LANE, "layers")):
            outer[gpu, tid] = len(lanes)
            lanes.append(Lane(pid=gpu, tid=tid, name=name, order=tid))
        for number, (owner, stream) in enumerate(zip(graph.queue_gpu, graph.queue_stream, strict=True)):
            if owner == gpu:
                lane_of_queue[number] = len(lanes)
                name = f"stream {FIRST_STREAM + stream}" + STREAM_ROLES.get(stream, " (communication)")
                lanes.append(Lane(pid=gpu, tid=FIRST_STREAM + stream, name=name, order=FIRST_STREAM + stream))

    op = np.frombuffer(records.span_op, dtype=np.int64)
    gpu_of = np.asarray(graph.op_gpu)[op]
    mine = np.isin(gpu_of, list(gpus))
    op, gpu_of = op[mine], gpu_of[mine]
    start = np.frombuffer(records.span_start_ps, dtype=np.int64)[mine]
    end = np.frombuffer(records.span_end_ps, dtype=np.int64)[mine]
    energy = np.frombuffer(records.span_energy_j, dtype=np.float64)[mine]
    queue = np.asarray(graph.op_queue)[op]
    lane_table = np.array([lane_of_queue.get(q, -1) for q in range(len(graph.queue_gpu))])
    streams = graph.queue_stream
    kinds, kind = _kernel_kinds(run, np.asarray(graph.op_class)[op], np.asarray(streams)[queue])
    segment = np.asarray(graph.op_segment)[op]
    # Transfers between stages run beside the layers of their rank: they have lanes of their own.
    inside = ~np.isin(segment, list(graph.asynchronous_segments))
    ran = _Kernels(segment=segment[inside], gpu=gpu_of[inside], start_ps=start[inside], end_ps=end[inside])
    outer_spans = _enclosing(run, ran, outer, kinds)
    spans = Spans(
        lane=np.concatenate([lane_table[queue], outer_spans.lane]),
        kind=np.concatenate([kind, outer_spans.kind]),
        start_ps=np.concatenate([start, outer_spans.start_ps]),
        end_ps=np.concatenate([end, outer_spans.end_ps]),
        energy_j=np.concatenate([energy, outer_spans.energy_j]),
    )
    processes = {gpu: _process_name(run, gpu) for gpu in gpus}
    counters = _counters(run, list(gpus))
    if only_gpu is None and (ports := port_use(run)[:MOST_PORTS]):
        processes[graph.gpus] = "network between nodes"
        counters += [
            Counter(pid=graph.gpus, name=one.port.name, unit="GB/s", time_ps=one.time_ps, value=one.bytes_per_s * 1e-9)
            for one in sorted(ports, key=lambda one: one.port.name)
        ]
    metadata = _metadata(run)
    if only_gpu is not None:
        metadata = {"distributedInfo": {"rank": only_gpu, "world_size": graph.gpus}} | metadata
    return Trace(
        processes=processes,
        lanes=lanes,
        kinds=kinds,
        spans=spans,
        counters=counters,
        flows=_flows(run, op) if graph.successors else (),
        metadata=metadata,
    )


def _process_name(run: Run, gpu: int) -> str:
    """The GPU, and where it stands if there are stages, replicas or context slices."""
    layout = layout_of(run.scenario)
    place = place_of(layout, gpu)
    parts = [
        (layout.dp, "branch" if run.scenario.guidance == "parallel" else "replica", place.replica),
        (layout.pp, "stage", place.stage),
        (layout.cp, "context", place.context),
    ]
    where = "".join(f", {name} {number}" for degree, name, number in parts if degree > 1)
    return f"GPU {gpu} ({run.machine.gpu.id}{where})"


def _kernel_kinds(run: Run, cls: Any, stream: Any) -> tuple[list[SpanKind], Any]:
    """One kind a (class, stream); returns the kinds and each span's index."""
    pairs, index = np.unique(np.stack([cls, stream], axis=1), axis=0, return_inverse=True)
    kinds = []
    for class_id, number in pairs.tolist():
        kernel = run.graph.classes[class_id]
        terms = kernel.terms
        args: dict[str, Any] = {
            "stream": FIRST_STREAM + number,
            "family": kernel.family,
            **kernel.describe,
            "blocks": (kernel.beside or terms).blocks,
            "hbm_bytes": terms.hbm_bytes,
        }
        if terms.link_bytes:
            args["link_bytes"] = terms.link_bytes
        if terms.way:
            args["way"] = terms.way
        if terms.extrapolated:
            args["extrapolated"] = True
        communication = kernel.family == "communication"
        kinds.append(SpanKind(name=kernel.name, category="kernel", args=args, timed=True, communication=communication))
    return kinds, index.reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """Columns of kernels that ran."""

    segment: Any
    gpu: Any
    start_ps: Any
    end_ps: Any


def _enclosing(run: Run, ran: _Kernels, outer: dict[tuple[int, int], int], kinds: list[SpanKind]) -> Spans:
    """Layer and phase slices around the kernels of each GPU."""
    segments = run.graph.segments
    phase_names = list(dict.fromkeys(s[0] for s in segments))
    phase_of = np.array([phase_names.index(s[0]) for s in segments])
    lane: list[int] = []
    kind: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    for tid, group, labels in (
        (LAYER_LANE, ran.segment, [f"{s[1]} {s[2]}" for s in segments]),
        (PHASE_LANE, phase_of[ran.segment], phase_names),
    ):
        kind_of: dict[int, int] = {}
        for rank in np.unique(ran.gpu).tolist():
            mine = ran.gpu == rank
            ids, where = np.unique(group[mine], return_inverse=True)
            first = np.full(len(ids), np.iinfo(np.int64).max)
            last = np.zeros(len(ids), dtype=np.int64)
            np.minimum.at(first, where, ran.start_ps[mine])
            np.maximum.at(last, where, ran.end_ps[mine])
            # Where layers roll into one another (two micro-batches), a slice ends as the next one begins.
            order = np.argsort(first, kind="stable")
            last[order[:-1]] = np.minimum(last[order[:-1]], first[order[1:]])
            for number, begin, finish in zip(ids.tolist(), first.tolist(), last.tolist(), strict=True):
                if number not in kind_of:
                    kind_of[number] = len(kinds)
                    kinds.append(SpanKind(name=labels[number], category="layer" if tid == LAYER_LANE else "phase"))
                lane.append(outer[rank, tid])
                kind.append(kind_of[number])
                begins.append(begin)
                ends.append(finish)
    return Spans(
        lane=np.array(lane, dtype=np.int64),
        kind=np.array(kind, dtype=np.int64),
        start_ps=np.array(begins, dtype=np.int64),
        end_ps=np.array(ends, dtype=np.int64),
        energy_j=np.full(len(lane), np.nan),
    )


def _counters(run: Run, gpus: list[int]) -> list[Counter]:
    steps = run.power_columns
    counters = []
    for gpu in gpus:
        mine = steps["gpu"] == gpu
        time_ps = np.round(steps["start_s"][mine] * 1e12).astype(np.int64)
        for name, unit, column, scale in COUNTERS:
            values = steps[column][mine]
            if column == "link_bytes_per_s" and not values.any():
                continue
            counters.append(Counter(pid=gpu, name=name, unit=unit, time_ps=time_ps, value=values * scale))
        joules = np.cumsum(steps["power_w"][mine] * steps["duration_s"][mine])
        ends_ps = np.append(time_ps[1:], run.records.end_ps)
        counters.append(Counter(pid=gpu, name="energy", unit="J", total=True, time_ps=ends_ps, value=joules))
    return counters


def _flows(run: Run, op: Any) -> list[tuple[int, int]]:
    """Arrows along dependencies between streams, for spans that are in the trace."""
    place = {number: index for index, number in enumerate(op.tolist())}
    return [
        (place[before], place[after])
        for before, successors in sorted(run.graph.successors.items())
        for after in successors
        if before in place and after in place
    ]


def release() -> str:
    """The installed version, or "source"."""
    try:
        return version("wattline")
    except PackageNotFoundError:
        return "source"


def _metadata(run: Run) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "traceName": f"wattline {run.scenario.model} {run.scenario.phase}",
        "wattline": {
            "version": release(),
            "scenario": run.scenario.model_dump(mode="json", exclude_none=True),
            "gpu": run.machine.gpu.id,
            **({"host_issue_s": run.machine.profile.launch.host_issue_s} if run.scenario.launch == "eager" else {}),
            **run.standing.as_json(),
            "latency_s": run.latency_s,
            "energy_j": run.energy_j,
        },
    }
