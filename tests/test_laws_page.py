"""docs/laws.md says how constants were found: code and page point at each other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "laws.md").read_text(encoding="utf-8")


def test_sections_that_the_code_names_are_on_the_page() -> None:
    named = set()
    for path in (path for package in ("hardware", "sim") for path in (ROOT / package).rglob("*.py")):
        text = re.sub(r"\s*\n\s*#?\s*", " ", path.read_text(encoding="utf-8"))
        named |= set(re.findall(r'docs/laws\.md, "([^"]+)"', text))
    assert len(named) >= 8
    assert {name for name in named if f"**{name}**" not in PAGE} == set()


def test_files_that_the_page_names_exist() -> None:
    named = re.findall(r"`((?:hardware|sim)/[\w/]+\.py)`", PAGE)
    assert len(named) >= 20
    assert [name for name in named if not (ROOT / name).is_file()] == []
