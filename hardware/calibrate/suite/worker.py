"""One rank's loop over planned rows: measure, agree, and let rank 0 append the record."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.calibrate.suite.at_clock import measure_at_clock
from hardware.calibrate.suite.cases import measure_kernel
from hardware.calibrate.suite.cases_pair import measure_collective, measure_in_context, measure_together
from hardware.calibrate.suite.cases_vllm import measure_vllm_all_reduce
from hardware.calibrate.suite.comm import Comm, NcclComm, QuietComm, most
from hardware.calibrate.suite.duty import measure_alternating, measure_duty, measure_host, measure_idle
from hardware.calibrate.suite.host_issue import measure_host_issue
from hardware.calibrate.suite.kernels import Kernels
from hardware.calibrate.suite.meter import DryMeter, Meter, NvmlMeter
from hardware.calibrate.suite.plan import estimated_s
from hardware.calibrate.suite.progress import Reporter, reporter
from hardware.calibrate.suite.race import collective_of, measure_alone
from hardware.calibrate.suite.shapes import SHAPES, ModelShape
from hardware.calibrate.suite.steps import measure_generate, measure_step
from hardware.calibrate.suite.steps_diffusers import measure_diffusers
from hardware.calibrate.suite.steps_overlap import measure_dit, measure_ring
from hardware.calibrate.suite.timing import Bench
from hardware.calibrate.suite.transient import measure_transient

Row = Mapping[str, Any]
_POOL_ELEMENTS = 640 * 1024 * 1024
_CACHE_LIMIT_BYTES = 30e9
_KNOWN_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """How to run; picklable, so that every rank's process gets the same.

    ``budget_s`` ends the run before the row that would exceed it; ``shapes``: model sizes by name; ``traces``: a folder
    for profiler traces of the whole-model steps.
    """

    out: Path
    world: int
    port: int = 0
    gpu_id: str | None = None
    dry: bool = False
    budget_s: float = math.inf
    shapes: Mapping[str, ModelShape] = field(default_factory=lambda: SHAPES)
    traces: Path | None = None


def gpu_id_of(name: str) -> str:
    """The catalog's id of an NVML product name, or the name as a slug.

    >>> gpu_id_of("NVIDIA H100 80GB HBM3"), gpu_id_of("NVIDIA L40S")
    ('h100-sxm-80gb', 'l40s')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
    return _KNOWN_NAMES.get(name, slug)


def measure(bench: Bench, row: Row) -> dict[str, Any]:
    """The measured fields of one planned row."""
    match row["kind"]:
        case "host":
            return measure_host(bench)
        case "host_issue":
            return measure_host_issue(bench, row)
        case "idle":
            return measure_idle(bench, row)
        case "duty":
            return measure_duty(bench, row)
        case "alternating":
            return measure_alternating(bench, row)
        case "at_clock":
            return measure_at_clock(bench, row)
        case "transient":
            return measure_transient(bench, row)
        case "collective":
            return measure_collective(bench, row)
        case "in_context":
            return measure_in_context(bench, row)
        case "alone":
            return measure_alone(bench, row)
        case "together":
            return measure_together(bench, row)
        case "model_step":
            return measure_step(bench, row)
        case "generate":
            return measure_generate(bench, row)
        case "dit_step":
            return measure_dit(bench, row)
        case "diffusers_step" | "diffusers_decode" | "diffusers_text" | "diffusers_blend":
            return measure_diffusers(bench, row)
        case "ring_attention":
            return measure_ring(bench, row)
        case "vllm_all_reduce":
            return measure_vllm_all_reduce(bench, row)
        case _:
            return measure_kernel(bench, row)


def nvml_index(device: int) -> int:
    """NVML's index of PyTorch's ``device``: NVML counts all cards, PyTorch those of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return int(visible[device]) if device < len(visible) and visible[device].isdigit() else device


def block_counts(rows: Sequence[Row]) -> list[int | None]:
    """Every NCCL block count that ``rows`` force."""
    counts: set[int | None] = set()
    for row in rows:
        counts.add(row.get("ctas"))
        counts.add(row.get("comm_ctas"))
        counts.update(one.get("comm_ctas") for one in (row.get("overlap_ops") or {}).values())
        if row["kind"] == "together":
            counts.add(collective_of(row["b"])[1])
    return [None, *sorted(c for c in counts if c is not None)]


def make_bench(rank: int, rows: Sequence[Row], options: SuiteOptions) -> Bench:
    """Open this rank's GPU, meter and group (or their stand-ins in a dry run)."""
    import torch

    if options.dry:
        comm: Comm = QuietComm(rank=rank, world=options.world)
        meter: Meter = DryMeter()
        device, sms = "meta", 132
    else:
        torch.cuda.set_device(rank)
        properties = torch.cuda.get_device_properties(rank)
        device, sms = f"cuda:{rank}", properties.multi_processor_count
        meter = NvmlMeter(index=nvml_index(rank), uuid=str(getattr(properties, "uuid", "")) or None)
        comm = (
            QuietComm()
            if options.world == 1
            else NcclComm(torch, rank=rank, world=options.world, port=options.port, ctas=block_counts(rows))
        )
    torch.manual_seed(rank)
    pool = torch.randn(_POOL_ELEMENTS, device=device, dtype=torch.bfloat16).mul_(0.02)
    return Bench(
        torch=torch,
        device=device,
        kernels=Kernels(torch, on_gpu=not options.dry, sms=sms),
        meter=meter,
        comm=comm,
        gpu_id=options.gpu_id or gpu_id_of(meter.facts.name),
        dry=options.dry,
        pool=pool,
        shapes=options.shapes,
        traces=options.traces,
    )


def work(rank: int, rows: Sequence[Row], options: SuiteOptions) -> None:
    """Measure ``rows`` in order; a row that fails on any rank is reported and left out."""
    bench = make_bench(rank, rows, options)
    with reporter(rank, rows) as report:
        _measure_all(bench, rows, options, report)
    bench.comm.close()


def _measure_all(bench: Bench, rows: Sequence[Row], options: SuiteOptions, report: Reporter) -> None:
    began_s = time.monotonic()
    rank, failed = bench.comm.rank, 0
    for number, row in enumerate(rows, start=1):
        spent_s = time.monotonic() - began_s
        if most(bench.comm, float(spent_s + estimated_s(row) > options.budget_s)) > 0:
            report.say(f"budget of {options.budget_s:.0f} s reached: {len(rows) - number + 1} rows not measured")
            break
        record: dict[str, Any] | None = None
        problem = ""
        try:
            record = {"kind": row["kind"], "gpu": bench.gpu_id, **row, **measure(bench, row)}
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if os.environ.get("WATTLINE_SUITE_TRACEBACK"):
                traceback.print_exc()
        if most(bench.comm, float(record is None)) > 0:
            failed += 1
            report.failed(f"rank {rank} {label(row)}: {problem}", row)
        elif rank == 0 and record is not None:
            if options.dry:
                record["dry_run"] = True
            append(options.out, record)
            report.measured(f"{label(row)}  {brief(record)}", row)
        _tidy(bench)
    report.say(f"{options.out.name}: done in {time.monotonic() - began_s:.0f} s, {failed} rows failed")


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one whole line and make it durable, so that an interrupted run leaves only whole records."""
    line = json.dumps(_finite(record), allow_nan=False, default=float) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def _finite(value: Any) -> Any:
    """The same with null for numbers that were not read (NaN is no JSON)."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


def label(row: Row) -> str:
    """A row's fields in one short line."""
    hidden = {"kind", "world", "dtype", "head_dim", "bytes_moved", "kernel", "regime", "gpu_index"}
    return str(row["kind"]) + "".join(f" {key}={value}" for key, value in row.items() if key not in hidden)


def brief(record: Row) -> str:
    """What came out, in a few words."""
    powers = [p for p in record.get("power_w", []) if p is not None and math.isfinite(p)]
    watts = "/".join(f"{p:.0f}" for p in powers)
    if "latency_s" in record:
        return f"-> {1e6 * record['latency_s']:.1f} us {watts} W"
    if "clock_mhz" in record and "seconds" in record:
        return f"-> {1e6 * record['seconds']:.1f} us at {record['clock_mhz']:.0f} MHz"
    if "iter_s" in record:
        last = record["iter_s"][-1:], record["clock_mhz"][-1:]
        return f"-> iter {[round(1e6 * s, 1) for s in last[0]]} us clock {[round(c) for c in last[1]]} MHz {watts} W"
    if "a_together_s" in record:
        ratio_a = record["a_together_s"][0] / record["a_alone_s"]
        ratio_b = record["b_together_s"][0] / record["b_alone_s"]
        return f"-> a x{ratio_a:.2f} b x{ratio_b:.2f} {watts} W"
    return f"-> {watts} W" if watts else ""


def _tidy(bench: Bench) -> None:
    gc.collect()
    if not bench.dry and bench.torch.cuda.memory_reserved() > _CACHE_LIMIT_BYTES:
        bench.torch.cuda.empty_cache()
