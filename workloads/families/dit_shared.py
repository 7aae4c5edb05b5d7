"""Attention of diffusion transformers whose tokens several GPUs share, as the modules of diffusers run it.

Ulysses trades queries, keys, values and the result one by one, sorted before and after each all-to-all. A ring is one
all-gather of keys and values, one attention for each rank's, and their results merged in 32 bit by kernels of their own
(``ContextParallelConfig`` of diffusers 0.42, whose ring overlaps nothing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workloads.families.dit import Branch, flash
from workloads.kernel_names import CollectiveOp, EngineOp
from workloads.kernels import exchange_kernel, permute_kernel
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange, elements_of
from workloads.ops import Attention, attention
from workloads.passes import Passes
from workloads.program import Kernel

Run = Callable[[Sequence[EngineOp], str, int, int], list[Kernel]]


def shared_attention(branch: Branch, passes: Passes, run: Run) -> list[Kernel]:
    """Attention over all tokens of the branch: the shard pass says what is exchanged, each array by itself here."""
    spec, rows = branch.spec, branch.own + branch.own_text
    heads = spec.heads // len(branch.ulysses)
    own = {"b": 1, "s": rows, "K": spec.heads, "r": 1, "h": spec.head_dim}
    traded = own | {"s": rows * len(branch.ulysses), "K": heads}
    made: list[Kernel] = []
    for node in shard((attention(),), branch.split, returns=False):
        match node:
            case Exchange(op=CollectiveOp.ALL_TO_ALL):
                names = ("out",) if len(node.axes) == 1 else ("q", "k", "v")
                for part, array in zip(names, node.axes, strict=True):
                    size = elements_of((array,), own)
                    made.append(permute_kernel(f"sort_{part}", rows, size // rows))
                    made.append(exchange_kernel(f"all_to_all_{part}", branch.ulysses, size, node.op))
                    made.append(permute_kernel(f"sort_back_{part}", rows, size // rows))
            case Exchange():
                made += run((EngineOp.CAT_TOKENS,), "join_kv", traded["s"], 2 * heads * spec.head_dim)
                everything = len(branch.ring) * node.elements(traded)
                made.append(exchange_kernel(node.name, branch.ring, everything, node.op))
            case Attention() if len(branch.ring) > 1:
                made += _blocks(branch, passes, run, traded["s"], heads)
            case Attention():
                tokens = branch.tokens + spec.joint_text
                made.append(branch.attending(flash(node.name, tokens, tokens, heads, spec.head_dim, branch.batch)))
    return made


def _blocks(branch: Branch, passes: Passes, run: Run, rows: int, heads: int) -> list[Kernel]:
    """Attention to each rank's keys, and the results merged."""
    spec, ranks = branch.spec, len(branch.ring)
    width, block = heads * spec.head_dim, rows // branch.batch
    kernels: list[Kernel] = []
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
    return [*kernels, *run(passes.ring_end, "merged", rows, width)]
