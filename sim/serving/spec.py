"""What to serve and on what: the scenario of a server, in the spellings of every scenario."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pydantic import model_validator

import workloads
from sim.errors import ScenarioError
from sim.scenario.adapters import LORA_FIELDS
from sim.scenario.layout import layout_of
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.speculation import (
    SPECULATION_FIELDS,
    acceptances,
)
from sim.serving.requests import Traffic
from sim.serving.server_checks import check_server
from sim.serving.server_fields import ServerFields
from sim.serving.traffic import traffic_of

DEFAULT_STACK = "vllm"

# What drafts in measured servers, and how many tokens.
MEASURED_DRAFTS = {"eagle": 3}

# Fields that a measured kind of server or its sizes hold, its load (Poisson arrivals, lengths of any kind), what the
# measured ones varied, and what changes no number. Any other that is not its default asks for what no server did.
MEASURED = frozenset(
    {
        "model", "gpu", "tp", "ep", "ep_mode", "pp", "dtype", "weight_dtype", "kv_dtype", "stack", "launch",
        "power_cap_w", "sm_clock_mhz", "chip_temperature_c", "captured_tokens", "trace", "trace_block_tokens",
        "rate_per_s", "requests", "input_tokens", "output_tokens", "length_spread", "time_scale", "length_scale",
        "seed", "prefix_caching", "slo_ttft_s", "slo_tpot_s",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of one stage of a replica, by the names of a scenario's fields."""

    tp: int
    ep: int
    cp: int = 1
    dcp: int = 1


class ServeSpec(ServerFields):
    """A server and its traffic. Unknown keys are refused with the nearest known one.

    >>> ServeSpec.of(model="llama3-8b", rate_per_s=4.0, requests=100).gpus
    1
    """

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.replicas * self._world(prefill=False) + self.prefill_replicas * self._world(prefill=True)

    def gpus_of(self, replica: int) -> int:
        """GPUs of a replica by its number; those for prompts come first."""
        return self._world(prefill=replica < self.prefill_replicas)

    def _degrees(self, *, prefill: bool) -> Degrees:
        """How a replica's layers are split; one for prompts spreads no cache inside its tensor group."""
        if not prefill:
            return Degrees(tp=self.tp, ep=self.ep, cp=self.cp, dcp=self.dcp)
        return Degrees(tp=self.prefill_tp or self.tp, ep=self.prefill_ep or self.ep, cp=self.prefill_cp or self.cp)

    def _world(self, *, prefill: bool) -> int:
        degrees = self._degrees(prefill=prefill)
        return max(degrees.tp, degrees.ep) * degrees.cp * self.pp

    def own_block_tokens(self, group: Scenario) -> int:
        """Tokens of a block of the replica ``group``: ``block_tokens`` on each rank that holds some of a sequence's."""
        return self.block_tokens * layout_of(group).cache_shards

    @property
    def roles(self) -> str:
        """How many replicas of which degree play which part."""
        stages = f" pp {self.pp}" if self.pp > 1 else ""
        first, own = self._degrees(prefill=True), self._degrees(prefill=False)
        others = {name: degree for name, degree in asdict(own).items() if degree > 1 and name != "tp"}
        spread = "".join(f" {name} {degree}" for name, degree in others.items())
        if not self.prefill_replicas:
            return f"{self.replicas} x tp {self.tp}{spread}{stages}"
        if first == own:
            return (
                f"{self.prefill_replicas} for prompts + {self.replicas} for decoding, tp {self.tp}{spread}{stages} each"
            )
        prompts, decoding = (
            " ".join(f"{name} {degree}" for name, degree in asdict(one).items() if degree > 1 or name == "tp") + stages
            for one in (first, own)
        )
        return f"{self.prefill_replicas} x {prompts} for prompts + {self.replicas} x {decoding} for decoding"

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """What this server does that none did which was measured: fields that are not their defaults."""
        drafts = self.draft_tokens == MEASURED_DRAFTS.get(self.speculation or "")
        known = MEASURED | set(SPECULATION_FIELDS if drafts else ())
        fields = ((name, field) for name, field in type(self).model_fields.items() if name not in known)
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
            for one in {self._degrees(prefill=False), self._degrees(prefill=self.prefill_replicas > 0)}:
                own = replace(layout, tp=one.tp, ep=one.ep, ep_mode=self.ep_mode, cp=1, dcp=1)
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

    @property
    def phase_clocks(self) -> bool:
        """True when the clock of a replica changes with what it does."""
        return self.prefill_sm_clock_mhz is not None and not self.prefill_replicas

    @model_validator(mode="after")
    def _consistent(self) -> ServeSpec:
        check_server(self)
        return self

    def group(self, *, prefill: bool = False, sm_clock_mhz: float | None = None) -> Scenario:
        """One replica's group of GPUs as a scenario; ``sm_clock_mhz`` locks the clock in place of the spec's own.

        A replica whose cap changes with what it does is described under the higher one.
        """
        cap_w, prefill_w = self.power_cap_w, self.prefill_power_cap_w
        if prefill and prefill_w is not None:
            cap_w = prefill_w
        elif self.phase_caps and cap_w is not None and prefill_w is not None:
            cap_w = max(cap_w, prefill_w)
        own_mhz = (self.prefill_sm_clock_mhz if prefill else None) or self.sm_clock_mhz
        clock_mhz = own_mhz if sm_clock_mhz is None else sm_clock_mhz
        return self._group(self.own_stack, cap_w, clock_mhz, prefill=prefill)

    def _group(self, stack: str, cap_w: float | None, clock_mhz: float | None, *, prefill: bool = False) -> Scenario:
        degrees = self._degrees(prefill=prefill)
        shared: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "model", "layers", "gpu", "profile", "node", "network", "placement", "ecmp_seed", "dtype",
                "weight_dtype", "kv_dtype", "launch", "chip_temperature_c", *LORA_FIELDS[1:], *SPECULATION_FIELDS,
            )
        }  # fmt: skip
        # Not of a replica with ep = 1 beside others whose experts lie on several ranks.
        if degrees.ep > 1 or self.prefill_ep is None:
            shared |= {name: getattr(self, name) for name in ("ep_mode", "ep_kernels", "dispatch_dtype")}
        slots = self.max_loras if self.lora_adapters else 0
        return Scenario.of(
            phase="decode",
            batch=max(1, slots),
            lora_adapters=slots,
            stack=stack,
            **asdict(degrees) | ({"cp_mode": self.cp_mode} if degrees.cp > 1 else {}),
            pp=self.pp,
            power_cap_w=cap_w,
            sm_clock_mhz=clock_mhz,
            **shared,
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
            for name in ("tp", "ep", "cp", "power_cap_w", "sm_clock_mhz"):
                mine = getattr(self, f"prefill_{name}")
                said = (f"{name} = {mine:g}", f"scenario: {name} = {mine:g}") if mine is not None else ()
                if mine != getattr(self, name) and str(error).startswith(said):
                    raise type(error)(str(error).replace(name, f"prefill_{name}", 1)) from None
            raise

    def traffic(self) -> Traffic:
        """The requests, in order of arrival; all at once in a closed loop, which spaces them by itself."""
        return traffic_of(self)
