"""Serving engines as data: which kernels one makes of a model's nodes, in which order, and where it quantises."""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from workloads.errors import WorkloadError
from workloads.kernel_names import EngineOp
from workloads.work import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A memory-bound kernel that moves ``element_bytes`` for each element of its node."""

    op: EngineOp
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPasses:
    """What an engine runs around its two products over experts.

    ``gate_bytes`` are those for each expert's score and for each choice. Choices of up to ``unsorted_share`` of the
    experts are not sorted. ``quantise`` makes 8-bit rows of each product's input.
    """

    gate_bytes: tuple[int, int]
    unsorted_share: float
    quantise: Pass
    act_bytes: int
    copy_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPace:
    """How an engine's host launches a step that is no whole graph: steps with prompts, and drafts of some kinds.

    Up to ``captured_tokens`` a layer takes ``captured_layer_s``; beyond, each of its kernels takes ``kernel_s``, and a
    layer of experts ``experts_layer_s`` more. Before the first layer it prepares the step for ``prepare_s``, after the
    last it launches the sampling for ``sample_s``. ``uncaptured_drafts``: what drafts without any graph, each kernel of
    a layer for ``draft_kernel_s`` (the other launches of the pass are in it). ``stage_s``: from the begin of a pipeline
    stage's step to that of the next, at least. ``cache_shards_s``: where ranks share out the tokens of caches, from
    what the host waits for the GPU with to its launch of the step.
    """

    captured_tokens: int
    captured_layer_s: float
    kernel_s: float
    experts_layer_s: float
    prepare_s: float = 0.0
    sample_s: float = 0.0
    draft_kernel_s: float = 0.0
    uncaptured_drafts: frozenset[str] = frozenset()
    stage_s: float = 0.0
    cache_shards_s: float = 0.0

    def seconds(self, *, tokens: int, layers: int, kernels: int, experts: bool) -> float:
        """The host's time for a step of ``tokens`` through ``layers`` of ``kernels`` each.

        >>> pace = HostPace(captured_tokens=512, captured_layer_s=2e-4, kernel_s=5e-5, experts_layer_s=1e-3)
        >>> [round(pace.seconds(tokens=t, layers=32, kernels=10, experts=False) * 1e3, 1) for t in (512, 513)]
        [6.4, 16.0]
        """
        if tokens <= self.captured_tokens:
            return layers * self.captured_layer_s
        return self.uncaptured_s(layers=layers, kernels=kernels, experts=experts)

    def uncaptured_s(self, *, layers: int, kernels: int, experts: bool) -> float:
        """The host's time for a step without any graph."""
        return layers * (kernels * self.kernel_s + experts * self.experts_layer_s)

    def slower(self, times: float) -> HostPace:
        """A host whose launches take so many times as long.

        >>> pace = HostPace(captured_tokens=512, captured_layer_s=2e-4, kernel_s=5e-5, experts_layer_s=1e-3)
        >>> pace.slower(2.0).kernel_s
        0.0001
        """
        return replace(
            self,
            captured_layer_s=self.captured_layer_s * times,
            kernel_s=self.kernel_s * times,
            experts_layer_s=self.experts_layer_s * times,
            draft_kernel_s=self.draft_kernel_s * times,
        )

    def drafting_s(self, *, layers: int, kernels: int, experts: bool) -> float:
        """The host's time for a draft without any graph."""
        return layers * (kernels * self.draft_kernel_s + experts * self.experts_layer_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPath:
    """What a request takes to the engine and its first token back: shares of requests, and seconds at most."""

    shares: tuple[float, ...]
    seconds: tuple[float, ...]

    def draw(self, share: float) -> float:
        """Seconds below which ``share`` of requests lie.

        >>> RequestPath(shares=(0.0, 0.5, 1.0), seconds=(0.0, 1e-3, 5e-3)).draw(0.75)
        0.003
        """
        at = min(max(bisect_left(self.shares, share), 1), len(self.shares) - 1)
        low, high = self.shares[at - 1], self.shares[at]
        return self.seconds[at - 1] + (self.seconds[at] - self.seconds[at - 1]) * (share - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngine:
    """One engine; ``pointwise`` by node and type of the products' inputs.

    ``quantised_alone`` names products whose input a kernel of its own quantises. ``own_all_reduce_bytes``: up to this
    buffer the engine's own all-reduce. ``sample_bytes`` for each logit, ``small_kernels`` after each step.
    """

    id: str
    release: str
    description: str
    pointwise: Mapping[str, Mapping[str, Pass]]
    quantise: Pass
    quantised_alone: frozenset[str]
    cache: Pass
    experts: ExpertPasses
    own_all_reduce_bytes: int
    sample_bytes: int
    small_kernels: int
    host: HostPace
    request_path: RequestPath

    def pass_of(self, node: str, dtype: DType) -> Pass | None:
        """The kernel of a pointwise node that feeds products of ``dtype``; None where it has none of its own."""
        found = self.pointwise.get(node)
        return None if found is None else found.get(dtype.value, found["bf16"])


@lru_cache(maxsize=8)
def load_engine(name: str) -> ServingEngine:
    """An engine by name.

    >>> load_engine("vllm").pass_of("rope", DType.BF16).element_bytes
    4
    """
    path = files("workloads") / "data" / "stacks" / f"{name}.toml"
    if not path.is_file():
        raise WorkloadError(f"unknown engine '{name}'")
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    experts, step = data["experts"], data["step"]
    return ServingEngine(
        id=data["id"],
        release=data["release"],
        description=data["description"],
        pointwise={
            node: {dtype: _pass(one) for dtype, one in kernels.items()} for node, kernels in data["pointwise"].items()
        },
        quantise=_pass(data["quantise"]),
        quantised_alone=frozenset(data["quantise"]["before"]),
        cache=_pass(data["cache"]),
        experts=ExpertPasses(
            gate_bytes=(experts["gate"]["bytes_per_expert"], experts["gate"]["bytes_per_choice"]),
            unsorted_share=experts["sort"]["unsorted_share"],
            quantise=_pass(experts["quantise"]),
            act_bytes=experts["act"]["bytes"],
            copy_bytes=experts["copy"]["bytes"],
        ),
        own_all_reduce_bytes=data["all_reduce"]["own_up_to_bytes"],
        sample_bytes=step["sample"]["bytes"],
        small_kernels=step["small_kernels"],
        host=HostPace(**data["host"] | {"uncaptured_drafts": frozenset(data["host"]["uncaptured_drafts"])}),
        request_path=RequestPath(
            shares=tuple(data["request_path"]["shares"]), seconds=tuple(data["request_path"]["seconds"])
        ),
    )


def _pass(table: Mapping[str, Any]) -> Pass:
    return Pass(op=EngineOp(table["op"]), element_bytes=table["bytes"])
