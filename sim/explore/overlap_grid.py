"""The grid of an overlap study: its axes, a file of one, and the schedules that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import workloads
from sim.errors import ScenarioError
from sim.explore.operators import in_sequence, sequential_fields
from sim.explore.overlap import transform
from sim.scenario.field_table import read_mapping
from sim.scenario.machine import machine_of
from sim.scenario.spec import Scenario

# Axes of the grid and what stands for one that nobody gives.
AXES: dict[str, Sequence[Any]] = {
    "tp": (2, 4),
    "batch": (2,),
    "overlap": ("chunks",),
    "sm_margin": (False,),
    "comm_ctas": (2, 4, 8, 16, 32),
    "overlap_chunks": (1, 2, 4, 8),
}
# An axis that is no field of a scenario: SMs of a partition for communication, the others to compute; 0: no partitions.
COMM_SMS = "comm_sms"


def read_grid(path: Path) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """``[base]`` and ``[grid]`` of a .toml or .json file: fields of a scenario, and lists of their values."""
    data = read_mapping(path)
    for key in data:
        if key not in ("base", "grid"):
            raise ScenarioError(f"unknown key '{key}' in {path}: a grid has two tables, [base] and [grid]")
    base, grid = (data.get(name, {}) for name in ("base", "grid"))
    for name, table in (("base", base), ("grid", grid)):
        if not isinstance(table, dict):
            raise ScenarioError(f"{path}: {name} = {table!r}: give a [{name}] table")
    for axis, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ScenarioError(f"{path}: grid.{axis} = {values!r}: give a list of values")
    return base, grid


def scenarios(base: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[Scenario]:
    """The product of the grid over ``base``, each schedule once.

    Prefill, sequence-parallel without a head where ``base`` does not say otherwise; for a mixture of experts
    ``tp`` is the size of the group whose ranks hold the experts.
    """
    if "model" not in base:
        raise ScenarioError("overlap study: model is missing: give a value")
    experts = workloads.load_model(str(base["model"])).experts > 0
    prompt = base.get("phase", "prefill") == "prefill"
    usual = {"phase": "prefill", "lm_head": False, "sequence_parallel": prompt and not experts, **base}
    defaults = AXES | {"overlap_chunks": (1,)} if experts else AXES  # exchanges of experts are not cut
    axes = {field: values for field, values in defaults.items() if field not in base} | dict(grid)
    if COMM_SMS in axes and "sm_partitions" in usual | axes:
        raise ScenarioError(f"overlap study: {COMM_SMS} makes the sm_partitions: give one of them")
    found: dict[Scenario, None] = {}
    for values in product(*axes.values()):
        fields = usual | dict(zip(axes, values, strict=True))
        if str(fields.get("tp", 1)) == str(fields.get("ep", 1)) == "1":
            raise ScenarioError("an overlap study needs TP or EP of at least 2: one GPU has nothing to communicate")
        match fields.get("overlap"):
            case "tile_signal" if fields.get("overlap_chunks") == 1:
                continue
            case "tile_signal":
                fields["sm_margin"] = False  # has it in any case
            case "ring_exchange":
                fields |= {"sm_margin": False, "overlap_chunks": 1}
            case "two_batch" | "bulk":
                fields["overlap_chunks"] = 1
            case _ if fields.get("overlap_chunks") == 1:
                fields["sm_margin"] = False
        if experts:
            fields["ep"] = fields["tp"]
            fields.setdefault("ep_mode", "all_to_all")
            fields["tp"] = fields["ep"] if fields["ep_mode"] == "all_reduce" else 1
            _check_cut(fields)
        one = _split(fields)
        found[one] = None
        if transform(one) == "as the model says":
            found[_split(fields | sequential_fields(one))] = None
    return list(found)


def _check_cut(fields: Mapping[str, Any]) -> None:
    """Refuse pieces of exchanges between experts, which are sent whole."""
    chunks = fields.get("overlap_chunks", 1)
    if fields.get("overlap", "chunks") == "chunks" and chunks != 1 and fields["tp"] == 1:
        raise ScenarioError(
            f"overlap study: chunks = {chunks} of {fields['model']}: its {fields['ep']} ranks hold experts, whose "
            "all-to-alls are not cut: give --overlap two_batch, or --ep-mode all_reduce"
        )


def _split(fields: dict[str, Any]) -> Scenario:
    """The scenario of ``fields``, SMs split as :data:`COMM_SMS` says; in sequence all is one stream, and unsplit."""
    sms = fields.pop(COMM_SMS, 0)
    scenario = Scenario.parse(fields, where="overlap study")
    if sms == 0 or in_sequence(scenario):
        return scenario
    all_sms = machine_of(scenario).gpu.sms
    if not isinstance(sms, int) or not 0 < sms < all_sms:
        raise ScenarioError(f"overlap study: {COMM_SMS} = {sms!r}: the GPU has {all_sms} SMs, give 0 to {all_sms - 1}")
    parts = {"compute": all_sms - sms, "comm": sms}
    return Scenario.parse({**fields, "sm_partitions": parts}, where="overlap study")
