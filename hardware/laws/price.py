"""Sizes to terms on one GPU under one profile: the laws with their coefficients and corrections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import decode_base_terms, decode_features, prefill_base_terms, prefill_features
from hardware.laws.collective import collective_base_terms
from hardware.laws.correction import corrected
from hardware.laws.elementwise import elementwise_base_terms, elementwise_course, elementwise_features, permuting
from hardware.laws.exchange import CTAS, RoutedExchange, exchange_bytes, exchange_s
from hardware.laws.gemm import gemm_base_terms, gemm_features
from hardware.laws.gemm_grid import LEAST_ROWS, launched_tiles, relaunched, thin_tiles
from hardware.laws.grouped import grouped_base_terms, grouped_features
from hardware.laws.in_switch import IN_SWITCH_FROM, in_switch_of
from hardware.laws.narrow_cache import with_narrow_cache
from hardware.laws.routes import Span
from hardware.laws.sizes import (
    CollectiveSizes,
    DecodeSizes,
    ExpertOperands,
    GemmSizes,
    GroupedSizes,
    PrefillSizes,
    element_bytes,
)
from hardware.laws.stored import grouped_with_operands
from hardware.laws.streaming import few_sms, own_streams
from hardware.laws.terms import KernelTerms
from inputs.changed import changed

if TYPE_CHECKING:
    from hardware.profile import Profile

# fp16 runs on the same tensor cores at the same rate as bf16 on every GPU in the catalog.
_SAME_RATE = {"fp16": "bf16"}
# Types without rows of their own: kernels of another type at their own rate and bytes, marked extrapolated.
_NEAREST = {"int8": ("fp8_e4m3", "bf16"), "fp4_e2m1": ("fp8_e4m3",)}
# Kernels without rows of their own use the coefficients of the nearest measured one: one read, one write.
_LIKE = {
    "gelu": "silu_mul", "gelu_tanh": "gelu", "relu": "gelu", "rmsnorm": "add_rmsnorm", "layernorm": "add_rmsnorm",
    "softmax": "add_rmsnorm", "add": "silu_mul", "scale": "copy",
}  # fmt: skip


def gemm_terms(profile: Profile, gpu: GpuSpec, sizes: GemmSizes) -> KernelTerms:
    """Products of one kernel."""
    dtype = _SAME_RATE.get(sizes.dtype, sizes.dtype)
    law = gemm_law(profile, dtype)
    if law is None or not gpu.multiplies(dtype):
        rated = {*gpu.tensor_flops_per_s, "bf16"}
        known = sorted(name for name in rated if gpu.multiplies(name) and gemm_law(profile, name))
        known = [name for name in known if name not in _SAME_RATE]
        raise HardwareError(f"dtype = '{dtype}': {gpu.id} has no GEMM figures for it; known: {', '.join(known)}")
    sizes = changed(sizes, dtype=dtype)
    terms = gemm_base_terms(profile.gemm[law], sizes.wide, gpu)
    if sizes.count > 1:  # each product reads an input of its own
        inputs = (sizes.count - 1) * sizes.m * sizes.k * element_bytes(dtype)
        terms = changed(
            terms,
            hbm_bytes=terms.hbm_bytes + inputs,
            hbm_energy_j=terms.hbm_energy_j + inputs * profile.gemm[law].hbm_byte_energy_j,
        )
    more: dict[str, Any] = {}
    if gpu.clusters:
        more["cluster"] = profile.scheduling.gemm_cluster
    if sizes.m < LEAST_ROWS:  # its loads are its pace, whichever SMs it has
        more["few_sms_sharpness"] = few_sms().sharpness
    if law != dtype:  # what was learnt belongs to the kernels of the law's own type
        return changed(terms, extrapolated=True, **more)
    learnt = profile.gemm_corrections[dtype]
    return corrected(terms, learnt.time, learnt.energy, gemm_features(sizes.wide), **more)


def gemm_law(profile: Profile, dtype: str) -> str | None:
    """The type whose coefficients price products in ``dtype``: its own, or the nearest one's that was measured."""
    return next((name for name in (dtype, *_NEAREST.get(dtype, ())) if name in profile.gemm), None)


def launched_gemm(profile: Profile, gpu: GpuSpec, terms: KernelTerms, sizes: GemmSizes) -> KernelTerms:
    """``terms`` of a 16-bit product in the tiles that its library launches, which decide what runs beside it."""
    if not gpu.clusters:
        return terms
    law = profile.gemm["bf16"]
    tiles = thin_tiles(sizes.n, gpu.sms) if sizes.m < LEAST_ROWS else launched_tiles(law, sizes, gpu)
    return terms if tiles is None else relaunched(terms, tiles, gpu.sms)


def prefill_terms(profile: Profile, gpu: GpuSpec, sizes: PrefillSizes) -> KernelTerms:
    """Flash attention of a prompt."""
    products, learnt = profile.gemm["bf16"], profile.prefill_corrections
    terms = prefill_base_terms(
        profile.prefill,
        sizes,
        gpu,
        hbm_bytes_per_s=products.hbm_bytes_per_s,
        hbm_byte_energy_j=products.hbm_byte_energy_j,
    )
    return corrected(terms, learnt.time, learnt.energy, prefill_features(sizes))


def decode_terms(profile: Profile, gpu: GpuSpec, sizes: DecodeSizes) -> KernelTerms:
    """Flash attention of one query token a sequence."""
    terms, learnt = decode_base_terms(profile.decode, sizes, gpu.sms), profile.decode_corrections
    # Keys and values pass through L2, which follows the SM clock: at a few hundred MHz it is slower than HBM.
    through_l2 = profile.gemm["bf16"].l2_bytes_per_s / gpu.max_clock_hz
    terms = corrected(
        terms,
        learnt.time,
        learnt.energy,
        decode_features(sizes),
        l2_bytes=terms.hbm_bytes,
        l2_bytes_per_cycle=through_l2,
    )
    if sizes.kv_bytes < 2:
        return with_narrow_cache(terms, sizes, gpu.sms)
    return terms if sizes.kv_bytes == 2 else changed(terms, extrapolated=True)  # rows of 16-bit caches alone


def elementwise_terms(
    profile: Profile, gpu: GpuSpec, *, op: str, rows: int, bytes_moved: float, launched_blocks: int
) -> KernelTerms:
    """A memory-bound kernel by the name that records use."""
    if op == "permute_copy":
        copy = elementwise_terms(
            profile, gpu, op="copy", rows=rows, bytes_moved=bytes_moved, launched_blocks=launched_blocks
        )
        plain = profile.elementwise["copy"]
        return permuting(copy, plain, gpu, bytes_moved=bytes_moved)
    name = elementwise_law(profile, op)
    own = profile.elementwise[name]
    terms = elementwise_base_terms(own, gpu, rows=rows, bytes_moved=bytes_moved, launched_blocks=launched_blocks)
    learnt = profile.elementwise_corrections[name]
    x = elementwise_features(name, bytes_moved, rows)
    bytes_a_block = 1.0 if own.blocks_per_s is None else bytes_moved / launched_blocks
    course = elementwise_course(own, gpu, bytes_a_block=bytes_a_block)
    # Below the smallest measured buffer only the floor counts: no extrapolation, and the correction stays.
    streams = own_streams(name)
    return corrected(
        terms,
        learnt.time,
        learnt.energy,
        learnt.time.held(x),
        course,
        extrapolated=learnt.time.above(x),
        sm_bytes_per_s=streams,
        few_sms_sharpness=few_sms().own_sharpness if streams else 0.0,
    )


def elementwise_law(profile: Profile, op: str) -> str:
    """The kernel whose coefficients price ``op``: itself, or the nearest one that was measured."""
    while op not in profile.elementwise and op in _LIKE:
        op = _LIKE[op]
    return op


def grouped_gemm_terms(
    profile: Profile, gpu: GpuSpec, sizes: GroupedSizes, operands: ExpertOperands | None = None
) -> KernelTerms:
    """One kernel over the experts that were hit; ``operands`` None: of 16 bits."""
    learnt = profile.grouped_corrections
    terms = grouped_base_terms(profile.grouped, sizes, gpu)
    terms = corrected(terms, learnt.time, learnt.energy, grouped_features(sizes))
    if operands is None:
        return terms
    operands = changed(operands, dtype=_SAME_RATE.get(operands.dtype, operands.dtype))
    law = gemm_law(profile, operands.dtype)
    if law is None or not gpu.multiplies(operands.dtype):
        raise HardwareError(
            f"dtype = '{operands.dtype}': {gpu.id} has no GEMM figures for it, of experts too: use bf16"
        )
    ratio = profile.gemm[law].flop_energy_j / profile.gemm["bf16"].flop_energy_j
    return grouped_with_operands(terms, sizes, operands, gpu, flop_energy_ratio=ratio)


def collective_terms(profile: Profile, gpu: GpuSpec, sizes: CollectiveSizes, *, in_switch: bool = False) -> KernelTerms:
    """One collective; ``in_switch``: the ranks of a node share a switch that can add what they send."""
    together = sizes.world if sizes.span is None else sizes.span.per_node
    adds = in_switch and together >= IN_SWITCH_FROM
    adder = in_switch_of(gpu.architecture, gpu.link_bytes_per_s) if adds else None
    return collective_base_terms(profile.collective, profile.sharing, sizes, gpu, adder=adder)


def exchange_terms(
    profile: Profile, gpu: GpuSpec, *, op: str, exchange: RoutedExchange, span: Span, max_sms: int
) -> KernelTerms:
    """A dispatch or a combine of tokens to experts on the ranks of ``span`` (:mod:`hardware.laws.exchange`)."""
    c, blocks = profile.collective, min(CTAS[exchange.kernels], max_sms)
    link = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s
    inside, beyond = exchange_bytes(exchange, span)
    held = blocks * profile.sharing.sms_per_cta
    return KernelTerms(
        floor_s=exchange_s(op, exchange, span, link),
        blocks=blocks,
        cycles_per_block=0.0,
        quantised=False,
        sms_per_block=profile.sharing.sms_per_cta,
        link_bytes=inside,
        beyond_bytes=beyond,
        # Sent bytes are read, received ones written.
        hbm_bytes=2.0 * exchange.tokens * exchange.top_k * exchange.message_bytes,
        link_energy_j=c.bus_byte_energy_j * (inside + beyond) + c.call_energy_j,
        sm_power_w=c.step_power_w * gpu.sms / held,
        waiting_power_w=c.waiting_power_w,
        hbm_weight_per_sm=profile.sharing.hbm_weight_per_sm,
        beside_slowdown=profile.sharing.beside_slowdown,
        extrapolated=True,
        way=exchange.kernels,
    )
