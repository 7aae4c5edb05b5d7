"""Paged key/value memory of one replica: blocks of tokens, shared where prompts begin alike."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True, eq=False)
class BlockPool:
    """``blocks`` of ``block_tokens`` tokens. Hashed pieces of prompts stay until their room is needed; sequences that
    begin alike hold them together.

    Blocks are taken in the order in which they were let go, whatever was in them, as vLLM's queue of free blocks does
    (its design page on prefix caching): what was generated keeps prompts from staying as long as they could.

    >>> pool = BlockPool(blocks=10, block_tokens=16)
    >>> pool.take(6), pool.available, pool.take(5)
    (True, 4, False)
    """

    blocks: int
    block_tokens: int
    free: int = field(init=False)
    _held: dict[int, int] = field(default_factory=dict)  # hash -> sequences that use it
    # Hash -> blocks that nobody uses, the longest unused first; under a tuple, blocks of which nothing can be used.
    _idle: OrderedDict[int | tuple[int], int] = field(default_factory=OrderedDict)
    _idle_blocks: int = 0
    _given: int = 0

    def __post_init__(self) -> None:
        self.free = self.blocks

    @property
    def available(self) -> int:
        """Blocks that can be had, forgotten prompts included."""
        return self.free + self._idle_blocks

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` need."""
        return -(-tokens // self.block_tokens)

    def take(self, count: int) -> bool:
        """Take ``count`` blocks, or none of them where there are not as many."""
        if count > self.available:
            return False
        while count > self.free:
            _, freed = self._idle.popitem(last=False)
            self._idle_blocks -= freed
            self.free += freed
        self.free -= count
        return True

    def give(self, count: int) -> None:
        """Let ``count`` private blocks go."""
        if count:
            self._given += 1
            self._idle[(self._given,)] = count
            self._idle_blocks += count

    def knows(self, piece: int) -> bool:
        """True when the hashed piece of a prompt is in memory."""
        return piece in self._held or piece in self._idle

    def matched(self, prefix: tuple[int, ...]) -> int:
        """How many pieces from the start of ``prefix`` are in memory."""
        for number, piece in enumerate(prefix):
            if not self.knows(piece):
                return number
        return len(prefix)

    def hold(self, piece: int) -> None:
        """Use a piece that is in memory."""
        if piece in self._held:
            self._held[piece] += 1
        else:
            self._idle_blocks -= self._idle.pop(piece)
            self._held[piece] = 1

    def publish(self, piece: int) -> bool:
        """Make blocks that the caller has taken and filled a piece that others may use; False where it is known."""
        if self.knows(piece):
            return False
        self._held[piece] = 1
        return True

    def release(self, piece: int, blocks: int) -> None:
        """Stop using a piece; it stays, forgettable, once nobody uses it."""
        left = self._held[piece] - 1
        if left:
            self._held[piece] = left
            return
        del self._held[piece]
        self._idle[piece] = blocks
        self._idle_blocks += blocks
