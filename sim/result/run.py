"""The result of a run: spans, power steps, counters. Latency and energy are computed from it alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import Target, bounds
from sim.result.exposure import S_PER_PS, moving_ps
from sim.result.outcome import Outcome, unfold
from sim.result.tally import power_steps

if TYPE_CHECKING:
    import pandas as pd

    from sim.result.status import Standing
    from sim.scenario.machine import Machine
    from sim.scenario.resolved import Resolved
    from sim.scenario.spec import Scenario

By = Literal["family", "kernel", "phase", "gpu", "segment"]


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that happened, as columns; derived figures are properties.

    Energies are joules over all GPUs unless the name says per GPU. ``targets`` say for each GPU where
    its limiters settled, or stood at the end: a clock that they hold, or a power (W) that any kernel's clock yields to.
    """

    resolved: Resolved
    machine: Machine
    outcome: Outcome
    targets: tuple[Target, ...]
    tokens: float

    @property
    def power_limit_w(self) -> tuple[float, ...]:
        """The instantaneous power that no kernel passes (W per GPU)."""
        return tuple(bounds(target, 0.0)[0] for target in self.targets)

    @property
    def clock_limit_hz(self) -> tuple[float, ...]:
        """The clock that no kernel passes (Hz per GPU)."""
        return tuple(bounds(target, self.machine.model.max_clock_hz)[1] for target in self.targets)

    @property
    def scenario(self) -> Scenario:
        """What was asked for."""
        return self.resolved.scenario

    # -- whole-run figures --------------------------------------------------------------------------------

    @property
    def gpus(self) -> int:
        """GPUs of the machine, simulated one by one or folded."""
        return len(self.targets)

    @property
    def latency_s(self) -> float:
        """Seconds from the start to the last completion on any GPU."""
        return self.outcome.end_ps * S_PER_PS

    @cached_property
    def energy_j_per_gpu(self) -> tuple[float, ...]:
        """Joules of each GPU: the exact integral of its power steps."""
        return tuple(self.outcome.per_gpu[:, 0].tolist())

    @cached_property
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
        sums = self.outcome.per_gpu
        return tuple(float(clock / busy) if busy else math.nan for busy, clock in sums[:, 3:5].tolist())

    @cached_property
    def exposed_communication_s(self) -> float:
        """Seconds in which a GPU runs communication and nothing else, mean over GPUs."""
        return sum(exposed_s + waiting_s for exposed_s, waiting_s in self.exposed_and_waiting_s.values())

    @cached_property
    def exposed_by_kind(self) -> pd.DataFrame:
        """Exposed and waiting seconds by kind of collective, mean over GPUs; see :mod:`sim.result.exposure`."""
        import pandas as pd  # takes as long as a run: only who asks for a table waits for it

        table = pd.DataFrame.from_dict(self.exposed_and_waiting_s, orient="index", columns=["exposed_s", "waiting_s"])
        return table.rename_axis("kind")

    @cached_property
    def exposed_and_waiting_s(self) -> dict[str, tuple[float, float]]:
        """What :attr:`exposed_by_kind` says, without pandas."""
        return {
            kind: (exposed_s / self.gpus, waiting_s / self.gpus)
            for kind, (exposed_s, waiting_s) in self.outcome.exposed_gpu_s().items()
        }

    @cached_property
    def bubble_s(self) -> float:
        """Seconds in which a GPU neither computes nor moves data, mean over GPUs."""
        return max(0.0, self.latency_s - float(self.outcome.per_gpu[:, 5].mean()))

    @cached_property
    def standing(self) -> Standing:
        """What these numbers rest on; see :mod:`sim.result.status`."""
        from sim.result.status import standing  # reads the scenario's model, which a bare timeline does not need

        outside = self.outcome.extrapolated_kernels
        return standing(self.resolved, self.machine, kernels_outside=outside, drawn_w=max(self.power_w_per_gpu))

    # -- laid out on demand -------------------------------------------------------------------------------

    @cached_property
    def graph(self) -> KernelGraph:
        """The kernel graph of all ranks."""
        return self.outcome.full_graph()

    @cached_property
    def records(self) -> Recorder:
        """Spans and power steps of all ranks and layers, those simulated once laid out for each."""
        return unfold(self.outcome, self.graph)

    # -- tables -------------------------------------------------------------------------------------------

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """One row a kernel and rank: times in s, energy in J, name, family, phase, segment, gpu, stream.

        ``kind`` is the operation of a collective, ``moving_s`` when its last rank came, ``gap_s`` the pause
        before a kernel.
        """
        import pandas as pd  # takes as long as a run: only who asks for a table waits for it

        graph, records = self.graph, self.records
        op, start, end = (
            np.frombuffer(column, dtype=np.int64)
            for column in (records.span_op, records.span_start_ps, records.span_end_ps)
        )
        together = np.asarray(graph.op_collective)[op]
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
                "collective": together >= 0,
                "start_s": start * S_PER_PS,
                "end_s": end * S_PER_PS,
                "energy_j": np.frombuffer(records.span_energy_j, dtype=np.float64),
            }
        )
        table["duration_s"] = table["end_s"] - table["start_s"]
        table["kind"] = np.array([c.describe.get("op", c.family) for c in graph.classes], dtype=object)[cls]
        table["gap_s"] = np.array([c.gap_s for c in graph.classes])[cls]
        table["moving_s"] = moving_ps(together, start, end) * S_PER_PS
        return table.sort_values(["gpu", "start_s", "op"], ignore_index=True)

    @cached_property
    def power(self) -> pd.DataFrame:
        """One row a power step and GPU: start, duration, W, SM clock, SMs busy, HBM and link bytes/s."""
        import pandas as pd  # takes as long as a run: only who asks for a table waits for it

        return pd.DataFrame(self.power_columns)

    @cached_property
    def power_columns(self) -> dict[str, NDArray[Any]]:
        """The columns of :attr:`power`, without pandas."""
        records = self.records
        states = records.states
        order = np.lexsort((records.step_time_ps, records.step_gpu))
        time_ps = np.frombuffer(records.step_time_ps, dtype=np.int64)[order]
        gpu, state, duration_s = power_steps(records)
        column = {
            name: np.array([getattr(s, name) for s in states])
            for name in ("power_w", "clock_hz", "sms_busy", "hbm_bytes_per_s", "link_bytes_per_s")
        }
        return {
            "gpu": gpu,
            "start_s": time_ps * S_PER_PS,
            "duration_s": duration_s,
            "power_w": column["power_w"][state],
            "sm_clock_hz": column["clock_hz"][state],
            "sms_busy": column["sms_busy"][state],
            "hbm_bytes_per_s": column["hbm_bytes_per_s"][state],
            "link_bytes_per_s": column["link_bytes_per_s"][state],
        }

    def energy_until(self, time_s: float) -> float:
        """Joules of all GPUs from the start to ``time_s``."""
        return self.outcome.energy_until_j(round(time_s / S_PER_PS))

    def sums_by(self, by: Literal["family", "kernel", "phase"]) -> dict[str, tuple[float, float]]:
        """Joules and GPU-seconds over all GPUs by kernel family, kernel or phase, and what idling took."""
        match by:
            case "family":
                sums = self.outcome.by_class(lambda cls: cls.family)
            case "kernel":
                sums = self.outcome.by_class(lambda cls: cls.name)
            case "phase":
                sums = self.outcome.by_phase()
            case _:
                assert_never(by)
        idle = self.outcome.per_gpu[:, 1:3].sum(axis=0).tolist()
        return sums | {"idle": (idle[0], idle[1])}

    def energy_by(self, by: By) -> pd.DataFrame:
        """Energy (J, all GPUs), GPU-seconds and share by kernel family, kernel, phase, gpu or segment.

        Joules in which a GPU ran nothing are the row ``idle``; the column sums to :attr:`energy_j`.
        """
        import pandas as pd  # takes as long as a run: only who asks for a table waits for it

        if by == "gpu" or by == "segment":
            table = self.kernels.groupby(by, sort=False)[["energy_j", "duration_s"]].sum()
            idle = self.outcome.per_gpu[:, 1:3]
            if by == "gpu":
                table["energy_j"] += idle[table.index, 0]
            else:
                table.loc["idle"] = idle.sum(axis=0)
        else:
            table = pd.DataFrame.from_dict(self.sums_by(by), orient="index", columns=["energy_j", "duration_s"])
            table.index.name = by
        table["share"] = table["energy_j"] / table["energy_j"].sum()
        return table.sort_values("energy_j", ascending=False) if by in ("family", "kernel") else table
