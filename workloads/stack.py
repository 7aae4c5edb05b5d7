"""Stacks: what a serving stack makes of the same model - which kernels are fused, what is copied."""

from __future__ import annotations

from dataclasses import dataclass

from inputs.suggest import nearest
from workloads.errors import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Kernel choices of one stack. ``validated`` names what its predictions were compared with.

    ``eager``: every operation of the model's source is a kernel of its own, attention included. ``engine``: the kernels
    are those that a serving engine makes of the model (``data/stacks``). ``passes``: diffusion transformers alone, with
    the memory-bound kernels of that name in ``data/stacks``; ``flash_2``: attention by FlashAttention 2.
    ``own_exchanges``: several GPUs share tokens by the context parallelism of those modules themselves, which costs
    their host more than xDiT's does. ``framework``: training steps alone, as that framework runs them.
    """

    id: str
    validated: str | None
    fused_add_norm: bool = False
    fused_weights: bool = False
    fused_gate: bool = False
    kv_copies: bool = False
    qk_norm: bool = False
    eager: bool = False
    engine: str | None = None
    passes: str | None = None
    flash_2: bool = False
    own_exchanges: bool = False
    framework: str | None = None

    @property
    def of_diffusion(self) -> bool:
        """Whether this stack runs diffusion transformers, and those alone."""
        return self.passes is not None


STACKS = {
    stack.id: stack
    for stack in (
        Stack(
            id="reference-torch",
            validated="our own H100 measurements (model_step records)",
            fused_add_norm=True,
            fused_weights=True,
            fused_gate=True,
            kv_copies=True,
            qk_norm=False,  # what was measured as qwen3-30b-a3b had no kernel for it
        ),
        Stack(id="unfused-torch", validated=None, kv_copies=True, qk_norm=True),
        Stack(id="eager-torch", validated=None, kv_copies=True, qk_norm=True, eager=True),
        Stack(
            id="paged-kv",
            validated=None,
            fused_add_norm=True,
            fused_weights=True,
            fused_gate=True,
            qk_norm=True,
        ),
        Stack(
            id="vllm",
            validated="steps of a vLLM 0.24.0 server (docs/stacks.md)",
            fused_add_norm=True,
            fused_weights=True,
            fused_gate=True,
            qk_norm=True,
            engine="vllm",
        ),
        Stack(id="llm-foundry", validated=None, fused_weights=True, framework="llm-foundry"),
        *(
            Stack(
                id=name,
                validated="steps of the modules of diffusers 0.42 on an H200 (docs/video.md)",
                passes="diffusers",
                flash_2=flash_2,
                own_exchanges=not flash_2,
            )
            for name, flash_2 in (("diffusers", True), ("diffusers-cudnn", False))
        ),
    )
}


def load_stack(name: str) -> Stack:
    """A stack by id.

    >>> load_stack("reference-torch").fused_weights
    True
    """
    if name not in STACKS:
        raise WorkloadError(f"unknown stack '{name}': {nearest(name.lower(), STACKS)}")
    return STACKS[name]
