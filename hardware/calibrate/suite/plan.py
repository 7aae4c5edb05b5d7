"""What to measure: every plan is a list of rows, each the input fields of one record; no GPU.

A row's fields are exactly those its record will carry (measurements/README.md) apart from ``gpu`` and the
measured ones, so a record that already has them is the row, done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hardware.calibrate.suite import timing
from hardware.errors import HardwareError

PlannedRow = dict[str, Any]
MIB = 1 << 20
HOST: list[PlannedRow] = [{"kind": "host"}, {"kind": "idle"}]

# Fields whose absence means something: a record that has one is no answer to a row without it.
_LAYOUT = (
    "launch", "sequence_parallel", "cp", "pp", "kv_len", "ctas", "values", "resident", "fast_accumulation",
    "backend",
)  # fmt: skip

_DEFAULTS: dict[str, Any] = {"ep_mode": None, "expert_skew": 0.0, "ctas": None, "comm_ctas": None}
_ABSENT = object()

# What a record has beyond its row.
_MEASURED = frozenset(
    {
        "gpu", "latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "period_s", "iter_s", "clock_mhz",
        "seconds", "samples", "gemm_s", "collective_s", "gemm_clock_mhz", "a_clock_mhz", "a_alone_s", "b_alone_s",
        "a_together_s", "b_together_s", "ttft_s", "pause_s", "log", "marks", "columns", "calls", "done_s", "host_s",
        "launches", "n_per_burst", "bursts", "distinct", "max_rows", "tiles", "tiles64", "tiles128", "tiles256",
        "config", "tokens_per_ep_rank", "dry_run", "name", "limit_w", "max_sm", "max_mem", "driver", "torch", "nccl",
        "uuids", "engine_version",
    }
)  # fmt: skip

_OVERHEAD_S = 0.25
_FREE_S = timing.SETTLE_FREE_S + timing.WINDOW_S + _OVERHEAD_S
_CAPPED_S = timing.SETTLE_CAPPED_S + timing.WINDOW_S + _OVERHEAD_S


def estimated_s(row: Mapping[str, Any]) -> float:
    """About how long a row takes, seconds: settling, window and overhead; from runs on an H100.

    >>> estimated_s(gemm(1, 4096, 4096)) < estimated_s(gemm(4096, 4096, 4096))
    True
    """
    match row["kind"]:
        case "host":
            return 0.05
        case "host_issue":
            return 0.4
        case "idle":
            return 2.1
        case "duty":
            return 3.0
        case "alternating":
            return _CAPPED_S + 0.3
        case "at_clock":
            return 1.6 if row["where"] == "capped" else 0.5
        case "transient":
            return 14.0
        case "gemm":
            return _CAPPED_S if row["m"] >= 48 else _FREE_S
        case "attention":
            return _CAPPED_S if row["phase"] == "prefill" else _FREE_S
        case "vllm_scaled_gemm" | "vllm_experts" | "vllm_attention" | "diffusers_attention" | "diffusers_linear":
            return _CAPPED_S
        case "grouped_gemm":
            return _CAPPED_S if row["tokens"] >= 128 else _FREE_S
        case "in_context":
            return 0.6 + (_CAPPED_S if row["gemm_mnk"][0] >= 512 else _FREE_S)
        case "together":
            return 5.0
        case "model_step" | "dit_step" | "ring_attention":
            return 4.5
        case "generate" | "diffusers_step" | "diffusers_decode" | "diffusers_text" | "diffusers_blend":
            return 8.0
        case _:
            return _FREE_S


def done_already(row: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some record carries every field of ``row`` with its value, and no layout that ``row`` lacks.

    >>> done_already({"kind": "gemm", "m": 1}, [{"kind": "gemm", "m": 1, "latency_s": 1e-5}])
    True
    """
    return any(
        all(record.get(key, _DEFAULTS.get(key, _ABSENT)) == value for key, value in row.items())
        and all(record.get(key) == row.get(key) for key in _LAYOUT)
        for record in records
    )


def load(path: Path) -> list[dict[str, Any]]:
    """Whole records of a file; a last line without its newline (a killed run) is cut off the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    records = []
    for number, line in enumerate(whole.decode().splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise HardwareError(f"{path}, line {number}: not valid JSON ({error.msg}); repair or remove it") from None
    return records


def asked(record: Mapping[str, Any]) -> PlannedRow:
    """The row that ``record`` answers: what it holds but for what was measured.

    >>> asked({"kind": "gemm", "gpu": "x", "world": 1, "m": 1, "latency_s": 1e-5, "power_w": [90.0]})
    {'kind': 'gemm', 'world': 1, 'm': 1}
    """
    routed = {"rows"} if "distinct" in record else set()  # counted, where experts are drawn
    return {key: value for key, value in record.items() if key not in _MEASURED | routed}


def gemm(m: int, n: int, k: int, dtype: str = "bf16") -> PlannedRow:
    """A GEMM, weights n x k."""
    return {"kind": "gemm", "world": 1, "m": m, "n": n, "k": k, "dtype": dtype}


def attention(
    phase: str, batch: int, seq_len: int, heads: tuple[int, int] = (32, 8), *, causal: bool = True, kv_len: int = 0
) -> PlannedRow:
    """Flash attention of ``heads`` of queries and of keys; ``kv_len`` where it is not ``seq_len``, or not causal."""
    q_heads, kv_heads = heads
    row: PlannedRow = {"kind": "attention", "world": 1, "phase": phase, "batch": batch, "seq_len": seq_len}
    if kv_len:
        row["kv_len"] = kv_len
    causal = causal and phase == "prefill"
    return {**row, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 128, "causal": causal, "dtype": "bf16"}


def elementwise(kind: str, tokens: int, size: int) -> PlannedRow:
    """add_rmsnorm, silu_mul, gelu or cast_fp8 of width ``size``, or rope of ``size`` heads."""
    bytes_each = {"add_rmsnorm": 8, "silu_mul": 6, "gelu": 4, "cast_fp8": 3, "rope": 512}[kind]
    name = "heads" if kind == "rope" else "width"
    return {
        "kind": kind,
        "world": 1,
        "tokens": tokens,
        name: size,
        "bytes_moved": tokens * size * bytes_each,
        "dtype": "bf16",
    }


def copy(bytes_moved: int) -> PlannedRow:
    """A contiguous copy; bytes read and written together."""
    return {"kind": "copy", "world": 1, "bytes_moved": bytes_moved, "dtype": "bf16"}


def permute_copy(tokens: int, heads: int, parts: int) -> PlannedRow:
    """[tokens, parts, heads/parts x 128] to [parts, tokens, ...]: the copy before an all-to-all."""
    moved = 2 * 2 * tokens * heads * 128
    row = {"kind": "permute_copy", "world": 1, "tokens": tokens, "heads": heads, "parts": parts}
    return {**row, "bytes_moved": moved, "dtype": "bf16"}


def cat(tokens: int, width: int, parts: int) -> PlannedRow:
    """Chunks of a split projection joined again."""
    moved = 4 * tokens * width
    row = {"kind": "cat", "world": 1, "tokens": tokens, "width": width, "parts": parts}
    return {**row, "bytes_moved": moved, "dtype": "bf16"}


def kv_write(batch: int, kv_heads: int, seq_len: int) -> PlannedRow:
    """One token's K (or V) into the cache."""
    row = {"kind": "kv_write", "world": 1, "batch": batch, "kv_heads": kv_heads, "seq_len": seq_len}
    return {**row, "bytes_moved": 4 * batch * kv_heads * 128, "dtype": "bf16"}


def moe_small(kind: str, rows: int, width: int = 2048) -> PlannedRow:
    """gather, index_add or topk_sum of ``rows`` routed rows."""
    return {"kind": kind, "world": 1, "rows": rows, "width": width, "dtype": "bf16"}


def grouped(which: str, experts: int, tokens: int, skew: float = 0.0) -> PlannedRow:
    """Grouped GEMM of Qwen3-30B-A3B's experts; ``experts`` of 128 are this rank's."""
    k, n = (2048, 1536) if which == "gate_up" else (768, 2048)
    return {
        "kind": "grouped_gemm",
        "world": 1,
        "which": which,
        "experts": experts,
        "tokens": tokens,
        "skew": skew,
        "k": k,
        "n": n,
        "dtype": "bf16",
    }


def duty(work: str, burst_s: float, idle_s: float, kernel: PlannedRow | None = None) -> PlannedRow:
    """Bursts of one kernel with pauses; ``kernel`` says what ``work`` is where its name does not."""
    row: PlannedRow = {"kind": "duty", "world": 1, "gpu_index": 0, "work": work}
    row |= {"burst_s": burst_s, "idle_s": idle_s}
    return row if kernel is None else {**row, "kernel": kernel}


def at_clock(kernel: PlannedRow, where: str) -> PlannedRow:
    """``kernel`` at a true SM clock: ``alone``, near the maximum, or between products at the power cap (``capped``)."""
    sizes = {key: value for key, value in kernel.items() if key not in ("kind", "world")}
    return {"kind": "at_clock", "world": 1, "work": kernel["kind"], **sizes, "where": where}


def small(part: str, m: int) -> PlannedRow:
    """A chain of small kernels over ``m`` tokens, or one of its parts."""
    names = {
        "gemm": f"gemm{m}x4096x4096",
        "add_rms": f"add_rms{m}x4096",
        "silu": f"silu{m}x14336",
        "mix": "mix: rms gemm silu rms gemm",
    }
    return {"kind": "small_kernels", "world": 1, "work": names[part], "m": m}


def collective(op: str, bytes_: int, ctas: int | None, launch: str | None = None) -> PlannedRow:
    """A bare collective; ``bytes_`` is the full buffer."""
    row: PlannedRow = {"kind": "collective", "op": op, "bytes": bytes_, "ctas": ctas}
    return row if launch is None else {**row, "launch": launch}


def in_context(op: str, mnk: tuple[int, int, int], ctas: int | None = None) -> PlannedRow:
    """A collective over the output of a GEMM, inside one graph."""
    row: PlannedRow = {"kind": "in_context", "collective": op, "bytes": 2 * mnk[0] * mnk[1], "gemm_mnk": list(mnk)}
    return row if op == "none" else {**row, "ctas": ctas}


def together(a: str, b: str, fields: Mapping[str, Any], comm_bytes: int) -> PlannedRow:
    """Compute ``a`` (sizes in ``fields``) beside collective ``b``, such as rs8."""
    return {"kind": "together", "a": a, "b": b, "ctas": int(b[2:]), **fields, "comm_bytes": comm_bytes}


def step(model: str, layers: int, phase: str, batch: int, seq_len: int, **more: Any) -> PlannedRow:
    """A whole-model step; ``more`` holds what differs from one bf16 GPU in one graph."""
    row: PlannedRow = {
        "kind": "model_step",
        "model": model,
        "layers": layers,
        "phase": phase,
        "batch": batch,
        "seq_len": seq_len,
        "tp": 1,
        "ep": 1,
        "ep_mode": None,
        "expert_skew": 0.0,
        "lm_head": True,
        "dtype": "bf16",
        "regime": "steady",
        "launch": "graph",
    }
    if more.get("sequence_parallel"):
        row = {key: value for key, value in row.items() if key not in ("ep_mode", "expert_skew")}
    return {**row, **more}


def overlap(world: int, chunks: int, ctas: int | None) -> PlannedRow:
    """The fields of a sequence-parallel step."""
    return {"tp": world, "sequence_parallel": True, "overlap_chunks": chunks, "comm_ctas": ctas, "lm_head": False}


def dit(model: str, layers: int, tokens: int, ulysses: int) -> PlannedRow:
    """One branch of a Wan2.1-shaped diffusion step."""
    row: PlannedRow = {"kind": "dit_step", "model": model, "layers": layers, "tokens": tokens}
    return {**row, "ulysses": ulysses, "text_tokens": 512, "dtype": "bf16", "regime": "steady"}


def ring(layout: str, seq_len: int, q_heads: int, kv_heads: int) -> PlannedRow:
    """Forward ring attention over all GPUs."""
    row: PlannedRow = {"kind": "ring_attention", "layout": layout, "seq_len": seq_len}
    row |= {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": 128, "causal": True}
    return {**row, "forward_only": True, "dtype": "bf16", "regime": "steady"}
