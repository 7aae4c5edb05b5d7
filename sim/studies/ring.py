"""Ring attention, alone or inside a model, by layout and sequence length: time, energy, and what waiting ranks draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sim.machine import machine
from sim.runner import simulate
from sim.studies.repetition import run_program, seen
from workloads.families.ring import LAYOUTS, build_ring


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPoint:
    """One layout at one length, settled (s, J of all GPUs, W of each); ``speedup`` is over contiguous."""

    layout: str
    seq_len: int
    latency_s: float
    energy_j: float
    power_w_per_gpu: tuple[float, ...]
    speedup: float


def ring_points(
    gpu: str,
    *,
    world: int,
    seq_lens: Sequence[int],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool = True,
    backward: bool = False,
) -> Iterator[RingPoint]:
    """Attention alone, every layout at every length."""
    target = machine(gpu, world)
    for seq_len in seq_lens:
        contiguous_s = 0.0
        for layout in LAYOUTS:
            program = build_ring(
                layout,
                ranks=world,
                seq_len=seq_len,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                causal=causal,
                backward=backward,
            )
            gap_s = target.profile.launch.eager_gap_s
            found = seen(*run_program(target, program, in_graph=True, gap_s=gap_s))
            assert found.latency_s is not None and found.energy_j is not None and found.power_w is not None
            contiguous_s = contiguous_s or found.latency_s
            yield RingPoint(
                layout=layout,
                seq_len=seq_len,
                latency_s=found.latency_s,
                energy_j=found.energy_j,
                power_w_per_gpu=tuple(found.power_w),
                speedup=contiguous_s / found.latency_s,
            )


def model_points(
    gpu: str, *, model: str, phase: str, world: int, seq_lens: Sequence[int], ignore_memory: bool = False
) -> Iterator[RingPoint]:
    """A prefill or training step of ``model`` with one sequence over the ring, every layout at every length."""
    for seq_len in seq_lens:
        contiguous_s = 0.0
        for layout in LAYOUTS:
            mode = "ring" if layout == "contiguous" else layout
            run = simulate(
                model=model, phase=phase, gpu=gpu, cp=world, cp_mode=mode, seq_len=seq_len, ignore_memory=ignore_memory
            )
            contiguous_s = contiguous_s or run.latency_s
            yield RingPoint(
                layout=layout,
                seq_len=seq_len,
                latency_s=run.latency_s,
                energy_j=run.energy_j,
                power_w_per_gpu=tuple(run.power_w_per_gpu),
                speedup=contiguous_s / run.latency_s,
            )
