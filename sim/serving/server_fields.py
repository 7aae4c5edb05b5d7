"""The fields of a server and its traffic: names, bounds, defaults, and what each says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hardware.sampling import Sampling
from sim.scenario.adapters import LORA_RANK, LORA_TARGETS, LoraRank, LoraTargets
from sim.scenario.field_table import (
    CacheType,
    Degree,
    DispatchType,
    FieldTable,
    GpuName,
    ModelName,
    Positive,
    RunType,
    WeightType,
)
from sim.scenario.partition import pairs
from sim.scenario.speculation import ACCEPTANCE, DRAFT_MODEL, DRAFT_TOKENS, DRAFTER, Acceptance, Drafter, DraftTokens
from sim.serving.host import Host
from sim.serving.inflight import Preemption
from sim.serving.price import Schedule
from sim.serving.requests import Law, checked_popularity
from sim.serving.router import Policy
from sim.serving.scale import Measure

Room = Annotated[float, Field(gt=0, le=1e9)]


class ServerFields(FieldTable):
    """What may be said of a server; :class:`sim.serving.spec.ServeSpec` says what it means together."""

    model: ModelName = Field(description="model id (wattline models), .toml file or Hugging Face config.json")
    gpu: GpuName = Field("h100-sxm-80gb", description="GPU id (wattline gpus), its unique beginning, or .toml file")
    profile: str | None = Field(None, description="profile of your own (wattline calibrate) [default: the shipped one]")
    node: str | None = Field(None, description="node type: hgx-8, mesh-4, pcie-8 or a .toml file [default: by GPU]")
    tp: Degree = Field(1, description="tensor-parallel degree of a replica")
    ep: Degree = Field(1, description="expert-parallel degree of a replica")
    cp: Degree = Field(
        1, description="context-parallel degree of a replica: ranks that share a prompt's tokens, and the KV cache"
    )
    cp_mode: Literal["all_gather", "ulysses"] = Field(
        "all_gather",
        description="all_gather: ranks of cp hold the cache token by token, new keys are gathered; ulysses: by heads, "
        "which are exchanged for tokens",
    )
    dcp: Degree = Field(
        1, description="ranks inside tp, with the same KV heads, that share out the tokens of the cache (decoding)"
    )
    pp: Degree = Field(1, description="pipeline stages of a replica, each with a batch of its own in flight")
    pp_batches: Literal["natural", "even"] = Field(
        "natural",
        description="natural: a request joins the batch that is planned next, as in vLLM, however full; even: a batch "
        "holds max_num_seqs / pp at most",
    )
    ep_mode: Literal["all_reduce", "all_to_all"] | None = Field(
        None, description="how experts on several ranks meet their tokens: all_to_all, or as TP does (needed with ep)"
    )
    ep_kernels: Literal["low_latency", "normal"] | None = Field(
        None, description="kernels that take tokens to experts in ep_mode all_to_all [default: the library's]"
    )
    dispatch_dtype: DispatchType | None = Field(
        None, description="type that ep_kernels send tokens in [default: as experts read them]"
    )
    network: str | None = Field(None, description="switches between nodes, or a .toml file [default: one-switch]")
    placement: Literal["packed", "spread"] = Field(
        "packed", description="consecutive nodes under one leaf switch, or under different ones"
    )
    ecmp_seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the hash that routes streams (ecmp)")
    layers: Positive | None = Field(None, description="the model's first layers alone [default: all]")
    replicas: Degree = Field(1, description="replicas that serve whole requests (decode, where others prefill)")
    prefill_replicas: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="replicas for prompts alone, whose KV cache then moves to one of the others"
    )
    prefill_tp: Degree | None = Field(None, description="tensor-parallel degree of prefill replicas [default: tp]")
    prefill_ep: Degree | None = Field(None, description="expert-parallel degree of prefill replicas [default: ep]")
    prefill_cp: Degree | None = Field(None, description="context-parallel degree of prefill replicas [default: cp]")
    sm_partition: Annotated[tuple[tuple[str, Positive], ...], BeforeValidator(pairs)] | None = Field(
        None,
        description="SMs of each GPU for prompts and for decoding, side by side: prefill=64,decode=68 [default: each "
        "step has all SMs]",
    )
    dtype: RunType = Field(
        "bf16", description="type of what is not quantised; below 16 bit, what products of weights read and hold"
    )
    weight_dtype: WeightType | None = Field(
        None,
        description="how weights are stored: int4_g128, fp8_e4m3_block128, nvfp4, ... [default: as in the checkpoint, "
        "else dtype]",
    )
    kv_dtype: CacheType | None = Field(
        None, description="type of the KV cache [default: the checkpoint's, else 16 bit]"
    )
    stack: str | None = Field(
        None,
        description="what a serving stack makes of the model [default: vllm where its kernels are known for the model, "
        "else paged-kv]",
    )
    power_cap_w: Annotated[float, Field(gt=0, le=10_000)] | None = Field(None, description="power limit of each GPU")
    prefill_power_cap_w: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None, description="power limit while a step holds prompts; of prefill replicas, if any [default: power_cap_w]"
    )
    fleet_power_w: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None, description="power budget of all GPUs together, whose caps never add up to more"
    )
    fleet_policy: Literal["shift", "even"] = Field(
        "shift", description="watts go to replicas that their caps hold back, or stay where they are (fleet_power_w)"
    )
    fleet_look_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        1.0, description="time between two looks at who draws what (fleet_power_w)"
    )
    sm_clock_mhz: Annotated[float, Field(gt=0, le=10_000)] | None = Field(None, description="locked SM clock")
    prefill_sm_clock_mhz: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None,
        description="locked SM clock while a step holds prompts; of prefill replicas, if any [default: sm_clock_mhz]",
    )
    chip_temperature_c: Annotated[float, Field(ge=0, le=110)] | None = Field(
        None, description="temperature of the chips: warmer ones leak more [default: the profile's, of a loaded GPU]"
    )
    clock_policy: Literal["fixed", "slo"] = Field(
        "fixed", description="slo: before each step, the lowest clock that keeps slo_tpot_s (and slo_ttft_s)"
    )
    clock_hold_s: Annotated[float, Field(ge=0, le=60)] = Field(
        0.1, description="clock_policy slo: a clock falls so long after its last change at the earliest"
    )
    sampling: Sampling = Field("greedy", description="how tokens are drawn from the logits; top_p sorts them")
    attention: Schedule = Field(
        "balanced",
        description="how decode attention spreads over SMs: long sequences cut up (flash-attention 3, FlashInfer), or "
        "per_sequence, where a step waits for the longest context (flash-attention 2)",
    )
    speculation: Drafter | None = Field(None, description=DRAFTER)
    draft_model: ModelName | None = Field(None, description=DRAFT_MODEL)
    draft_tokens: DraftTokens = Field(3, description=DRAFT_TOKENS)
    acceptance: Acceptance | None = Field(None, description=ACCEPTANCE)
    lora_adapters: Annotated[int, Field(ge=0, le=100_000)] = Field(
        0, description="low-rank adapters (LoRA) in the host's memory, which requests ask for"
    )
    max_loras: Annotated[int, Field(gt=0, le=4096)] = Field(
        1, description="adapters that a step may ask for, and slots in GPU memory"
    )
    max_lora_rank: LoraRank = Field(16, description=LORA_RANK)
    lora_targets: LoraTargets | None = Field(None, description=LORA_TARGETS)
    lora_popularity: Annotated[str, AfterValidator(checked_popularity)] = Field(
        "uniform", description="how requests choose adapters: uniform, or zipf:S"
    )
    lora_share: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of requests that ask for an adapter, others for the model alone"
    )
    launch: Literal["graph", "eager"] = Field("graph", description="eager: the host issues every kernel of every step")
    host: Host = Field(
        "stack",
        description="what the engine's host adds to each step, while GPUs idle; stack: what is known of the stack's",
    )
    captured_tokens: Positive | None = Field(
        None, description="largest step with prompts whose pieces are CUDA graphs [default: the engine's]"
    )
    host_ms: Annotated[float, Field(ge=0, le=1000)] = Field(0.0, description="more host time before each step")
    host_pace: Annotated[float, Field(ge=0.1, le=10)] = Field(
        1.0, description="launches of the stack's host take so many times as long as on the machines measured"
    )

    trace: Path | None = Field(None, description="requests of a file: Azure CSV, Mooncake JSONL, or a plain CSV")
    trace_block_tokens: Positive | None = Field(
        None, description="tokens that a hash in a JSONL trace stands for (512 in Mooncake's, 16 in Bailian's)"
    )
    arrivals: Law = Field("poisson", description="law of the times between requests")
    rate_per_s: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="requests a second")
    burstiness: Annotated[float, Field(gt=0, le=1e4)] = Field(
        4.0, description="squared coefficient of variation of gamma arrivals"
    )
    concurrency: Positive | None = Field(None, description="closed loop: so many requests at any time")
    requests: Positive | None = Field(None, description="how many [default: 1000, or all of the trace]")
    input_tokens: Positive = Field(1024, description="mean tokens of a prompt")
    output_tokens: Positive = Field(256, description="mean tokens to generate")
    images: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="images of a request, encoded before its prompt and read in front of input_tokens of text"
    )
    image_width: Annotated[int, Field(gt=0, le=65_536)] | None = Field(
        None, description="pixels across an image [default: the model's usual one]"
    )
    image_height: Annotated[int, Field(gt=0, le=65_536)] | None = Field(
        None, description="pixels down an image [default: the model's usual one]"
    )
    length_spread: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0, description="coefficient of variation of both lengths (lognormal)"
    )
    time_scale: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="arrival times multiplied by")
    length_scale: Annotated[float, Field(gt=0, le=1e3)] = Field(1.0, description="token counts multiplied by")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of the draws of arrivals and lengths")

    max_num_seqs: Positive = Field(256, description="sequences in a batch at most")
    max_num_batched_tokens: Positive = Field(8192, description="tokens in a step at most")
    block_tokens: Positive = Field(16, description="tokens of a KV block")
    memory_share: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="share of GPU memory that may be used")
    kv_blocks: Positive | None = Field(None, description="KV blocks of a replica [default: what memory holds]")
    kv_host_gb: Room | None = Field(
        None, description="GB of host memory in which a replica keeps beginnings of prompts (traces with hashes)"
    )
    kv_disk_gb: Room | None = Field(None, description="GB of its node's disks in which a replica keeps what comes out")
    kv_remote_gb: Room | None = Field(
        None, description="GB of a store behind the network, which all replicas share, for what comes out of those"
    )
    kv_remote_gb_per_s: Room | None = Field(
        None, description="GB/s that the store sends, and takes [default: what the NICs carry]"
    )
    prefix_caching: bool = Field(True, description="keep and share KV blocks of equal beginnings (traces with hashes)")
    preemption: Preemption = Field("recompute", description="what becomes of a preempted sequence's memory")
    router: Policy = Field("least_loaded", description="which replica gets a request")

    autoscale: Measure | None = Field(
        None, description="replicas come and go by this share of what they take, up to --replicas"
    )
    autoscale_target: Annotated[float, Field(gt=0, le=10)] = Field(0.7, description="mean share that autoscale aims at")
    autoscale_look_s: Annotated[float, Field(gt=0, le=3600)] = Field(15.0, description="time between two looks")
    autoscale_calm_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        300.0, description="replicas go once so long a time has wanted fewer"
    )
    min_replicas: Degree = Field(1, description="replicas that autoscale always keeps")
    start_up_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        60.0, description="from switching a replica on, at idle power, until it serves"
    )

    slo_ttft_s: Annotated[float, Field(gt=0)] | None = Field(None, description="goodput: time to first token at most")
    slo_tpot_s: Annotated[float, Field(gt=0)] | None = Field(None, description="goodput: time per output token at most")
