"""``wattline gpus``."""

from __future__ import annotations

import json
from typing import Any

import click

from sim.cli.help import Helped, complete_gpu


@click.command("gpus", cls=Helped)
@click.argument("name", required=False, metavar="[GPU]", shell_complete=complete_gpu)
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(name: str | None, as_json: bool) -> None:
    """List the GPU catalog, with what its predictions rest on; or show one GPU: an id, its beginning, or a .toml."""
    from rich.table import Table

    from hardware.catalog import list_gpus, load_gpu
    from hardware.mig import mig_profiles
    from hardware.profile import profile_for
    from sim.cli.console import wide_console

    if name is not None:
        _one(name, as_json)
        return
    rows: list[dict[str, Any]] = []
    for gpu in map(load_gpu, list_gpus()):
        levels: list[str] = list(gpu.confidence.values())
        rows.append(
            {
                "id": gpu.id,
                "architecture": gpu.architecture,
                "sms": gpu.sms,
                "max_clock_hz": gpu.max_clock_hz,
                "bf16_flops_per_s": gpu.tensor_flops_per_s.get("bf16"),
                "memory_bytes": gpu.memory_bytes,
                "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
                "link_bytes_per_s": gpu.link_bytes_per_s,
                "tdp_w": gpu.tdp_w,
                "datasheet_confidence": min(levels, key=("low", "medium", "high").index),
                "prediction": profile_for(gpu).status,
                "mig_slices": [f"{gpu.id}:{name}" for name in mig_profiles().get(gpu.id, ())],
            }
        )
    if as_json:
        click.echo(json.dumps({"gpus": rows}, allow_nan=False))
        return
    table = Table()
    for column in ("GPU", "SMs", "max MHz", "bf16 TFLOP/s", "memory GB", "HBM TB/s", "link GB/s", "TDP W"):
        table.add_column(column, justify="left" if column == "GPU" else "right")
    table.caption = "MIG slices (h100-sxm-80gb:3g.40gb): their names are in wattline gpus --json"
    for column in ("figures", "prediction"):
        table.add_column(column)
    for row in rows:
        flops = row["bf16_flops_per_s"]
        table.add_row(
            str(row["id"]),
            str(row["sms"]),
            f"{row['max_clock_hz'] / 1e6:.0f}",
            f"{flops / 1e12:.0f}" if flops else "-",
            f"{row['memory_bytes'] / 1e9:.0f}",
            f"{row['hbm_bytes_per_s'] / 1e12:.2f}",
            f"{row['link_bytes_per_s'] / 1e9:.0f}",
            f"{row['tdp_w']:.0f}",
            str(row["datasheet_confidence"]),
            str(row["prediction"]),
        )
    wide_console().print(table)


def _one(name: str, as_json: bool) -> None:
    """Every figure of one GPU with its source."""
    from rich.table import Table

    from hardware.catalog import load_gpu
    from hardware.profile import profile_for
    from sim.cli.console import wide_console

    gpu = load_gpu(name)
    columns = ("figure", "value", "confidence", "source")
    if as_json:
        figures = [dict(zip(columns, row, strict=True)) for row in gpu.sheet]
        found = {"id": gpu.id, "name": gpu.name, "prediction": profile_for(gpu).status, "figures": figures}
        click.echo(json.dumps(found, allow_nan=False))
        return
    title = f"{gpu.id}: {gpu.name}, {gpu.architecture}; predictions are {profile_for(gpu).status}"
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for figure, value, confidence, source in gpu.sheet:
        table.add_row(figure, value if isinstance(value, str) else f"{value:,g}", confidence, source)
    wide_console().print(table)
