"""Eager mode: every operation of a model's source is a kernel of its own, attention included.

The lists follow the modelling code of Hugging Face transformers 4.x run by PyTorch without a compiler: which
operations there are, and which views must be copied before a product can read them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from workloads.errors import WorkloadError
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, elementwise_kernel, product_kernel
from workloads.ops import Attention, EagerPass, Pointwise, width_of
from workloads.program import Kernel
from workloads.work import DType, ElementwiseWork

# Bytes moved an element and kernel, in elements of the model's type (m) and of fp32 (4): what is read, then written.
# A mask is broadcast, so its kernel works out addresses as a copy that sorts heads does.
# Operations that are one kernel each, and those of a norm, an activation or a rotation written out.
_E = Elementwise
_KERNELS: dict[Elementwise, tuple[tuple[Elementwise, str], ...]] = {
    _E.ADD: ((_E.ADD, "mmm"),),
    _E.LAYERNORM: ((_E.LAYERNORM, "mm"),),
    _E.RELU: ((_E.RELU, "mm"),),
    _E.GELU: ((_E.GELU, "mm"),),
    # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): power, scale, sum, scale, tanh, plus one, half, product
    _E.GELU_TANH: (
        (_E.SCALE, "mm"), (_E.SCALE, "mm"), (_E.ADD, "mmm"), (_E.SCALE, "mm"),
        (_E.GELU, "mm"), (_E.SCALE, "mm"), (_E.SCALE, "mm"), (_E.ADD, "mmm"),
    ),
    _E.SILU_MUL: ((_E.GELU, "mm"), (_E.ADD, "mmm")),
    # to fp32, square, mean, scale, back, times the weight
    _E.RMSNORM: (
        (_E.SCALE, "m4"), (_E.SCALE, "44"), (_E.LAYERNORM, "4"), (_E.SCALE, "44"), (_E.SCALE, "4m"), (_E.SCALE, "mm"),
    ),
    # times cosine; halves swapped (negated, joined) times sine; sum
    _E.ROPE: ((_E.SCALE, "mm"), (_E.SCALE, "m"), (_E.COPY, "mm"), (_E.SCALE, "mm"), (_E.ADD, "mmm")),
}  # fmt: skip
_KERNELS[_E.ADD_RMSNORM] = (*_KERNELS[_E.ADD], *_KERNELS[_E.RMSNORM])
_SCORES: dict[EagerPass, tuple[tuple[Elementwise, str], ...]] = {
    "scale_queries": (),
    "scale": ((_E.SCALE, "mm"),),
    "mask": ((_E.PERMUTE_COPY, "mm"),),
    "softmax": ((_E.SOFTMAX, "mm"),),
    "softmax_fp32": ((_E.SOFTMAX, "m4"), (_E.COPY, "4m")),
}


def eager_kernels(node: Pointwise | Attention, shape: Shape, dtype: DType) -> list[Kernel]:
    """The kernels that ``node`` is without fusion.

    >>> from workloads import Layout, load_model
    >>> from workloads.ops import attention
    >>> shape = Shape(model=load_model("llama3-8b"), layout=Layout(), batch=1, new_tokens=512, context=512)
    >>> [kernel.name for kernel in eager_kernels(attention("scale", "softmax"), shape, DType.BF16)][2:]
    ['scores', 'scale', 'softmax', 'values', 'copy_out']
    """
    match node:
        case Pointwise():
            rows, width = _size(node, shape)
            return _chain(node.name, _KERNELS.get(node.op, ((node.op, "mm"),)), rows, width, dtype)
        case Attention():
            return _attention(node, shape, dtype)
    assert_never(node)


def _size(node: Pointwise, shape: Shape) -> tuple[int, int]:
    """Rows and width of a pointwise node on one rank."""
    model, sizes = shape.model, shape.local_sizes(node.parallel)
    tokens, heads = sizes["b"] * sizes["s"], sizes["H"] + sizes["K"]
    match node.op:
        case Elementwise.ROPE:
            return tokens, heads * model.head_dim
        case Elementwise.RMSNORM:
            return tokens * heads, model.head_dim
        case Elementwise.ADD_RMSNORM:
            return tokens, model.d_model
        case _:
            return tokens, width_of(node, sizes)


def _chain(
    name: str, kernels: tuple[tuple[Elementwise, str], ...], rows: int, width: int, dtype: DType
) -> list[Kernel]:
    def one(i: int, op: Elementwise, moves: str) -> Kernel:
        moved = sum(4 if move == "4" else dtype.bytes for move in moves) * rows * width
        label = name if len(kernels) == 1 else f"{name}.{i}"
        return _typed(elementwise_kernel(label, op, rows, width, moved), dtype)

    return [one(i, op, moves) for i, (op, moves) in enumerate(kernels)]


def _typed(kernel: Kernel, dtype: DType) -> Kernel:
    """An elementwise kernel over elements of ``dtype``."""
    assert isinstance(kernel.work, ElementwiseWork)
    return replace(kernel, work=replace(kernel.work, dtype=dtype))


def _attention(node: Attention, shape: Shape, dtype: DType) -> list[Kernel]:
    """Scores to memory, what the model does to them, values from memory.

    Heads lie beside one another in a token, so a batch of products reads copies sorted by head; grouped keys and
    values are repeated for every query head. A single sequence needs no copies but those.
    """
    if node.cross:
        shape = replace(shape, context=shape.source)
    heads, size, element = shape.q_heads, shape.model.head_dim, dtype.bytes
    if shape.model.v_head_dim:
        raise WorkloadError(f"{shape.model.id}: values of another size than keys: use a stack that fuses attention")
    products, context = shape.batch * heads, shape.batch * shape.context

    def moved(name: str, tokens: int, width: int, read: int | None = None, op: Elementwise = _E.PERMUTE_COPY) -> Kernel:
        moved_bytes = element * tokens * (width + (width if read is None else read))
        return _typed(elementwise_kernel(name, op, tokens, width, moved_bytes), dtype)

    width, kv_width = heads * size, shape.kv_heads * size
    kernels = [moved("scale_queries", shape.tokens, width, op=_E.SCALE)] if "scale_queries" in node.eager else []
    if shape.batch > 1:
        kernels.append(moved("copy_q", shape.tokens, width))
    if shape.batch > 1 or heads != shape.kv_heads:
        kernels += [moved(f"copy_{which}", context, width, kv_width) for which in "kv"]
    kernels.append(product_kernel("scores", shape.new_tokens, shape.context, size, count=products, dtype=dtype))
    for name in node.eager:
        kernels += _chain(name, _SCORES[name], products * shape.new_tokens, shape.context, dtype)
    kernels.append(product_kernel("values", shape.new_tokens, size, shape.context, count=products, dtype=dtype))
    kernels.append(moved("copy_out", shape.tokens, width))
    return kernels
