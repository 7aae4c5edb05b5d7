"""Inputs of a record, checked before they are predicted: what each field of a row has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from inputs.texts import shown

Inputs = Mapping[str, Any]
SIZES = frozenset(
    {"m", "n", "k", "batch", "seq_len", "kv_len", "q_heads", "kv_heads", "head_dim", "tokens", "width", "bytes"}
)
COUNTS = frozenset(
    {"rows", "heads", "experts", "distinct", "tiles64", "tiles128", "max_rows", "bytes_moved", "copy_bytes_moved",
     "comm_bytes", "text_tokens", "ctas", "comm_ctas",
     "sms", "a_sms", "b_sms", "asked_sms", "asked_b_sms"}
)  # fmt: skip
DEGREES = frozenset(
    {"world", "n_per_burst", "bursts", "tp", "ep", "cp", "dcp", "pp", "dp", "ulysses", "layers", "parts",
     "micro_batches"}
)  # fmt: skip
TEXTS = frozenset(
    {"gpu", "model", "dtype", "op", "phase", "launch", "what", "work", "collective", "layout", "values", "regime"}
)


class NotPredicted(Exception):  # noqa: N818 - a reason, not a failure
    """The kind is not predicted; the text says why."""


def checked(inputs: Inputs, *, besides: AbstractSet[str] = frozenset()) -> Inputs:
    """``inputs`` without nulls, its sizes whole numbers: what a law divides by must not be text or zero.

    ``besides`` are sizes that are means of several draws.
    """
    known = {name: value for name, value in inputs.items() if value is not None}
    for names, is_right, right in SHAPES:
        for name in (names - besides) & known.keys():
            if not is_right(known[name]):
                raise NotPredicted(f"{name} = {shown(known[name])}: give {right}")
    for name in besides & known.keys():
        if not _is_time(known[name]):
            raise NotPredicted(f"{name} = {shown(known[name])}: give a number of at least 0")
    return known


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e6


# What each input is, whatever the kind: laws divide by sizes, and ranks, layers and steps are gone through one by one.
SHAPES: tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...] = (
    (SIZES, lambda value: _is_count(value, 1, 10**13), "a positive whole number"),
    (COUNTS, lambda value: _is_count(value, 0, 10**13), "a whole number of at least 0"),
    (DEGREES, lambda value: _is_count(value, 1, 10_000), "a whole number from 1 to 10,000"),
    (TEXTS, _is_text, "a text"),
    (frozenset({"causal", "fast_accumulation", "lm_head", "sequence_parallel"}), lambda value: isinstance(value, bool),
     "true or false"),
    (frozenset({"period_s", "burst_s", "pause_s", "busy_s", "idle_s", "duration_s"}), _is_time, "a time in seconds"),
    (frozenset({"gemm_mnk"}),
     lambda value: isinstance(value, list) and len(value) == 3 and all(_is_count(item, 1, 10**9) for item in value),
     "a list of three positive whole numbers"),
)  # fmt: skip
