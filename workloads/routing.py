"""Which experts the tokens of a step hit: seeded, so that equal scenarios are equal to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Draws are made for at most this many tokens and scaled: beyond it every expert's share is settled.
MAX_DRAWN_TOKENS = 16384
SEED = 20240601


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Load of one rank's experts: token rows, experts hit, and tiles of 128 rows (each expert padded)."""

    rows: int
    distinct: int
    tiles128: int


@lru_cache(maxsize=1024)
def expert_loads(
    *,
    tokens: int,
    experts: int,
    top_k: int,
    skew: float,
    ranks: int,
    rows_per_rank: tuple[int, ...] | None = None,
) -> tuple[ExpertLoad, ...]:
    """Loads of ``ranks`` equal groups of experts for ``tokens`` tokens that each choose ``top_k`` experts.

    Popularity is proportional to rank^-skew over a seeded order of the experts (skew 0: uniform).
    ``rows_per_rank`` overrides how many rows each rank gets; its experts share them as drawn.
    """
    rng = np.random.default_rng(SEED)
    drawn = min(tokens, MAX_DRAWN_TOKENS)
    weight = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    log_weight = np.log(weight / weight.sum())[rng.permutation(experts)]
    # Gumbel top-k: k distinct experts a token with the given odds.
    noise = log_weight - np.log(-np.log(rng.random((drawn, experts))))
    chosen = np.argpartition(-noise, top_k - 1, axis=1)[:, :top_k]
    counts = np.bincount(chosen.ravel(), minlength=experts) * (tokens / drawn)
    loads = []
    for rank, mine in enumerate(counts.reshape(ranks, experts // ranks)):
        wanted = rows_per_rank[rank] if rows_per_rank is not None else mine.sum()
        rows = mine * (wanted / mine.sum()) if mine.sum() else mine
        hit = rows > 0
        distinct = min(int(hit.sum()), max(round(wanted), 0))
        tiles = np.ceil(rows[hit] / 128).sum()
        loads.append(ExpertLoad(rows=round(wanted), distinct=distinct, tiles128=max(int(tiles), distinct)))
    return tuple(loads)
