"""Rows of a real serving engine, as its measuring script writes them: whole steps, and servers under Poisson arrivals.

A ``start`` row says what engine the rows after it ran on; a ``prefill`` or ``decode`` row becomes a ``model_step`` of
stack ``vllm``, a ``serve`` row keeps its requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STACK = "vllm"
# Tokens of a step at most, as the script asks for, and the least that its CUDA graphs of pieces hold.
STEP_TOKENS = 8192
# Ends of a model's name that say how it ran.
SUFFIX = re.compile(r"-(?:(?P<fp8>fp8)|tp(?P<tp>\d+)|ep(?P<ep>\d+)|(?P<layers>\d+)l)$")
ENGINE_KINDS = frozenset({"start", "prefill", "decode", "serve", "profile"})


@dataclass(slots=True, kw_only=True)
class EngineRows:
    """Rows of one file in order: what the last ``start`` row said is known to those after it."""

    start: Mapping[str, Any] = field(default_factory=dict)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """``row`` in the schema of records; rows of other sources as they are."""
        if row["kind"] == "served" and _same_length(row, "requests", "ttft_s", "tpot_s"):
            return _served(row)
        if row["kind"] not in ENGINE_KINDS or "name" not in row or "gpu" not in row:
            return row
        if row["kind"] == "start":
            self.start = row
            return row
        if row["kind"] == "profile" or not isinstance(row["name"], str):
            return row
        over = self.start.get("over") or {}
        inputs = _inputs(row, over)
        match row["kind"]:
            case "decode" if _are(row, "batch", "seq", "mean_context", "itl_s"):
                inputs |= {"phase": "decode", "batch": row["batch"], "seq_len": round(row["mean_context"])}
                return _step(inputs, row, row["itl_s"])
            case "prefill" if _are(row, "seq", "tokens_per_s"):
                tokens = int(over.get("max_num_batched_tokens", STEP_TOKENS))
                batch = max(1, tokens // row["seq"])
                inputs |= {"phase": "prefill", "batch": batch, "seq_len": row["seq"]}
                return _step(inputs, row, batch * row["seq"] / row["tokens_per_s"])
            case "serve" if isinstance(row.get("requests"), list):
                sizes = over.get("cudagraph_capture_sizes")
                inputs |= {"requests": row["requests"], "captured_tokens": max(sizes) if sizes else None}
                measured = {"span_s": row.get("span_s"), "ttft_s": row.get("ttft_s"), "e2e_s": row.get("e2e_s")}
                return {"kind": "engine_serve", **inputs, **measured, **_power(row, row.get("span_s"))}
        return row


def _served(row: Mapping[str, Any]) -> dict[str, Any]:
    """Requests that ``wattline measure --engine`` sent, as those of the measuring script."""
    after_first = [each * (output - 1) for each, (_, _, output) in zip(row["tpot_s"], row["requests"], strict=True)]
    whole = [first + rest for first, rest in zip(row["ttft_s"], after_first, strict=True)]
    return {**row, "kind": "engine_serve", "e2e_s": whole}


def _same_length(row: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), list) for name in names) and len({len(row[name]) for name in names}) == 1


def _are(row: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), int | float) and row[name] > 0 for name in names)


def _inputs(row: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Model, layout and type, as the row's name and the engine's arguments say."""
    name = str(row["name"])
    said: dict[str, str] = {}
    while found := SUFFIX.search(name):
        said |= {key: value for key, value in found.groupdict().items() if value is not None}
        name = name[: found.start()]
    tp = int(over.get("tensor_parallel_size") or row.get("tp") or said.get("tp") or 1)
    eight = over.get("quantization") == "fp8" or "fp8" in said
    experts = bool(over.get("enable_expert_parallel")) or "ep" in said
    inputs = {"gpu": row["gpu"], "world": tp, "model": name, "stack": STACK, "tp": tp}
    inputs |= {"dtype": "fp8_e4m3"} if eight else {}
    inputs |= {"ep": tp, "ep_mode": "all_reduce"} if experts and tp > 1 else {}
    return inputs | ({"layers": int(said["layers"])} if "layers" in said else {})


def _step(inputs: dict[str, Any], row: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    return {"kind": "model_step", **inputs, "latency_s": seconds, **_power(row, seconds)}


def _power(row: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
    """Watts, joules, clock and temperature as records have them."""
    watts = row.get("power_w")
    joules = None
    if seconds is not None and isinstance(watts, list) and all(isinstance(value, int | float) for value in watts):
        joules = seconds * sum(watts)
    clocks = row.get("clock") or []
    return {
        "power_w": watts,
        "energy_j": joules,
        "sm_clock_mhz": [mhz for mhz, _ in clocks] or None,
        "temperature_c": [celsius for _, celsius in clocks] or None,
    }


def between_tokens(ttft_s: list[float], e2e_s: list[float], requests: list[list[float]]) -> list[float]:
    """Mean time between tokens of each request that has several."""
    return [
        (whole - first) / (output - 1)
        for first, whole, (_, _, output) in zip(ttft_s, e2e_s, requests, strict=True)
        if output > 1
    ]


def served_latencies(measured: Mapping[str, Any], requests: list[list[float]]) -> dict[str, float]:
    """Percentiles over requests of the time to the first token, and of a request's mean time between tokens (s).

    >>> served_latencies({"ttft_s": [0.1, 0.3], "e2e_s": [0.2, 0.5]}, [[0.0, 9, 11], [0.5, 9, 21]])["itl_p50_s"]
    0.01
    """
    of = {"ttft": measured["ttft_s"], "itl": between_tokens(measured["ttft_s"], measured["e2e_s"], requests)}
    return {f"{name}_p{p}_s": float(np.percentile(values, p)) for name, values in of.items() for p in (50, 99)}
