"""Kernels of a simulated trace under the names that real libraries give them (``data/library_names.toml``)."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from inputs.texts import parse_toml
from traces.errors import TraceError
from traces.records import SpanKind, Trace

DATA = Path(__file__).parents[1] / "data" / "library_names.toml"


@cache
def _rules() -> tuple[tuple[re.Pattern[str], str], ...]:
    rules = parse_toml(DATA.read_text(encoding="utf-8"), DATA.name, TraceError)["rule"]
    return tuple((re.compile(rule["fits"]), rule["name"]) for rule in rules)


def with_library_names(trace: Trace, architecture: str) -> Trace:
    """``trace`` whose kernels have the names of a library on GPUs of that architecture; ours stay as arguments.

    What no rule knows keeps its name.
    """
    return replace(trace, kinds=[_named(kind, architecture) for kind in trace.kinds])


def _named(kind: SpanKind, architecture: str) -> SpanKind:
    if kind.category != "kernel":
        return kind
    operation = kind.args.get("op") or kind.args.get("dtype") or "-"
    text = f"{architecture} {kind.args.get('family')} {operation} {kind.name}"
    found = next((name for pattern, name in _rules() if pattern.search(text) is not None), kind.name)
    return replace(kind, name=found, args={"kernel": kind.name, **kind.args})
