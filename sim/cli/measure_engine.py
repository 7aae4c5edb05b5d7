"""``wattline measure --engine vllm``: a real server, its records, and the comparison."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import click

from sim.cli.options import given, scenario_of


def measure(file: Path | None, out: Path, traces: Path | None, *, predict: bool, fields: dict[str, Any]) -> None:
    """Run a scenario, or the requests of ``file``, on vLLM; append records to ``out``; compare."""
    from sim.validation.measure_engine import REQUEST_FILES, append, gpu_here, stack_of

    fields = fields | {"gpu": gpu_here(fields.get("gpu")), "stack": stack_of(fields.get("stack"))}
    with tempfile.TemporaryDirectory() as folder:
        if file is not None and file.suffix in REQUEST_FILES:
            _requests(file, Path(folder), out, traces, predict=predict, fields=fields)
            return
        from sim.validation.measure_engine import measure_scenario

        scenario = scenario_of(file, fields)
        records, ran = measure_scenario(scenario, Path(folder), traces)
    append(records, out)
    click.echo(f"{len(records)} records added to {out}")
    if not predict:
        return
    from sim.cli.console import wide_console
    from sim.compare.compare import compare_trace
    from sim.compare.report import print_comparison
    from sim.validation.validate import error_table, validate
    from sim.validation.validate_report import print_groups, print_worst

    rows = validate((out,))
    console = wide_console()
    print_groups(error_table(rows, ["phase"]), console)
    print_worst(rows, 5, console)
    if traces is not None:
        click.echo()
        print_comparison(compare_trace([traces], ran), console)


def _requests(
    file: Path, folder: Path, out: Path, traces: Path | None, *, predict: bool, fields: dict[str, Any]
) -> None:
    """Serve the requests of ``file`` for real, then in simulation, and print both."""
    from sim.serving import ServeSpec, serve
    from sim.validation.measure_engine import append, measure_requests

    known = {name: value for name, value in given(fields).items() if name in ServeSpec.model_fields}
    if unknown := sorted(given(fields).keys() - known.keys()):
        raise click.UsageError(f"{unknown[0]} = {fields[unknown[0]]!r} has no meaning for a file of requests")
    spec = ServeSpec.of(**known, trace=file, host="vllm-async", prefix_caching=False)
    records = measure_requests(spec, folder, traces)
    append(records, out)
    click.echo(f"{len(records)} records added to {out}")
    if not predict:
        return
    real, run = records[-1], serve(spec)
    table = run.requests
    click.echo(f"{'':24}{'real':>12}{'predicted':>12}")
    for label, ours, theirs in (
        ("time to first token", real["ttft_s"], table["ttft_s"].tolist()),
        ("time per output token", real["tpot_s"], table["tpot_s"].tolist()),
    ):
        for name, share in (("p50", 50), ("p99", 99)):
            a, b = (1e3 * _percentile(values, share) for values in (ours, theirs))
            click.echo(f"{label + ', ' + name:24}{a:9.1f} ms{b:9.1f} ms")
    joules = "-" if real["energy_j"] is None else f"{real['energy_j']:,.0f} J"
    click.echo(f"{'energy':24}{joules:>12}{f'{run.energy_j:,.0f} J':>12}")


def _percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]
