"""A layer of a real chunked prefill on two H200s over the simulated one: ``python benchmarks/beside_real.py OUT.png``.

The trace is committed under records/h200-sxm-141gb/traces; nothing of it enters the simulation.
"""

import argparse
import gzip
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from sim import simulate

TRACE = "llama3-70b-prefill-2x4096-tp2-overlap_chunks8-comm_ctas4.rank0.json.gz"
TRACES = Path(__file__).parents[1] / "records/h200-sxm-141gb/traces"
LAYER = 1
COLOURS = {"product": "#4c78a8", "attention": "#54a24b", "elementwise": "#bab0ac", "communication": "#e45756"}
Span = tuple[float, float, str]  # start and length in microseconds, kind


def real_layer() -> list[Span]:
    """Kernels of the layer in the profiler trace; a layer begins with every second norm."""
    events = json.loads(gzip.decompress((TRACES / TRACE).read_bytes()))["traceEvents"]
    kernels = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "kernel")
    starts = [ts for ts, _, name in kernels if "_add_rms" in name][::2]
    begin, end = starts[LAYER], starts[LAYER + 1]
    kinds = (("nccl", "communication"), ("nvjet", "product"), ("sdpa", "attention"))
    return [
        (ts - begin, length, next((kind for part, kind in kinds if part in name), "elementwise"))
        for ts, length, name in kernels
        if begin <= ts < end
    ]


def simulated_layer() -> list[Span]:
    """The same layer by wattline."""
    run = simulate(
        model="llama3-70b", gpu="h200", tp=2, batch=2, seq_len=4096, layers=4, lm_head=False, sequence_parallel=True,
        overlap_chunks=8, comm_ctas=4,
    )  # fmt: skip
    rows = run.kernels[(run.kernels.gpu == 0) & (run.kernels.segment == f"layer {LAYER}")]
    begin = rows.start_s.min()
    kinds = {"gemm": "product"}
    return [
        (1e6 * (row.start_s - begin), 1e6 * row.duration_s, kinds.get(row.family, row.family))
        for row in rows.itertuples()
    ]


def main() -> None:
    """Draw both, communication above computation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    figure, axes = plt.subplots(2, 1, figsize=(14, 3.6), sharex=True, layout="constrained")
    for axis, name, spans in zip(axes, ("profiler trace", "wattline"), (real_layer(), simulated_layer()), strict=True):
        for start, length, kind in spans:
            lane = kind == "communication"
            axis.broken_barh([(start / 1e3, length / 1e3)], (lane, 0.9), color=COLOURS[kind], edgecolor="white", lw=0.4)
        axis.set_yticks([0.45, 1.45], ["compute", "NCCL"])
        axis.set_title(name, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("milliseconds since the layer began")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
