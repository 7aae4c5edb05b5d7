"""Requests: when each arrives, how many tokens it brings and wants; from laws or from recorded traffic."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, assert_never

import numpy as np
import pandas as pd

from sim.errors import ScenarioError

Law = Literal["poisson", "gamma", "constant"]
# Columns by which a file is told apart: Azure LLM inference trace 2023 (CC-BY 4.0), and plain tables of our own.
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
PLAIN = ("arrival_s", "input_tokens", "output_tokens")
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


def read_requests(path: Path, *, limit: int | None = None, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[Request]:
    """Requests of a file, in order of arrival, the first at 0 s: Azure 2023 CSV, Mooncake JSONL (.gz; each hash stands
    for ``block_tokens`` of a prompt), or a CSV with columns arrival_s, input_tokens, output_tokens and maybe priority.
    """
    try:
        found = _mooncake(path, block_tokens) if ".jsonl" in path.suffixes else _table(path)
    except OSError as error:
        raise ScenarioError(f"cannot read requests '{path}': {error.strerror or error}") from None
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ScenarioError(f"{path}: not a table of requests: {str(error).strip()}") from None
    if not found:
        raise ScenarioError(f"{path}: holds no request")
    found.sort(key=lambda request: request.arrival_s)
    first_s = found[0].arrival_s
    found = found[:limit]
    return [replace(r, number=i, arrival_s=r.arrival_s - first_s) for i, r in enumerate(found)]


def _table(path: Path) -> list[Request]:
    table = pd.read_csv(path)
    if all(name in table for name in AZURE):
        try:
            stamps = pd.to_datetime(table["TIMESTAMP"])  # seven digits of a second: nanoseconds keep them
        except ValueError as error:
            raise ScenarioError(f"{path}: TIMESTAMP: {error}") from None
        seconds = (stamps - stamps.iloc[0]).dt.total_seconds()
        names = AZURE
    elif all(name in table for name in PLAIN):
        seconds = pd.to_numeric(table["arrival_s"], errors="coerce")
        names = PLAIN
    else:
        raise ScenarioError(
            f"{path}: columns {', '.join(map(str, table))}: need {', '.join(PLAIN)} or {', '.join(AZURE)}"
        )
    numbers = [pd.to_numeric(table[name], errors="coerce") for name in names[1:]]
    for name, column in zip(names, (seconds, *numbers), strict=True):
        bad = ~(column >= (0 if name == names[0] else 1))
        if bad.any():
            line = int(bad.to_numpy().argmax())
            right = "a time of at least 0" if name == names[0] else "a positive number of tokens"
            raise ScenarioError(f"{path}, line {line + 2}: {name} = {table[name].iloc[line]}: give {right}")
    priority = table["priority"] if "priority" in table else [0] * len(table)
    return [
        Request(number=i, arrival_s=float(at), input_tokens=int(inp), output_tokens=int(out), priority=int(first))
        for i, (at, inp, out, first) in enumerate(zip(seconds, *numbers, priority, strict=True))
    ]


def _mooncake(path: Path, block_tokens: int) -> list[Request]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    found = []
    for number, line in enumerate(text.splitlines()):
        try:
            row = json.loads(line)
            found.append(
                Request(
                    number=number,
                    arrival_s=row["timestamp"] / 1000.0,
                    input_tokens=max(1, int(row["input_length"])),
                    output_tokens=max(1, int(row["output_length"])),
                    prefix=tuple(row.get("hash_ids", ())),
                    block_tokens=block_tokens,
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ScenarioError(f"{path}, line {number + 1}: not a request: {error!r}") from None
    return found


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
