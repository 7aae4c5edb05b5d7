"""Ring attention, alone or inside a model, by layout and sequence length: time, energy, and what waiting ranks draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sim.result.status import Standing, standing_of_kind
from sim.run.repetition import run_program, seen
from sim.run.runner import simulate
from sim.scenario.kind import ring_kind
from sim.scenario.machine import machine
from workloads.families.ring import LAYOUTS, RingAttention, RingLayout, build_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPoint:
    """One layout at one length, settled (s, J of all GPUs, W of each); ``speedup`` is over contiguous."""

    layout: str
    seq_len: int
    latency_s: float
    energy_j: float
    power_w_per_gpu: tuple[float, ...]
    speedup: float
    status: str
    status_reasons: tuple[str, ...]
    kernels: int
    events_kernels: int  # that SimPy ran
    derived_kernels: int


class RingOutcome(NamedTuple):
    """What one layout came to: seconds, joules of all GPUs, watts of each, its status, and how it was worked out."""

    latency_s: float
    energy_j: float
    power_w_per_gpu: tuple[float, ...]
    standing: Standing
    kernels: int
    events_kernels: int


def ring_points(gpu: str, attention: RingAttention, *, world: int, seq_lens: Sequence[int]) -> Iterator[RingPoint]:
    """Attention alone, every layout at every length."""
    target = machine(gpu, world)

    def outcome(layout: RingLayout, seq_len: int) -> RingOutcome:
        program = build_ring(layout, attention, ranks=world, seq_len=seq_len)
        records, core = run_program(target, program, in_graph=True, gap_s=target.profile.launch.eager_gap_s)
        found = seen(records, core)
        assert found.latency_s is not None and found.energy_j is not None and found.power_w is not None
        asked = ring_kind(target.gpu.id, layout, attention, world=world, seq_len=seq_len)
        kernels = core.graph.kernels
        standing = standing_of_kind(asked, target)
        return RingOutcome(found.latency_s, found.energy_j, tuple(found.power_w), standing, kernels, kernels)

    return _points(seq_lens, outcome)


def model_points(
    gpu: str,
    *,
    model: str,
    phase: Literal["prefill", "train"],
    world: int,
    seq_lens: Sequence[int],
    ignore_memory: bool = False,
) -> Iterator[RingPoint]:
    """A prefill or training step of ``model`` with one sequence over the ring, every layout at every length."""

    def outcome(layout: RingLayout, seq_len: int) -> RingOutcome:
        mode = "ring" if layout == "contiguous" else layout
        run = simulate(
            model=model,
            phase=phase,
            gpu=gpu,
            cp=world,
            cp_mode=mode,
            seq_len=seq_len,
            ignore_memory=ignore_memory,
            optimizer="none" if phase == "train" else "adamw",  # the same for every layout
        )
        return RingOutcome(
            run.latency_s, run.energy_j, tuple(run.power_w_per_gpu), run.standing, run.outcome.kernels,
            run.outcome.events_kernels,
        )  # fmt: skip

    return _points(seq_lens, outcome)


def _points(seq_lens: Sequence[int], outcome: Callable[[RingLayout, int], RingOutcome]) -> Iterator[RingPoint]:
    for seq_len in seq_lens:
        contiguous_s = 0.0
        for layout in LAYOUTS:
            found = outcome(layout, seq_len)
            contiguous_s = contiguous_s or found.latency_s
            yield RingPoint(
                layout=layout,
                seq_len=seq_len,
                latency_s=found.latency_s,
                energy_j=found.energy_j,
                power_w_per_gpu=found.power_w_per_gpu,
                speedup=contiguous_s / found.latency_s,
                status=found.standing.status,
                status_reasons=found.standing.reasons,
                kernels=found.kernels,
                events_kernels=found.events_kernels,
                derived_kernels=found.kernels - found.events_kernels,
            )
