"""Whether the engine that runs was compiled (docs/compiled.md)."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def engine_kind() -> str:
    """``compiled`` or ``pure Python``, by the file of the engine's core, which is not loaded.

    >>> engine_kind() in ("compiled", "pure Python")
    True
    """
    spec = find_spec("sim.engine.core")
    file = spec.origin if spec is not None else None
    return "compiled" if file is not None and file.endswith(tuple(EXTENSION_SUFFIXES)) else "pure Python"
