"""A capture as what had to happen before what: the only things of a trace that a replay may know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.capture import NONE, Capture
from traces.classify import Classes
from traces.collectives import match_collectives
from traces.edges import INFERRED_WITHIN_NS
from traces.host_order import host_edges
from traces.records import Floats, Ints
from traces.unlaunched import COINCIDENCE, unlaunched_waits

CLOCK_ERROR_NS = 2_000  # what times contradict by less may be rounding: traces of 2021 count whole microseconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dag:
    """Rows of GPU work in the order of each stream (``queues``), and waits across streams (``before`` -> ``after``).

    ``collective`` numbers the rows that several ranks run together, -1 for others. ``counts`` are edges by kind, number
    and mean confidence (1: recorded): ``stream``, the order of launches on one stream; ``launch``, from the host's call
    to its work; ``wait``, a recorded wait of a stream for an event; ``inferred``, a wait whose event the trace does not
    name; ``refuted``, waits that the host's calls suggest and the trace's own times rule out, which are none;
    ``collective``, the last rank to arrive starts the others' part.
    """

    queues: list[Ints]
    before: Ints
    after: Ints
    confidence: Floats
    collective: Ints
    counts: dict[str, dict[str, float]]


def dag_of(capture: Capture, classes: Classes) -> Dag:
    """What a replay may know of ``capture`` beside durations and host calls.

    Streams go in the order of their launches; work without a launch was launched before the trace began, or with
    its graph, and keeps its place in the order that the stream showed. Of such work on several streams the host's calls
    tell no waits: there, and only there, edges are guessed from times, where work of one stream began as that of
    another ended. A simulated trace records them. An edge whose source ended after its target had begun is none. No
    other use is made of a kernel's start.
    """
    work, calls = capture.work, capture.calls
    known = work.launch != NONE
    launched = np.full(len(work), np.iinfo(np.int64).min)
    launched[known] = calls.start_ns[work.launch[known]]
    queues = []
    by_start = np.lexsort((work.start_ns, work.stream, work.rank))
    lane = np.stack([work.rank, work.stream])[:, by_start]
    for rows in np.split(by_start, np.flatnonzero((lane[:, 1:] != lane[:, :-1]).any(axis=0)) + 1):
        latest = np.maximum.accumulate(launched[rows])
        queues.append(rows[np.argsort(np.where(known[rows], launched[rows], latest), kind="stable")])
    edges = host_edges(capture, classes)
    if capture.depends.shape[1]:
        before, after = capture.depends
        sure = np.ones(len(before))
    else:
        before, after, sure = unlaunched_waits(capture)
    before = np.append(before, np.array([edge.before for edge in edges], dtype=np.int64))
    after = np.append(after, np.array([edge.after for edge in edges], dtype=np.int64))
    sure = np.append(sure, np.array([edge.confidence for edge in edges]))
    before, after, sure, refuted = possible(capture, queues, before, after, sure)
    collective = match_collectives(capture, classes)
    members = int((collective != NONE).sum())

    def counted(number: int, confidence: float = 1.0) -> dict[str, float]:
        return {"count": number, "confidence": confidence if number else 0.0}

    return Dag(
        queues=queues,
        before=before,
        after=after,
        confidence=sure,
        collective=collective,
        counts={
            "stream": counted(len(work) - len(queues)),
            "launch": counted(int(known.sum())),
            "wait": counted(int((sure == 1.0).sum())),
            "inferred": counted(int((sure < 1.0).sum()), float(sure[sure < 1.0].mean()) if (sure < 1.0).any() else 0.0),
            "refuted": counted(refuted),
            "collective": counted(members - len(np.unique(collective[collective != NONE]))),
        },
    )


def possible(
    capture: Capture, queues: Sequence[Ints], before: Ints, after: Ints, sure: Floats
) -> tuple[Ints, Ints, Floats, int]:
    """The edges that the trace's times allow, and how many they rule out.

    Where an earlier piece of the same stream ended just before the target began, the event was that one's.
    """
    work = capture.work
    wrong = np.flatnonzero(work.end_ns[before] > work.start_ns[after] + CLOCK_ERROR_NS)
    if not len(wrong):
        return before, after, sure, 0
    lane_of: dict[int, tuple[Ints, int]] = {}
    for queue in queues:
        lane_of |= {row: (queue, place) for place, row in enumerate(queue.tolist())}
    before, sure, kept = before.copy(), sure.copy(), np.ones(len(before), dtype=bool)
    for edge in wrong.tolist():
        queue, place = lane_of[int(before[edge])]
        pause_ns = work.start_ns[after[edge]] - work.end_ns[queue[:place]]
        fits = np.flatnonzero((pause_ns >= -CLOCK_ERROR_NS) & (pause_ns <= INFERRED_WITHIN_NS))
        if len(fits):
            before[edge], sure[edge] = queue[fits[-1]], min(float(sure[edge]), COINCIDENCE)
        else:
            kept[edge] = False
    return before[kept], after[kept], sure[kept], len(wrong)
