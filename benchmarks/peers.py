"""Side by side with peers on the same work in one run: ``python benchmarks/peers.py FOLDER... --genz PYTHON``.

PYTHON is the interpreter of an environment with genz-llm (``pip install genz-llm``; it needs other versions than ours).
The work is every whole Llama run (all layers, bf16, CUDA graph, tensor parallel at most) among the records of the
FOLDERs; both predict its latency from sizes alone. Peers get the datasheet of the H100 and their own defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import machine, put, section

import workloads
from hardware.catalog import load_gpu
from sim import simulate
from sim.studies.fidelity import record_files
from sim.validation.records import read_records

RESULTS = Path(__file__).with_name("results.md")
GPU = "h100-sxm-80gb"
GENZ_MODELS = {"llama3-8b": "meta-llama/Llama-3.1-8B", "llama3-70b": "meta-llama/Llama-3.1-70B"}
# What the peer's own interpreter runs: work comes in as JSON lines, latency (ms), the part of the head, seconds go out.
GENZ_WORKER = """
import json, sys, time
from GenZ import decode_moddeling, prefill_moddeling
for line in sys.stdin:
    work = json.loads(line)
    decode = work.pop("decode")
    begin = time.perf_counter()
    found = decode_moddeling(output_tokens=1, Bb=1, **work) if decode else prefill_moddeling(**work)
    seconds = time.perf_counter() - begin
    head_ms = 0.0 if decode else float(found["Runtime_breakdown"].Embedding)
    print("RESULT", json.dumps([float(found["Latency"]), head_ms, seconds]), flush=True)
"""


def whole_runs(folders: Sequence[Path]) -> list[tuple[dict[str, Any], float]]:
    """Inputs and measured latency (s) of the runs that every tool can be asked for."""
    found: dict[str, tuple[dict[str, Any], float]] = {}
    for path in (path for folder in folders for path in record_files(folder)):
        for record in read_records(path):
            asked = {k: v for k, v in record.inputs.items() if v not in (None, False)}
            model = asked.get("model")
            plain = asked.get("dtype", "bf16") == "bf16" and asked.get("launch", "graph") == "graph"
            extra = {"sequence_parallel", "cp", "ulysses", "pp", "overlap", "overlap_chunks"} & {
                name for name, value in asked.items() if value != 1
            }
            if record.kind == "model_step" and model in GENZ_MODELS and plain and not extra and asked["gpu"] == GPU:
                whole = asked["layers"] == workloads.load_model(model).layers and asked.get("lm_head")
                if whole and asked.get("dp", 1) == 1:
                    sizes = {name: asked[name] for name in ("model", "phase", "batch", "seq_len")}
                    found[record.digest] = (sizes | {"tp": asked.get("tp", 1)}, record.measured["latency_s"])
    return list(found.values())


def genz_works(works: Sequence[dict[str, Any]]) -> str:
    """The same work in the peer's words, a JSON line each."""
    gpu = load_gpu(GPU)
    system = {
        "Flops": gpu.tensor_flops_per_s["bf16"] / 1e12,
        "Memory_size": gpu.memory_bytes / 1e9,
        "Memory_BW": gpu.hbm_bytes_per_s / 1e9,
        "ICN": gpu.link_bytes_per_s / 1e9,
        "real_values": True,
    }
    lines = []
    for work in works:
        asked = {
            "model": GENZ_MODELS[work["model"]],
            "batch_size": work["batch"],
            "input_tokens": work["seq_len"],
            "system_name": system,
            "bits": "bf16",
            "tensor_parallel": work["tp"],
            "parallelism_heirarchy": f"TP{{{work['tp']}}}_EP{{1}}_PP{{1}}",  # spelt as the peer spells it
            "decode": work["phase"] == "decode",
        }
        lines.append(json.dumps(asked))
    return "\n".join(lines)


def main() -> None:
    """Run both and put the section into results.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--genz", required=True, help="interpreter of an environment with genz-llm")
    arguments = parser.parse_args()
    where = machine()
    runs = whole_runs(arguments.folders)
    works, measured = [work for work, _ in runs], [latency_s for _, latency_s in runs]
    ours_s, ours_took = [], []
    for work in works:
        begin = time.perf_counter()
        ours_s.append(simulate(gpu=GPU, **work).latency_s)
        ours_took.append(time.perf_counter() - begin)
    version = "import importlib.metadata as m; print(m.version('genz-llm'))"
    name = (
        "genz-llm "
        + subprocess.run([arguments.genz, "-c", version], capture_output=True, text=True, check=True).stdout.strip()
    )
    done = subprocess.run(
        [arguments.genz, "-c", GENZ_WORKER], input=genz_works(works), capture_output=True, text=True, check=True
    )
    told = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(told) == len(works), done.stderr[-2000:]
    genz_s = [latency_ms * 1e-3 for latency_ms, _, _ in told]
    headless_s = [(latency_ms - head_ms) * 1e-3 for latency_ms, head_ms, _ in told]
    took = [seconds for _, _, seconds in told]
    rows = [
        _row("wattline", ours_s, measured, works, ours_took, "yes"),
        _row(name, genz_s, measured, works, took, "no"),
        _row(f"{name}, less its head over all prompt tokens", headless_s, measured, works, took, "no"),
    ]
    head = (
        f"{len(runs)} whole Llama runs on H100s", "latency error %", "worst %", "prefill %", "decode %",
        "median ms a prediction", "energy, power, clock, timeline",
    )  # fmt: skip
    text = section("Side by side with peers", "python benchmarks/peers.py FOLDER... --genz PYTHON", where, head, rows)
    put(text + NOTES, RESULTS)
    print(text)


def _row(
    name: str,
    predicted: Sequence[float],
    measured: Sequence[float],
    works: Sequence[dict[str, Any]],
    took: Sequence[float],
    more: str,
) -> tuple[str, ...]:
    errors = [abs(p / m - 1.0) for p, m in zip(predicted, measured, strict=True)]

    def mean(of: Callable[[dict[str, Any]], bool]) -> str:
        return f"{100 * statistics.fmean(e for e, work in zip(errors, works, strict=True) if of(work)):.1f}"

    return (
        name,
        mean(lambda _: True),
        f"{100 * max(errors):.1f}",
        mean(lambda work: work["phase"] == "prefill"),
        mean(lambda work: work["phase"] == "decode"),
        f"{1e3 * statistics.median(took):.1f}",
        more,
    )


NOTES = """
Mean absolute errors against measured latency. No fit has seen these runs, but wattline's profile was fitted on kernels
of these cards, which is no small part of the difference: genz-llm is a roofline at the datasheet's rates, its default.
Our measured prefills score only the last token; genz-llm counts the head over all of them, the third line leaves it
out. vidur 0.0.26 installs, but fetches the kernel times that it needs from a hub when it runs, which this machine does
not reach: not run.
"""


if __name__ == "__main__":
    main()
