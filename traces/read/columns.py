"""Columns of values as events hold them: names numbered, times in whole nanoseconds, integers, joules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from traces.capture import NONE
from traces.read.events import Reading
from traces.read.rows import Rows
from traces.read.schema import Event, Loose
from traces.read.values import TIME_LIMIT_NS, product, whole
from traces.records import Floats, Ints

COUNTS_LIMIT = 1 << 16  # different grids that are kept
JOULES_LIMIT = 1e12  # of one piece of work: far beyond any
MISSING = np.iinfo(np.int64).min
DOUBLE_HOLDS_NS_US = float(1 << 43)  # up to here a double of microseconds tells nanoseconds apart


class TooCoarse(Exception):  # noqa: N818 - no error: the file is read again, times as written
    """Times that numbers do not hold to the nanosecond."""


def name_column(texts: Sequence[Loose], rows: Rows) -> Ints:
    """Numbers of names; ``NONE`` where there is none."""
    names: dict[Any, int] = rows.names  # asked for what may be no text
    found = list(map(names.get, texts))
    if None in found:
        found = [
            names.setdefault(text, len(names)) if type(text) is str else NONE if text is None else rows.name(text)
            for text in texts
        ]
    return np.array(found, dtype=np.int64)


def times(events: list[Event], reading: Reading) -> tuple[list[Event], Ints, Ints]:
    """Events that have times, their starts and durations in nanoseconds; the others are counted."""
    start, dur = ns_column([event.ts for event in events], reading), ns_column([event.dur for event in events], reading)
    unknown, backwards = (start == MISSING) | (dur == MISSING), (dur < 0) & (dur != MISSING)
    known = ~(unknown | backwards)
    if known.all():
        return events, start, dur
    for rule, mask in (("time-missing-or-not-finite", unknown), ("negative-duration", backwards & ~unknown)):
        if mask.any():
            reading.note(rule, count=int(mask.sum()))
    return [event for event, good in zip(events, known.tolist(), strict=True) if good], start[known], dur[known]


def ns_column(values: list[Any], reading: Reading) -> Ints:
    """Microseconds to whole nanoseconds, exactly; ``MISSING`` where they are none.

    Raises :class:`TooCoarse` on numbers that are no longer exact: their texts are.
    """
    if msgspec.Raw in set(map(type, values)):
        return _ns_of_texts([bytes(value) for value in values], reading)
    value_us = np.array(values, dtype=np.float64)
    missing = np.isnan(value_us)
    if not (np.abs(value_us[~missing]) < DOUBLE_HOLDS_NS_US).all():
        raise TooCoarse
    return np.where(missing, MISSING, _whole_ns(np.where(missing, 0.0, value_us)))


def _whole_ns(value_us: Floats) -> Ints:
    """Whole and part on their own are exact where a double of microseconds tells nanoseconds apart."""
    whole_us = np.floor(value_us)
    return np.asarray(whole_us.astype(np.int64) * 1000 + np.rint((value_us - whole_us) * 1000).astype(np.int64))


def _ns_of_texts(texts: list[bytes], reading: Reading) -> Ints:
    try:
        value_us = np.array(texts, dtype="S").astype(np.float64)
    except ValueError:
        value_us = np.full(len(texts), np.inf)
    plain = np.abs(value_us) < DOUBLE_HOLDS_NS_US
    found = _whole_ns(np.where(plain, value_us, 0.0))
    for place in np.flatnonzero(~plain).tolist():
        found[place] = _exact_ns(texts[place], reading)
    return found


def _exact_ns(text: bytes, reading: Reading) -> int:
    """One time, digit by digit."""
    try:
        exact = Decimal(text.decode().strip('" ')).scaleb(3)
        value = round(exact) if abs(exact) < TIME_LIMIT_NS else MISSING
    except (ValueError, ArithmeticError):
        return MISSING
    if text[:1] == b'"':
        reading.note("time-as-text")
    return value


def int_column(values: Sequence[Any], parse: Callable[[Any], int] = whole) -> Ints:
    """A column of integers: at once where all are integers or none is there, else one by one."""
    if values and type(first := values[0]) is int and values.count(first) == len(values):  # a device, a stream
        return np.full(len(values), parse(first), dtype=np.int64)
    if all_none(values):
        return np.full(len(values), NONE, dtype=np.int64)
    if set(map(type, values)) == {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            pass
    return np.array([parse(value) for value in values], dtype=np.int64)


def stream_number(value: Any) -> int:
    """7 of 7, '7' and 'stream 7' (2021)."""
    if isinstance(value, str) and (digits := re.search(r"\d+", value)) is not None:
        return int(digits.group()) & 0xFFFFFFFF
    return whole(value)


class _Counts(dict[Any, int]):
    """Blocks of a grid, threads of a block, each worked out once: asking a table is cheaper than calling a function."""

    def __missing__(self, value: Any) -> int:
        count = product(*value) if type(value) is tuple else NONE
        if len(self) < COUNTS_LIMIT:
            self[value] = count
        return count


_counts = _Counts()


def count_column(values: Sequence[Any]) -> Ints:
    """Blocks of grids, threads of blocks; ``NONE`` where it is none."""
    return np.fromiter(map(_counts.__getitem__, values), dtype=np.int64, count=len(values))


def all_none(values: Sequence[Any]) -> bool:
    """Whether no value is there."""
    return not values or (values[0] is None and values.count(None) == len(values))


def joules_of(value: Any) -> float:
    """Energy; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < JOULES_LIMIT:
        return math.nan
    return float(value)


def text_of(value: Any) -> str:
    """As text; empty where there is none."""
    return "" if value is None else str(value)
