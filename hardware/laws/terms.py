"""One kernel's cost at any operating point: the single formula that every family fills in.

A family law (``gemm``, ``attention``, ...) turns sizes into :class:`KernelTerms`; :func:`time_s` and
:func:`dynamic_power_w` evaluate them at the SMs held, the SM clock and the progress rate that the engine
grants. Nothing else in the product computes a kernel's time or power.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from inputs.changed import changed

Shrink = Literal["persistent", "fluid"]
Floats = NDArray[np.float64]  # at many clocks at once


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTerms:
    """What time and energy of one kernel depend on, apart from SMs, clock and granted bandwidth.

    Time:   ``scale * (floor_s + ((waves * cycles_per_block / clock)**p + transfer**p)**(1/p))`` with
    ``transfer`` the slowest of HBM, L2 and link transfer and of ``launch_s``, in which the GPU launches the blocks.
    Where HBM and L2 are ``taking_turns`` in every block, their times add up.
    Only the compute and L2 parts follow the SM clock; the launcher has a clock of its own and serves all SMs.
    Energy: ``core_energy_j`` is at the reference voltage and scales with V(f)^2; HBM and link do not.
    ``sm_power_w`` is drawn by active SMs at the maximum clock when the whole GPU is held.
    ``sms_cap`` bounds the SMs that the kernel asks for (it leaves the others to a collective); no SMs at all
    (``sms_per_block`` 0) is work of the copy engines.
    A collective takes the longer of ``floor_s``, at the pace of its links, and ``moving_cycles``, what its blocks need
    to move the data at any clock; compute beside it stretches the cycles by ``beside_slowdown`` (caches and crossbar,
    not HBM). ``beyond_bytes`` is what a rank sends beyond its node meanwhile.
    ``cluster`` blocks start together, on neighbouring SMs.
    ``shrink`` says how blocks come to SMs: ``persistent`` blocks stay from start to end, ``fluid`` ones are so short
    that a kernel of higher priority gets their SMs at once.
    ``load_wait``: round trip of loads in an idle memory over the arithmetic that hides it, at the maximum clock.
    ``way``: how a collective goes, in the library's words (for people, no time follows from it).
    ``resident``: blocks that fit on an SM, of a kernel of few long blocks that stream from HBM (0: of short blocks,
    which spread evenly over SMs). ``sm_bytes_per_s``: rate at which one SM streams for the kernel from an idle memory
    (0: that of most kernels). ``tensor_share``: time in which tensor cores work over the time of its cycles, at most 1
    (less where L2 takes longer). ``top_clock_hz``: highest clock of its SMs, and of their voltage, whatever the GPU's.
    ``few_sms_sharpness``: exponent that joins the demand of few SMs and the memory's rate (0: that of its law).
    ``few_sms_saving``: share of ``core_energy_j`` saved where the kernel has few SMs and all others are empty, in the
    limit of none.
    """

    floor_s: float
    blocks: int
    cycles_per_block: float
    tail_cycles: float = 0.0
    launch_s: float = 0.0
    quantised: bool = True
    sms_per_block: float = 1.0
    cluster: int = 1
    sms_cap: float = math.inf
    hbm_bytes: float = 0.0
    hbm_bytes_per_s: float = math.inf
    hbm_bytes_per_s_per_sm: float = math.inf
    l2_bytes: float = 0.0
    l2_bytes_per_cycle: float = math.inf
    taking_turns: bool = False
    link_bytes: float = 0.0
    link_bytes_per_s: float = math.inf
    beyond_bytes: float = 0.0
    sharpness: float = math.inf
    scale: float = 1.0
    core_energy_j: float = 0.0
    hbm_energy_j: float = 0.0
    link_energy_j: float = 0.0
    sm_power_w: float = 0.0
    waiting_power_w: float = 0.0
    hbm_weight_per_sm: float = 1.0
    beside_slowdown: float = 1.0
    moving_cycles: float = 0.0
    load_wait: float = 0.0
    resident: int = 0
    sm_bytes_per_s: float = 0.0
    tensor_share: float = 0.0
    top_clock_hz: float = math.inf
    few_sms_sharpness: float = 0.0
    few_sms_saving: float = 0.0
    shrink: Shrink = "persistent"
    extrapolated: bool = False
    way: str = ""

    def __hash__(self) -> int:
        """By the fields that tell kernels apart: every price is looked up in several memos."""
        return hash((self.floor_s, self.cycles_per_block, self.hbm_bytes, self.link_bytes, self.core_energy_j))


def wanted_sms(terms: KernelTerms, gpu_sms: float) -> float:
    """SMs that the kernel asks for: one for each block, at most all (docs/laws.md, "Grids").

    >>> from hardware.laws.terms import KernelTerms
    >>> wanted_sms(KernelTerms(floor_s=0.0, blocks=512, cycles_per_block=1e4), 132.0)
    132.0
    """
    return min(terms.blocks * terms.sms_per_block, terms.sms_cap, gpu_sms)


def part(terms: KernelTerms, share: float) -> KernelTerms:
    """The part of a kernel that ``share`` of its blocks process: each has its tiles from the start.

    A few blocks by themselves are not bound by the streaming rate of an SM in a full GPU (docs/laws.md, "Late blocks").
    """
    return changed(
        terms,
        hbm_bytes_per_s_per_sm=math.inf,
        blocks=max(1, math.ceil(terms.blocks * share - 1e-9)),  # no round less than the whole kernel
        launch_s=terms.launch_s * share,
        hbm_bytes=terms.hbm_bytes * share,
        l2_bytes=terms.l2_bytes * share,
        l2_bytes_per_cycle=terms.l2_bytes_per_cycle * share,
        core_energy_j=terms.core_energy_j * share,
        hbm_energy_j=terms.hbm_energy_j * share,
    )


def waves(terms: KernelTerms, sms: float) -> float:
    """Rounds of blocks that ``sms`` SMs need: whole rounds when quantised, else the average."""
    slots = min(sms / terms.sms_per_block, terms.blocks) if terms.sms_per_block else terms.blocks
    return math.ceil(terms.blocks / slots - 1e-9) if terms.quantised else max(1.0, terms.blocks / slots)


def own_clock_hz(terms: KernelTerms, sm_clock_hz: float) -> float:
    """The clock of the SMs under a kernel, and of their voltage, on a GPU at ``sm_clock_hz``."""
    return min(sm_clock_hz, terms.top_clock_hz)


@dataclass(frozen=True, slots=True)
class Pace:
    """A kernel's time on the SMs that it has, by the clock alone: what :func:`time_s` works out of terms once."""

    cycles: float
    l2_cycles: float
    transfer_s: float
    launch_s: float
    taking_turns: bool
    moving_cycles: float
    floor_s: float
    scale: float
    sharpness: float
    top_clock_hz: float

    def seconds(self, sm_clock_hz: float) -> float:
        """Seconds alone at ``sm_clock_hz`` with memory and links to itself."""
        if self.top_clock_hz < sm_clock_hz:  # comparisons: min() and max() would be half of the time
            sm_clock_hz = self.top_clock_hz
        compute_s, l2_s, transfer_s = self.cycles / sm_clock_hz, self.l2_cycles / sm_clock_hz, self.transfer_s
        if self.taking_turns:
            transfer_s += l2_s
        elif l2_s > transfer_s:
            transfer_s = l2_s
        if self.launch_s > transfer_s:
            transfer_s = self.launch_s
        longer, shorter = (compute_s, transfer_s) if compute_s > transfer_s else (transfer_s, compute_s)
        if longer and shorter and self.sharpness != math.inf:  # a p-norm written so that it cannot overflow
            longer *= (1.0 + (shorter / longer) ** self.sharpness) ** (1.0 / self.sharpness)
        whole_s, moving_s = self.scale * (self.floor_s + longer), self.moving_cycles / sm_clock_hz
        return whole_s if whole_s >= moving_s else moving_s

    def seconds_at(self, sm_clock_hz: Floats) -> Floats:
        """The same at many clocks in one go."""
        sm_clock_hz = np.minimum(sm_clock_hz, self.top_clock_hz)
        compute_s = self.cycles / sm_clock_hz
        l2_s = self.l2_cycles / sm_clock_hz
        transfer_s = self.transfer_s + l2_s if self.taking_turns else np.maximum(self.transfer_s, l2_s)
        transfer_s = np.maximum(transfer_s, self.launch_s)
        longer, shorter = np.maximum(compute_s, transfer_s), np.minimum(compute_s, transfer_s)
        if self.sharpness != math.inf and longer.all():
            longer = longer * (1.0 + (shorter / longer) ** self.sharpness) ** (1.0 / self.sharpness)
        return np.maximum(self.scale * (self.floor_s + longer), self.moving_cycles / sm_clock_hz)


def pace(terms: KernelTerms, sms: float) -> Pace:
    """The time of ``terms`` on ``sms`` SMs."""
    active_sms = min(sms, terms.blocks * terms.sms_per_block)
    hbm_rate = terms.hbm_bytes_per_s
    if active_sms:
        hbm_rate = min(hbm_rate, active_sms * terms.hbm_bytes_per_s_per_sm)
    return Pace(
        cycles=waves(terms, sms) * terms.cycles_per_block + terms.tail_cycles,
        l2_cycles=terms.l2_bytes / terms.l2_bytes_per_cycle,
        transfer_s=max(terms.hbm_bytes / hbm_rate, terms.link_bytes / terms.link_bytes_per_s),
        launch_s=terms.launch_s,
        taking_turns=terms.taking_turns,
        moving_cycles=terms.moving_cycles,
        floor_s=terms.floor_s,
        scale=terms.scale,
        sharpness=terms.sharpness,
        top_clock_hz=terms.top_clock_hz,
    )


def time_s(terms: KernelTerms, *, sms: float, sm_clock_hz: float) -> float:
    """Seconds the kernel takes alone on ``sms`` SMs at ``sm_clock_hz`` with memory and links to itself."""
    return pace(terms, sms).seconds(sm_clock_hz)


@overload
def dynamic_power_w(
    terms: KernelTerms, *, sms: float, gpu_sms: int, progress_per_s: float, voltage_scale: float, clock_fraction: float
) -> float: ...


@overload
def dynamic_power_w(
    terms: KernelTerms,
    *,
    sms: Floats,
    gpu_sms: int,
    progress_per_s: Floats,
    voltage_scale: Floats,
    clock_fraction: Floats,
) -> Floats: ...


def dynamic_power_w(
    terms: KernelTerms, *, sms: Any, gpu_sms: int, progress_per_s: Any, voltage_scale: Any, clock_fraction: Any
) -> Any:
    """Watts the kernel adds to the idle GPU while it completes ``progress_per_s`` of itself a second.

    ``voltage_scale`` is (V(f)/V0)^2, ``clock_fraction`` f/f0, f being the clock of its SMs: at most its
    ``top_clock_hz``. At the rate ``1 / time_s`` the energy of the whole kernel above idle is this power times that
    time.
    """
    per_completion_j = terms.core_energy_j * voltage_scale + terms.hbm_energy_j + terms.link_energy_j
    active = terms.sm_power_w * (sms / gpu_sms) * voltage_scale * clock_fraction
    return progress_per_s * per_completion_j + active
