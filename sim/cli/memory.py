"""``wattline memory``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli.options import named_scenario, scenario_options
from sim.cli.paths import INPUT, PathCommand

if TYPE_CHECKING:
    from sim.scenario.memory import MemoryUse
    from sim.scenario.resolved import Resolved


@click.command("memory", cls=PathCommand)
@click.argument("file", required=False, type=INPUT, metavar="[FILE|MODEL]")
@scenario_options
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(file: Path | None, as_json: bool, **fields: Any) -> None:
    """What a scenario needs of each GPU's memory, what is left, the largest batch, the smallest layout that fits.

    Nothing is simulated. Given as flags, as a FILE (.toml, .json), as a MODEL, or several (flags win).
    """
    from hardware.catalog import load_gpu
    from sim.scenario.memory import check_layout, memory_use, smallest_layout
    from sim.scenario.resolved import resolve_scenario

    scenario = named_scenario(file, fields)
    if scenario.phase == "denoise":
        raise click.UsageError("--phase denoise: 'wattline dit' prints the memory of a diffusion transformer")
    resolved, gpu = resolve_scenario(scenario), load_gpu(scenario.gpu)
    check_layout(resolved)
    use = memory_use(resolved)
    smallest = smallest_layout(resolved.of(scenario.model_copy(update={"tp": 1, "pp": 1})), gpu)
    if as_json:
        document = {
            "model": resolved.model.id,
            "gpu": gpu.id,
            "scenario": scenario.model_dump(),
            "fits": use.room_bytes >= 0,
            "memory_bytes_per_gpu": use.as_json(),
            "smallest_layout": smallest,
        }
        click.echo(json.dumps(document, allow_nan=False))
        return
    _print(resolved, use, smallest)


def _print(resolved: Resolved, use: MemoryUse, smallest: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from sim.cli.console import wide_console
    from sim.output.console import visible

    scenario, need = resolved.scenario, use.need
    rows = {
        "weights": need.weight_bytes,
        "KV cache": need.kv_bytes,
        "activations": need.activation_bytes,
        "gradients and optimiser": need.gradient_bytes,
        "left": use.room_bytes,
    }
    title = f"{resolved.model.id} {scenario.phase}, batch {scenario.batch}, {scenario.seq_len} tokens, "
    title += f"{resolved.precision.words()}, {scenario.world} x {Path(scenario.gpu).name}: memory of the fullest GPU"
    table = Table()
    table.add_column("what")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for name, count in rows.items():
        if count or name != "gradients and optimiser":
            table.add_row(name, f"{count / 1e9:.2f}", f"{count / use.gpu_bytes:.1%}")
    console = wide_console()
    console.print(Text(visible(title)))
    console.print(table)
    batch = f"largest batch that fits: {use.largest_batch:,}" if use.largest_batch else "no batch fits in this layout"
    console.print(f"{batch}; smallest layout that holds this batch: {smallest or 'none of up to 1,024 GPUs'}")
