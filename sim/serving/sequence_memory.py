"""What sequences hold of a replica's memory: blocks of their own, and pieces of beginnings that others may use too."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from sim.serving.inflight import Sequence
from sim.serving.kv import BlockPool
from sim.serving.tiers import CacheTiers


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceMemory:
    """Sequences on the blocks of ``pool``; ``shares``: whole pieces of prompts are kept for others.

    ``tiers`` keep beginnings of prompts outside the GPUs; ``fresh`` are pieces that others may use since somebody last
    looked.
    """

    pool: BlockPool
    shares: bool
    tiers: CacheTiers | None = None
    fresh: list[int] = field(default_factory=list)

    def matched(self, prefix: tuple[int, ...]) -> int:
        """How many pieces from the start of a prompt need not be computed."""
        known = self.pool.matched(prefix)
        return known if self.tiers is None else known + self.tiers.matched(prefix[known:])

    def piece_blocks(self, sequence: Sequence) -> int:
        """Blocks of one piece of its prompt."""
        return sequence.request.block_tokens // self.pool.block_tokens

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that it still needs for so many tokens in all."""
        shared = len(sequence.pieces) * self.piece_blocks(sequence)
        return max(0, self.pool.blocks_for(tokens) - shared - sequence.blocks)

    def hit(self, sequence: Sequence) -> None:
        """Use the pieces of its prompt that are in memory; at least its last token is computed anew."""
        request = sequence.request
        whole = (request.input_tokens - 1) // request.block_tokens
        for piece in request.prefix[: min(whole, self.pool.matched(request.prefix))]:
            self.pool.hold(piece)
            sequence.pieces.append(piece)
        sequence.computed = len(sequence.pieces) * request.block_tokens

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Whole pieces of the first ``computed`` tokens may be used by others; its own blocks hold them.

        Already by others in the step that computes them, as in vLLM: each layer writes all keys before it reads any.
        """
        if not self.shares:
            return
        request = sequence.request
        whole = min(computed, request.input_tokens) // request.block_tokens
        made = self.share(sequence, request.prefix[len(sequence.pieces) : whole])
        if self.tiers is not None:
            self.fresh += made

    def share(self, sequence: Sequence, pieces: Many[int]) -> list[int]:
        """Its own blocks become ``pieces`` that others may use; returns those that were not here yet."""
        size, made = self.piece_blocks(sequence), []
        for piece in pieces:
            sequence.blocks -= size
            if self.pool.publish(piece):
                made.append(piece)
            else:  # another sequence computed the same at the same time: keep one copy
                self.pool.hold(piece)
                self.pool.give(size)
            sequence.pieces.append(piece)
        return made

    def free(self, sequence: Sequence) -> None:
        """It holds nothing any more."""
        self.pool.give(sequence.blocks)  # the end first: a prompt is of use from its beginning on
        for piece in reversed(sequence.pieces):
            self.pool.release(piece, self.piece_blocks(sequence))
        sequence.blocks, sequence.pieces = 0, []
