"""Steps of a decoder transformer for tests: built from keywords, looked at by layer and by name."""

from __future__ import annotations

from typing import Any

from workloads import Layout, Options, build_program, load_model
from workloads.model import ModelSpec
from workloads.program import Kernel, Program
from workloads.work import AttentionWork, GemmWork, GroupedGemmWork


def build(
    model: str | ModelSpec, phase: Any = "prefill", batch: int = 1, seq_len: int = 1024, **fields: Any
) -> Program:
    """A step; keywords of the layout and of the options side by side."""
    split = {k: fields.pop(k) for k in ("tp", "ep", "ep_mode", "sequence_parallel") if k in fields}
    spec = load_model(model) if isinstance(model, str) else model
    return build_program(spec, Layout(**split), phase=phase, batch=batch, seq_len=seq_len, options=Options(**fields))


def layer(program: Program, rank: int = 0) -> dict[str, Kernel]:
    """Kernels of one layer by name (the last of a name)."""
    return {kernel.name: kernel for kernel in kernels(program, rank)}


def kernels(program: Program, rank: int = 0) -> tuple[Kernel, ...]:
    """Kernels of one layer in order."""
    return program.ranks[rank].phases[0].segments[0].kernels


def names(program: Program, rank: int = 0) -> list[str]:
    """Names of one layer in order."""
    return [kernel.name for kernel in kernels(program, rank)]


def head(program: Program) -> Kernel:
    """The language-model head."""
    return program.ranks[0].phases[0].segments[1].kernels[0]


def gemm_flops(program: Program) -> list[float]:
    """FLOPs of products and attention in one layer, by rank."""
    heavy = GemmWork | GroupedGemmWork | AttentionWork
    return [
        sum(k.flops for k in kernels(program, rank) if isinstance(k.work, heavy)) for rank in range(len(program.ranks))
    ]
