"""The queue of a resource whose requests have keys."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import Any


class Waiting(list[Any]):
    """SimPy's put queue in the order of the requests' keys."""

    def append(self, item: Any) -> None:
        """Put a request in its place."""
        if not self or self[-1].key <= item.key:
            super().append(item)
        else:
            insort(self, item, key=by_key)


by_key = attrgetter("key")
