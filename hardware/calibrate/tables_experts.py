"""Times of a serving engine's experts on a GPU that we never had, from a public table of whole calls.

A row of ``moe.parquet`` is one call of vLLM's ``fused_experts``: two products over rows sorted by expert, the
activation between and the sum after. Tokens went to experts by a power law, as aiconfigurator's collector draws them.
Calls were launched one by one, without a graph: below ``LEAST_S`` the host's pace is what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hardware.engine_laws import EngineLaws
from hardware.gpu import GpuSpec
from hardware.laws.engine_price import moved_terms, tile_of
from hardware.laws.routed import RoutedCoefficients, routed_base_terms
from hardware.laws.sizes import MovedSizes, RoutedSizes
from hardware.laws.terms import time_s
from hardware.profile import Profile, Provenance

LEAST_S = 150e-6


def expert_calls(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of 16-bit calls on one rank of experts that the GPU, not the host, took its time for."""
    return table[(table.moe_dtype == "bfloat16") & (table.moe_ep_size == 1) & (table.latency > 1e3 * LEAST_S)]


def rows_of_experts(tokens: int, top_k: int, experts: int, alpha: float) -> NDArray[np.float64]:
    """Rows of each expert: even quantiles of the power law that the collector draws from, as many rows in all.

    >>> rows_of_experts(64, 2, 4, 1.2).round()
    array([ 5., 11., 27., 86.])
    """
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    u, power = (np.arange(experts) + 0.5) / experts, 1.0 - alpha
    drawn = ((high**power - low**power) * u + low**power) ** (1.0 / power)
    return np.asarray(drawn / drawn.sum() * tokens * top_k)


def products(row: Mapping[Hashable, Any], gpu: GpuSpec) -> tuple[RoutedSizes, RoutedSizes]:
    """The two products of a call, in the tiles of the engine's default."""
    tokens, experts, inner = row["num_tokens"], row["num_experts"], row["inter_size"] // row["moe_tp_size"]
    of_expert = np.round(rows_of_experts(tokens, row["topk"], experts, float(row["distribution"].split("_")[-1])))
    block_m, block_n = tile_of("vllm", gpu.id, "bf16", experts, inner, tokens)
    sizes = RoutedSizes(
        rows=tokens * row["topk"], distinct=int(np.count_nonzero(of_expert)),
        tiles=float(np.ceil(of_expert / block_m).sum()), block_m=block_m, block_n=block_n,
        n=2 * inner, k=row["hidden_size"], weight_type="bf16",
    )  # fmt: skip
    return sizes, replace(sizes, n=row["hidden_size"], k=inner)


def call_s(c: RoutedCoefficients, laws: EngineLaws, gpu: GpuSpec, row: Mapping[Hashable, Any]) -> float:
    """Seconds of a call at the maximum clock, its products under ``c``, the rest under ``laws``."""
    first, second = products(row, gpu)
    moved = {
        "expert_act": (first.rows, 2.0 * first.rows * (first.n + second.k)),
        "expert_sum": (row["num_tokens"], 2.0 * (first.rows + row["num_tokens"]) * second.n),
    }
    rest = [
        moved_terms(laws, gpu, MovedSizes(op=op, rows=rows, bytes_moved=data)) for op, (rows, data) in moved.items()
    ]
    terms = [routed_base_terms(c, sizes, gpu) for sizes in (first, second)] + [one for one in rest if one is not None]
    return math.fsum(time_s(one, sms=gpu.sms, sm_clock_hz=gpu.max_clock_hz) for one in terms)


def engine_of(profile: Profile, routed: RoutedCoefficients, provenance: Provenance) -> EngineLaws:
    """vLLM on the GPU of ``profile``: experts under ``routed``, attention under the tables' law, the rest carried over.

    What is left away (products in FP8, its all-reduce, masks) is priced as the libraries'.
    """
    return replace(
        profile.engines["vllm"],
        command=provenance.command, date=provenance.date, files=provenance.files, row_digests=(),
        routed={"bf16": routed}, scaled={}, prefill=profile.prefill, decode={"bf16": profile.decode},
        corrections={}, all_reduce=(), masked=None, mean_power_factor=1.0, left_out={}, standard_errors={},
    )  # fmt: skip
