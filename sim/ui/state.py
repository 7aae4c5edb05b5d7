"""What the page shows, as fields of two scenarios, and its spelling as a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from sim.errors import SimError
from sim.scenario.spec import Scenario
from workloads.catalog import model_id

SIDES = ("a", "b")
# Fields of a scenario that the page has a control for, in the order of the form.
FIELDS = (
    "model", "gpu", "stack", "phase", "batch", "seq_len", "dtype", "tp", "ep", "pp", "dp", "sequence_parallel",
    "overlap_chunks", "comm_ctas", "sm_clock_mhz", "power_cap_w",
)  # fmt: skip
START = {"model": "llama3-70b", "gpu": "h100-sxm-80gb", "batch": 2, "seq_len": 4096, "tp": 4}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The fields that the user gave, of one scenario or of two side by side."""

    a: Fields
    b: Fields | None = None

    @property
    def sides(self) -> dict[str, Fields]:
        """The scenarios by the letter of their side."""
        return {"a": self.a} | ({} if self.b is None else {"b": self.b})

    def query(self) -> str:
        """The state as the query of a link; :meth:`parse` reads it.

        >>> State(a={"model": "llama3-8b", "tp": 2}).query()
        'a.model=llama3-8b&a.tp=2'
        """
        pairs = [
            (f"{side}.{name}", _text(fields[name]))
            for side, fields in self.sides.items()
            for name in FIELDS
            if name in fields
        ]
        return urlencode(pairs)

    @classmethod
    def parse(cls, link: str) -> State:
        """The state of a link, of its query, or of a model alone; without one, where the page starts.

        >>> State.parse("http://127.0.0.1:8061/token/?a.model=llama3-8b&b.model=llama3-8b&b.tp=2").b
        {'model': 'llama3-8b', 'tp': '2'}
        """
        if link and "=" not in link and "://" not in link:
            return cls(a={"model": model_id(link), "batch": 2, "seq_len": 4096})
        query = urlsplit(link).query if "?" in link else link
        sides: dict[str, Fields] = {}
        for key, value in parse_qsl(query):
            side, point, name = key.partition(".")
            if side not in SIDES or not point or name not in FIELDS:
                known = ", ".join(FIELDS)
                raise SimError(f"link of the page: unknown '{key}': give a.FIELD or b.FIELD, where FIELD is of {known}")
            sides.setdefault(side, {})[name] = value
        return cls(a=sides.get("a") or dict(START), b=sides.get("b"))


def given(names: list[str], values: list[Any]) -> Fields:
    """Fields of a form; empty ones are not given."""
    pairs = zip(names, values, strict=True)
    return {name: value for name, value in pairs if value not in (None, "", [], False)}


def scenario_of(fields: Mapping[str, Any]) -> Scenario:
    """The scenario of a form, which has no word for how experts on several ranks meet their tokens: an all-to-all.

    >>> scenario_of({"model": "qwen3-30b-a3b", "ep": 4}).ep_mode
    'all_to_all'
    """
    if "model" not in fields:
        raise SimError("no model is chosen: pick one")
    extra = {"ep_mode": "all_to_all"} if int(fields.get("ep") or 1) > 1 else {}
    return Scenario.parse({**fields, **extra}, where="form")


def _text(value: Any) -> str:
    return "true" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
