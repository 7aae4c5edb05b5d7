"""Which kinds of runs were measured, at which sizes, and how far off predictions were.

``python -m sim.studies.checked_runs FOLDER... --out hardware/data/checked_runs.toml`` reads every whole-model row that
no fit has seen; :mod:`sim.result.status` reads what it writes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardware.catalog import load_gpu
from sim.output.files import write_atomically
from sim.result.served import LOAD_SIZES, OUTPUTS, Load, server_kind
from sim.scenario.kind import KEY, Kind, kind_of, ring_kind
from sim.scenario.spec import Scenario
from sim.studies.command import exit_code
from sim.studies.fidelity import WHOLE, record_files
from sim.studies.prose import prose
from sim.validation.inputs import NotPredicted
from sim.validation.predict import scenario_of, served_spec
from sim.validation.records import Record, read_records
from sim.validation.validate import Row, validate
from workloads.families.ring import RingAttention

HEAD = prose("checked_runs", "head") + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One measured run and what kind it is."""

    record: Record
    kind: Kind


def seen_in(record: Record) -> CheckedRun | None:
    """The kind of a whole-model row; None for other rows and for work that is not modelled."""
    inputs = {name: value for name, value in record.inputs.items() if value is not None}
    if record.kind not in WHOLE or inputs.get("fast_accumulation"):
        return None
    gpu = load_gpu(str(inputs["gpu"]))
    sizes: dict[str, tuple[float, float]] = {"power_cap_w": (gpu.tdp_w, gpu.tdp_w)}
    if warm := record.measured.get("temperature_c"):
        mean = round(statistics.fmean(warm), 1)
        sizes["chip_temperature_c"] = (mean, mean)
    try:
        kind = _kind(record.kind, inputs, gpu.id)
    except NotPredicted:
        return None
    return CheckedRun(record=record, kind=Kind(key=kind.key, sizes={**kind.sizes, **sizes}))


def _kind(name: str, inputs: Mapping[str, Any], gpu: str) -> Kind:
    if name == "ring_attention":
        attention = RingAttention(
            q_heads=int(inputs["q_heads"]),
            kv_heads=int(inputs["kv_heads"]),
            head_dim=int(inputs["head_dim"]),
            causal=bool(inputs.get("causal", True)),
            backward=not inputs.get("forward_only", True),
        )
        world, seq_len = int(inputs["world"]), int(inputs["seq_len"])
        return ring_kind(gpu, str(inputs["layout"]), attention, world=world, seq_len=seq_len)
    if name == "dit_step":
        cp = int(inputs.get("ulysses", 1))
        step = {"model": inputs["model"], "gpu": gpu, "seq_len": inputs["tokens"], "phase": "denoise", "cp": cp}
        return kind_of(Scenario.of(**step), gpu)
    return kind_of(scenario_of(inputs), gpu)


def rows_of(paths: Sequence[Path]) -> Iterator[CheckedRun]:
    """Every whole-model row of ``paths`` once."""
    known: set[str] = set()
    for path in paths:
        for record in read_records(path):
            if record.digest not in known and (found := seen_in(record)) is not None:
                known.add(record.digest)
                yield found


def spanned(kinds: Sequence[Kind]) -> Kind:
    """One kind with the least and the greatest of every size."""
    sizes: dict[str, tuple[float, float]] = {}
    for kind in kinds:
        for name, (low, high) in kind.sizes.items():
            have = sizes.get(name, (low, high))
            sizes[name] = (min(have[0], low), max(have[1], high))
    return Kind(key=kinds[0].key, sizes=dict(sorted(sizes.items())))


def grouped(rows: Sequence[CheckedRun]) -> dict[tuple[str, ...], list[CheckedRun]]:
    """Rows by their kind."""
    groups: dict[tuple[str, ...], list[CheckedRun]] = {}
    for row in rows:
        groups.setdefault(tuple(row.kind.key[name] for name in KEY), []).append(row)
    return dict(sorted(groups.items()))


def text_of(rows: Sequence[CheckedRun], predicted: Sequence[Row]) -> str:
    """The data file."""
    errors = {row.record.digest: row for row in predicted if row.predicted is not None and not row.fitted}
    parts = [HEAD]
    for key, group in grouped([row for row in rows if row.record.digest in errors]).items():
        lines = ["[[checked]]", *(f"{name} = {json.dumps(value)}" for name, value in zip(KEY, key, strict=True))]
        lines += [f"rows = {len(group)}", f"files = {json.dumps(sorted({row.record.path.name for row in group}))}"]
        for name in ("latency", "energy"):
            signed = [errors[row.record.digest].error(f"{name}_{'s' if name == 'latency' else 'j'}") for row in group]
            off = [abs(error) for error in signed if error is not None]
            if off:
                lines.append(f"{name}_error = [{statistics.fmean(off):.4f}, {max(off):.4f}]")
        lines.append("[checked.sizes]")
        lines += [
            f"{name} = [{low:g}, {high:g}]" if max(abs(low), abs(high)) < 1e5 else f"{name} = [{low:.0f}, {high:.0f}]"
            for name, (low, high) in spanned([row.kind for row in group]).sizes.items()
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def servers_text(rows: Sequence[Row]) -> str:
    """The part of the data file that tells of servers: signed errors of each output, least and greatest."""
    groups: dict[tuple[str, ...], list[tuple[Kind, Row]]] = {}
    for row in rows:
        arrivals, read, written = zip(*row.record.inputs["requests"], strict=True)
        load = Load.of(arrivals, [sum(both) for both in zip(read, written, strict=True)])
        if load.requests_per_s == math.inf:  # all at once: no rate that others could be held against
            load = replace(load, requests_per_s=None)
        spec = served_spec(row.record.inputs)
        kind = server_kind(spec.group(), spec.gpu, load)
        groups.setdefault(tuple(kind.key[name] for name in KEY), []).append((kind, row))
    parts = []
    for key, group in sorted(groups.items(), key=lambda entry: entry[0]):
        lines = ["[[served]]", *(f"{name} = {json.dumps(value)}" for name, value in zip(KEY, key, strict=True))]
        lines += [f"rows = {len(group)}", f"files = {json.dumps(sorted({row.record.path.name for _, row in group}))}"]
        off: dict[str, list[float]] = {}
        for _, row in group:
            for name, share in _served_errors(row).items():
                off.setdefault(name, []).append(share)
        lines += ["[served.errors]", *(f"{name} = [{min(each):.4f}, {max(each):.4f}]" for name, each in off.items())]
        sizes = {**spanned([kind for kind, _ in group]).sizes}
        sizes |= {name: (0.0, sizes[name][1]) for name in LOAD_SIZES}  # less is nearer to the lone steps
        lines += ["[served.sizes]", *(f"{name} = [{low:.6g}, {high:.6g}]" for name, (low, high) in sizes.items())]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _served_errors(row: Row) -> dict[str, float]:
    assert row.predicted is not None and row.predicted.served is not None
    seen, said = row.measured["served"], row.predicted.served
    found = {name: said[f"{name}_s"] / seen[f"{name}_s"] - 1.0 for name in OUTPUTS if name != "energy"}
    energy = row.error("energy_j")
    return found if energy is None else {**found, "energy": energy}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m sim.studies.checked_runs", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="the TOML file to write")
    arguments = parser.parse_args(argv)

    def write() -> None:
        paths = [path for folder in arguments.folders for path in record_files(folder)]
        rows = list(rows_of(paths))
        whole = sorted({row.record.path for row in rows})
        served = [path for path in paths if any(one.kind == "engine_serve" for one in read_records(path))]
        predicted = {row.record.digest: row for row in validate(sorted({*whole, *served}))}
        servers = [row for row in predicted.values() if row.record.kind == "engine_serve" and row.predicted is not None]
        text = f"{text_of(rows, list(predicted.values()))}\n{servers_text(servers)}"
        write_atomically(arguments.out, text.encode())
        print(f"{len(rows)} rows of {len(whole)} files in {len(grouped(rows))} kinds, {len(servers)} servers")

    return exit_code("checked_runs", write)


if __name__ == "__main__":
    sys.exit(main())
