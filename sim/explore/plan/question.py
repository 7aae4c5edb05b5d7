"""What a plan is asked: a model, GPUs, lengths, targets and what to rank by; and what it answers, a deployment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from sim.errors import SimError
from sim.result.prices import Prices
from sim.scenario.field_table import Degree, FieldTable, GpuName, ModelName, Positive
from sim.serving.request_files import read_traffic
from sim.serving.spec import ServeSpec

Objective = Literal["throughput", "energy", "cost"]
Role = Literal["serve", "prefill", "decode"]
Mode = Literal["aggregated", "disaggregated"]
PowerCap = Annotated[float, Field(gt=0, le=10_000)]
PlanDtype = Literal["bf16", "fp16", "fp8_e4m3"]


def _listed(value: object) -> object:
    """A comma-separated text as a tuple; anything else is left for the field to refuse."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


@lru_cache(maxsize=8)
def _means(file: Path) -> tuple[float, float, float]:
    """Mean tokens of the prompts and of the answers of a file of requests, and its requests a second."""
    requests = read_traffic(file).requests
    if len(requests) < 2:
        raise SimError(f"{file}: {len(requests)} requests: a plan needs the load of several")
    count = len(requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    inputs, outputs = sum(r.input_tokens for r in requests), sum(r.output_tokens for r in requests)
    return inputs / count, outputs / count, count / span_s if span_s > 0 else math.inf


class Question(FieldTable):
    """What to plan for. Unknown keys are refused with the nearest known one.

    >>> Question.of(model="llama3-8b", gpus=2).objective
    'throughput'
    """

    model: ModelName = Field(description="model id (wattline models), .toml file or Hugging Face config.json")
    gpu: GpuName = Field("h100-sxm-80gb", description="GPU id (wattline gpus), its unique beginning, or .toml file")
    profile: str | None = Field(None, description="profile of your own (wattline calibrate) [default: the shipped one]")
    gpus: Degree = Field(8, description="GPUs, all of which are used by each deployment; with rate_per_s, at most")
    rate_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="requests a second to carry, on as few GPUs as do"
    )
    input_len: Positive = Field(2048, description="tokens of a prompt")
    output_len: Annotated[int, Field(gt=1, le=1_000_000)] = Field(256, description="tokens to generate")
    trace: Path | None = Field(
        None, description="requests of a file, as of wattline serve, in place of the lengths: planned at their means"
    )
    slo_ttft_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        None, description="time to first token at most, for 99 % of requests"
    )
    slo_tpot_s: Annotated[float, Field(gt=0, le=60)] | None = Field(
        None, description="time per output token at most, for 99 % of requests"
    )
    objective: Objective = Field("throughput", description="what deployments are ranked by, per GPU or token")
    modes: Annotated[tuple[Mode, ...], BeforeValidator(_listed)] = Field(
        get_args(Mode), description="prompts in the replicas that decode, or in replicas of their own"
    )
    dtypes: Annotated[tuple[PlanDtype, ...], BeforeValidator(_listed)] = Field(
        ("bf16",), description="precisions to try: another one changes what the model answers"
    )
    power_cap_w: PowerCap | None = Field(None, description="power limit of each GPU")
    power_caps_w: Annotated[tuple[PowerCap, ...], BeforeValidator(_listed)] = Field(
        (), description="power limits to try: 500,600,700"
    )
    max_num_seqs: Positive = Field(512, description="sequences of a replica at most")
    host_ms: Annotated[float, Field(ge=0, le=1000)] = Field(0.0, description="host time before each step")
    price_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="price of a GPU for an hour (objective cost needs it)"
    )
    price_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = Field(None, description="price of electricity")
    carbon_g_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="grams of CO2e a kWh of the grid"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_file(cls, data: Any) -> Any:
        """Lengths from the file of requests."""
        if not isinstance(data, dict) or data.get("trace") is None:
            return data
        if named := [name for name in ("input_len", "output_len") if data.get(name) is not None]:
            raise ValueError(f"{named[0]} = {data[named[0]]} contradicts trace: the file has the lengths")
        inputs, outputs, _ = _means(Path(data["trace"]))
        return {**data, "input_len": round(inputs), "output_len": max(2, round(outputs))}

    @model_validator(mode="after")
    def _consistent(self) -> Question:
        if self.power_cap_w is not None and self.power_caps_w:
            raise ValueError(f"power_cap_w = {self.power_cap_w:g} contradicts power_caps_w: give one of them")
        if self.objective == "cost" and self.price_per_gpu_hour is None:
            raise ValueError("objective = cost: needs price_per_gpu_hour")
        for name in ("modes", "dtypes"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give one or more")
        return self

    @property
    def prices(self) -> Prices:
        """What GPUs and electricity cost, and what the grid emits."""
        return Prices(
            price_per_gpu_hour=self.price_per_gpu_hour,
            price_per_kwh=self.price_per_kwh,
            carbon_g_per_kwh=self.carbon_g_per_kwh,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One way to serve, at the highest load that keeps the targets: ``load`` requests a second over all its GPUs.

    ``ttft_s`` and ``tpot_within_s`` are what 99 % of requests stay below, ``tpot_s`` is the mean, ``binds`` what a
    higher load would break first. Joules a token are over output tokens and all GPUs. ``spec`` are the fields of
    :class:`~sim.serving.spec.ServeSpec` that set it up.
    """

    question: Question
    mode: Mode
    spec: dict[str, Any]
    sequences: int  # decoding at once in a replica
    load_per_s: float
    ttft_s: float
    tpot_s: float
    tpot_within_s: float
    power_w_per_gpu: float
    binds: str
    status: str
    reasons: tuple[str, ...] = field(default=())

    def degrees(self, role: Role) -> dict[str, int]:
        """Tensor, expert and pipeline parallel degrees of a replica that plays ``role``, and over how many ranks the
        tokens of its cache are spread."""
        spec, first = self.spec, "prefill_" if role == "prefill" else ""
        found = {name: int(spec.get(first + name, spec.get(name, 1))) for name in ("tp", "ep", "pp")}
        return found | {"dcp": 1 if first else int(spec.get("dcp", 1))}

    def width(self, role: Role = "serve") -> int:
        """GPUs of a stage of a replica that plays ``role``."""
        degrees = self.degrees(role)
        return max(degrees["tp"], degrees["ep"])

    def group(self, role: Role = "serve") -> int:
        """GPUs of a replica that plays ``role``."""
        return self.width(role) * self.degrees(role)["pp"]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second over all GPUs."""
        return self.load_per_s * self.question.output_len

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens a second of a GPU."""
        return self.tokens_per_s / self.question.gpus

    @property
    def energy_j_per_token(self) -> float:
        """Joules of all GPUs an output token."""
        return self.power_w_per_gpu / self.tokens_per_s_per_gpu

    @property
    def cost_per_million_tokens(self) -> float | None:
        """GPU hours and energy of a million output tokens, in the unit of the prices; None without prices."""
        return self.question.prices.cost(1e6 * self.energy_j_per_token, 1e6 / self.tokens_per_s_per_gpu)

    @property
    def carbon_g_per_million_tokens(self) -> float | None:
        """Grams of CO2e of the energy of a million output tokens; None without a factor."""
        return self.question.prices.carbon_g(1e6 * self.energy_j_per_token)

    @property
    def rank(self) -> tuple[int, float]:
        """What is wanted least of: GPUs, where a load is to be carried, then what the objective says."""
        gpus = 0 if self.question.rate_per_s is None else self.question.gpus
        match self.question.objective:
            case "throughput":
                return gpus, -self.tokens_per_s_per_gpu
            case "energy":
                return gpus, self.energy_j_per_token
            case "cost":
                assert self.cost_per_million_tokens is not None
                return gpus, self.cost_per_million_tokens

    @property
    def label(self) -> str:
        """How a user would say it.

        >>> asked = Question.of(model="llama3-8b", gpus=2)
        >>> Deployment(
        ...     question=asked, mode="aggregated", spec={"tp": 1, "replicas": 2}, sequences=8, load_per_s=1.0,
        ...     ttft_s=0.1, tpot_s=0.01, tpot_within_s=0.01, power_w_per_gpu=500.0, binds="", status="unchecked",
        ... ).label
        '2 x tp 1, 8 sequences each'
        """
        spec = self.spec
        first, degrees = (
            " ".join(f"{name} {degree}" for name, degree in self.degrees(role).items() if degree > 1) or "tp 1"
            for role in get_args(Role)[1:]
        )
        extra = "".join(
            [
                f", {spec['dtype']}" if spec.get("dtype", "bf16") != "bf16" else "",
                f", {spec['sm_clock_mhz']:g} MHz" if spec.get("sm_clock_mhz") else "",
                f", {spec['power_cap_w']:g} W" if self.question.power_caps_w else "",
                f", {spec['max_num_batched_tokens']:,} tokens a step" if "max_num_batched_tokens" in spec else "",
            ]
        )
        who = f"{spec['replicas']} x {degrees}, {self.sequences} sequences each{extra}"
        if self.mode == "aggregated":
            return who
        return (
            f"{spec['prefill_replicas']} + {who}"
            if first == degrees
            else f"{spec['prefill_replicas']} x {first} + {who}"
        )

    @property
    def server(self) -> ServeSpec:
        """The server of this deployment, for :func:`sim.serving.serve`; requests of a file come at its load."""
        return ServeSpec.of(**self.served)

    @property
    def served(self) -> dict[str, Any]:
        """The fields of :attr:`server`."""
        file = self.question.trace
        if file is None:
            return self.spec
        drawn = ("rate_per_s", "input_tokens", "output_tokens")
        own = {name: value for name, value in self.spec.items() if name not in drawn}
        *_, rate_per_s = _means(file)
        return own | {"trace": str(file), "time_scale": rate_per_s / self.load_per_s}

    def row(self) -> dict[str, Any]:
        """Its figures, flat (SI units)."""
        return {
            "mode": self.mode,
            "label": self.label,
            "gpus": self.question.gpus,
            **{name: self.spec.get(name) for name in ROW_FIELDS},
            "sequences_per_replica": self.sequences,
            "requests_per_s": self.load_per_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "tokens_per_s_per_user": 1.0 / self.tpot_s,
            "ttft_p99_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "tpot_p99_s": self.tpot_within_s,
            "energy_j_per_output_token": self.energy_j_per_token,
            "energy_wh_per_request": self.energy_j_per_token * self.question.output_len / 3600.0,
            "power_w_per_gpu": self.power_w_per_gpu,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "carbon_g_per_million_tokens": self.carbon_g_per_million_tokens,
            "binds": self.binds,
            "status": self.status,
            "status_reasons": list(self.reasons),
        }


ROW_FIELDS = (
    "tp", "ep", "pp", "dcp", "ep_mode", "replicas", "prefill_tp", "prefill_ep", "prefill_replicas", "dtype",
    "sm_clock_mhz", "power_cap_w", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
