"""A training step: the forward pass, the loss, the pass of gradients behind them, their sums, and the optimiser.

Every matrix product of the forward pass becomes two (gradient of its input, gradient of its weights), attention 2.5 of
the forward kernel's FLOPs; pointwise kernels pass once more, over the gradients that they read and write. Nothing is
computed twice to save memory. Sums follow from the einsums (:mod:`workloads.layer_passes.backward`): ranks that split
a product's columns sum the gradients of its input, once for all products of one norm; ranks that hold the same weights
sum theirs, as their tokens differ: those of the feed-forward products beside what follows, those of the attention
products at the layer's end. ZeRO-1 and 2 (arXiv 1910.02054) scatter these sums and gather the weights that each rank
has stepped, ZeRO-3 gathers each layer's weights before it, in the forward pass and again in the backward, beside the
layer before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from workloads.families.framework import Framework, load_framework
from workloads.families.gradients import gradients
from workloads.families.nodes import placed_nodes
from workloads.families.options import Options
from workloads.families.ring import COMM_STREAM, Ring, ring_kernels
from workloads.families.training_checks import check_training
from workloads.families.training_memory import STATE_BYTES
from workloads.families.transformer import build_program
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.kernels import elementwise_kernel, product_kernel
from workloads.layer_passes.backward import (
    StateSplit,
    keep_weight,
    partial_inputs,
    read_weight,
    sum_gradient,
)
from workloads.layer_passes.lower import LM_HEAD
from workloads.layer_passes.tree import RankSplit
from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.placement import groups_of, place_of
from workloads.program import Kernel, Phase, Program, RankProgram, Segment, in_turn
from workloads.stack import load_stack
from workloads.work import CollectiveWork, DType, ElementwiseWork, GemmWork, GroupedGemmWork

SUM_STREAM, GATHER_STREAM = COMM_STREAM + 1, COMM_STREAM + 2
# AdamW reads weight, moments and gradient, writes weight, moments and the 16-bit copy.
STEP_BYTES = 2 * STATE_BYTES + 2 * DType.BF16.bytes
_TRANSFERS = ("send", "receive")


def build_training(
    model: ModelSpec, layout: Layout, *, batch: int, seq_len: int, options: Options | None = None
) -> Program:
    """One step over ``batch`` sequences of ``seq_len`` tokens: phases ``forward``, ``backward`` and ``optimizer``.

    >>> from workloads import load_model
    >>> program = build_training(load_model("llama3-8b"), Layout(), batch=1, seq_len=4096)
    >>> [phase.name for phase in program.ranks[0].phases]
    ['forward', 'backward', 'optimizer']
    """
    options = options or Options()
    check_training(model, layout, batch, options)
    part = batch // options.accumulate
    # Transfers between stages in turn with compute, so that the pass of gradients is the forward one from its end.
    inside = replace(layout, pp_schedule="1f1b")
    forward = build_program(
        model, inside, phase="prefill", batch=part, seq_len=seq_len,
        options=replace(options, lm_head=False, stack="reference-torch"),
    )  # fmt: skip
    ranks: dict[tuple[object, ...], RankProgram] = {}
    programs = []
    for number, rank in enumerate(forward.ranks):
        trained = _Rank(model=model, layout=layout, number=number, batch=part, seq_len=seq_len, options=options)
        key = (id(rank), trained.context_ranks, trained.tensor_ranks, trained.alike, trained.experts_alike)
        if key not in ranks:
            ranks[key] = trained.program(rank)
        programs.append(ranks[key])
    return Program(ranks=tuple(programs))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One rank's place and share of a step; ``batch`` is one of the parts whose gradients are added up."""

    model: ModelSpec
    layout: Layout
    number: int
    batch: int
    seq_len: int
    options: Options

    @property
    def context_ranks(self) -> tuple[int, ...]:
        return groups_of(self.layout, self.number).get(self.layout.context_ranks, ())

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        return groups_of(self.layout, self.number).get(self.layout.tensor_ranks, ())

    @property
    def alike(self) -> tuple[int, ...]:
        """Ranks that hold the same weights, but for experts."""
        return self._alike(self.layout.tp)

    @property
    def experts_alike(self) -> tuple[int, ...]:
        """Ranks that hold the same experts."""
        return self._alike(self.layout.group)

    def _alike(self, ways: int) -> tuple[int, ...]:
        layout, own = self.layout, place_of(self.layout, self.number)
        places = ((rank, place_of(layout, rank)) for rank in range(layout.world))
        return tuple(r for r, one in places if one.stage == own.stage and one.member % ways == own.member % ways)

    @property
    def sequences(self) -> int:
        return self.batch // (self.layout.dp * self.layout.micro_batches)

    @property
    def split(self) -> StateSplit:
        return StateSplit.of(self.options.sharding)

    @property
    def framework(self) -> Framework:
        return load_framework(load_stack(self.options.stack).framework)

    def program(self, forward: RankProgram) -> RankProgram:
        """All passes of all parts, then the optimiser."""
        (phase,) = forward.phases
        layers = self.framework.attends(phase.segments)
        phases: list[Phase] = []
        stepped: list[Segment] = []
        for part in range(self.options.accumulate):
            last = part == self.options.accumulate - 1
            ahead, back, stepped = self._passes(layers, last=last)
            phases += [Phase(name="forward", segments=tuple(ahead)), Phase(name="backward", segments=tuple(back))]
        if self.options.optimizer != "none":
            phases.append(Phase(name="optimizer", segments=tuple(stepped)))
        return RankProgram(phases=tuple(phases))

    def _passes(self, layers: Sequence[Segment], *, last: bool) -> tuple[list[Segment], list[Segment], list[Segment]]:
        """Forward, backward and the optimiser's step; only the last part's gradients are summed over ranks (in ZeRO-3
        every part's, which is then let go)."""
        sums = last or self.split.weights
        head = self._head(sums=sums) if self.options.lm_head and self._last_stage else None
        ahead: list[Segment] = []
        back: list[list[Segment]] = []
        optimizer: list[Segment] = []
        seen: set[int] = set()
        for segment, following in zip(layers, [*layers[1:], None], strict=True):
            if segment.name.startswith(_TRANSFERS):
                ahead.append(segment)
                back.append([_turned(segment)])
                continue
            kernels, weights, experts = self._backward(segment, sums=sums)
            bare = replace(segment, mark=None, waits=())
            ahead += self._gathered(bare, weights, experts)
            turned = replace(bare, name=f"{segment.name} backward", kernels=kernels)
            back.append(self._gathered(turned, weights, experts, ahead=self.framework.ahead_in_backward))
            if segment.first not in seen:  # micro-batches share their weights
                seen.add(segment.first)
                name = segment.name.split(" ", 2)[-1] if segment.name.startswith("micro-batch") else segment.name
                optimizer.append(replace(bare, name=name, kernels=tuple(self._step(weights, experts))))
            if head is not None and (following is None or following.name.startswith(_TRANSFERS)):
                ahead.append(head[0])
                back.append([head[1]])
        if head is not None:
            optimizer.append(Segment(name="lm_head", kernels=tuple(self._step(self._head_weights, 0))))
        return ahead, [one for part in reversed(back) for one in part], optimizer

    @property
    def _last_stage(self) -> bool:
        return place_of(self.layout, self.number).stage == self.layout.pp - 1

    def _gathered(self, segment: Segment, weights: int, experts: int, *, ahead: bool = True) -> list[Segment]:
        """A pass over layers whose weights are gathered one layer ``ahead``, beside the layer before, or behind it."""
        held = self._held(weights, experts)
        gathers = [one for part in held for one in self._weights(read_weight(self.split), *part)]
        count = len(gathers)
        if not count:
            return [segment]
        size = len(segment.kernels) + count
        computed = max(i for i, one in enumerate(segment.kernels) if one.stream == 0) + count - size
        shifted = [replace(one, after=tuple(i + count * (i >= 0) for i in one.after)) for one in segment.kernels]
        shifted[0] = replace(shifted[0], after=(*shifted[0].after, count - 1 - (size if ahead else 0)))
        first = Segment(name=f"gather {segment.name}", kernels=tuple(gathers), first=segment.first)
        beside = [replace(one, stream=GATHER_STREAM, after=() if i else (computed,)) for i, one in enumerate(gathers)]
        return [*([first] if ahead else []), replace(segment, kernels=(*beside, *shifted))]

    def _held(self, weights: int, experts: int) -> list[tuple[str, int, tuple[int, ...]]]:
        """A layer's weights, and the ranks that hold the same ones."""
        parts = (("weights", weights, self.alike), ("weights_experts", experts, self.experts_alike))
        return [part for part in parts if part[1]]

    def _weights(self, op: CollectiveOp | None, name: str, count: int, ranks: tuple[int, ...]) -> Iterator[Kernel]:
        if op is not None and len(ranks) > 1:
            yield self._exchange(f"{op.value}_{name}", op, ranks, count)

    def _backward(self, segment: Segment, *, sums: bool) -> tuple[tuple[Kernel, ...], int, int]:
        """A layer from its end, and its weights, experts' apart; a ring's rounds are laid out anew."""
        forward, ring = segment.kernels, self._ring()
        partial, owed = self._partial(segment.first), 0
        rounds = {"send_kv", "attention", "merge_out"} if ring else set()
        kernels: list[Kernel] = []
        waiting = weights = experts = 0
        home: tuple[int, ...] = ()  # the transfer that brings gradients of keys and values home
        for at in range(len(forward) - 1, -1, -1):
            one = forward[at]
            if owed and _is_norm(one):
                kernels.append(
                    self._exchange("all_reduce_input_grad", CollectiveOp.ALL_REDUCE, self.tensor_ranks, owed)
                )
                owed = 0
            if sums and at and _is_norm(one):  # a half of the layer is behind: its sum runs beside the other half
                kernels += self._sum(waiting, self.alike, (len(kernels) - 1,))
                waiting = 0
            if one.name not in rounds:
                made = [*self.framework.passes(one, self.model.d_model), *gradients(one)]
                kernels += [replace(k, after=home) for k in made] if home else made
                home = ()
                if one.name in partial and self.tensor_ranks:
                    owed = self._tokens * self.model.d_model
                if isinstance(one.work, GemmWork):
                    waiting += one.work.n * one.work.k
                    weights += one.work.n * one.work.k
                elif isinstance(one.work, GroupedGemmWork):
                    held = one.work.experts * one.work.n * one.work.k
                    experts += held
                    if sums:
                        kernels += self._sum(held, self.experts_alike, (len(kernels) - 1,))
            elif ring is not None:
                rounds_back = ring_kernels(ring, place_of(self.layout, self.number).context, first=(-1,))
                kernels = in_turn(kernels, rounds_back)
                ring, home = None, (len(kernels) - 1,)
        if sums:
            kernels += self._sum(waiting, self.alike, (len(kernels) - 1,))
        return tuple(kernels), weights, experts

    def _partial(self, layer: int) -> frozenset[str]:
        """Nodes of a layer of whose input's gradient this rank has a part."""
        split = RankSplit.of(self.layout)
        block = next(block for _, block, run in self.model.layer_groups(range(self.model.layers)) if layer in run)
        return partial_inputs(placed_nodes(block, split), split)

    @property
    def _tokens(self) -> int:
        return self.sequences * self.seq_len // self.layout.cp

    def _ring(self) -> Ring | None:
        layout = self.layout
        if layout.cp == 1 or layout.cp_mode == "ulysses" or layout.cp_mode == "all_gather":
            return None
        return Ring(
            layout="contiguous" if layout.cp_mode == "ring" else layout.cp_mode,
            ranks=self.context_ranks,
            block=self.seq_len // layout.cp,
            q_heads=self.model.q_heads // layout.tp,
            kv_heads=max(1, self.model.kv_heads // layout.tp),
            head_dim=self.model.head_dim,
            batch=self.sequences,
            merges=True,
            backward=True,
        )

    @property
    def _head_weights(self) -> int:
        return -(-self.model.vocab // self.layout.tp) * self.model.d_model

    def _head(self, *, sums: bool) -> tuple[Segment, Segment]:
        """Every token is scored; the loss reads the logits twice and turns them into gradients."""
        rows, width = self._tokens, self.model.d_model
        vocab = self._head_weights // width
        head = product_kernel("lm_head", rows, vocab, width)
        loss = elementwise_kernel("loss", Elementwise.COPY, rows, vocab, 3 * rows * vocab * DType.BF16.bytes)
        kernels = [*gradients(head)]
        if self.tensor_ranks and LM_HEAD.einsum.gradient(0).reduction(LM_HEAD.parallel):
            kernels.append(self._exchange("all_reduce_head", CollectiveOp.ALL_REDUCE, self.tensor_ranks, rows * width))
        if sums:
            kernels += self._sum(self._head_weights, self.alike, (len(kernels) - 1,))
        # As FSDP's outermost unit: gathered when it is reached, and kept for the pass back.
        gathers = self._weights(read_weight(self.split), "weights_head", self._head_weights, self.alike)
        return (
            Segment(name="lm_head", kernels=(*gathers, head, loss)),
            Segment(name="lm_head backward", kernels=tuple(kernels)),
        )

    def _sum(self, weights: int, ranks: tuple[int, ...], after: tuple[int, ...]) -> Iterator[Kernel]:
        op = sum_gradient(LM_HEAD, self.split)  # what holds for one product of tokens holds for all
        if op is None or len(ranks) == 1 or not weights:
            return
        way, width = self.framework, self.model.d_model
        own = weights // len(ranks) if self.split.gradients else weights
        one = self._exchange(f"{op.value}_weight_grad", op, ranks, weights, element_bytes=way.sum_bytes)
        made = [replace(one, stream=SUM_STREAM)]
        for count, moved, word in ((weights, way.before_sum_bytes, "before"), (own, way.after_sum_bytes, "after")):
            if moved:
                turned = elementwise_kernel(f"{word}_sum", Elementwise.COPY, -(-count // width), width, moved * count)
                made.insert(0 if word == "before" else len(made), replace(turned, stream=SUM_STREAM))
        for kernel in made:
            yield replace(kernel, after=after)
            after = (after[0] + 1,)

    def _step(self, weights: int, experts: int) -> Iterator[Kernel]:
        """The optimiser over this rank's share of a layer, and the gathering of what others have stepped."""
        width = self.model.d_model
        for name, count, ranks in self._held(weights, experts):
            own = -(-count // len(ranks)) if self.split.state else count
            step = name.replace("weights", "adamw")
            yield elementwise_kernel(step, Elementwise.COPY, -(-own // width), width, own * STEP_BYTES)
            yield from self._weights(keep_weight(self.split), name, count, ranks)

    def _exchange(
        self, name: str, op: CollectiveOp, ranks: tuple[int, ...], elements: int, *, element_bytes: int = 2
    ) -> Kernel:
        buffer = elements * element_bytes
        work = CollectiveWork(
            op=op, ranks=ranks, buffer_bytes=buffer, ctas=self.options.comm_ctas, algorithm=self.options.all_reduce,
        )  # fmt: skip
        return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(buffer))


def _is_norm(kernel: Kernel) -> bool:
    norms = (Elementwise.ADD_RMSNORM, Elementwise.LAYERNORM)
    return isinstance(kernel.work, ElementwiseWork) and kernel.work.op in norms


def _turned(segment: Segment) -> Segment:
    """A transfer of activations as that of their gradients, the other way."""
    kernels = []
    for one in segment.kernels:
        assert isinstance(one.work, CollectiveWork)
        kernels.append(replace(one, name=f"{one.name}_grad", work=replace(one.work, ranks=one.work.ranks[::-1])))
    return replace(segment, name=f"{segment.name} gradients", kernels=tuple(kernels), mark=None, waits=())
