"""The ``wattline`` command. Each command is one module; heavy imports wait until a command runs."""

from __future__ import annotations

import importlib
import sys

import click

WIDEST = 300  # characters of a message
COMMANDS = {
    "simulate": "Simulate one scenario: latency, energy, power, clock, and a Perfetto timeline.",
    "serve": "Serve a stream of requests: latency percentiles, throughput, joules per request.",
    "validate": "Predict measured records and print the errors.",
    "overlap": "Chunks and SMs for communication: energy and latency of every schedule.",
    "sweep": "Run a grid of scenarios on many workers; resumable.",
    "pareto": "Rows of a sweep that nothing beats: energy, latency, throughput, GPUs, carbon, cost.",
    "best": "The best row of a sweep under conditions, and its command.",
    "tornado": "Which inputs of a sweep matter most.",
    "inspect": "A real or simulated trace: classes, communication, idle time, critical path, lint.",
    "replay": "Run a real trace again, as it was or under other assumptions.",
    "fit": "A closed form of latency and energy over layouts, fitted on a few samples and judged on others.",
    "kernel": "One kernel at any clock: tiles, waves, utilisation, latency, power, energy.",
    "calibrate": "Measure this machine's GPUs, or take records, and fit a profile.",
    "measure": "Run a scenario on this machine's GPUs and compare with the prediction.",
    "ring": "Ring attention: contiguous, striped and zigzag layouts compared.",
    "dit": "Video diffusion: speed, energy, memory, with and without reused steps; choice of a proxy.",
    "gpus": "List the GPU catalog.",
    "models": "List the model catalog.",
}


class _Lazy(click.Group):
    """Imports a command's module only when it is asked for, so that ``--help`` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"sim.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(COMMANDS)}"
            raise click.UsageError(f"unknown command '{args[0]}': {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="wattline")
def app() -> None:
    """Simulate multi-GPU AI inference and see where the time and the joules go."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        app(args=argv, standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        # A command group without a command: newer click raises its help text as an error.
        no_command = isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ()))
        text = error.format_message()
        click.echo(text if no_command else one_line(text), err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("wattline: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        if not _ours(error):
            raise
        click.echo(one_line(str(error)), err=True)
        sys.exit(2)


def one_line(text: str) -> str:
    """A message as it is printed: one line of at most ``WIDEST`` characters, long values cut in their middle.

    >>> len(one_line("c.json: x = " + "9" * 5000 + ": give a positive whole number"))
    272
    """
    line = f"wattline: {' '.join(text.split())}"
    head, tail = WIDEST * 3 // 5 - 1, WIDEST * 3 // 10
    return line if len(line) <= WIDEST else f"{line[:head]}...{line[-tail:]}"


def _ours(error: Exception) -> bool:
    from hardware.errors import HardwareError
    from sim.errors import SimError
    from traces.errors import TraceError
    from workloads.errors import WorkloadError

    return isinstance(error, SimError | HardwareError | TraceError | WorkloadError)
