"""The stack pass: what a serving stack makes of each node - which are fused, split, copied or left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from workloads.kernel_names import Elementwise
from workloads.layer_passes.overlap import BesideExchange, Stage, Step
from workloads.layer_passes.tree import Placed
from workloads.ops import Attention, Gemm, LatentAttention, Pointwise
from workloads.stack import Stack


def stacked(nodes: Iterable[Step], stack: Stack) -> tuple[Step, ...]:
    """``nodes`` as ``stack`` runs them.

    >>> from workloads.stack import load_stack
    >>> norm = Pointwise(name="norm", op=Elementwise.ADD_RMSNORM)
    >>> [node.name for node in stacked((norm,), load_stack("unfused-torch"))]
    ['norm.add', 'norm.norm']
    """
    return tuple(made for node in nodes for made in _of_stack(node, stack))


def _of_stack(node: Step, stack: Stack) -> Iterator[Step]:
    match node:
        case Stage():
            inside = tuple(one for part in node.nodes for one in _of_stack(part, stack))
            yield replace(node, nodes=tuple(one for one in inside if isinstance(one, Gemm | Pointwise)))
        case BesideExchange():
            yield replace(node, nodes=tuple(one for part in node.nodes for one in _placed(part, stack)))
        case Gemm() if not stack.fused_weights and not node.one_matrix:
            yield replace(node, fused=False)
        case Attention() | LatentAttention() if stack.kv_copies and stack.engine is None:
            yield replace(node, copies=True)
        case Pointwise() if not stack.eager and stack.engine is None:
            yield from _pointwise(node, stack)
        case _:
            yield node


def _placed(node: Placed, stack: Stack) -> Iterator[Placed]:
    yield from (one for one in _of_stack(node, stack) if not isinstance(one, Stage | BesideExchange))


def _pointwise(node: Pointwise, stack: Stack) -> Iterator[Pointwise]:
    """What reads and writes each element in turn where one kernel could do it all."""
    match node.op:
        case Elementwise.ADD_RMSNORM if not stack.fused_add_norm:
            yield replace(node, name=f"{node.name}.add", passes=3)
            yield replace(node, name=f"{node.name}.norm", passes=2)
        case Elementwise.SILU_MUL if not stack.fused_gate:
            # silu reads and writes one array and costs what any activation does
            yield replace(node, name=f"{node.name}.silu", op=Elementwise.GELU)
            yield replace(node, name=f"{node.name}.mul")
        case Elementwise.RMSNORM if not stack.qk_norm:
            return
        case _:
            yield node
