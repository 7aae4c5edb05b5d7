"""A served run as a trace: a process a replica with its steps and counters, and beside them each request's life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from inputs.same import Same
from sim.result.trace import FIRST_STREAM, release
from sim.serving.beside import PHASES
from sim.serving.kernels import kernels_of
from sim.serving.records import Stretch
from sim.serving.result import ServeResult
from traces.records import Counter, Lane, SpanKind, Spans, Trace
from traces.write.by_name import write_trace

COUNTERS = (
    ("power W per GPU", "power_w_per_gpu"),
    ("power target W", "target_w"),
    ("SM clock MHz", "clock_mhz"),
    ("sequences decoding", "decoding"),
    ("requests waiting", "waiting"),
    ("KV blocks used", "blocks"),
)
# Of a request: the whole, and the stages inside it. Times are columns of a run's requests.
WHOLE = ("request", "arrival_s", "done_s")
STAGES = (("request path", "arrival_s", "received_s"), ("queue", "received_s", "started_s"),
          ("prefill", "started_s", "first_token_s"), ("decode", "first_token_s", "done_s"))  # fmt: skip
ABOUT = ("request", "input_tokens", "output_tokens", "replica", "hit_tokens", "preemptions", "moves")


def write_served(run: ServeResult, path: Path) -> Path:
    """Write ``run`` as a trace (.json, .json.gz, .pftrace)."""
    return write_trace(to_trace(run), path)


def to_trace(run: ServeResult) -> Trace:
    """Steps and pauses of every replica, counters, and each request with its stages on an asynchronous lane."""
    table = run.stretches
    # A process a replica; of a pipeline, a process a stage.
    stages_of = run.spec.pp
    parts = sorted({row.replica * stages_of + row.stage for row in run.log.stretches})
    requests_pid = max(parts) + 1
    lanes = [Lane(pid=part, tid=1, name="steps", order=1) for part in parts]
    lane_of = {part: number for number, part in enumerate(parts)}
    kinds: dict[tuple[str, int, int, int], int] = {}
    lane, kind, start, end, energy = [], [], [], [], []
    for row in run.log.stretches:
        if row.end_s <= row.start_s:
            continue
        key = (_what(row), row.steps, row.decoding, row.prompt_tokens)
        lane.append(lane_of[row.replica * stages_of + row.stage])
        kind.append(kinds.setdefault(key, len(kinds)))
        start.append(row.start_s)
        end.append(row.end_s)
        energy.append(row.energy_j)
    table_of_kinds = [
        SpanKind(
            name=f"{what} x {steps}" if steps > 1 else what,
            category="step",
            args={"family": "step", "steps": steps, "decoding": decoding, "prompt_tokens": prompt_tokens},
            timed=True,
        )
        for what, steps, decoding, prompt_tokens in kinds
    ]
    stages = {name: len(table_of_kinds) + number for number, (name, _, _) in enumerate(STAGES)}
    table_of_kinds += [SpanKind(name=name, category="request", timed=name in ("prefill", "decode")) for name in stages]
    for request in run.requests.to_dict("records"):
        number = len(lanes)
        lanes.append(Lane(pid=requests_pid, tid=int(request["request"]), name=WHOLE[0], order=0, asynchronous=True))
        stages[WHOLE[0]] = len(table_of_kinds)
        about = {name: int(request[name]) for name in ABOUT}
        table_of_kinds.append(SpanKind(name=WHOLE[0], category="request", args=about))
        for name, begin, finish in (WHOLE, *STAGES):
            if request[finish] > request[begin]:
                lane.append(number)
                kind.append(stages[name])
                start.append(float(request[begin]))
                end.append(float(request[finish]))
                energy.append(float(request[f"{name}_j"]) if name in ("prefill", "decode") else float("nan"))
    # A KV cache moves after its first token: inside the request's decoding, before the first step of the other replica.
    lane_of_request = {lanes[number].tid: number for number in lane if lanes[number].asynchronous}
    if run.log.transfers:
        table_of_kinds.append(SpanKind(name="KV transfer", category="transfer"))
    for moved in run.log.transfers:
        if moved.end_s > moved.start_s:
            lane.append(lane_of_request[moved.number])
            kind.append(len(table_of_kinds) - 1)
            start.append(moved.start_s)
            end.append(moved.end_s)
            energy.append(moved.energy_j)
    streams: dict[tuple[int, int], int] = {}
    counts = {"events_kernels": 0, "derived_kernels": 0}
    for step, ran, derived in kernels_of(run.log.run_steps):
        counts["events_kernels"] += len(ran)
        counts["derived_kernels"] += len(derived)
        known: dict[Same[SpanKind], int] = {}
        for stream, one_kind, begin_s, end_s, joules in (*ran, *derived):
            pid = step.replica * stages_of + step.stage
            if (pid, stream) not in streams:
                streams[pid, stream] = len(lanes)
                tid = FIRST_STREAM + stream
                lanes.append(Lane(pid=pid, tid=tid, name=f"stream {tid} of its first GPU", order=tid))
            if (same := Same(one_kind)) not in known:
                known[same] = len(table_of_kinds)
                table_of_kinds.append(one_kind)
            lane.append(streams[pid, stream])
            kind.append(known[same])
            start.append(begin_s)
            end.append(end_s)
            energy.append(joules)
    spans = Spans(
        lane=np.array(lane, dtype=np.int64),
        kind=np.array(kind, dtype=np.int64),
        start_ps=_ps(start),
        end_ps=_ps(end),
        energy_j=np.array(energy),
    )
    counters = []
    for part in parts:
        replica, stage = divmod(part, stages_of)
        mine = table[table["replica"] == replica]
        mine = (mine[mine["stage"] == stage] if stages_of > 1 else mine).sort_values("start_s", kind="stable")
        for name, column in COUNTERS:
            values = mine[column].to_numpy(dtype=float)
            if np.isfinite(values).all():
                counters.append(Counter(pid=part, name=name, time_ps=_ps(mine["start_s"].tolist()), value=values))
        so_far_j = np.cumsum(mine["energy_j"].to_numpy(dtype=float)) * stages_of / run.spec.gpus_of(replica)
        ends_ps = _ps(mine["end_s"].tolist())
        counters.append(Counter(pid=part, name="energy J per GPU", total=True, time_ps=ends_ps, value=so_far_j))
    processes = {part: _process(run, *divmod(part, stages_of)) for part in parts}
    return Trace(
        processes=processes | {requests_pid: "requests"},
        lanes=lanes,
        kinds=table_of_kinds,
        spans=spans,
        counters=counters,
        metadata={
            "schemaVersion": 1,
            "traceName": f"wattline serve {run.spec.model}",
            "served": {"energy_j": run.energy_j, "energy_j_by_part": run.energy_j_by_part} | counts,
            "wattline": _about(run),
        },
    )


def _process(run: ServeResult, replica: int, stage: int) -> str:
    """The name of a replica, or of one side or stage of it."""
    spec, gpus = run.spec, f"{run.spec.gpus_of(replica) // run.spec.pp} x {run.machine.gpu.id}"
    if spec.pp > 1:
        return f"replica {replica}, stage {stage} ({gpus})"
    if spec.sm_partition is None:
        return f"replica {replica} ({gpus})"
    side, number = divmod(replica, spec.replicas)
    name = PHASES[side]
    return f"replica {number}, {name} ({dict(spec.sm_partition)[name]} SMs of {gpus})"


def _about(run: ServeResult) -> dict[str, Any]:
    """The server as readers need it: GPUs of each replica, whose joules its steps carry, and their policy."""
    spec, issue_s = run.spec, run.machine.profile.launch.host_issue_s
    policy = {"power_cap_w": spec.power_cap_w, "sm_clock_mhz": spec.sm_clock_mhz, "launch": spec.launch}
    return {
        "version": release(),
        "gpu": run.machine.gpu.id,
        **run.standing.as_json(),
        "world": max(spec.gpus_of(replica) for replica in (0, spec.prefill_replicas)) // spec.pp,
        "worlds": [
            spec.gpus_of(replica) // spec.pp
            for replica in range(spec.prefill_replicas + spec.replicas)
            for _ in range(spec.pp)
        ],
        "scenario": {name: value for name, value in policy.items() if value is not None},
    } | ({"host_issue_s": issue_s} if spec.launch == "eager" else {})


def _what(row: Stretch) -> str:
    if not row.steps:
        return "to the next stage" if row.decoding or row.prompt_tokens else "idle"
    if not row.prompt_tokens:
        return "decode"
    return "mixed" if row.decoding else "prefill"


def _ps(seconds: list[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.round(np.array(seconds) * 1e12).astype(np.int64)
