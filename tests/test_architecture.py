"""The structure that CONTRIBUTING.md and docs/architecture.md describe is the one that stands."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PATH = re.compile(r"`((?:sim|hardware|workloads|traces|inputs|tests|benchmarks)/[\w./-]*\w)`")


def rooms() -> list[str]:
    """Packages and modules of ``sim``."""
    found = [path for path in (ROOT / "sim").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return sorted(f"sim.{path.stem}" for path in found if path.stem != "__init__")


def test_import_linter_names_every_room() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert sorted(room.strip() for layer in layers for room in layer.split("|")) == rooms()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    named = [path for path in PATH.findall(page.read_text(encoding="utf-8")) if not re.search("[*A-Z]", path)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_page_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in rooms() if f"`{room.removeprefix('sim.')}`" not in text] == []
