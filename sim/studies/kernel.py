"""One kernel at any clock: tiles, waves, utilisation, latency, power, energy, and the clock that costs least."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hardware.laws.terms import KernelTerms, time_s, waves
from hardware.power import OperatingPoint, point_at, steady_point
from sim.cost import Pricer
from sim.machine import Machine
from workloads.work import CollectiveWork, GemmWork, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPoint:
    """A kernel repeated back to back at one SM clock (Hz, s, W, J of one repetition on one GPU).

    ``tensor_utilisation`` is useful FLOPs over the tensor peak at that clock, ``hbm_utilisation`` bytes over
    what kernels get out of HBM, ``sm_utilisation`` the share of SM-time in rounds that blocks fill.
    """

    sm_clock_hz: float
    latency_s: float
    power_w: float
    energy_j: float
    tensor_utilisation: float
    hbm_utilisation: float
    sm_utilisation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """The kernel's shape on the GPU, its settled point, and a sweep of the clock."""

    gpu: str
    blocks: int
    waves: float
    hbm_bytes: float
    extrapolated: bool
    settled: KernelPoint
    sweep: tuple[KernelPoint, ...]
    best: KernelPoint

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def kernel_report(target: Machine, work: Work, *, step_mhz: float = 90.0) -> KernelReport:
    """Price ``work`` alone on ``target``; the settled point obeys the power cap and a locked clock."""
    pricer = Pricer(
        profile=target.profile,
        gpu=target.gpu,
        gap_s=0.0,
        in_graph=False,
        world=target.world,
        cluster=target.cluster,
    )
    terms = pricer.terms(work)
    gpu, curve, model = target.gpu, target.curve, target.model
    settled = steady_point(
        terms,
        curve,
        gpu_sms=gpu.sms,
        limit_w=target.limits.slow_limit_w,
        min_clock_hz=model.min_clock_hz,
        max_clock_hz=model.max_clock_hz,
    )
    sms = min(terms.blocks * terms.sms_per_block, float(gpu.sms))
    count = int((gpu.max_clock_hz - gpu.min_clock_hz) / (step_mhz * 1e6))
    clocks = [gpu.max_clock_hz - i * step_mhz * 1e6 for i in range(count + 1)]
    points = [
        _point(point_at(terms, curve, sms=sms, gpu_sms=gpu.sms, sm_clock_hz=clock), terms, work, target)
        for clock in reversed(clocks)
    ]
    return KernelReport(
        gpu=gpu.id,
        blocks=terms.blocks,
        waves=waves(terms, sms),
        hbm_bytes=terms.hbm_bytes,
        extrapolated=terms.extrapolated,
        settled=_point(settled, terms, work, target),
        sweep=tuple(points),
        best=min(points, key=lambda point: point.energy_j),
    )


def _point(at: OperatingPoint, terms: KernelTerms, work: Work, target: Machine) -> KernelPoint:
    gpu = target.gpu
    tensor = 0.0
    if isinstance(work, GemmWork):
        peak = gpu.tensor_flops_per_cycle_per_sm(_rate_name(work, target)) * gpu.sms * at.sm_clock_hz
        tensor = 2.0 * work.m * work.n * work.k * work.count / at.latency_s / peak
    slots = min(gpu.sms / terms.sms_per_block, terms.blocks)
    filled = terms.blocks / (waves(terms, gpu.sms) * slots) * min(1.0, slots * terms.sms_per_block / gpu.sms)
    if isinstance(work, CollectiveWork):
        filled = terms.blocks * terms.sms_per_block / gpu.sms
    return KernelPoint(
        sm_clock_hz=at.sm_clock_hz,
        latency_s=at.latency_s,
        power_w=at.power_w,
        energy_j=at.power_w * at.latency_s,
        tensor_utilisation=tensor,
        hbm_utilisation=terms.hbm_bytes / at.latency_s / target.profile.hbm_bytes_per_s(gpu),
        sm_utilisation=min(1.0, filled) * time_s(terms, sms=gpu.sms, sm_clock_hz=at.sm_clock_hz) / at.latency_s,
    )


def _rate_name(work: GemmWork, target: Machine) -> str:
    rates = target.gpu.tensor_flops_per_s
    return work.dtype.value if work.dtype.value in rates else "fp16"
