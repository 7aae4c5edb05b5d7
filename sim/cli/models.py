"""``wattline models``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from sim.cli.help import Helped, complete_model

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("model", "parameters", "active", "layers", "width", "heads", "KV heads", "ff", "experts", "vocabulary")


@click.command("models", cls=Helped)
@click.argument("name", required=False, metavar="[MODEL]", shell_complete=complete_model)
@click.option("--all", "every", is_flag=True, help="every type of configuration that is read, and how well checked")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(name: str | None, every: bool, as_json: bool) -> None:
    """List the model catalog; or say what is read of one MODEL: an id, a .toml file, or a config.json or its folder."""
    from sim.cli.console import wide_console

    if every:
        _every(as_json, wide_console())
        return
    if name is not None:
        _one(name, as_json)
        return
    rows, diffusion = _language_models(), _diffusion_models()
    if as_json:
        click.echo(json.dumps({"models": rows, "diffusion": diffusion}, allow_nan=False))
        return
    _print(rows, diffusion, wide_console())


def _every(as_json: bool, console: Console) -> None:
    """Every ``model_type`` that is read, whether it runs, and how well it was checked."""
    from workloads.catalog import aliases
    from workloads.huggingface import how_checked, supported_types

    rows = [
        {"model_type": kind, "runs": not how_checked(kind)[1], "checked": how_checked(kind)[0],
         "refused": how_checked(kind)[1] or None}
        for kind in supported_types()
    ]  # fmt: skip
    if as_json:
        click.echo(json.dumps({"families": rows, "aliases": dict(aliases())}, allow_nan=False))
        return
    from rich.table import Table

    table = Table(title="Configurations by model_type", title_justify="left")
    for name in ("model_type", "runs", "how well checked"):
        table.add_column(name)
    for row in rows:
        table.add_row(str(row["model_type"]), "yes" if row["runs"] else "no", str(row["refused"] or row["checked"]))
    console.print(table)


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
