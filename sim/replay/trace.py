"""The timeline of a replay as a trace of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sim.replay.setting import ReplayTimes
from traces.classify import COMMUNICATION
from traces.records import Lane, SpanKind, Spans, Trace
from traces.write.by_name import write_trace


def write_replay(outcome: ReplayTimes, path: Path) -> Path:
    """Write ``outcome``, in the format that the name asks for: a process a rank, a lane a stream, joules beyond idle.

    Raises :class:`TraceError` where ``path`` cannot be written.
    """
    work, classes, names = outcome.capture.work, outcome.classes, outcome.capture.names
    pairs, lane = np.unique(np.stack([work.rank, work.stream]), axis=1, return_inverse=True)
    kinds, kind = np.unique(np.stack([work.name, classes.index, work.stream]), axis=1, return_inverse=True)
    known = np.isfinite(work.energy_j).all()
    trace = Trace(
        processes={rank: f"rank {rank} (replayed)" for rank in outcome.capture.ranks},
        lanes=[Lane(pid=rank, tid=stream, name=f"stream {stream}", order=stream) for rank, stream in pairs.T.tolist()],
        kinds=[
            SpanKind(
                name=names[name],
                category="kernel",
                args={"stream": stream, "family": classes.labels[cls]},
                timed=bool(known),
                communication=classes.labels[cls] == COMMUNICATION,
            )
            for name, cls, stream in kinds.T.tolist()
        ],
        spans=Spans(
            lane=lane.reshape(-1),
            kind=kind.reshape(-1),
            start_ps=(work.start_ns - work.start_ns.min()) * 1000,
            end_ps=(work.end_ns - work.start_ns.min()) * 1000,
            energy_j=work.energy_j,
        ),
        metadata={"schemaVersion": 1, "traceName": "wattline replay"},
    )
    return write_trace(trace, path)
