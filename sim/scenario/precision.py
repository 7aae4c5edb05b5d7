"""What the operands of a run are stored as: the checkpoint's own types, unless the scenario says otherwise."""

from __future__ import annotations

import workloads
from hardware.catalog import load_gpu
from hardware.gpu import GpuSpec
from sim.scenario.spec import Scenario
from workloads.model import ModelSpec
from workloads.precision import Precision, resolve
from workloads.storage import storage


def precision_of(scenario: Scenario, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> Precision:
    """The precision of ``scenario`` on its GPU, whose tensor cores decide what a checkpoint's activations can be.

    >>> precision_of(Scenario.of(model="llama3-8b", weight_dtype="awq", kv_dtype="fp8")).words()
    'int4_g128_zero weights, bf16 activations, fp8_e4m3 KV cache'
    """
    model = model or workloads.load_model(scenario.model)
    return resolve(
        model.quantised,
        dtype=workloads.DType(scenario.dtype),
        weights=None if scenario.weight_dtype is None else storage(scenario.weight_dtype),
        kv=None if scenario.kv_dtype is None else workloads.DType(scenario.kv_dtype),
        multiplied=frozenset((gpu or load_gpu(scenario.gpu)).tensor_flops_per_s),
    )
