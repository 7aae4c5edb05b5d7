"""Continuous batching: which sequences the next step computes, and what is left of them after it.

Running sequences all yield one token a step, so that what they hold is counted, not walked through: a step costs
as many operations as it has pieces of prompts and sequences that come or go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sim.serving.cost import Batch, Chunk, batch_of
from sim.serving.images import ImageRoom
from sim.serving.inflight import Limits, PlannedStep, Sequence
from sim.serving.kv import BlockPool
from sim.serving.sequence_memory import SequenceMemory
from sim.serving.tiers import CacheTiers


@dataclass(kw_only=True, slots=True, eq=False)
class Scheduler:
    """First come, first served within a priority; ``left`` hears of every sequence that stops yielding tokens.

    ``peers`` plan other batches of the same replica, in flight beside this one's: they share what waits and what
    prefills, the memory and the seats; each has running sequences of its own.
    """

    limits: Limits
    pool: BlockPool
    memory: SequenceMemory = field(init=False)
    left: Callable[[Sequence], None] = lambda _: None
    joined: Callable[[Sequence], None] = lambda _: None
    step: int = 0
    running: dict[int, Sequence] = field(default_factory=dict)  # those that yield a token a step
    prefilling: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0  # of the running ones, in sum
    preempted: int = 0
    fetch: Callable[[Sequence, tuple[int, ...]], None] = lambda *_: None  # brings pieces back, then calls fetched
    loading: dict[int, Sequence] = field(default_factory=dict)  # those whose pieces are on their way
    _waiting: list[tuple[tuple[int, float, int], Sequence]] = field(default_factory=list)
    _ends: list[tuple[int, int, Sequence]] = field(default_factory=list)  # (step after which it is done, ...)
    _long: list[tuple[int, int, Sequence]] = field(default_factory=list)  # (step less tokens cached, ...), least first
    _grow: list[int] = field(default_factory=list)  # running sequences that need a block, by step modulo block size
    _swapped_tokens: int = 0
    peers: tuple[Scheduler, ...] = ()
    images: ImageRoom | None = None

    def __post_init__(self) -> None:
        self._grow = [0] * self.pool.block_tokens
        self.memory = SequenceMemory(pool=self.pool, shares=self.limits.prefix_caching)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a seat."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """True while any sequence is here."""
        return bool(self.running or self.prefilling or self._waiting) or any(peer.running for peer in self.peers)

    @property
    def seated(self) -> int:
        """Sequences that have a seat."""
        return len(self.running) + len(self.prefilling) + sum(len(peer.running) for peer in self.peers)

    def beside(self) -> Scheduler:
        """One more batch in flight, whose scheduler is told its ``peers`` by whoever asks."""
        return Scheduler(limits=self.limits, pool=self.pool, prefilling=self.prefilling, _waiting=self._waiting)

    def add(self, sequence: Sequence) -> None:
        """A sequence arrives."""
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def drain(self) -> Iterator[Sequence]:
        """Take every sequence out, memory lost: the replica dies. Each will compute what it had anew."""
        for sequence in [*self.running.values(), *self.prefilling]:
            self._evict(sequence)
        while self._waiting:
            sequence = heapq.heappop(self._waiting)[1]
            sequence.kept, sequence.computed = "nowhere", 0
            sequence.target = sequence.request.input_tokens + sequence.generated
            yield sequence
        for sequence in self.loading.values():
            self.memory.free(sequence)
            sequence.computed = 0
            yield sequence
        self.loading.clear()

    def fetched(self, sequence: Sequence, pieces: tuple[int, ...]) -> None:
        """Pieces have come back: they may be used like any others, and ``sequence`` waits for its seat again."""
        if self.loading.pop(sequence.request.number, None) is None:
            return  # taken out meanwhile
        self.memory.share(sequence, pieces)
        self.memory.free(sequence)
        sequence.computed = 0
        self.add(sequence)

    def plan(self) -> PlannedStep:
        """The next step; blocks are taken, sequences preempted and admitted for it."""
        self._make_room()
        if self.images is not None:
            self.images.begin()
        if not (self._waiting or self.prefilling or self._swapped_tokens or self.limits.max_loras):
            batch = batch_of((len(self.running), self.cached_tokens, self._longest(), (), 0, 0, 0))
            return PlannedStep(batch, (), 0)
        budget = self.limits.max_num_batched_tokens - self.limits.checked_tokens * len(self.running)
        pieces: list[tuple[Sequence, int]] = []
        for sequence in self.prefilling:
            if len(self.running) + len(pieces) >= self.limits.batch_seqs:
                break
            if (tokens := self._piece(sequence, budget)) > 0:
                self.memory.publish(sequence, sequence.computed + sequence.under_way + tokens)
                pieces.append((sequence, tokens))
                budget -= tokens
        seated = self._seated_adapters() if self.limits.max_loras else None
        passed = []  # over by others whose adapters have a slot
        while self._waiting and budget > 0 and self._seats(len(pieces)) > 0:
            if seated is not None and not self._has_slot(self._waiting[0][1], seated):
                passed.append(heapq.heappop(self._waiting))
                continue
            admitted = self._admit(budget)
            if admitted is None:
                break
            sequence, tokens = admitted
            if tokens:
                self.memory.publish(sequence, sequence.computed + tokens)
                pieces.append((sequence, tokens))
            budget -= max(tokens, 1)
            if seated is not None:
                seated.add(sequence.request.adapter)
        for entry in passed:
            heapq.heappush(self._waiting, entry)
        if not pieces and not self.running and self.prefilling and not any(peer.running for peer in self.peers):
            idle = [sequence for sequence in self.prefilling if not sequence.under_way]
            if len(idle) == len(self.prefilling):  # prompts that hold each other's blocks
                self._evict(max(idle, key=lambda s: s.order))
                return self.plan()
        swapped, self._swapped_tokens = self._swapped_tokens, 0
        chunks: tuple[Chunk, ...] = ()
        ending = 0
        if pieces:
            chunks = tuple([self._chunk(s, tokens) for s, tokens in pieces])
            ending = sum([s.computed + s.under_way + tokens == s.target for s, tokens in pieces])
            for sequence, tokens in pieces:
                sequence.under_way += tokens
        batch = Batch(len(self.running), self.cached_tokens, self._longest(), chunks, ending)
        if not self.limits.max_loras:
            return PlannedStep(batch, tuple(pieces), swapped)
        asked = [s.request.adapter for s in self.running.values() if s.request.adapter >= 0]
        own = [(s.request.adapter, tokens) for s, tokens in pieces if s.request.adapter >= 0]
        adapters = frozenset((*asked, *(adapter for adapter, _ in own)))
        adapted = self.limits.checked_tokens * len(asked) + sum(tokens for _, tokens in own)
        return PlannedStep(batch._replace(adapted=adapted, adapters=len(adapters)), tuple(pieces), swapped, adapters)

    def _seated_adapters(self) -> set[int]:
        """Adapters (-1: none) of all sequences that may come into one step: of batches in flight together, since a
        prompt that is read in one of them may go on in another."""
        running = [s for one in (self, *self.peers) for s in one.running.values()]
        return {s.request.adapter for s in (*running, *self.prefilling)}

    def _has_slot(self, sequence: Sequence, seated: set[int]) -> bool:
        """Whether the adapter of a sequence that waits is among those ``seated`` (-1: none), or may join them."""
        adapter = sequence.request.adapter
        return adapter < 0 or adapter in seated or len(seated - {-1}) < self.limits.max_loras

    def _chunk(self, sequence: Sequence, tokens: int) -> Chunk:
        """The next ``tokens`` of a prompt."""
        context = sequence.computed + sequence.under_way + tokens
        if self.images is None or not sequence.request.images:
            return Chunk(tokens, context)
        request = sequence.request
        return Chunk(tokens, context, self.images.fresh[request.number], request.image_patches)

    def steady_steps(self) -> int:
        """How many steps like the planned one can follow with nobody coming, going or short of memory."""
        if self.prefilling or not self.running:
            return 1
        until_end = self._ends[0][0] - self.step
        until_full = self.pool.available // len(self.running) * self.pool.block_tokens
        return max(1, min(until_end, until_full))

    def advance(self, plan: PlannedStep, steps: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """``steps`` equal steps are done; returns the sequences that got their first token (or first after losing
        their memory), and those that are done.
        """
        done = self._yield(steps)
        first = []
        for sequence, tokens in plan.pieces:
            sequence.computed += tokens
            sequence.under_way -= tokens
            if self.images is not None:
                self.images.read(sequence)
            if sequence.computed < sequence.target:
                continue
            self.prefilling.remove(sequence)
            sequence.generated += 1
            first.append(sequence)
            if self.limits.prefill_only or sequence.generated >= sequence.request.output_tokens:
                self.memory.free(sequence)
                done.append(sequence)
            else:
                self._start(sequence)
        return first, done

    def _yield(self, steps: int) -> list[Sequence]:
        """Tokens of the running sequences in ``steps`` steps; returns those that are done."""
        if steps > 1:  # the first one's blocks are taken
            rounds, more = divmod(steps - 1, self.pool.block_tokens)
            growing = rounds * len(self.running)
            for number in range(1, more + 1):
                growing += self._grow[(self.step + number) % self.pool.block_tokens]
            took = self.pool.take(growing)
            assert took
        self.step += steps
        self.cached_tokens += steps * len(self.running)
        done = []
        while self._ends and self._ends[0][0] <= self.step:
            _, _, sequence = heapq.heappop(self._ends)
            if self.running.get(sequence.request.number) is sequence and self._end_of(sequence) <= self.step:
                self._stop(sequence)
                self.memory.free(sequence)
                done.append(sequence)
        return done

    def _reach(self, sequence: Sequence) -> int:
        """Tokens that a sequence has room for while it takes a step."""
        return sequence.computed + 1

    def _longest(self) -> int:
        """Tokens cached of the running sequence that has most; all grow alike, so that their order stays."""
        while self._long:
            ahead, number, sequence = self._long[0]
            if self.running.get(number) is sequence and sequence.joined - sequence.computed == ahead:
                return self.step - ahead
            heapq.heappop(self._long)
        return 0

    def _end_of(self, sequence: Sequence) -> int:
        return sequence.joined + sequence.request.output_tokens - sequence.generated

    def _seats(self, pieces: int) -> float:
        """Sequences that may still come into this batch, which holds ``pieces`` of prompts."""
        here = self.limits.batch_seqs - len(self.running) - pieces
        return min(self.limits.max_num_seqs - self.seated, here)

    def _make_room(self) -> None:
        """Blocks for the tokens of running sequences; the last of the lowest priority make room."""
        while not self.pool.take(self._grow[self.step % self.pool.block_tokens]):
            idle = [sequence for sequence in self.prefilling if not sequence.under_way]
            self._evict(max([*self.running.values(), *idle], key=lambda s: s.order))

    def _piece(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt for this step, their blocks taken; 0 where there is no room."""
        reached = sequence.computed + sequence.under_way
        tokens = min(sequence.target - reached, budget)
        if self.images is not None:
            tokens = self.images.cut(sequence, reached, tokens)
        if tokens <= 0:
            return 0
        need = self.memory.missing(sequence, reached + tokens)
        if not self.pool.take(need):
            return 0
        sequence.blocks += need
        if self.images is not None:
            self.images.take(sequence, reached + tokens)
        return tokens

    def _admit(self, budget: int) -> tuple[Sequence, int] | None:
        """The first waiting sequence and its first piece (0 tokens: it comes back from host memory whole, or is sent
        for)."""
        sequence = self._waiting[0][1]
        if sequence.kept != "nowhere":
            need = self.pool.blocks_for(self._reach(sequence))
            if not self.pool.take(need - sequence.blocks):  # less what it holds already
                return None
            heapq.heappop(self._waiting)
            self._swapped_tokens += sequence.computed if sequence.kept == "host" else 0
            sequence.blocks, sequence.kept = need, "nowhere"
            self._start(sequence, grown=True)
            return sequence, 0
        if self.limits.prefix_caching:
            self.memory.hit(sequence)
            if self.memory.tiers is not None and self._sends_for(sequence, self.memory.tiers):
                heapq.heappop(self._waiting)
                return sequence, 0
        tokens = self._piece(sequence, budget)
        if tokens == 0:
            self.memory.free(sequence)
            sequence.computed = 0
            return None
        heapq.heappop(self._waiting)
        sequence.hit_tokens += sequence.computed
        self.prefilling.append(sequence)
        return sequence, tokens

    def _sends_for(self, sequence: Sequence, tiers: CacheTiers) -> bool:
        """Send for what is kept outside of what comes next in its prompt, once, where there is room for it."""
        request, known = sequence.request, len(sequence.pieces)
        if sequence.looked_up:
            return False
        whole = request.prefix[: (request.input_tokens - 1) // request.block_tokens]
        tiers.touch(whole)
        pieces = whole[known : known + tiers.matched(whole[known:])]
        need = len(pieces) * self.memory.piece_blocks(sequence)
        if pieces and not self.pool.take(need):
            return False
        sequence.looked_up = True
        if pieces:
            sequence.blocks += need
            self.loading[request.number] = sequence
            self.fetch(sequence, pieces)
        return bool(pieces)

    def _start(self, sequence: Sequence, *, grown: bool = False) -> None:
        """From the next step on it yields a token a step. ``grown``: the block of its next token is taken."""
        sequence.joined = self.step
        self.running[sequence.request.number] = sequence
        self.cached_tokens += sequence.computed
        heapq.heappush(self._ends, (self._end_of(sequence), sequence.request.number, sequence))
        if self.limits.tells_longest:
            heapq.heappush(self._long, (sequence.joined - sequence.computed, sequence.request.number, sequence))
        self._grow[(self.step - sequence.computed) % self.pool.block_tokens] += 1
        if grown:  # counted when it stops, like every block that running took
            sequence.blocks -= sequence.computed % self.pool.block_tokens == 0
        self.joined(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """It yields no more tokens (done, or preempted)."""
        steps = self.step - sequence.joined
        phase = (sequence.joined - sequence.computed) % self.pool.block_tokens
        before = self.pool.blocks_for(sequence.computed)
        sequence.computed += steps
        sequence.generated += steps
        sequence.blocks += self.pool.blocks_for(sequence.computed) - before
        self._grow[phase] -= 1
        self.cached_tokens -= sequence.computed
        sequence.joined = -1
        del self.running[sequence.request.number]
        self.left(sequence)

    def _evict(self, sequence: Sequence) -> None:
        """It gives its memory up and waits again: to be computed anew, or brought back from host memory."""
        swap = self.limits.preemption == "swap" and sequence.joined >= 0
        if sequence.joined >= 0:
            self._stop(sequence)
        else:
            self.prefilling.remove(sequence)
        self.memory.free(sequence)
        if self.images is not None:
            self.images.forget(sequence)
        sequence.under_way = 0
        self.preempted += 1
        sequence.preemptions += 1
        if swap:
            sequence.kept = "host"
            self._swapped_tokens += sequence.computed
        else:
            sequence.computed = 0
            sequence.target = sequence.request.input_tokens + sequence.generated
        self.add(sequence)
