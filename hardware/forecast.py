"""Profiles of GPUs that were not measured: those of a like chip, moved by datasheet figures."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, TypeVar

from hardware.engine_laws import EngineLaws
from hardware.gpu import GpuSpec
from hardware.laws.adapters import AdapterCoefficients
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients
from hardware.laws.decoder import ConvolutionCoefficients, GroupNormCoefficients
from hardware.laws.elementwise import ElementwiseCoefficients, memory_bound
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.grouped import GroupedCoefficients
from hardware.laws.nccl_data import LIBRARIES
from hardware.laws.routed import RoutedCoefficients

if TYPE_CHECKING:
    from hardware.profile import Corrections, Profile


# Laws whose rates of HBM are moved in proportion to the datasheets'.
Streaming = TypeVar("Streaming", GemmCoefficients, DecodeCoefficients, ElementwiseCoefficients, GroupedCoefficients)
ProductLaw = TypeVar("ProductLaw", GemmCoefficients, RoutedCoefficients)


def same_chip(gpu: GpuSpec, other: GpuSpec) -> bool:
    """Whether both are the same silicon, on other boards or with other memory."""
    return (gpu.architecture, gpu.sms) == (other.architecture, other.sms)


@lru_cache(maxsize=1)
def _own_figures() -> dict[str, dict[str, float]]:
    return tomllib.loads((files("hardware") / "data" / "own_figures.toml").read_text(encoding="utf-8"))


def with_own_figures(forecast: Profile) -> Profile:
    """``forecast`` with what was measured on its card: joules of a byte from memory, and how far chips differ."""
    own = _own_figures().get(forecast.gpu)
    if own is None:
        return forecast
    ratio = own["hbm_byte_energy_ratio"]

    def cooler(c: Streaming) -> Streaming:
        return replace(c, hbm_byte_energy_j=c.hbm_byte_energy_j * ratio)

    return replace(
        forecast,
        gemm={name: cooler(c) for name, c in forecast.gemm.items()},
        decode=cooler(forecast.decode),
        elementwise={name: cooler(c) for name, c in forecast.elementwise.items()},
        grouped=cooler(forecast.grouped),
        spread=replace(forecast.spread, power=own["chip_power_spread"]),
    )


def forecast_profile(gpu: GpuSpec, base: Profile, base_gpu: GpuSpec) -> Profile:
    """``base`` carried over to ``gpu`` by SMs, clocks, peak rates, bandwidths and power.

    Same architecture: a forecast (the same kernels run). Another one: uncalibrated, and the learnt
    corrections, which belong to the base's kernels, are dropped. Energies per operation scale with the power
    that the datasheets allow per unit of rate. Kernels of serving engines are carried over like the libraries'.
    """
    hbm = gpu.hbm_bytes_per_s / base_gpu.hbm_bytes_per_s
    cache = gpu.sms * gpu.max_clock_hz / (base_gpu.sms * base_gpu.max_clock_hz)
    same = gpu.architecture == base_gpu.architecture
    flop_w, base_flop_w = (of.tdp_w / of.product_flops_per_s("bf16") for of in (gpu, base_gpu))
    joules_per_flop = 1.0 if same else flop_w / base_flop_w
    # Watts of all SMs together go with the card's; those of a slice with its SMs.
    power = gpu.tdp_w / base_gpu.tdp_w if gpu.card is None else gpu.sms / base_gpu.sms
    idle = 1.0 if same and gpu.tdp_w == base_gpu.tdp_w else gpu.idle_w / base_gpu.idle_w
    per_sm = hbm * base_gpu.sms / gpu.sms if gpu.card is None else 1.0
    # Cycles of a tile that tensor cores set. Slower ones: the law of grouped products has its own floor.
    tile_cycles = base_gpu.tensor_flops_per_cycle_per_sm("bf16") / gpu.tensor_flops_per_cycle_per_sm("bf16")
    # Over PCIe collectives keep the latencies of the tables (:func:`hardware.laws.collective.collective_base_terms`).
    slower_link = base_gpu.link_bytes_per_s / gpu.link_bytes_per_s if gpu.link_bytes_per_s else 1.0
    links = gpu.link_bytes_per_s / base_gpu.link_bytes_per_s  # none where ranks meet over PCIe

    def product(c: ProductLaw) -> ProductLaw:
        return replace(
            c,
            hbm_bytes_per_s=c.hbm_bytes_per_s * hbm,
            hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm * per_sm,
            l2_bytes_per_s=c.l2_bytes_per_s * cache,
            flop_energy_j=c.flop_energy_j * joules_per_flop,
            padded_flop_energy_j=c.padded_flop_energy_j * joules_per_flop,
            sm_power_w=c.sm_power_w * power,
        )

    def prefill(c: PrefillCoefficients) -> PrefillCoefficients:
        return replace(c, flop_energy_j=c.flop_energy_j * joules_per_flop)

    def decode(c: DecodeCoefficients) -> DecodeCoefficients:
        return replace(
            c,
            hbm_bytes_per_s=c.hbm_bytes_per_s * hbm,
            hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm * per_sm,
            sm_power_w=c.sm_power_w * power,
        )

    def elementwise(c: ElementwiseCoefficients) -> ElementwiseCoefficients:
        return replace(
            c,
            l2_bytes_per_s=c.l2_bytes_per_s * cache,
            hbm_bytes_per_s=c.hbm_bytes_per_s * (hbm if memory_bound(c, base_gpu) else cache),
            blocks_per_s=None if c.blocks_per_s is None else c.blocks_per_s * cache,
            # The SMs' own work goes with their cycles, what it is held against with HBM.
            follows_below=c.follows_below and c.follows_below * (hbm / cache if c.blocks_per_s is None else 1.0),
            sm_power_w=c.sm_power_w * power,
        )

    def routed(c: RoutedCoefficients) -> RoutedCoefficients:
        return replace(product(c), tile_cycles_per_k=c.tile_cycles_per_k * tile_cycles)

    def adapters(c: AdapterCoefficients) -> AdapterCoefficients:
        return replace(
            c,
            hbm_bytes_per_s=c.hbm_bytes_per_s * hbm,
            block_energy_j=c.block_energy_j * joules_per_flop,
            step_energy_j=c.step_energy_j * joules_per_flop,
            leave_energy_j=c.leave_energy_j * joules_per_flop,
            flop_energy_j=c.flop_energy_j * joules_per_flop,
            sm_power_w=c.sm_power_w * power,
            carried=True,
        )

    def convolution(c: ConvolutionCoefficients) -> ConvolutionCoefficients:
        return replace(
            c,
            copy_bytes_per_s=c.copy_bytes_per_s * hbm,
            bias_bytes_per_s=c.bias_bytes_per_s * cache,
            flop_energy_j=c.flop_energy_j * joules_per_flop,
            sm_power_w=c.sm_power_w * power,
        )

    def norm(c: GroupNormCoefficients) -> GroupNormCoefficients:
        clock = gpu.max_clock_hz / base_gpu.max_clock_hz
        return replace(
            c,
            block_bytes_per_s=c.block_bytes_per_s * clock,
            block_l2_bytes_per_s=c.block_l2_bytes_per_s * clock,
            pass_bytes_per_s=c.pass_bytes_per_s * cache,
        )

    def engine(laws: EngineLaws) -> EngineLaws:
        return replace(
            laws,
            routed={name: routed(c) for name, c in laws.routed.items()},
            scaled={name: product(c) for name, c in laws.scaled.items()},
            prefill=prefill(laws.prefill),
            decode={name: decode(c) for name, c in laws.decode.items()},
            elementwise={name: elementwise(c) for name, c in laws.elementwise.items()},
            adapters={name: adapters(c) for name, c in laws.adapters.items()},
            masked=laws.masked and prefill(laws.masked),
            convolution={name: convolution(c) for name, c in laws.convolution.items()},
            wide={name: replace(c, flop_energy_j=c.flop_energy_j * joules_per_flop) for name, c in laws.wide.items()},
            norm=laws.norm and norm(laws.norm),
            corrections={
                name: learnt for name, learnt in laws.corrections.items()
                if same and (hbm == 1.0 or not name.startswith("decode"))
            },
            all_reduce=tuple(replace(row, seconds=row.seconds * slower_link) for row in laws.all_reduce if links),
        )  # fmt: skip

    none = base.decode_corrections.none()

    def own(corrections: Corrections) -> Corrections:
        return corrections if same else none

    return replace(
        base,
        gpu=gpu.id,
        status="forecast" if same else "uncalibrated",
        basis=base.gpu,
        curve=replace(
            base.curve,
            reference_clock_hz=gpu.max_clock_hz,
            knee_hz=base.curve.knee_hz * gpu.max_clock_hz / base_gpu.max_clock_hz,
            floor_hz=base.curve.floor_hz * gpu.max_clock_hz / base_gpu.max_clock_hz,
            static_w=base.curve.static_w * idle,
            clocked_w=base.curve.clocked_w * idle,
            leakage_w_per_c=base.curve.leakage_w_per_c * idle,
        ),
        limits=base.limits.under(gpu.tdp_w),
        gemm={name: product(c) for name, c in base.gemm.items()},
        gemm_corrections={name: own(c) for name, c in base.gemm_corrections.items()},
        prefill=prefill(base.prefill),
        prefill_corrections=own(base.prefill_corrections),
        decode=decode(base.decode),
        # Its coordinates are lengths in HBM-bound kernels: with another bandwidth they would mislead.
        decode_corrections=own(base.decode_corrections) if hbm == 1.0 else none,
        elementwise={name: elementwise(c) for name, c in base.elementwise.items()},
        elementwise_corrections={name: own(c) for name, c in base.elementwise_corrections.items()},
        grouped=replace(
            base.grouped,
            small_tile_cycles_per_k=base.grouped.small_tile_cycles_per_k * min(tile_cycles, 1.0),
            large_tile_cycles_per_k=base.grouped.large_tile_cycles_per_k * min(tile_cycles, 1.0),
            hbm_bytes_per_s=base.grouped.hbm_bytes_per_s * hbm,
            hbm_bytes_per_s_per_sm=base.grouped.hbm_bytes_per_s_per_sm * per_sm,
            flop_energy_j=base.grouped.flop_energy_j * joules_per_flop,
            padded_flop_energy_j=base.grouped.padded_flop_energy_j * joules_per_flop,
            sm_power_w=base.grouped.sm_power_w * power,
        ),
        grouped_corrections=own(base.grouped_corrections),
        collective=replace(
            base.collective,
            tables=tuple(
                replace(t, rows=tuple((c, b, s * slower_link, w) for c, b, s, w in t.rows))
                for t in base.collective.tables
            )
            if not math.isclose(slower_link, 1.0)
            else base.collective.tables,
            step_power_w=base.collective.step_power_w * power,
            waiting_power_w=base.collective.waiting_power_w * power,
            links_power_w=base.collective.links_power_w * links,
            slower_link=base.collective.slower_link * slower_link,
            library=gpu.architecture if gpu.architecture in LIBRARIES else base.collective.library,
        ),
        peak_hbm_bytes_per_s=base.peak_hbm_bytes_per_s * hbm,
        engines={name: engine(laws) for name, laws in base.engines.items()},
    )
