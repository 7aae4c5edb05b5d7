"""The scenario: one declarative description of a run, in four spellings (TOML, JSON, keywords, flags)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from sim.scenario.adapters import LORA_FIELDS, LORA_RANK, LORA_TARGETS, LoraRank, LoraTargets, check_adapters
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
from sim.scenario.fields import Phase
from sim.scenario.operators import check_operators, operators
from sim.scenario.partition import check_names, pairs
from sim.scenario.speculation import (
    ACCEPTANCE,
    DRAFT_MODEL,
    DRAFT_TOKENS,
    DRAFTER,
    SPECULATION_FIELDS,
    Acceptance,
    Drafter,
    DraftTokens,
    check_speculation,
)
from workloads.stack import STACKS


class Scenario(FieldTable):
    """What to run and on what. Unknown keys are refused with the nearest known one.

    ``seq_len`` is the input length in prefill and generate, the cached length in decode.

    >>> Scenario.of(model="llama3-8b", gpu="h100-sxm-80gb", batch=4).phase
    'prefill'
    >>> Scenario.of(model="llama3-8b", bathc=4)
    Traceback (most recent call last):
        ...
    sim.errors.ScenarioError: unknown key 'bathc' in scenario: did you mean 'batch'?
    """

    model: ModelName = Field(description="model id (wattline models), .toml file or Hugging Face config.json")
    gpu: GpuName = Field(
        "h100-sxm-80gb", description="GPU id (wattline gpus), its beginning, a MIG slice (h100:3g.40gb), .toml"
    )
    profile: str | None = Field(None, description="profile of your own (wattline calibrate) [default: the shipped one]")
    node: str | None = Field(None, description="node type: hgx-8, mesh-4, pcie-8 or a .toml file [default: by GPU]")
    network: str | None = Field(
        None,
        description="switches between nodes: one-switch, ib-ndr-rail, ib-ndr-fat-tree, roce-400g, roce-400g-1to7, "
        "slingshot-dragonfly or a .toml file [default: one-switch]",
    )
    placement: Literal["packed", "spread"] = Field(
        "packed", description="consecutive nodes under one leaf switch, or under different ones"
    )
    ecmp_seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the hash that routes streams (ecmp)")
    phase: Phase = Field(
        "prefill", description="a prompt, one step of decoding, both, denoising steps (video, images), a training step"
    )
    batch: Positive = Field(1, description="sequences")
    seq_len: Positive = Field(2048, description="input tokens (prefill, generate, train) or cached tokens (decode)")
    output_len: Positive | None = Field(None, description="tokens to generate (phase generate only)")
    source_len: Positive | None = Field(
        None, description="tokens that an encoder reads, a sequence [default: its own positions, else seq_len]"
    )
    images: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="images a sequence, encoded before a prefill; their tokens count in seq_len"
    )
    video: str | None = Field(None, description="WIDTHxHEIGHTxFRAMES, or WIDTHxHEIGHT (denoise) [default: seq_len]")
    steps: Annotated[int, Field(gt=0, le=10_000)] | None = Field(
        None, description="denoising steps [default: 50 of a video, else 1]"
    )
    guidance: Literal["none", "batch", "sequential", "parallel"] = Field(
        "none", description="the second branch of a denoising step: none, batched, after the first, on GPUs of its own"
    )
    reuse: str | None = Field(
        None,
        description="denoising steps that reuse the last residual: steps:1-10,13 (computed ones), rate:SHARE, or "
        "metric:FILE.csv,COLUMN,THRESHOLD",
    )
    layers: Positive | None = Field(None, description="layers to run; default all of the model")
    lm_head: bool = Field(True, description="the product that gives logits, after the last layer")
    dtype: RunType = Field(
        "bf16", description="type of what is not quantised; below 16 bit, what products of weights read and hold"
    )
    weight_dtype: WeightType | None = Field(
        None,
        description="how weights are stored: int4_g128, int4_g128_zero, fp8_e4m3, fp8_e4m3_block128, int8_channel, "
        "nvfp4, mxfp4, nf4, ... [default: as in the checkpoint, else dtype]",
    )
    kv_dtype: CacheType | None = Field(
        None, description="type of the KV cache [default: the checkpoint's, else 16 bit]"
    )
    stack: str = Field("reference-torch", description="what a serving stack makes of the model")
    tp: Degree = Field(1, description="tensor-parallel degree")
    ep: Degree = Field(1, description="expert-parallel degree")
    ep_mode: Literal["all_reduce", "all_to_all"] | None = Field(
        None, description="how experts on several ranks meet their tokens: all_to_all, or as TP does (needed with ep)"
    )
    ep_kernels: Literal["low_latency", "normal"] | None = Field(
        None,
        description="kernels (DeepEP's) that take tokens to experts in ep_mode all_to_all: for few tokens, or for many "
        "[default: the library's all-to-all]",
    )
    dispatch_dtype: DispatchType | None = Field(
        None, description="type that ep_kernels send tokens in [default: as experts read them]"
    )
    sequence_parallel: bool = Field(
        False, description="norms on a slice of the tokens: all-reduces become reduce-scatters and all-gathers"
    )
    cp: Degree = Field(1, description="context-parallel degree: ranks that share the tokens of a sequence")
    cp_mode: Literal["ulysses", "ring", "striped", "zigzag", "all_gather"] = Field(
        "ulysses",
        description="how attention meets tokens on other ranks: by an all-to-all, round a ring, or keys gathered",
    )
    dcp: Degree = Field(1, description="ranks of a tensor group that share out the tokens of the cache")
    ulysses: Degree | None = Field(
        None, description="degree of the Ulysses all-to-all: cp, or in phase denoise a divisor of it beside a ring"
    )
    pp: Degree = Field(1, description="pipeline stages")
    micro_batches: Degree | None = Field(
        None, description="parts of a replica's batch in the pipeline [default: as many as fill it, up to pp]"
    )
    pp_schedule: Literal["gpipe", "1f1b"] = Field("gpipe", description="order of micro-batches in the pipeline")
    dp: Degree = Field(1, description="independent replicas, each with batch / dp sequences")
    all_reduce: Literal["library", "ring", "tree", "one_shot", "two_shot", "nvls", "auto"] = Field(
        "library",
        description="all-reduce algorithm; library: as NCCL chooses, nvls: added in the switch, auto: by size, as "
        "serving engines choose",
    )
    expert_skew: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0, description="Zipf exponent of how tokens choose experts; 0: all alike"
    )
    routing: str | None = Field(
        None,
        description="how tokens choose experts: uniform, zipf:S, gini:G, busiest:SHARE,EXPERTS_FOR_90_PERCENT, or a "
        ".json or .csv file of rows by expert [default: zipf by expert_skew]",
    )
    routing_seed: Annotated[int, Field(ge=0)] = Field(20240601, description="seed of the draw of experts")
    expert_replicas: Annotated[int, Field(ge=0, le=4096)] | None = Field(
        None, description="copies of the busiest experts, all placed by expected load (0: placed, none copied)"
    )
    tokens_per_ep_rank: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="rows of each rank's experts, comma-separated, instead of a draw"
    )
    overlap: Literal["chunks", "ring_exchange", "tile_signal", "two_batch", "bulk"] = Field(
        "chunks", description="how communication runs beside compute"
    )
    overlap_chunks: Annotated[int, Field(gt=0, le=256)] = Field(
        1, description="pieces along tokens (chunks; tile_signal: groups of waves)"
    )
    comm_ctas: Annotated[int, Field(ge=0, le=128)] | None = Field(
        None, description="blocks for communication; 0: copy engines [default: the library's choice; ring_exchange: 0]"
    )
    overlap_ops: Annotated[tuple[tuple[str, str], ...], BeforeValidator(operators)] | None = Field(
        None, description="chunks x blocks of single operators: o_gemm=4x8,down_gemm=2x16 [default: one for all]"
    )
    sm_margin: bool = Field(False, description="matrix products leave the SMs of comm_ctas blocks free")
    sm_partitions: Annotated[tuple[tuple[str, Positive], ...], BeforeValidator(pairs)] | None = Field(
        None, description="SMs of each GPU split into named partitions: compute=116,comm=16 [default: one of all SMs]"
    )
    sm_partition: Annotated[tuple[tuple[Annotated[int, Field(ge=0)], str], ...], BeforeValidator(pairs)] | None = Field(
        None, description="partition of each stream: 0=compute,1=comm [default: the first of the first, and so on]"
    )
    speculation: Drafter | None = Field(None, description=DRAFTER)
    draft_model: ModelName | None = Field(None, description=DRAFT_MODEL)
    draft_tokens: DraftTokens = Field(3, description=DRAFT_TOKENS)
    acceptance: Acceptance | None = Field(None, description=ACCEPTANCE)
    lora_adapters: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="low-rank adapters (LoRA) that the sequences of a step ask for, all alike often"
    )
    max_loras: Annotated[int, Field(gt=0, le=4096)] | None = Field(
        None, description="adapters that the server has room for, asked for or not [default: lora_adapters]"
    )
    max_lora_rank: LoraRank = Field(16, description=LORA_RANK)
    lora_targets: LoraTargets | None = Field(None, description=LORA_TARGETS)
    optimizer: Literal["adamw", "none"] = Field("adamw", description="what steps the weights (phase train only)")
    sharding: Literal["ddp", "zero1", "zero2", "zero3"] = Field(
        "ddp", description="what replicas share out: nothing, or optimiser state, gradients, weights (phase train only)"
    )
    accumulate: Annotated[int, Field(gt=0, le=4096)] = Field(
        1, description="parts of the batch whose gradients are added up (phase train only)"
    )
    launch: Literal["graph", "eager"] = Field(
        "graph", description="kernels from a captured CUDA graph, or one by one from a host"
    )
    power_cap_w: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None, description="power limit of each GPU; default its TDP; 'inf' is spelled uncapped = true"
    )
    uncapped: bool = Field(False, description="no power limit at all: what a cap-blind simulator would say")
    sm_clock_mhz: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None, description="locked SM clock (the power cap may still lower it)"
    )
    chip_temperature_c: Annotated[float, Field(ge=0, le=110)] | None = Field(
        None, description="temperature of the chips: warmer ones leak more [default: the profile's, of a loaded GPU]"
    )
    chip_power_factor: Annotated[float, Field(ge=0.7, le=1.3)] | None = Field(
        None, description="power above idle of these chips over the profile's (wattline calibrate) [default: 1]"
    )
    regime: Literal["steady", "cold"] = Field(
        "steady", description="repeated until the power cap has settled, or one shot from a cool, idle GPU"
    )
    detail: Literal["auto", "full", "folded", "segment"] = Field(
        "auto", description="what is simulated: every rank and layer, equal ranks once, equal layers once too"
    )
    ignore_memory: bool = Field(False, description="simulate even what does not fit in GPU memory")

    @property
    def world(self) -> int:
        """Number of GPUs: a tensor or expert group for every context slice, pipeline stage, replica and branch."""
        branches = 2 if self.guidance == "parallel" else 1
        return max(self.tp, self.ep) * self.cp * self.pp * self.dp * branches

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        check_names(self.sm_partitions, self.sm_partition)
        check_operators(self.overlap_ops, tp=self.tp, others=self.overlap != "chunks" or self.overlap_chunks > 1)
        if self.phase == "denoise":
            return _check_denoise(self)
        if self.stack in VIDEO_STACKS[1:]:
            raise ValueError(f"stack = '{self.stack}' is for phase 'denoise', not '{self.phase}'")
        if self.phase != "train" and STACKS.get(self.stack) and STACKS[self.stack].framework is not None:
            raise ValueError(f"stack = '{self.stack}' is for phase 'train', not '{self.phase}'")
        defaults = self.defaults()
        for name in VIDEO_FIELDS:
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"{name} = {value!r} is for phase 'denoise', not '{self.phase}'")
        for name in () if self.phase == "train" else TRAINING_FIELDS:
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"{name} = {value!r} is for phase 'train', not '{self.phase}'")
        check_speculation(self, defaults)
        check_adapters(self, defaults, batch=self.batch)
        if self.lora_adapters and self.phase == "train":
            raise ValueError(f"lora_adapters = {self.lora_adapters} is for phases that serve, not 'train'")
        if self.speculation is not None and self.phase not in ("decode", "generate"):
            raise ValueError(f"speculation = '{self.speculation}' is for decode and generate, not '{self.phase}'")
        if self.phase == "generate" and self.output_len is None:
            raise ValueError("output_len is missing: phase 'generate' needs the number of tokens to generate")
        if self.phase != "generate" and self.output_len is not None:
            raise ValueError(f"output_len = {self.output_len} has no meaning in phase '{self.phase}': use 'generate'")
        if self.overlap_chunks > 1 and self.tp == 1:
            raise ValueError(
                f"overlap_chunks = {self.overlap_chunks} needs tp of at least 2: only its collectives can be cut"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tp of at least 2")
        if self.sequence_parallel and self.phase != "prefill":
            raise ValueError(f"sequence_parallel = true is for phase 'prefill', not '{self.phase}'")
        if self.uncapped and self.power_cap_w is not None:
            raise ValueError(f"uncapped = true contradicts power_cap_w = {self.power_cap_w:g}: give one of them")
        if self.ep > 1 and self.ep_mode is None:
            raise ValueError(f"ep = {self.ep} needs ep_mode: 'all_reduce' or 'all_to_all'")
        if self.ep == 1 and self.ep_mode is not None:
            raise ValueError(f"ep_mode = '{self.ep_mode}' needs ep of at least 2")
        if self.ep > 1 and self.ep_mode == "all_reduce" and self.tp not in (1, self.ep):
            raise ValueError(f"ep = {self.ep} with tp = {self.tp}: tp must be 1 or equal to ep in ep_mode 'all_reduce'")
        if self.ulysses not in (None, 1) and self.cp_mode != "ulysses":
            raise ValueError(f"ulysses = {self.ulysses} contradicts cp_mode = '{self.cp_mode}': give one of them")
        if self.phase not in ("prefill", "decode"):
            for name, there in (("cp_mode = 'all_gather'", self.cp_mode == "all_gather"), ("dcp", self.dcp > 1)):
                if there:
                    raise ValueError(f"{name} is for phase 'prefill' or 'decode' (or a server), not '{self.phase}'")
        if self.cp_mode not in ("ulysses", "all_gather") and self.phase not in ("prefill", "train"):
            raise ValueError(f"cp_mode = '{self.cp_mode}' is for phase 'prefill' or 'train', not '{self.phase}'")
        if self.ulysses not in (None, self.cp):
            raise ValueError(f"ulysses = {self.ulysses} with cp = {self.cp}: give cp = {self.ulysses}, or leave it out")
        if self.micro_batches is not None and self.micro_batches > 1 and self.pp == 1:
            raise ValueError(f"micro_batches = {self.micro_batches} needs pp of at least 2")
        if self.tokens_per_ep_rank is not None and len(self.tokens_per_ep_rank) != self.ep:
            raise ValueError(
                f"tokens_per_ep_rank has {len(self.tokens_per_ep_rank)} entries, ep is {self.ep}: one a rank"
            )
        if self.routing is not None and self.expert_skew:
            raise ValueError(f"routing = '{self.routing}' contradicts expert_skew = {self.expert_skew:g}: give one")
        return self


VIDEO_STACKS = ("reference-torch", *(name for name, stack in STACKS.items() if stack.of_diffusion))
TRAINING_FIELDS = ("optimizer", "sharding", "accumulate")
VIDEO_FIELDS = ("video", "steps", "guidance", "reuse")
# What a denoising step has no use for: anything but its default would silently run as something else.
NOT_OF_VIDEO = (
    "output_len", "source_len", "images", "lm_head", "dtype", "weight_dtype", "kv_dtype", "tp", "ep", "ep_mode",
    "ep_kernels", "dispatch_dtype", "dcp",
    "sequence_parallel", "pp", "micro_batches", "dp",
    "all_reduce", "expert_skew", "routing", "routing_seed", "expert_replicas", "tokens_per_ep_rank", "overlap",
    "overlap_chunks", "overlap_ops", "comm_ctas", "sm_margin", *SPECULATION_FIELDS, *LORA_FIELDS, "max_loras",
    *TRAINING_FIELDS,
)  # fmt: skip


def _check_denoise(scenario: Scenario) -> Scenario:
    for name in NOT_OF_VIDEO:
        if (value := getattr(scenario, name)) != Scenario.defaults()[name]:
            right = f"give batch = {value}" if name == "images" else "leave it out"
            raise ValueError(f"{name} = {value!r} has no meaning in phase 'denoise': {right}")
    if scenario.stack not in VIDEO_STACKS:
        raise ValueError(
            f"stack = '{scenario.stack}' has no meaning in phase 'denoise': give one of {', '.join(VIDEO_STACKS)}"
        )
    if scenario.video is not None and "seq_len" in scenario.model_fields_set:
        raise ValueError(f"seq_len = {scenario.seq_len} contradicts video = '{scenario.video}': give one of them")
    if scenario.cp_mode not in ("ulysses", "ring"):
        raise ValueError(f"cp_mode = '{scenario.cp_mode}' balances a causal mask, which phase 'denoise' has not: ring")
    ulysses = scenario.ulysses
    if ulysses is not None and (scenario.cp % ulysses or (scenario.cp_mode == "ulysses" and ulysses != scenario.cp)):
        raise ValueError(
            f"ulysses = {ulysses} with cp = {scenario.cp}: give cp = {ulysses}, or a multiple of it with "
            f"cp_mode = 'ring'"
        )
    return scenario
