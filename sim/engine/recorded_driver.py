"""The SimPy driver of recorded kernels: launch times of the host, its blocking calls, and recorded pauses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event, Timeout

from sim.engine.driver import Engine
from sim.engine.record import Recorder
from sim.engine.recorded import HostCall, RecordedCore
from sim.engine.resources.stream import Stream

NEAR_PS = 10_000_000  # a kernel that begins within this is about to
NEVER_PS = -(1 << 80)  # the end of work that nothing waits for


class RecordedEngine(Engine):
    """Runs a :class:`RecordedCore`: kernels start once launched, after their dependencies and their pause."""

    def __init__(self, core: RecordedCore) -> None:
        super().__init__(core)
        graph = core.graph
        self._record = core.record
        self._free_ps = [NEVER_PS] * len(graph.queue_ops)  # since when each stream has been idle
        self._waited_ps: dict[int, int] = {}  # kernels with dependencies on other streams: when these ended
        self._shift_ps = [
            [0] for _ in core.gpus
        ]  # delay of the host against the trace after each number of blocking calls
        self._calls: list[dict[int, list[tuple[Stream, list[int]]]]] = [defaultdict(list) for _ in core.gpus]
        self._starts, self._ends = core.start_ps, core.end_ps
        self._coming_ps: dict[int, int] = {}  # start times of kernels that are the next of their streams
        self._behind: dict[int, list[int]] = defaultdict(list)  # kernels that request SMs right after another one
        self._awaited: dict[int, Event] = {}  # ends that a blocking call waits for

    def _launch(self, stream: Stream, kernels: Sequence[int]) -> None:
        """Launch what the host launches before it blocks; the rest when its blocking calls have returned."""
        record, graph = self._record, self.core.graph
        if not kernels:
            return
        gpu = graph.op_gpu[kernels[0]]
        if not record.calls[gpu]:
            stream.launch(kernels)
            return
        reached = 0
        launches: dict[int, list[int]] = defaultdict(list)
        for op in kernels:
            reached = max(reached, record.epoch[op])
            launches[reached].append(op)
        for epoch, ops in launches.items():
            if epoch:
                self._calls[gpu][epoch].append((stream, ops))
            else:
                stream.launch(ops)

    def run(self) -> Recorder:
        """Run to the last end."""
        for gpu, calls in enumerate(self._record.calls):
            if calls:
                self.env.process(self._block(gpu, calls))
        return super().run()

    def _block(self, gpu: int, calls: Sequence[HostCall]) -> Generator[Event, Any, None]:
        """The blocking calls of one host: each returns after its work, then the host launches further kernels."""
        env, shift_ps, end_ps = self.env, self._shift_ps[gpu], self._ends
        for number, call in enumerate(calls, start=1):
            done_ps = call.call_ps + shift_ps[-1]
            for op in call.ops:
                if end_ps[op] < 0:
                    event = self._awaited.setdefault(op, Event(env))
                    yield event
                done_ps = max(done_ps, end_ps[op] + call.lag_ps)
            if done_ps > env.now:
                yield Timeout(env, done_ps - env.now)
            shift_ps.append(done_ps - call.return_ps)
            for stream, ops in self._calls[gpu].pop(number, ()):
                stream.launch(ops)

    def _turn(self, op: int) -> None:
        """A kernel is the next of its stream: it waits for its predecessors, the host and its pause, then it starts."""
        if self.blocked.get(op):
            self._ready.add(op)
            return
        record, graph, env = self._record, self.core.graph, self.env
        released_ps = max(self._free_ps[graph.op_queue[op]], self._waited_ps.pop(op, NEVER_PS))
        shift_ps = self._shift_ps[graph.op_gpu[op]]
        begin_ps = max(record.launch_ps[op] + shift_ps[record.epoch[op]], released_ps + record.pause_ps[op])
        if begin_ps > env.now:
            self._coming_ps[op] = begin_ps
            self._hold(op, begin_ps - env.now)
        else:
            self._ask(op)

    def _on_lead(self, _: Event) -> None:
        for op in self._leads.pop(self.env._now):
            self.core.scheduled -= 1
            self._ask(op)

    def _ask(self, op: int) -> None:
        """Request a kernel's SMs; if its rival is about to request them, right after it, or right before."""
        record, env = self._record, self.env
        rival = record.rival[op]
        if rival >= 0 and self._is_near(rival, record.via[op]):
            self._behind[rival].append(op)
            self._coming_ps.pop(op, None)
            self.core.scheduled += 1
            return
        waiting = self._behind.pop(op, ())
        first = [other for other in waiting if record.together[other]]
        for other in first:
            self.core.scheduled -= 1
            self.core.submit(other, env.now)
        if first:
            self._hold(op, 1)
            self._behind[op] = [other for other in waiting if not record.together[other]]
            return
        self._coming_ps.pop(op, None)
        self.core.submit(op, env.now)
        for other in waiting:
            self.core.scheduled -= 1
            self._hold(other, 1)

    def _is_near(self, op: int, via: int) -> bool:
        """Whether a kernel is about to request SMs, given that ``via``, if any, has ended."""
        soon_ps = self.env.now + NEAR_PS
        if self._coming_ps.get(op, soon_ps) < soon_ps:
            return True
        if via < 0 or self._ends[via] >= 0:
            return False
        return self._starts[via] >= 0 or self._coming_ps.get(via, soon_ps) < soon_ps

    def finished(self, op: int) -> None:
        """Release the stream of ``op`` and the kernels that depend on it."""
        graph, now_ps = self.core.graph, self.env.now
        self._free_ps[graph.op_queue[op]] = now_ps
        for successor in graph.successors.get(op, ()):
            self._waited_ps[successor] = now_ps
        if op in self._awaited:
            self._awaited.pop(op).succeed()
        super().finished(op)
