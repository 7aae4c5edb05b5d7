"""Serving: requests arrive, a scheduler batches them, steps cost what the engine says they cost."""

from sim.serving.result import ServeResult
from sim.serving.server import serve
from sim.serving.spec import ServeSpec

__all__ = ["ServeResult", "ServeSpec", "serve"]
