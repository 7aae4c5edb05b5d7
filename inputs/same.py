"""Keys of caches: objects known by which they are, not by what they hold, or by a key that says enough of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Held = TypeVar("Held")


class Same(Generic[Held]):
    """Equal where it holds the same object, which lives as long as a cache has it in a key.

    >>> one, other = [1], [1]
    >>> Same(one) == Same(one), Same(one) == Same(other)
    (True, False)
    """

    __slots__ = ("held",)

    def __init__(self, held: Held) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held


class Keyed(Generic[Held]):
    """What a cached function works with, known to its cache by a ``key`` from which its result follows.

    >>> Keyed(("llama3-8b", 4), [1]) == Keyed(("llama3-8b", 4), [2])
    True
    """

    __slots__ = ("_hash", "held", "key")

    def __init__(self, key: Hashable, held: Held) -> None:
        self.key, self.held = key, held
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.key == other.key
