"""The pages say what is so: examples load, links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hardware.catalog import parse_gpu
from sim.scenario import Scenario
from tests.traces_kit import recorded_rows
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


def test_the_table_of_operand_values_is_what_the_records_hold() -> None:
    """``records.md``, "What the values do": microseconds and watts of the largest product, by its operands."""
    rows = recorded_rows("h100-sxm-80gb/study/values.jsonl", m=4096, n=4096, k=14336)

    def cell(dtype: str, fast: bool, values: str) -> str:
        found = [
            f"{1e6 * row['latency_s']:.0f} us, {row['power_w'][0]:.0f} W"
            for row in rows
            if (row["dtype"], row.get("fast_accumulation", False), row.get("values")) == (dtype, fast, values)
        ]
        return " ".join(found)

    columns = ("normal", "zeros", "small", "bits")
    lines = [
        ("bf16", "bf16", False),
        ("FP8, fast accumulation", "fp8_e4m3", True),
        ("FP8, PyTorch's usual accumulation", "fp8_e4m3", False),
    ]
    page = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    table = [line.strip("|").split("|") for line in page.splitlines() if line.startswith(("| bf16 |", "| FP8, "))]
    assert [[part.strip() for part in line] for line in table] == [
        [name, *(cell(dtype, fast, values) for values in columns)] for name, dtype, fast in lines
    ]
    (zeros,) = (row for row in rows if row["dtype"] == "bf16" and row["values"] == "zeros")
    assert f"the clock of the zeros' product stood at {zeros['sm_clock_mhz'][0]} MHz" in page


def test_the_folders_of_the_records_are_those_that_the_page_names() -> None:
    page = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    named = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "/` |" in line}
    assert named == {f"{path.name}/" for path in (ROOT / "records").glob("*/*") if path.is_dir()}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{page}: {target}"
