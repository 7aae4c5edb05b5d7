"""What ``wattline simulate`` writes beside its table: options, early refusals, files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from sim.cli.paths import EITHER, FOLDER, OUTPUT
from sim.errors import SimError

if TYPE_CHECKING:
    from sim.result.timeline import Timeline

LAST_MS = 1e9  # the end of a window without one: eleven days


def _window(_: click.Context, __: click.Parameter, text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    from sim.replay.inspect import window_of

    chosen = window_of(text)
    assert chosen is not None
    return chosen.start_ms or 0.0, LAST_MS if chosen.end_ms is None else chosen.end_ms


_OPTIONS = (
    click.option("--trace", type=EITHER, help="write the timeline (.json, .json.gz, .pftrace)"),
    click.option("--trace-layout", type=click.Choice(["one", "hta"]), default="one", help="one file, or one per rank"),
    click.option(
        "--trace-names",
        type=click.Choice(["ours", "library"]),
        default="ours",
        help="kernels by our names or those of real libraries",
    ),
    click.option("--window", callback=_window, help="only START:END (ms) in --trace, --kernels"),
    click.option("--counter-ms", type=click.FloatRange(min=0, min_open=True), help="thin the counters of --trace out"),
    click.option("--kernels", type=OUTPUT, help="write one row a kernel and rank (.csv, .parquet)"),
    click.option("--chakra", type=FOLDER, help="write Chakra execution traces, one a rank, into a folder"),
    click.option("--report", type=OUTPUT, help="write one HTML page that needs no network"),
)


def output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the function gets them as ``outputs``."""

    @functools.wraps(function)
    def taking(**fields: Any) -> Any:
        names = Outputs.__slots__
        return function(outputs=Outputs(**{name: fields.pop(name) for name in names}), **fields)

    for option in reversed(_OPTIONS):
        option(taking)
    return taking


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files to write; None: not that one."""

    trace: Path | None
    trace_layout: Literal["one", "hta"]
    trace_names: Literal["ours", "library"]
    window: tuple[float, float] | None
    counter_ms: float | None
    kernels: Path | None
    chakra: Path | None
    report: Path | None

    def check(self) -> None:
        """Refuse before anything is simulated what could not be written."""
        from sim.output.files import check_folder, check_outputs, check_table_ending

        trace_file = self.trace if self.trace_layout == "one" else None  # else a folder, which is made
        if trace_file is not None:
            from traces.write.by_name import check_ending

            check_ending(trace_file)
        elif self.trace is not None:
            check_folder(self.trace)
        check_outputs((trace_file, self.kernels, self.report))
        if self.chakra is not None:
            from traces.write.chakra import check_chakra

            check_chakra(self.chakra)
        if self.report is not None:
            from sim.pages.page import check_report

            check_report(self.report)
        if self.kernels is not None:
            check_table_ending(self.kernels)
        if self.counter_ms is not None and self.trace is None:
            raise SimError(f"--counter-ms {self.counter_ms:g} is for --trace: give a file")
        if self.window is not None and self.trace is None and self.kernels is None:
            raise SimError("--window is for --trace and --kernels: give one of them")

    def replaced(self) -> Iterator[Path]:
        """Files that writing would replace, beside those that options name by themselves."""
        if self.trace is not None:
            yield from [self.trace] if self.trace_layout == "one" else self.trace.glob("rank*.json.gz")
        if self.chakra is not None:
            yield from self.chakra.glob("*.et")
            yield self.chakra / "comm_groups.json"

    def write(self, run: Timeline) -> dict[str, str]:
        """Write all of them; returns the paths by name."""
        if self.trace is not None:
            from sim.result.trace import TraceWindow, write_timeline

            part = TraceWindow(window_ms=self.window, counter_ms=self.counter_ms, names=self.trace_names)
            write_timeline(run, self.trace, layout=self.trace_layout, part=part)
        if self.kernels is not None:
            from sim.output.files import write_table

            table = run.kernels
            if self.window is not None:
                begin_s, end_s = (edge * 1e-3 for edge in self.window)
                table = table[(table["start_s"] < end_s) & (table["end_s"] > begin_s)]
            write_table(table, self.kernels)
        if self.chakra is not None:
            from sim.result.chakra import write_execution_traces

            write_execution_traces(run, self.chakra)
        if self.report is not None:
            from sim.pages.run import write_report

            write_report(run, self.report)
        return {name: str(path) for name in HOW_TO_OPEN if (path := getattr(self, name)) is not None}


HOW_TO_OPEN = {
    "trace": "open it at ui.perfetto.dev: 'Open trace file'",
    "kernels": "one row a kernel and rank",
    "chakra": "for ASTRA-sim: --workload-configuration=FOLDER/wattline",
    "report": "open it in a browser",
}
