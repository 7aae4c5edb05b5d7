"""A scenario is resolved once: its model, layout, precision, memory and machine are each derived by one call."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

import sim.run.runner
import sim.scenario.resolved
from sim import Scenario, simulate

# By module and function, the one place that derives each.
DERIVED = {
    "model": ("sim.scenario.video", "model_of"),
    "layout": ("sim.scenario.layout", "layout_of"),
    "precision": ("workloads.precision", "resolve"),
    "memory": ("sim.scenario.memory", "check_memory"),
    "machine": ("sim.scenario.machine", "machine_of"),
}
CASES: dict[str, dict[str, Any]] = {
    "prefill": {"model": "llama3-8b", "tp": 2, "layers": 2},
    "decode, folded": {"model": "llama3-70b", "tp": 4, "phase": "decode", "layers": 2, "detail": "folded"},
    "experts": {"model": "qwen3-30b-a3b", "ep": 2, "ep_mode": "all_to_all", "expert_skew": 0.5, "layers": 2},
    "generate": {"model": "llama3-8b", "phase": "generate", "output_len": 4, "layers": 2},
    "generate in buckets": {"model": "llama3-8b", "phase": "generate", "seq_len": 300, "output_len": 300, "layers": 1},
    "engine's host": {"model": "llama3-8b", "stack": "vllm", "batch": 4, "seq_len": 1024, "layers": 2},
    "cold": {"model": "llama3-8b", "regime": "cold", "layers": 1},
    "pipeline": {"model": "llama3-8b", "pp": 2, "batch": 4, "layers": 4},
    "ring": {"model": "llama3-8b", "cp": 2, "cp_mode": "ring", "layers": 2},
    "training": {"model": "llama3-8b", "phase": "train", "layers": 2},
    "adapters": {"model": "llama3-8b", "lora_adapters": 2, "batch": 4, "layers": 2},
    "one more layer drafts": {"model": "llama3-8b", "phase": "decode", "speculation": "mtp", "acceptance": (0.8,)},
    "own profile": {"model": "llama3-8b", "launch": "eager", "chip_power_factor": 1.02, "layers": 1},
}


def derivations(scenario: Scenario) -> Counter[str]:
    """How often each part was derived while ``scenario`` was simulated, with nothing of it remembered."""
    for cached in (sim.run.runner._plan, sim.run.runner._work, sim.run.runner._built, sim.scenario.resolved._resolved):
        cached.cache_clear()
    found: Counter[str] = Counter()
    names = {place: name for name, place in DERIVED.items()}

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            place = (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
            if place in names:
                found[names[place]] += 1

    sys.setprofile(count)
    try:
        simulate(scenario)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_part_of_a_scenario_is_derived_once(name: str) -> None:
    assert derivations(Scenario.of(**CASES[name])) == dict.fromkeys(DERIVED, 1)
