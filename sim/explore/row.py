"""One row of a sweep: the full scenario, and every figure of its run, as plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sim.errors import ScenarioError
from sim.result.rates import J_PER_WH, generation, row_of, times
from sim.result.timeline import Timeline
from sim.scenario.spec import Scenario

FAMILIES = ("gemm", "attention", "elementwise", "communication", "idle")

# Columns known before a run, for conditions.
FIELDS = frozenset(Scenario.model_fields) | {"world"}
# Columns that a run adds.
RESULTS = frozenset(
    {
        "status",
        "status_reasons",
        "latency_s",
        "energy_j",
        "tokens",
        "requests",
        "energy_j_per_token",
        "energy_j_per_request",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "tokens_per_s_per_user",
        "tokens_per_s_per_w",
        "energy_wh_per_token",
        "energy_wh_per_request",
        "mfu",
        "mfu_at_clock",
        "mbu",
        "flops_per_hbm_byte",
        "memory_need_bytes_per_gpu",
        "memory_room_bytes_per_gpu",
        "power_w_per_gpu",
        "sm_clock_hz",
        "exposed_communication_s",
        "bubble_s",
        "ttft_s",
        "tpot_s",
        "prefill_energy_j",
        "decode_energy_j",
        *(f"energy_j_{family}" for family in FAMILIES),
    }
)
# Columns that a run with intervals adds: what 90 % of such runs should lie within (s, J).
INTERVALS = ("latency_s_low", "latency_s_high", "energy_j_low", "energy_j_high")


def row_id(fields: Mapping[str, Any]) -> str:
    """A name for the scenario that ``fields`` describe: the same whatever defaults were written out.

    >>> row_id({"model": "llama3-8b"}) == row_id({"model": "llama3-8b", "batch": 1})
    True
    """
    return hashlib.sha256(json.dumps(full(fields), sort_keys=True).encode()).hexdigest()[:20]


def full(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the scenario, defaults filled in, and its number of GPUs (``world``), as plain JSON values.

    Fields that make no valid scenario keep what was written.
    """
    try:
        scenario = Scenario.parse(fields, where="scenario")
    except ScenarioError:
        defaults = {name: f.get_default() for name, f in Scenario.model_fields.items() if not f.is_required()}
        return {**defaults, **fields, "world": None}
    return full_of(scenario)


def full_of(scenario: Scenario) -> dict[str, Any]:
    """Every field of ``scenario`` and its number of GPUs, as plain JSON values."""
    return scenario.model_dump(mode="json") | {"world": scenario.world}


def interval_figures(run: Timeline) -> dict[str, float]:
    """The columns of INTERVALS."""
    from sim.explore.uncertainty import intervals  # the engine is not needed by whoever only reads a table

    found = intervals(run)
    return dict(zip(INTERVALS, (*found.latency_s, *found.energy_j), strict=True))


def figures(run: Timeline) -> dict[str, Any]:
    """The figures of a run (s, J, W, Hz; energies over all GPUs unless named per GPU)."""
    scenario, standing, latency_s, energy_j = run.scenario, run.standing, run.latency_s, run.energy_j
    families = run.sums_by("family")
    per_request = {
        "prefill": scenario.seq_len, "train": scenario.seq_len, "decode": 1, "generate": scenario.output_len or 1,
        "denoise": run.tokens // scenario.batch,
    }[scenario.phase]  # fmt: skip
    requests = run.tokens / per_request
    found: dict[str, Any] = {
        "status": standing.status,
        "status_reasons": "; ".join(standing.reasons) or None,
        "latency_s": latency_s,
        "energy_j": energy_j,
        "tokens": run.tokens,
        "requests": requests,
        "energy_j_per_token": energy_j / run.tokens,
        "energy_j_per_request": energy_j / requests,
        "tokens_per_s_per_w": run.tokens / energy_j,
        "energy_wh_per_request": energy_j / requests / J_PER_WH,
        **row_of(run),
        "power_w_per_gpu": sum(run.power_w_per_gpu) / run.gpus,
        "sm_clock_hz": sum(run.sm_clock_hz_per_gpu) / run.gpus,
        "exposed_communication_s": run.exposed_communication_s,
        "bubble_s": run.bubble_s,
        "ttft_s": None,
        "tpot_s": None,
        "prefill_energy_j": None,
        "decode_energy_j": None,
        **{f"energy_j_{family}": families.get(family, (0.0, 0.0))[0] for family in FAMILIES},
    }
    match scenario.phase:
        case "prefill":
            found |= {"ttft_s": latency_s, "prefill_energy_j": energy_j}
        case "decode":
            found |= {"tpot_s": times(run)["tpot_s"], "decode_energy_j": energy_j}
        case "generate":
            parts = generation(run)
            found |= {
                "ttft_s": parts["ttft_s"],
                "tpot_s": parts["tpot_s"],
                "prefill_energy_j": parts["energy_to_first_token_j"],
                "decode_energy_j": parts["decode_energy_j"],
            }
    return found
