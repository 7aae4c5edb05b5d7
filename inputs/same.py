"""Objects in the keys of caches that are known by which they are, not by what they hold."""

from __future__ import annotations

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
