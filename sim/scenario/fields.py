"""The fields of a scenario as keywords with types, for editors and type checkers; the scenario checks their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

Phase = Literal["prefill", "decode", "generate", "denoise", "train"]


class ScenarioFields(TypedDict, total=False):
    """Every field of :class:`~sim.scenario.spec.Scenario`, none required: a scenario may be given and changed."""

    model: str
    gpu: str
    profile: str | None
    node: str | None
    network: str | None
    placement: Literal["packed", "spread"]
    ecmp_seed: int
    phase: Phase
    batch: int
    seq_len: int
    output_len: int | None
    source_len: int | None
    images: int
    video: str | None
    steps: int | None
    guidance: Literal["none", "batch", "sequential", "parallel"]
    reuse: str | None
    layers: int | None
    lm_head: bool
    dtype: str  # a name of Scenario.dtype, or one that people use for it: bf16, fp8, bfloat16, ...
    weight_dtype: str | None
    kv_dtype: str | None
    stack: str
    tp: int
    ep: int
    ep_mode: Literal["all_reduce", "all_to_all"] | None
    ep_kernels: Literal["low_latency", "normal"] | None
    dispatch_dtype: str | None
    sequence_parallel: bool
    cp: int
    cp_mode: Literal["ulysses", "ring", "striped", "zigzag", "all_gather"]
    dcp: int
    ulysses: int | None
    pp: int
    micro_batches: int | None
    pp_schedule: Literal["gpipe", "1f1b"]
    dp: int
    all_reduce: Literal["library", "ring", "tree", "one_shot", "two_shot", "nvls", "auto"]
    expert_skew: float
    routing: str | None
    routing_seed: int
    expert_replicas: int | None
    tokens_per_ep_rank: Sequence[int] | None
    overlap: Literal["chunks", "ring_exchange", "tile_signal", "two_batch", "bulk"]
    overlap_chunks: int
    comm_ctas: int | None
    overlap_ops: Mapping[str, str | int | Mapping[str, int]] | str | None
    sm_margin: bool
    sm_partitions: Mapping[str, int] | str | None
    sm_partition: Mapping[int, str] | str | None
    speculation: Literal["draft_model", "eagle", "mtp", "ngram"] | None
    draft_model: str | None
    draft_tokens: int
    acceptance: Sequence[float] | None
    lora_adapters: int
    max_loras: int | None
    max_lora_rank: int
    lora_targets: tuple[str, ...] | str | None
    optimizer: Literal["adamw", "none"]
    sharding: Literal["ddp", "zero1", "zero2", "zero3"]
    accumulate: int
    launch: Literal["graph", "eager"]
    power_cap_w: float | None
    uncapped: bool
    sm_clock_mhz: float | None
    chip_temperature_c: float | None
    chip_power_factor: float | None
    regime: Literal["steady", "cold"]
    detail: Literal["auto", "full", "folded", "segment"]
    ignore_memory: bool
