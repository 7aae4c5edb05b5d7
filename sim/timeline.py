"""The result of a run: spans, power steps, counters. Latency and energy are computed from it alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.exposure import bubble_s, exposed_by_kind

if TYPE_CHECKING:
    from sim.machine import Machine
    from sim.scenario import Scenario

Floats = NDArray[np.float64]
By = Literal["family", "kernel", "phase", "gpu", "segment"]
S_PER_PS = 1e-12


@dataclass(frozen=True, eq=False)
class Timeline:
    """Everything that happened, as columns; derived figures are properties.

    Energies are joules over all GPUs unless the name says per GPU. ``power_limit_w`` is the power target
    X of the clock governor that the run settled at (W per GPU).
    """

    scenario: Scenario
    machine: Machine
    graph: KernelGraph
    records: Recorder
    power_limit_w: tuple[float, ...]
    tokens: int

    # -- whole-run figures --------------------------------------------------------------------------------

    @property
    def latency_s(self) -> float:
        """Seconds from the start to the last completion on any GPU."""
        return self.records.end_ps * S_PER_PS

    @cached_property
    def energy_j_per_gpu(self) -> tuple[float, ...]:
        """Joules of each GPU: the exact integral of its power steps."""
        steps = self.power
        energy = (steps["power_w"] * steps["duration_s"]).groupby(steps["gpu"]).sum()
        return tuple(float(energy.get(gpu, 0.0)) for gpu in range(self.graph.gpus))

    @property
    def energy_j(self) -> float:
        """Joules of all GPUs."""
        return float(sum(self.energy_j_per_gpu))

    @property
    def power_w_per_gpu(self) -> tuple[float, ...]:
        """Mean watts of each GPU over the run."""
        return tuple(energy / self.latency_s for energy in self.energy_j_per_gpu)

    @cached_property
    def sm_clock_hz_per_gpu(self) -> tuple[float, ...]:
        """Mean SM clock of each GPU while it was busy, weighted by time."""
        steps = self.power[self.power["sms_busy"] > 0]
        weight = steps["duration_s"].groupby(steps["gpu"]).sum()
        clock = (steps["sm_clock_hz"] * steps["duration_s"]).groupby(steps["gpu"]).sum() / weight
        return tuple(float(clock.get(gpu, np.nan)) for gpu in range(self.graph.gpus))

    @cached_property
    def exposed_communication_s(self) -> float:
        """Seconds in which a GPU runs communication and nothing else, mean over GPUs."""
        return float(self.exposed_by_kind.to_numpy().sum())

    @cached_property
    def exposed_by_kind(self) -> pd.DataFrame:
        """Exposed and waiting seconds by kind of collective; see :func:`sim.exposure.exposed_by_kind`."""
        return exposed_by_kind(self.kernels)

    @cached_property
    def bubble_s(self) -> float:
        """Seconds in which a GPU neither computes nor moves data, mean over GPUs."""
        return bubble_s(self.kernels, self.latency_s, self.graph.gpus)

    # -- tables -------------------------------------------------------------------------------------------

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """One row a kernel and rank: times in s, energy in J, name, family, phase, segment, gpu, stream.

        ``kind`` is the operation of a collective, ``moving_s`` when its last rank came, ``gap_s`` the pause
        before a kernel.
        """
        graph, records = self.graph, self.records
        op = np.frombuffer(records.span_op, dtype=np.int64)
        cls = np.asarray(graph.op_class)[op]
        segment = np.asarray(graph.op_segment)[op]
        queue = np.asarray(graph.op_queue)[op]
        names = np.array([c.name for c in graph.classes], dtype=object)
        families = np.array([c.family for c in graph.classes], dtype=object)
        phases = np.array([s[0] for s in graph.segments], dtype=object)
        labels = np.array([f"{s[1]} {s[2]}" for s in graph.segments], dtype=object)
        table = pd.DataFrame(
            {
                "op": op,
                "kernel": names[cls],
                "family": families[cls],
                "phase": phases[segment],
                "segment": labels[segment],
                "gpu": np.asarray(graph.op_gpu)[op],
                "stream": np.asarray(graph.queue_stream)[queue],
                "collective": np.asarray(graph.op_collective)[op] >= 0,
                "start_s": np.frombuffer(records.span_start_ps, dtype=np.int64) * S_PER_PS,
                "end_s": np.frombuffer(records.span_end_ps, dtype=np.int64) * S_PER_PS,
                "energy_j": np.frombuffer(records.span_energy_j, dtype=np.float64),
            }
        )
        table["duration_s"] = table["end_s"] - table["start_s"]
        table["kind"] = np.array([c.describe.get("op", c.family) for c in graph.classes], dtype=object)[cls]
        table["gap_s"] = np.array([c.gap_s for c in graph.classes])[cls]
        # A collective moves data once its last rank is there.
        together = np.asarray(graph.op_collective)[op]
        last = table["start_s"].groupby(np.where(together >= 0, together, -1 - op)).transform("max")
        table["moving_s"] = np.minimum(last, table["end_s"])
        return table.sort_values(["gpu", "start_s", "op"], ignore_index=True)

    @cached_property
    def power(self) -> pd.DataFrame:
        """One row a power step and GPU: start, duration, W, SM clock, SMs busy, HBM and link bytes/s."""
        records = self.records
        states = records.states
        time_ps = np.frombuffer(records.step_time_ps, dtype=np.int64)
        gpu = np.frombuffer(records.step_gpu, dtype=np.int32)
        state = np.frombuffer(records.step_state, dtype=np.int64)
        order = np.lexsort((time_ps, gpu))
        time_ps, gpu, state = time_ps[order], gpu[order], state[order]
        end_ps = np.append(time_ps[1:], records.end_ps)
        end_ps[np.append(gpu[1:] != gpu[:-1], True)] = records.end_ps
        column = {
            name: np.array([getattr(s, name) for s in states])
            for name in ("power_w", "clock_hz", "sms_busy", "hbm_bytes_per_s", "link_bytes_per_s")
        }
        return pd.DataFrame(
            {
                "gpu": gpu,
                "start_s": time_ps * S_PER_PS,
                "duration_s": (end_ps - time_ps) * S_PER_PS,
                "power_w": column["power_w"][state],
                "sm_clock_hz": column["clock_hz"][state],
                "sms_busy": column["sms_busy"][state],
                "hbm_bytes_per_s": column["hbm_bytes_per_s"][state],
                "link_bytes_per_s": column["link_bytes_per_s"][state],
            }
        )

    def energy_until(self, time_s: float) -> float:
        """Joules of all GPUs from the start to ``time_s``."""
        steps = self.power
        held = (time_s - steps["start_s"]).clip(lower=0.0)
        return float((steps["power_w"] * np.minimum(held, steps["duration_s"])).sum())

    def energy_by(self, by: By) -> pd.DataFrame:
        """Energy (J, all GPUs), GPU-seconds and share by kernel family, kernel, phase, gpu or segment.

        Joules in which a GPU ran nothing are the row ``idle``; the column sums to :attr:`energy_j`.
        """
        table = self.kernels.groupby(by, sort=False)[["energy_j", "duration_s"]].sum()
        if by == "gpu":
            table["energy_j"] += np.asarray(self.records.idle_energy_j)[table.index]
        else:
            idle_j = float(sum(self.records.idle_energy_j))
            busy_s = self.power.loc[self.power["sms_busy"] == 0, "duration_s"].sum()
            table.loc["idle"] = [idle_j, float(busy_s)]
        table["share"] = table["energy_j"] / table["energy_j"].sum()
        return table.sort_values("energy_j", ascending=False) if by in ("family", "kernel") else table

    def to_chrome(self, path: str | Path, *, layout: Literal["one", "hta"] = "one") -> Path:
        """Write the Chrome-trace timeline (``.json`` or ``.json.gz``); see :mod:`sim.trace`."""
        from sim.trace import write_timeline

        return write_timeline(self, Path(path), layout=layout)

    def __repr__(self) -> str:
        """An aligned table with units."""
        from sim.report import summary_text

        return summary_text(self)
