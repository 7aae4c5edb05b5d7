"""What a kernel row becomes before it is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Work to repeat: ``launch(i)`` is repetition i; buffers rotate with period ``rotate``."""

    launch: Callable[[int], object]
    rotate: int = 1
    kernels_each: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
