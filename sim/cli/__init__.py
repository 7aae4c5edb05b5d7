"""The ``wattline`` command. Each command is one module; heavy imports wait until a command runs."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import click

COMMANDS = {
    "simulate": "Simulate one scenario: latency, energy, power, clock, and a Perfetto timeline.",
    "plan": "Which deployment of so many GPUs serves best under latency targets; launch files.",
    "serve": "Serve a stream of requests: latency percentiles, throughput, joules per request.",
    "validate": "Predict measured records and print the errors.",
    "overlap": "Chunks and SMs for communication: energy and latency of every schedule.",
    "sweep": "Run a grid of scenarios on many workers; resumable.",
    "pareto": "Rows of a sweep that nothing beats: energy, latency, throughput, GPUs, carbon, cost.",
    "best": "The best row of a sweep under conditions, and its command.",
    "tornado": "Which inputs of a sweep matter most.",
    "inspect": "A real or simulated trace: classes, communication, idle time, critical path, lint.",
    "replay": "Run a real trace again, as it was or under other assumptions.",
    "compare": "A real trace beside the prediction, kernel by kernel; both timelines in one file.",
    "fit": "A closed form of latency and energy over layouts, fitted on a few samples and judged on others.",
    "kernel": "One kernel at any clock: tiles, waves, utilisation, latency, power, energy.",
    "calibrate": "Measure this machine's GPUs, or take records, and fit a profile.",
    "measure": "Run a scenario on this machine's GPUs and compare with the prediction.",
    "ring": "Ring attention: contiguous, striped and zigzag layouts compared.",
    "dit": "Video diffusion: speed, energy, memory, with and without reused steps; choice of a proxy.",
    "ui": "A local page: change scenarios and see latency, joules, memory and timelines at once.",
    "memory": "What a scenario needs of GPU memory; the largest batch and the smallest layout that fit.",
    "gpus": "List the GPU catalog, or show one GPU with the source of each figure.",
    "models": "List the model catalog, or show one model.",
}


# Words that other tools have as commands.
HINTS = {
    "help": "give --help after a command, as in 'wattline simulate --help'",
    "version": "give 'wattline --version'",
    "run": "did you mean 'simulate'?",
    "predict": "did you mean 'simulate'?",
    "bench": "did you mean 'simulate'?",
    "benchmark": "did you mean 'simulate'?",
    "list": "did you mean 'models' or 'gpus'?",
    "server": "did you mean 'serve'?",
    "web": "did you mean 'ui'?",
}
EPILOG = (
    ("wattline simulate llama3-8b --batch 2 --seq-len 4096", "one run"),
    ("wattline ui", "the same on a page"),
    ("wattline COMMAND --help", "options and examples of a command"),
    (
        'eval "$(_WATTLINE_COMPLETE=bash_source wattline)"',
        "completion of commands, models and GPUs (zsh_source, fish_source)",
    ),
)


# Thresholds of the garbage collector: new objects, and collections of a generation, before the next one. What is
# imported stays: collecting it at Python's own thresholds takes a tenth of a first run that writes a trace.
COLLECTED_AFTER = (50_000, 20, 100)


@cache
def _settle_in() -> None:
    """Once a process: the collector looks through nothing that has only just been imported, nor at Python's end.

    Looking through all that is left, whose memory the kernel takes back anyway, is a tenth of a first run.
    """
    gc.set_threshold(*COLLECTED_AFTER)
    atexit.register(gc.freeze)  # the first one registered is the last one called


def _imported(module: str) -> ModuleType:
    """The module, imported without a look of the collector; what it brought is never looked through."""
    if module in sys.modules:
        return sys.modules[module]
    from inputs.collector import collector_paused

    with collector_paused():
        found = importlib.import_module(module)
        gc.freeze()
    return found


class _Lazy(click.Group):
    """Imports a command's module only when it is asked for, so that ``--help`` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if name not in COMMANDS:
            return None
        command: click.Command = _imported(f"sim.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("To begin"):
            for line, what in EPILOG:
                formatter.write(f"  {line}\n      {what}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; options of a command that stand before it are told apart from unknown ones."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"unknown option '{error.option_name}': a command comes first, as in 'wattline simulate llama3-8b'", ctx
            ) from None

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Parse, and print what ``--help`` asks for."""
        with _ended():
            return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Run."""
        with _ended():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from inputs.suggest import nearest

        if args and args[0] not in COMMANDS:
            hint = HINTS.get(args[0]) or _of_a_model(args[0]) or nearest(args[0], COMMANDS)
            raise click.UsageError(f"unknown command '{args[0]}': {hint}", ctx)
        return super().resolve_command(ctx, args)


def _of_a_model(word: str) -> str | None:
    """What is right where the command was left out."""
    from workloads.catalog import list_models

    return f"a command comes first, as in 'wattline simulate {word}'" if word in list_models() else None


@contextmanager
def _ended() -> Iterator[None]:
    """What click would end in its own way (a closed pipe with 1, an early end as Ctrl-C) ends as it should.

    A reader that has seen enough (``| head``) ends the command in silence, as the signal would: 141.
    """
    try:
        yield
    except OSError as error:
        message = _message(error)
        if isinstance(error, BrokenPipeError) and error.filename is None:
            raise click.exceptions.Exit(128 + signal.SIGPIPE) from None
        raise click.ClickException(message) from None
    except EOFError as error:
        raise click.ClickException(f"a file ends too early: {error}") from None


def _narrow() -> int | None:
    """Columns of help on a terminal that is narrower than click would take it to be."""
    columns = shutil.get_terminal_size().columns
    return max(columns - 2, 20) if columns < 52 else None


def _version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the version, and which engine runs."""
    if asked:
        from importlib.metadata import version

        from sim.engine.kind import engine_kind

        click.echo(f"wattline, version {version('wattline')}, {engine_kind()} engine")
        context.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _narrow()})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
def app() -> None:
    """Simulate multi-GPU AI inference and see where the time and the joules go."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: bad input, and output that cannot be written, is one line on stderr and exit code 2.

    Ctrl-C ends with 130, a signal that asks to end with 128 and its number.
    """
    if sys.stdout is None:
        _end("standard output is closed: redirect it to /dev/null to see nothing", 2)
    _settle_in()
    from sim.cli.stopping import Stopped, stoppable

    came: list[Stopped] = []
    try:
        with stoppable() as came:
            code = app(args=argv, prog_name="wattline", standalone_mode=False)
        if code:  # what click's Exit became
            sys.exit(code)
    except click.ClickException as error:
        # A command group without a command: newer click raises its help text as an error.
        no_command = isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ()))
        text = error.format_message()  # of several lines where it lists choices
        if no_command:
            click.echo(text, err=True)
            sys.exit(2)
        _end(" ".join(text.split()), 2)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error  # click wraps what it was
        _end("interrupted", cause.exit_code if isinstance(cause, Stopped) else 130)
    except OSError as error:  # of the help, say
        _end(_message(error), 2)
    except Exception as error:
        if came or isinstance(error.__cause__, KeyboardInterrupt):  # what a library's start made of it
            _end("interrupted", came[0].exit_code if came else 130)
        if not _ours(error):
            raise
        _end(str(error), 2)


def _message(error: OSError) -> str:
    """What could not be read or written. Errors of writing to standard output name no file."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"'{error.filename}': {reason}"
    # What is still in the buffer would fail again when Python ends.
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    return f"cannot write the output: {reason}"


def _end(text: str, code: int) -> NoReturn:
    """One line on stderr, if that can still be written, and the exit code."""
    from sim.output.console import one_line

    with suppress(OSError):
        click.echo(one_line(f"wattline: {text}"), err=True)
    sys.exit(code)


def _ours(error: Exception) -> bool:
    from inputs.errors import WattlineError

    return isinstance(error, WattlineError)
