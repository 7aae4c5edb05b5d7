"""One kernel at any clock: tiles, waves, utilisation, latency, power, energy, and the clock that costs least."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, assert_never

from hardware.laws.gemm import MOST_ROWS
from hardware.laws.price import elementwise_law
from hardware.laws.terms import KernelTerms, time_s, waves
from hardware.power import OperatingPoint, point_at, steady_point
from sim.build.cost import Pricer
from sim.errors import ScenarioError
from sim.scenario.machine import Machine
from workloads.kernel_names import Elementwise
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

# All rows of attention alone have heads of so many elements (attention.jsonl; the A100's public table too).
MEASURED_HEAD = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPoint:
    """A kernel repeated back to back at one SM clock (Hz, s, W, J of one repetition on one GPU).

    ``beyond``: the power limit keeps the card from this clock, or no card of its type was ever seen to draw as much.
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
    beyond: Literal["", "the limit", "the card"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """The kernel's shape on the GPU, its settled point, and a sweep of the clock.

    ``best`` takes the least energy among the clocks that the power limit lets the GPU run at. ``way``: how a collective
    goes, by algorithm and protocol.
    """

    gpu: str
    blocks: int
    waves: float
    hbm_bytes: float
    extrapolated: bool
    way: str
    settled: KernelPoint
    sweep: tuple[KernelPoint, ...]
    best: KernelPoint

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def kernel_report(target: Machine, work: Work, *, step_mhz: float = 90.0) -> KernelReport:
    """Price ``work`` alone on ``target``; the settled point obeys the power cap and a locked clock."""
    _check_memory(target, work)
    pricer = Pricer.of_loops(target)
    terms = pricer.terms(work)
    gpu, curve, model = target.gpu, target.curve, target.model
    limit_w = target.limits.slow_limit_w
    settled = steady_point(
        terms, curve, gpu_sms=gpu.sms, limit_w=limit_w, min_clock_hz=model.min_clock_hz, max_clock_hz=model.max_clock_hz
    )
    at_rest = _point(settled, terms, work, target)
    sms = min(terms.blocks * terms.sms_per_block, float(gpu.sms))
    count = int((gpu.max_clock_hz - gpu.min_clock_hz) / (step_mhz * 1e6))
    clocks = [gpu.max_clock_hz - i * step_mhz * 1e6 for i in range(count + 1)]
    points = [
        _point(point_at(terms, curve, sms=sms, gpu_sms=gpu.sms, sm_clock_hz=clock), terms, work, target)
        for clock in reversed(clocks)
    ]
    reached = [point for point in points if point.power_w <= limit_w]
    return KernelReport(
        gpu=gpu.id,
        blocks=terms.blocks,
        waves=waves(terms, sms),
        hbm_bytes=terms.hbm_bytes,
        extrapolated=terms.extrapolated or (isinstance(work, GemmWork) and work.m > MOST_ROWS),
        way=terms.way,
        settled=at_rest,
        sweep=tuple(points),
        best=min((at_rest, *reached), key=lambda point: point.energy_j),
    )


def _point(at: OperatingPoint, terms: KernelTerms, work: Work, target: Machine) -> KernelPoint:
    gpu = target.gpu
    flops, rate = _tensor_flops(work)
    rate = rate if rate in gpu.tensor_flops_per_s else "fp16"
    peak = gpu.tensor_flops_per_cycle_per_sm(rate) * gpu.sms * at.sm_clock_hz
    tensor = flops / at.latency_s / peak
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
        beyond=_beyond(at.power_w, target),
        sm_utilisation=min(1.0, filled) * time_s(terms, sms=gpu.sms, sm_clock_hz=at.sm_clock_hz) / at.latency_s,
    )


def _beyond(power_w: float, target: Machine) -> Literal["", "the limit", "the card"]:
    own = target.profile.clock_limits(target.gpu, power_cap_w=None)
    if power_w > own.fast_limit_w:
        return "the card"
    return "the limit" if power_w > 1.001 * target.limits.slow_limit_w else ""


def unmeasured(target: Machine, work: Work) -> list[str]:
    """What of ``work`` no measured row of the card's profile holds."""
    weights = getattr(work, "weights", None)
    if weights is not None:
        return [f"no kernel with weights in {weights} was measured"]
    if isinstance(work, AttentionWork) and work.head_dim != MEASURED_HEAD:
        return [f"no attention with heads of {work.head_dim} elements was measured, only of {MEASURED_HEAD}"]
    if isinstance(work, ElementwiseWork) and work.op != Elementwise.PERMUTE_COPY:
        law = elementwise_law(target.profile, work.op.value)
        return [] if law == work.op else [f"no {work.op} was measured: it is priced as {law} is"]
    dtype = getattr(work, "dtype", DType.BF16).value
    measured = list(target.profile.gemm) if isinstance(work, GemmWork) else [DType.BF16.value]
    return [] if dtype in measured else [f"no kernel of its kind was measured in {dtype}"]


def _check_memory(target: Machine, work: Work) -> None:
    """Refuse a kernel whose operands no card of this type holds."""
    held, there = held_bytes(work), target.gpu.memory_bytes
    if held > there:
        raise ScenarioError(
            f"the kernel's operands take {held / 1e9:.4g} GB, {target.gpu.id} has {there / 1e9:.4g}: give smaller sizes"
        )


def held_bytes(work: Work) -> float:
    """Bytes that a kernel's operands take at least, in 16 bit where nothing else is said."""
    match work:
        case GemmWork():
            inputs = work.count * (work.m + work.n) * work.k * work.dtype.bytes
            if work.weights is not None:  # stored in fewer bits
                inputs = work.count * work.m * work.k * work.dtype.bytes
            return inputs + work.count * work.m * work.n * work.out_dtype.bytes
        case AdapterGemmWork():
            return 2.0 * work.weights + work.rows * work.row_bytes
        case GroupedGemmWork() | RoutedGemmWork():
            return 2.0 * (work.experts * work.n * work.k + work.rows * (work.n + work.k))
        case AttentionWork():
            rows = work.q_len * work.q_heads + work.kv_len * work.kv_heads
            return 4.0 * work.batch * rows * work.mean_head_dim
        case ConvolutionWork():
            return 2.0 * (work.read * work.channels_in + work.pixels * work.channels_out)
        case ElementwiseWork():
            return 2.0 * work.rows * work.width
        case CollectiveWork():
            return float(work.buffer_bytes)
    assert_never(work)


def _tensor_flops(work: Work) -> tuple[float, str]:
    """Useful FLOPs on tensor cores, and the type whose peak they are held against (the masked half is not useful)."""
    match work:
        case GemmWork():
            return 2.0 * work.m * work.n * work.k * work.count, work.dtype.value
        case ConvolutionWork():
            return 2.0 * work.pixels * work.channels_out * work.taps * work.channels_in, work.dtype.value
        case AdapterGemmWork():
            return work.flops, work.dtype.value
        case GroupedGemmWork() | RoutedGemmWork():
            return 2.0 * work.rows * work.n * work.k, work.dtype.value
        case AttentionWork():
            return work.flops, DType.BF16.value
        case ElementwiseWork() | CollectiveWork():
            return 0.0, DType.BF16.value
    assert_never(work)
