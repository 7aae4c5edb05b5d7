"""Seeded routing of tokens to experts, and the counts that a grouped GEMM record carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.errors import HardwareError

Counts = NDArray[np.int64]
# Qwen3-30B-A3B, whose experts all grouped records are about.
EXPERTS, TOP_K = 128, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """Rows each expert of one rank received; ``token`` is the source token of each row, expert by expert."""

    rows_per_expert: Counts
    token: Counts

    @property
    def rows(self) -> int:
        """Rows of all the rank's experts."""
        return int(self.rows_per_expert.sum())

    def facts(self) -> dict[str, int]:
        """The routing counts of a ``grouped_gemm`` record."""
        return {
            "rows": self.rows,
            "distinct": int((self.rows_per_expert > 0).sum()),
            "max_rows": int(self.rows_per_expert.max()),
            "tiles128": int((-(-self.rows_per_expert // 128)).sum()),
            "tiles64": int((-(-self.rows_per_expert // 64)).sum()),
            "tiles256": int((-(-self.rows_per_expert // 256)).sum()),
        }


@lru_cache(maxsize=256)
def draw_routing(
    *, tokens: int, experts: int, top_k: int, skew: float, own: range | None = None, seed: int = 0
) -> RoutedRows:
    """Draw ``top_k`` distinct experts a token, probability ~ rank^-skew; keep a rank's ``own`` experts (default all).

    Expert popularity is shuffled once so that a rank's slice is a fair sample.

    >>> draw_routing(tokens=64, experts=8, top_k=8, skew=0.0).facts()
    {'rows': 512, 'distinct': 8, 'max_rows': 64, 'tiles128': 8, 'tiles64': 8, 'tiles256': 8}
    """
    if not 0 < top_k <= experts:
        raise HardwareError(f"top_k = {top_k}: a token needs between 1 and experts = {experts} of them")
    own = range(experts) if own is None else own
    generator = np.random.default_rng(seed)
    weight = -skew * np.log(np.arange(1, experts + 1, dtype=np.float64))
    generator.shuffle(weight)
    # Adding Gumbel noise to log-probabilities and taking the largest draws without replacement.
    noisy = weight + generator.gumbel(size=(tokens, experts))
    chosen = np.argpartition(-noisy, top_k - 1, axis=1)[:, :top_k]
    token = np.repeat(np.arange(tokens, dtype=np.int64), top_k)
    expert = chosen.reshape(-1)
    kept = (expert >= own.start) & (expert < own.stop)
    token, expert = token[kept], expert[kept]
    order = np.argsort(expert, kind="stable")
    rows_per_expert = np.bincount(expert - own.start, minlength=len(own)).astype(np.int64)
    return RoutedRows(rows_per_expert=rows_per_expert, token=token[order])


def tiles256_of(row: Mapping[str, Any]) -> int:
    """Tiles of 256 rows of a ``grouped_gemm`` record; early records lack them, but their routing can be drawn again."""
    if "tiles256" in row:
        return int(row["tiles256"])
    return _drawn_again(row).facts()["tiles256"]


def rows_beyond128_of(row: Mapping[str, Any]) -> float:
    """Rows that experts of a ``grouped_gemm`` record have beyond their first 128: of its routing, drawn again.

    A few early records had draws of their own (their counts differ from the one made here): there all padding is
    taken to lie in the last tiles.
    """
    drawn = _drawn_again(row)
    if (drawn.rows, drawn.facts()["tiles128"]) == (row["rows"], row["tiles128"]):
        return float(np.maximum(drawn.rows_per_expert - 128, 0).sum())
    return float(max(row["rows"] - 128 * row["distinct"], 0))


def _drawn_again(row: Mapping[str, Any]) -> RoutedRows:
    return draw_routing(tokens=row["tokens"], experts=EXPERTS, top_k=TOP_K, skew=row["skew"], own=range(row["experts"]))
