"""Mutated traces end in a result or one clean error: ``python benchmarks/trace_fuzz.py [COUNT] [SEED]``.

Each is inspected, and replayed as it was.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from sim.errors import SimError
from sim.replay import report as replay_report
from sim.replay.inspect import inspect_trace
from sim.replay.inspect_report import as_document
from sim.replay.study import replay_trace
from traces.errors import TraceError

LIMIT_S = 20  # no small trace may take longer
TOKENS = [
    "null", "true", "NaN", "-Infinity", "N/A", '"', "\\", "{", "}", "[", "]", ",", ":", "1e999", "-1",
    '"7"', "{}", "[]", '"stream 7"', "\x00", "\ufeff",
    "é", '"ts": "x",', "\n", "]}", '{"traceEvents": [', "0", "1e-9", "-0.5",
]  # fmt: skip
KEYS = [
    "ts",
    "dur",
    "pid",
    "tid",
    "name",
    "cat",
    "ph",
    "args",
    "stream",
    "correlation",
    "device",
    "grid",
    "bytes",
    "op",
    "m",
    "k",
    "count",
    "buffer_bytes",
]
VALUES = [None, True, -1, 2**70, 1e300, "x", "", [], {}, [None], {"a": [1]}, "NaN", 0, -0.0, [[1]], "0x10", 2**33]


def seed_trace(rng: random.Random) -> str:
    """A plausible trace: launches, kernels, collectives, waits, annotations, metadata."""
    events = []
    for number in range(rng.randrange(3, 30)):
        us = 5e12 * rng.choice([0, 1]) + 10 * number
        name = rng.choice(["sgemm", "ncclDevKernel_AllReduce", "void f<int>(x)", "flash_fwd"])
        args = {
            "stream": rng.choice([7, 20]),
            "device": 0,
            "correlation": number,
            "grid": [1, 2, 3],
            "block": [32, 1, 1],
        }
        category, more = rng.choice(
            [
                ("kernel", {}), ("kernel", {"Collective name": "allreduce", "Group size": 8}),
                ("gpu_memcpy", {"bytes": 8}),
                ("kernel", {"energy_j": 0.5, "family": "gemm", "m": 8, "n": 8, "k": 8}), ("user_annotation", {}),
                ("cuda_sync", {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 7}),
            ]
        )  # fmt: skip
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": us,
            "dur": 9.5,
            "args": args | more,
        }
        call = {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 9,
            "tid": 1,
            "ts": us - 5,
            "dur": 1,
        }
        events += [call | {"args": {"correlation": number}}, event]
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "baseTimeNanoseconds": 10**18}
    for _ in range(rng.randrange(0, 4)):
        target = rng.choice(events)
        if rng.random() < 0.5 and isinstance(target.get("args"), dict):
            target["args"][rng.choice(KEYS)] = rng.choice(VALUES)
        else:
            target[rng.choice(KEYS)] = rng.choice(VALUES)
    for _ in range(rng.randrange(0, 2)):
        head[rng.choice(list(head))] = rng.choice(VALUES)
    text = json.dumps(head | {"traceEvents": events, "traceName": "t"}, indent=rng.choice([None, 2]))
    return text if rng.random() < 0.9 else json.dumps(events)


def mutate(text: str, rng: random.Random) -> bytes:
    """Some edits of characters, of whole pieces, and now and then of bytes."""
    for _ in range(rng.randrange(0, 6)):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.randrange(0, rng.choice([2, 10, 200])))
        text = rng.choice(
            [
                text[:at] + rng.choice(TOKENS) + text[at:],
                text[:at] + text[end:],
                text[:at] + text[at:end] * 2 + text[end:],
            ]
        )
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data and rng.random() < 0.1:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data)


def run(count: int, seed: int, folder: Path) -> Counter[str]:
    """How ``count`` mutated traces ended; anything but a result or a clean error is raised."""
    ends: Counter[str] = Counter()
    path = folder / "t.json"
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        path.write_bytes(mutate(seed_trace(rng), rng))
        try:
            json.dumps(as_document(inspect_trace((path,), lint=True)), allow_nan=False)
            ends["result"] += 1
            json.dumps(replay_report.as_document(replay_trace((path,))), allow_nan=False)
            ends["replayed"] += 1
        except TraceError as error:
            if "\n" in str(error) or str(path) not in str(error):
                raise AssertionError(f"seed {seed}, trace {number}: no clean error: {error}") from error
            ends["clean error"] += 1
        except SimError as error:
            if "\n" in str(error):
                raise AssertionError(f"seed {seed}, trace {number}: no clean error: {error}") from error
            ends["replay refused"] += 1
        except Exception as error:
            error.add_note(f"seed {seed}, trace {number}")
            raise
    return ends


def main() -> None:
    """Run as a script, with an alarm against hanging."""
    words = [int(word) for word in sys.argv[1:]]
    count, seed = (words + [2000, 0][len(words) :])[:2]
    signal.alarm(count * LIMIT_S)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ends = run(count, seed, Path(folder))
    print(f"{count} traces, seed {seed}: {dict(ends)}, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
