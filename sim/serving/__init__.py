"""Serving: requests arrive, a scheduler batches them, steps cost what the engine says they cost."""
