"""Which SMs blocks get: ``python -m hardware.calibrate.suite.placement --out placement.jsonl`` on two Hopper GPUs.

Needs ``nvcc`` beside PyTorch: :file:`placement.cu` is a kernel whose blocks hold an SM each and say which. Takes a few
minutes. Kinds and fields of the rows are in ``docs/records.md``, "Where blocks land". A collective is *parked* when
rank 1 has launched it and rank 0 has not yet: its blocks hold their SMs and move nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hardware.calibrate.suite.placement_probe import CTAS, WORLD, Probe
from hardware.calibrate.suite.placement_products import gemm_after, gemm_beside, gemm_running
from hardware.calibrate.suite.plan import MIB
from hardware.calibrate.suite.run import free_port
from hardware.calibrate.suite.worker import SuiteOptions, make_bench

OPS = ("all_gather", "reduce_scatter", "all_reduce", "sendrecv_ring")
HOLD_NS, LONG_HOLD_NS = 200_000, 2_000_000
# Blocks that hold SMs while a collective asks for some, by size of their clusters.
HELD_BLOCKS = {
    2: (132, 130, 128, 126, 124, 120, 116, 112, 104, 100, 96, 88, 80, 72, 64),
    1: (132, 131, 130, 128, 124, 116, 108, 100),
}


def clusters(probe: Probe) -> None:
    """A grid on an idle GPU, by size of its clusters."""
    if not probe.measures:
        return
    for cluster, _ in itertools.product((1, 2, 4, 8, 16), range(2)):
        sm, start_us = _held(probe, cluster)
        probe.say("clusters", cluster=cluster, sm=sm, start_us=start_us)


def _held(probe: Probe, cluster: int) -> tuple[list[int], list[float]]:
    """Fill the GPU: SM of every block, and microseconds from the first block's begin to its own."""
    room = probe.room(probe.bench.kernels.sms // cluster * cluster)
    probe.hold(probe.side, room, cluster, HOLD_NS)
    probe.side.synchronize()
    rows = room.cpu().tolist()
    first = min(row[1] for row in rows)
    return [row[0] for row in rows], [(row[1] - first) / 1e3 for row in rows]


def beside_parked(probe: Probe) -> None:
    """Blocks that start at once beside a parked collective: those that begin before the first ones end."""

    def fill(op: str, ctas: int | None, cluster: int) -> None:
        sm, start_us = _held(probe, cluster)
        first = {sm_id for sm_id, start in zip(sm, start_us, strict=True) if start < HOLD_NS / 2e3}
        missing = sorted(set(range(probe.bench.kernels.sms)) - first)
        probe.say("beside_parked", op=op, ctas=ctas, cluster=cluster, resident=len(first), missing=missing)

    for op, ctas, cluster in itertools.product(OPS, CTAS, (1, 2, 4)):
        probe.parked(op, ctas, partial(fill, op, ctas, cluster))


def starts(probe: Probe) -> None:
    """Does a collective start beside a kernel that holds so many SMs for 2 ms? It ends before that one if it does."""
    for ctas, cluster in itertools.product(CTAS, HELD_BLOCKS):
        for blocks in HELD_BLOCKS[cluster]:
            seen = [_start(probe, ctas, cluster, blocks) for _ in range(3)]
            end_ms, held_ms = [end for end, _ in seen], [held for _, held in seen]
            probe.say(
                "starts", op="all_gather", ctas=ctas, cluster=cluster, blocks=blocks, end_ms=end_ms, held_ms=held_ms
            )


def _start(probe: Probe, ctas: int | None, cluster: int, blocks: int) -> tuple[float, float]:
    """Milliseconds from the launch of the holding blocks to the end of the collective, and to their own."""
    event = probe.bench.torch.cuda.Event
    probe.meet()
    if not probe.measures:
        probe.collective("all_gather", ctas)
        probe.bench.synchronize()
        return 0.0, 0.0
    time.sleep(0.002)
    room = probe.room(blocks)
    begin, held, ended = (event(enable_timing=True) for _ in range(3))
    begin.record(probe.side)
    probe.hold(probe.side, room, cluster, LONG_HOLD_NS)
    held.record(probe.side)
    time.sleep(0.0003)
    with probe.bench.torch.cuda.stream(probe.high):
        probe.collective("all_gather", ctas)
        ended.record(probe.high)
    probe.bench.synchronize()
    return round(begin.elapsed_time(ended), 3), round(begin.elapsed_time(held), 3)


SECTIONS = (clusters, beside_parked, starts, gemm_after, gemm_beside, gemm_running)


def measure(rank: int, options: SuiteOptions, library: str) -> None:
    """One rank's process: every section, met before and after."""
    bench = make_bench(rank, [{"kind": "collective", "ctas": ctas} for ctas in CTAS], options)
    torch = bench.torch
    holding = ctypes.CDLL(library)
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    holding.hold_launch.argtypes = [pointer, integer, integer, ctypes.c_longlong, pointer, integer]
    probe = Probe(
        bench=bench,
        library=holding,
        out=options.out,
        side=torch.cuda.Stream(),
        high=torch.cuda.Stream(priority=-1),
        full=bench.randn(2 * MIB),
        part=bench.randn(MIB),
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    probe.say("host", name=torch.cuda.get_device_name(), torch=torch.__version__, nccl=nccl)
    for section in SECTIONS:
        probe.meet()
        section(probe)
        bench.synchronize()
    probe.meet()
    bench.comm.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m hardware.calibrate.suite.placement", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="records, one JSON object a line; appended to")
    parser.add_argument("--gpu", help="id to write into records (default: from the product name)")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # records are taken without NVLink multicast
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "placement.so"
        source = Path(__file__).with_suffix(".cu")
        build = ["nvcc", "-O2", "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(build, check=True)
            import torch
        except (OSError, subprocess.CalledProcessError, ImportError) as error:
            print(f"placement: {error}: it needs nvcc, PyTorch and two Hopper GPUs", file=sys.stderr)
            return 2
        if torch.cuda.device_count() < WORLD:
            print(f"placement: {torch.cuda.device_count()} GPUs found: it needs {WORLD}", file=sys.stderr)
            return 2
        options = SuiteOptions(out=arguments.out, world=WORLD, port=free_port(), gpu_id=arguments.gpu)
        torch.multiprocessing.spawn(measure, args=(options, str(library)), nprocs=WORLD, join=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
