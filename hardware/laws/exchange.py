"""Dispatch of tokens to experts on other GPUs, and combine: as in DeepEP's kernels.

``low_latency`` kernels send each token to each of its experts' ranks at once, over NVLink within a node and by RDMA
beyond; ``normal`` ones send a token once to each node that holds one of its experts, and on from there over NVLink,
once to each such rank.
Nothing here was measured by us: the laws rest on the figures that DeepEP publishes for H800s with 400 Gbit/s NICs
(128 tokens a rank, hidden 7,168, top 8, FP8 dispatch, bf16 combine), and are marked extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hardware.errors import HardwareError
from hardware.laws.collective import LEAST_SMS
from hardware.laws.routes import Span
from hardware.laws.terms import KernelTerms

Kernels = Literal["low_latency", "normal"]
# Low latency: fixed seconds, and the share of NVLink's rate; NICs reach their own. Two constants an operation against
# published us at EP 8, 16, 32, 64, 128, 256: dispatch 77, 118, 155, 173, 192, 194 within 5 %; combine 114, 195, 273,
# 314, 369, 360 within 13 %.
FIXED_S = {"dispatch": 41e-6, "combine": 48e-6}
NVLINK_SHARE = 0.92
# Normal: shares of both rates (published for 4,096 tokens a rank: 153 and 158 of 200 GB/s on NVLink at EP 8, 43 to 58
# of 50 GB/s by RDMA at EP 16 to 64), and the blocks that move them.
NORMAL_NVLINK_SHARE, NORMAL_NIC_SHARE = 0.78, 0.95
NORMAL_FIXED_S = 30e-6
# DeepEP's layout call before a normal dispatch (issue 261 of deepseek-ai/DeepEP; docs/laws.md, "Normal dispatch").
LAYOUT_S = 54e-6
CTAS = {"low_latency": 24, "normal": 20}
# A row of FP8 carries a 4-byte scale for each 128 elements; a message of low-latency kernels a header.
SCALE_EVERY, SCALE_BYTES, HEADER_BYTES = 128, 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExchange:
    """Sizes of one exchange: ``tokens`` of a rank, ``top_k`` experts each, ``hidden`` wide."""

    tokens: int
    top_k: int
    hidden: int
    element_bytes: int
    kernels: Kernels

    @property
    def message_bytes(self) -> float:
        """Bytes of a token's message.

        >>> RoutedExchange(tokens=1, top_k=8, hidden=7168, element_bytes=1, kernels="low_latency").message_bytes
        7408.0
        """
        scales = self.hidden / SCALE_EVERY * SCALE_BYTES if self.element_bytes == 1 else 0.0
        header = HEADER_BYTES if self.kernels == "low_latency" else 0
        return self.hidden * self.element_bytes + scales + header


def in_background(terms: KernelTerms, kernels: str) -> KernelTerms:
    """``terms`` of an exchange beside compute: low-latency kernels leave the bytes to NICs, and SMs to others.

    Their receiving half returns a hook that waits for the data (DeepEP's README: no SM is occupied meanwhile).
    """
    if kernels != "low_latency":
        return terms
    held = terms.blocks * terms.sms_per_block  # as many memory requests in flight as of its blocks
    return replace(
        terms,
        blocks=1,
        sms_per_block=0.0,
        sm_power_w=0.0,
        waiting_power_w=0.0,
        beside_slowdown=1.0,
        hbm_weight_per_sm=terms.hbm_weight_per_sm * held / LEAST_SMS,
    )


def exchange_bytes(sizes: RoutedExchange, span: Span) -> tuple[float, float]:
    """Bytes that a rank sends within its node and beyond it, experts being drawn evenly over the ranks.

    >>> ep16 = Span(nodes=2, per_node=8, nic_bytes_per_s=50e9, nic_latency_s=3e-6)
    >>> direct = RoutedExchange(tokens=1, top_k=8, hidden=7168, element_bytes=2, kernels="low_latency")
    >>> [round(count / direct.message_bytes, 3) for count in exchange_bytes(direct, ep16)]
    [3.5, 4.0]
    """
    each = sizes.tokens * sizes.message_bytes
    inside = sizes.top_k * (span.per_node - 1) / span.world
    if sizes.kernels == "low_latency":
        return each * inside, each * sizes.top_k * (span.world - span.per_node) / span.world
    reached = 1.0 - (1.0 - 1.0 / span.nodes) ** sizes.top_k  # share of the nodes that hold an expert of a token
    # Ranks that hold an expert of a token: it is sent once to each.
    ranks = span.world * (1.0 - (1.0 - 1.0 / span.world) ** sizes.top_k)
    forwarded = ranks * (span.per_node - 1) / span.per_node  # from where a token arrives in its node
    return each * forwarded, each * reached * (span.nodes - 1)


def exchange_s(op: str, sizes: RoutedExchange, span: Span, link_bytes_per_s: float) -> float:
    """Seconds of a dispatch or a combine: the slower of NVLink and NICs, plus a fixed time."""
    if op not in FIXED_S:
        raise HardwareError(f"'{op}' is no exchange of experts: dispatch or combine")
    inside, beyond = exchange_bytes(sizes, span)
    low = sizes.kernels == "low_latency"
    on_links_s = inside / ((NVLINK_SHARE if low else NORMAL_NVLINK_SHARE) * link_bytes_per_s)
    on_nics_s = beyond / ((1.0 if low else NORMAL_NIC_SHARE) * span.nic_bytes_per_s)
    fixed_s = FIXED_S[op] if low else NORMAL_FIXED_S + (op == "dispatch") * LAYOUT_S
    return fixed_s + max(on_links_s, on_nics_s) + (span.nodes > 1) * span.nic_latency_s
