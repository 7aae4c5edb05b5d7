"""What an engine's host adds between two steps, while the GPUs wait for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from workloads.engine import HostPace, RequestPath, ServingEngine

Host = Literal["none", "stack", "vllm-async", "vllm-sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds a step, and seconds more for each sequence in it.

    ``plans_ahead``: the next step is planned while one runs, so that a request waits for the step at hand and the next.
    ``pace``: how it launches steps that are no whole graph. ``path``: what a request takes to the engine and back.
    """

    step_s: float
    sequence_s: float = 0.0
    plans_ahead: bool = False
    pace: HostPace | None = None
    path: RequestPath | None = None

    @property
    def stage_s(self) -> float:
        """From the begin of a pipeline stage's step to that of the next, at least."""
        return 0.0 if self.pace is None else self.pace.stage_s

    def seconds(self, sequences: int) -> float:
        """Before a step of ``sequences``.

        >>> round(HostTime(step_s=4e-3, sequence_s=6e-6).seconds(250) * 1e3, 2)
        5.5
        """
        return self.step_s + sequences * self.sequence_s


# As reported by vLLM's developers, not measured here; other engines: no figures with a source were found.
# vllm-sync (2024, V0): bubbles of 4 ms in small batches (issue 6854), 5 to 6 ms at 256 sequences (issue 10634).
# vllm-async (scheduling beside the running step): 0.2 to 0.3 ms are left (issue 10634); in profiler traces of vLLM 0.24
# these are small kernels and copies on the GPU's stream, which stack vllm has among its kernels.
HOSTS: dict[Host, HostTime] = {
    "none": HostTime(step_s=0.0),
    "stack": HostTime(step_s=0.0),
    "vllm-async": HostTime(step_s=0.25e-3, plans_ahead=True),
    "vllm-sync": HostTime(step_s=4.0e-3, sequence_s=1.5e-3 / 256),
}


def host_time(host: Host, more_s: float, engine: ServingEngine | None) -> HostTime:
    """The host of that name, and ``more_s`` before each step; ``stack``: that of the stack's engine, if it has one."""
    known = HOSTS[host]
    if engine is not None and host in ("stack", "vllm-async"):
        known = HostTime(step_s=0.0, plans_ahead=True, pace=engine.host, path=engine.request_path)
    return replace(known, step_s=known.step_s + more_s)
