"""Command-line flags made from the scenario's own fields: one definition, two spellings."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
from pydantic.fields import FieldInfo

from sim.cli.help import COMPLETE
from sim.scenario.field_table import FieldTable, read_mapping
from sim.scenario.spec import Scenario
from workloads.storage import ALIASES

Decorated = Callable[..., Any]
ENDINGS = (".toml", ".json")
FOUR_BITS = re.compile("4bit|int4|fp4|w4|awq|gptq")


def table_options(table: type[FieldTable]) -> Callable[[Decorated], Decorated]:
    """Add one flag a field of ``table``; a flag not given is None in the keyword arguments."""

    def add(function: Decorated) -> Decorated:
        for name, field in reversed(table.model_fields.items()):
            function = _option(name, field)(function)
        return function

    return add


scenario_options = table_options(Scenario)


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Only the fields that the user gave."""
    return {name: value for name, value in fields.items() if value is not None}


def scenario_of(file: Path | None, fields: dict[str, Any]) -> Scenario:
    """The scenario of an optional file and the flags, which win."""
    if file is not None:
        return Scenario.load(file, **given(fields))
    return Scenario.of(**given(fields))


def named_scenario(named: Path | None, fields: dict[str, Any]) -> Scenario:
    """The scenario of the flags, and of an argument that is a file of one (.toml, .json) or a model.

    A ``config.json``, by its name or its ``model_type``, a TOML file with the sizes of a model, or an id of the catalog
    is a model.
    """
    return scenario_of(*split_named(named, fields))


def split_named(named: Path | None, fields: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """An argument that is a file, by itself, or one that is a model, among the ``fields``; see above."""
    if named is not None and named.suffix not in ENDINGS and (named.is_file() or named.suffix in (".yaml", ".yml")):
        raise click.UsageError(f"'{named}': give a scenario's .toml or .json file, or a model's id")
    if named is None or named.is_dir() or _describes_a_run(named):
        return named, fields
    if fields.get("model") is not None:
        raise click.UsageError(f"'{named}' and --model {fields['model']}: give one model")
    return None, {**fields, "model": str(named)}


def _describes_a_run(file: Path) -> bool:
    """Whether a file is a scenario's, as far as its name and a ``model_type`` in it say."""
    if file.name == "config.json" or file.suffix not in ENDINGS:
        return False
    return not file.is_file() or not {"model_type", "d_model"} & read_mapping(file).keys()


def _option(name: str, field: FieldInfo) -> Callable[[Decorated], Decorated]:
    kind, choices = _kind(field.annotation)
    flag = "--" + name.replace("_", "-")
    text = field.description or ""
    if not field.is_required() and field.default not in (None, False):
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        text = f"{text} [default: {default}]".strip()
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    if name in (
        "overlap_ops",
        "sm_partitions",
        "sm_partition",
        "modes",
        "dtypes",
        "power_caps_w",
        "acceptance",
        "lora_targets",
    ):  # lists with commas, read by the field
        return click.option(flag, name, default=None, help=text)
    if name in ("dtype", "kv_dtype"):
        return click.option(flag, name, default=None, type=TypeName(choices), help=text)
    if name == "tokens_per_ep_rank":
        return click.option(flag, name, default=None, help=text, callback=_integers)
    of = click.Choice(choices) if choices else kind
    return click.option(flag, name, default=None, type=of, help=text, shell_complete=COMPLETE.get(name))


class TypeName(click.Choice[str]):
    """One of some types, by its canonical name or one that people use for it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The canonical name."""
        name = ALIASES.get(str(value).strip().lower(), value)
        if name not in self.choices and param is not None and ctx is not None and FOUR_BITS.search(str(value).lower()):
            siblings = {p.name for p in ctx.command.params}
            if param.name == "dtype" and "weight_dtype" in siblings:
                self.fail(f"'{value}' is how weights are stored: give --weight-dtype int4_g128, nvfp4, ...", param, ctx)
        return super().convert(name if name in self.choices else value, param, ctx)


def _kind(annotation: Any) -> tuple[Any, list[str]]:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return str, list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _kind(inner[0])
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    return annotation, []


def _integers(_: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of whole numbers like 30,34", param=parameter) from None


def no_cache(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--no-cache`` of commands that price steps of servers."""

    def switch_off(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            from sim.serving.price_cache import switched_off

            context.with_resource(switched_off())

    text = "work out every price: read and store none on disk (WATTLINE_CACHE=off does so always)"
    return click.option("--no-cache", is_flag=True, expose_value=False, callback=switch_off, help=text)(command)
