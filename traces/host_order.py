"""Which stream waited for which, read off the order of the host's calls alone; no time of a kernel enters."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from traces.capture import NONE, Capture, Category
from traces.classify import COMMUNICATION, Classes

LIBRARY = re.compile("nccl|rccl", re.IGNORECASE)
RECORD, WAIT = re.compile("EventRecord"), re.compile("StreamWaitEvent")
# How sure an edge is that no event id names: our judgement, surest first. Of the 359 in four traces of three years
# measured times contradict 3 (tests/test_traces_dag.py).
JUST_RECORDED, ASKED_FOR, ITS_TURN, BY_ROLE = 0.9, 0.8, 0.6, 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEdge:
    """Work ``after`` waits for work ``before`` (rows of ``capture.work``); confidence 1 is recorded, not guessed."""

    before: int
    after: int
    confidence: float


@dataclass(slots=True)
class _Event:
    """A launch (``row`` its first row, ``last`` its last), an event record, or a wait (``fresh``: after a record)."""

    kind: str
    call: int
    row: int = NONE
    last: int = NONE
    stream: int = NONE
    fresh: bool = False


def host_edges(capture: Capture, classes: Classes) -> list[HostEdge]:
    """Edges between streams of each rank, from ``cuda_sync`` records where there are any, else from the calls' order.

    A trace without ``cuda_sync`` says when the host recorded an event and when it made a stream wait, not which
    event, nor for which stream. The rules, surest first:

    - a wait holds up the stream of the next launch on its thread;
    - the events that NCCL itself records and awaits around its launch order nothing and are left out;
    - a wait right after a record is for the work launched last on another stream;
    - a stream of communication waits for the compute stream that launched last (which asks for the collective);
    - other waits of a stream are for the collectives that it asked for, in turn;
    - when it has none outstanding, the main stream waits for other compute streams (or copies, if there are none)
      and these wait for copies (or the main stream).
    """
    return [edge for rank in capture.ranks for edge in _HostRank.of(capture, classes, rank).edges()]


@dataclass(slots=True)
class _HostRank:
    """The calls of one rank and what its streams do."""

    events: list[_Event]
    recorded: dict[int, tuple[int, int, int]]  # by waiting call: stream, source stream, the record's call
    records: bool
    comm_streams: set[int]
    copies: set[int]
    main: int
    others: set[int]
    last: dict[int, tuple[int, int]] = field(default_factory=dict)  # by stream: number of the launch, its last row
    asked: dict[int, deque[int]] = field(default_factory=lambda: defaultdict(deque))  # collectives by asking stream
    asking: int = NONE

    @classmethod
    def of(cls, capture: Capture, classes: Classes, rank: int) -> _HostRank:
        work = capture.work
        events, recorded = _events(capture, rank)
        mine = work.rank == rank
        kernels = mine & (work.category == Category.KERNEL)
        is_communication = kernels & classes.is_class(COMMUNICATION)
        count = {s: int((kernels & (work.stream == s)).sum()) for s in np.unique(work.stream[mine]).tolist()}
        copies = {s for s, kernels_of_s in count.items() if not kernels_of_s}
        comm_streams = {
            s for s in count if s not in copies and 2 * int((is_communication & (work.stream == s)).sum()) > count[s]
        }
        compute = {s: n for s, n in count.items() if s not in copies | comm_streams}
        main = max(compute, key=lambda s: compute[s], default=NONE)
        records = any(event.kind == "record" for event in events)
        return cls(events, recorded, records, comm_streams, copies, main, set(compute) - {main})

    def edges(self) -> list[HostEdge]:
        """Walk the calls in the host's order."""
        held: dict[int, list[tuple[int, float]]] = defaultdict(list)
        at_record: dict[int, dict[int, tuple[int, int]]] = {}
        found = []
        wanted = {record for _, _, record in self.recorded.values()}
        for number, event in enumerate(self.events):
            if event.kind == "record":
                if event.call in wanted:
                    at_record[event.call] = dict(self.last)
            elif event.kind == "wait":
                if event.call in self.recorded:
                    stream, source, record = self.recorded[event.call]
                    known = at_record.get(record, {}).get(source)
                    cause = (known[1], 1.0) if known is not None and stream != source else None
                else:
                    stream, cause = event.stream, None if self.recorded else self._cause(event)
                if cause is not None:
                    held[stream].append(cause)
            else:
                found += [
                    HostEdge(before=row, after=event.row, confidence=sure) for row, sure in held.pop(event.stream, ())
                ]
                self._launched(event, number)
        return found

    def _launched(self, event: _Event, number: int) -> None:
        self.last[event.stream] = number, event.last
        if event.stream in self.comm_streams:
            if self.asking != NONE:
                self.asked[self.asking].append(event.last)
        elif event.stream not in self.copies:
            self.asking = event.stream

    def _cause(self, event: _Event) -> tuple[int, float] | None:
        """What an unnamed wait of ``event.stream`` is for."""
        stream = event.stream
        if stream in self.comm_streams:
            return (self.last[self.asking][1], ASKED_FOR) if self.asking in self.last else None
        turn = self.asked[stream]
        if event.fresh and (row := self._latest(set(self.last) - {stream} - self.copies)) is not None:
            if row in turn:  # the last of its stream: those before it are done as well
                turn.clear()
            return row, JUST_RECORDED
        if turn:
            return turn.popleft(), ITS_TURN
        wanted = (self.others or self.copies) if stream == self.main else (self.copies or {self.main})
        row = self._latest(wanted - {stream})
        return None if row is None else (row, BY_ROLE)

    def _latest(self, streams: set[int]) -> int | None:
        """The last row of the latest launch on one of ``streams``."""
        return max((self.last[s] for s in streams if s in self.last), default=(0, None))[1]


def _events(capture: Capture, rank: int) -> tuple[list[_Event], dict[int, tuple[int, int, int]]]:
    """Launches, records and waits of one rank in the host's order, without those inside NCCL; recorded waits."""
    work, calls, waits = capture.work, capture.calls, capture.waits
    launches: dict[int, _Event] = {}
    for row in np.flatnonzero((work.rank == rank) & (work.launch != NONE)).tolist():
        call = int(work.launch[row])
        seen = launches.setdefault(call, _Event("launch", call, row=row, stream=int(work.stream[row])))
        seen.last = row
    kind_of = ["record" if RECORD.search(name) else "wait" if WAIT.search(name) else "" for name in capture.names]
    mine = np.flatnonzero(calls.rank == rank)
    by_thread: dict[int, list[_Event]] = defaultdict(list)
    ordered = []
    for call in mine[np.argsort(calls.start_ns[mine], kind="stable")].tolist():
        event = launches.get(call)
        if event is None and (kind := kind_of[calls.name[call]]):
            event = _Event(kind, call)
        if event is not None:
            by_thread[int(calls.thread[call])].append(event)
            ordered.append(event)
    records = any(event.kind == "record" for event in ordered)
    library = [LIBRARY.search(name) is not None for name in capture.names]
    dropped: set[int] = set()
    for events in by_thread.values():
        inside = _inside_library(events, [e.kind == "launch" and library[work.name[e.row]] for e in events], records)
        dropped |= {events[place].call for place in inside}
        _aim([event for place, event in enumerate(events) if place not in inside])
    call_of = {int(calls.correlation[call]): call for call in mine.tolist() if calls.correlation[call] != NONE}
    recorded = {
        call_of[wait]: (stream, source, call_of.get(record, NONE))
        for wait, stream, source, record, owner in zip(
            waits.correlation.tolist(), waits.stream.tolist(), waits.source_stream.tolist(),
            waits.record_correlation.tolist(), waits.rank.tolist(), strict=True,
        )
        if owner == rank and wait in call_of and stream != NONE and source != NONE
    }  # fmt: skip
    return [event for event in ordered if event.call not in dropped], recorded


def _inside_library(events: list[_Event], library: list[bool], records: bool) -> set[int]:
    """Places of the records and waits that NCCL makes around its launch: [wait] record wait LAUNCH record wait record.

    Where the profiler did not see records, what is left of that is the wait after the launch, if most launches
    have one. Else it is the program's: the last wait of a backward pass holds the optimizer back.
    """
    kinds = [event.kind for event in events]
    inside: set[int] = set()
    followed = [kinds[place + 1 : place + 2] == ["wait"] for place, launches in enumerate(library) if launches]
    own = 2 * sum(followed) > len(followed)
    for place in (place for place, launches in enumerate(library) if launches):
        if not records:
            if own and kinds[place + 1 : place + 2] == ["wait"]:
                inside.add(place + 1)
        elif kinds[max(0, place - 2) : place] == ["record", "wait"] and kinds[place + 1 : place + 4] == [
            "record", "wait", "record"
        ]:  # fmt: skip
            inside |= {place - 2, place - 1, place + 1, place + 2, place + 3}
            if kinds[max(0, place - 4) : place - 2][-1:] == ["wait"] and kinds[max(0, place - 4)] != "record":
                inside.add(place - 3)
    return inside


def _aim(events: list[_Event]) -> None:
    """Give each wait of a thread the stream of the next launch (else of the last), and tell fresh ones."""
    stream = next((event.stream for event in reversed(events) if event.kind == "launch"), NONE)
    for event in reversed(events):
        if event.kind == "launch":
            stream = event.stream
        elif event.kind == "wait":
            event.stream = stream
    for before, event in pairwise(events):
        event.fresh = before.kind == "record"
