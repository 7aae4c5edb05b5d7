"""Tables of fields that keywords, TOML and JSON spell alike: how they are read, and the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hardware.catalog import gpu_id
from hardware.errors import HardwareError
from inputs.files import read_text
from inputs.suggest import nearest
from inputs.texts import parse_json, parse_toml, shown
from sim.errors import ScenarioError
from workloads.catalog import model_id
from workloads.errors import WorkloadError
from workloads.storage import ALIASES, storage

Positive = Annotated[int, Field(gt=0, le=100_000_000)]
Degree = Annotated[int, Field(gt=0, le=4096)]


def _known_gpu(name: str) -> str:
    """The id that ``name`` means; files, and names that loading will refuse, stay as they are."""
    try:
        return gpu_id(name)
    except HardwareError:
        return name


def _known_model(name: str) -> str:
    try:
        return model_id(name)
    except WorkloadError:
        return name


def rates(given: Any) -> Any:
    """A rate for all positions, or the rates of each, as numbers or comma-separated."""
    given = comma_separated(given)
    return (given,) if isinstance(given, int | float) else given


def comma_separated(given: Any) -> Any:
    """Names as a tuple, whether comma-separated or not."""
    return tuple(part.strip() for part in given.split(",")) if isinstance(given, str) else given


def _canonical(name: Any) -> Any:
    """A type by the name that records use, whatever it is called (``fp8``, ``bfloat16``); others stay as they are."""
    return ALIASES.get(name.strip().lower(), name.strip().lower()) if isinstance(name, str) else name


def _stored(name: str) -> str:
    try:
        return str(storage(name))
    except WorkloadError as error:
        raise ValueError(str(error)) from None


# Resolved once, here: headers, JSON, rows of sweeps, records and traces then all hold the canonical name.
RunType = Annotated[Literal["bf16", "fp16", "fp8_e4m3", "int8", "fp32"], BeforeValidator(_canonical)]
CacheType = Annotated[Literal["bf16", "fp16", "fp8_e4m3", "int8"], BeforeValidator(_canonical)]
DispatchType = Annotated[Literal["bf16", "fp8_e4m3"], BeforeValidator(_canonical)]
WeightType = Annotated[str, AfterValidator(_stored)]
# Resolved once, here: headers, JSON, rows of sweeps, records and traces then all hold the catalog's id.
GpuName = Annotated[str, AfterValidator(_known_gpu)]
ModelName = Annotated[str, AfterValidator(_known_model)]


class FieldTable(BaseModel):
    """A table of fields that can be written as keywords, TOML or JSON; problems are errors of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @classmethod
    @lru_cache(maxsize=16)
    def defaults(cls) -> Mapping[str, Any]:
        """What each field is where nothing is said."""
        return {name: field.default for name, field in cls.model_fields.items()}

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """One from keywords; every problem is one :class:`ScenarioError` of one line."""
        return cls.parse(fields, where="scenario")

    @classmethod
    def parse(cls, fields: Mapping[str, Any], *, where: str) -> Self:
        """One from a mapping; ``where`` names its origin in messages."""
        known = cls.model_fields  # a search through the class each time
        for key in fields:
            if key not in known:
                raise ScenarioError(f"unknown key '{key}' in {where}: {nearest(key, sorted(known))}")
            said = known[key].annotation
            if isinstance(fields[key], bool) and bool not in (said, *get_args(said)):
                raise ScenarioError(f"{where}: {key} = {str(fields[key]).lower()}: this is no switch: give its value")
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            raise ScenarioError(f"{where}: {_first_problem(error)}") from None

    @classmethod
    def load(cls, path: Path, **overrides: Any) -> Self:
        """One from a .toml or .json file; ``overrides`` win."""
        return cls.parse({**read_mapping(path), **overrides}, where=str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """The table in a TOML or JSON file, or a :class:`ScenarioError` that says what is wrong with the file."""
    text = read_text(path, "scenario", ScenarioError)
    parse = parse_json if path.suffix == ".json" else parse_toml
    data = parse(text, str(path), ScenarioError)
    if not isinstance(data, dict):
        raise ScenarioError(f"{path}: a scenario is a table of fields, found {type(data).__name__}")
    return data


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        example = ", such as llama3-8b ('wattline models' lists them)" if field == "model" else ""
        return f"{field} is missing: give {'one' if example else 'a value'}{example}"
    if not field:
        return message
    return f"{field} = {shown(problem['input'])}: {message[0].lower()}{message[1:]}"
