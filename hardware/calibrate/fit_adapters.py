"""Laws of vLLM's low-rank adapters from rows of them, added to shipped laws of its other kernels, which stay.

``python -m hardware.calibrate.fit_adapters adapters.jsonl --gpu ID --carry-to ID ...``
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware.calibrate.engine_families import EngineFamilies
from hardware.calibrate.engine_rows import read_engine_records
from hardware.calibrate.fit_kit import FitSetting, Law, Learning, Row, digest
from hardware.calibrate.suite.cases_vllm_lora import widths_of
from hardware.catalog import load_gpu
from hardware.engine_laws import EngineLaws, Learnt, dump_laws, shipped_engines
from hardware.forecast import forecast_profile
from hardware.laws.adapters import AdapterCoefficients, AdapterSizes, adapter_base_terms, adapter_features
from hardware.laws.elementwise import blocks_for
from hardware.laws.price import elementwise_terms
from hardware.profile import Profile, profile_for

KIND, ENGINE, NAME = "vllm_adapter", "vllm", "python -m hardware.calibrate.fit_adapters"
# Length scales of the corrections (octaves): adapters, rows of each, rank, width.
LENGTHS = (2.0, 2.0, 2.0, 2.0)
LEARNING = Learning(lengths=LENGTHS, time=(0.15, 0.025), energy=(0.1, 0.03))
FREE = (
    "floor_s", "block_launch_s", "leave_cycles", "tile_leave_cycles", "leave_energy_j",
    "wait_cycles", "wait_cycles_per_step", "busy_cycles", "busy_cycles_per_step",
    "block_energy_j", "step_energy_j", "flop_energy_j", "hbm_byte_energy_j", "sm_power_w",
)  # fmt: skip
# Few rows for so many coefficients: none may go far from where its search begins, joules of HBM least.
# Blocks without rows are read off rows that differ in slots or adapters alone: 0.60 ns each at rank 64, 0.78 where
# loads are masked and for few tokens on the way down; 0.84 and 1.3 on the way up where an adapter has no rows there.
PRIORS = {
    **dict.fromkeys((*FREE, "wait_cycles_per_turn", "masked"), 0.5),
    "hbm_byte_energy_j": 0.1,
    **dict.fromkeys(("block_launch_s", "leave_cycles", "tile_leave_cycles"), 0.05),
}
DOWN = AdapterCoefficients(
    floor_s=1.0e-6,
    block_launch_s=0.6e-9,
    leave_cycles=800.0,
    tile_leave_cycles=1350.0,
    leave_energy_j=30e-9,
    wait_cycles=500.0,
    wait_cycles_per_turn=700.0,
    wait_cycles_per_step=150.0,
    busy_cycles=300.0,
    busy_cycles_per_step=120.0,
    masked=1.0,
    hbm_bytes_per_s=4e12,
    sharpness=4.0,
    block_energy_j=100e-9,
    step_energy_j=80e-9,
    flop_energy_j=2e-12,
    hbm_byte_energy_j=100e-12,
    sm_power_w=20.0,
)
UP = replace(
    DOWN,
    wait_cycles=1500.0,
    wait_cycles_per_turn=0.0,  # a turn is a step
    wait_cycles_per_step=1000.0,
    busy_cycles=600.0,
    busy_cycles_per_step=400.0,
    masked=1.4,
    leave_energy_j=80e-9,
    sm_power_w=80.0,
)
# Where the search begins, and what is free beside the others.
LAWS = {
    "down": (DOWN, ("wait_cycles_per_turn",)),
    "down_slices": (replace(DOWN, busy_cycles=1800.0, busy_cycles_per_step=40.0), ("wait_cycles_per_turn",)),
    "up": (UP, ("masked",)),
    "up_slices": (replace(UP, busy_cycles=1200.0, block_energy_j=400e-9, step_energy_j=200e-9), ("masked",)),
}


def adapter_sizes_of(row: Row) -> AdapterSizes:
    """Sizes of a row of one kernel."""
    slices, rank, width, up = row["slices"], row["rank"], row["width"], row["up"]
    return AdapterSizes(
        rows=row["tokens"],
        distinct=min(row["adapters"], row["tokens"]),
        slices=slices,
        rank=rank,
        width=width,
        up=up,
        row_bytes=4.0 * slices * rank + 2.0 * width * (2 if up else 1),
        widest=max(widths_of(slices, width)) if up else None,
        slots=row.get("slots") or row["adapters"],
    )


def without_clearing(row: Row, base: Profile, setting: FitSetting) -> Row:
    """A row of the kernel alone: on the way down the sums are cleared first, a kernel of its own here."""
    if row["up"]:
        return row
    rows, moved = row["slices"] * row["tokens"], 4 * row["slices"] * row["tokens"] * row["rank"]
    cleared = setting.point(
        elementwise_terms(
            base, setting.gpu, op="copy", rows=rows, bytes_moved=moved, launched_blocks=blocks_for(moved)
        ),
        row,
    )
    return {
        **row,
        "latency_s": row["latency_s"] - cleared.latency_s,
        "energy_j": row["energy_j"] - cleared.latency_s * cleared.power_w,
    }


def adapter_laws(rows: Sequence[Row], fits: EngineFamilies, base: Profile) -> dict[str, AdapterCoefficients]:
    """Laws of the kernels of which there are rows, by name."""
    setting = fits.setting
    alone = [without_clearing(row, base, setting) for row in rows if row["kind"] == KIND]
    found: dict[str, AdapterCoefficients] = {}
    for name, (start, besides) in LAWS.items():
        some = [row for row in alone if adapter_sizes_of(row).law == name]
        law = Law(
            start=start,
            free=(*FREE, *besides),
            terms_of=lambda c, row: adapter_base_terms(c, adapter_sizes_of(row), setting.gpu),
            features_of=lambda row: adapter_features(adapter_sizes_of(row)),
        )
        if some:
            found[name] = fits.add(f"adapters.{name}", some, law, LEARNING, PRIORS)
    return found


def with_adapters(
    laws: EngineLaws,
    found: Mapping[str, AdapterCoefficients],
    learnt: Mapping[str, Learnt],
    *,
    command: str,
    files: Mapping[str, str],
) -> EngineLaws:
    """``laws`` with those of adapters; all others stay."""
    first = laws.command.split(f" && {NAME}")[0]
    return replace(
        laws,
        adapters=dict(found),
        corrections={**_others(laws.corrections), **learnt},
        command=f"{first} && {command}",
        files={**laws.files, **files},
    )


def _others(of: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in of.items() if not name.startswith("adapters.")}


def main() -> None:
    """Add adapters to shipped sections of the engine's laws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--carry-to", nargs="*", default=[], help="GPUs of which no row was taken")
    parser.add_argument("--out", type=Path, default=Path("hardware/data/engines/vllm"))
    given = parser.parse_args()
    gpu = load_gpu(given.gpu)
    rows = [row for row in read_engine_records([given.records]) if row["kind"] == KIND and row["gpu"] == gpu.id]
    base = profile_for(gpu)
    fits = EngineFamilies(FitSetting(gpu=gpu, curve=base.curve, limit_w=base.limits.slow_limit_w))
    found = adapter_laws(rows, fits, base)
    command = f"{NAME} {given.records.name} --gpu {gpu.id}"
    files = {f"{gpu.id}/{given.records.name}": hashlib.sha256(given.records.read_bytes()).hexdigest()}
    own = with_adapters(base.engines[ENGINE], found, fits.corrections, command=command, files=files)
    own = replace(
        own,
        row_digests=tuple(sorted({*own.row_digests, *(digest(row) for row in rows)})),
        left_out={**_others(own.left_out), **fits.left_out},
        standard_errors={**_others(own.standard_errors), **fits.errors},
    )
    (given.out / f"{gpu.id}.json").write_text(dump_laws(own), encoding="utf-8")
    for name in given.carry_to:
        to = load_gpu(name)
        moved = forecast_profile(to, replace(base, engines={ENGINE: own}), gpu).engines[ENGINE]
        learnt = {family: one for family, one in moved.corrections.items() if family.startswith("adapters.")}
        theirs = with_adapters(
            shipped_engines(name)[ENGINE], moved.adapters, learnt, command=f"{command} --carry-to {name}", files=files
        )
        (given.out / f"{name}.json").write_text(dump_laws(theirs), encoding="utf-8")
    for family, one in fits.left_out.items():
        off = f"time {100 * one.time:.1f} %, energy {100 * one.energy:.1f} %"
        print(f"{family:34} {one.rows:4} rows left out in turn: {off}")


if __name__ == "__main__":
    main()
