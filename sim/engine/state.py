"""State of a run: flows, each rank's part of them, GPUs; and the interface of a driver."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from heapq import heappush
from typing import Any, Self

from simpy.events import NORMAL, PENDING

from sim.engine.fluid import FluidModel, Running
from sim.engine.resources.arbitration import Arbitrated
from sim.engine.resources.copy_engine import CopyEngine
from sim.engine.resources.grid import Grid, Progress
from sim.engine.resources.hbm import Hbm
from sim.engine.resources.link_port import LinkPort
from sim.engine.resources.sm_pool import Blocks, SmPool
from sim.engine.resources.tiles import WHOLE, Split
from sim.engine.running import GpuState, Target, bounds
from sim.engine.time import WholeTime

Queues = tuple[MutableSequence[Any], ...]  # of the memory and the port of a GPU


class Driver:
    """The interface of the driver that schedules events for the core."""

    env: WholeTime

    def arm(self, gpu: Gpu, due_ps: int) -> None:
        """Call ``core.due`` with this GPU at ``due_ps``."""
        raise NotImplementedError

    def finished(self, op: int) -> None:
        """The kernel has ended: release its stream and its successors."""
        raise NotImplementedError


class Flow(Progress):
    """A running kernel: one progress, shared by all its ranks."""

    __slots__ = ("collective", "entries", "missing")

    def __init__(self, collective: int, missing: int) -> None:
        self.collective = collective
        self.entries: list[Entry] = []
        self.missing = missing
        self.left, self.rate = 1.0, 0.0
        self.updated_ps, self.due_ps = 0, -1


class Entry(Blocks):
    """One rank's part of a flow: its request for SMs (or a copy engine), and the joules that it has used."""

    __slots__ = (
        "_ok", "_value", "callbacks", "class_id", "crossed", "energy_j", "env", "fill", "flow", "gpu", "grid", "held",
        "key", "op", "part", "progress", "resource", "sms", "split", "start_ps", "tail_due", "wanted",
    )  # fmt: skip
    proc: Any = None

    def __init__(
        self,
        op: int,
        class_id: int,
        gpu: Gpu,
        flow: Flow,
        grid: Grid,
        key: tuple[float, ...],
        wanted: float,
        pool: Arbitrated,
    ) -> None:
        # What Blocks and Ask do, in one go. All fields are set here: Python keeps those that come later in a dict.
        self.env = pool._env
        self.callbacks = [gpu.begin]
        self.resource = pool
        self.grid = grid
        self.key = key
        self.wanted = wanted
        self.op = op
        self.class_id = class_id
        self.gpu = gpu
        self.flow = self.progress = flow
        self.held = self.sms = self.energy_j = 0.0
        self.fill = 1.0
        self.start_ps = self.tail_due = -1
        self.crossed: Queues = ()  # the queues that it is in while it runs
        self.split: Split | None = None
        self.part = WHOLE
        self._ok, self._value = True, PENDING
        queue = pool.put_queue
        if queue and queue[-1].key > key:
            queue.append(self)
        else:
            list.append(queue, self)  # type: ignore[arg-type]  # SimPy's queue is a list
        if not pool.asked:
            pool.rounds.ask(pool)

    def succeed(self, value: Any = None) -> Self:
        """What SimPy does."""
        self._ok = True
        self._value = value
        env = self.gpu.env
        heappush(env._queue, (env._now, NORMAL, next(env._eid), self))  # type: ignore[misc]  # an Event as any
        return self

    def thin(self, rounds: int) -> float:
        """The share of a round's time that its arithmetic takes."""
        return self.gpu.model.thin(self.class_id, self.gpu.clock_cap_hz, rounds)

    def late(self, wanted: float) -> Entry:
        """The blocks of the same kernel that start when more SMs are free, with tiles of their own."""
        return Entry(self.op, self.class_id, self.gpu, Flow(-1, 1), self.grid, self.key, wanted, self.resource)


class Gpu:
    """One GPU's run state and its resources, which the driver brings."""

    __slots__ = (
        "begin", "clock_cap_hz", "copy_engine", "crossed", "due_ps", "energy_j", "env", "hbm", "index",
        "integrated_ps", "known", "limit_w", "model", "pools", "port", "running", "sms", "state",
    )  # fmt: skip
    env: WholeTime
    pools: list[SmPool]  # one a partition
    limit_w: float
    clock_cap_hz: float
    known: dict[Running, GpuState]  # states solved under these
    begin: Callable[[Any], None]  # what a granted request does
    crossed: tuple[Queues, ...]  # of kernels that move no bytes, through memory, through the port, through both
    copy_engine: CopyEngine
    hbm: Hbm
    port: LinkPort

    def __init__(self, index: int, model: FluidModel, target: Target, sms: float) -> None:
        self.index = index
        self.model = model
        self.sms = sms
        self.running: list[Entry] = []
        self.state: GpuState | None = None
        self.due_ps = 0  # the first end of what runs, for which an event is scheduled (0: none)
        self.integrated_ps = 0
        self.energy_j = 0.0
        self.aim(*bounds(target, model.gpu.max_clock_hz))

    def aim(self, limit_w: float, clock_cap_hz: float) -> None:
        """Run below a power limit (W) and a clock (Hz) from now on."""
        self.limit_w, self.clock_cap_hz = limit_w, clock_cap_hz
        self.known = self.model.solved(limit_w, clock_cap_hz)
