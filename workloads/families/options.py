"""What a step depends on beside model, layout and lengths, and which of it goes together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.errors import WorkloadError
from workloads.families.adapters import Adapters, check_adapters
from workloads.kernel_names import AllReduce
from workloads.layer_passes.backward import Sharding
from workloads.layout_checks import check_layout
from workloads.model import ModelSpec
from workloads.ops import Gemm, Overlap
from workloads.parallel import Layout
from workloads.precision import Precision, resolve
from workloads.routing import Choice, Routing
from workloads.stack import load_stack
from workloads.work import DType

Optimizer = Literal["adamw", "none"]
OverlapKind = Literal["chunks", "ring_exchange", "tile_signal", "two_batch", "bulk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a step depends on beside model, layout and lengths."""

    layers: int | None = None
    lm_head: bool = True
    dtype: DType = DType.BF16
    precision: Precision | None = None  # None: the checkpoint's, else dtype
    stack: str = "reference-torch"
    routing: Routing = field(default_factory=Routing)
    tokens_per_ep_rank: tuple[int, ...] | None = None
    overlap: OverlapKind = "chunks"
    overlap_chunks: int = 1
    overlap_ops: tuple[tuple[str, Overlap], ...] = ()  # nodes by name, each with a setting of its own
    comm_ctas: int | None = None
    sms_per_cta: float = 1.0  # what a block of a collective holds: the machine knows
    sm_margin: bool = False
    all_reduce: AllReduce = AllReduce.LIBRARY
    source_len: int | None = None  # tokens that an encoder reads, a sequence
    optimizer: Optimizer = "adamw"
    sharding: Sharding = "ddp"
    accumulate: int = 1  # parts of a training batch whose gradients are added up
    images: int = 0  # encoded before a prefill, a sequence; their tokens are among its tokens
    adapters: Adapters | None = None  # low-rank ones beside the model's products


def precision_in(model: ModelSpec, options: Options) -> Precision:
    """What the operands of ``model`` are stored as in a run with ``options``."""
    return options.precision or resolve(model.quantised, dtype=options.dtype)


def check_options(model: ModelSpec, layout: Layout, options: Options) -> None:
    """Refuse what would silently run as something else."""
    if model.refused:
        raise WorkloadError(f"{model.id}: {model.refused}")
    if options.layers is not None:
        positive("layers", options.layers)
        if options.layers > model.layers:
            raise WorkloadError(f"layers = {options.layers}: {model.id} has {model.layers}")
    if options.overlap_chunks > 1 and layout.tp == 1:
        raise WorkloadError(
            f"overlap_chunks = {options.overlap_chunks} needs tp of at least 2: only its collectives can be cut"
        )
    positive("overlap_chunks", options.overlap_chunks)
    _check_overlap_ops(model, layout, options)
    _check_overlap(model, layout, options)
    _check_routing(model, layout, options)
    rows = options.tokens_per_ep_rank
    if rows is not None and not model.experts:
        raise WorkloadError(f"tokens_per_ep_rank = {rows}: {model.id} has no experts")
    if rows is not None and len(rows) != layout.ep:
        raise WorkloadError(f"tokens_per_ep_rank has {len(rows)} entries, ep is {layout.ep}: one a rank")
    precision = precision_in(model, options)
    engine = load_stack(options.stack).engine
    if engine is not None:
        _check_engine(engine, model, layout, options)
    if layout.sequence_parallel and precision.narrow:
        raise WorkloadError(
            f"dtype = '{precision.product.activations}': sequence_parallel layers have 16-bit kernels only: use bf16"
        )
    _check_encoder(model, layout, options)
    if options.images:
        _check_images(model, layout, options)
    if options.adapters is not None:
        check_adapters(model, layout, options.adapters)
        if options.overlap_chunks > 1 or options.overlap != "chunks" or options.overlap_ops:
            raise WorkloadError("lora_adapters: known beside whole products: leave overlap out")
    if options.dtype is DType.FP32 and not load_stack(options.stack).eager:
        raise WorkloadError(f"dtype = 'fp32': stack '{options.stack}' has 16-bit kernels: use stack 'eager-torch'")
    if precision.narrow and load_stack(options.stack).eager:
        raise WorkloadError(
            f"dtype = '{precision.product.activations}': stack 'eager-torch' is known with bf16 and fp32 only"
        )
    if layout.cp > 1 and load_stack(options.stack).eager:
        raise WorkloadError(f"cp = {layout.cp}: stack 'eager-torch' attends on one rank: use cp = 1")
    if layout.sequence_parallel and options.stack != "reference-torch":
        raise WorkloadError(f"stack = '{options.stack}': sequence_parallel is known for stack 'reference-torch' only")


# Types of products and of the cache that kernels of serving engines were measured in.
ENGINE_TYPES = (DType.BF16, DType.FP16, DType.FP8)
ENGINE_CACHES = (DType.BF16, DType.FP16, DType.FP8)


def _check_engine(engine: str, model: ModelSpec, layout: Layout, options: Options) -> None:
    """What a serving engine's kernels are known for."""
    if model.latent or model.state_space:
        kind = "latent attention" if model.latent else "state-space layers"
        raise WorkloadError(
            f"stack = '{engine}': its kernels for {kind} ({model.id}) are not known: use stack 'paged-kv'"
        )
    precision = precision_in(model, options)
    product = precision.product
    known = product.multiplies in ENGINE_TYPES and precision.kv in ENGINE_CACHES
    if not known or product.stored is not None or precision.exceptions or precision.head is not None:
        raise WorkloadError(
            f"stack = '{engine}': its kernels are known in 16 bit and in FP8, not with {precision.words()}: "
            "use stack 'paged-kv'"
        )
    if any(len(node.up) != 2 for node in model.routed):
        raise WorkloadError(f"stack = '{engine}': its experts are known with a gate ({model.id}): use stack 'paged-kv'")
    if layout.cp > 1:
        raise WorkloadError(f"stack = '{engine}': cp = {layout.cp}: its context parallelism is not known: use cp = 1")
    if layout.ep_mode == "all_to_all":
        raise WorkloadError(
            f"stack = '{engine}': ep_mode = 'all_to_all': its kernels are known with experts on the ranks of one "
            "tensor group: use ep_mode = 'all_reduce', or stack 'paged-kv'"
        )
    if options.overlap_chunks > 1 or options.overlap != "chunks":
        raise WorkloadError(
            f"stack = '{engine}': its collectives are whole: leave overlap out, or use 'reference-torch'"
        )


def _check_encoder(model: ModelSpec, layout: Layout, options: Options) -> None:
    """An encoder runs whole on every tensor group, before the first stage."""
    if options.source_len is not None:
        if model.encoder is None:
            raise WorkloadError(f"source_len = {options.source_len}: {model.id} has no encoder to read a source")
        positive("source_len", options.source_len)
        fixed = model.encoder.max_positions if model.encoder.learned_positions else options.source_len
        if options.source_len != fixed:
            raise WorkloadError(f"source_len = {options.source_len}: the encoder of {model.id} always reads {fixed}")
    if model.encoder is None:
        return
    if layout.pp > 1 or layout.cp > 1:
        raise WorkloadError(f"{model.id}: its encoder runs on every tensor group: leave pp and cp out")
    if load_stack(options.stack).engine is not None:
        raise WorkloadError(
            f"stack = '{options.stack}': its kernels for cross attention ({model.id}) are not known: use 'paged-kv'"
        )


def _check_images(model: ModelSpec, layout: Layout, options: Options) -> None:
    if model.vision is None:
        raise WorkloadError(f"images = {options.images}: {model.id} has no image encoder that is simulated")
    if layout.cp > 1 or layout.sequence_parallel or options.overlap == "two_batch":
        raise WorkloadError(
            f"images = {options.images}: an encoder runs whole on every tensor group: leave cp, sequence_parallel and "
            "overlap = 'two_batch' out"
        )
    check_layout(model.vision.model, Layout(tp=layout.tp), batch=1, new_tokens=1)


def _check_overlap(model: ModelSpec, layout: Layout, options: Options) -> None:
    """Each transform has a layout that it transforms and one meaning of ``overlap_chunks``."""
    kind, chunks = options.overlap, options.overlap_chunks
    if layout.cp > 1 and layout.cp_mode != "ulysses" and (kind != "chunks" or chunks > 1):
        raise WorkloadError(
            f"overlap with cp_mode = '{layout.cp_mode}': the ring has the second stream to itself: leave overlap out"
        )
    if kind == "ring_exchange" and not layout.sequence_parallel:
        raise WorkloadError("overlap = 'ring_exchange' needs sequence_parallel: its slices of the tokens travel")
    if kind == "tile_signal" and chunks == 1:
        raise WorkloadError("overlap = 'tile_signal' needs overlap_chunks of at least 2: groups of waves that signal")
    if (kind == "tile_signal" or options.sm_margin) and not options.comm_ctas:
        name = "sm_margin" if options.sm_margin else "overlap = 'tile_signal'"
        raise WorkloadError(f"{name} needs comm_ctas: the blocks whose SMs the products leave free")
    if kind == "ring_exchange" and chunks not in (1, layout.tp):
        raise WorkloadError(
            f"overlap = 'ring_exchange' has one chunk a rank, tp = {layout.tp}: leave overlap_chunks out"
        )
    if kind in ("two_batch", "bulk") and chunks > 1:
        raise WorkloadError(f"overlap = '{kind}' runs whole collectives: leave overlap_chunks out")
    if kind == "two_batch" and layout.group == 1:
        raise WorkloadError("overlap = 'two_batch' hides collectives: use tp or ep of at least 2")
    if kind == "two_batch" and options.tokens_per_ep_rank is not None:
        raise WorkloadError("overlap = 'two_batch' halves the tokens of a step: leave tokens_per_ep_rank out")
    if kind == "bulk" and not (model.shared_d_ff and layout.ep_mode == "all_to_all"):
        raise WorkloadError(
            "overlap = 'bulk' needs work that no collective feeds: a shared expert beside the all-to-alls of "
            "ep_mode = 'all_to_all'"
        )
    if options.comm_ctas == 0 and kind != "ring_exchange":
        raise WorkloadError("comm_ctas = 0 (copy engines) is for overlap = 'ring_exchange': sums need SMs")


def _check_overlap_ops(model: ModelSpec, layout: Layout, options: Options) -> None:
    """Settings of operators that are there, and of nothing else that cuts the same operators."""
    if not options.overlap_ops:
        return
    if layout.tp == 1:
        raise WorkloadError("overlap_ops needs tp of at least 2: only its collectives can be cut")
    if options.overlap != "chunks" or options.overlap_chunks > 1:
        raise WorkloadError("overlap_ops gives each operator its own chunks: leave overlap and overlap_chunks out")
    blocks = [block for _, block, _ in model.layer_groups(range(model.layers))]
    known = dict.fromkeys(node.name for block in blocks for node in block.nodes if isinstance(node, Gemm))
    for name, _ in options.overlap_ops:
        if name not in known:
            raise WorkloadError(f"overlap_ops: {model.id} has no product '{name}': its layers have {', '.join(known)}")


def _check_routing(model: ModelSpec, layout: Layout, options: Options) -> None:
    copies = options.routing.replicas
    if options.routing != Routing() and not model.experts:
        raise WorkloadError(f"routing: {model.id} has no experts to choose from")
    if copies is None:
        return
    if layout.ep == 1:
        raise WorkloadError(f"expert_replicas = {copies} needs ep of at least 2: copies balance ranks")
    if copies < 0 or (model.experts + copies) % layout.ep:
        least = -model.experts % layout.ep
        raise WorkloadError(
            f"expert_replicas = {copies}: the {model.experts} experts and their copies must fill ep = {layout.ep} "
            f"ranks evenly: use {least}, {least + layout.ep}, ..."
        )
    if options.tokens_per_ep_rank is not None:
        raise WorkloadError("expert_replicas moves experts between ranks: leave tokens_per_ep_rank out")


def choice_of(model: ModelSpec) -> Choice:
    """The model's router as sizes."""
    return Choice(experts=model.experts, top_k=model.top_k, groups=model.route_groups, top_groups=model.top_groups)


def positive(name: str, value: int) -> None:
    """Refuse a size that is none."""
    if value < 1:
        raise WorkloadError(f"{name} = {value}: give a positive whole number")
