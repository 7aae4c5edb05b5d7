"""What a step computes, and what it costs: seconds, joules, clock cycles."""

from __future__ import annotations

from typing import Literal, NamedTuple

from inputs.tuples import maker_of

# What a step is made of: all tokens together, the head, the attention of sequences that decode and of a prompt,
# what ranks exchange of prompts' new keys and of what their caches make of them, low-rank adapters, and images.
Part = Literal["shared", "head", "decode", "chunk", "gathered", "combined", "adapters", "images"]


class Cost(NamedTuple):
    """Seconds of a step or a part of one, joules over all GPUs of the group, and SM clock cycles of a mean GPU.

    A tuple: a served run adds up some millions of them.
    """

    time_s: float
    energy_j: float
    cycles: float = 0.0

    @property
    def clock_hz(self) -> float:
        """The mean SM clock."""
        return self.cycles / self.time_s

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]  # of costs, not of tuples
        return cost_of((self[0] + other[0], self[1] + other[1], self[2] + other[2]))

    def toward(self, other: Cost, share: float) -> Cost:
        """The point ``share`` of the way to ``other``."""
        time_s, energy_j, cycles = self
        other_s, other_j, other_cycles = other
        return cost_of(
            (
                time_s + share * (other_s - time_s),
                energy_j + share * (other_j - energy_j),
                cycles + share * (other_cycles - cycles),
            )
        )

    def and_between(self, low: Cost, high: Cost, share: float) -> Cost:
        """``self + low.toward(high, share)`` in one go."""
        time_s, energy_j, cycles = self
        low_s, low_j, low_cycles = low
        high_s, high_j, high_cycles = high
        return cost_of(
            (
                time_s + (low_s + share * (high_s - low_s)),
                energy_j + (low_j + share * (high_j - low_j)),
                cycles + (low_cycles + share * (high_cycles - low_cycles)),
            )
        )


cost_of = maker_of(Cost)
NOTHING = Cost(time_s=0.0, energy_j=0.0)


class Chunk(NamedTuple):
    """A piece of a prompt: ``tokens`` new ones that see ``context`` in all. ``images`` of ``patches`` each are encoded
    for it."""

    tokens: int
    context: int
    images: int = 0
    patches: int = 0


class Batch(NamedTuple):
    """What one step computes: ``decoding`` sequences over ``cached`` tokens in sum, ``longest`` of them in one (0: all
    are alike), and pieces of prompts.

    ``ending`` of the pieces are their prompt's last, whose head yields a first token. ``adapted`` of all tokens ask for
    ``adapters`` low-rank adapters.
    """

    decoding: int = 0
    cached: int = 0
    longest: int = 0
    chunks: tuple[Chunk, ...] = ()
    ending: int = 0
    adapted: int = 0
    adapters: int = 0

    @property
    def images(self) -> dict[int, int]:
        """Images that it encodes, by their patches."""
        found: dict[int, int] = {}
        for chunk in self.chunks:
            if chunk.images:
                found[chunk.patches] = found.get(chunk.patches, 0) + chunk.images
        return found

    @property
    def prompt_tokens(self) -> int:
        """New tokens of prompts."""
        chunks = self[3]
        if len(chunks) < 2:
            return chunks[0][0] if chunks else 0
        return sum([chunk[0] for chunk in chunks])

    def later(self, steps: int) -> Batch:
        """The same sequences, each ``steps`` tokens on."""
        decoding, cached, longest, chunks, ending, adapted, adapters = self
        longest = longest + steps if longest else 0
        return batch_of((decoding, cached + steps * decoding, longest, chunks, ending, adapted, adapters))


batch_of = maker_of(Batch)


class Joules(NamedTuple):
    """What a step's joules are shared out by: those of its parts, and of all."""

    shared: float
    prompts: tuple[float, ...]
    head: float
    whole: float


class StepCost(NamedTuple):
    """The parts of a step's cost; ``shared`` is what all tokens pass through together, ``prompts`` one a piece."""

    shared: Cost
    prompts: tuple[Cost, ...]
    decoding: Cost
    head: Cost

    @property
    def whole(self) -> Cost:
        """Their sum."""
        (
            (time_s, energy_j, cycles),
            prompts,
            (decoding_s, decoding_j, decoding_cycles),
            (head_s, head_j, head_cycles),
        ) = self
        for part_s, part_j, part_cycles in prompts:
            time_s += part_s
            energy_j += part_j
            cycles += part_cycles
        return cost_of(
            (
                time_s + decoding_s + head_s,
                energy_j + decoding_j + head_j,
                cycles + decoding_cycles + head_cycles,
            )
        )

    def joules(self, other: StepCost | None = None, share: float = 0.0) -> Joules:
        """Its joules, or those ``share`` of the way to the ``other`` cost of its batch: as of :meth:`toward`."""
        shared, prompts, decoding, head = self[0][1], [cost[1] for cost in self[1]], self[2][1], self[3][1]
        if other is not None:
            shared += share * (other[0][1] - shared)
            prompts = [own + share * (cost[1] - own) for own, cost in zip(prompts, other[1], strict=True)]
            decoding += share * (other[2][1] - decoding)
            head += share * (other[3][1] - head)
        whole = shared
        for part in (*prompts, decoding, head):
            whole += part
        return Joules(shared, tuple(prompts), head, whole)

    def plus(self, other: StepCost) -> StepCost:
        """The same batch on two stages, or what drafts tokens and what checks them."""
        return StepCost(
            shared=self.shared + other.shared,
            prompts=tuple(own + others for own, others in zip(self.prompts, other.prompts, strict=True)),
            decoding=self.decoding + other.decoding,
            head=self.head + other.head,
        )

    def toward(self, other: StepCost, share: float) -> StepCost:
        """The point ``share`` of the way to the same batch's ``other`` cost."""
        return StepCost(
            shared=self.shared.toward(other.shared, share),
            prompts=tuple([own.toward(others, share) for own, others in zip(self.prompts, other.prompts, strict=True)]),
            decoding=self.decoding.toward(other.decoding, share),
            head=self.head.toward(other.head, share),
        )
