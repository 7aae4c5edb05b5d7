"""Read a trace, sum it up, and find what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.errors import SimError
from traces.advice import advise
from traces.advised import Advice
from traces.capture import Capture, Category, Finding
from traces.classify import Classes, classify, load_rules
from traces.critical import CriticalPath, critical_path
from traces.lint_capture import lint_capture, lint_name
from traces.lint_file import lint_file
from traces.read.load import Window, read_trace
from traces.read.tools import is_chrome
from traces.summary import Summary, summarise


class InspectError(SimError):
    """A wish about a trace that cannot be met as written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inspection:
    """A capture and everything that ``wattline inspect`` says of it."""

    capture: Capture
    classes: Classes
    summary: Summary
    path: CriticalPath
    findings: Sequence[Finding]
    advice: Sequence[Advice] = ()


def inspect_trace(
    paths: Sequence[Path], *, window: Window | None = None, rules: Path | None = None, lint: bool = False, top: int = 10
) -> Inspection:
    """Read ``paths`` as one capture and sum it up; ``lint`` adds advice, and what others lose of each file."""
    own = load_rules(rules) if rules is not None else ()
    whole = read_trace(list(paths), window)
    classes = classify(whole, own)
    findings = list(whole.findings)
    if lint:
        findings += lint_capture(whole, classes)
        for source in map(Path, whole.sources):
            if is_chrome(source):
                findings += lint_file(source) + lint_name(source)
    summary = summarise(whole, classes, top=top)
    advice: Sequence[Advice] = ()
    if lint:
        from sim.replay.advice import with_savings  # simulates: its imports cost more than to read most traces

        advice = with_savings(whole, classes, advise(whole, classes, summary))
    return Inspection(
        capture=whole,
        classes=classes,
        summary=summary,
        path=critical_path(whole, classes),
        findings=findings,
        advice=advice,
    )


def window_of(text: str | None, ranks: Sequence[int] = (), categories: Sequence[str] = ()) -> Window | None:
    """A window from its command-line spelling.

    >>> window_of("5:7.5", ranks=[1])
    Window(start_ms=5.0, end_ms=7.5, ranks=(1,), categories=None)

    Raises :class:`InspectError` on a window that is no pair of times.
    """
    start, end = None, None
    if text is not None:
        first, colon, last = text.partition(":")
        try:
            start, end = (float(part) if part else None for part in (first, last))
        except ValueError:
            colon = ""
        if not colon or (start is not None and end is not None and not start < end):
            raise InspectError(f"window = '{text}': give START:END in milliseconds, START before END, like 5:7.5")
    if text is None and not ranks and not categories:
        return None
    return Window(
        start_ms=start,
        end_ms=end,
        ranks=tuple(ranks) or None,
        categories=tuple(int(Category[name.upper()]) for name in categories) or None,
    )
