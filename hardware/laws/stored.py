"""Products whose operands are stored in fewer bits than a law was fitted with: their bytes, cycles and joules.

Such kernels were not measured by us: their bytes are exact, the rest is derived as described below, and every kernel
priced here counts as extrapolated.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hardware.gpu import GpuSpec
from hardware.laws.grouped import TENSOR_SHARE, large_share
from hardware.laws.residency import hbm_share
from hardware.laws.sizes import ExpertOperands, GemmSizes, GroupedSizes, element_bytes
from hardware.laws.terms import KernelTerms, waves

# Conversion of weights to 16 bit on the SMs' integer and 16-bit units, in Marlin's published kernel (arXiv 2408.11743;
# docs/laws.md): instructions a value, lanes that an SM issues a cycle, rows of activations of a block, beyond which
# every weight is converted again. Its stripes give every SM an equal share of the weights, however few tiles there are.
INSTRUCTIONS_PER_WEIGHT = 1.5
LANES_PER_SM = 128
ROWS_PER_BLOCK = 64


def with_stored_weights(
    terms: KernelTerms, sizes: GemmSizes, *, weight_bytes: float, turned: bool, sms: int
) -> KernelTerms:
    """``terms`` of one product on ``sms`` SMs whose weights are ``weight_bytes`` in all, scales included.

    ``terms`` are those of weights of the type that is multiplied. ``turned``: the stored ones are converted to it, in
    cycles of the SMs for which tensor cores wait.
    """
    weights = sizes.n * sizes.k
    moved = max(terms.hbm_bytes - element_bytes(sizes.dtype) * weights + weight_bytes, weight_bytes)
    cycles = _spread(turning_cycles(m=sizes.m, weights=weights), terms, sms) if turned else 0.0
    return replace(
        terms,
        hbm_bytes=moved,
        hbm_energy_j=terms.hbm_energy_j * moved / terms.hbm_bytes,
        cycles_per_block=terms.cycles_per_block + cycles,
        extrapolated=True,
    )


def turning_cycles(*, m: float, weights: float) -> float:
    """Cycles of one SM that convert ``weights`` to the multiplied type, once for every block of rows.

    >>> turning_cycles(m=1, weights=1280)
    15.0
    """
    return math.ceil(m / ROWS_PER_BLOCK) * weights * INSTRUCTIONS_PER_WEIGHT / LANES_PER_SM


def _spread(cycles: float, terms: KernelTerms, sms: int) -> float:
    """What ``cycles`` of one SM, shared by all ``sms``, add to each round of the blocks."""
    return cycles / (sms * waves(terms, sms))


def grouped_with_operands(
    terms: KernelTerms, sizes: GroupedSizes, operands: ExpertOperands, gpu: GpuSpec, *, flop_energy_ratio: float
) -> KernelTerms:
    """``terms`` of a grouped product of 16-bit operands with others.

    A tile of many rows is bound by tensor cores. One of few rows is bound by its operands: its time is that of its
    weights' bytes, and at least that of tensor cores for its 64 x 128 results. Without rows nothing is read.
    """
    rows, n, k, weight_bytes = sizes.rows, sizes.n, sizes.k, operands.weight_bytes
    rate_ratio = gpu.product_flops_per_s(operands.dtype) / gpu.product_flops_per_s("bf16")
    if large_share(sizes) >= 0.5:
        share = 1.0 / rate_ratio
    else:
        least = 2.0 * 64 * 128 * k / (rate_ratio * TENSOR_SHARE * gpu.tensor_flops_per_cycle_per_sm("bf16"))
        read = weight_bytes / (2.0 * sizes.weights) if sizes.weights else 0.0
        share = min(1.0, max(read, least / terms.cycles_per_block))
    cycles = terms.cycles_per_block * share
    if operands.turned:
        cycles += _spread(turning_cycles(m=rows / max(sizes.distinct, 1), weights=sizes.weights), terms, gpu.sms)
    activations, activations_wide = operands.row_bytes * rows + 2.0 * rows * n, 2.0 * rows * (n + k)
    wide = 2.0 * sizes.weights + hbm_share(activations_wide, gpu.l2_bytes) * activations_wide
    moved = weight_bytes + hbm_share(activations, gpu.l2_bytes) * activations
    return replace(
        terms,
        cycles_per_block=cycles,
        hbm_bytes=moved,
        hbm_energy_j=terms.hbm_energy_j * moved / wide if wide else 0.0,
        core_energy_j=terms.core_energy_j * flop_energy_ratio,
        extrapolated=True,
    )


def prefill_with_cache(terms: KernelTerms, *, elements: float, element_bytes: float) -> KernelTerms:
    """``terms`` of a prefill's attention whose ``elements`` of keys and values take ``element_bytes`` each, not two."""
    moved = terms.hbm_bytes - (2.0 - element_bytes) * elements
    return replace(terms, hbm_bytes=moved, hbm_energy_j=terms.hbm_energy_j * moved / terms.hbm_bytes, extrapolated=True)
