"""``wattline models``."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(as_json: bool) -> None:
    """List the model catalog."""
    from rich.table import Table

    from sim.cli.console import wide_console
    from workloads import list_models, load_model, params
    from workloads.diffusion import list_dits, load_dit

    rows: list[dict[str, Any]] = [
        {
            "id": model.id,
            "parameters": params(model),
            "active_parameters": params(model, active=True),
            "layers": model.layers,
            "d_model": model.d_model,
            "q_heads": model.q_heads,
            "kv_heads": model.kv_heads,
            "d_ff": model.d_ff,
            "experts": model.experts,
            "vocab": model.vocab,
        }
        for model in map(load_model, list_models())
    ]
    diffusion: list[dict[str, Any]] = [
        {"id": dit.id, "parameters": dit.parameters(), "layers": dit.layers, "d_model": dit.d_model, "heads": dit.heads}
        for dit in map(load_dit, list_dits())
    ]
    if as_json:
        click.echo(json.dumps({"models": rows, "diffusion": diffusion}, allow_nan=False))
        return
    table = Table()
    for name in (
        "model",
        "parameters",
        "active",
        "layers",
        "width",
        "heads",
        "KV heads",
        "ff",
        "experts",
        "vocabulary",
    ):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            str(row["id"]), f"{row['parameters'] / 1e9:.2f} B",
            f"{row['active_parameters'] / 1e9:.2f} B", str(row["layers"]), str(row["d_model"]),
            str(row["q_heads"]), str(row["kv_heads"]), str(row["d_ff"]), str(row["experts"] or "-"), str(row["vocab"]),
        )  # fmt: skip
    console = wide_console()
    console.print(table)
    images = Table(title="Diffusion transformers (phase denoise)", title_justify="left")
    for name in ("model", "parameters", "layers", "width", "heads"):
        images.add_column(name, justify="left" if name == "model" else "right")
    for row in diffusion:
        size = f"{row['parameters'] / 1e9:.1f} B"
        images.add_row(str(row["id"]), size, str(row["layers"]), str(row["d_model"]), str(row["heads"]))
    console.print(images)
