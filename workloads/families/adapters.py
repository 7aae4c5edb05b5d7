"""Low-rank adapters (LoRA) beside a model's products: which tokens ask for which, and the kernels that add them.

As vLLM's Punica kernels do it (vllm/lora/ops/triton_ops; arXiv 2310.18547): for each product one kernel takes all
tokens down to the rank and one up again, whatever the number of adapters, with those of others multiplied by nothing.
On several ranks a product's adapter is split as the product is and no further: the way down of one whose output is
split is done whole on every rank, and the way up of one whose input is split adds partial sums, which the product's own
all-reduce adds up (``fully_sharded_loras`` off). Routed experts have one each (``fused_moe_lora`` of the same folder):
rows are sorted by adapter and expert, once a layer, and each pair of these is a matrix of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workloads.errors import WorkloadError
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, elementwise_kernel
from workloads.layer_passes.lower import lower
from workloads.layer_passes.tree import Grouped, Placed, RankSplit
from workloads.model import ModelSpec
from workloads.ops import Gemm, LatentAttention
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.work import AdapterGemmWork, DType

# Modules of checkpoints by the name that adapters' files and vLLM have for them, and their products here.
MODULES = {
    "q_proj": ("Q",), "k_proj": ("K",), "v_proj": ("V",), "qkv_proj": ("Q", "K", "V"), "o_proj": ("O",),
    "gate_proj": ("gate",), "up_proj": ("up",), "gate_up_proj": ("gate", "up"), "down_proj": ("down",),
}  # fmt: skip
# Those of latent attention; none on the product that rebuilds keys and values, which decoding absorbs and does not run.
LATENT = {"q_a_proj": ("Q down",), "kv_a_proj_with_mqa": ("KV down", "rotary key"), "q_b_proj": ("Q", "rotary Q")}
# All products of routed experts; only where they are named, since each expert has adapters of its own.
EXPERTS = "experts"
# Copies of a product's adapter into its slot: both halves are cleared, then written.
COPIES = 4
# Of the host, each (s): 11.25 ms for the 896 of rank 16 on Llama 3 8B (``vllm_slot``,
# records/h200-sxm-141gb/vllm/adapter_steps.jsonl).
COPY_ISSUE_S = 12.55e-6
# A row's number and expert, read and written.
SORTED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapters of ``rank`` on ``modules`` (none named: on all of ``MODULES`` that the model has; ``EXPERTS`` may be one
    too), in a step in which ``rows`` of ``tokens`` (None: all) ask for ``distinct`` of them.
    """

    rank: int
    modules: tuple[str, ...] = ()
    distinct: int = 1
    rows: int | None = None
    slots: int | None = None  # adapters that the server has room for (None: ``distinct``)
    tokens: int | None = None

    @property
    def labels(self) -> frozenset[str]:
        """Products that have some."""
        known = MODULES | LATENT
        return frozenset(label for name in self.modules or known for label in known.get(name, ()))

    def on(self, node: Gemm | Grouped) -> bool:
        """Whether a product has some: ops that run as one product have them together."""
        if isinstance(node, Grouped):
            return EXPERTS in self.modules
        return not node.ops[0].einsum.of_activations and any(one.label in self.labels for one in node.ops)


def adapter_kernels(node: Placed, shape: Shape, adapters: Adapters | None) -> list[Kernel]:
    """What the adapters of a step add to a node of ``shape``, product by product: the sums between are cleared, then
    down and up. Nothing, where it has none."""
    return [kernel for product in _products(node) for kernel in _of_product(product, shape, adapters)]


def _products(node: Placed) -> tuple[Gemm | Grouped, ...]:
    """The products of a node that may have adapters; those of latents before its attention."""
    match node:
        case Gemm() | Grouped():
            return (node,)
        case LatentAttention():
            return (Gemm(name="latent_down_gemm", ops=node.down), Gemm(name="q_up_gemm", ops=node.q_up))
        case _:
            return ()


def _slices(node: Gemm | Grouped) -> int:
    """Matrices on the way down: one for each module, of which some are several ops here."""
    return sum(not one.label.startswith("rotary") for one in node.ops)


def _of_product(node: Gemm | Grouped, shape: Shape, adapters: Adapters | None) -> list[Kernel]:
    if adapters is None or not adapters.on(node):
        return []
    rows = shape.tokens if adapters.rows is None else adapters.rows
    if not rows:
        return []
    tokens = max(rows, shape.tokens if adapters.tokens is None else adapters.tokens)
    sorts: list[Kernel] = []
    slots: int | None = adapters.slots or adapters.distinct
    if isinstance(node, Grouped):
        slots = None  # fused_moe_lora launches blocks for pairs of an adapter and an expert that have rows
        rows, distinct = _expert_rows(shape, rows, min(adapters.distinct, rows))
        tokens = rows
        if node.first:
            sorts.append(elementwise_kernel("lora_sort_rows", Elementwise.COPY, rows, 1, SORTED_BYTES * rows))
    else:
        if node.ops[0].parallel == "s":  # a shared expert's, whose tokens the ranks share out
            rows, tokens = (-(-one // shape.layout.tp) for one in (rows, tokens))
        distinct = min(adapters.distinct, rows)
    depth, columns = _sides(node, shape)
    slices = _slices(node)
    ways = [
        AdapterGemmWork(
            rows=rows, distinct=distinct, slices=slices, rank=adapters.rank, width=width, up=up, widest=widest,
            slots=slots, tokens=tokens,
        )
        for width, up, widest in ((depth, False, None), (columns, True, _widest(node, shape)))
    ]  # fmt: skip
    down, up = (
        Kernel(
            name=f"{name}_{node.name}", work=way, flops=way.flops,
            bytes_moved=way.dtype.bytes * way.weights + rows * way.row_bytes, chained=not way.up,
        )
        for name, way in zip(("lora_shrink", "lora_expand"), ways, strict=True)
    )  # fmt: skip
    between = slices * tokens  # rows of sums, of all tokens
    moved = DType.FP32.bytes * between * adapters.rank
    cleared = elementwise_kernel(f"lora_clear_{node.name}", Elementwise.COPY, between, adapters.rank, moved)
    return [*sorts, replace(cleared, chained=True), down, up]


def _expert_rows(shape: Shape, tokens: int, adapters: int) -> tuple[int, int]:
    """Rows of a rank's experts, equal on all ranks, and distinct pairs of an adapter and an expert among them: expected
    numbers under uniform routing.

    >>> from workloads import load_model
    >>> shape = Shape(model=load_model("qwen3-30b-a3b"), layout=Layout(), batch=1, new_tokens=1, context=1)
    >>> _expert_rows(shape, 1, 1), _expert_rows(shape, 32, 1), _expert_rows(shape, 32, 8), _expert_rows(shape, 8192, 8)
    ((8, 8), (256, 112), (256, 233), (65536, 1024))
    """
    model, layout = shape.model, shape.layout
    experts = model.experts // layout.ep
    rows = max(1, round(tokens * model.top_k * layout.own_batches / layout.ep))
    missed = (1.0 - model.top_k / model.experts) ** (tokens * layout.own_batches / adapters)
    return rows, max(1, min(rows, round(adapters * experts * (1.0 - missed))))


def _sides(node: Gemm | Grouped, shape: Shape) -> tuple[int, int]:
    """A rank's share of a product's input and of its outputs."""
    depth = columns = 0
    for one in node.ops:
        _, n, depth = one.einsum.gemm(shape.local_sizes(one.parallel))
        columns += n
    return depth, columns


def _widest(node: Gemm | Grouped, shape: Shape) -> int:
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
            for one in filter(adapters.on, _products(node)):
                depth, columns = _sides(one, shape.over(one.group) if isinstance(one, Gemm) else shape)
                matrices = model.experts // layout.ep if isinstance(one, Grouped) else 1
                elements += len(run) * matrices * adapters.rank * (_slices(one) * depth + columns)
                copies += len(run) * COPIES * _slices(one)
    return AdapterSize(rank_bytes=float(DType.BF16.bytes * elements), copies=copies)


def check_adapters(model: ModelSpec, layout: Layout, adapters: Adapters) -> None:
    """Refuse what nobody runs, and modules that the model has not."""
    if model.state_space or model.encoder is not None or not model.causal:
        raise WorkloadError(
            f"lora_adapters: known for decoders of queries, keys and values, not for {model.id}: leave them out"
        )
    if layout.cp > 1 or layout.sequence_parallel:
        raise WorkloadError("lora_adapters: known with every token on every rank: leave cp and sequence_parallel out")
    blocks = [block for _, block, _ in model.layer_groups(range(model.layers))]
    products = [product for block in blocks for node in lower(block.nodes) for product in _products(node)]
    has = {one.label for product in products if isinstance(product, Gemm) for one in product.ops}
    modules = (MODULES | LATENT) if model.latent else MODULES
    for name in adapters.modules:
        if not (model.routed if name == EXPERTS else has & set(modules.get(name, ()))):
            known = ", ".join(other for other, labels in modules.items() if has & set(labels))
            routed = f" (those of its routed experts are '{EXPERTS}')" if model.routed else ""
            raise WorkloadError(f"lora_targets: {model.id} has no product '{name}'{routed}: it has {known}")
