"""The grid file of a sweep: blocks of a base scenario, a product, fields that vary together, and conditions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from sim.errors import MemoryShortError, ScenarioError, SimError
from sim.explore.conditions import FITS, Condition
from sim.explore.row import FIELDS, INTERVALS, RESULTS
from sim.scenario.field_table import read_mapping
from sim.scenario.memory import check_memory
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from workloads.errors import WorkloadError

# TOML has no null: this word leaves a field at its default.
DEFAULT = "default"
POINTS_LIMIT = 2_000_000  # some 1 kB each


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Range(_Strict):
    """Numbers from ``from`` to ``to``, both included, by ``step`` or by ``factor``; neither: continuous, to sample."""

    start: float = Field(alias="from")
    to: float
    step: float | None = Field(None, gt=0)
    factor: float | None = Field(None, gt=1)

    @model_validator(mode="after")
    def _consistent(self) -> Range:
        if self.to < self.start:
            raise ValueError(f"to = {self.to:g} is below from = {self.start:g}: swap them")
        if self.step is not None and self.factor is not None:
            raise ValueError("give step or factor, not both")
        if self.factor is not None and self.start <= 0:
            raise ValueError(f"factor needs from above 0, got {self.start:g}")
        return self

    def values(self) -> list[float] | None:
        """The numbers, or None when the range is continuous."""
        slack = 1e-9
        steps = (
            (self.to - self.start) / self.step
            if self.step is not None
            else math.log(self.to / self.start) / math.log(self.factor)
            if self.factor is not None
            else 0.0
        )
        if not steps < POINTS_LIMIT:
            raise SimError(f"from {self.start:g} to {self.to:g} in {steps:.3g} steps: at most {POINTS_LIMIT:,}")
        if self.step is not None:
            count = math.floor((self.to - self.start) / self.step + slack) + 1
            return [_plain(self.start + i * self.step) for i in range(count)]
        if self.factor is not None:
            count = math.floor(math.log(self.to / self.start) / math.log(self.factor) + slack) + 1
            return [_plain(self.start * self.factor**i) for i in range(count)]
        return None

    def at(self, fraction: float) -> float:
        """The number at ``fraction`` in [0, 1) of a continuous range; whole where both ends are whole."""
        if self.start.is_integer() and self.to.is_integer():
            return int(self.start + math.floor(fraction * (self.to - self.start + 1)))
        return self.start + fraction * (self.to - self.start)


Axis = list[Any] | Range


class RandomSample(_Strict):
    """Draw ``count`` points of a block instead of running all of them."""

    count: int = Field(gt=0, le=2_000_000)
    method: str = Field("latin-hypercube", pattern="^(latin-hypercube|random)$")
    seed: int = Field(1, ge=0)


class GridBlock(_Strict):
    """One part of a grid file."""

    base: dict[str, Any] = {}
    grid: dict[str, Axis] = {}
    zip: dict[str, Axis] | list[dict[str, Axis]] = []
    where: list[str] = []
    sample: RandomSample | None = None

    @property
    def zips(self) -> list[dict[str, Axis]]:
        """Groups of fields that vary together."""
        return [self.zip] if isinstance(self.zip, dict) else self.zip


class GridFile(GridBlock):
    """A grid file: a block at the top, or several ``[[block]]`` that share its base and its conditions."""

    block: list[GridBlock] = []


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One point of a grid: the scenario's fields as written, and the conditions that its results are judged by."""

    fields: Mapping[str, Any]
    where: tuple[Condition, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScenarioGrid:
    """The points of a grid file, in order, conditions on inputs already applied."""

    cases: tuple[GridPoint, ...]
    excluded: int


def load_grid(path: Path) -> ScenarioGrid:
    """The grid in a TOML or JSON file.

    Raises :class:`SimError` naming the key and what would be right. Points that break a condition on inputs are
    left out and counted; points that are no valid scenario stay: they become rows that carry their error.
    """
    return parse_grid(read_mapping(path), where=str(path))


def parse_grid(data: Mapping[str, Any], *, where: str) -> ScenarioGrid:
    """The grid in a mapping; ``where`` names its origin in messages.

    >>> grid = parse_grid({"base": {"model": "llama3-8b"}, "grid": {"tp": [1, 2, 4], "batch": [1, 8]},
    ...                    "where": ["tp * batch <= 16"]}, where="example")
    >>> [(case.fields["tp"], case.fields["batch"]) for case in grid.cases]
    [(1, 1), (1, 8), (2, 1), (2, 8), (4, 1)]
    """
    try:
        file = GridFile.model_validate(dict(data))
    except ValidationError as error:
        # Of an axis, both readings are reported: a table was meant as a range.
        problem = next(p for p in error.errors() if not ("list[any]" in p["loc"] and isinstance(p["input"], dict)))
        place = ".".join(str(part) for part in problem["loc"] if part not in ("Range", "list[any]"))
        if problem["type"] == "extra_forbidden" and place in Scenario.model_fields:
            raise SimError(f"{where}: '{place}' belongs under [base], and lists of values under [grid]") from None
        raise SimError(f"{where}: {place}: {problem['msg'].removeprefix('Value error, ')}") from None
    if file.block and (file.grid or file.zips or file.sample):
        raise SimError(f"{where}: put grid, zip and sample inside the [[block]] tables, or leave [[block]] out")
    cases: list[GridPoint] = []
    excluded = 0
    for number, block in enumerate(file.block or [file], 1):
        own = block is not file
        place = f"{where}, block {number}" if own else where
        base = {**file.base, **block.base} if own else file.base
        texts = [*file.where, *block.where] if own else file.where
        found, dropped = _cases(block, base, texts, place)
        cases += found
        excluded += dropped
    if not cases:
        raise SimError(f"{where}: no scenario is left: {excluded} break the conditions")
    return ScenarioGrid(cases=tuple(cases), excluded=excluded)


def _cases(block: GridBlock, base: Mapping[str, Any], texts: Sequence[str], place: str) -> tuple[list[GridPoint], int]:
    """Points of one block that meet its conditions on inputs, and how many do not."""
    axes = _axes(block, place)
    for name in itertools.chain(base, *(names for names, _ in axes)):
        if name not in Scenario.model_fields:
            # Scenario knows the nearest key.
            Scenario.parse({name: None}, where=place)
    fits = FITS in texts
    conditions = [Condition.parse(text, known=FIELDS | RESULTS | {*INTERVALS}) for text in texts if text != FITS]
    before = [condition for condition in conditions if condition.names <= FIELDS]
    after = tuple(condition for condition in conditions if not condition.names <= FIELDS)
    found: list[GridPoint] = []
    dropped = 0
    for point in _points(axes, block.sample, place):
        fields = {name: value for name, value in {**base, **point}.items() if value != DEFAULT}
        if _holds(fields, before, fits=fits):
            found.append(GridPoint(fields=fields, where=after))
        else:
            dropped += 1
    return found, dropped


def _holds(fields: Mapping[str, Any], before: Sequence[Condition], *, fits: bool) -> bool:
    if not before and not fits:
        return True
    try:
        scenario = Scenario.parse(fields, where="scenario")
    except ScenarioError:
        # Kept, if what it says of itself meets the conditions: the row will carry the error.
        known = {**Scenario.defaults(), **fields}
        return all(c.holds(known) for c in before if "world" not in c.names)
    row = scenario.model_dump() | {"world": scenario.world}
    return all(c.holds(row) for c in before) and (not fits or _fits(scenario))


def _fits(scenario: Scenario) -> bool:
    """Whether memory allows the scenario; one that is refused for another reason stays, to become an error row."""
    try:
        check_memory(resolve_scenario(scenario), load_gpu(scenario.gpu))
    except MemoryShortError:
        return False
    except (SimError, HardwareError, WorkloadError):
        return True
    return True


def _axes(block: GridBlock, place: str) -> list[tuple[tuple[str, ...], list[tuple[Any, ...]] | Range]]:
    """Every direction of the block: the names that move along it and their values."""
    axes: list[tuple[tuple[str, ...], list[tuple[Any, ...]] | Range]] = []
    for name, axis in block.grid.items():
        values = axis.values() if isinstance(axis, Range) else axis
        if values is None:
            assert isinstance(axis, Range)
            if block.sample is None:
                raise SimError(f"{place}: grid.{name}: a range without step or factor is continuous: add [sample]")
            axes.append(((name,), axis))
        else:
            axes.append(((name,), [(value,) for value in values]))
    for group in block.zips:
        columns = [axis.values() if isinstance(axis, Range) else axis for axis in group.values()]
        if any(column is None for column in columns):
            raise SimError(f"{place}: zip needs lists, or ranges with step or factor")
        lengths = {name: len(column) for name, column in zip(group, columns, strict=True) if column is not None}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise SimError(f"{place}: zip: lists of different lengths ({counts}): give one value of each a scenario")
        axes.append((tuple(group), list(zip(*columns, strict=True))))
    for names, points in axes:
        if not isinstance(points, Range) and not points:
            raise SimError(f"{place}: {', '.join(names)}: an empty list leaves nothing to run")
    varied = [name for names, _ in axes for name in names]
    twice = {name for name in varied if varied.count(name) > 1}
    if twice:
        raise SimError(f"{place}: {min(twice)} varies in two places: keep one of grid and zip")
    return axes


def _points(
    axes: Sequence[tuple[tuple[str, ...], list[tuple[Any, ...]] | Range]], sample: RandomSample | None, place: str
) -> Iterator[dict[str, Any]]:
    if sample is None:
        count = math.prod(len(values) for _, values in axes if not isinstance(values, Range))
        if count > POINTS_LIMIT:
            raise SimError(f"{place}: {count:,} points, at most {POINTS_LIMIT:,}: add [sample], or split the grid")
        for choice in itertools.product(*(values for _, values in axes)):
            yield {
                name: v for (names, _), vs in zip(axes, choice, strict=True) for name, v in zip(names, vs, strict=True)
            }
        return
    if not axes:
        raise SimError(f"{place}: [sample] has nothing to draw from: add [grid]")
    rng = np.random.default_rng(sample.seed)
    if sample.method == "random":
        draws = rng.random((sample.count, len(axes)))
    else:
        from scipy.stats import qmc  # half a second: only who draws such a sample waits for it

        draws = qmc.LatinHypercube(d=len(axes), rng=rng).random(sample.count)
    for fractions in draws.tolist():
        point: dict[str, Any] = {}
        for (names, values), fraction in zip(axes, fractions, strict=True):
            chosen = (values.at(fraction),) if isinstance(values, Range) else values[int(fraction * len(values))]
            point |= zip(names, chosen, strict=True)
        yield point


def _plain(value: float) -> float:
    rounded = round(value, 9)
    return int(rounded) if float(rounded).is_integer() else rounded
