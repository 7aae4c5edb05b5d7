"""What :func:`sim.simulate` returns: a run that shows itself as a table and writes itself as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sim.result.report import summary_text
from sim.result.run import Run
from sim.result.trace import write_timeline


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(Run):
    """A :class:`~sim.result.run.Run`, with its table and its trace."""

    def to_chrome(self, path: str | Path, *, layout: Literal["one", "hta"] = "one") -> Path:
        """Write the timeline (``.json``, ``.json.gz``, or Perfetto's ``.pftrace``); see :mod:`sim.result.trace`."""
        return write_timeline(self, Path(path), layout=layout)

    def __repr__(self) -> str:
        """An aligned table with units."""
        return summary_text(self)
