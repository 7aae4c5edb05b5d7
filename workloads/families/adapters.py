"""Low-rank adapters (LoRA) beside a model's products: which tokens ask for which, and the kernels that add them.

As vLLM's Punica kernels do it (vllm/lora/ops/triton_ops; arXiv 2310.18547): for each product one kernel takes all
tokens down to the rank and one up again, whatever the number of adapters, with those of others multiplied by nothing.
On several ranks a product's adapter is split as the product is and no further: the way down of one whose output is
split is done whole on every rank, and the way up of one whose input is split adds partial sums, which the product's own
all-reduce adds up (``fully_sharded_loras`` off).
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.errors import WorkloadError
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, elementwise_kernel
from workloads.layer_passes.lower import lower
from workloads.layer_passes.tree import RankSplit
from workloads.model import ModelSpec
from workloads.ops import Gemm
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.work import AdapterGemmWork, DType

# Modules of checkpoints by the name that adapters' files and vLLM have for them, and their products here.
MODULES = {
    "q_proj": ("Q",), "k_proj": ("K",), "v_proj": ("V",), "qkv_proj": ("Q", "K", "V"), "o_proj": ("O",),
    "gate_proj": ("gate",), "up_proj": ("up",), "gate_up_proj": ("gate", "up"), "down_proj": ("down",),
}  # fmt: skip
# Copies of a product's adapter into its slot: both halves are cleared, then written.
COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapters of ``rank`` on ``modules`` (none named: on all of ``MODULES`` that the model has), in a step in which
    ``rows`` tokens (None: all) ask for ``distinct`` of them.
    """

    rank: int
    modules: tuple[str, ...] = ()
    distinct: int = 1
    rows: int | None = None
    slots: int | None = None  # that the server has (None: ``distinct``)

    @property
    def labels(self) -> frozenset[str]:
        """Products that have some."""
        return frozenset(label for name in self.modules or MODULES for label in MODULES[name])

    def on(self, node: Gemm) -> bool:
        """Whether a product has some: ops that run as one product have them together."""
        return not node.ops[0].einsum.of_activations and any(one.label in self.labels for one in node.ops)


def adapter_kernels(node: Gemm, shape: Shape, adapters: Adapters | None) -> list[Kernel]:
    """What the adapters of a step add to a product of ``shape``: the sums between are cleared, then down and up."""
    if adapters is None or not adapters.on(node):
        return []
    rows = shape.tokens if adapters.rows is None else adapters.rows
    if not rows:
        return []
    if node.ops[0].parallel == "s":  # a shared expert's, whose tokens the ranks share out
        rows = -(-rows // shape.layout.tp)
    depth, columns = _sides(node, shape)
    slices, distinct = len(node.ops), min(adapters.distinct, rows)
    between = slices * rows * adapters.rank
    ways = [
        AdapterGemmWork(
            rows=rows, distinct=distinct, slices=slices, rank=adapters.rank, width=width, up=up, widest=widest,
            slots=adapters.slots or adapters.distinct,
        )
        for width, up, widest in ((depth, False, None), (columns, True, _widest(node, shape)))
    ]  # fmt: skip
    down, up = (
        Kernel(
            name=f"{name}_{node.name}", work=way, flops=way.flops,
            bytes_moved=way.dtype.bytes * way.weights + rows * way.row_bytes,
        )
        for name, way in zip(("lora_shrink", "lora_expand"), ways, strict=True)
    )  # fmt: skip
    cleared = elementwise_kernel(f"lora_clear_{node.name}", Elementwise.COPY, slices * rows, adapters.rank, 4 * between)
    return [cleared, down, up]


def _sides(node: Gemm, shape: Shape) -> tuple[int, int]:
    """A rank's share of a product's input and of its outputs."""
    depth = columns = 0
    for one in node.ops:
        _, n, depth = one.einsum.gemm(shape.local_sizes(one.parallel))
        columns += n
    return depth, columns


def _widest(node: Gemm, shape: Shape) -> int:
    """A rank's share of the widest slice of a product's outputs."""
    return max(one.einsum.gemm(shape.local_sizes(one.parallel))[1] for one in node.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """One adapter on a rank: its bytes, and the copies that bring it there."""

    rank_bytes: float
    copies: int


def adapter_size(model: ModelSpec, layout: Layout, layers: range, adapters: Adapters) -> AdapterSize:
    """One adapter's share of a rank that holds ``layers``.

    >>> from workloads import load_model
    >>> llama = load_model("llama3-8b")
    >>> adapter_size(llama, Layout(), range(llama.layers), Adapters(rank=16)).rank_bytes / 1e6
    83.88608
    """
    elements = copies = 0
    shape = Shape(model=model, layout=layout, batch=1, new_tokens=1, context=1)
    for _, block, run in model.layer_groups(layers):
        for node in lower(block.nodes, RankSplit.of(layout)):
            if isinstance(node, Gemm) and adapters.on(node):
                depth, columns = _sides(node, shape.over(node.group))
                elements += len(run) * adapters.rank * (len(node.ops) * depth + columns)
                copies += len(run) * COPIES * len(node.ops)
    return AdapterSize(rank_bytes=float(DType.BF16.bytes * elements), copies=copies)


def check_adapters(model: ModelSpec, layout: Layout, adapters: Adapters) -> None:
    """Refuse what nobody runs, and modules that the model has not."""
    if model.latent or model.state_space or model.encoder is not None or not model.causal:
        raise WorkloadError(
            f"lora_adapters: known for decoders of queries, keys and values, not for {model.id}: leave them out"
        )
    if layout.cp > 1 or layout.sequence_parallel:
        raise WorkloadError("lora_adapters: known with every token on every rank: leave cp and sequence_parallel out")
    blocks = [block for _, block, _ in model.layer_groups(range(model.layers))]
    has = {one.label for block in blocks for node in lower(block.nodes) if isinstance(node, Gemm) for one in node.ops}
    for name in adapters.modules:
        if not has & set(MODULES[name]):
            known = ", ".join(other for other, labels in MODULES.items() if has & set(labels))
            routed = " (its routed experts take none here)" if model.routed else ""
            raise WorkloadError(f"lora_targets: {model.id} has no product '{name}'{routed}: it has {known}")
