"""``wattline dit`` and ``wattline dit select-proxy``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sim.cli.choosing import price_options, prices_of
from sim.cli.help import HelpGroup, complete_gpu
from sim.cli.paths import INPUT

GUIDANCES = ("none", "batch", "sequential", "parallel")


@click.group("dit", cls=HelpGroup, invoke_without_command=True)
@click.option("--model", default="wan2.1-14b", show_default=True, help="diffusion transformer: id or .toml file")
@click.option(
    "--gpu",
    default="h100-sxm-80gb",
    show_default=True,
    help="GPU id (wattline gpus) or .toml file",
    shell_complete=complete_gpu,
)
@click.option("--video", default="1280x720x81", show_default=True, help="WIDTHxHEIGHTxFRAMES, or WIDTHxHEIGHT")
@click.option("--steps", type=click.IntRange(1, 10_000), default=50, show_default=True, help="denoising steps")
@click.option("--batch", type=click.IntRange(1, 1024), default=1, show_default=True, help="videos at once")
@click.option("--cp", default="1,2,4,8", show_default=True, help="GPUs that share a branch's tokens, comma-separated")
@click.option("--guidance", multiple=True, type=click.Choice(GUIDANCES), help="[default: sequential] (repeatable)")
@click.option(
    "--reuse", multiple=True, help="steps:1-10,13, rate:SHARE or metric:FILE.csv,COLUMN,THRESHOLD (repeatable)"
)
@click.option(
    "--stack", default="reference-torch", show_default=True, help="fused kernels, or diffusers: those of its modules"
)
@price_options
@click.option("--ignore-memory", is_flag=True, help="simulate even what does not fit in GPU memory")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.pass_context
def command(
    context: click.Context, /, cp: str, guidance: tuple[str, ...], reuse: tuple[str, ...], as_json: bool, **fields: Any
) -> None:
    """Videos and images from diffusion transformers: speed, energy and memory, with and without reused steps."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from sim.cli.console import print_reasons, wide_console
    from sim.explore.dit import video_points
    from sim.scenario.spec import Scenario

    prices = prices_of(fields)
    try:
        degrees = [int(part) for part in cp.split(",")]
    except ValueError:
        raise click.BadParameter(f"'{cp}' is not a list of whole numbers like 1,2,4", param_hint="--cp") from None
    gpu = Scenario.of(model=fields["model"], gpu=fields["gpu"]).gpu
    points = list(video_points(fields, degrees=degrees, guidances=guidance or ("sequential",), reuses=reuse))
    if as_json:
        rows = [asdict(point) | point.costs(prices) for point in points]
        click.echo(json.dumps({"gpu": gpu, "points": rows}, allow_nan=False))
        return
    title = f"{fields['model']}, {fields['video']}, {fields['steps']} steps, {gpu}"
    table = Table(title=title, title_justify="left")
    names = (
        "GPUs", "guidance", "ulysses x ring", "reuse", "computed", "latency s", "speed-up", "energy kJ", "W a GPU",
        "MFU", "GB a GPU", *points[0].costs(prices), "status",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name in ("guidance", "reuse", "status") else "right")
    for p in points:
        table.add_row(
            str(p.gpus), p.guidance, f"{p.ulysses} x {p.ring}", p.reuse or "-", str(p.computed_steps),
            f"{p.latency_s:.1f}", f"{p.speedup:.2f}", f"{p.energy_j / 1e3:.1f}", f"{p.power_w_per_gpu:.0f}",
            "-" if p.mfu is None else f"{p.mfu:.1%}", f"{p.memory_bytes_per_gpu / 1e9:.1f}",
            *(f"{value:.4g}" for value in p.costs(prices).values()), p.status,
        )  # fmt: skip
    console = wide_console()
    console.print(table)
    print_reasons(points, console)
    kept = max(p.reuse_cache_bytes for p in points)
    if kept:
        console.print(
            f"reused steps keep {kept / 2**30:.2f} GiB of residuals over all GPUs; image quality is not simulated"
        )


@command.command("select-proxy")
@click.argument("file", type=INPUT)
@click.option("--reference", required=True, help="the column that says how much a step really changed")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def select_proxy(file: Path, reference: str, as_json: bool) -> None:
    """Rank the recorded metrics in FILE (.csv, a row a step) by Spearman correlation with a reference column."""
    from rich.table import Table

    from sim.cli.console import wide_console
    from sim.explore.dit import rank_proxies

    proxies = rank_proxies(file, reference)
    if as_json:
        click.echo(json.dumps({"proxies": [asdict(proxy) for proxy in proxies]}, allow_nan=False))
        return
    table = Table(title=f"Metrics that rank steps as '{reference}' does", title_justify="left")
    for name in ("metric", "Spearman", "p"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for proxy in proxies:
        rho = "constant" if proxy.spearman is None else f"{proxy.spearman:.3f}"
        table.add_row(proxy.name, rho, "-" if proxy.p_value is None else f"{proxy.p_value:.2g}")
    console = wide_console()
    console.print(table)
    best = proxies[0]
    follows = best.spearman is not None and best.spearman > 0.0
    console.print(f"choose {best.name}" if follows else f"no metric rises with '{reference}'")
