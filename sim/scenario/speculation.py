"""The fields that say how tokens are drafted, which scenarios and servers have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field

from sim.scenario.field_table import rates

Drafter = Literal["draft_model", "eagle", "mtp", "ngram"]
DraftTokens = Annotated[int, Field(gt=0, le=64)]
Acceptance = Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], BeforeValidator(rates)]
ACCEPTANCE = "chance that a drafted token passes where all before it did: one for all, or one for each, comma-separated"
DRAFT_TOKENS = "tokens drafted a step, one after another"
DRAFTER = (
    "what drafts tokens that a step of decoding checks: another model, one more layer of this (eagle, mtp), or what "
    "the text said before (ngram)"
)
DRAFT_MODEL = "the model that drafts (speculation draft_model)"
SPECULATION_FIELDS = ("speculation", "draft_model", "draft_tokens", "acceptance")


class Speculated(Protocol):
    """What has the fields."""

    speculation: Drafter | None
    draft_model: str | None
    draft_tokens: int
    acceptance: tuple[float, ...] | None


def acceptances(fields: Speculated) -> tuple[float, ...]:
    """The chance of each drafted token; none without speculation."""
    chances = fields.acceptance or ()
    return chances * fields.draft_tokens if len(chances) == 1 else chances


def check_speculation(fields: Speculated, defaults: Mapping[str, Any]) -> None:
    """Raise where the fields contradict each other."""
    if fields.speculation is None:
        for name in SPECULATION_FIELDS[1:]:
            if (value := getattr(fields, name)) != defaults[name]:
                raise ValueError(f"{name} = {value!r} needs speculation: draft_model, eagle, mtp or ngram")
        return
    if fields.acceptance is None:
        raise ValueError("acceptance is missing: give the chance that a drafted token passes, such as 0.8")
    if len(acceptances(fields)) != fields.draft_tokens:
        raise ValueError(
            f"acceptance has {len(fields.acceptance)} entries, draft_tokens is {fields.draft_tokens}: one for all, or "
            "one for each"
        )
    if (fields.draft_model is None) == (fields.speculation == "draft_model"):
        what = (
            "needs a draft_model" if fields.draft_model is None else f"contradicts draft_model = {fields.draft_model}"
        )
        raise ValueError(f"speculation = '{fields.speculation}' {what}")
