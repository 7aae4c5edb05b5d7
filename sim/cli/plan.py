"""``wattline plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli.help import complete_model
from sim.cli.options import given, no_cache, split_named, table_options
from sim.cli.paths import FOLDER, INPUT, OUTPUT, PathCommand, keep_inputs
from sim.explore.plan.question import Question

if TYPE_CHECKING:
    from sim.explore.plan.question import Deployment

FIGURES = ("tokens/s/GPU", "tokens/s/user", "TTFT p99 ms", "TPOT p99 ms", "J/token", "W/GPU")
Confirmed = dict[int, dict[str, Any]]


@click.command("plan", cls=PathCommand)
@click.argument("file", required=False, type=INPUT, metavar="[FILE|MODEL]", shell_complete=complete_model)
@table_options(Question)
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="deployments to print")
@click.option("--confirm", type=click.IntRange(0), default=0, help="serve so many of the best, request by request")
@click.option("--csv", type=OUTPUT, help="write one row a deployment")
@click.option("--plot", type=OUTPUT, help="write tokens a second a GPU over those a user sees (.png or .svg)")
@click.option(
    "--launch", type=FOLDER, help="folder for files that start the best one (vLLM, SGLang, TensorRT-LLM, k8s)"
)
@click.option("--jobs", type=click.IntRange(1), help="processes [default: one a core]")
@no_cache
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="do not say which ways to cut the GPUs cannot serve")
def command(
    file: Path | None,
    top: int,
    confirm: int,
    csv: Path | None,
    plot: Path | None,
    launch: Path | None,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Which deployment serves best: every way to cut the GPUs, at the highest load that keeps the targets.

    Given as flags, as a FILE (.toml, .json), as a MODEL, or several (flags win).
    """
    from sim.explore.plan.launch import write_launch
    from sim.explore.plan.picture import write_front
    from sim.explore.plan.search import plan
    from sim.explore.workers import Pool
    from sim.output.files import check_picture_ending, write_atomically
    from sim.output.spreadsheet import to_csv
    from sim.serving import serve

    if plot is not None:
        check_picture_ending(plot)
    file, fields = split_named(file, fields)
    question = Question.load(file, **given(fields)) if file is not None else Question.of(**given(fields))
    keep_inputs(question.model_dump())
    pool = Pool() if jobs is None else Pool(jobs=jobs)
    left_out: list[str] = []  # told beside an answer; where there is none, the refusal says them itself
    found = plan(question, pool=pool, say=left_out.append)
    if not (quiet or as_json):
        click.echo("".join(f"left out: {text}\n" for text in dict.fromkeys(left_out)), err=True, nl=False)
    served: Confirmed = {place: serve(one.server).summary for place, one in enumerate(found[:confirm])}
    if csv is not None:
        import pandas as pd

        write_atomically(csv, to_csv(pd.DataFrame([candidate.row() for candidate in found])))
    if plot is not None:
        write_front(found, plot)
    written = write_launch(found[0], launch) if launch is not None else []
    if as_json:
        rows = [one.row() | ({"served": _served(served[i])} if i in served else {}) for i, one in enumerate(found)]
        document = {"question": question.model_dump(mode="json"), "best": rows[0], "deployments": rows}
        click.echo(json.dumps(document | {"files": [str(path) for path in written]}, allow_nan=False))
        return
    _print(question, found[:top], served)
    for path in written:
        click.echo(f"launch file: {path}")


def _served(summary: dict[str, Any]) -> dict[str, Any]:
    """Of a run request by request, what the plan foresaw."""
    return {
        "slo_share": summary["slo_share"],
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "tpot_p99_s": summary["tpot_s"]["p99"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "energy_j_per_output_token": summary["energy_j_per_output_token"],
        "power_w_per_gpu": summary["power_w_per_gpu"],
    }


def _print(question: Question, found: Sequence[Deployment], served: Confirmed) -> None:
    from rich.table import Table
    from rich.text import Text

    from sim.cli.console import wide_console
    from sim.output.console import visible

    best = found[0]
    console = wide_console()
    targets = [
        f"{name} <= {value * 1e3:g} ms for 99 %"
        for name, value in (("TTFT", question.slo_ttft_s), ("TPOT", question.slo_tpot_s))
        if value is not None
    ]
    load = "" if question.rate_per_s is None else f"{question.rate_per_s:g} requests a second, "
    up_to = "up to " if load else ""
    asked = f"{question.model} on {up_to}{question.gpus} x {question.gpu}, {load}{question.input_len:,} tokens in, "
    asked += f"{question.output_len:,} out" + "".join(f", {target}" for target in targets)
    console.print(Text(visible(asked)))
    fewest = f"Fewest GPUs: {best.question.gpus}, as " if load else f"Best for {question.objective}: "
    answer = f"{fewest}{best.label}, {best.mode}: {best.load_per_s:.3g} requests a second, "
    answer += f"{best.tokens_per_s_per_gpu:,.0f} output tokens a second a GPU, {best.energy_j_per_token:.3g} J a token"
    binds = f"; what binds is {best.binds}" if best.binds else ""
    console.print(Text(visible(f"{answer}{binds}."), style="bold"))
    console.print(Text(visible(f"These numbers are {best.status}: {'; '.join(best.reasons)}.")))
    table = Table()
    priced = best.cost_per_million_tokens is not None
    columns = [
        "deployment",
        "mode",
        *(["GPUs"] if load else []),
        *FIGURES,
        *(["cost/Mtoken"] if priced else []),
        "binds",
    ]
    for name in columns:
        table.add_column(name, justify="left" if name in ("deployment", "mode", "binds") else "right")
    for plan in found:
        cost = plan.cost_per_million_tokens
        table.add_row(
            plan.label, plan.mode, *([str(plan.question.gpus)] if load else []), f"{plan.tokens_per_s_per_gpu:,.0f}",
            f"{1.0 / plan.tpot_s:,.0f}", f"{plan.ttft_s * 1e3:,.0f}", f"{plan.tpot_within_s * 1e3:,.1f}",
            f"{plan.energy_j_per_token:.3g}", f"{plan.power_w_per_gpu:.0f}",
            *([f"{cost:.3g}"] if priced and cost is not None else []), plan.binds,
        )  # fmt: skip
    console.print(table)
    for place, summary in served.items():
        data = _served(summary)
        share = "" if data["slo_share"] is None else f"{data['slo_share']:.1%} of requests within the targets, "
        text = f"served, {found[place].label if place < len(found) else place}: {share}TTFT p99 "
        text += f"{data['ttft_p99_s'] * 1e3:,.0f} ms, TPOT p99 {data['tpot_p99_s'] * 1e3:,.1f} ms, "
        console.print(Text(visible(text + f"{data['energy_j_per_output_token']:.3g} J a token")))
