"""Measure this machine's GPUs for a profile: which plans, into which files."""

from __future__ import annotations

import math
from pathlib import Path

from hardware.calibrate.suite.engine_vllm import NEEDS_VLLM
from hardware.calibrate.suite.run import run_plan, visible_gpus
from hardware.calibrate.suite.worker import SuiteOptions
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.nvml import detect
from traces.write.files import installed


def measure_here(
    given: GpuSpec | None, folder: Path, *, world: int | None = None, budget_s: float = math.inf
) -> tuple[GpuSpec, tuple[Path, ...]]:
    """Run the calibration plans on this machine; the GPU and the files that hold its records.

    ``given`` names the GPU where the catalog does not know the board. Collectives are measured when ``world``
    (default: every GPU seen) is two or more.
    """
    boards = detect()
    names = {board.name for board in boards}
    if len(names) != 1:
        found = ", ".join(sorted(names)) or "none"
        raise HardwareError(f"GPUs of {len(names)} kinds here ({found}): calibrate needs one kind")
    gpu = given or _known(boards[0].gpu_id, boards[0].name)
    one_gpu = folder / "one_gpu.jsonl"
    run_plan("calibrate", SuiteOptions(out=one_gpu, world=1, gpu_id=gpu.id, budget_s=budget_s))
    files = [one_gpu]
    several = world or visible_gpus()
    if several > 1:
        many = folder / f"{several}_gpus.jsonl"
        run_plan("calibrate_multi", SuiteOptions(out=many, world=several, gpu_id=gpu.id, budget_s=budget_s))
        files.append(many)
    return gpu, tuple(files)


def measure_vllm_here(
    given: GpuSpec | None, folder: Path, *, world: int | None = None, budget_s: float = math.inf
) -> tuple[GpuSpec, Path]:
    """Run the plan of vLLM's kernels on this machine; the GPU and the file that holds its records.

    On ``world`` of two or more, its all-reduce alone. Raises :class:`HardwareError` where vLLM is not installed.
    """
    if not installed("vllm"):
        raise HardwareError(NEEDS_VLLM)
    gpu = given or _known(*((board := detect()[0]).gpu_id, board.name))
    path = folder / f"vllm_{world or 1}_gpus.jsonl"
    run_plan("vllm", SuiteOptions(out=path, world=world or 1, gpu_id=gpu.id, budget_s=budget_s))
    return gpu, path


def _known(gpu_id: str | None, name: str) -> GpuSpec:
    if gpu_id is None:
        raise HardwareError(f"'{name}' is not in the catalog: describe it in a .toml file and pass it with --gpu")
    return load_gpu(gpu_id)
