"""Layouts: how a model is split over ranks, checked against its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.errors import WorkloadError
from workloads.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of tensor and expert parallelism; ``ep_mode`` as in the measurement records."""

    tp: int = 1
    ep: int = 1
    ep_mode: Literal["all_reduce", "all_to_all"] | None = None
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        """Ranks in all."""
        return max(self.tp, self.ep)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in order."""
        return tuple(range(self.world))


def check_layout(model: ModelSpec, layout: Layout, *, tokens: int) -> None:
    """Refuse a split that the sizes do not allow; says which degree would."""
    tp = layout.tp
    for name, degree in (("tp", tp), ("ep", layout.ep)):
        if degree < 1:
            raise WorkloadError(f"{name} = {degree}: give a positive whole number")
    _check_experts_mode(layout)
    if model.q_heads % tp:
        raise WorkloadError(
            f"tp = {tp} does not divide the {model.q_heads} query heads of {model.id}: use {_divisors(model.q_heads)}"
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise WorkloadError(
            f"tp = {tp} neither divides nor is a multiple of the {model.kv_heads} key/value heads of {model.id}"
        )
    if not model.experts and model.d_ff % tp:
        raise WorkloadError(f"tp = {tp} does not divide d_ff = {model.d_ff} of {model.id}")
    if layout.ep > 1 and not model.experts:
        raise WorkloadError(f"ep = {layout.ep}: {model.id} has no experts: use tp")
    if model.experts and layout.ep > 1 and model.experts % layout.ep:
        raise WorkloadError(
            f"ep = {layout.ep} does not divide the {model.experts} experts of {model.id}: "
            f"use {_divisors(model.experts)}"
        )
    if model.experts and tp > 1 and layout.ep == 1:
        raise WorkloadError(
            f"tp = {tp} without ep: experts of {model.id} are split by rank: add ep = {tp} and ep_mode = 'all_reduce'"
        )
    if layout.sequence_parallel and tp == 1:
        raise WorkloadError("sequence_parallel: needs tp of at least 2")
    if layout.sequence_parallel and tokens % tp:
        raise WorkloadError(f"sequence_parallel: tp = {tp} does not divide the {tokens} tokens of the step")


def _check_experts_mode(layout: Layout) -> None:
    """Refuse degrees of experts and attention that no mode of the records describes."""
    mode, tp, ep = layout.ep_mode, layout.tp, layout.ep
    if mode not in (None, "all_reduce", "all_to_all"):
        raise WorkloadError(f"ep_mode = {mode!r}: known are 'all_reduce', 'all_to_all'")
    if ep > 1 and mode is None:
        raise WorkloadError(f"ep = {ep} needs ep_mode: 'all_reduce' or 'all_to_all'")
    if mode is not None and ep == 1:
        raise WorkloadError(f"ep_mode = '{mode}' needs ep of at least 2")
    if ep > 1 and tp not in (1, ep):
        raise WorkloadError(f"ep = {ep} with tp = {tp}: tp must be 1 or equal to ep")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, 128) + 1) if number % d == 0)
