"""Kernels of a program to kernel classes of the engine: sizes become the terms of time and power laws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import assert_never

from hardware.cluster import Cluster
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.elementwise import blocks_for
from hardware.laws.engine_price import adapter_terms
from hardware.laws.exchange import RoutedExchange, in_background
from hardware.laws.gemm import wave_part
from hardware.laws.gemm_grid import LEAST_ROWS
from hardware.laws.gradient import attention_gradient
from hardware.laws.latent import latent_base_terms
from hardware.laws.price import (
    collective_terms,
    decode_terms,
    elementwise_terms,
    exchange_terms,
    gemm_terms,
    grouped_gemm_terms,
    launched_gemm,
    prefill_terms,
)
from hardware.laws.routes import pattern_of
from hardware.laws.sizes import ExpertOperands
from hardware.laws.stored import prefill_with_cache, with_stored_weights
from hardware.laws.terms import KernelTerms, waves
from hardware.profile import Profile
from hardware.scheduling import scheduling
from inputs.changed import changed
from sim.build.engine_cost import engine_terms, own_all_reduce, without_engine
from sim.build.kernel_sizes import (
    adapter_sizes,
    collective_sizes,
    decode_sizes,
    gemm_sizes,
    grouped_sizes,
    latent_sizes,
    prefill_sizes,
)
from sim.build.shown_sizes import shown_sizes
from sim.engine.graph import KernelClass, Transit
from sim.scenario.machine import Machine
from workloads.program import Kernel
from workloads.storage import Storage
from workloads.work import (
    AdapterGemmWork,
    AttentionWork,
    CollectiveWork,
    ConvolutionWork,
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
# The engine whose kernels run adapters, whatever the stack.
ADAPTERS = "vllm"


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
    chips: int = 1  # that meet in collectives
    cluster: Cluster | None = None

    @classmethod
    def of_loops(cls, target: Machine) -> Pricer:
        """Prices of kernels that are repeated back to back without pauses, as microbenchmarks do."""
        return cls(
            profile=target.profile,
            gpu=target.gpu,
            gap_s=0.0,
            in_graph=False,
            chips=target.chips,
            cluster=target.cluster,
        )

    def _part(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` of the part of a kernel that ``work`` stands for."""
        if not isinstance(work, GemmWork) or work.part is None:
            return terms
        index, parts = work.part
        return wave_part(terms, index=index, parts=parts, sms=min(terms.sms_cap, float(self.gpu.sms)))

    def price(self, kernel: Kernel) -> KernelClass:
        """The engine's class for a ``kernel`` whose work is :func:`drawn`: its terms, its gap and how it queues."""
        work = kernel.work
        side = isinstance(work, CollectiveWork) and kernel.priority != 0
        in_graph = self.in_graph and not self.eager
        goes_on = isinstance(work, GemmWork) and work.part is not None and work.part[0] > 0  # of the same launch
        terms = self._part(work, self._of_group(work, self.terms(work)))
        facts = self.profile.scheduling
        gap_s = max(0.0, self.gap_s - self.profile.launch.graph_gap_s) if kernel.chained else self.gap_s
        if side and isinstance(work, CollectiveWork) and work.exchange is not None:
            terms = in_background(terms, work.exchange.kernels.value)
        if side and in_graph:
            # A start later than its lead is part of its time, so that the order of requests for SMs stays as measured.
            late_s = facts.side_start_s - facts.collective_lead_graph_s
            terms = changed(terms, floor_s=terms.floor_s + late_s)
        beside = self.launched(work, terms)
        fetches = isinstance(work, GemmWork) and not goes_on and beside.blocks > facts.own_tiles * self.gpu.sms
        return KernelClass(
            name=kernel.name,
            family=family(work),
            terms=self._contested(work, terms),
            gap_s=0.0 if side or goes_on else gap_s,
            joining_gap_s=facts.joining_gap_s if in_graph and not side and not goes_on else 0.0,
            lead_s=facts.collective_lead_graph_s if side else 0.0,
            clearing_s=min(facts.clearing_s, terms.scale * terms.floor_s) if fetches else 0.0,
            beside=None if beside is terms else beside,
            priority=kernel.priority,
            collective=isinstance(work, CollectiveWork),
            describe={"flops": kernel.flops} | shown_sizes(work),
            transit=self._transit(work, terms),
        )

    def _transit(self, work: Work, terms: KernelTerms) -> Transit | None:
        """What ``work`` sends between nodes."""
        if not isinstance(work, CollectiveWork) or not terms.beyond_bytes or self.cluster is None:
            return None
        streams = self.cluster.streams(work.ranks, pattern_of(work.op.value))
        return Transit(ranks=work.ranks, streams=streams, stream_bytes=terms.beyond_bytes / streams.of_rank)

    def _contested(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` of a collective that waits for its rival's last round on some rank."""
        if not isinstance(work, CollectiveWork) or work.rival is None:
            return terms
        rival = self.launched(work.rival, self.terms(work.rival))
        if rival.blocks <= self.profile.scheduling.own_tiles * self.gpu.sms:
            return terms  # no counter to clear: it wins on every rank
        waited = (waves(rival, float(self.gpu.sms)) - 1.0) * rival.cycles_per_block
        return changed(terms, tail_cycles=waited, moving_cycles=terms.moving_cycles and terms.moving_cycles + waited)

    def launched(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` of a product in the tiles that its library launches; others, and parts of products, as they are."""
        match work:
            case GemmWork(count=1, part=None, beside_ctas=None, weights=None) if (
                work.dtype.bits == 16 or work.m < LEAST_ROWS  # columns of weights, whatever their type
            ):
                return launched_gemm(self.profile, self.gpu, terms, gemm_sizes(work))
        return terms

    def _of_group(self, work: Work, terms: KernelTerms) -> KernelTerms:
        """``terms`` on any chips: the mean chip's power, and on several of them tensor time of the slowest one.

        Chips differ; ranks that meet in collectives go at the pace of the slowest, whose expected lag is its
        normal order statistic times the spread. Every rank gets that pace, so that ranks stay equal.
        """
        floor_s = terms.floor_s
        if isinstance(work, CollectiveWork) and self.cluster is not None and self.cluster.same_node(work.ranks):
            # Tables were measured on the GPU's own switched links: cards on a mesh or on PCIe move bytes slower.
            floor_s = max(floor_s, terms.link_bytes / self.cluster.bottleneck_bytes_per_s(work.ranks))
        spread = self.profile.spread
        lag = 1.0
        if isinstance(
            work, GemmWork | GroupedGemmWork | RoutedGemmWork | AdapterGemmWork | ConvolutionWork | AttentionWork
        ):
            lag += expected_maximum(self.chips) * spread.throttled_time
        power = 1.0 if isinstance(work, CollectiveWork) else self._mean_power(work)
        return changed(
            terms,
            floor_s=floor_s,
            cycles_per_block=terms.cycles_per_block * lag,
            tail_cycles=terms.tail_cycles * lag,
            core_energy_j=terms.core_energy_j * power,
            hbm_energy_j=terms.hbm_energy_j * power,
            sm_power_w=terms.sm_power_w * power,
        )

    def _mean_power(self, work: Work) -> float:
        """Watts above idle of the mean card over those of the one that the law of ``work`` was fitted on."""
        engine = ADAPTERS if isinstance(work, AdapterGemmWork) else getattr(work, "engine", None)
        laws = None if engine is None else self.profile.engines.get(engine)
        return self.profile.spread.mean_power_factor if laws is None else laws.mean_power_factor

    def terms(self, work: Work) -> KernelTerms:
        """Time and energy terms of ``work`` on this GPU."""
        profile, gpu = self.profile, self.gpu
        if isinstance(work, AttentionWork) and work.backward:
            return attention_gradient(self.terms(changed(work, backward=False)))
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
                return changed(self.terms(changed(work, beside_ctas=None)), sms_cap=left)
            case GemmWork() if work.weights is not None:
                return with_stored_weights(
                    self.terms(changed(work, weights=None)),
                    gemm_sizes(work),
                    weight_bytes=work.count * work.weights.bytes_of(work.n, work.k),
                    turned=turned(work.weights, work.dtype),
                    sms=gpu.sms,
                )
            case GemmWork():
                return gemm_terms(profile, gpu, gemm_sizes(work))
            case AttentionWork() if work.latent:
                return latent_base_terms(profile.decode, profile.prefill, latent_sizes(work), gpu)
            case AttentionWork() if work.decode:
                return decode_terms(profile, gpu, decode_sizes(work))
            case AttentionWork() if work.kv_dtype.bytes != 2:
                cached = 2.0 * work.batch * work.kv_len * work.kv_heads * work.mean_head_dim
                wide = self.terms(changed(work, kv_dtype=DType.BF16))
                return prefill_with_cache(wide, elements=cached, element_bytes=work.kv_dtype.bytes)
            case AttentionWork():
                return prefill_terms(profile, gpu, prefill_sizes(work))
            case ElementwiseWork():
                return elementwise_terms(
                    profile,
                    gpu,
                    op=work.op.value,
                    rows=work.rows,
                    bytes_moved=work.bytes_moved,
                    launched_blocks=work.blocks or blocks_for(work.bytes_moved),
                )
            case GroupedGemmWork():
                return grouped_gemm_terms(profile, gpu, grouped_sizes(work), _stored_experts(work))
            case AdapterGemmWork():
                return adapter_terms(profile.engines[ADAPTERS], gpu, adapter_sizes(work))
            case RoutedGemmWork() | ConvolutionWork():
                raise AssertionError("an engine's product has its law or becomes one of the libraries'")
            case CollectiveWork(exchange=ExchangeSizes() as exchanged):
                exchange = RoutedExchange(
                    tokens=exchanged.tokens,
                    top_k=exchanged.top_k,
                    hidden=exchanged.hidden,
                    element_bytes=int(exchanged.dtype.bytes),
                    kernels=exchanged.kernels.value,
                )
                assert self.cluster is not None, "an exchange lies on nodes"
                span = self.cluster.span(work.ranks, pattern_of(work.op.value))
                return exchange_terms(profile, gpu, op=work.op.value, exchange=exchange, span=span, max_sms=gpu.sms)
            case CollectiveWork():
                sizes = collective_sizes(work, self.in_graph, self.cluster)
                joined = None if self.cluster is None else self.cluster.node.interconnect
                if joined == "pcie":  # a bridge joins a pair, which the ranks need not be: no engine reads peers so
                    gpu, engine = changed(gpu, link_bytes_per_s=0.0), None
                terms = collective_terms(profile, gpu, sizes, in_switch=joined == "nvswitch")
                return own_all_reduce(work, profile, terms) or terms if engine is not None else terms
        assert_never(work)


def turned(weights: Storage, dtype: DType) -> bool:
    """Whether weights must become elements of another type before tensor cores multiply them (not only be scaled)."""
    return weights.element != dtype.value and not weights.plain


def _stored_experts(work: GroupedGemmWork) -> ExpertOperands | None:
    """Experts' operands where they are not the 16-bit ones that were measured."""
    if work.weights is None and work.dtype.bits == 16:
        return None
    element = Storage(element=work.dtype.value)
    weights = work.weights or element
    return ExpertOperands(
        dtype=work.dtype.value,
        weight_bytes=float(work.distinct * weights.bytes_of(work.n, work.k)),
        row_bytes=element.bytes_of(1, work.k),
        turned=turned(weights, work.dtype),
    )


def drawn(work: Work) -> Work:
    """``work`` with a rival only where it is its turn to lose to it on some rank: others are priced as one."""
    if not isinstance(work, CollectiveWork) or work.rival is None:
        return work
    share = 1.0 - COLLECTIVE_WINS ** len(work.ranks)
    loses = math.floor((work.turn + 1) * share + 0.5) > math.floor(work.turn * share + 0.5)
    return changed(work, rival=work.rival if loses else None, turn=0)


@lru_cache(maxsize=64)
def expected_maximum(count: int) -> float:
    """Expected largest of ``count`` standard normals (Blom's approximation; 0.56 of two, 1.03 of four).

    >>> round(expected_maximum(4), 1)
    1.0
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def flops_of(cls: KernelClass) -> float:
    """FLOPs of one kernel of a class, as its :class:`~workloads.program.Kernel` states them; 0 of what states none."""
    flops = cls.describe.get("flops", 0.0)
    assert isinstance(flops, int | float)
    return float(flops)


def family(work: Work) -> str:
    """The kernel class under which reports add up ``work``."""
    match work:
        case GemmWork() | GroupedGemmWork() | RoutedGemmWork() | AdapterGemmWork() | ConvolutionWork():
            return "gemm"
        case AttentionWork():
            return "attention"
        case ElementwiseWork():
            return "elementwise"
        case CollectiveWork():
            return "communication"
    assert_never(work)
