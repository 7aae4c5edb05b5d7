"""Sizes of what mixes tokens where that is not grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Ranks and head sizes of latent attention; ``q_rank`` 0: queries straight from the width."""

    kv_rank: int
    nope_dim: int
    rope_dim: int
    q_rank: int = 0

    @property
    def cached_dim(self) -> int:
        """Elements a token and layer in the cache: the latent and one rotary key for all heads."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSizes:
    """Mixers with a state: heads of ``head_dim``, each with a state of ``state`` a channel; groups share inputs.

    ``rule``: ``sum`` (Mamba-2 and linear attention: what a token adds is known before), ``delta`` (gated delta rule:
    what it adds depends on the state, solved within a chunk), ``scan`` (Mamba-1: each channel by itself). ``conv`` is
    the length of the convolution before, 0 for none.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int
    rule: Literal["sum", "delta", "scan"] = "sum"
    conv: int = 4

    @property
    def cached_elements(self) -> int:
        """Elements of the state that a sequence keeps in each layer, however long it is."""
        return self.heads * self.head_dim * self.state
