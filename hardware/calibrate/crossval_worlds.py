"""How far the collective law carries to worlds it has not seen: ``python -m hardware.calibrate.crossval_worlds``.

Each measured world is left out in turn and predicted from the others: latency and mean power of bare loops, and
what a collective adds to the energy of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hardware.calibrate.crossval import HEADER, HeldOutErrors
from hardware.calibrate.fit import read_fit_records
from hardware.calibrate.fit_kit import Row
from hardware.catalog import load_gpu
from hardware.gpu import GpuSpec
from hardware.laws.collective import UNFITTED, collective_base_terms
from hardware.laws.collective_time import CollectiveCoefficients
from hardware.laws.sizes import CollectiveSizes
from hardware.laws.terms import KernelTerms, time_s
from hardware.profile import load_profile


def world_errors(rows: Sequence[Row], gpu_id: str = "h100-sxm-80gb") -> Iterator[HeldOutErrors]:
    """Signed relative errors of time and power of the loops of each operation, its own world's table left out."""
    gpu, profile = load_gpu(gpu_id), load_profile(gpu_id)
    assert profile is not None
    curve = profile.curve.plus(profile.collective.links_power_w)
    loops = [row for row in rows if row["kind"] == "collective"]
    worlds = {op: sorted({row["world"] for row in loops if row["op"] == op}) for op in sorted({r["op"] for r in loops})}
    for op, measured in worlds.items():
        for world in measured if len(measured) > 1 else []:
            blind = replace(profile.collective, tables=tuple(t for t in profile.collective.tables if t.world != world))
            latency, power = [], []
            for row in loops:
                if (row["op"], row["world"]) != (op, world):
                    continue
                terms = _terms(blind, row, gpu)
                seconds = time_s(terms, sms=gpu.sms, sm_clock_hz=gpu.max_clock_hz)
                latency.append(seconds / row["latency_s"] - 1.0)
                watts = [w for w in row["power_w"] if w is not None]
                idle_w = curve.at(float(np.mean(row["temperature_c"]))).idle_w(gpu.max_clock_hz)
                predicted_w = idle_w + terms.link_energy_j / seconds
                power.append(predicted_w / float(np.mean(watts)) - 1.0 if watts else float("nan"))
            yield HeldOutErrors(family=op, left_out=f"world {world}", latency=tuple(latency), energy=tuple(power))


def _terms(coefficients: CollectiveCoefficients, row: Row, gpu: GpuSpec) -> KernelTerms:
    sizes = CollectiveSizes(
        op=row["op"], world=row["world"], buffer_bytes=row["bytes"], ctas=row["ctas"], in_graph=False
    )
    return collective_base_terms(coefficients, UNFITTED, sizes, gpu)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    print(HEADER)
    for held in world_errors(read_fit_records(parser.parse_args().records)):
        print(held.line(), flush=True)
    print("mean power in place of energy")


if __name__ == "__main__":
    main()
