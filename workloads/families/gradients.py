"""The pass of gradients behind a layer's forward kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from workloads.families.ring import attention_gradient
from workloads.kernel_names import Elementwise, EngineOp
from workloads.layer_passes.backward import transposed
from workloads.program import Kernel
from workloads.work import (
    AdapterGemmWork,
    AttentionWork,
    CollectiveWork,
    ConvolutionWork,
    ElementwiseWork,
    GemmWork,
    GroupedGemmWork,
    RoutedGemmWork,
)

# Arrays that the kernel of gradients reads and writes for each one of the forward kernel: an activation's and a norm's
# reads the input beside the output's gradient (3 for 2), a gated product's reads three and writes two (5 for 3); a sum
# with a norm behind it has as many (4), as have a rotation and a sum.
PASSES: dict[Elementwise | EngineOp, float] = {
    Elementwise.SILU_MUL: 5 / 3,
    Elementwise.GELU: 3 / 2,
    Elementwise.GELU_TANH: 3 / 2,
    Elementwise.RELU: 3 / 2,
    Elementwise.LAYERNORM: 3 / 2,
    Elementwise.RMSNORM: 3 / 2,
}


def gradients(kernel: Kernel) -> Iterator[Kernel]:
    """What runs in the pass of gradients in place of a forward ``kernel`` of one stream."""
    work = kernel.work
    match work:
        case GemmWork():
            yield replace(kernel, name=f"{kernel.name}_grad", work=replace(work, n=work.k, k=work.n))
            weight = replace(work, m=work.n, n=work.k, k=work.m)
            yield replace(kernel, name=f"{kernel.name}_weight_grad", work=weight)
        case GroupedGemmWork():  # of the weights: as many FLOPs, each expert's rows summed over
            yield replace(kernel, name=f"{kernel.name}_grad", work=replace(work, n=work.k, k=work.n))
            yield replace(kernel, name=f"{kernel.name}_weight_grad")
        case AttentionWork():
            yield attention_gradient(kernel)
        case CollectiveWork():
            op = transposed(work.op)
            if op is not None:
                back = replace(work, op=op, sent_bytes=work.received_bytes, received_bytes=work.sent_bytes)
                yield replace(kernel, name=f"{kernel.name}_grad", work=back)
        case ElementwiseWork():
            moved = round(work.bytes_moved * PASSES.get(work.op, 1.0))
            yield replace(
                kernel, name=f"{kernel.name}_grad", work=replace(work, bytes_moved=moved), bytes_moved=float(moved)
            )
        case RoutedGemmWork() | ConvolutionWork() | AdapterGemmWork():
            raise AssertionError("engines do not train")
        case _:
            assert_never(work)
