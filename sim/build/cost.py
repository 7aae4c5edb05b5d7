"""Where work meets hardware: a kernel's sizes become the terms of its time and power law."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from statistics import NormalDist
from typing import Any, assert_never

from hardware.cluster import Cluster
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.collective import even_buffer
from hardware.laws.exchange import Exchange
from hardware.laws.gemm import wave_part
from hardware.laws.gradient import attention_gradient
from hardware.laws.price import (
    attention_decode_terms,
    attention_latent_terms,
    attention_prefill_terms,
    collective_terms,
    elementwise_terms,
    exchange_terms,
    gemm_terms,
    grouped_gemm_terms,
    launched_gemm,
)
from hardware.laws.stored import prefill_with_cache, with_stored_weights
from hardware.laws.terms import KernelTerms, waves
from hardware.profile import Profile
from hardware.scheduling import scheduling
from sim.build.engine_cost import engine_terms, own_all_reduce, without_engine
from sim.engine.graph import KernelClass
from workloads.program import Kernel
from workloads.storage import Storage
from workloads.work import (
    AttentionWork,
    CollectiveWork,
    DType,
    ElementwiseWork,
    ExchangeSizes,
    GemmWork,
    GroupedGemmWork,
    RoutedGemmWork,
    Work,
)

# Where ranks differ in who wins, the collective holds its SMs on some and waits for the last round of the product on
# others (a product of 4 rounds then takes 6).
COLLECTIVE_WINS = scheduling().collective_wins


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricer:
    """Prices kernels on one GPU type. ``in_graph`` False prices collectives as bare back-to-back loops.

    ``eager``: the host launches each kernel.
    """

    profile: Profile
    gpu: GpuSpec
    gap_s: float
    in_graph: bool = True
    eager: bool = False
    world: int = 1
    cluster: Cluster | None = None

    def _part(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` of the part of the kernel that ``work`` is."""
        if not isinstance(work, GemmWork) or work.part is None:
            return terms
        index, parts = work.part
        return wave_part(terms, index=index, parts=parts, sms=min(terms.sms_cap, float(self.gpu.sms)))

    def price(self, kernel: Kernel) -> KernelClass:
        """The engine's class for a ``kernel`` that is :func:`drawn`: its terms, its gap and how it queues."""
        work = kernel.work
        side = isinstance(work, CollectiveWork) and kernel.priority != 0
        in_graph = self.in_graph and not self.eager
        goes_on = isinstance(work, GemmWork) and work.part is not None and work.part[0] > 0  # of the same launch
        terms = self._part(work, self._of_group(work, self.terms(work)))
        if kernel.pace != 1.0:
            terms = replace(terms, scale=terms.scale * kernel.pace, extrapolated=True)
        facts = self.profile.scheduling
        if side and in_graph:
            # What it starts later than its lead is part of its time, so that who asks for SMs first stays as seen.
            late_s = facts.side_start_s - facts.collective_lead_graph_s
            terms = replace(terms, floor_s=terms.floor_s + late_s)
        beside = self._launched(work, terms)
        fetches = isinstance(work, GemmWork) and not goes_on and beside.blocks > facts.own_tiles * self.gpu.sms
        flops = kernel.flops * (work.visible_share if isinstance(work, AttentionWork) else 1.0)
        return KernelClass(
            name=kernel.name,
            family=family(work),
            terms=self._contested(work, terms),
            gap_s=0.0 if side or goes_on else self.gap_s,
            joining_gap_s=facts.joining_gap_s if in_graph and not side and not goes_on else 0.0,
            lead_s=facts.collective_lead_graph_s if side else 0.0,
            clearing_s=min(facts.clearing_s, terms.scale * terms.floor_s) if fetches else 0.0,
            beside=None if beside is terms else beside,
            priority=kernel.priority,
            collective=isinstance(work, CollectiveWork),
            describe={"flops": flops} | sizes(work),
        )

    def _contested(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` of a collective that waits for its rival's last round on some rank."""
        if not isinstance(work, CollectiveWork) or work.rival is None:
            return terms
        rival = self._launched(work.rival, self.terms(work.rival))
        if rival.blocks <= self.profile.scheduling.own_tiles * self.gpu.sms:
            return terms  # no counter to clear: it wins on every rank
        waited = (waves(rival, float(self.gpu.sms)) - 1.0) * rival.cycles_per_block
        return replace(terms, tail_cycles=waited, moving_cycles=terms.moving_cycles and terms.moving_cycles + waited)

    def _launched(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` of a product in the tiles that its library launches; others, and parts of products, as they are."""
        match work:
            case GemmWork(dtype=DType.BF16 | DType.FP16, count=1, part=None, beside_ctas=None, weights=None):
                return launched_gemm(self.profile, self.gpu, terms, m=work.m, n=work.n, k=work.k)
        return terms

    def _of_group(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` on any chips: the mean chip's power, and on several of them tensor time of the slowest one.

        Chips differ; ranks that meet in collectives go at the pace of the slowest, whose expected lag is its
        normal order statistic times the spread. Every rank gets that pace, so that ranks stay equal.
        """
        if isinstance(work, CollectiveWork) and self.cluster is not None and self.cluster.same_node(work.ranks):
            # Tables were measured on the GPU's own switched links: cards on a mesh or on PCIe move bytes slower.
            terms = replace(
                terms, floor_s=max(terms.floor_s, terms.link_bytes / self.cluster.bottleneck_bytes_per_s(work.ranks))
            )
        spread = self.profile.spread
        lag = 1.0
        if isinstance(work, GemmWork | GroupedGemmWork | RoutedGemmWork | AttentionWork):
            lag += expected_maximum(self.world) * spread.throttled_time
        power = 1.0 if isinstance(work, CollectiveWork) else self._mean_power(work)
        return replace(
            terms,
            cycles_per_block=terms.cycles_per_block * lag,
            tail_cycles=terms.tail_cycles * lag,
            core_energy_j=terms.core_energy_j * power,
            hbm_energy_j=terms.hbm_energy_j * power,
            sm_power_w=terms.sm_power_w * power,
        )

    def _mean_power(self, work: Work) -> float:
        """Watts above idle of the mean card over those of the one that the law of ``work`` was fitted on."""
        engine = getattr(work, "engine", None)
        laws = None if engine is None else self.profile.engines.get(engine)
        return self.profile.spread.mean_power_factor if laws is None else laws.mean_power_factor

    def terms(self, work: Work) -> KernelTerms:
        """Time and energy terms of ``work`` on this GPU."""
        profile, gpu = self.profile, self.gpu
        engine = getattr(work, "engine", None)
        if engine is not None:
            own = engine_terms(work, profile, gpu)
            if own is not None:
                return own
            work = without_engine(work)
        match work:
            case GemmWork() | GroupedGemmWork() if work.beside_ctas:
                left = gpu.sms - work.beside_ctas * profile.sharing.sms_per_cta
                if left < 1:
                    raise HardwareError(
                        f"comm_ctas = {work.beside_ctas}: leaves none of {gpu.sms} SMs to products: use fewer"
                    )
                return replace(self.terms(replace(work, beside_ctas=None)), sms_cap=left)
            case GemmWork() if work.weights is not None:
                return with_stored_weights(
                    self.terms(replace(work, weights=None)),
                    m=work.m,
                    n=work.n,
                    k=work.k,
                    element_bytes=work.dtype.bits / 8,
                    weight_bytes=work.weights.bytes_of(work.n, work.k),
                    turned=turned(work.weights, work.dtype),
                )
            case GemmWork():
                return gemm_terms(
                    profile,
                    gpu,
                    m=work.m,
                    n=work.n,
                    k=work.k,
                    dtype=work.dtype.value,
                    out_bytes=work.out_dtype.bytes,
                    count=work.count,
                )
            case AttentionWork() if work.backward:
                return attention_gradient(self.terms(replace(work, backward=False)))
            case AttentionWork() if work.latent:
                assert work.v_head_dim is not None
                return attention_latent_terms(
                    profile,
                    gpu,
                    batch=work.batch,
                    kv_len=work.kv_len,
                    q_heads=work.q_heads,
                    cached_dim=work.head_dim,
                    v_dim=work.v_head_dim,
                    kv_bytes=work.kv_dtype.bytes,
                )
            case AttentionWork() if work.decode:
                return attention_decode_terms(
                    profile,
                    gpu,
                    batch=work.batch,
                    kv_len=work.kv_len,
                    q_heads=work.q_heads,
                    kv_heads=work.kv_heads,
                    head_dim=work.head_dim,
                    kv_bytes=work.kv_dtype.bytes,
                )
            case AttentionWork() if work.kv_dtype.bytes != 2:
                cached = 2.0 * work.batch * work.kv_len * work.kv_heads * work.mean_head_dim
                wide = self.terms(replace(work, kv_dtype=DType.BF16))
                return prefill_with_cache(wide, elements=cached, element_bytes=work.kv_dtype.bytes)
            case AttentionWork():
                return attention_prefill_terms(
                    profile,
                    gpu,
                    batch=work.batch,
                    q_len=work.q_len,
                    kv_len=work.kv_len,
                    q_heads=work.q_heads,
                    kv_heads=work.kv_heads,
                    head_dim=work.mean_head_dim,
                    causal=work.causal,
                )
            case ElementwiseWork():
                return elementwise_terms(
                    profile,
                    gpu,
                    op=work.op.value,
                    rows=work.rows,
                    bytes_moved=work.bytes_moved,
                    launched_blocks=work.blocks or max(1, work.bytes_moved // 8192),
                )
            case GroupedGemmWork():
                return grouped_gemm_terms(
                    profile,
                    gpu,
                    experts=work.experts,
                    rows=work.rows,
                    distinct=work.distinct,
                    tiles128=work.tiles128,
                    tiles256=work.tiles256,
                    rows_beyond128=work.rows_beyond128,
                    n=work.n,
                    k=work.k,
                    dtype=work.dtype.value,
                    **_stored_experts(work),
                )
            case RoutedGemmWork():
                raise AssertionError("a routed product has its engine's law or becomes a grouped one")
            case CollectiveWork(exchange=ExchangeSizes() as sizes_of):
                one = Exchange(
                    tokens=sizes_of.tokens,
                    top_k=sizes_of.top_k,
                    hidden=sizes_of.hidden,
                    element_bytes=int(sizes_of.dtype.bytes),
                    kernels=sizes_of.kernels.value,
                )
                assert self.cluster is not None, "an exchange lies on nodes"
                span = self.cluster.span(work.ranks)
                return exchange_terms(profile, gpu, op=work.op.value, one=one, span=span, max_sms=gpu.sms)
            case CollectiveWork():
                buffer_bytes = work.buffer_bytes
                if work.sent_bytes is not None and work.received_bytes is not None:
                    buffer_bytes = max(1, even_buffer(len(work.ranks), work.sent_bytes, work.received_bytes))
                terms = collective_terms(
                    profile,
                    gpu,
                    op=work.op.value,
                    world=len(work.ranks),
                    buffer_bytes=buffer_bytes,
                    ctas=work.ctas,
                    in_graph=self.in_graph,
                    algorithm=work.algorithm.value,
                    span=self.cluster.span(work.ranks) if self.cluster is not None else None,
                    in_switch=self.cluster is not None and self.cluster.on_one_switch(work.ranks),
                )
                return own_all_reduce(work, profile, terms) or terms if engine is not None else terms
        assert_never(work)


def turned(weights: Storage, dtype: DType) -> bool:
    """Whether weights must become elements of another type before tensor cores multiply them (not only be scaled)."""
    return weights.element != dtype.value and not weights.plain


def _stored_experts(work: GroupedGemmWork) -> dict[str, Any]:
    """Bytes of experts' operands where they are not the 16-bit ones that were measured."""
    if work.weights is None and work.dtype.bits == 16:
        return {}
    element = Storage(element=work.dtype.value)
    weights = work.weights or element
    return {
        "weight_bytes": float(work.distinct * weights.bytes_of(work.n, work.k)),
        "row_bytes": element.bytes_of(1, work.k),
        "turned": turned(weights, work.dtype),
    }


def drawn(kernel: Kernel) -> Kernel:
    """``kernel`` with a rival only where it is its turn to lose to it on some rank: others are priced as one."""
    work = kernel.work
    if not isinstance(work, CollectiveWork) or work.rival is None:
        return kernel
    share = 1.0 - COLLECTIVE_WINS ** len(work.ranks)
    loses = math.floor((work.turn + 1) * share + 0.5) > math.floor(work.turn * share + 0.5)
    return replace(kernel, work=replace(work, rival=work.rival if loses else None, turn=0))


def expected_maximum(count: int) -> float:
    """Expected largest of ``count`` standard normals (Blom's approximation; 0.56 of two, 1.03 of four).

    >>> round(expected_maximum(4), 1)
    1.0
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def sizes(work: Work) -> dict[str, object]:
    """A work's sizes by name, for traces."""
    return {
        field.name: _shown(value)
        for field in fields(work)
        if (value := getattr(work, field.name)) is not None
        and not (value is False and field.default is False)
        and field.name not in ("rival", "turn")
    }


def _shown(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case tuple():
            return list(value)
        case Storage():
            return str(value)
    return value


def family(work: Work) -> str:
    """The kernel class under which reports add up ``work``."""
    match work:
        case GemmWork() | GroupedGemmWork() | RoutedGemmWork():
            return "gemm"
        case AttentionWork():
            return "attention"
        case ElementwiseWork():
            return "elementwise"
        case CollectiveWork():
            return "communication"
    assert_never(work)
