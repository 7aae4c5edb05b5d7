"""Mutated files of every kind that a command reads: contents, ending and the command's arguments."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import random
import sqlite3
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from benchmarks.trace_fuzz import mutate as mutate_text
from benchmarks.trace_fuzz import seed_trace

DEEP: Any = [0]
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), 2**31, 2**63, 2**70, 10**400,
    "", "x", "0", "-1", "inf", "NaN", "\x1b[31mred", "[/b]", "=1+1", "\u2028", "\ud800", "a\nb", "a" * 5000, [], {},
    [None], [[1], 2], {"a": [1]}, ["a"] * 3, [1e9, 2], DEEP, "/etc", "\x00",
]  # fmt: skip
Case = tuple[bytes, str, list[str]]  # contents, file name's ending, arguments: the file is '@'


def _set(value: Any, rng: random.Random) -> None:
    """Replace, drop or add one thing somewhere inside a JSON value."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = rng.choice(places)
        if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.7:
            value = value[place]
            continue
        if isinstance(value, dict) and rng.random() < 0.15:
            value.pop(place)
        elif isinstance(value, dict) and rng.random() < 0.05:
            value[rng.choice(["x", "\x1b[2J", "batchs"])] = copy.deepcopy(rng.choice(VALUES))
        else:
            value[place] = copy.deepcopy(rng.choice(VALUES))  # a later change may go inside it
        return


def mutated(value: Any, rng: random.Random) -> Any:
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        _set(value, rng)
    return value


def _toml(value: Any) -> str:
    """A value as TOML; what TOML lacks is left as JSON writes it."""
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case float() if value != value or abs(value) == float("inf"):
            return str(value)
    return json.dumps(value)


def toml_text(table: dict[str, Any]) -> str:
    return "\n".join(f"{json.dumps(str(key))} = {_toml(value)}" for key, value in table.items())


def in_bytes(text: str, rng: random.Random, *, packed: bool = False) -> bytes:
    """Text with a few edits, as bytes, now and then compressed, damaged and cut."""
    data = mutate_text(text, rng) if rng.random() < 0.4 else text.encode("utf-8", "surrogatepass")
    if packed and rng.random() < 0.3:
        data = gzip.compress(data)
    if data and rng.random() < 0.1:
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        data = bytes(damaged)
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data


def trace_case(rng: random.Random) -> Case:
    """Kineto traces."""
    data = mutate_text(seed_trace(rng), rng)
    if rng.random() < 0.2:
        data = gzip.compress(data)
        data = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data
    command = rng.choice([["inspect", "--lint"], ["inspect", "--json"], ["replay"], ["replay", "--json"]])
    return data, rng.choice([".json", ".json.gz", "_rank99999999999999999999.json"]), [*command, "@"]


def nsight_case(rng: random.Random) -> Case:
    """SQLite exports of Nsight Systems."""
    values: list[Any] = [None, -1, 0, 2**62, -(2**63), 1.5, 1e308, float("inf"), "abc", b"\xff\x00", "", "7", 2**31]
    columns = "start end deviceId streamId correlationId demangledName shortName gridX gridY gridZ blockX blockY blockZ"
    kernels, calls = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("create table StringIds (id, value)")
        database.execute(f"create table {kernels} ({', '.join(columns.split())})")
        database.execute(f"create table {calls} (start, end, globalTid, nameId, correlationId)")
        database.execute("create table NVTX_EVENTS (start, end, globalTid, text, textId)")
        name = rng.choice(["sgemm", "k\x1b[2J", b"\xff", None, 5, "[/b]k"])
        database.executemany("insert into StringIds values (?, ?)", [(1, name), (2, "cudaLaunchKernel_v7000")])
        for number in range(rng.randrange(1, 9)):
            at = 10**9 + 1000 * number
            row: list[Any] = [at, at + 900, 0, 7, number, 1, 1, 1, 2, 3, 32, 1, 1]
            call: list[Any] = [at - 500, at - 400, 5, 2, number]
            for one in (row, call):
                if rng.random() < 0.3:
                    one[rng.randrange(len(one))] = rng.choice(values)
            mark = (*call[:2], 5, rng.choice(values), 1)
            for table, cells in ((kernels, row), (calls, call), ("NVTX_EVENTS", mark)):
                database.execute(f"insert into {table} values ({', '.join('?' * len(cells))})", cells)
        if rng.random() < 0.1:
            database.execute("drop table StringIds")
        database.commit()
        data = bytearray(database.serialize())
    for _ in range(rng.choice([0, 0, 0, 1, 20])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data), ".sqlite", [rng.choice(["inspect", "replay"]), "@"]


def requests_case(rng: random.Random) -> Case:
    """Recorded requests of every kind."""
    rows: list[dict[str, Any]] = [
        rng.choice(
            [
                {"arrival_s": 0.1 * i, "input_tokens": 200 + i, "output_tokens": 3, "priority": i % 2},
                {"TIMESTAMP": f"2023-11-16 18:17:{i:02d}.1234567", "ContextTokens": 200, "GeneratedTokens": 3},
                {"Timestamp": i, "Model": "GPT-4", "Request tokens": 200, "Response tokens": i % 3},
                {"arrived_at": 0.1 * i, "num_prefill_tokens": 200, "num_decode_tokens": 3},
                {"timestamp": 100 * i, "input_length": 600, "output_length": 3, "hash_ids": [1, i]},
            ]
        )
        for i in range(8)
    ]
    rows = [row for row in rows if row.keys() == rows[0].keys()] if rng.random() < 0.95 else rows
    rows = [mutated(row, rng) if rng.random() < 0.3 else row for row in rows]
    if rng.random() < 0.5:
        text = "\n".join(json.dumps(row) for row in rows)
    else:
        quoted = [[json.dumps(v) if isinstance(v, list | dict) else str(v) for v in row.values()] for row in rows]
        text = "\n".join([",".join(rows[0]), *(",".join(row) for row in quoted)])
    flags = ["serve", "--model", "llama3-8b", "--layers", "2"] if False else ["serve", "--model", "llama3-8b"]
    return in_bytes(text, rng, packed=True), rng.choice([".csv", ".jsonl", ".jsonl.gz"]), [*flags, "--trace", "@"]


def records_case(rng: random.Random) -> Case:
    """Measured records."""
    seen = {"latency_s": 1e-4, "power_w": [500.0], "energy_j": 0.05, "sm_clock_mhz": [1980], "temperature_c": [40]}
    gpu = {"gpu": "h100-sxm-80gb", "world": 1, "dtype": "bf16"}
    step = {"model": "llama3-8b", "layers": 1, "phase": "decode", "batch": 4, "seq_len": 512, "tp": 1, "lm_head": True}
    rows: list[dict[str, Any]] = [
        {"kind": "gemm", "m": 128, "n": 4096, "k": 4096},
        {"kind": "model_step", **step, "regime": "steady", "launch": "graph"},
        {
            "kind": "attention",
            "phase": "prefill",
            "batch": 1,
            "seq_len": 512,
            "q_heads": 8,
            "kv_heads": 8,
            "head_dim": 128,
        },
        {"kind": "collective", "op": "all_reduce", "bytes": 1 << 20, "world": 2},
        {"kind": "silu_mul", "tokens": 512, "width": 4096},
        {"kind": "dit_step", "model": "wan2.1-1.3b", "layers": 1, "tokens": 1024, "ulysses": 1, "text_tokens": 512},
        {
            "kind": "duty",
            "work": "gemm",
            "m": 512,
            "n": 512,
            "k": 512,
            "period_s": 0.1,
            "burst_s": 0.01,
            "n_per_burst": 9,
        },
        {"kind": "in_context", "gemm_mnk": [64, 4096, 4096], "collective": "none", "bytes": 0},
        {"kind": "small_kernels", "work": "gemm64x4096"},
        {
            "kind": "transient",
            "marks": [{"work": "gemm", "start_s": 0.1, "step_ms": [1, 2]}],
            "log": [[0, 1], [1.0, 9]],
        },
        {"kind": "grouped_gemm", "experts": 8, "rows": 64, "distinct": 8, "tiles128": 8, "n": 512, "k": 512},
    ]
    chosen = [mutated(gpu | row | seen, rng) for row in rng.sample(rows, rng.randrange(1, 4))]
    command = ["validate", "@", "--quiet", *(["--json"] if rng.random() < 0.3 else [])]
    return in_bytes("\n".join(json.dumps(row) for row in chosen), rng, packed=rng.random() < 0.1), ".jsonl", command


def _scenario(rng: random.Random) -> dict[str, Any]:
    table: dict[str, Any] = {
        "model": "llama3-8b",
        "layers": 1,
        "lm_head": False,
        "batch": 2,
        "seq_len": 256,
        "regime": "cold",
    }
    more: list[dict[str, Any]] = [
        {}, {"phase": "decode"}, {"phase": "generate", "output_len": 4}, {"tp": 2}, {"power_cap_w": 500},
        {"sm_clock_mhz": 1410, "launch": "eager"}, {"model": "qwen3-30b-a3b", "ep": 2, "ep_mode": "all_to_all"},
        {"routing": "zipf:1.1", "model": "qwen3-30b-a3b"}, {"tokens_per_ep_rank": [1, 2]}, {"node": "hgx-8"},
    ]  # fmt: skip
    return table | rng.choice(more)


def scenario_case(rng: random.Random) -> Case:
    """Scenarios, TOML or JSON."""
    table = mutated(_scenario(rng), rng)
    json_file = rng.random() < 0.5
    return (
        in_bytes(json.dumps(table) if json_file else toml_text(table), rng),
        (".json" if json_file else ".toml"),
        ["simulate", "@"],
    )


def _grid(rng: random.Random) -> dict[str, Any]:
    grid: dict[str, Any] = {"base": _scenario(rng), "grid": {"batch": [1, 2]}}
    grid |= rng.choice(
        [
            {}, {"where": ["tp * batch <= 8"]}, {"where": ["latency_s < 0.5", "fits in memory"]},
            {"zip": {"tp": [1, 2]}},
            {"grid": {"seq_len": {"from": 64, "to": 256, "factor": 2}}}, {"sample": {"count": 2}},
            {"block": [{"base": {"batch": 1}}], "grid": {}},
        ]
    )  # fmt: skip
    if rng.random() < 0.1:
        grid["where"] = [
            rng.choice(["(" * 300, "not " * 900 + "tp", "tp" + "+1" * 900, "9**9**9 > tp", "tp[0]", "[1]*9**9"])
        ]
    return grid


def grid_case(rng: random.Random) -> Case:
    """Grids of a sweep."""
    table = mutated(_grid(rng), rng)
    json_file = rng.random() < 0.5
    ending = ".json" if json_file else ".toml"
    return (
        in_bytes(json.dumps(table) if json_file else toml_text(table), rng),
        ending,
        ["sweep", "@", "--jobs", "1", "--quiet"],
    )


def journal_case(rng: random.Random) -> Case:
    """Journals that an earlier sweep may have left."""
    lines = [
        rng.choice(["{}", "5", "null", "[]", '{"scenario_id": 5}', '{"scenario_id": "x", "error": null}', "{", "\x00"])
    ]
    lines += [json.dumps(mutated({"scenario_id": "abc", "error": None, "model": "m", "latency_s": 1.0}, rng))]
    return in_bytes("\n".join(lines), rng), ".journal", ["sweep"]


def model_case(rng: random.Random) -> Case:
    """Models as TOML."""
    sizes: dict[str, Any] = {
        "id": "mine", "source": "s", "d_model": 512, "layers": 2, "q_heads": 8, "kv_heads": 4, "head_dim": 64,
        "d_ff": 1024, "vocab": 1000,
    }  # fmt: skip
    ops = [{"label": "Q", "pattern": "bsm,mHh->bsHh", "parallel": "H"}]
    block = [{"node": "pointwise", "name": "norm", "op": "rmsnorm"}, {"node": "gemm", "name": "qkv", "ops": ops}]
    more: list[dict[str, Any]] = [
        {}, {"experts": 8, "top_k": 2}, {"block": block}, {"latent": {"kv_rank": 64, "nope_dim": 64, "rope_dim": 32}},
    ]  # fmt: skip
    table = mutated(sizes | rng.choice(more), rng)
    flags = ["simulate", "--layers", "1", "--seq-len", "64", "--regime", "cold", "--model", "@"]
    return in_bytes(toml_text(table), rng), ".toml", flags


def gpu_case(rng: random.Random) -> Case:
    """GPUs as TOML."""
    import tomllib

    table = tomllib.loads((files("hardware") / "data" / "gpus" / "h100-sxm-80gb.toml").read_text(encoding="utf-8"))
    flags = ["simulate", "--model", "llama3-8b", "--layers", "1", "--seq-len", "64", "--regime", "cold", "--gpu", "@"]
    return in_bytes(toml_text(mutated(table, rng)), rng), ".toml", flags


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "trace": trace_case, "nsight": nsight_case, "requests": requests_case, "records": records_case,
    "scenario": scenario_case, "grid": grid_case, "journal": journal_case, "model": model_case, "gpu": gpu_case,
}  # fmt: skip
