"""Which experts the tokens of a step hit: seeded, so that equal scenarios are equal to the byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from workloads.balance import Placement, balanced_placement, contiguous_placement
from workloads.popularity import Popularity, Recorded, Zipf, chosen_share, log_odds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Draws are made for at most this many tokens and scaled: beyond it every expert's share is settled.
MAX_DRAWN_TOKENS = 16384
# Tokens are drawn in blocks of so many: those of fewer tokens are the first of those of more, drawn once.
DRAWN_AT_ONCE = 256
SEED = 20240601
# Where every token takes an expert its rows do not vary.
LEAST_VARIANCE = 1e-6
# Heights of tiles below 128 rows that kernels of serving engines have, and of all: each twice the one before.
SMALL_TILES = (16, 32, 64)
TILES = (*SMALL_TILES, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens choose experts, and where experts live.

    ``replicas`` None keeps experts in order, an equal run of them on each rank. A number adds that many copies of
    the most loaded experts and places all of them by expected load, as expert-parallel load balancers do.
    """

    popularity: Popularity = field(default_factory=Zipf)
    seed: int = SEED
    replicas: int | None = None

    @property
    def slots_added(self) -> int:
        """Copies beyond one of each expert."""
        return self.replicas or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A router: ``top_k`` of ``experts``, among the best ``top_groups`` of ``groups`` where it has groups."""

    experts: int
    top_k: int
    groups: int = 0
    top_groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Load of one rank's experts: token rows, experts hit, tiles of 128 and of 256 rows (each expert padded).

    ``rows_beyond128`` are those that an expert has beyond its first 128, over all experts. Tiles and these rows are
    means over draws around the one drawn: which experts just pass a tile's edge is chance. ``small_tiles`` are those of
    16, 32 and 64 rows.
    """

    rows: int
    distinct: int
    tiles128: float
    tiles256: float
    rows_beyond128: float
    small_tiles: tuple[float, float, float] = (0.0, 0.0, 0.0)


@lru_cache(maxsize=1024)
def expert_loads(
    *,
    tokens: int,
    choice: Choice,
    routing: Routing,
    ranks: int,
    rows_per_rank: tuple[int, ...] | None = None,
) -> tuple[ExpertLoad, ...]:
    """Loads of ``ranks`` equal groups of expert slots for ``tokens`` tokens that each choose experts.

    One seeded draw (:func:`busiest_spread` says how much draws differ). Laws of popularity run over a seeded order
    of the experts. ``rows_per_rank`` overrides how many rows each rank gets; its experts share them as drawn.
    """
    drawn = min(tokens, MAX_DRAWN_TOKENS)
    rows_drawn, order = _draw(drawn, choice, routing.popularity, routing.seed)
    counts = rows_drawn * (tokens / drawn)
    placement = _placement(routing, choice, order, ranks)
    loads = []
    for rank, mine in enumerate(placement.rows_by_rank(counts)):
        wanted = rows_per_rank[rank] if rows_per_rank is not None else mine.sum()
        rows = mine * (wanted / mine.sum()) if mine.sum() else mine
        hit = rows > 0
        distinct = min(int(hit.sum()), max(round(wanted), 0))
        beyond = _mean_beyond(rows[hit], tokens, 128)
        tiles = [round(max(mean, distinct), 3) for mean in _mean_tiles(rows[hit], tokens)]
        loads.append(
            ExpertLoad(
                rows=round(wanted),
                distinct=distinct,
                tiles128=tiles[3],
                tiles256=tiles[4],
                rows_beyond128=round(beyond, 3),
                small_tiles=(tiles[0], tiles[1], tiles[2]),
            )
        )
    return tuple(loads)


def _spread(rows: Floats, tokens: int) -> Floats:
    """Standard deviation of each expert's rows over draws: binomial, each token takes it or does not."""
    return np.sqrt(np.maximum(rows * (1.0 - rows / tokens), LEAST_VARIANCE))


def _mean_tiles(rows: Floats, tokens: int) -> list[float]:
    """Tiles of each height, each expert's padded, on average over draws (the binomial by its normal limit)."""
    if not rows.size:
        return [0.0] * len(TILES)
    spread = _spread(rows, tokens)
    most = int((rows + 6.0 * spread).max())
    edges = TILES[0] * np.arange(1, (most // TILES[-1] + 1) * (TILES[-1] // TILES[0]) + 1)
    beyond = _normal_share((rows[:, None] - edges - 0.5) / spread[:, None])
    # Edges of taller tiles are among those of the lowest. In one piece their sums do not depend on the others.
    every = ((height // TILES[0], most // height) for height in TILES)
    return [
        len(rows) + float(np.ascontiguousarray(beyond[:, step - 1 :: step][:, :count]).sum()) for step, count in every
    ]


def _mean_beyond(rows: Floats, tokens: int, height: int) -> float:
    """Rows beyond each expert's first ``height``, on average over draws."""
    spread = _spread(rows, tokens)
    at = (rows - height) / spread
    return float((spread * (at * _normal_share(at) + np.exp(-0.5 * at**2) / math.sqrt(2.0 * math.pi))).sum())


def _normal_share(deviations: Floats) -> Floats:
    """Share of a normal distribution below so many standard deviations: 0 or 1 beyond nine of them (to 1e-19).

    The function of scipy.special takes as long to import as a run.
    """
    share = (deviations > 0.0).astype(np.float64)
    near = np.abs(deviations) < 9.0
    share[near] = [0.5 * math.erfc(x) for x in (-math.sqrt(0.5) * deviations[near]).tolist()]
    return share


@lru_cache(maxsize=256)
def _draw(tokens: int, choice: Choice, popularity: Popularity, seed: int) -> tuple[Ints, Ints]:
    """Rows of each expert in one draw of ``tokens`` tokens, and the place in the law that each expert took."""
    whole, rest = divmod(tokens, DRAWN_AT_ONCE)
    rows = np.zeros(choice.experts, dtype=np.int64)
    for number in range(whole):
        rows += _block(number, choice, popularity, seed)[1]
    if rest:
        rows += np.bincount(_block(whole, choice, popularity, seed)[0][:rest].ravel(), minlength=choice.experts)
    return rows, _order(popularity, choice.experts, np.random.default_rng(seed))


@lru_cache(maxsize=256)
def _block(number: int, choice: Choice, popularity: Popularity, seed: int) -> tuple[NDArray[np.int16], Ints]:
    """The experts that each token of a block of a draw chooses, and the rows of each expert."""
    bits = np.random.PCG64(seed)
    rng = np.random.Generator(bits)
    order = _order(popularity, choice.experts, rng)
    log_weight = np.asarray(log_odds(popularity, choice.experts, choice.top_k))[order]
    bits.advance(number * DRAWN_AT_ONCE * choice.experts)  # a number takes one step
    # Gumbel top-k: k distinct experts a token with the given odds.
    noise = log_weight - np.log(-np.log(rng.random((DRAWN_AT_ONCE, choice.experts))))
    if choice.groups:
        noise = _best_groups(noise, choice)
    chosen = np.argpartition(-noise, choice.top_k - 1, axis=1)[:, : choice.top_k]
    return chosen.astype(np.int16), np.bincount(chosen.ravel(), minlength=choice.experts)


@lru_cache(maxsize=1024)
def busiest_spread(
    *, tokens: int, choice: Choice, routing: Routing, ranks: int, seeds: int = 256
) -> tuple[float, float, float]:
    """Least, mean and largest of "rows of the busiest rank over the mean rank's" among ``seeds`` draws.

    Draws are binomial around each expert's expected share, so that no tokens need to be drawn (groups left out).
    """
    rng = np.random.default_rng([routing.seed, seeds])
    chance = np.minimum(chosen_share(routing.popularity, choice.experts, choice.top_k) * choice.top_k, 1.0)
    chances = np.tile(chance, (seeds, 1))
    if routing.replicas is None and not isinstance(routing.popularity, Recorded):
        chances = rng.permuted(chances, axis=1)  # a balancer places by load: the order of the experts is no matter
    rows = rng.binomial(tokens, chances) @ _placement(routing, choice, np.arange(choice.experts), ranks).shares
    ratios = rows.max(axis=1) / np.maximum(rows.mean(axis=1), 1e-9)
    return float(ratios.min()), float(ratios.mean()), float(ratios.max())


def _order(popularity: Popularity, experts: int, rng: np.random.Generator) -> Ints:
    """Which place in the law each expert takes; a recording names its experts itself."""
    return np.arange(experts) if isinstance(popularity, Recorded) else rng.permutation(experts)


def _best_groups(noise: Floats, choice: Choice) -> Floats:
    """Keep the experts of each token's best groups; a group counts by its two best (arXiv 2412.19437, 2.1.2)."""
    grouped = noise.reshape(len(noise), choice.groups, -1)
    score = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argpartition(-score, choice.top_groups - 1, axis=1)[:, : choice.top_groups]
    keep = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(keep, best, True, axis=1)
    return np.where(keep[:, :, None], grouped, -np.inf).reshape(noise.shape)


def _placement(routing: Routing, choice: Choice, order: Ints, ranks: int) -> Placement:
    if routing.replicas is None:
        return contiguous_placement(choice.experts, ranks)
    # A balancer knows how experts are loaded in the long run, not what the tokens of this step will choose.
    expected = chosen_share(routing.popularity, choice.experts, choice.top_k)[order]
    return balanced_placement(tuple(expected.tolist()), routing.replicas, ranks)
