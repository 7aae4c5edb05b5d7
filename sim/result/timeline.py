"""What :func:`sim.simulate` returns: a run that shows itself as a table and writes itself as a trace.

What draws tables and writes traces is loaded when one is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sim.result.rates import times
from sim.result.run import Run


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(Run):
    """A :class:`~sim.result.run.Run`, with its table and its trace."""

    def to_chrome(
        self, path: str | Path, *, layout: Literal["one", "hta"] = "one", names: Literal["ours", "library"] = "ours"
    ) -> Path:
        """Write the timeline (``.json``, ``.json.gz``, or Perfetto's ``.pftrace``); see :mod:`sim.result.trace`."""
        from sim.result.trace import TraceWindow, write_timeline

        return write_timeline(self, Path(path), layout=layout, part=TraceWindow(names=names))

    def summary(self) -> dict[str, Any]:
        """Every figure of the run under a name with its unit: what ``wattline simulate --json`` prints."""
        from sim.result.report import summary

        return summary(self)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token (s); None in phases that have none."""
        return times(self).get("ttft_s")

    @property
    def tpot_s(self) -> float | None:
        """Time per output token (s); None in phases that have none."""
        return times(self).get("tpot_s")

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over all GPUs."""
        return self.tokens / self.latency_s

    def plot(self, path: str | Path | None = None) -> Any:
        """Power and clock of every GPU over time as a matplotlib figure; written to ``path`` (.png, .svg) if given."""
        from sim.result.picture import power_figure

        return power_figure(self, None if path is None else Path(path))

    def _repr_html_(self) -> str:
        """What a notebook shows: the figures of :meth:`__repr__` as tables."""
        from sim.result.notebook import html_of

        return html_of(self)

    def __repr__(self) -> str:
        """An aligned table with units."""
        from sim.result.report import summary_text

        return summary_text(self)
