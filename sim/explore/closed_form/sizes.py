"""What a scenario's work amounts to, counted from the model's sizes: the inputs of the closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import workloads
from hardware.catalog import load_gpu
from sim.scenario.layout import layout_of
from sim.scenario.machine import machine_of
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from workloads.precision import Precision
from workloads.work import DType

REFERENCE = "h100-sxm-80gb"

BYTES = 2  # bf16: weights, activations, KV cache
TILE = 128  # rows of a tile of the grouped products of experts
# Kernels of a layer, as the stack runs it: a mixture of experts routes, gathers, scatters and sums; decode writes its
# keys and values.
KERNELS_PER_LAYER = 9
KERNELS_OF_EXPERTS = 4
KERNELS_OF_CACHE = 2
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """One pass (a prefill, or a decode step) over a layout. Quantities are of the whole batch, ranks' shares together.

    ``micro_batches`` parts of the batch go through ``pp`` stages; weights are read once for each part, which
    ``weight_bytes`` counts. ``attention`` counts FLOPs in prefill and bytes of the KV cache in decode. Of the bytes
    that elementwise kernels move, every rank of a tensor group repeats ``repeated_bytes`` (residual and norms) and
    the group shares ``shared_bytes`` (heads, feed-forward, rows of experts). ``link_bytes`` are what the two
    all-reduces of a layer reduce.

    ``per_...`` say what the machine and the operands' types make of the same work, over a 16-bit product on an H100 at
    its highest clock, from datasheets alone: time of a FLOP, of a byte, of attention's 16-bit FLOP or byte, of a byte
    between GPUs; joules of a FLOP (bits,
    and voltage squared); watts (the cards' limits).
    """

    gpus: int
    tp: int
    pp: int
    micro_batches: int
    layers: int
    kernels: int
    gemm_flops: float
    weight_bytes: float
    attention: float
    flops: float
    hbm_bytes: float
    repeated_bytes: float
    shared_bytes: float
    link_bytes: float
    per_flop: float = 1.0
    per_byte: float = 1.0
    per_attention: float = 1.0
    per_link_byte: float = 1.0
    per_joule: float = 1.0
    per_watt: float = 1.0

    @classmethod
    def of(cls, scenario: Scenario, phase: Phase) -> PassSizes:
        """Sizes of ``scenario``, whose ``seq_len`` is the input length in prefill, the cached length in decode.

        >>> sizes = PassSizes.of(Scenario.of(model="llama3-8b", phase="decode", tp=2, batch=4, seq_len=1000), "decode")
        >>> round(sizes.weight_bytes / 1e9, 1), sizes.attention  # 8.0e9 weights less the embedding; 1000 x 4 x 128 KiB
        (15.0, 524288000.0)
        """
        model = workloads.load_model(scenario.model)
        layout, precision = layout_of(scenario), precision_of(scenario, model)
        caching, mixing = model.caching(range(model.layers)), model.mixing(range(model.layers))
        narrow = precision.product.weights.bits / DType.BF16.bits
        new_tokens = scenario.seq_len if phase == "prefill" else 1
        tokens = scenario.batch * new_tokens
        head = model.vocab * model.d_model
        embeddings = head * (1 if model.tied_embeddings else 2)
        active = workloads.params(model, active=True) - embeddings
        stored = workloads.params(model) - embeddings
        at_once = tokens / layout.micro_batches
        read, rows_of_weights = float(stored), float(active * at_once)
        if model.experts:
            # Of the experts, a micro-batch reads those that at least one of its tokens chose; each of them pads
            # its rows to whole tiles.
            chosen = model.top_k / model.experts
            weights = (stored - active) / (model.experts - model.top_k)
            hit = model.experts * (1.0 - (1.0 - chosen) ** at_once)
            read -= weights * (model.experts - hit)
            padding = max(hit * TILE - model.top_k * at_once, hit * TILE / 2)
            rows_of_weights += weights * padding
        if phase == "prefill":
            # Causal: half of the square; two products of two FLOPs an element.
            heads = sum(count * one.q_heads * one.key_and_value / 2 for one, count in caching)
            attention = 2.0 * scenario.batch * scenario.seq_len**2 * heads
        else:
            cached = sum(count * one.cached_elements_per_token for one, count in caching)
            attention = float(scenario.batch * scenario.seq_len * cached * precision.kv.bytes)
            if model.state_space is not None:  # 32-bit states are read and written
                attention += 2.0 * DType.FP32.bytes * scenario.batch * mixing * model.state_space.cached_elements
        gemm_flops = 2.0 * (rows_of_weights * layout.micro_batches + head * scenario.batch)
        weight_bytes = (read * narrow + head) * BYTES * layout.micro_batches
        if model.vision is not None and phase == "prefill" and scenario.images:
            tower = workloads.params(model.vision.model)
            gemm_flops += 2.0 * tower * model.vision.patches * scenario.images * scenario.batch
            weight_bytes += float(tower * BYTES)
        rows = float(tokens * model.layers * BYTES)
        feed = model.d_ff * max(1, model.top_k) + model.shared_d_ff
        heads = (model.q_heads + model.kv_heads) * model.head_dim
        return cls(
            gpus=scenario.world,
            tp=max(scenario.tp, scenario.ep),
            pp=scenario.pp,
            micro_batches=layout.micro_batches,
            layers=model.layers,
            kernels=model.layers
            * layout.micro_batches
            * (
                KERNELS_PER_LAYER
                + (KERNELS_OF_EXPERTS if model.experts else 0)
                + (KERNELS_OF_CACHE if phase == "decode" else 0)
            ),
            gemm_flops=gemm_flops,
            weight_bytes=weight_bytes,
            attention=attention,
            flops=gemm_flops + (attention if phase == "prefill" else 0.0),
            hbm_bytes=weight_bytes + (attention if phase == "decode" else 0.0),
            # Twice a layer the residual sum and its norm: two arrays read, two written.
            repeated_bytes=8 * rows * model.d_model,
            # Rotary embedding reads and writes; gate and up are read, their product written; rows of experts are
            # gathered, and added up again.
            shared_bytes=rows * (2 * heads + 3 * feed + 4 * model.top_k * model.d_model),
            link_bytes=2 * rows * model.d_model,
            **_of_machine(scenario, precision, phase),
        )


def _of_machine(scenario: Scenario, precision: Precision, phase: Phase) -> dict[str, float]:
    """What the machine makes of the same work, from datasheets."""
    gpu, reference = machine_of(scenario).gpu, load_gpu(REFERENCE)
    clock_hz = min(scenario.sm_clock_mhz * 1e6 if scenario.sm_clock_mhz else gpu.max_clock_hz, gpu.max_clock_hz)
    multiplies = precision.product.multiplies
    slower = gpu.max_clock_hz / clock_hz
    peak = gpu.tensor_flops_per_s[multiplies.value]
    per_byte = reference.hbm_bytes_per_s / gpu.hbm_bytes_per_s
    wide = reference.tensor_flops_per_s["bf16"] / gpu.tensor_flops_per_s["bf16"] * slower
    return {
        "per_flop": reference.tensor_flops_per_s["bf16"] / peak * slower,
        "per_byte": per_byte,
        "per_attention": wide if phase == "prefill" else per_byte,
        "per_link_byte": reference.link_bytes_per_s / gpu.link_bytes_per_s if gpu.link_bytes_per_s else 1.0,
        # Below its highest clock a chip's voltage falls to about seven tenths (measured curves: hardware/data).
        "per_joule": multiplies.bits / DType.BF16.bits * (0.7 + 0.3 / slower) ** 2,
        "per_watt": gpu.tdp_w / reference.tdp_w * (0.7 + 0.3 / slower) ** 2,
    }
