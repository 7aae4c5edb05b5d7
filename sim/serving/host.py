"""What an engine's host adds between two steps, while the GPUs wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Host = Literal["none", "vllm-async", "vllm-sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds a step, and seconds more for each sequence in it."""

    step_s: float
    sequence_s: float = 0.0

    def seconds(self, sequences: int) -> float:
        """Before a step of ``sequences``.

        >>> round(HostTime(step_s=4e-3, sequence_s=6e-6).seconds(250) * 1e3, 2)
        5.5
        """
        return self.step_s + sequences * self.sequence_s


# As reported by vLLM's developers, not measured here; other engines: no figures with a source were found.
# vllm-sync (2024, V0): bubbles of 4 ms in small batches (issue 6854), 5 to 6 ms at 256 sequences (issue 10634).
# vllm-async (scheduling beside the running step): 0.2 to 0.3 ms are left (issue 10634).
HOSTS: dict[Host, HostTime] = {
    "none": HostTime(step_s=0.0),
    "vllm-async": HostTime(step_s=0.25e-3),
    "vllm-sync": HostTime(step_s=4.0e-3, sequence_s=1.5e-3 / 256),
}


def host_time(host: Host, more_s: float) -> HostTime:
    """The host of that name, and ``more_s`` before each step."""
    known = HOSTS[host]
    return HostTime(step_s=known.step_s + more_s, sequence_s=known.sequence_s)
