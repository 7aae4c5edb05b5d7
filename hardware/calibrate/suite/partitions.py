"""Kernels on a part of a GPU's SMs, alone and side by side: CUDA green contexts, measured.

``python -m hardware.calibrate.suite.partitions --out F`` on one NVIDIA GPU (products, attention, copies), with
``--world 2`` collectives on one partition and products on the other. Needs PyTorch and cuda-bindings.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware.calibrate.suite import plan
from hardware.calibrate.suite.buffers import collective_buffers
from hardware.calibrate.suite.cases import build
from hardware.calibrate.suite.comm import most
from hardware.calibrate.suite.race import StreamWork, beside_fields, make_lane
from hardware.calibrate.suite.run import free_port, share_of
from hardware.calibrate.suite.timing import Bench, capture, new_slots, repeated, stamps_between, steady, together
from hardware.calibrate.suite.worker import SuiteOptions, append, brief, label, make_bench
from hardware.errors import HardwareError

Row = Mapping[str, Any]
MIB = 1 << 20
# Sizes of partitions, in SMs: the driver rounds them up to eights on Hopper.
SIZES = (8, 16, 32, 48, 64, 80, 96, 112, 124)
PREFILL = plan.gemm(4096, 6144, 4096)
SMALL_K = plan.gemm(2048, 4096, 14336)
DECODE = plan.gemm(64, 28672, 4096)
ONE = plan.gemm(1, 28672, 4096)
FLASH = plan.attention("prefill", 1, 4096)
CACHE = plan.attention("decode", 32, 4096)
COPY = plan.copy(512 * MIB)
NORM = plan.elementwise("add_rmsnorm", 8192, 4096)
EIGHT = plan.gemm(4096, 6144, 4096, "fp8_e4m3")
ALONE = (PREFILL, SMALL_K, DECODE, ONE, FLASH, CACHE, COPY, NORM, EIGHT)
# What a server puts side by side: a prompt beside decodes, and what bounds each by another resource.
BESIDE = ((PREFILL, DECODE), (PREFILL, CACHE), (FLASH, CACHE), (FLASH, DECODE), (PREFILL, COPY), (PREFILL, PREFILL))
SPLITS = (16, 32, 64, 96)  # SMs of the second kernel
OPS, BLOCKS, COMM_SMS, COMM_BYTES = ("all_gather", "reduce_scatter", "all_reduce"), (4, 8, 16), (8, 16, 32), 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """``sms`` SMs of the GPU and a stream whose kernels run nowhere else (None: all SMs, any stream)."""

    sms: int
    stream: Any


class Splitter:
    """Partitions of one GPU, made once a size and kept."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._made: dict[tuple[int, int], tuple[Partition, Partition]] = {}

    def whole(self) -> Partition:
        """All SMs, no green context."""
        return Partition(sms=self._bench.kernels.sms, stream=None)

    def split(self, sms: int, *, priority: int = 0) -> tuple[Partition, Partition]:
        """At least ``sms`` SMs, and the rest; streams of the first are of ``priority``."""
        if self._bench.dry:
            return Partition(sms=sms, stream=None), Partition(sms=self._bench.kernels.sms - sms, stream=None)
        if (sms, priority) not in self._made:
            self._made[sms, priority] = self._make(sms, priority)
        return self._made[sms, priority]

    def _make(self, sms: int, priority: int) -> tuple[Partition, Partition]:
        from cuda.bindings import driver

        def check(result: tuple[Any, ...]) -> tuple[Any, ...]:
            if int(result[0]) != 0:
                raise HardwareError(f"a green context of {sms} SMs: {result[0]}")
            return result[1:]

        torch = self._bench.torch
        (device,) = check(driver.cuDeviceGet(torch.cuda.current_device()))
        (everything,) = check(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
        groups, _, rest = check(driver.cuDevSmResourceSplitByCount(1, everything, 0, sms))
        made = []
        for resource, own in ((groups[0], priority), (rest, 0)):
            (described,) = check(driver.cuDevResourceGenerateDesc([resource], 1))
            flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
            (context,) = check(driver.cuGreenCtxCreate(described, device, flags))
            non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            (stream,) = check(driver.cuGreenCtxStreamCreate(context, non_blocking, own))
            external = torch.cuda.ExternalStream(int(stream), device=torch.cuda.current_device())
            made.append(Partition(sms=int(resource.sm.smCount), stream=external))
        return made[0], made[1]


def on(bench: Bench, partition: Partition) -> Any:
    """The partition's stream as the current one."""
    return nullcontext() if partition.stream is None else bench.torch.cuda.stream(partition.stream)


def sms_seen(bench: Bench, partition: Partition) -> int:
    """On how many SMs a captured kernel of many blocks really ran: the proof that graphs keep the partition."""
    if bench.dry:
        return partition.sms
    slots = new_slots(bench, 1)

    def stamps() -> None:
        for _ in range(8):
            bench.kernels.stamp(slots[0])

    with on(bench, partition):
        replay = capture(bench, stamps, stream=partition.stream)
        slots.zero_()
        replay()
    bench.synchronize()
    return int((slots[0, :, 1] > 0).sum())


def measure_alone(bench: Bench, work: Row, partition: Partition) -> dict[str, Any]:
    """One kernel in steady state on a partition, and the true clock of its SMs: NVML knows the one that was set."""
    with on(bench, partition):
        case, slots = build(bench, work), new_slots(bench, 2)
        replay, count = repeated(
            bench,
            _dropping(case.launch),
            kernels_each=case.kernels_each,
            rotate=case.rotate,
            stream=partition.stream,
            slots=slots,
        )
        measured = together(bench, steady(bench, replay, count))
        ((_, clock_mhz),) = stamps_between(bench, slots, [(0, 1)])
        return {**case.facts, **measured, **({} if math.isnan(clock_mhz) else {"clock_mhz": round(clock_mhz, 1)})}


def measure_beside(bench: Bench, a: Row, b: Row, first: Partition, second: Partition) -> dict[str, Any]:
    """``a`` on one partition and ``b`` on the other, each back to back: seconds of each while both ran, watts."""
    lanes: list[StreamWork] = []
    for work, partition in ((a, first), (b, second)):
        with on(bench, partition):
            launch, rotate = launcher(bench, work)
            lanes.append(
                make_lane(bench, launch, rotate=rotate, priority=0, stamped=not lanes, stream=partition.stream)
            )
    return beside_fields(bench, *lanes, seconds=2.2)


def launcher(bench: Bench, work: Row) -> tuple[Callable[[int], None], int]:
    """Repetition i of a kernel row, or of a collective, and the period of its buffers; one that is ``hot`` works on the
    same ones each time."""
    if work["kind"] == "collective":
        buffer, part = collective_buffers(bench, work["op"], work["bytes"])
        return (lambda _: bench.comm.collective(work["op"], buffer, part, work["ctas"])), 1
    case = build(bench, {name: value for name, value in work.items() if name != "hot"})
    if work.get("hot"):
        return _dropping(lambda _: case.launch(0)), 1
    return _dropping(case.launch), case.rotate


def _dropping(launch: Callable[[int], object]) -> Callable[[int], None]:
    def run(i: int) -> None:
        launch(i)  # the tensor that it returns goes back to the pool at once

    return run


def alone_rows(share: int, of: int) -> list[Row]:
    """Kernels by themselves on the whole GPU and on every size; the kernels are dealt out over ``of`` GPUs."""
    works = [work for i, work in enumerate(ALONE) if i % of == share]
    return [{"kind": "partition", "kernel": work, "asked_sms": sms} for work in works for sms in (None, *SIZES)]


def beside_rows(share: int, of: int) -> list[Row]:
    """Pairs on both sides of a split, and on the whole GPU without one."""
    rows = [
        {"kind": "partitions", "a": a, "b": b, "asked_b_sms": sms}
        for (a, b), sms in itertools.product(BESIDE, (None, *SPLITS))
    ]
    return [row for i, row in enumerate(rows) if i % of == share]


def comm_rows() -> list[Row]:
    """Collectives of forced block counts on a partition, alone and beside a product on the rest."""
    ops = [plan.collective(op, COMM_BYTES, ctas) for op, ctas in itertools.product(OPS, BLOCKS)]
    rows: list[Row] = [{"kind": "partition", "kernel": op, "asked_sms": sms} for op in ops for sms in (None, *COMM_SMS)]
    rows += [
        {"kind": "partitions", "a": PREFILL, "b": op, "asked_b_sms": sms}
        for op in ops
        if op["op"] != "all_reduce"
        for sms in (None, *COMM_SMS)
        if sms is None or sms >= op["ctas"]
    ]
    return rows


def measure(bench: Bench, splitter: Splitter, row: Row) -> dict[str, Any]:
    """The record of one row."""
    if row["kind"] == "partition":
        asked = row["asked_sms"]
        own = splitter.whole() if asked is None else splitter.split(asked)[0]
        facts = {"sms": own.sms, "sms_seen": sms_seen(bench, own)}
        if row["kernel"]["kind"] == "collective":
            with on(bench, own):
                launch, rotate = launcher(bench, row["kernel"])
                replay, count = repeated(bench, launch, rotate=rotate, stream=own.stream)
                return {**facts, **together(bench, steady(bench, replay, count))}
        return {**facts, **measure_alone(bench, row["kernel"], own)}
    asked = row["asked_b_sms"]
    whole = splitter.whole()
    second, first = (whole, whole) if asked is None else splitter.split(asked, priority=-1)
    facts = {"a_sms": first.sms, "b_sms": second.sms}
    return {**facts, **measure_beside(bench, row["a"], row["b"], first, second)}


def work(rank: int, rows: Sequence[Row], options: SuiteOptions) -> None:
    """One rank's process: every row; one that fails is said and left out."""
    flat = [{"kind": "x", "ctas": row.get("kernel", row.get("b", {})).get("ctas")} for row in rows]
    bench = make_bench(rank, flat, options)
    splitter = Splitter(bench)
    for row in rows:
        record, problem = None, ""
        try:
            record = {**row, "gpu": bench.gpu_id, "world": options.world, **measure(bench, splitter, row)}
        except Exception as error:  # a row that this driver or library cannot run leaves the others standing
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if most(bench.comm, float(record is None)) > 0:
            print(f"rank {rank} {label(row)}: {problem}", file=sys.stderr, flush=True)
        elif rank == 0 and record is not None:
            append(options.out, {**record, "dry_run": True} if options.dry else record)
            print(f"{label(row)} {brief(record)}", flush=True)
    bench.comm.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m hardware.calibrate.suite.partitions", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="records, one JSON object a line; appended to")
    parser.add_argument("--gpu", help="id to write into records (default: from the product name)")
    parser.add_argument("--world", type=int, default=1, choices=(1, 2), help="2: collectives on a partition")
    parser.add_argument("--share", type=share_of, default=(0, 1), help="i/n: every n-th row from the i-th on")
    parser.add_argument("--rows", type=Path, help="the rows of this file of records instead")
    parser.add_argument("--dry-run", action="store_true", help="check every row without a GPU; figures are fake")
    arguments = parser.parse_args(argv)
    share, of = arguments.share
    options = SuiteOptions(
        out=arguments.out, world=arguments.world, port=free_port(), gpu_id=arguments.gpu, dry=arguments.dry_run
    )
    rows: Sequence[Row]
    if arguments.rows is not None:
        rows = [plan.asked(record) for record in plan.load(arguments.rows)][share::of]
    elif arguments.world == 2:
        rows = comm_rows()[share::of]
    else:
        rows = [*alone_rows(share, of), *beside_rows(share, of)]
    try:
        import torch
    except ImportError:
        print("partitions: measuring needs PyTorch: pip install 'wattline[measure]'", file=sys.stderr)
        return 2
    if arguments.world == 1 or arguments.dry_run:
        work(0, rows, options)
    else:
        torch.multiprocessing.spawn(work, args=(rows, options), nprocs=arguments.world, join=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
