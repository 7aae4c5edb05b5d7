"""Paragraphs of the studies' pages: Markdown in ``sim/studies/text``, a file a page, parts after ``<!-- name -->``."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files

_MARK = re.compile(r"^<!-- (\w+) -->$", re.MULTILINE)


def prose(page: str, part: str) -> str:
    """One part of a page, without the blank lines around it.

    >>> prose("split", "why").splitlines()[0]
    '## Why'
    """
    return _parts(page)[part]


@lru_cache(maxsize=32)
def _parts(page: str) -> dict[str, str]:
    text = (files("sim.studies") / "text" / f"{page}.md").read_text(encoding="utf-8")
    _, *found = _MARK.split(text)
    return {name: part.strip("\n") for name, part in zip(found[::2], found[1::2], strict=True)}
