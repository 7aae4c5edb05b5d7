"""Any scenario at all: one clear line, or a run of finite positive numbers whose parts sum to the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.errors import HardwareError
from sim import simulate
from sim.errors import SimError
from workloads import WorkloadError

MODELS = (
    "gpt2", "opt-1.3b", "bert-large", "vit-large", "nemotron-h-8b", "llava-1.5-7b", "qwen2-1.5b", "deepseek-v3",
    "mixtral-8x7b", "llama3-8b", "qwen3-30b-a3b",
)  # fmt: skip
ALWAYS: dict[str, tuple[Any, ...]] = {
    "model": MODELS, "layers": (1, 2, 3, 4), "batch": (1, 2, 4, 6, 8), "seq_len": (1, 7, 64, 512, 1024),
}  # fmt: skip
LAYOUT: dict[str, tuple[Any, ...]] = {
    "phase": ("prefill", "decode"), "tp": (1, 2, 4), "cp": (1, 2, 4), "pp": (1, 2, 4), "dp": (1, 2),
    "sequence_parallel": (False, True), "cp_mode": ("ulysses", "ring", "striped", "zigzag"),
    "overlap": ("chunks", "ring_exchange", "tile_signal", "two_batch", "bulk"), "overlap_chunks": (1, 2, 4),
    "comm_ctas": (0, 1, 8, 64), "micro_batches": (1, 2), "images": (0, 1), "expert_skew": (0.0, 2.0),
    "expert_replicas": (0, 2),
}  # fmt: skip
MACHINE: dict[str, tuple[Any, ...]] = {
    "gpu": ("h100", "h200", "a100-pcie-40gb", "b200", "l4"), "launch": ("graph", "eager"), "power_cap_w": (1, 100, 400),
    "sm_clock_mhz": (210, 345, 1410), "chip_temperature_c": (0, 110), "regime": ("steady", "cold"),
    "dtype": ("bf16", "fp8_e4m3", "int8", "fp32"), "weight_dtype": ("int4_g128", "nvfp4", "fp8_e4m3_block128"),
    "kv_dtype": ("fp8_e4m3", "int8"), "stack": ("reference-torch", "eager-torch"), "ignore_memory": (True,),
    "all_reduce": ("library", "tree", "two_shot", "auto"), "uncapped": (False, True),
}  # fmt: skip
EXPERTS = (
    {},
    {"ep": 2, "ep_mode": "all_to_all"},
    {"ep": 4, "ep_mode": "all_to_all"},
    {"ep": 2, "ep_mode": "all_reduce"},
)


def _chosen(fields: dict[str, tuple[Any, ...]]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(values) for name, values in fields.items()}


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """The default of most fields, so that a good part of them runs."""
    fields = draw(st.fixed_dictionaries(_chosen(ALWAYS)))
    for others in (LAYOUT, MACHINE):
        for name in draw(st.lists(st.sampled_from(sorted(others)), max_size=3, unique=True)):
            fields[name] = draw(st.sampled_from(others[name]))
    return fields | draw(st.sampled_from(EXPERTS))


@settings(max_examples=150, derandomize=True)
@given(scenarios())
def test_a_scenario_runs_or_says_in_one_line_why_not(fields: dict[str, Any]) -> None:
    try:
        run = simulate(**fields)
    except (SimError, WorkloadError, HardwareError) as error:
        assert "\n" not in str(error) and 10 < len(str(error)) < 300
        return
    assert math.isfinite(run.latency_s) and run.latency_s > 0.0
    assert math.isfinite(run.energy_j) and run.energy_j > 0.0
    for by in ("kernel", "phase", "family"):
        assert math.fsum(run.energy_by(by)["energy_j"]) == pytest.approx(run.energy_j, rel=1e-9)
    assert (run.power["duration_s"] >= 0.0).all() and (run.power["power_w"] > 0.0).all()
    assert (run.kernels["end_s"] >= run.kernels["start_s"]).all()
    assert 0.0 <= run.exposed_communication_s <= run.latency_s
    if run.gpus > 1 or fields["layers"] > 1:
        whole = simulate(**fields | {"detail": "full"})
        assert run.latency_s == pytest.approx(whole.latency_s, rel=1e-6)
        assert run.energy_j == pytest.approx(whole.energy_j, rel=1e-6)
