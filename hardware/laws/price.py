"""Sizes to terms on one GPU under one profile: the laws with their coefficients and learnt corrections."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import decode_base_terms, decode_features, prefill_base_terms, prefill_features
from hardware.laws.collective import collective_base_terms
from hardware.laws.correction import corrected
from hardware.laws.elementwise import elementwise_base_terms, elementwise_course, elementwise_features, permuting
from hardware.laws.exchange import CTAS, Exchange, exchange_bytes, exchange_s
from hardware.laws.gemm import gemm_base_terms, gemm_features
from hardware.laws.gemm_grid import LEAST_ROWS, launched_tiles, relaunched
from hardware.laws.grouped import grouped_base_terms, grouped_features
from hardware.laws.latent import latent_decode_base_terms
from hardware.laws.routes import IN_SWITCH_FROM, IN_SWITCH_SHARE, Span
from hardware.laws.stored import grouped_with_operands
from hardware.laws.terms import KernelTerms

if TYPE_CHECKING:
    from hardware.profile import Profile

# fp16 runs on the same tensor cores at the same rate as bf16 on every GPU in the catalog.
_SAME_RATE = {"fp16": "bf16"}
# Types without rows of their own: kernels of another type at their own rate and bytes, marked extrapolated.
_NEAREST = {"int8": ("fp8_e4m3", "bf16"), "fp4_e2m1": ("fp8_e4m3",)}
# Kernels without rows of their own take the coefficients of the nearest one measured: one pass in, one out.
_LIKE = {
    "gelu": "silu_mul", "gelu_tanh": "gelu", "relu": "gelu", "rmsnorm": "add_rmsnorm", "layernorm": "add_rmsnorm",
    "softmax": "add_rmsnorm", "add": "silu_mul", "scale": "copy",
}  # fmt: skip


def gemm_terms(
    profile: Profile, gpu: GpuSpec, *, m: int, n: int, k: int, dtype: str, out_bytes: int = 2, count: int = 1
) -> KernelTerms:
    """``count`` products ``(m x k) . (k x n)`` in one kernel."""
    dtype = _SAME_RATE.get(dtype, dtype)
    law = gemm_law(profile, dtype)
    if law is None or dtype not in _rates(gpu):
        known = ", ".join(sorted(name for name in _rates(gpu) if gemm_law(profile, name) and name not in _SAME_RATE))
        raise HardwareError(f"dtype = '{dtype}': {gpu.id} has no GEMM figures for it; known: {known}")
    terms = gemm_base_terms(
        profile.gemm[law],
        m=m,
        n=n * count,
        k=k,
        element_bytes=_element_bytes(dtype),
        out_bytes=out_bytes,
        flops_per_cycle_per_sm=_rates(gpu)[dtype] / (gpu.reference_clock_hz * gpu.sms),
        sms=gpu.sms,
        max_clock_hz=gpu.max_clock_hz,
        l2_bytes=gpu.l2_bytes,
    )
    if count > 1:  # each product reads an input of its own
        inputs = (count - 1) * m * k * _element_bytes(dtype)
        terms = replace(
            terms,
            hbm_bytes=terms.hbm_bytes + inputs,
            hbm_energy_j=terms.hbm_energy_j + inputs * profile.gemm[law].hbm_byte_energy_j,
        )
    if gpu.clusters:
        terms = replace(terms, cluster=profile.scheduling.gemm_cluster)
    if law != dtype:  # what was learnt belongs to the kernels of the law's own type
        return replace(terms, extrapolated=True)
    learnt = profile.gemm_corrections[dtype]
    return corrected(terms, learnt.time, learnt.energy, gemm_features(m, n * count, k, dtype))


def gemm_law(profile: Profile, dtype: str) -> str | None:
    """The type whose coefficients price products in ``dtype``: its own, or the nearest one's that was measured."""
    return next((name for name in (dtype, *_NEAREST.get(dtype, ())) if name in profile.gemm), None)


def launched_gemm(profile: Profile, gpu: GpuSpec, terms: KernelTerms, *, m: int, n: int, k: int) -> KernelTerms:
    """``terms`` of a 16-bit product in the tiles that its library launches, which decide what runs beside it."""
    if m < LEAST_ROWS or not gpu.clusters:
        return terms
    tiles = launched_tiles(
        profile.gemm["bf16"],
        m=m,
        n=n,
        k=k,
        flops_per_cycle_per_sm=_rates(gpu)["bf16"] / (gpu.reference_clock_hz * gpu.sms),
        sms=gpu.sms,
        max_clock_hz=gpu.max_clock_hz,
    )
    return relaunched(terms, tiles, gpu.sms)


def attention_prefill_terms(
    profile: Profile,
    gpu: GpuSpec,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
) -> KernelTerms:
    """Flash attention over ``q_len`` new tokens (16-bit inputs)."""
    terms = prefill_base_terms(
        profile.prefill,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
        element_bytes=2,
        flops_per_cycle_per_sm=_rates(gpu)["bf16"] / (gpu.reference_clock_hz * gpu.sms),
        hbm_bytes_per_s=profile.gemm["bf16"].hbm_bytes_per_s,
        hbm_byte_energy_j=profile.gemm["bf16"].hbm_byte_energy_j,
        sms=gpu.sms,
    )
    learnt = profile.prefill_corrections
    x = prefill_features(batch, q_len, kv_len, q_heads, causal)
    return corrected(terms, learnt.time, learnt.energy, x)


def attention_decode_terms(
    profile: Profile,
    gpu: GpuSpec,
    *,
    batch: int,
    kv_len: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    kv_bytes: int,
) -> KernelTerms:
    """One query token a sequence over ``kv_len`` cached tokens."""
    terms = decode_base_terms(
        profile.decode,
        batch=batch,
        kv_len=kv_len,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_bytes=kv_bytes,
        sms=gpu.sms,
    )
    learnt = profile.decode_corrections
    terms = corrected(terms, learnt.time, learnt.energy, decode_features(batch, kv_len, q_heads, kv_heads))
    return terms if kv_bytes == 2 else replace(terms, extrapolated=True)  # rows of 16-bit caches alone


def attention_latent_terms(
    profile: Profile,
    gpu: GpuSpec,
    *,
    batch: int,
    kv_len: int,
    q_heads: int,
    cached_dim: int,
    v_dim: int,
    kv_bytes: int = 2,
) -> KernelTerms:
    """One query token a sequence over ``kv_len`` cached latents."""
    return latent_decode_base_terms(
        profile.decode,
        profile.prefill,
        batch=batch,
        kv_len=kv_len,
        q_heads=q_heads,
        cached_dim=cached_dim,
        v_dim=v_dim,
        element_bytes=kv_bytes,
        flops_per_cycle_per_sm=_rates(gpu)["bf16"] / (gpu.reference_clock_hz * gpu.sms),
        sms=gpu.sms,
    )


def elementwise_terms(
    profile: Profile, gpu: GpuSpec, *, op: str, rows: int, bytes_moved: float, launched_blocks: int
) -> KernelTerms:
    """A memory-bound kernel by the name that records use."""
    if op == "permute_copy":
        copy = elementwise_terms(
            profile, gpu, op="copy", rows=rows, bytes_moved=bytes_moved, launched_blocks=launched_blocks
        )
        plain = profile.elementwise["copy"]
        return permuting(copy, plain, bytes_moved=bytes_moved, max_clock_hz=gpu.max_clock_hz, sms=gpu.sms)
    name = op
    while name not in profile.elementwise and name in _LIKE:
        name = _LIKE[name]
    own = profile.elementwise[name]
    terms = elementwise_base_terms(
        own,
        rows=rows,
        bytes_moved=bytes_moved,
        launched_blocks=launched_blocks,
        l2_bytes=gpu.l2_bytes,
        max_clock_hz=gpu.max_clock_hz,
        sms=gpu.sms,
    )
    learnt = profile.elementwise_corrections[name]
    x = elementwise_features(name, bytes_moved, rows)
    course = elementwise_course(
        own,
        bytes_a_block=1.0 if own.blocks_per_s is None else bytes_moved / launched_blocks,
        l2_bytes=gpu.l2_bytes,
        max_clock_hz=gpu.max_clock_hz,
        sms=gpu.sms,
    )
    # Below the smallest buffer measured the floor alone is left: no extrapolation, and the correction stays.
    held = corrected(terms, learnt.time, learnt.energy, learnt.time.held(x), course)
    return replace(held, extrapolated=learnt.time.above(x))


def grouped_gemm_terms(
    profile: Profile,
    gpu: GpuSpec,
    *,
    experts: int,
    rows: int,
    distinct: int,
    tiles128: float,
    tiles256: float,
    rows_beyond128: float,
    n: int,
    k: int,
    dtype: str = "bf16",
    weight_bytes: float | None = None,
    row_bytes: float | None = None,
    turned: bool = False,
) -> KernelTerms:
    """One kernel over the experts that were hit, of 16-bit operands unless bytes are given: ``weight_bytes`` of the
    weights that are read, ``row_bytes`` of a row of activations; ``turned`` as in ``with_stored_weights``.
    """
    terms = grouped_base_terms(
        profile.grouped,
        experts=experts,
        rows=rows,
        distinct=distinct,
        tiles128=tiles128,
        tiles256=tiles256,
        rows_beyond128=rows_beyond128,
        n=n,
        k=k,
        element_bytes=2,
        l2_bytes=gpu.l2_bytes,
        sms=gpu.sms,
    )
    learnt = profile.grouped_corrections
    terms = corrected(terms, learnt.time, learnt.energy, grouped_features(rows, distinct, k))
    if weight_bytes is None and row_bytes is None:
        return terms
    dtype = _SAME_RATE.get(dtype, dtype)
    law = gemm_law(profile, dtype)
    if law is None or dtype not in _rates(gpu):
        raise HardwareError(f"dtype = '{dtype}': {gpu.id} has no GEMM figures for it, of experts too: use bf16")
    return grouped_with_operands(
        terms,
        experts=experts,
        rows=rows,
        distinct=distinct,
        n=n,
        k=k,
        weight_bytes=2.0 * distinct * n * k if weight_bytes is None else weight_bytes,
        row_bytes=2.0 * k if row_bytes is None else row_bytes,
        rate_ratio=_rates(gpu)[dtype] / _rates(gpu)["bf16"],
        flop_energy_ratio=profile.gemm[law].flop_energy_j / profile.gemm["bf16"].flop_energy_j,
        turned=turned,
        l2_bytes=gpu.l2_bytes,
        flops_per_cycle_per_sm=_rates(gpu)["bf16"] / (gpu.reference_clock_hz * gpu.sms),
    )


def collective_terms(
    profile: Profile,
    gpu: GpuSpec,
    *,
    op: str,
    world: int,
    buffer_bytes: int,
    ctas: int | None,
    in_graph: bool,
    algorithm: str = "library",
    span: Span | None = None,
    in_switch: bool = False,
) -> KernelTerms:
    """One collective over ``world`` ranks, in a step or as a bare loop; ``span`` None: within one node.

    ``in_switch``: the ranks hang on one switch that can add what they send.
    """
    share = IN_SWITCH_SHARE.get(gpu.architecture, 0.0) if in_switch and world >= IN_SWITCH_FROM else 0.0
    return collective_base_terms(
        profile.collective,
        profile.sharing,
        op=op,
        world=world,
        buffer_bytes=buffer_bytes,
        ctas=ctas,
        in_graph=in_graph,
        sms=gpu.sms,
        max_clock_hz=gpu.max_clock_hz,
        algorithm=algorithm,
        span=span,
        link_bytes_per_s=gpu.link_bytes_per_s or gpu.pcie_bytes_per_s,
        clusters=gpu.clusters,
        in_switch_bytes_per_s=share * gpu.link_bytes_per_s,
    )


def exchange_terms(profile: Profile, gpu: GpuSpec, *, op: str, one: Exchange, span: Span, max_sms: int) -> KernelTerms:
    """A dispatch or a combine of tokens to experts on the ranks of ``span`` (:mod:`hardware.laws.exchange`)."""
    c, blocks = profile.collective, min(CTAS[one.kernels], max_sms)
    link = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s
    inside, beyond = exchange_bytes(one, span)
    held = blocks * profile.sharing.sms_per_cta
    return KernelTerms(
        floor_s=exchange_s(op, one, span, link),
        blocks=blocks,
        cycles_per_block=0.0,
        quantised=False,
        sms_per_block=profile.sharing.sms_per_cta,
        link_bytes=inside,
        hbm_bytes=2.0 * one.tokens * one.top_k * one.message_bytes,  # what is sent is read, what comes is written
        link_energy_j=c.bus_byte_energy_j * (inside + beyond) + c.call_energy_j,
        sm_power_w=c.step_power_w * gpu.sms / held,
        waiting_power_w=c.waiting_power_w,
        hbm_weight_per_sm=profile.sharing.hbm_weight_per_sm,
        beside_slowdown=profile.sharing.beside_slowdown,
        extrapolated=True,
    )


def _element_bytes(dtype: str) -> float:
    return {"fp32": 4, "fp8_e4m3": 1, "int8": 1, "fp4_e2m1": 0.5}.get(dtype, 2)


def _rates(gpu: GpuSpec) -> dict[str, float]:
    """Tensor rates; a GPU without bf16 (V100) runs 16-bit work at its fp16 rate."""
    rates = dict(gpu.tensor_flops_per_s)
    rates.setdefault("bf16", rates.get("fp16", 0.0))
    return rates
