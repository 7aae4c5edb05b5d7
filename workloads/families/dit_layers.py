"""The layers of one branch of a denoising step, as the stack at hand runs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from workloads.diffusion import DitSpec
from workloads.errors import WorkloadError
from workloads.families import dit, dit_passes
from workloads.families.dit import Branch, check_branch
from workloads.program import Kernel, Phase, Program, RankProgram, Segment

Block = Callable[[Branch], list[Kernel]]


def build_denoise(spec: DitSpec, *, tokens: int, layers: int | None = None, ulysses: int = 1) -> Program:
    """The layers of one branch of one denoising step over ``tokens`` latent tokens, ``ulysses`` ranks sharing them."""
    branch = Branch(spec=spec, tokens=tokens, ulysses=tuple(range(ulysses)))
    check_branch(branch)
    rank = RankProgram(phases=(Phase(name="denoise", segments=tuple(layer_segments(branch, layers))),))
    return Program(ranks=(rank,) * ulysses)


def layer_segments(branch: Branch, layers: int | None = None) -> list[Segment]:
    """All layers of a branch, or the first ``layers`` of them."""
    spec = branch.spec
    left = spec.layers if layers is None else layers
    if not 1 <= left <= spec.layers:
        raise WorkloadError(f"layers = {left}: {spec.id} has {spec.layers}")
    made: list[Segment] = []
    for name, count, block in zip(
        ("layer", "double layer", "single layer"),
        (spec.cross_layers, spec.double_layers, spec.single_layers),
        _blocks(branch),
        strict=True,
    ):
        repeat = min(count, left)
        if repeat:
            first = spec.layers - left if layers is None else layers - left
            made.append(Segment(name=name, kernels=tuple(block(branch)), repeat=repeat, first=first))
            left -= repeat
    return made


def _blocks(branch: Branch) -> tuple[Block, Block, Block]:
    """Layers with cross-attention, double and single layers."""
    if branch.unfused is None:
        return dit.cross_block, dit.double_block, dit.single_block
    passes = branch.unfused
    return (
        partial(dit_passes.cross_block, passes=passes),
        partial(dit_passes.double_block, passes=passes),
        partial(dit_passes.single_block, passes=passes),
    )
