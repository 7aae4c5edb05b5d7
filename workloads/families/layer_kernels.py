"""The passes over a layer, one after the other: from its nodes to the kernels of a rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from inputs.same import Same
from workloads.families.interleave import two_batches
from workloads.families.nodes import PhaseName, kernels_of, placed_nodes
from workloads.families.options import Options
from workloads.kernels import Shape
from workloads.layer_passes.lower import lower_head
from workloads.layer_passes.overlap import Step, beside_shared, has_experts, overlap
from workloads.layer_passes.schedule import Schedule, leave_sms
from workloads.layer_passes.shard import shard
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.streams import streamed
from workloads.layer_passes.tree import (
    Combine,
    Embedding,
    ExpertAct,
    ExpertRouter,
    ExpertRows,
    Grouped,
    Head,
    Join,
    Placed,
    RankSplit,
    SampleToken,
)
from workloads.ops import Attention, Block, Gemm, Indexer, LatentAttention, Pointwise
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.routing import ExpertLoad
from workloads.stack import Stack

# Kernels of nodes by node, and by the context and the load of experts that the node depends on.
Known = dict[tuple[Same[Placed], int | None, ExpertLoad | None], list[Kernel]]


@dataclass(slots=True, eq=False)
class LayerKernels:
    """Kernels of a model's layers under ``options``: what ranks and steps of a program share is made once."""

    stack: Stack
    options: Options
    _layers: dict[Hashable, tuple[tuple[Step, ...], int, Known]] = field(default_factory=dict)
    _heads: dict[Hashable, tuple[tuple[Placed, ...], Known]] = field(default_factory=dict)

    def of(self, block: Block, shape: Shape, phase: PhaseName, load: ExpertLoad | None) -> list[Kernel]:
        """One layer; ``load`` is that of the rank's experts where it has some."""
        return self._of(block, shape, phase, load, self.options)

    def _of(
        self, block: Block, shape: Shape, phase: PhaseName, load: ExpertLoad | None, options: Options
    ) -> list[Kernel]:
        if options.sm_margin and options.overlap != "bulk":
            kernels = self._of(block, shape, phase, load, replace(options, sm_margin=False))
            return [leave_sms(kernel, options.comm_ctas or 0) for kernel in kernels]
        if options.overlap == "two_batch":
            half = replace(shape, batch=shape.batch // 2)
            return two_batches(self._of(block, half, phase, load, replace(options, overlap="chunks")))
        # What a layer of this model, split and options depends on beside the context and the experts' load.
        lengths = (phase, shape.batch, shape.new_tokens, shape.source, shape.context_slice)
        key = (Same(block), shape.precision, lengths, options.overlap)
        if key not in self._layers:
            self._layers[key] = (*self._steps(block, shape.layout, options), {})
        steps, margin_ctas, known = self._layers[key]
        make = kernels_of(shape, phase, load, self.stack, options)
        return streamed(steps, _remembered(make, shape.context, load, known), margin_ctas=margin_ctas)

    def head(self, shape: Shape) -> tuple[Kernel, ...]:
        """The vocabulary head over the last token of each sequence."""
        key = (shape.precision, shape.batch, shape.context_slice)
        if key not in self._heads:
            made = lower_head(samples=self.stack.engine is not None)
            self._heads[key] = shard(made, RankSplit.of(shape.layout), returns=False), {}
        nodes, known = self._heads[key]
        make = kernels_of(replace(shape, new_tokens=1), "decode", None, self.stack, self.options)
        remembered = _remembered(make, shape.context, None, known)
        return tuple(kernel for node in nodes for kernel in remembered(node))

    def _steps(self, block: Block, layout: Layout, options: Options) -> tuple[tuple[Step, ...], int]:
        """The layer's nodes and what runs beside what, and the blocks that products leave to a collective."""
        nodes = placed_nodes(with_settings(block, options), RankSplit.of(layout))
        if options.overlap == "bulk" and has_experts(nodes):
            margin_ctas = (options.comm_ctas or 0) if options.sm_margin else 0
            return stacked(beside_shared(nodes), self.stack), margin_ctas
        return stacked(overlap(nodes, lambda node: schedule_of(node, layout, options)), self.stack), 0


def _remembered(
    make: Callable[[Placed], list[Kernel]], context: int, load: ExpertLoad | None, known: Known
) -> Callable[[Placed], list[Kernel]]:
    """``make``, once for all contexts and loads that a node does not depend on."""

    def kernels(node: Placed) -> list[Kernel]:
        key = (Same(node), context if of_context(node) else None, load if of_experts(node) else None)
        found = known.get(key)
        if found is None:
            found = known[key] = make(node)
        return found

    return kernels


def of_context(node: Placed) -> bool:
    """Whether the kernels of ``node`` may depend on how many tokens are attended to."""
    match node:
        case Gemm():
            return any("z" in op.einsum.axes for op in node.ops)
        case Pointwise() | ExpertRouter() | ExpertRows() | Grouped() | ExpertAct() | Combine() | Join():
            return False
        case Embedding() | Head() | SampleToken():
            return False
    return True


def of_experts(node: Placed) -> bool:
    """Whether the kernels of ``node`` may depend on the load of the rank's experts."""
    return not isinstance(node, Gemm | Pointwise | Attention | LatentAttention | Indexer)


def with_settings(block: Block, options: Options) -> Block:
    """``block`` with the overlap that a step has for its operators, or for all of them, instead of the model's own."""
    settings = dict(options.overlap_ops)
    for_all = options.overlap_chunks > 1 or options.overlap != "chunks"
    own = any(isinstance(one, Gemm) and one.overlap is not None for one in block.nodes)
    if not settings and not (for_all and own):
        return block
    nodes = (
        replace(one, overlap=None if for_all else settings.get(one.name, one.overlap)) if isinstance(one, Gemm) else one
        for one in block.nodes
    )
    return replace(block, nodes=tuple(nodes))


def schedule_of(node: Gemm, layout: Layout, options: Options) -> Schedule | None:
    """How a product and its collective run: as the step has it for this operator or for all, else as the node asks.

    A node asks in blocks or in SMs; a block of the library holds ``options.sms_per_cta`` of them.
    """
    match options.overlap:
        case "ring_exchange":
            return Schedule(kind="ring_exchange", pieces=layout.tp, ctas=options.comm_ctas)
        case "tile_signal":
            return Schedule(kind="tile_signal", pieces=options.overlap_chunks, ctas=options.comm_ctas)
    asked = node.overlap
    if options.overlap_chunks > 1 or asked is None:
        return Schedule(pieces=options.overlap_chunks, ctas=options.comm_ctas) if options.overlap_chunks > 1 else None
    ctas = asked.comm_ctas or options.comm_ctas
    if ctas is None and asked.sms is not None:
        ctas = max(1, int(asked.sms / options.sms_per_cta))
    return Schedule(pieces=asked.chunks, ctas=ctas)
