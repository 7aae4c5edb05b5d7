"""Attention of diffusion transformers whose tokens several GPUs share, as the modules of diffusers run it.

Ulysses trades queries, keys, values and the result one by one, sorted before and after each all-to-all. A ring is one
all-gather of keys and values, one attention for each rank's, and their results merged in 32 bit by kernels of their own
(``ContextParallelConfig`` of diffusers 0.42, whose ring overlaps nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workloads.families.dit import Branch, flash
from workloads.kernels import exchange_kernel, permute_kernel
from workloads.passes import Passes
from workloads.program import Kernel, in_turn
from workloads.work import CollectiveOp, EngineOp

Run = Callable[[Sequence[EngineOp], str, int, int], list[Kernel]]


def shared_attention(branch: Branch, passes: Passes, run: Run) -> list[Kernel]:
    """Attention over all tokens of the branch, its exchanges and copies included."""
    spec, ulysses = branch.spec, len(branch.ulysses)
    rows, width, heads = branch.own + branch.own_text, spec.d_model, spec.heads // ulysses
    if len(branch.ring) > 1:
        inside = _ring(branch, passes, run, rows * ulysses, heads)
    else:
        tokens = branch.tokens + spec.joint_text
        inside = [branch.attending(flash("attention", tokens, tokens, heads, spec.head_dim, branch.batch))]
    if ulysses == 1:
        return inside

    def traded(part: str) -> list[Kernel]:
        return [
            permute_kernel(f"sort_{part}", rows, width),
            exchange_kernel(f"all_to_all_{part}", branch.ulysses, rows * width),
            permute_kernel(f"sort_back_{part}", rows, width),
        ]

    return in_turn(*(traded(part) for part in ("q", "k", "v")), inside, traded("out"))


def _ring(branch: Branch, passes: Passes, run: Run, rows: int, heads: int) -> list[Kernel]:
    spec, ranks = branch.spec, len(branch.ring)
    width, block = heads * spec.head_dim, rows // branch.batch
    kernels = run((EngineOp.CAT_TOKENS,), "join_kv", rows, 2 * width)
    kernels.append(exchange_kernel("all_gather_kv", branch.ring, ranks * 2 * rows * width, CollectiveOp.ALL_GATHER))
    for number in range(ranks):
        # cuDNN wants the heads first in memory
        turned = () if branch.flash_2 else ("q", "k", "v")
        kernels += [permute_kernel(f"turn_{part}_{number}", rows, width) for part in turned]
        kernels.append(branch.attending(flash(f"attention_{number}", block, block, heads, spec.head_dim, branch.batch)))
        if turned:
            kernels.append(permute_kernel(f"turn_out_{number}", rows, width))
        kernels += run(passes.ring_block, f"block_{number}", rows, width)
        if number:
            kernels += run(passes.ring_merge, f"merge_{number}", rows, width)
            kernels += run(passes.ring_weights, f"weights_{number}", rows, heads)
    return in_turn(kernels, run(passes.ring_end, "merged", rows, width))
