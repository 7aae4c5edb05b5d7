"""The SMs of one GPU, or of one partition of it: a SimPy resource granted block by block.

A kernel asks for SMs for all its blocks. Requests are served by priority, then by the time at which they were made; the
first that gets nothing keeps the others waiting. A kernel starts on fewer SMs than it asks for; its other blocks join
in before kernels that asked later begin, or, where each block has tiles of its own, queue as a request of their own
(:mod:`sim.engine.resources.tiles`). Kernels of short blocks give their SMs to requests of higher priority at once.
While a request waits, SMs that a kernel's last round of blocks does not need are released early. The pool arbitrates
once an instant (:mod:`sim.engine.resources.arbitration`).

>>> from simpy import Environment
>>> env = Environment()
>>> pool = SmPool(env, 132)
>>> def kernel(name, sms, lasts, priority=0):
...     blocks = pool.request(sms, priority=priority)
...     yield blocks
...     print(f"{env.now} {name} starts on {blocks.held:.0f}")
...     yield env.timeout(lasts)
...     yield pool.release(blocks)
>>> for one in (kernel("product", 132, 10), kernel("copy", 20, 5), kernel("all-reduce", 32, 5, priority=-1)):
...     process = env.process(one)
>>> env.run()
0 all-reduce starts on 32
0 product starts on 100
5 copy starts on 20
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Self

from simpy.core import Environment
from simpy.events import NORMAL

from sim.engine.resources.arbitration import Arbitrated, Ask, Give, Moment, Rounds
from sim.engine.resources.grid import Grid, Progress, room
from sim.engine.resources.tiles import WHOLE, Part, Split, begin_late, last_round, split_of
from sim.engine.resources.waiting import Waiting, by_key


class Blocks(Ask):
    """A kernel's request for SMs: fires when its first blocks start.

    ``held`` SMs are out of the pool, ``sms`` set the rate: more than are held once the last round has released some.
    Blocks of a kernel that was recorded with the others beside it start ``at_once``: on what is free, even on nothing.
    ``part`` and ``fill`` (see it) are those of blocks that started when others of their kernel did not.
    """

    progress: Progress | None
    split: Split | None = None
    at_once = False
    sms = 0.0
    held = 0.0
    part: Part
    fill = 1.0
    tail_due: int | float = -1  # when SMs are released early

    def __init__(self, pool: Arbitrated, grid: Grid, key: tuple[float, ...], wanted: float) -> None:
        self.grid = grid
        self.key = key
        self.wanted = wanted
        self.progress, self.part = None, WHOLE
        super().__init__(pool)

    def thin(self, rounds: int) -> float:  # noqa: ARG002 - kernels of the engine know
        """Least time of the last of ``rounds``, with few tiles, as a share of a round's."""
        return 1.0

    def late(self, wanted: float) -> Self:
        """A request for ``wanted`` SMs more, for blocks of the same kernel."""
        return type(self)(self.resource, self.grid, self.key, wanted)


class Return(Give):
    """A release of the SMs of ``blocks``, all at the end of their kernel, or all but ``keep``."""

    __slots__ = ("_ok", "_value", "blocks", "callbacks", "env", "keep", "resource")

    def __init__(self, pool: Arbitrated, blocks: Blocks, keep: float | None = None) -> None:
        self.env = pool._env  # what Give does, in one go
        self.callbacks = self._value = None
        self._ok = True
        self.resource = pool
        self.blocks = blocks
        self.keep = keep
        pool._do_get(self)


class SmPool(Arbitrated):
    """SMs with block-level grants; see the module docstring."""

    PutQueue: ClassVar[Any] = Waiting

    def __init__(self, env: Environment, capacity: float, rounds: Rounds | None = None, place: int = 0) -> None:
        super().__init__(env, capacity, rounds, place)
        self.free = float(capacity)
        self.scattered = 0.0  # free SMs beside a product's clusters, no two pairs of one GPC
        self.loose = False  # some free SMs were released by the last round of a product in clusters
        self.users: list[Blocks] = []
        self.on_change: Callable[[], None] = nothing  # after an arbitration with a request left, or a grown one
        self.rushed = False  # some requests start at once, on whatever is free
        self._late: list[Blocks] = []
        self._partial = False  # a kernel may run on fewer SMs than it asked for, and grow

    @property
    def partial(self) -> bool:
        """Whether a kernel may run on fewer SMs than it asked for."""
        return self._partial

    def request(self, sms: float, *, priority: float = 0) -> Blocks:
        """Ask for ``sms`` SMs for blocks that join in as they get them."""
        return Blocks(self, Grid(sms=sms), (priority, self._env.now), sms)

    def release(self, blocks: Blocks) -> Return:
        """The kernel has ended: its SMs go back."""
        return Return(self, blocks)

    # -- SimPy's two methods ----------------------------------------------------------------------------------

    def _do_put(self, event: Blocks) -> bool:
        """Start the request's blocks on free SMs; False, and no later request is looked at, where there are none."""
        grid = event.grid
        give = wanted = event.wanted
        if wanted > self.free:
            self._displace(event)
        if wanted > self.free or self.scattered or self.loose:
            give = self._room(event)
        if give <= 0.0:
            if event.at_once:
                self._start_on_nothing(event)
            return event.at_once
        if give < wanted:
            if not grid.whole:
                self._partial = True
            else:
                if event.split is None:
                    event.split = split_of(event)
                self._late.append(event)
        self.free -= give
        event.held = event.sms = give
        self.users.append(event)
        if grid.cluster > 1 and not grid.collective:
            self.scattered = self.free
        if event.split is not None:
            event.split.join(event, int(self._env._now))
        event.succeed()
        return True

    def _start_on_nothing(self, event: Blocks) -> None:
        event.wanted = event.held = event.sms = 0.0
        event.split = None
        self.users.append(event)
        event.succeed()

    def _do_get(self, event: Return) -> bool:
        """Take SMs back."""
        blocks = event.blocks
        if event.keep is None:
            self.free += blocks.held
            if blocks.held:
                self.scattered, self.loose = 0.0, False
            blocks.held = 0.0
            self.users.remove(blocks)
        else:
            self.free += blocks.held - event.keep
            blocks.held = event.keep
            self.loose = self.loose or blocks.grid.cluster > 1
        if not self.asked and (self.put_queue or self._partial):
            self.rounds.ask(self)
        return True

    # -- arbitration ------------------------------------------------------------------------------------------

    def _trigger_put(self, _: Any) -> None:
        if self.put_queue or self._partial:
            self.rounds.ask(self)

    def arbitrate(self) -> None:
        """Serve the waiting in order; then blocks of running kernels that have waited for SMs start on what is left."""
        grew = False
        if self.put_queue:
            # Further blocks of kernels that have begun go before those of kernels that asked later.
            first = self.put_queue[0]
            if self._partial:
                tight = self.scattered or len(self.put_queue) > 1 or first.wanted > self.free
                grew = self._grow([u for u in self.users if (tight if u.grid.collective else u.key < first.key)])
            queue = self.put_queue
            while queue and self._do_put(queue[0]):  # SimPy's loop where nothing behind a refused request is looked at
                del queue[0]
            for event in [request for request in queue if request.at_once] if self.rushed else ():
                self._do_put(event)
                queue.remove(event)
            if self._late:
                self._queue_late()
        if self._partial and self.free > 0.0:
            grew = self._grow(self.users) or grew
            self._partial = any(user.held < user.wanted for user in self.users)
        if grew or self.put_queue:
            self.on_change()

    def _queue_late(self) -> None:
        """Blocks of kernels that begin on part of their SMs queue as requests of their own, from the next time on."""
        late, self._late = self._late, []
        for event in late:
            rest = event.late(event.wanted - event.held)
            event.wanted = event.held
            rest.split = event.split
            assert event.split is not None
            event.split.parts += 1

    def _room(self, blocks: Blocks) -> float:
        """SMs that a kernel begins with now: all it wants, else what whole clusters of its blocks can use."""
        free, grid = self.free, blocks.grid
        if grid.collective:
            return self._more(blocks)
        if blocks.wanted <= free:
            return blocks.wanted
        return free - free % (grid.sms_per_block * grid.cluster)

    def _more(self, blocks: Blocks) -> float:
        """SMs that further blocks of a kernel can start on; a collective's run in turns where few are free."""
        want, grid = blocks.wanted - blocks.held, blocks.grid
        if not grid.collective:
            return min(want, self.free)
        return room(grid, want, self.free, scattered=self.scattered, loose=self.loose)

    def _grow(self, users: Iterable[Blocks]) -> bool:
        """Grant free SMs to waiting blocks of running kernels."""
        grew = False
        waiting = [user for user in users if user.held < user.wanted]
        for blocks in sorted(waiting, key=by_key) if len(waiting) > 1 else waiting:
            more = self._more(blocks)
            if more > 0.0 and blocks.held == blocks.sms:
                self.free -= more
                if blocks.grid.collective and blocks.progress is not None:
                    begin_late(blocks.progress, blocks.held / blocks.wanted, int(self._env.now))
                blocks.held = blocks.sms = blocks.held + more
                grew = True
        return grew

    def _displace(self, request: Blocks) -> None:
        """Kernels of short blocks and lower priority give their SMs to ``request``, all but one block's."""
        for victim in self.users:
            grid = victim.grid
            if grid.short and victim.key[0] > request.key[0] and self.free < request.wanted:
                take = min(victim.held - grid.sms_per_block, request.wanted - self.free)
                if take > 0.0:
                    victim.held = victim.sms = victim.held - take
                    self.free += take
                    self._partial = True

    # -- tails ------------------------------------------------------------------------------------------------

    def arm_tails(self, now: int | float) -> None:
        """A request waits: schedule the release of SMs that the last round of each running kernel does not need."""
        for blocks in self.users:
            progress = blocks.progress
            if not blocks.grid.whole or progress is None or progress.rate == 0.0 or blocks.held < blocks.sms:
                continue
            last, needed = last_round(blocks.grid, blocks.sms, blocks.part, blocks.split)
            if needed >= blocks.held:
                continue
            left = progress.left - progress.rate * (now - progress.updated_ps) - last
            due = now + max(1, math.ceil(left / progress.rate))
            if due < progress.due_ps and due != blocks.tail_due:
                blocks.tail_due = due
                tails = self.rounds.tails
                tail = tails.get(due)
                if tail is None:
                    tail = tails[due] = Moment(self._env, [], NORMAL, due - now)
                tail.callbacks.append(partial(self._on_tail, blocks))

    def _on_tail(self, blocks: Blocks, _: Moment) -> None:
        """A kernel's last round begins, unless its rate has changed since."""
        now = self._env.now
        self.rounds.tails.pop(now, None)
        if blocks.tail_due == now and blocks in self.users:
            blocks.tail_due = -1
            Return(self, blocks, last_round(blocks.grid, blocks.sms, blocks.part, blocks.split)[1])


def nothing(*_: object) -> None:
    """No one is told."""
