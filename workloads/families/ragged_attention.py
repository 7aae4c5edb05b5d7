"""Attention of a server's step over caches whose tokens are spread over ranks.

Each of n ranks holds every n-th token of a sequence. Partial outputs over these are corrected by the softmax sums of
all ranks, which are gathered, and added up: with ``dcp`` as in vLLM (``_forward_with_dcp`` and ``cp_lse_ag_out_rs`` of
its FlashAttention backend: queries gathered, outputs scattered over heads), with ``cp`` as in vLLM's plugin for Ascend
and in SGLang: a prompt's new tokens are cut into 2 n parts, of which each rank has one from the front and one from the
back, and keys and values of all are gathered. Every rank has all sequences that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workloads.families.engine import engine_of, paged_attention
from workloads.families.ragged_groups import Group, SharedTokens, filled_up, group_attention
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.kernels import Shape, attention_kernel, elementwise_kernel, permute_kernel
from workloads.ops import Attention, LatentAttention
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.stack import Stack
from workloads.work import AttentionWork, CollectiveWork, DType

# What a kernel that plans attention reads and writes of a sequence: lengths and places in 32 bit.
_PLAN_BYTES = 16


def spread_attention(
    node: Attention | LatentAttention, whole: Shape, groups: Sequence[Group], shared: SharedTokens, stack: Stack
) -> list[Kernel]:
    """Attention of ``groups`` with the exchanges between ranks: for each group that decodes, and once for the
    ``shared`` tokens of prompts."""
    ranks = _Ranks(whole=whole)
    if isinstance(node, LatentAttention):
        return _latent(node, ranks, groups, shared, stack)
    return _Spread(node=node, ranks=ranks, stack=stack).kernels(groups, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """What ranks with shards of the same caches exchange, as one of them sees it."""

    whole: Shape

    @property
    def layout(self) -> Layout:
        return self.whole.layout

    def sharded(self, group: Group) -> Group:
        """What of ``group`` is in the rank's cache."""
        return replace(group, context=-(-group.context // self.layout.cache_shards))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that share out the caches."""
        return self.layout.context_ranks if self.layout.cp > 1 else self.layout.shard_ranks

    @property
    def own(self) -> Shape:
        """The rank's own query heads."""
        return replace(self.whole, layout=replace(self.layout, cp=1, dcp=1))

    @property
    def reads(self) -> Shape:
        """The query heads that attend to a rank's shard: those of all ``dcp`` ranks."""
        return replace(self.own, layout=replace(self.own.layout, tp=self.layout.tp // self.layout.dcp))

    def gathered_queries(self, rows: int, head_dim: int) -> list[Kernel]:
        """Queries of other ranks' tokens, or of other ranks' heads: these then stand side by side in each token."""
        width = self.reads.q_heads * head_dim
        gather = self.exchange("all_gather_q", CollectiveOp.ALL_GATHER, DType.BF16.bytes * rows * width)
        return [gather, *self._reordered("reorder_q", rows, width)]

    def combined(self, rows: int, head_dim: int, *, each_has_all: bool) -> list[Kernel]:
        """Outputs over all shards, from those over each: on every rank, or each rank's own tokens, or heads.

        Heads are brought into the order of ranks before they are scattered, and a rank's own back into tokens after.
        """
        heads, own = self.reads.q_heads, self.own.q_heads
        width = heads * head_dim
        sums = DType.FP32.bytes * len(self.ranks) * rows * heads
        moved = 2 * DType.BF16.bytes * rows * width + sums
        op = CollectiveOp.ALL_REDUCE if each_has_all else CollectiveOp.REDUCE_SCATTER
        return [
            self.exchange("all_gather_lse", CollectiveOp.ALL_GATHER, sums),
            elementwise_kernel("correct_out", Elementwise.COPY, rows, width, moved),
            *self._reordered("order_out", rows, width),
            self.exchange(f"{op.value}_out", op, DType.BF16.bytes * rows * width),
            *self._reordered("reorder_out", rows, own * head_dim),
        ]

    def copied_sums(self, name: str, rows: int, heads: int) -> list[Kernel]:
        """Softmax sums, which attention writes head by head, token by token; or back again."""
        if self.layout.dcp == 1:
            return []
        return [elementwise_kernel(name, Elementwise.COPY, rows, heads, 2 * DType.FP32.bytes * rows * heads)]

    def _reordered(self, name: str, rows: int, width: int) -> list[Kernel]:
        return [] if self.layout.dcp == 1 else [permute_kernel(name, rows, width)]

    def exchange(self, name: str, op: CollectiveOp, buffer_bytes: int) -> Kernel:
        work = CollectiveWork(op=op, ranks=self.ranks, buffer_bytes=buffer_bytes)
        return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(buffer_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """One attention node over keys and values."""

    node: Attention
    ranks: _Ranks
    stack: Stack

    @property
    def value(self) -> int:
        model = self.ranks.whole.model
        return model.v_head_dim or model.head_dim

    def kernels(self, groups: Sequence[Group], shared: SharedTokens) -> list[Kernel]:
        ranks, layout, model = self.ranks, self.ranks.layout, self.ranks.whole.model
        made = [kernel for group in groups if group.phase == "decode" for kernel in self._decoding(group)]
        if shared.new and layout.cp > 1 and not self.node.shared:
            width = ranks.own.kv_heads * model.key_and_value
            buffer_bytes = DType.BF16.bytes * shared.new * width
            made.append(ranks.exchange("all_gather_kv", CollectiveOp.ALL_GATHER, buffer_bytes))
            made.append(permute_kernel("restore_kv", shared.new, width))
        if shared.cached:
            made += ranks.gathered_queries(shared.cached, model.head_dim)
        made += [kernel for group in groups if group.phase == "prefill" for kernel in self._prompts(group)]
        if shared.cached:
            made += self._scattered(shared.cached)
            made.append(self._merge(shared.cached // layout.cp))
        return made

    def _scattered(self, rows: int) -> list[Kernel]:
        """Each rank's own outputs over all shards, and their softmax sums."""
        ranks = self.ranks
        return [
            *ranks.copied_sums("copy_lse", rows, ranks.reads.q_heads),
            *ranks.combined(rows, self.value, each_has_all=False),
            *ranks.copied_sums("copy_own_lse", rows, ranks.own.q_heads),
        ]

    def _decoding(self, group: Group) -> list[Kernel]:
        ranks = self.ranks
        cached = ranks.sharded(group)
        if ranks.layout.cp > 1:
            made = group_attention(self.node, ranks.own, cached, self.stack)
            return [*made, *ranks.combined(group.tokens, self.value, each_has_all=True)]
        shape = replace(ranks.own, batch=group.sequences, new_tokens=group.new_tokens, context=group.new_tokens)
        return [
            *ranks.gathered_queries(group.tokens, shape.model.head_dim),
            *group_attention(self.node, ranks.reads, cached, self.stack),
            *self._scattered(group.tokens),
            elementwise_kernel("plan_new", Elementwise.COPY, group.sequences, 1, _PLAN_BYTES * group.sequences),
            self._flash("attention_new", shape, causal=True),
            self._merge(group.tokens),
        ]

    def _prompts(self, group: Group) -> list[Kernel]:
        """All new tokens over the rank's share of what is cached, and the rank's own over the new ones."""
        ranks, cp = self.ranks, self.ranks.layout.cp
        filled, made = filled_up(ranks.layout, group.new_tokens), []
        if before := group.context - group.new_tokens:
            seen = -(-before // ranks.layout.cache_shards)
            shape = replace(ranks.reads, batch=group.sequences, new_tokens=filled, context=seen)
            made.append(self._flash("attention_cached", shape, causal=False))
        shape = replace(ranks.own, batch=group.sequences, new_tokens=filled, context=filled)
        if cp > 1:  # two parts, which together see as many keys on every rank
            part = filled // (2 * cp)
            shape = replace(shape, batch=2 * group.sequences, new_tokens=part, context=-(-(2 * cp + 1) * part // 2))
        return [*made, self._flash(self.node.name, shape, causal=True)]

    def _flash(self, name: str, shape: Shape, *, causal: bool) -> Kernel:
        engine = engine_of(self.stack.engine)
        kernel = attention_kernel(self.node, shape) if engine is None else paged_attention(self.node, shape, engine)
        assert isinstance(kernel.work, AttentionWork)
        work = replace(kernel.work, causal=causal and shape.new_tokens > 1)
        return replace(kernel, name=name, work=work, flops=work.flops)

    def _merge(self, rows: int) -> Kernel:
        """Outputs over the cache and over new tokens, with their softmax sums."""
        heads = self.ranks.own.q_heads
        moved = 3 * DType.BF16.bytes * rows * heads * self.value + 2 * DType.FP32.bytes * rows * heads
        return elementwise_kernel("merge_out", Elementwise.COPY, rows, heads * self.value, moved)


def _latent(
    node: LatentAttention, ranks: _Ranks, groups: Sequence[Group], shared: SharedTokens, stack: Stack
) -> list[Kernel]:
    """Latent attention: decoding over a rank's share of the latents, with the heads of all ``dcp`` ranks; prompts over
    latents that are gathered, new ones of all ranks of ``cp`` and cached ones."""
    made = [k for group in groups if group.phase == "decode" for k in _latent_decoding(node, ranks, group, stack)]
    if shared.new and ranks.layout.cp > 1:
        made.append(_latents(ranks, shared.new))
        assert ranks.whole.model.latent is not None
        made.append(permute_kernel("restore_latents", shared.new, ranks.whole.model.latent.cached_dim))
    return made + [
        k for group in groups if group.phase == "prefill" for k in _latent_prompts(node, ranks, group, stack)
    ]


def _latents(ranks: _Ranks, tokens: int) -> Kernel:
    model = ranks.whole.model
    assert model.latent is not None
    buffer_bytes = round(tokens * model.latent.cached_dim * ranks.whole.precision.kv.bytes)
    return ranks.exchange("all_gather_latents", CollectiveOp.ALL_GATHER, buffer_bytes)


def _latent_decoding(node: LatentAttention, ranks: _Ranks, group: Group, stack: Stack) -> list[Kernel]:
    latent, cp = ranks.whole.model.latent, ranks.layout.cp
    assert latent is not None
    kernels = group_attention(node, ranks.own, group, stack)
    at = _attends(kernels)
    over_share = group_attention(node, ranks.reads, ranks.sharded(group), stack)
    spread = [
        *([] if cp > 1 else ranks.gathered_queries(group.tokens, latent.cached_dim)),
        over_share[_attends(over_share)],
        *ranks.combined(group.tokens, latent.kv_rank, each_has_all=cp > 1),
    ]
    return [*kernels[:at], *spread, *kernels[at + 1 :]]


def _latent_prompts(node: LatentAttention, ranks: _Ranks, group: Group, stack: Stack) -> list[Kernel]:
    """A rank projects its own tokens, rebuilds keys and values of all, and attends with its own."""
    cp, before = ranks.layout.cp, group.context - group.new_tokens
    filled = filled_up(ranks.layout, group.new_tokens)
    whole = group_attention(node, ranks.own, replace(group, new_tokens=filled, context=before + filled), stack)
    kernels = whole
    if cp > 1:
        own = replace(group, new_tokens=filled // cp, context=before + filled // cp)
        part = filled // (2 * cp)
        seen = before - (-(2 * cp + 1) * part // 2)
        halves = replace(group, sequences=2 * group.sequences, new_tokens=part, context=seen)
        mine, parts = (group_attention(node, ranks.own, one, stack) for one in (own, halves))
        rebuilt = 1 + next(number for number, kernel in enumerate(whole) if kernel.name == "rope")
        kernels = [*mine[:rebuilt], *whole[rebuilt : _attends(whole)], parts[_attends(parts)]]
    if before:
        kernels.insert(_attends(kernels), _latents(ranks, group.sequences * before))
    return kernels


def _attends(kernels: Sequence[Kernel]) -> int:
    """The place of the attention among the kernels around it."""
    return next(number for number, kernel in enumerate(kernels) if isinstance(kernel.work, AttentionWork))
