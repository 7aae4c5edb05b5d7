"""``wattline ring``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click

from sim.cli.help import complete_gpu, complete_model
from sim.cli.paths import INPUT, PathCommand


@click.command("ring", cls=PathCommand)
@click.option(
    "--gpu",
    default="h100-sxm-80gb",
    show_default=True,
    help="GPU id (wattline gpus) or .toml file",
    shell_complete=complete_gpu,
)
@click.option("--world", type=click.IntRange(2, 1024), default=4, show_default=True, help="ranks of the ring")
@click.option(
    "--seq-lens", default="16384,65536,262144", show_default=True, help="tokens of all ranks, comma-separated"
)
@click.option(
    "--model",
    help="a whole model around the ring (wattline models) [default: attention alone]",
    shell_complete=complete_model,
)
@click.option("--phase", type=click.Choice(["prefill", "train"]), help="step of --model [default: prefill]")
@click.option("--ignore-memory", is_flag=True, help="simulate even a --model that does not fit in GPU memory")
@click.option("--q-heads", type=click.IntRange(1), default=32, show_default=True, help="query heads")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="heads of keys and values")
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True, help="elements of a head")
@click.option("--causal/--no-causal", default=True, help="mask what comes later [default: causal]")
@click.option("--backward", is_flag=True, help="the pass of gradients instead of the forward one")
@click.option("--published", type=INPUT, help="compare with speed-ups of arXiv 2311.09431 (.csv) instead")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(
    gpu: str,
    world: int,
    seq_lens: str,
    model: str | None,
    phase: Literal["prefill", "train"] | None,
    ignore_memory: bool,
    causal: bool,
    published: Path | None,
    as_json: bool,
    **heads: Any,
) -> None:
    """Ring attention: contiguous, striped and zigzag layouts compared, alone or inside a model."""
    from rich.table import Table

    from hardware.catalog import load_gpu
    from sim.cli.console import print_reasons, wide_console
    from sim.explore.ring import model_points, ring_points
    from sim.scenario.spec import Scenario
    from workloads.families.ring import RingAttention

    if published is not None:
        _compare(published, as_json)
        return
    try:
        lengths = [int(part) for part in seq_lens.split(",")]
    except ValueError:
        raise click.BadParameter(f"'{seq_lens}' is not a list of whole numbers like 16384,65536") from None
    _refuse_mixed(model)
    gpu = load_gpu(gpu).id if not gpu.endswith(".toml") else gpu
    model = None if model is None else Scenario.of(model=model).model
    if model is not None:
        points = list(
            model_points(
                gpu, model=model, phase=phase or "prefill", world=world, seq_lens=lengths, ignore_memory=ignore_memory
            )
        )
    else:
        points = list(ring_points(gpu, RingAttention(causal=causal, **heads), world=world, seq_lens=lengths))
    if as_json:
        click.echo(
            json.dumps({"gpu": gpu, "model": model, "points": [asdict(point) for point in points]}, allow_nan=False)
        )
        return
    what = f"{model} {phase or 'prefill'}" if model else f"Ring attention{'' if causal else ' without a mask'}"
    table = Table(title=f"{what} on {world} x {gpu}", title_justify="left")
    for name in ("tokens", "layout", "latency ms", "speed-up", "energy J", "least W", "most W", "status"):
        table.add_column(name, justify="left" if name in ("layout", "status") else "right")
    for p in points:
        watts = p.power_w_per_gpu
        table.add_row(
            f"{p.seq_len:,}", p.layout, f"{p.latency_s * 1e3:.3f}", f"{p.speedup:.2f}", f"{p.energy_j:.2f}",
            f"{min(watts):.0f}", f"{max(watts):.0f}", p.status,
        )  # fmt: skip
    console = wide_console()
    console.print(table)
    print_reasons(points, console)


def _refuse_mixed(model: str | None) -> None:
    """Options of attention alone beside a model, or of a model without one, would silently do nothing."""
    names = ("phase", "ignore_memory") if model is None else ("q_heads", "kv_heads", "head_dim", "causal", "backward")
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} is for {'a --model' if model is None else 'attention alone'}: leave it out"
            )


def _compare(published: Path, as_json: bool) -> None:
    """Published speed-ups of stripes over contiguous blocks beside ours, by device."""
    from rich.table import Table

    from sim.cli.console import wide_console
    from sim.studies.striped import FITTED_ON, compare, errors_by_device, read_published

    cost, rows = compare(read_published(published))
    if as_json:
        document = {"skipped_cost": cost, "rows": [asdict(row) for row in rows]}
        click.echo(json.dumps(document, allow_nan=False))
        return
    table = Table(title="Speed-up of stripes over contiguous blocks, ours over published", title_justify="left")
    for name in ("device", "rows", "mean, free", "worst, free", "mean, fitted", "worst, fitted"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for device, errors in errors_by_device(rows).items():
        table.add_row(device, str(errors.rows), *(f"{100 * share:.1f} %" for share in errors.shares))
    console = wide_console()
    console.print(table)
    where = " and ".join(f"{device} {model} ring {ring} {tokens:,}" for device, model, ring, tokens in FITTED_ON)
    console.print(f"free: skipped tiles cost nothing; fitted: {cost:.2f} of a tile, from {where}")
