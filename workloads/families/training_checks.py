"""What no gradient is known for."""

from __future__ import annotations

from workloads.errors import WorkloadError
from workloads.families.options import Options, precision_in
from workloads.layer_passes.backward import summed_over
from workloads.model import ModelSpec
from workloads.ops import Attention, Experts, Gemm, Pointwise
from workloads.parallel import Layout
from workloads.stack import load_stack
from workloads.work import DType


def check_training(model: ModelSpec, layout: Layout, batch: int, options: Options) -> None:
    """Refuse what no gradient is known for."""
    nodes = [node for block in model.blocks for node in block.nodes]
    weighted = all(summed_over(one) for node in nodes if isinstance(node, Gemm) for one in node.ops)
    known = (
        weighted
        and not any(block.sizes or block.tied for block in model.blocks)
        and all(isinstance(node, Gemm | Pointwise | Attention | Experts) for node in nodes)
    )
    if not (known and model.causal) or model.vision or model.encoder or options.images:
        raise WorkloadError(
            f"phase = 'train': {model.id} has other layers than attention, feed-forwards and experts: no gradient of "
            "them is known"
        )
    if layout.sequence_parallel:
        raise WorkloadError("phase = 'train' is known with tp, ep, cp, pp and dp: leave sequence_parallel out")
    if layout.pp > 1 and layout.cp > 1:
        raise WorkloadError("phase = 'train': pp with cp is not known: use one of them")
    if layout.ep_mode == "all_reduce" and layout.tp != layout.ep:
        raise WorkloadError(f"phase = 'train': ep_mode = 'all_reduce' with ep = {layout.ep}: use tp = {layout.ep} too")
    if not precision_in(model, options).uniform:
        raise WorkloadError(
            f"phase = 'train': {model.id} is quantised: gradients of bf16 weights are known: give those"
        )
    known_stack = options.stack == "reference-torch" or load_stack(options.stack).framework is not None
    if options.dtype is not DType.BF16 or not known_stack:
        raise WorkloadError(
            "phase = 'train': kernels of gradients are bf16 ones of stack 'reference-torch' or 'llm-foundry': use these"
        )
    if options.stack != "reference-torch" and layout.cp > 1:
        raise WorkloadError(f"phase = 'train': stack = '{options.stack}' has no cp: use stack 'reference-torch'")
    if options.overlap != "chunks" or options.overlap_chunks > 1 or options.overlap_ops:
        raise WorkloadError("phase = 'train': no overlap of tensor-parallel sums is known: leave overlap out")
    if batch % options.accumulate:
        raise WorkloadError(f"accumulate = {options.accumulate} does not divide batch = {batch}")
