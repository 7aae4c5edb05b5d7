"""How popular experts are: laws and recordings that fix what share of the tokens each expert gets."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from inputs.files import read_text
from inputs.texts import parse_json
from workloads.errors import WorkloadError
from workloads.roots import root_between

Floats = NDArray[np.float64]
# An expert that every token chose has infinite odds; this chance stands for certainty.
CERTAIN = 1.0 - 1e-6
STEEPEST = 10.0  # exponent at which the most popular expert is all but certain
LEAST_LOG_ODDS = 300.0  # of the first over the last expert: far from where floats end


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Odds of the i-th most popular expert ~ i^-exponent; 0 is uniform (``expert_skew`` of the records)."""

    exponent: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GiniTarget:
    """The Zipf law whose expert loads have this Gini coefficient (0 even, 1 all on one expert)."""

    gini: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Busiest:
    """Odds ~ (i + offset)^-exponent, fitted: the busiest expert's share of all rows, and how many experts take 90 %.

    The two figures that routing studies publish; the Zipf-Mandelbrot law meets both.
    """

    share: float
    experts_for_90: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Rows that each expert received, in the model's order of experts; only their proportions count."""

    rows: tuple[float, ...]


Popularity = Zipf | GiniTarget | Busiest | Recorded


def parse_popularity(text: str) -> Popularity:
    """A law by name, or a recording by file (``.json``: a list; ``.csv``: columns expert, rows).

    >>> parse_popularity("gini:0.3")
    GiniTarget(gini=0.3)
    >>> parse_popularity("busiest:0.043,65")
    Busiest(share=0.043, experts_for_90=65)
    """
    kind, _, value = text.partition(":")
    try:
        match kind:
            case "uniform" if not value:
                return Zipf()
            case "zipf" if 0.0 <= float(value) <= STEEPEST:
                return Zipf(exponent=float(value))
            case "gini" if 0.0 <= float(value) < 1.0:
                return GiniTarget(gini=float(value))
            case "busiest":
                share, count = value.split(",")
                if 0.0 < float(share) < 1.0:
                    return Busiest(share=float(share), experts_for_90=int(count))
    except ValueError:
        pass
    if text.endswith((".json", ".csv")):
        return _read_recorded(Path(text))
    raise WorkloadError(
        f"routing = '{text}': give uniform, zipf:EXPONENT, gini:TARGET, busiest:SHARE,EXPERTS_FOR_90_PERCENT, "
        "or a .json or .csv file of rows by expert"
    )


def _read_recorded(path: Path) -> Recorded:
    text = read_text(path, "routing", WorkloadError)
    try:
        rows: Any = (
            parse_json(text, f"routing '{path}': not rows by expert", WorkloadError, one_line=True)
            if path.suffix == ".json"
            else _csv_rows(text)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"routing '{path}': not rows by expert: {error}") from None
    numbers = isinstance(rows, list) and all(isinstance(r, int | float) and not isinstance(r, bool) for r in rows)
    if not numbers or not rows or min(rows) < 0 or not 0 < sum(rows) < np.inf:
        raise WorkloadError(f"routing '{path}': give one number of rows an expert, none negative, not all zero")
    return Recorded(rows=tuple(float(r) for r in rows))


def _csv_rows(text: str) -> list[float]:
    table = sorted((int(row["expert"]), float(row["rows"])) for row in csv.DictReader(text.splitlines()))
    if [expert for expert, _ in table] != list(range(len(table))):
        raise ValueError("column 'expert' must count from 0 without gaps")
    return [rows for _, rows in table]


@lru_cache(maxsize=256)
def log_odds(popularity: Popularity, experts: int, top_k: int) -> tuple[float, ...]:
    """Log odds of each expert at a token's draw of ``top_k`` distinct ones: most popular first, or as recorded."""
    match popularity:
        case Zipf():
            return _logs(_mandelbrot(experts, popularity.exponent, 0.0))
        case GiniTarget():
            return _logs(_mandelbrot(experts, _exponent_of_gini(popularity.gini, experts, top_k), 0.0))
        case Busiest():
            return _logs(_fit_busiest(popularity, experts, top_k))
        case Recorded():
            return _logs(_odds_of_rows(popularity, experts, top_k))
    assert_never(popularity)


def chosen_share(popularity: Popularity, experts: int, top_k: int) -> Floats:
    """Expected share of all rows of each expert, in the order of :func:`log_odds`.

    >>> chosen_share(Zipf(exponent=1.0), 8, 8).round(3).tolist()
    [0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125]
    """
    return _chances(np.exp(np.asarray(log_odds(popularity, experts, top_k))), top_k) / top_k


def gini(loads: Floats) -> float:
    """Gini coefficient of non-negative loads.

    >>> gini(np.array([0.0, 0.0, 0.0, 1.0]))
    0.75
    """
    ordered = np.sort(loads)
    count = len(ordered)
    return float((2 * np.arange(1, count + 1) - count - 1) @ ordered / (count * ordered.sum()))


def _logs(odds: Floats) -> tuple[float, ...]:
    with np.errstate(divide="ignore"):
        return tuple(np.log(odds / odds.sum()).tolist())


def _mandelbrot(experts: int, exponent: float, offset: float) -> Floats:
    return np.asarray(((np.arange(1, experts + 1, dtype=np.float64) + offset) / (1.0 + offset)) ** -exponent)


def _chances(odds: Floats, top_k: int) -> Floats:
    """Chance that a token's ``top_k`` distinct experts include each one.

    An exponential race (what Gumbel top-k is) stopped at the time by which ``top_k`` have arrived on average;
    exact for many experts (Rosen 1972), within 3 % for 8 of 128.
    """
    if top_k >= np.count_nonzero(odds):
        return np.where(odds > 0, top_k / float(np.count_nonzero(odds)), 0.0)
    rates = odds / odds.sum()

    def missing(log_time: float) -> float:
        return float(-np.expm1(-rates * np.exp(log_time)).sum() - top_k)

    return np.asarray(-np.expm1(-rates * np.exp(root_between(missing, -60.0, 60.0 - np.log(rates[rates > 0].min())))))


def _exponent_of_gini(target: float, experts: int, top_k: int) -> float:
    def excess(exponent: float) -> float:
        return gini(_chances(_mandelbrot(experts, exponent, 0.0), top_k)) - target

    return _solve(excess, 0.0, STEEPEST, f"routing = 'gini:{target:g}': {top_k} of {experts} experts reach", target)


def _fit_busiest(popularity: Busiest, experts: int, top_k: int) -> Floats:
    """For each offset the exponent that gives the busiest share; the offset that gives the 90 % count."""
    wanted, count = popularity.share, popularity.experts_for_90
    name = f"routing = 'busiest:{wanted:g},{count}': {top_k} of {experts} experts"
    if not 1.0 / experts < wanted <= CERTAIN / top_k:
        raise WorkloadError(f"{name}: the share lies between 1/{experts} and 1/{top_k}")

    def odds(log_offset: float) -> Floats:
        offset = float(np.exp(log_offset))

        def excess(exponent: float) -> float:
            return float(_chances(_mandelbrot(experts, exponent, offset), top_k)[0]) / top_k - wanted

        steepest = min(STEEPEST * (1.0 + offset), LEAST_LOG_ODDS / np.log((experts + offset) / (1.0 + offset)))
        return _mandelbrot(experts, root_between(excess, 0.0, steepest), offset)

    def beyond(log_offset: float) -> float:
        # Share of the rows that the first `count` experts take, against 90 %: falls as the head widens.
        return float(_chances(odds(log_offset), top_k)[:count].sum()) / top_k - 0.9

    low, high = -6.0, 7.0
    if not 0 < count < experts or beyond(low) * beyond(high) > 0:
        raise WorkloadError(f"{name}: no such law puts 90 % of the rows on {count} experts with that share on one")
    return odds(root_between(beyond, low, high, xtol=1e-6))


def _odds_of_rows(recorded: Recorded, experts: int, top_k: int) -> Floats:
    """The race's rates under which each expert arrives in time as often as it was recorded."""
    if len(recorded.rows) != experts:
        raise WorkloadError(f"routing: recorded rows of {len(recorded.rows)} experts, the model has {experts}")
    rows = np.asarray(recorded.rows)
    chances = rows * (top_k / rows.sum())
    if chances.max() > 1.0 + 1e-9:
        raise WorkloadError(
            f"routing: recorded expert {int(chances.argmax())} has {rows.max():g} rows, more than the "
            f"{rows.sum() / top_k:g} tokens that choose {top_k} experts each"
        )
    return np.asarray(-np.log1p(-np.minimum(chances, CERTAIN)))


def _solve(excess: Callable[[float], float], low: float, high: float, name: str, target: float) -> float:
    if excess(low) >= -1e-12 and target <= 1e-12:
        return low
    if excess(high) < 0.0:
        raise WorkloadError(f"{name} at most {target + excess(high):.2f}")
    return root_between(excess, low, high)
