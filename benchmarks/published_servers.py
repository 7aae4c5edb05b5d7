"""Published servers against ours: ``python benchmarks/published_servers.py [--input-tokens 250]``.

ML.ENERGY v3 (leaderboard repository, ``public/data/models``, Apache-2.0): vLLM 0.11.1 on H100, chat, a fixed number of
sequences. Joules per output token and median time between tokens are kept back: nothing was fitted on them. Outputs
are 404 tokens on average with a coefficient of variation of 1.0, as their histogram says; prompts are not published.
Llama's generation config asks for top-p, which that vLLM does by sorting the vocabulary.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from sim.serving import serve

# Model, tensor parallelism, sequences, J per output token, median ms between tokens.
PUBLISHED = [
    ("llama3-8b", 1, 8, 0.455, 7.32),
    ("llama3-8b", 1, 32, 0.165, 8.91),
    ("llama3-8b", 1, 128, 0.0951, 16.5),
    ("llama3-8b", 1, 256, 0.0766, 26.1),
    ("llama3-70b", 4, 128, 0.563, 27.9),
]
OUTPUT_TOKENS, SPREAD = 404, 1.0


def served(model: str, tp: int, sequences: int, input_tokens: int, sampling: str) -> tuple[float, float]:
    """J per output token while at least nine tenths of the seats are taken, and median s between tokens."""
    run = serve(
        model=model, tp=tp, concurrency=sequences, max_num_seqs=sequences, requests=max(200, 4 * sequences),
        input_tokens=input_tokens, output_tokens=OUTPUT_TOKENS, length_spread=SPREAD, sampling=sampling,
        host="vllm-async", seed=1,
    )  # fmt: skip
    full = run.stretches[run.stretches["decoding"] >= 0.9 * sequences]
    return full["energy_j"].sum() / (full["decoding"] * full["steps"]).sum(), run.summary["itl_s"]["p50"]


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-tokens", type=int, default=250, help="mean prompt (lognormal, as the outputs)")
    arguments = parser.parse_args()
    table = Table(title=f"Published servers, prompts of {arguments.input_tokens} tokens", title_justify="left")
    for column in ("server", "sampling", "J a token", "published", "error", "median ITL ms", "published", "error"):
        table.add_column(column, justify="left" if column in ("server", "sampling") else "right")
    for model, tp, sequences, token_j, itl_ms in PUBLISHED:
        for sampling in ("greedy", "top_p"):
            mine_j, mine_s = served(model, tp, sequences, arguments.input_tokens, sampling)
            table.add_row(
                f"{model}, tp {tp}, {sequences} sequences", sampling,
                f"{mine_j:.4f}", f"{token_j:.4g}", f"{mine_j / token_j - 1:+.1%}",
                f"{mine_s * 1e3:.1f}", f"{itl_ms:.1f}", f"{mine_s * 1e3 / itl_ms - 1:+.1%}",
            )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
