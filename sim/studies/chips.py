"""How far each chip of the records lies from the profile's: its power above idle over what the laws say of it.

Kernels below the power cap tell: at the cap the limiter sets the watts. Products in bf16 and copies count, whose power
the laws know best (left_out.toml) and which keep tensor cores and memory busy.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from hardware.calibrate.cards import BELOW_CAP, LEAST_W
from hardware.calibrate.fit_kit import CAPPED_CLOCK
from hardware.calibrate.fit_power import IDLE_SIGMA_W
from hardware.gpu import GpuSpec
from hardware.profile import Profile
from hardware.uncertainty import left_out
from sim.validation.validate import Row

Chip = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipPower:
    """One chip: the folder of its records, its index there, its UUID ("" where no record names it).

    ``power_factor`` is its power above idle over the profile's, from ``rows`` kernels.
    """

    session: str
    gpu_index: int
    uuid: str
    power_factor: float
    standard_error: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ratio:
    """Measured over predicted power above idle of one kernel; ``sigma`` of the law, ``above_idle_w`` as predicted."""

    value: float
    sigma: float
    above_idle_w: float


def chip_powers(rows: Sequence[Row], profile: Profile, gpu: GpuSpec) -> list[ChipPower]:
    """Chips that ran at least one telling kernel of ``rows``, which ``profile`` predicted.

    The mean weighs kernels by what the laws are off; its error is that of the laws or of the scatter, whichever is
    larger, and what idle power differs from chip to chip.
    """
    found: dict[Chip, list[_Ratio]] = {}
    uuids: dict[Chip, str] = {}
    for row in rows:
        if row.record.inputs.get("gpu") != gpu.id:
            continue
        session = row.record.path.resolve().parent.name
        if row.record.kind == "host":
            uuids |= {(session, index): uuid for index, uuid in enumerate(row.record.inputs.get("uuids", []))}
        for index, ratio in _ratios(row, profile, gpu):
            found.setdefault((session, index), []).append(ratio)
    return [
        _chip(chip, uuids.get(chip, ""), ratios) for chip, ratios in sorted(found.items(), key=lambda item: item[0])
    ]


def group_factor(chips: Sequence[ChipPower]) -> float:
    """The factor of runs on all of ``chips``."""
    return statistics.fmean(chip.power_factor for chip in chips)


def dump_chips(gpu_id: str, over: Mapping[str, Sequence[ChipPower]]) -> str:
    """Chips as JSON text, by the name of the profile that their factors are over."""
    lists = {name.replace(" ", "_"): [asdict(chip) for chip in chips] for name, chips in over.items()}
    return json.dumps({"gpu": gpu_id, "over": lists}, indent=1) + "\n"


def print_chips(chips: Sequence[ChipPower], name: str, console: Console) -> None:
    """A table, and the factor of each session's GPUs together; ``name`` says which profile it is."""
    table = Table(title=f"Power above idle over {name}", title_justify="left")
    for head in ("records", "GPU", "UUID", "kernels", "factor", "+-"):
        table.add_column(head, justify="left" if head in ("records", "UUID") else "right")
    sessions: dict[str, list[ChipPower]] = {}
    for chip in chips:
        sessions.setdefault(chip.session, []).append(chip)
        figures = (f"{chip.power_factor:.3f}", f"{chip.standard_error:.3f}")
        table.add_row(chip.session, str(chip.gpu_index), chip.uuid or "-", str(chip.rows), *figures)
    console.print(table)
    for session, own in sessions.items():
        if len(own) > 1:
            factor = group_factor(own)
            console.print(f"runs on the {len(own)} GPUs of {session}: --chip-power-factor {factor:.3f}", markup=False)


def _ratios(row: Row, profile: Profile, gpu: GpuSpec) -> Iterator[tuple[int, _Ratio]]:
    """What ``row`` says of each of its chips, by index."""
    inputs, measured, predicted = row.record.inputs, row.measured, row.predicted
    family = _family(row.record.kind, inputs)
    warmth = row.record.measured.get("temperature_c")
    power_w, clocks_mhz = measured.get("power_w"), measured.get("sm_clock_mhz")
    if family is None or predicted is None or not predicted.power_w or not predicted.sm_clock_mhz:
        return
    if not power_w or not clocks_mhz or not warmth:
        return
    world = int(inputs.get("world", 1))
    top_hz = gpu.max_clock_hz
    law_idle_w = profile.curve.at(statistics.fmean(warmth)).idle_w(top_hz)
    above_idle_w = predicted.power_w[0] - law_idle_w
    if predicted.sm_clock_mhz[0] * 1e6 < CAPPED_CLOCK * top_hz:
        return
    for place, (watts, clock_mhz, celsius) in enumerate(zip(power_w, clocks_mhz, warmth, strict=True)):
        below_cap = watts is not None and gpu.idle_w + LEAST_W < watts < BELOW_CAP * gpu.tdp_w
        if below_cap and clock_mhz * 1e6 >= CAPPED_CLOCK * top_hz:
            value = (watts - profile.curve.at(celsius).idle_w(top_hz)) / above_idle_w
            sigma = left_out(profile.gpu)[family].power
            yield (
                int(inputs.get("gpu_index", place)) if world == 1 else place,
                _Ratio(value=value, sigma=sigma, above_idle_w=above_idle_w),
            )


def _family(kind: str, inputs: Mapping[str, object]) -> str | None:
    """The law of a telling kernel."""
    what = inputs.get("what") if kind == "alone" else kind
    if what == "gemm" and inputs.get("dtype", "bf16") == "bf16" and inputs.get("values", "normal") == "normal":
        return "gemm.bf16"
    return "copy" if what == "copy" else None


def _chip(chip: Chip, uuid: str, ratios: Sequence[_Ratio]) -> ChipPower:
    values = np.array([ratio.value for ratio in ratios])
    weights = np.array([ratio.sigma**-2 for ratio in ratios])
    mean = float(np.average(values, weights=weights))
    of_laws = 1.0 / weights.sum()
    of_scatter = (weights * (values - mean) ** 2).sum() / weights.sum() / max(len(values) - 1, 1)
    of_idle = (IDLE_SIGMA_W / statistics.fmean(ratio.above_idle_w for ratio in ratios)) ** 2
    error = math.sqrt(max(of_laws, of_scatter) + of_idle)
    session, index = chip
    return ChipPower(
        session=session, gpu_index=index, uuid=uuid, power_factor=mean, standard_error=error, rows=len(values)
    )
