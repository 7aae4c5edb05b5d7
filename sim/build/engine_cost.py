"""A serving engine's own kernels: sizes become terms of its laws on a GPU, or of the libraries' where it has none."""

from __future__ import annotations

from dataclasses import replace

from hardware.gpu import GpuSpec
from hardware.laws.decoder import MOST_FLASH_HEAD_DIM
from hardware.laws.engine_price import (
    convolution_terms,
    engine_all_reduce_terms,
    engine_decode_terms,
    engine_prefill_terms,
    moved_terms,
    routed_gemm_terms,
    scaled_gemm_terms,
    stand_in,
    tile_of,
    unsized_terms,
    wide_attention_terms,
)
from hardware.laws.sizes import RoutedSizes
from hardware.laws.terms import KernelTerms
from hardware.profile import Profile
from sim.build.kernel_sizes import convolution_sizes, decode_sizes, element, moved_sizes, prefill_sizes
from workloads.kernel_names import CollectiveOp, Elementwise, EngineOp
from workloads.work import (
    AdapterGemmWork,
    AttentionWork,
    CollectiveWork,
    ConvolutionWork,
    DType,
    ElementwiseWork,
    GemmWork,
    GroupedGemmWork,
    RoutedGemmWork,
    Work,
)


def engine_terms(work: Work, profile: Profile, gpu: GpuSpec) -> KernelTerms | None:
    """Terms of ``work`` under its engine's laws; None where the profile has no row of it."""
    if isinstance(work, ElementwiseWork) and (terms := unsized_terms(work.op.value, work.rows)) is not None:
        return terms
    laws = profile.engines.get(getattr(work, "engine", None) or "")
    if laws is None:
        return None
    match work:
        case ElementwiseWork():
            return moved_terms(laws, gpu, moved_sizes(work))
        case ConvolutionWork():
            return convolution_terms(laws, gpu, convolution_sizes(work))
        case AttentionWork() if work.head_dim > MOST_FLASH_HEAD_DIM:
            return wide_attention_terms(laws, gpu, prefill_sizes(work), element(work.dtype))
        case GemmWork() if work.scales is not None and gpu.multiplies("fp8_e4m3"):
            return scaled_gemm_terms(laws, gpu, m=work.m, n=work.n, k=work.k, scales=work.scales)
        case AttentionWork() if work.decode:
            return engine_decode_terms(laws, gpu, decode_sizes(work), work.kv_dtype.value)
        case AttentionWork():
            return engine_prefill_terms(laws, profile, gpu, prefill_sizes(work), masked=work.masked)
        case RoutedGemmWork() if weights_of(work) in laws.routed:
            return routed_gemm_terms(laws, gpu, _routed_sizes(work, gpu))
    return None


def _routed_sizes(work: RoutedGemmWork, gpu: GpuSpec) -> RoutedSizes:
    """One product of the engine's experts, in the tiles that the engine chooses on ``gpu``."""
    weight_type = weights_of(work)
    block_m, block_n = tile_of(work.engine, gpu.id, weight_type, work.experts, work.inner, work.tokens)
    return RoutedSizes(
        rows=work.rows,
        distinct=work.distinct,
        tiles=dict(work.tiles)[block_m],
        block_m=block_m,
        block_n=block_n,
        n=work.n,
        k=work.k,
        weight_type=weight_type,
    )


def weights_of(work: RoutedGemmWork) -> str:
    """The name under which laws and tiles of an expert product lie: both 16-bit types run the same kernels."""
    name = "bf16" if work.dtype is DType.FP16 else work.dtype.value
    return f"{name}_block" if work.scales == "block" else name


def own_all_reduce(work: CollectiveWork, profile: Profile, library: KernelTerms) -> KernelTerms | None:
    """The engine's all-reduce, whose ranks and blocks are those of the ``library``'s; None without rows of so many."""
    laws = profile.engines.get(work.engine or "")
    if laws is None or work.op is not CollectiveOp.ALL_REDUCE:
        return None
    return engine_all_reduce_terms(laws, library, world=len(work.ranks), buffer_bytes=work.buffer_bytes)


def without_engine(work: Work) -> Work:
    """The libraries' kernel that stands in for an engine's."""
    match work:
        case RoutedGemmWork():
            tiles = dict(work.tiles)
            return GroupedGemmWork(
                experts=work.experts,
                rows=work.rows,
                distinct=work.distinct,
                tiles128=tiles[128],
                tiles256=max(float(work.distinct), tiles[128] / 2),
                rows_beyond128=max(0.0, work.rows - 128.0 * work.distinct),
                n=work.n,
                k=work.k,
            )
        case ConvolutionWork():
            depth = work.taps * work.channels_in
            return GemmWork(m=work.pixels, n=work.channels_out, k=depth, dtype=work.dtype, out_dtype=work.dtype)
        case ElementwiseWork() if isinstance(work.op, EngineOp):
            return replace(work, op=Elementwise(stand_in(work.op.value)), engine=None)
        case CollectiveWork():
            return work  # priced as the library's first
        case GroupedGemmWork() | AdapterGemmWork():
            return work
        case _:
            return replace(work, engine=None)
