"""The pages say what is so: examples load, links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hardware.catalog import parse_gpu
from sim.scenario import Scenario
from workloads.model import parse_model

ROOT = Path(__file__).parents[1]
DOCS = (
    "howto", "records", "detail", "layouts", "overlap", "experts", "sweep", "serving", "closed_form", "outputs",
    "replay",
)  # fmt: skip
STUDIES = ("fusion", "spread", "optima", "split", "uncertainty")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in DOCS),
    *(f"docs/studies/{s}.md" for s in STUDIES),
)


def test_every_toml_example_of_the_howto_is_what_it_claims() -> None:
    text = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    seen = []
    for example in re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL):
        if "d_model" in example:
            seen.append(parse_model(example, where="howto").id)
        elif "hbm_bytes_per_s" in example:
            seen.append(parse_gpu(example, where="howto").id)
        else:
            seen.append(Scenario.parse(tomllib.loads(example), where="howto").model)
    assert seen == ["llama3-70b", "mine-13b", "two-matrix-8b", "mycard-48gb"]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{page}: {target}"
