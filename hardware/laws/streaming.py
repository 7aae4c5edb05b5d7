"""Kernels on a few SMs: how fast they stream from HBM, how long their loads are under way, what they draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hardware.gpu import GpuSpec
from hardware.laws.terms import Floats, KernelTerms
from hardware.scheduling import shipped


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSms:
    """Facts of SMs and memory; ``hardware/data/few_sms.toml`` says what each is and where it comes from."""

    sm_bytes_per_s: float
    silu_mul_sm_bytes_per_s: float
    cast_fp8_sm_bytes_per_s: float
    decode_sm_bytes_per_s: float
    own_sharpness: float
    sm_launch_cycles: float
    sharpness: float
    clocked_share: float
    tensor_clock_share: float
    product_load_wait: float
    attention_load_wait: float
    wait_sharpness: float
    collective_beside_slowdown: float
    empty_saving: float


@lru_cache(maxsize=1)
def few_sms() -> FewSms:
    """The facts that are shipped."""
    return FewSms(**shipped("few_sms.toml"))


def on_few_sms(terms: KernelTerms, sms: float, gpu: GpuSpec) -> KernelTerms:
    """``terms`` of a kernel of many short blocks on ``sms`` SMs of a ``gpu``: it streams from HBM what those can.

    The rate in ``terms`` is that of the whole GPU, which the sum of its SMs already meets. An SM has so many bytes
    under way; its requests pass through L2 and crossbar, which follow the SM clock. The power of busy SMs goes with
    what they move.

    >>> from hardware.catalog import load_gpu
    >>> from hardware.laws.terms import time_s
    >>> gpu = load_gpu("h100-sxm-80gb")
    >>> copy = KernelTerms(
    ...     floor_s=0.0, blocks=900, cycles_per_block=0.0, quantised=False, hbm_bytes=1e9, hbm_bytes_per_s=3e12)
    >>> [round(1 / time_s(on_few_sms(copy, n, gpu), sms=n, sm_clock_hz=1.98e9)) for n in (8.0, 132.0)]
    [645, 3000]
    """
    facts, rate = few_sms(), terms.hbm_bytes_per_s
    terms = replace(terms, few_sms_saving=facts.empty_saving * terms.tensor_share)
    if terms.tensor_share and (top_hz := tensor_clock_hz(gpu) / terms.tensor_share) < gpu.max_clock_hz:
        terms = replace(terms, top_clock_hz=top_hz)  # else what sets its pace has a clock of its own
    if terms.quantised or not terms.hbm_bytes or math.isinf(rate):  # a product's own law has its SMs
        return replace(terms, sharpness=terms.few_sms_sharpness or terms.sharpness)
    sharpness = terms.few_sms_sharpness or facts.sharpness
    each = terms.sm_bytes_per_s or facts.sm_bytes_per_s
    streamed, fully = (rate / (of * each * round_fill(terms, of)) for of in (sms, float(gpu.sms)))
    few, full = slowdown(streamed, sharpness), slowdown(fully, sharpness)
    terms = replace(
        terms,
        hbm_bytes_per_s=rate * full / few,
        hbm_bytes_per_s_per_sm=math.inf,
        sm_power_w=terms.sm_power_w * max(1.0, full / few * gpu.sms / sms),
    )
    if terms.launch_s:
        return _launched_on(terms, gpu)
    if terms.cycles_per_block:
        return terms
    clocked_share = 1.0 if terms.sm_bytes_per_s else facts.clocked_share  # its blocks' own instructions set its pace
    clocked = clocked_share ** (1.0 / sharpness)
    cycles = clocked * streamed * sms / rate * terms.hbm_bytes / full * gpu.max_clock_hz
    return replace(
        terms,
        hbm_bytes_per_s=rate * full / slowdown(streamed * (1.0 - clocked_share) ** (1.0 / sharpness), sharpness),
        cycles_per_block=cycles * terms.sms_per_block / terms.blocks,
        sharpness=sharpness,
    )


def tensor_clock_hz(gpu: GpuSpec) -> float:
    """The highest SM clock of busy tensor cores; infinite before Hopper, where none was measured.

    >>> from hardware.catalog import load_gpu
    >>> [round(tensor_clock_hz(load_gpu(name)) / 1e6) for name in ("h100-sxm-80gb", "h200-sxm-141gb")]
    [1812, 1812]
    """
    return few_sms().tensor_clock_share * gpu.max_clock_hz if gpu.clusters else math.inf


def _launched_on(terms: KernelTerms, gpu: GpuSpec) -> KernelTerms:
    """Blocks that end sooner than the GPU launches others: each SM takes so many cycles for one, the launcher its time.

    Squares of both add up, on all SMs to the time that the kernel's law has at the maximum clock.
    """
    cycles = few_sms().sm_launch_cycles
    on_all_s = terms.blocks * cycles / gpu.sms / gpu.max_clock_hz
    return replace(
        terms,
        cycles_per_block=cycles,
        launch_s=math.sqrt(max(0.0, terms.launch_s**2 - on_all_s**2)),
        sharpness=2.0,
    )


def own_streams(name: str) -> float:
    """Bytes/s that one SM streams for the elementwise kernel ``name`` (0: as for most)."""
    facts = few_sms()
    return {"silu_mul": facts.silu_mul_sm_bytes_per_s, "cast_fp8": facts.cast_fp8_sm_bytes_per_s}.get(name, 0.0)


def collective_on_few_sms(terms: KernelTerms, sms: float) -> KernelTerms:
    """``terms`` of a collective on ``sms`` SMs of its own.

    Of more blocks than SMs several share one, which moves no more than one of them: 16 on 8 SMs take as long as 8.
    """
    wanted = terms.blocks * terms.sms_per_block
    return replace(
        terms,
        sms_cap=min(terms.sms_cap, sms),
        moving_cycles=terms.moving_cycles * max(1.0, wanted / sms),
        beside_slowdown=min(terms.beside_slowdown, few_sms().collective_beside_slowdown),
    )


def round_fill(terms: KernelTerms, sms: float) -> float:
    """Share of the places for blocks on ``sms`` SMs that are taken, over all rounds of blocks that stay for long.

    A block streams no faster where the other place of its SM is empty: a second round of few takes as long.

    >>> decode = KernelTerms(floor_s=0.0, blocks=128, cycles_per_block=0.0, resident=2)
    >>> [round(round_fill(decode, sms), 2) for sms in (24, 40, 56, 64)]
    [0.89, 0.8, 0.57, 1.0]
    """
    if not terms.resident:
        return 1.0
    places = terms.resident * sms
    return terms.blocks / (places * math.ceil(terms.blocks / places - 1e-9))


def slowdown(load: float, sharpness: float | None = None) -> float:
    """How much longer loads are under way than while memory is idle, under ``load`` as a share of its rate.

    ``load`` is what would flow if the memory had no limit: bytes under way over their time in an idle memory.
    ``sharpness`` None: of many loads under way.

    >>> slowdown(0.0), round(slowdown(1.0), 2), round(slowdown(3.0), 2)
    (1.0, 1.32, 3.08)
    """
    sharpness = sharpness or few_sms().sharpness
    return float((1.0 + load**sharpness) ** (1.0 / sharpness))


def slowdown_at(load: Floats) -> Floats:
    """The same of many loads in one go."""
    sharpness = few_sms().sharpness
    return (1.0 + load**sharpness) ** (1.0 / sharpness)


def unlimited(flow: float, share: float, sms: float) -> float:
    """Bytes/s of a kernel from a memory without limit that has ``flow``, ``share`` of its time bound by memory.

    As :func:`slowdown` has it, at most what its SMs have under way.

    >>> [round(unlimited(2e12, share, 96) / 1e12, 1) for share in (0.1, 0.9, 1.0)]
    [2.0, 3.6, 7.7]
    """
    facts = few_sms()
    most, free = sms * facts.sm_bytes_per_s, 1.0 - share**facts.sharpness
    return float(min(most, flow / free ** (1.0 / facts.sharpness))) if free > 0.0 else most


def unlimited_at(flow: Floats, share: Floats, sms: Floats) -> Floats:
    """The same of many kernels and clocks in one go."""
    facts = few_sms()
    most, free = sms * facts.sm_bytes_per_s, 1.0 - share**facts.sharpness
    bound = free > 0.0
    return np.where(bound, np.minimum(most, flow / np.where(bound, free, 1.0) ** (1.0 / facts.sharpness)), most)


def waiting_slowdown(wait: float, longer: float) -> float:
    """How much longer a kernel of arithmetic takes whose loads are under way so much ``longer`` than in an idle memory.

    ``wait``: their round trip there over the arithmetic that hides it.

    >>> round(waiting_slowdown(0.8, 1.2), 2), round(waiting_slowdown(0.8, 2.5), 2)
    (1.06, 1.93)
    """
    sharpness = few_sms().wait_sharpness
    return float(((1.0 + (wait * longer) ** sharpness) / (1.0 + wait**sharpness)) ** (1.0 / sharpness))


def waiting_slowdown_at(wait: Floats, longer: Floats) -> Floats:
    """The same of many kernels and clocks in one go."""
    sharpness = few_sms().wait_sharpness
    return ((1.0 + (wait * longer) ** sharpness) / (1.0 + wait**sharpness)) ** (1.0 / sharpness)
