"""A training step without its optimiser: the forward pass, the loss, and the pass of gradients behind them.

Every matrix product of the forward pass becomes two (gradient of its input, gradient of its weights), attention two
of the forward kernel's work, as in arXiv 2311.09431's counting; pointwise kernels and exchanges pass once more.
Nothing is computed twice to save memory. Ranks that hold the same weights sum their gradients: those of the
feed-forward products beside what follows, those of the attention products at the layer's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from workloads.errors import WorkloadError
from workloads.families.options import Options, precision_in
from workloads.families.ring import COMM_STREAM, Ring, ring_kernels
from workloads.families.transformer import build_program
from workloads.kernels import elementwise_kernel, product_kernel
from workloads.memory import MemoryNeed, memory_need
from workloads.model import ModelSpec
from workloads.ops import Attention, Gemm, Pointwise
from workloads.parallel import Layout
from workloads.placement import groups_of, place_of
from workloads.program import Kernel, Phase, Program, RankProgram, Segment, in_turn
from workloads.work import (
    AttentionWork,
    CollectiveOp,
    CollectiveWork,
    DType,
    Elementwise,
    ElementwiseWork,
    GemmWork,
    GroupedGemmWork,
    RoutedGemmWork,
)

SUM_STREAM = COMM_STREAM + 1


def build_training(
    model: ModelSpec, layout: Layout, *, batch: int, seq_len: int, options: Options | None = None
) -> Program:
    """One step over ``batch`` sequences of ``seq_len`` tokens: phases ``forward`` and ``backward``.

    >>> from workloads import load_model
    >>> program = build_training(load_model("llama3-8b"), Layout(), batch=1, seq_len=4096)
    >>> [phase.name for phase in program.ranks[0].phases]
    ['forward', 'backward']
    """
    options = options or Options()
    check_training(model, layout, options)
    forward = build_program(
        model, layout, phase="prefill", batch=batch, seq_len=seq_len, options=replace(options, lm_head=False)
    )
    ranks: dict[tuple[int, tuple[tuple[int, ...], ...]], RankProgram] = {}
    programs = []
    for number, rank in enumerate(forward.ranks):
        trained = _Rank(model=model, layout=layout, number=number, batch=batch, seq_len=seq_len, options=options)
        key = (id(rank), (trained.context_ranks, trained.tensor_ranks, trained.alike))
        if key not in ranks:
            ranks[key] = trained.program(rank)
        programs.append(ranks[key])
    return Program(ranks=tuple(programs))


def check_training(model: ModelSpec, layout: Layout, options: Options) -> None:
    """Refuse what no gradient is known for."""
    known = all(isinstance(node, Gemm | Pointwise | Attention) for _, b, _ in model.layer_groups(range(model.layers))
                for node in b.nodes)  # fmt: skip
    if not (known and model.causal) or model.vision or model.encoder or options.images:
        raise WorkloadError(f"phase = 'train': {model.id} is no dense decoder: give one, like llama-7b")
    if layout.pp > 1 or layout.ep > 1 or layout.sequence_parallel:
        raise WorkloadError("phase = 'train' is known with tp, cp and dp: leave pp, ep and sequence_parallel out")
    if not precision_in(model, options).uniform:
        raise WorkloadError(
            f"phase = 'train': {model.id} is quantised: gradients of bf16 weights are known: give those"
        )
    if options.dtype is not DType.BF16 or options.stack != "reference-torch":
        raise WorkloadError("phase = 'train': kernels of gradients are bf16 ones of stack 'reference-torch': use these")
    if options.overlap != "chunks" or options.overlap_chunks > 1:
        raise WorkloadError("phase = 'train': no overlap of tensor-parallel sums is known: leave overlap out")


def training_need(
    model: ModelSpec, layout: Layout, *, batch: int, seq_len: int, layers: int, lm_head: bool
) -> MemoryNeed:
    """Bytes of a rank: weights and 16-bit gradients; of every layer what its gradients read, kept from the forward.

    Per token: both norms' inputs and outputs, Q, K, V, attention's output, gate, up and their product; logits once.
    """
    lone = memory_need(
        model, layout, batch=batch, context=seq_len, new_tokens=seq_len, layers=layers, lm_head=lm_head,
        dtype=DType.BF16,
    )  # fmt: skip
    heads = (2 * model.q_heads + 2 * model.kv_heads) * model.head_dim
    kept = layers * (4 * model.d_model + (heads + 3 * model.d_ff) / layout.tp) + lm_head * model.vocab / layout.tp
    tokens = batch * seq_len / (layout.dp * layout.cp)
    return MemoryNeed(
        weight_bytes=lone.weight_bytes,
        kv_bytes=0.0,
        activation_bytes=tokens * kept * DType.BF16.bytes,
        gradient_bytes=lone.weight_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One rank's place and share of a step."""

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
        """Ranks that hold the same weights."""
        layout = self.layout
        return tuple(range(self.number % layout.tp, layout.tp * layout.cp * layout.dp, layout.tp))

    @property
    def sequences(self) -> int:
        return self.batch // self.layout.dp

    def program(self, forward: RankProgram) -> RankProgram:
        """Both passes."""
        (phase,) = forward.phases
        layers = phase.segments
        back = tuple(
            replace(segment, name=f"{segment.name} backward", kernels=self._backward(segment.kernels))
            for segment in reversed(layers)
        )
        ahead, behind = self._head() if self.options.lm_head else ((), ())
        return RankProgram(
            phases=(
                Phase(name="forward", segments=(*layers, *ahead)),
                Phase(name="backward", segments=(*behind, *back)),
            )
        )

    def _backward(self, forward: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """A layer from its end; a ring's rounds are laid out anew."""
        ring = self._ring()
        rounds = {"send_kv", "attention", "merge_out"} if ring else set()
        kernels: list[Kernel] = []
        weights = 0
        home: tuple[int, ...] = ()  # the transfer that brings gradients of keys and values home
        for one in reversed(forward):
            if one.name not in rounds:
                made = list(_gradients(one))
                kernels += [replace(k, after=home) for k in made] if home else made
                home = ()
                if isinstance(one.work, GemmWork):
                    weights += one.work.n * one.work.k
            elif ring is not None:
                rounds_back = ring_kernels(ring, place_of(self.layout, self.number).context, first=(-1,))
                kernels = in_turn(kernels, rounds_back)
                ring, home = None, (len(kernels) - 1,)
            if one.name == "gate_up_gemm":
                kernels += self._sum(weights, (len(kernels) - 1,))
                weights = 0
        return (*kernels, *self._sum(weights, (len(kernels) - 1,)))

    def _ring(self) -> Ring | None:
        layout = self.layout
        if layout.cp == 1 or layout.cp_mode == "ulysses":
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

    def _head(self) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
        """Every token is scored; the loss reads the logits twice and turns them into gradients."""
        rows, width = self.sequences * self.seq_len // self.layout.cp, self.model.d_model
        vocab = -(-self.model.vocab // self.layout.tp)
        head = product_kernel("lm_head", rows, vocab, width)
        loss = elementwise_kernel("loss", Elementwise.COPY, rows, vocab, 3 * rows * vocab * DType.BF16.bytes)
        kernels = [*_gradients(head)]
        if self.tensor_ranks:
            kernels.append(self._exchange("all_reduce_head", self.tensor_ranks, rows * width))
        kernels += self._sum(vocab * width, (len(kernels) - 1,))
        return (
            (Segment(name="lm_head", kernels=(head, loss)),),
            (Segment(name="lm_head backward", kernels=tuple(kernels)),),
        )

    def _sum(self, weights: int, after: tuple[int, ...]) -> Iterator[Kernel]:
        if len(self.alike) > 1:
            one = self._exchange("all_reduce_weight_grad", self.alike, weights)
            yield replace(one, stream=SUM_STREAM, after=after)

    def _exchange(self, name: str, ranks: tuple[int, ...], elements: int) -> Kernel:
        buffer = elements * DType.BF16.bytes
        work = CollectiveWork(
            op=CollectiveOp.ALL_REDUCE, ranks=ranks, buffer_bytes=buffer, ctas=self.options.comm_ctas,
            algorithm=self.options.all_reduce,
        )  # fmt: skip
        return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(buffer))


def _gradients(kernel: Kernel) -> Iterator[Kernel]:
    """What runs in the pass of gradients in place of a forward ``kernel`` of one stream."""
    work = kernel.work
    match work:
        case GemmWork():
            yield replace(kernel, name=f"{kernel.name}_grad", work=replace(work, n=work.k, k=work.n))
            weight = replace(work, m=work.n, n=work.k, k=work.m)
            yield replace(kernel, name=f"{kernel.name}_weight_grad", work=weight)
        case AttentionWork():
            yield replace(kernel, name=f"{kernel.name}_q_grad")
            yield replace(kernel, name=f"{kernel.name}_kv_grad")
        case ElementwiseWork() | CollectiveWork():
            yield replace(kernel, name=f"{kernel.name}_grad")
        case GroupedGemmWork() | RoutedGemmWork():
            raise AssertionError("experts are refused")
        case _:
            assert_never(work)
