"""Requests: when each arrives, how many tokens it brings and wants; from laws or from recorded traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

import numpy as np

Law = Literal["poisson", "gamma", "constant"]
# More than any of the public files holds (BurstGPT: 1.4 million), and what a few hundred MB can.
REQUESTS_LIMIT, HASHES_LIMIT = 2_000_000, 20_000_000
TOKENS_LIMIT = 10**9  # of one request
TIME_LIMIT_S = 10**10  # past any date
PRIORITY_LIMIT = 1 << 53
# Mooncake traces hash blocks of 512 tokens (arXiv 2407.00079).
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. ``prefix`` are hashes of its prompt's blocks of ``block_tokens``, for prefix caching.

    A higher ``priority`` goes first.
    """

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    priority: int = 0
    adapter: int = -1  # the low-rank adapter that it asks for; -1: none
    images: int = 0  # before its text,
    image_size: tuple[int, int] | None = None  # each of so many pixels across and down (None: as the model's usual one)
    image_tokens: int = 0  # and so many of its tokens,
    image_patches: int = 0  # made of so many by the encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests in order of arrival, and how many more a file holds that got no output token."""

    requests: list[Request]
    unanswered: int = 0
    adapters: tuple[str, ...] | None = None  # names of those that a file's requests ask for, by number; None: no column


def arrivals(law: Law, *, rate_per_s: float, count: int, burstiness: float = 4.0, seed: int = 0) -> list[float]:
    """``count`` arrival times (s) at ``rate_per_s`` on average.

    ``burstiness`` is the squared coefficient of variation of gamma gaps: 1 is Poisson, more is burstier.

    >>> arrivals("constant", rate_per_s=4.0, count=3)
    [0.25, 0.5, 0.75]
    """
    rng = np.random.default_rng(seed)
    match law:
        case "poisson":
            gaps = rng.exponential(1.0 / rate_per_s, count)
        case "gamma":
            gaps = rng.gamma(1.0 / burstiness, burstiness / rate_per_s, count)
        case "constant":
            gaps = np.full(count, 1.0 / rate_per_s)
        case _:
            assert_never(law)
    return [float(at) for at in np.cumsum(gaps)]


def lengths(mean: int, *, count: int, spread: float, seed: int) -> list[int]:
    """Token counts: all ``mean``, or lognormal about that mean with coefficient of variation ``spread``."""
    if spread == 0.0:
        return [mean] * count
    sigma2 = np.log1p(spread**2)
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma2 / 2, np.sqrt(sigma2), count)
    return [max(1, round(float(value))) for value in drawn]


def checked_popularity(law: str) -> str:
    """A law by which requests choose adapters, as it is."""
    _exponent(law)
    return law


def _exponent(law: str) -> float:
    """Of Zipf's law; 0: all alike."""
    name, _, exponent = law.partition(":")
    try:
        found = {"uniform": 0.0 if not exponent else -1.0, "zipf": float(exponent or "nan")}[name]
    except (KeyError, ValueError):
        found = -1.0
    if not 0 <= found <= 10:
        raise ValueError("give uniform, or zipf:S with an exponent from 0 to 10")
    return found


def with_adapters(requests: Sequence[Request], *, count: int, law: str, share: float, seed: int) -> list[Request]:
    """``share`` of the requests ask for one of ``count`` adapters, the k-th as often as 1 / k**S in ``zipf:S``.

    >>> asked = with_adapters(made([0.0] * 4, [9] * 4, [9] * 4), count=2, law="uniform", share=1.0, seed=0)
    >>> [request.adapter for request in asked]
    [1, 0, 0, 0]
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, count + 1) ** -_exponent(law)
    chosen = rng.choice(count, size=len(requests), p=weights / weights.sum()).tolist()
    asks = (rng.random(len(requests)) < share).tolist()
    return apart(
        replace(one, adapter=adapter if ask else -1) for one, adapter, ask in zip(requests, chosen, asks, strict=True)
    )


def apart(requests: Iterable[Request]) -> list[Request]:
    """Prompts that begin alike have another cache under another adapter: their hashes are made different."""
    found = list(requests)
    ways = 2 + max((one.adapter for one in found), default=-1)
    return [
        replace(one, prefix=tuple([ways * piece + one.adapter + 1 for piece in one.prefix])) if one.prefix else one
        for one in found
    ]


def scaled(requests: Iterable[Request], *, time: float = 1.0, length: float = 1.0) -> list[Request]:
    """The same traffic with arrival times and token counts multiplied; a shortened prompt keeps its first blocks."""
    return [
        replace(
            r,
            arrival_s=r.arrival_s * time,
            input_tokens=(tokens := max(1, round(r.input_tokens * length))),
            output_tokens=max(1, round(r.output_tokens * length)),
            prefix=r.prefix[: -(-tokens // r.block_tokens)],
        )
        for r in requests
    ]


def made(times: Sequence[float], inputs: Sequence[int], outputs: Sequence[int]) -> list[Request]:
    """Requests from columns."""
    return [
        Request(number=i, arrival_s=at, input_tokens=n, output_tokens=m)
        for i, (at, n, m) in enumerate(zip(times, inputs, outputs, strict=True))
    ]
