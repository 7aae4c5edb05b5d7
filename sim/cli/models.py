"""``wattline models``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("model", "parameters", "active", "layers", "width", "heads", "KV heads", "ff", "experts", "vocabulary")


@click.command("models")
@click.argument("name", required=False, metavar="[MODEL]")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(name: str | None, as_json: bool) -> None:
    """List the model catalog; or say what is read of one MODEL: an id, a .toml file, or a config.json or its folder."""
    from sim.cli.console import wide_console

    if name is not None:
        _one(name, as_json)
        return
    rows, diffusion = _language_models(), _diffusion_models()
    if as_json:
        click.echo(json.dumps({"models": rows, "diffusion": diffusion}, allow_nan=False))
        return
    _print(rows, diffusion, wide_console())


def _one(name: str, as_json: bool) -> None:
    """Sizes of one model, as one document or line by line."""
    from workloads import load_model
    from workloads.params import facts

    found = facts(load_model(name))
    if as_json:
        click.echo(json.dumps(found, allow_nan=False))
        return
    for key, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else "not known" if value is None else str(value)
        click.echo(f"{key.replace('_', ' '):20} {shown}")


def _language_models() -> list[dict[str, Any]]:
    from workloads import list_models, load_model, params

    return [
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


def _diffusion_models() -> list[dict[str, Any]]:
    from workloads.diffusion import list_dits, load_dit

    return [
        {"id": dit.id, "parameters": dit.parameters(), "layers": dit.layers, "d_model": dit.d_model, "heads": dit.heads}
        for dit in map(load_dit, list_dits())
    ]


def _print(rows: list[dict[str, Any]], diffusion: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            str(row["id"]), f"{row['parameters'] / 1e9:.2f} B",
            f"{row['active_parameters'] / 1e9:.2f} B", str(row["layers"]), str(row["d_model"]),
            str(row["q_heads"]), str(row["kv_heads"]), str(row["d_ff"]), str(row["experts"] or "-"), str(row["vocab"]),
        )  # fmt: skip
    console.print(table)
    images = Table(title="Diffusion transformers (phase denoise)", title_justify="left")
    for name in ("model", "parameters", "layers", "width", "heads"):
        images.add_column(name, justify="left" if name == "model" else "right")
    for row in diffusion:
        size = f"{row['parameters'] / 1e9:.1f} B"
        images.add_row(str(row["id"]), size, str(row["layers"]), str(row["d_model"]), str(row["heads"]))
    console.print(images)
