"""Work of a program as sizes of the laws: names and types of ``workloads`` become those of ``hardware``."""

from __future__ import annotations

from hardware.cluster import Cluster
from hardware.laws.adapters import AdapterSizes
from hardware.laws.collective import even_buffer
from hardware.laws.decoder import ConvolutionSizes
from hardware.laws.routes import pattern_of
from hardware.laws.sizes import (
    CollectiveSizes,
    DecodeSizes,
    GemmSizes,
    GroupedSizes,
    LatentSizes,
    MovedSizes,
    PrefillSizes,
)
from workloads.work import (
    AdapterGemmWork,
    AttentionWork,
    CollectiveWork,
    ConvolutionWork,
    DType,
    ElementwiseWork,
    GemmWork,
    GroupedGemmWork,
)


def gemm_sizes(work: GemmWork) -> GemmSizes:
    """Products of one kernel."""
    return GemmSizes(
        m=work.m, n=work.n, k=work.k, dtype=work.dtype.value, out_bytes=work.out_dtype.bytes, count=work.count
    )


def prefill_sizes(work: AttentionWork) -> PrefillSizes:
    """Attention of several new tokens a sequence."""
    return PrefillSizes(
        batch=work.batch,
        q_len=work.q_len,
        kv_len=work.kv_len,
        q_heads=work.q_heads,
        kv_heads=work.kv_heads,
        head_dim=work.mean_head_dim,
        causal=work.causal,
    )


def moved_sizes(work: ElementwiseWork) -> MovedSizes:
    """A memory-bound kernel of an engine."""
    return MovedSizes(
        op=work.op.value, rows=work.rows, bytes_moved=float(work.bytes_moved), images=work.images, fresh=work.fresh
    )


def convolution_sizes(work: ConvolutionWork) -> ConvolutionSizes:
    """A convolution of a VAE's decoder."""
    return ConvolutionSizes(
        pixels=work.pixels,
        read=work.read,
        channels_in=work.channels_in,
        channels_out=work.channels_out,
        taps=work.taps,
        element=element(work.dtype),
        channels_last=work.channels_last,
    )


def element(dtype: DType) -> str:
    """The type under which a decoder's laws lie."""
    return "f32" if dtype is DType.FP32 else "bf16"


def decode_sizes(work: AttentionWork) -> DecodeSizes:
    """Attention of one new token a sequence."""
    return DecodeSizes(
        batch=work.batch,
        kv_len=work.kv_len,
        q_heads=work.q_heads,
        kv_heads=work.kv_heads,
        head_dim=work.mean_head_dim,
        kv_bytes=work.kv_dtype.bytes,
    )


def latent_sizes(work: AttentionWork) -> LatentSizes:
    """Attention of one new token a sequence to cached latents."""
    assert work.v_head_dim is not None
    return LatentSizes(
        batch=work.batch,
        kv_len=work.kv_len,
        q_heads=work.q_heads,
        cached_dim=work.head_dim,
        v_dim=work.v_head_dim,
        kv_bytes=work.kv_dtype.bytes,
    )


def grouped_sizes(work: GroupedGemmWork) -> GroupedSizes:
    """Products of the experts that were hit."""
    return GroupedSizes(
        experts=work.experts,
        rows=work.rows,
        distinct=work.distinct,
        tiles128=work.tiles128,
        tiles256=work.tiles256,
        rows_beyond128=work.rows_beyond128,
        n=work.n,
        k=work.k,
    )


def adapter_sizes(work: AdapterGemmWork) -> AdapterSizes:
    """One half of low-rank adapters."""
    return AdapterSizes(
        rows=work.rows,
        distinct=work.distinct,
        slices=work.slices,
        rank=work.rank,
        width=work.width,
        up=work.up,
        row_bytes=work.row_bytes,
        widest=work.widest,
        slots=work.slots,
        tokens=work.tokens,
    )


def collective_sizes(work: CollectiveWork, in_graph: bool, cluster: Cluster | None) -> CollectiveSizes:
    """One collective; an uneven all-to-all counts as the even one of what its busiest direction moves."""
    buffer_bytes = work.buffer_bytes
    if work.sent_bytes is not None and work.received_bytes is not None:
        buffer_bytes = max(1, even_buffer(len(work.ranks), work.sent_bytes, work.received_bytes))
    return CollectiveSizes(
        op=work.op.value,
        world=len(work.ranks),
        buffer_bytes=buffer_bytes,
        ctas=work.ctas,
        in_graph=in_graph,
        algorithm=work.algorithm.value,
        span=None if cluster is None else cluster.span(work.ranks, pattern_of(work.op.value)),
    )
