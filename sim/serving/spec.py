"""What to serve and on what: the scenario of a server, in the spellings of every scenario."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

import workloads
from hardware.sampling import Sampling
from sim.errors import ScenarioError
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
from sim.scenario.layout import layout_of
from sim.scenario.partition import pairs
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.speculation import (
    ACCEPTANCE,
    DRAFT_MODEL,
    DRAFT_TOKENS,
    DRAFTER,
    SPECULATION_FIELDS,
    Acceptance,
    Drafter,
    DraftTokens,
    acceptances,
    check_speculation,
)
from sim.serving.host import Host
from sim.serving.inflight import Preemption
from sim.serving.price import Schedule
from sim.serving.request_files import read_traffic
from sim.serving.requests import Law, Traffic, arrivals, lengths, made, scaled
from sim.serving.router import Policy
from sim.serving.scale import Measure

DEFAULT_STACK = "vllm"
Room = Annotated[float, Field(gt=0, le=1e9)]

# Fields that a measured kind of server or its sizes hold, its load (Poisson arrivals, lengths of any kind), what the
# measured ones varied, and what changes no number. Any other that is not its default asks for what no server did.
MEASURED = frozenset(
    {
        "model", "gpu", "tp", "ep", "ep_mode", "dtype", "weight_dtype", "kv_dtype", "stack", "launch", "power_cap_w",
        "sm_clock_mhz", "chip_temperature_c", "captured_tokens", "trace", "trace_block_tokens", "rate_per_s",
        "requests", "input_tokens", "output_tokens", "length_spread", "time_scale", "length_scale", "seed",
        "prefix_caching", "slo_ttft_s", "slo_tpot_s",
    }
)  # fmt: skip


TIER_FIELDS = ("kv_host_gb", "kv_disk_gb", "kv_remote_gb")


class ServeSpec(FieldTable):
    """A server and its traffic. Unknown keys are refused with the nearest known one.

    >>> ServeSpec.of(model="llama3-8b", rate_per_s=4.0, requests=100).gpus
    1
    """

    model: ModelName = Field(description="model id (wattline models), .toml file or Hugging Face config.json")
    gpu: GpuName = Field("h100-sxm-80gb", description="GPU id (wattline gpus), its unique beginning, or .toml file")
    profile: str | None = Field(None, description="profile of your own (wattline calibrate) [default: the shipped one]")
    node: str | None = Field(None, description="node type: hgx-8, mesh-4, pcie-8 or a .toml file [default: by GPU]")
    tp: Degree = Field(1, description="tensor-parallel degree of a replica")
    ep: Degree = Field(1, description="expert-parallel degree of a replica")
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
    replicas: Degree = Field(1, description="replicas that serve whole requests (decode, where others prefill)")
    prefill_replicas: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="replicas for prompts alone, whose KV cache then moves to one of the others"
    )
    prefill_tp: Degree | None = Field(None, description="tensor-parallel degree of prefill replicas [default: tp]")
    prefill_ep: Degree | None = Field(None, description="expert-parallel degree of prefill replicas [default: ep]")
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
    launch: Literal["graph", "eager"] = Field("graph", description="eager: the host issues every kernel of every step")
    host: Host = Field(
        "stack",
        description="what the engine's host adds to each step, while GPUs idle; stack: what is known of the stack's",
    )
    captured_tokens: Positive | None = Field(
        None, description="largest step with prompts whose pieces are CUDA graphs [default: the engine's]"
    )
    host_ms: Annotated[float, Field(ge=0, le=1000)] = Field(0.0, description="more host time before each step")

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

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.replicas * self._world(prefill=False) + self.prefill_replicas * self._world(prefill=True)

    def gpus_of(self, replica: int) -> int:
        """GPUs of a replica by its number; those for prompts come first."""
        return self._world(prefill=replica < self.prefill_replicas)

    def _degrees(self, *, prefill: bool) -> tuple[int, int]:
        """Tensor and expert parallel degrees of a replica."""
        return ((self.prefill_tp or self.tp), (self.prefill_ep or self.ep)) if prefill else (self.tp, self.ep)

    def _world(self, *, prefill: bool) -> int:
        return max(self._degrees(prefill=prefill)) * self.pp

    @property
    def roles(self) -> str:
        """How many replicas of which degree play which part."""
        stages = f" pp {self.pp}" if self.pp > 1 else ""
        if not self.prefill_replicas:
            return f"{self.replicas} x tp {self.tp}{stages}"
        if self._degrees(prefill=True) == self._degrees(prefill=False):
            return f"{self.prefill_replicas} for prompts + {self.replicas} for decoding, tp {self.tp}{stages} each"
        (first, first_ep), (tp, ep) = self._degrees(prefill=True), self._degrees(prefill=False)
        prompts, decoding = (f"tp {t}" + f" ep {e}" * (e > 1) + stages for t, e in ((first, first_ep), (tp, ep)))
        return f"{self.prefill_replicas} x {prompts} for prompts + {self.replicas} x {decoding} for decoding"

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """What this server does that none did which was measured: fields that are not their defaults."""
        fields = ((name, field) for name, field in type(self).model_fields.items() if name not in MEASURED)
        return tuple(f"{name} = {value}" for name, field in fields if (value := getattr(self, name)) != field.default)

    @property
    def sides(self) -> int:
        """Steps that a GPU can run at once."""
        return 1 if self.sm_partition is None else len(self.sm_partition)

    @property
    def own_stack(self) -> str:
        """The stack that serves."""
        return self.stack or ("paged-kv" if self.stack_reason else DEFAULT_STACK)

    @cached_property
    def stack_reason(self) -> str:
        """Why the default stack does not run this model; empty where it does, or where a stack was named."""
        if self.stack is not None:
            return ""
        group = self._group("paged-kv", None, None)
        layout, model = layout_of(group), workloads.load_model(self.model)
        options = workloads.Options(stack=DEFAULT_STACK, precision=precision_of(group))
        try:
            for tp, ep in {self._degrees(prefill=False), self._degrees(prefill=self.prefill_replicas > 0)}:
                own = replace(layout, tp=tp, ep=ep, ep_mode=self.ep_mode)
                workloads.check_options(model, own, options)
                if self.draft_model is not None:
                    workloads.check_options(
                        workloads.load_model(self.draft_model), own, replace(options, precision=None)
                    )
        except workloads.WorkloadError as error:
            return str(error)
        return ""

    @property
    def phase_caps(self) -> bool:
        """True when the power cap of a replica changes with what it does."""
        return self.prefill_power_cap_w is not None and not self.prefill_replicas

    @model_validator(mode="after")
    def _consistent(self) -> ServeSpec:
        check_speculation(self, {name: field.default for name, field in type(self).model_fields.items()})
        each = 1 if self.speculation is None else self.draft_tokens + 1
        if self.max_num_seqs * each >= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens}: must exceed max_num_seqs = "
                f"{self.max_num_seqs}, {'a token' if each == 1 else f'{each} tokens'} for each and room for prompts"
            )
        if self.clock_policy == "slo" and self.speculation is not None:
            raise ValueError(
                f"clock_policy = slo is not known beside speculation = '{self.speculation}': leave one out"
            )
        if self.clock_policy == "slo" and self.slo_tpot_s is None:
            raise ValueError("clock_policy = slo: needs the objective to keep, slo_tpot_s")
        if self.pp_batches != "natural" and self.pp == 1:
            raise ValueError(f"pp_batches = {self.pp_batches}: is of batches in a pipeline: give pp of at least 2")
        beside = ("speculation", "fleet_power_w", *TIER_FIELDS)
        if self.pp > 1 and (named := [name for name in beside if getattr(self, name)]):
            raise ValueError(f"pp = {self.pp} is not known beside {named[0]}: leave one of them out")
        if self.clock_policy == "slo" and self.pp > 1:
            raise ValueError(f"pp = {self.pp} is not known beside clock_policy = slo: leave one of them out")
        if self.clock_policy == "slo" and self.sm_clock_mhz is not None:
            raise ValueError(f"sm_clock_mhz = {self.sm_clock_mhz:g} contradicts clock_policy = slo: give one of them")
        if self.kv_remote_gb_per_s is not None and self.kv_remote_gb is None:
            raise ValueError(f"kv_remote_gb_per_s = {self.kv_remote_gb_per_s:g}: is of a store: give kv_remote_gb")
        if not self.prefix_caching and (named := [name for name in TIER_FIELDS if getattr(self, name)]):
            raise ValueError(f"{named[0]} = {getattr(self, named[0]):g} contradicts prefix_caching = false")
        for name in ("prefill_tp", "prefill_ep"):
            if getattr(self, name) is not None and not self.prefill_replicas:
                raise ValueError(f"{name} = {getattr(self, name)}: is of replicas for prompts: give prefill_replicas")
        self._check_fleet()
        if self.autoscale is not None and self.prefill_replicas:
            raise ValueError(f"prefill_replicas = {self.prefill_replicas}: autoscale knows replicas of one kind only")
        if self.sm_partition is not None:
            self._check_sides(dict(self.sm_partition))
        if self.min_replicas > self.replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is more than replicas = {self.replicas}")
        if self.trace is not None and self.concurrency is not None:
            raise ValueError(f"concurrency = {self.concurrency} contradicts trace: a trace says when requests arrive")
        return self

    def _check_fleet(self) -> None:
        if self.fleet_power_w is None:
            for name in ("fleet_policy", "fleet_look_s"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} = {value}: is of a budget: give fleet_power_w")
            return
        for name in ("power_cap_w", "prefill_power_cap_w", "autoscale", "sm_partition"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name} = {value} is not known beside fleet_power_w: leave one of them out")
        if self.clock_policy == "slo":
            raise ValueError("clock_policy = slo is not known beside fleet_power_w: leave one of them out")

    def _check_sides(self, sms: dict[str, int]) -> None:
        text = ",".join(f"{name}={count}" for name, count in self.sm_partition or ())
        if sorted(sms) != ["decode", "prefill"] or len(self.sm_partition or ()) != 2:
            raise ValueError(f"sm_partition = {text}: give prefill and decode their SMs, like prefill=64,decode=68")
        others = {
            "prefill_replicas": self.prefill_replicas,
            "autoscale": self.autoscale,
            "prefill_power_cap_w": self.prefill_power_cap_w,
            "clock_policy": self.clock_policy if self.clock_policy != "fixed" else None,
            "launch": self.launch if self.launch != "graph" else None,
            "speculation": self.speculation,
            **{name: getattr(self, name) for name in TIER_FIELDS},
            "pp": self.pp if self.pp > 1 else None,
        }
        for name, value in others.items():
            if value:
                raise ValueError(f"{name} = {value} is not known beside sm_partition: leave one of them out")

    def group(self, *, prefill: bool = False, sm_clock_mhz: float | None = None) -> Scenario:
        """One replica's group of GPUs as a scenario; ``sm_clock_mhz`` locks the clock in place of the spec's own.

        A replica whose cap changes with what it does is described under the higher one.
        """
        cap_w, prefill_w = self.power_cap_w, self.prefill_power_cap_w
        if prefill and prefill_w is not None:
            cap_w = prefill_w
        elif self.phase_caps and cap_w is not None and prefill_w is not None:
            cap_w = max(cap_w, prefill_w)
        clock_mhz = self.sm_clock_mhz if sm_clock_mhz is None else sm_clock_mhz
        return self._group(self.own_stack, cap_w, clock_mhz, prefill=prefill)

    def _group(self, stack: str, cap_w: float | None, clock_mhz: float | None, *, prefill: bool = False) -> Scenario:
        tp, ep = self._degrees(prefill=prefill)
        shared: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "model", "gpu", "profile", "node", "network", "placement", "ecmp_seed", "dtype", "weight_dtype",
                "kv_dtype", "launch", "chip_temperature_c", *SPECULATION_FIELDS,
            )
        }  # fmt: skip
        if ep > 1 or self.prefill_ep is None:  # else another part's experts lie on several ranks, not this one's
            shared |= {name: getattr(self, name) for name in ("ep_mode", "ep_kernels", "dispatch_dtype")}
        return Scenario.of(
            phase="decode", stack=stack, tp=tp, ep=ep, pp=self.pp, power_cap_w=cap_w, sm_clock_mhz=clock_mhz, **shared
        )

    @property
    def chances(self) -> tuple[float, ...]:
        """The chance of each drafted token to pass where all before it did."""
        return acceptances(self)

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Refusals of a replica for prompts name the fields of the spec, not those of the scenario made of them."""
        try:
            yield
        except (ScenarioError, workloads.WorkloadError) as error:
            for name in ("tp", "ep", "power_cap_w"):
                mine = getattr(self, f"prefill_{name}")
                said = (f"{name} = {mine:g}", f"scenario: {name} = {mine:g}") if mine is not None else ()
                if mine != getattr(self, name) and str(error).startswith(said):
                    raise type(error)(str(error).replace(name, f"prefill_{name}", 1)) from None
            raise

    def traffic(self) -> Traffic:
        """The requests, in order of arrival; all at once in a closed loop, which spaces them by itself."""
        if self.trace is not None:
            found = read_traffic(self.trace, limit=self.requests, block_tokens=self.trace_block_tokens)
            return replace(found, requests=scaled(found.requests, time=self.time_scale, length=self.length_scale))
        count = self.requests or 1000
        if self.concurrency is not None:
            times = [0.0] * count
        else:
            times = arrivals(
                self.arrivals, rate_per_s=self.rate_per_s, count=count, burstiness=self.burstiness, seed=self.seed
            )
        inputs = lengths(self.input_tokens, count=count, spread=self.length_spread, seed=self.seed + 1)
        outputs = lengths(self.output_tokens, count=count, spread=self.length_spread, seed=self.seed + 2)
        drawn = made(times, inputs, outputs)
        return Traffic(requests=scaled(drawn, time=self.time_scale, length=self.length_scale))
