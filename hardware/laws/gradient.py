"""The backward pass of attention, from the terms of the forward kernel; not measured by us."""

from __future__ import annotations

from dataclasses import replace

from hardware.laws.terms import KernelTerms

# Five products of each block (scores again, gradients of values, of the softmax, of queries, of keys) for the forward
# pass's two (FlashAttention-2, arXiv 2307.08691, section 3.1).
FLOPS = 2.5
# Public ring-attention tables: backward over forward at equal sizes, 2.8 to 2.9.
TIME = 2.85
# Reads Q, K, V, the output and its gradient, writes three gradients, Q's added up in 32 bit: the forward moves four.
BYTES = 2.5


def attention_gradient(terms: KernelTerms) -> KernelTerms:
    """Terms of the kernel that computes the gradients of queries, keys and values."""
    return replace(
        terms,
        cycles_per_block=terms.cycles_per_block * TIME,
        tail_cycles=terms.tail_cycles * TIME,
        core_energy_j=terms.core_energy_j * FLOPS,
        hbm_bytes=terms.hbm_bytes * BYTES,
        hbm_energy_j=terms.hbm_energy_j * BYTES,
        l2_bytes=terms.l2_bytes * BYTES,
        extrapolated=True,
    )
