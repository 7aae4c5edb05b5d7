"""Sequences of a server's step that attend alike, which of a step's tokens a rank has, and attention group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workloads.families.context import attention_kernels
from workloads.families.engine import engine_of, paged_attention
from workloads.families.latent import latent_kernels
from workloads.kernel_names import CollectiveOp
from workloads.kernels import Shape, permute_kernel
from workloads.ops import Attention, LatentAttention
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.stack import Stack
from workloads.work import AttentionWork, CollectiveWork, DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences of a batch that attend alike: each has ``new_tokens`` that see ``context`` tokens, themselves included
    in a prefill. Several new tokens of one that decodes are a drafted text that is checked.
    """

    phase: Literal["prefill", "decode"]
    sequences: int
    new_tokens: int
    context: int

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return self.sequences * self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTokens:
    """New tokens of a step's prompts, filled up to whole parts: of all, and of those that others' caches are read for.

    >>> piece = Group(phase="prefill", sequences=1, new_tokens=500, context=1500)
    >>> SharedTokens.of(Layout(cp=4, cp_mode="all_gather"), [piece])
    SharedTokens(new=504, cached=504)
    """

    new: int = 0
    cached: int = 0

    @classmethod
    def of(cls, layout: Layout, groups: Sequence[Group]) -> SharedTokens:
        """Those of ``groups``; with ``dcp`` queries are gathered whatever is cached."""
        prompts = [group for group in groups if group.phase == "prefill"]
        known = [group for group in prompts if layout.dcp > 1 or group.context > group.new_tokens]
        new, cached = (
            sum(one.sequences * filled_up(layout, one.new_tokens) for one in some) for some in (prompts, known)
        )
        return cls(new=new, cached=cached)


def own_tokens(layout: Layout, *, decoding: int, prompts: Sequence[int]) -> int:
    """Tokens of a step that one rank has: ``decoding`` ones, and of each of the ``prompts`` its parts.

    >>> own_tokens(Layout(), decoding=3, prompts=[10, 6]), own_tokens(Layout(cp=2), decoding=3, prompts=[10, 6])
    (19, 10)
    >>> own_tokens(Layout(cp=2, cp_mode="all_gather"), decoding=3, prompts=[10, 6])
    13
    """
    if layout.cp == 1 or layout.cp_mode == "ulysses":
        return -(-(decoding + sum(prompts)) // layout.cp)
    return decoding + sum(filled_up(layout, tokens) for tokens in prompts) // layout.cp


def tokens_of(layout: Layout, groups: Sequence[Group]) -> int:
    """:func:`own_tokens` of ``groups``."""
    prompts = [group.new_tokens for group in groups if group.phase == "prefill" for _ in range(group.sequences)]
    decoding = sum(group.tokens for group in groups if group.phase == "decode")
    return own_tokens(layout, decoding=decoding, prompts=prompts)


def filled_up(layout: Layout, tokens: int) -> int:
    """New tokens of a prompt, filled up to two equal parts for each rank of a context group."""
    parts = 2 * layout.cp if layout.cp > 1 else 1
    return -(-tokens // parts) * parts


def group_attention(node: Attention | LatentAttention, whole: Shape, group: Group, stack: Stack) -> list[Kernel]:
    """Attention of one group over caches that ``whole``'s rank holds."""
    if group.phase == "decode" and group.new_tokens > 1:
        each = replace(group, sequences=group.tokens, new_tokens=1)
        return [packed(kernel, group.new_tokens) for kernel in group_attention(node, whole, each, stack)]
    shape = replace(whole, batch=group.sequences, new_tokens=group.new_tokens, context=group.context)
    engine = engine_of(stack.engine)
    if isinstance(node, Attention) and engine is not None:
        return [paged_attention(node, shape, engine)]
    if isinstance(node, Attention):
        return attention_kernels(node, shape, group.phase, stack)
    return latent_kernels(node, shape, group.phase)


def packed(kernel: Kernel, each: int) -> Kernel:
    """An attention kernel over ``each`` tokens of every sequence, built as of sequences of their own, that reads a
    sequence's cache once for all of them; other kernels unchanged."""
    work = kernel.work
    if not isinstance(work, AttentionWork):
        return kernel
    once = replace(work, batch=work.batch // each, q_heads=work.q_heads * each)
    return replace(kernel, work=once, bytes_moved=kernel.bytes_moved / each)


def gathered_rows(layout: Layout, rows: int, width: int) -> tuple[Kernel, ...]:
    """The last layer's output of all ranks of a context group, in order again: each scores all sequences."""
    if layout.cp == 1:
        return ()
    elements = layout.cp * rows * width
    buffer_bytes = DType.BF16.bytes * elements
    work = CollectiveWork(op=CollectiveOp.ALL_GATHER, ranks=layout.context_ranks, buffer_bytes=buffer_bytes)
    gather = Kernel(name="all_gather_hidden", work=work, flops=0.0, bytes_moved=float(buffer_bytes))
    return (gather, permute_kernel("restore_hidden", layout.cp * rows, width))
