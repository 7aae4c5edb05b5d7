"""Kernels of recorded durations on the engine: streams, SMs and collectives as for priced kernels, without laws.

A trace contains the duration of each kernel beside the kernels that ran with it, so that here it has no time law, no
share of bandwidth and no clock. It still depends on SMs: blocks without one start late, and the kernel then takes more
rounds of tiles. Kernels without blocks hold no SMs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sim.engine.core import Core
from sim.engine.deadlock import deadlock_message
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.recorded_blocks import Dealt, Later, Left, RecordedBlocks
from sim.engine.resources.grid import Grid
from sim.engine.resources.sm_pool import Return
from sim.engine.running import GpuModel
from sim.engine.state import Driver
from sim.errors import DeadlockError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """A blocking call of the host of one GPU, in its order.

    It returns ``lag_ps`` after its ``ops`` have ended (at ``return_ps`` in the trace), at the earliest at ``call_ps``;
    later calls of the host shift with it.
    """

    call_ps: int
    return_ps: int
    lag_ps: int
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedKernels:
    """The trace's figures of each kernel of a graph; times in picoseconds.

    A kernel begins ``pause_ps`` after what it waits for, no earlier than the host has launched it: at ``launch_ps``,
    shifted with the blocking call before it, whose number is ``epoch`` (0: none). ``clearing_ps`` of its ``dur_ps``
    pass before its blocks ask for SMs. ``rounds`` of tiles are those in which it was measured; 0 where that is not
    known: then it lasts as recorded, and the number of rounds follows. A collective that starts ``at_once`` had SMs in
    the trace; others wait for them. Kernels that are no collectives start on free SMs. Where a kernel's ``rival`` is
    about to request SMs (or the short kernel ``via`` before it on its stream runs), it requests them right after it
    (-1: no rival), or, where they start ``together``, right before. ``tail`` is the share of a kernel's time, before
    its end, from which on others get its SMs (0: by its rounds). ``calls``: of the host of each GPU.
    """

    dur_ps: Sequence[int]
    pause_ps: Sequence[int]
    launch_ps: Sequence[int]
    epoch: Sequence[int]
    clearing_ps: Sequence[int]
    rounds: Sequence[float]
    at_once: Sequence[bool]
    rival: Sequence[int]
    via: Sequence[int]
    together: Sequence[bool]
    tail: Sequence[float]
    calls: Sequence[Sequence[HostCall]]


def bare_gpu(sms: int) -> GpuModel:
    """A GPU model without power, clock and memory: SMs only."""
    return GpuModel(
        sms=sms,
        max_clock_hz=1.0,
        min_clock_hz=1.0,
        reference_clock_hz=1.0,
        clock_step_hz=0.0,
        hbm_bytes_per_s=1.0,
        link_bytes_per_s=1.0,
        idle_w=_none,
        voltage_scale=_none,
    )


def _none(_clock_hz: float) -> float:
    return 0.0


class RecordedCore(Core):
    """One run over kernels of recorded durations; it records the start, end and rounds of each."""

    def __init__(self, graph: KernelGraph, grids: Sequence[Grid], record: RecordedKernels, sms: int) -> None:
        model = FluidModel(bare_gpu(sms), graph.classes, [])
        super().__init__(graph, [model] * graph.gpus, [0.0] * graph.gpus)
        self._grids = list(grids)
        self.record = record
        self.start_ps, self.end_ps = [-1] * graph.kernels, [-1] * graph.kernels
        self.rounds = [0.0] * graph.kernels
        self._holds: dict[int, RecordedBlocks] = {}  # blocks of kernels that end at a recorded time
        self._arrived: dict[int, list[int]] = defaultdict(list)  # kernels of collectives that wait for other ranks

    def start(self, driver: Driver) -> None:
        """Attach the driver."""
        assert isinstance(driver, Engine)
        self.driver, self.env = driver, driver.env
        for gpu in self.gpus:
            for pool in gpu.pools:
                pool.rushed = True

    def stop(self) -> None:
        """After the run: let go of the driver."""
        self.driver = None

    def submit(self, op: int, now_ps: int) -> None:
        """The kernel may start: it runs, or requests SMs first."""
        graph, record = self.graph, self.record
        grid = self._grids[graph.op_class[op]]
        if not grid.sms:
            self._meet(op, now_ps)
        elif grid.collective:
            pool = self.gpus[graph.op_gpu[op]].pools[0]
            RecordedBlocks(self.granted, pool, grid, (now_ps, op), grid.sms, at_once=record.at_once[op])
        else:
            self.start_ps[op] = now_ps
            if clearing_ps := min(record.clearing_ps[op], record.dur_ps[op]):
                Later(self.env, self.cleared, op, clearing_ps)
            else:
                self._ask(op, record.dur_ps[op], now_ps)

    def cleared(self, event: Later) -> None:
        """Request SMs for the blocks, after the first part of their kernel."""
        now_ps = self.env.now
        self._ask(event.op, self.start_ps[event.op] + self.record.dur_ps[event.op] - now_ps, now_ps)

    def _ask(self, op: int, dur_ps: int, now_ps: int) -> None:
        if not dur_ps:
            Later(self.env, self.ended, op, 0)
            return
        graph = self.graph
        grid = self._grids[graph.op_class[op]]
        pool = self.gpus[graph.op_gpu[op]].pools[0]
        blocks = RecordedBlocks(self.granted, pool, grid, (now_ps, op), grid.sms, at_once=True)
        blocks.split = Dealt(grid, dur_ps, now_ps, self.record.rounds[op])

    def granted(self, blocks: RecordedBlocks) -> None:
        """Blocks start on their SMs, or on none."""
        now_ps, op, split = self.env.now, blocks.op, blocks.split
        if blocks.grid.collective:
            self._holds[op] = blocks
            self._meet(op, now_ps)
            return
        if split is None:
            self._holds[op] = blocks
            Later(self.env, self.ended, op, self._end_ps(op) - now_ps)
            return
        assert isinstance(split, Dealt)
        first, tail = split.started and split.started[0] is blocks, self.record.tail[op]
        if first and not split.known:
            self._holds[op] = blocks
            Later(self.env, self.ended, op, split.since_ps + split.dur_ps - now_ps)
        if blocks not in split.started:
            Left(self.env, self.left_sms, blocks, now_ps)
        free_ps = split.last_ps - round(tail * split.dur_ps) if tail else 0
        for one in split.started:
            if one.done:
                continue
            if tail:
                if free_ps < one.end_ps and one.held > 1.0:
                    Left(self.env, self.left_sms, one, free_ps, 1)
            elif one.busy < one.held:
                Left(self.env, self.left_sms, one, one.end_ps - round(split.round_ps), one.busy)
            if split.known or one is not blocks or len(split.started) > 1 or one.sms < one.grid.sms:
                Left(self.env, self.left_sms, one, max(one.end_ps, free_ps))

    def _end_ps(self, op: int) -> int:
        return self.start_ps[op] + self.record.dur_ps[op]

    def left_sms(self, event: Left) -> None:
        """Blocks release SMs, unless other blocks have changed the time at which they do."""
        blocks, split = event.blocks, event.blocks.split
        if blocks.done or event.end_ps != blocks.end_ps:
            return
        if event.keep:
            Return(blocks.resource, blocks, event.keep)
            return
        assert isinstance(split, Dealt)
        blocks.done = True
        Return(blocks.resource, blocks)
        last = split.ended(blocks) or (not split.own and all(one.done for one in split.started))
        if split.known and last:
            blocks.withdraw()
            self.rounds[blocks.op] = split.dur_ps / split.round_ps
            self._complete_op(blocks.op)

    def ended(self, event: Later) -> None:
        """A kernel has lasted as long as recorded: it releases all that it holds."""
        blocks = self._holds.pop(event.op, None)
        if blocks is not None:
            split = blocks.split
            if isinstance(split, Dealt):
                self.rounds[event.op] = split.dur_ps / split.round_ps
                for one in split.started:
                    if not one.done:
                        one.done = True
                        Return(one.resource, one)
                blocks.withdraw()
            else:
                Return(blocks.resource, blocks)
        self._complete_op(event.op)

    def _meet(self, op: int, now_ps: int) -> None:
        """Run the kernel, unless it is a collective that waits for ranks."""
        self.start_ps[op] = now_ps
        number = self.graph.op_collective[op]
        if number < 0:
            Later(self.env, self.ended, op, self.record.dur_ps[op])
            return
        arrived = self._arrived[number]
        arrived.append(op)
        if len(arrived) == len(self.graph.collective_members[number]):
            for one in self._arrived.pop(number):
                Later(self.env, self.ended, one, self.record.dur_ps[one])

    def _complete_op(self, op: int) -> None:
        self.end_ps[op] = self.env.now
        self.left -= 1
        assert self.driver is not None
        self.driver.finished(op)

    def touch(self, gpu_index: int) -> None:
        """Nothing to update: rates do not depend on the SMs held."""

    def update(self, now_ps: int) -> None:  # noqa: ARG002 - as every core's
        """Called on a deadlock."""
        arrived = {number: [self.graph.op_gpu[op] for op in ops] for number, ops in self._arrived.items()}
        raise DeadlockError(deadlock_message(self.graph, arrived, self.gpus, self.left))

    def finish(self, now_ps: int) -> Recorder:
        """Hand over the records."""
        recorder = self.recorder
        recorder.span_op.extend(range(len(self.start_ps)))
        recorder.span_start_ps.extend(self.start_ps)
        recorder.span_end_ps.extend(self.end_ps)
        recorder.end_ps = now_ps
        return recorder
