"""``wattline calibrate``."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from time import monotonic

import click

from sim.cli.help import complete_gpu
from sim.cli.paths import FOLDER, INPUT, OUTPUT, PathCommand
from sim.cli.waiting import in_words

# Records that a core fits and predicts a second: the 1,627 shipped ones in 229 s.
ROWS_PER_S = 7.0


@click.command("calibrate", cls=PathCommand)
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=INPUT,
    help="fit these records or folders; measure nothing",
)
@click.option(
    "--gpu",
    help="GPU id (wattline gpus) or .toml file [default: the GPU of this machine]",
    shell_complete=complete_gpu,
)
@click.option(
    "--records",
    type=FOLDER,
    default=Path("calibration"),
    show_default=True,
    help="folder that measured records go to; an interrupted run resumes there",
)
@click.option("--out", type=OUTPUT, help="profile to write [default: GPU id + .json]")
@click.option(
    "--world", type=click.IntRange(1, 64), help="GPUs to measure collectives on [default: all of this machine]"
)
@click.option(
    "--budget-s", type=click.FloatRange(min=1), default=math.inf, help="stop measuring before this many seconds"
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="vllm: measure the kernels of the vLLM that is installed here",
)
def command(
    sources: tuple[Path, ...],
    gpu: str | None,
    records: Path,
    out: Path | None,
    world: int | None,
    budget_s: float,
    engine: str,
) -> None:
    """Measure this machine's GPUs with microbenchmarks (five minutes for one GPU) and fit a profile.

    Beside the profile goes a file of chips: how much more power each draws than the profile's, and the shipped one's.

    Use the profile with --profile FILE in simulate, sweep and the other commands. Needs PyTorch
    (wattline[measure]) unless --from names records that exist.
    """
    from hardware.calibrate.fit import fit_records, record_files
    from hardware.catalog import load_gpu
    from hardware.profile import dump_profile, load_profile
    from sim.cli.console import wide_console
    from sim.output.files import write_atomically
    from sim.studies.chips import chip_powers, dump_chips, print_chips
    from sim.validation.calibrate import measure_here
    from sim.validation.records import read_records
    from sim.validation.validate import error_table, validate
    from sim.validation.validate_report import print_groups

    given = load_gpu(gpu) if gpu is not None else None
    if engine == "vllm" and not sources:
        from sim.validation.calibrate import measure_vllm_here

        measured, path = measure_vllm_here(given, records, world=world, budget_s=budget_s)
        click.echo(f"records: {path}  (kernels of vLLM on {measured.id})")
        return
    if sources and given is None:
        raise click.UsageError("--gpu is missing: say which GPU the records of --from are of")
    spec = given
    if not sources:
        spec, sources = measure_here(given, records, world=world, budget_s=budget_s)
    assert spec is not None
    begun, rows_given = monotonic(), sum(1 for path in record_files(sources) for _ in read_records(path))
    say = partial(click.echo, err=True)
    say(f"fitting {rows_given:,} records on one core: {in_words(rows_given / ROWS_PER_S)}")
    profile = fit_records(sources, spec)
    say(f"fitted in {in_words(monotonic() - begun)}; now predicting them")
    path = out or Path(f"{spec.id}.json")
    write_atomically(path, dump_profile(profile).encode())
    rows = validate(record_files(sources), profile=path)
    console = wide_console()
    print_groups(error_table(rows), console)
    click.echo(f"errors on the fitted records themselves; others: wattline validate FILE --profile {path}")
    judged = {"this profile": chip_powers(rows, profile, spec)}
    if (shipped := load_profile(spec.id)) is not None:
        judged["the shipped profile"] = chip_powers(validate(record_files(sources)), shipped, spec)
    for name, chips in judged.items():
        print_chips(chips, name, console)
    of_chips = path.with_suffix(".chips.json")
    write_atomically(of_chips, dump_chips(spec.id, judged).encode())
    click.echo(f"chips: {of_chips}  (use one: wattline simulate --chip-power-factor FACTOR ...)")
    click.echo(f"profile: {path}  (use it: wattline simulate --gpu {gpu or spec.id} --profile {path} ...)")
