"""Published servers against ours: ``python benchmarks/published_servers.py``.

ML.ENERGY v3 (leaderboard repository, ``public/data/models``, Apache-2.0): vLLM 0.11.1 on H100, task lm-arena-chat.
Joules per output token and median time between tokens are kept back: nothing was fitted on them.

What the benchmark does, by its own code (repository ml-energy/benchmark, Apache-2.0):

* ``configs/vllm/lm-arena-chat``: 1024 requests (twice over where ``num_request_repeats`` is 2), all sent at once; at
  most 8192 tokens a step, async scheduling; prefix caching and chunked prefill are vLLM's defaults.
* ``mlenergy/llm/benchmark.py``: temperature 0.8 and top-p 0.95, for which that vLLM sorts the vocabulary (FlashInfer's
  sampler became its default with pull request 40376); energy and tokens count from the moment that as many first
  tokens as seats are out until as many requests are left to begin; times between tokens are those of the whole run.
* ``mlenergy/llm/datasets.py``: each turn of a conversation of Chatbot Arena is a request, its prompt all that was said
  before, so that a turn finds the prompt of the one before it in the prefix cache.

Prompts are 634 tokens on average (ML.ENERGY's post on the leaderboard v3.0, 2026-01-13, first versions: "mean 634 vs.
224", the other being single questions of GPQA). How much of them is new is not published for these requests. Chatbot
Arena as a whole has 1.3 turns a conversation, 94.9 tokens a prompt and 269 a response (arXiv 2403.04132, table 1); the
tail of long conversations is such that prompts with their history come to 634. Outputs are as long as published.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sim.serving import ServeResult, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published server. ``repeats``: how often its 1024 requests are sent."""

    model: str
    tp: int
    sequences: int
    token_j: float
    itl_ms: float
    power_w: float
    output_tokens: float
    repeats: int = 1


PUBLISHED = [
    Row(model="llama3-8b", tp=1, sequences=8, token_j=0.4548, itl_ms=7.316, power_w=486.4, output_tokens=388.7),
    Row(model="llama3-8b", tp=1, sequences=16, token_j=0.2627, itl_ms=7.912, power_w=513.3, output_tokens=404.2),
    Row(model="llama3-8b", tp=1, sequences=32, token_j=0.1651, itl_ms=8.907, power_w=559.7, output_tokens=390.3),
    Row(model="llama3-8b", tp=1, sequences=64, token_j=0.1186, itl_ms=11.50, power_w=610.3, output_tokens=395.5),
    Row(model="llama3-8b", tp=1, sequences=128, token_j=0.09511, itl_ms=16.48, power_w=669.2, output_tokens=404.6),
    Row(
        model="llama3-8b", tp=1, sequences=256, token_j=0.07664, itl_ms=26.13, power_w=690.5, output_tokens=404.2,
        repeats=2,
    ),
    Row(
        model="llama3-8b", tp=1, sequences=512, token_j=0.07019, itl_ms=47.41, power_w=688.3, output_tokens=396.7,
        repeats=2,
    ),
    Row(model="llama3-70b", tp=4, sequences=16, token_j=2.091, itl_ms=17.70, power_w=1803.8, output_tokens=354.4),
    Row(model="llama3-70b", tp=4, sequences=32, token_j=1.2069, itl_ms=20.05, power_w=1794.2, output_tokens=350.6),
    Row(model="llama3-70b", tp=4, sequences=128, token_j=0.5634, itl_ms=27.87, power_w=2183.8, output_tokens=358.9),
    Row(model="llama3-70b", tp=4, sequences=256, token_j=0.4790, itl_ms=39.84, power_w=2354.3, output_tokens=349.0),
]  # fmt: skip
REQUESTS, BLOCK_TOKENS, OUTPUT_SPREAD = 1024, 16, 1.0
# Chatbot Arena: turns of a conversation, tokens of what a user says at a turn and of a response; prompts with history.
TURNS, SAID, ANSWERED, PROMPT = 1.3, 94.9, 269.0, 634.0


def going_on() -> tuple[float, float]:
    """The share of conversations that have a second turn, and how many turns those have after the first (geometric).

    Two equations: their mean turns, and the mean of t * said + (t - 1) * answered over all turns t of all of them.
    """
    turn = (PROMPT + ANSWERED) / (SAID + ANSWERED)
    squares = (2.0 * turn - 1.0) * TURNS  # mean of the squared number of turns
    more = TURNS - 1.0
    length = ((squares - 1.0 - 2.0 * more) / more + 1.0) / 2.0
    return more / length, length


def requests(row: Row) -> list[dict[str, int | list[int]]]:
    """The requests of ``row`` in the format of Mooncake, each block of 16 tokens of a prompt with its hash.

    So few conversations spread widely: of draws 0, 1, 2, ... the first whose prompts are within 2 % of the mean.
    """
    for seed in range(1000):
        found = drawn(row, seed)
        if abs(np.mean([one["input_length"] for one in found]) / PROMPT - 1.0) < 0.02:
            return found * row.repeats
    raise RuntimeError("no draw of conversations comes near the published mean")


def drawn(row: Row, seed: int) -> list[dict[str, int | list[int]]]:
    """1024 requests, conversation by conversation."""
    rng = np.random.default_rng(seed)
    share, length = going_on()
    sigma2 = np.log1p(OUTPUT_SPREAD**2)

    def tokens(mean: float) -> int:
        return max(1, round(float(rng.lognormal(np.log(mean) - sigma2 / 2, np.sqrt(sigma2)))))

    found: list[dict[str, int | list[int]]] = []
    hashes = 0
    while len(found) < REQUESTS:
        turns = 1 + (int(rng.geometric(1.0 / length)) if rng.random() < share else 0)
        said = 0
        blocks: list[int] = []
        for _ in range(turns):
            said += tokens(SAID)
            whole = said // BLOCK_TOKENS
            blocks += range(hashes, hashes + whole - len(blocks))
            hashes = max(hashes, blocks[-1] + 1) if blocks else hashes
            found.append({
                "timestamp": 0, "input_length": said, "hash_ids": list(blocks),
                "output_length": min(4096, tokens(row.output_tokens)),
            })  # fmt: skip
            said += tokens(ANSWERED)
    return found[:REQUESTS]


def served(row: Row, sampling: str, *, cached: bool) -> ServeResult:
    """What our server makes of the requests of ``row``."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "requests.jsonl"
        trace.write_text("\n".join(json.dumps(one) for one in requests(row)))
        return serve(
            model=row.model, tp=row.tp, trace=trace, trace_block_tokens=BLOCK_TOKENS, max_num_seqs=row.sequences,
            sampling=sampling, host="vllm-async", prefix_caching=cached,
        )  # fmt: skip


def steady(run: ServeResult, sequences: int) -> tuple[float, float]:
    """J per output token and watts over the window that the benchmark takes."""
    first = np.sort(run.requests["first_token_s"].to_numpy())
    begin_s, end_s = first[sequences - 1], first[len(first) - sequences - 1]
    energy_j = tokens = 0.0
    for row in run.log.stretches:
        share = max(0.0, min(row.end_s, end_s) - max(row.start_s, begin_s)) / max(row.end_s - row.start_s, 1e-12)
        energy_j += share * row.energy_j
        tokens += share * row.decoding * row.steps
    tokens += ((first > begin_s) & (first <= end_s)).sum()
    return energy_j / tokens, energy_j / (end_s - begin_s)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampling", default="top_p", help="as those servers do; greedy shows what it costs")
    parser.add_argument("--no-cache", action="store_true", help="compute every prompt whole: the other end")
    arguments = parser.parse_args()
    table = Table(title=f"Published servers, {arguments.sampling}", title_justify="left")
    for column in (
        "server",
        "prompt",
        "found",
        "J a token",
        "published",
        "error",
        "ITL ms",
        "published",
        "error",
        "W",
        "published",
    ):
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in PUBLISHED:
        run = served(row, arguments.sampling, cached=not arguments.no_cache)
        token_j, power_w = steady(run, row.sequences)
        itl_ms = run.summary["itl_s"]["p50"] * 1e3
        table.add_row(
            f"{row.model}, tp {row.tp}, {row.sequences} sequences",
            f"{run.requests['input_tokens'].mean():.0f}", f"{run.requests['hit_tokens'].mean():.0f}",
            f"{token_j:.4f}", f"{row.token_j:.4g}", f"{token_j / row.token_j - 1:+.1%}",
            f"{itl_ms:.1f}", f"{row.itl_ms:.1f}", f"{itl_ms / row.itl_ms - 1:+.1%}",
            f"{power_w:.0f}", f"{row.power_w:.0f}",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
