"""The pages say what is so: commands print what is shown, examples load and run, links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hardware.catalog import parse_gpu
from sim.scenario.spec import Scenario
from tests import docs
from tests.docs_commands import PARSED, parse, prepare, small, why_parsed
from tests.traces_kit import recorded_rows
from workloads.model_file import parse_model

ROOT = Path(__file__).parents[1]
DOCS = (
    "howto", "records", "detail", "layouts", "overlap", "experts", "sweep", "serving", "closed_form", "outputs", "ui",
    "replay", "engines", "compiled",
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


# -- what the pages print, and the commands and code that they show ----------------------------------------------


@pytest.mark.parametrize("page", [page for page in docs.PAGES if any(b.shell for b in docs.blocks(page))])
def test_printed_blocks_are_what_their_commands_print(page: str) -> None:
    """``python -m tests.docs --write`` renews them."""
    stale = docs.check(page)
    assert not stale, "\n\n".join(stale)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files under the names that pages use."""
    made = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        prepare(made)
    for name in ("records", "benchmarks", "docs"):
        (made / name).symlink_to(ROOT / name)
    return made


@pytest.mark.parametrize("page", docs.PAGES)
def test_commands_without_their_output_run(page: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At small sizes; those of ``docs_commands.PARSED`` are only parsed, for the reasons given there."""
    monkeypatch.chdir(inputs)
    steps = [s for b in docs.blocks(page) if b.shell and not b.not_run for s in b.steps() if s.printed is None]
    for words in dict.fromkeys([*(step.words for step in steps), *docs.mentions(page)]):
        if parse(words) and words[0] == "wattline" and why_parsed(words) is None:
            given = [
                name
                for word in small(words)
                for name in (sorted(map(str, Path().glob(word))) if "*" in word else [word])
            ]
            code, said = docs.outcome(["wattline", *given])
            assert code == 0, f"{page}: wattline {' '.join(given)}: {said}"


@pytest.mark.parametrize(
    "block",
    [b for page in docs.PAGES for b in docs.blocks(page) if b.language == "python" and not b.not_run],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_python_of_a_page_runs(block: docs.Block, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    exec(compile(block.text, f"{block.page}:{block.line}", "exec"), {"__name__": "__main__"})


def test_the_readme_reaches_its_questions_in_600_words() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = text[: text.index("## Questions")]
    assert all(f"\n## {heading}\n" in first for heading in ("Install", "Five minutes"))
    prose = re.sub(r"^```.*?^```|<!--.*?-->", " ", first, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # where links lead is not read
    assert len(re.findall(r"\w[\w'.,%-]*", prose)) <= 600
    errors = [line for line in first.splitlines() if line.startswith("| ") and line.count("%") == 2]
    assert len(errors) == 3 and all(line in text[text.index("## What the numbers rest on") :] for line in errors)


def test_no_block_is_left_out_silently() -> None:
    """Each is run, parsed, of a language that other tests read, or says why it is not run."""
    for page in docs.PAGES:
        for block in docs.blocks(page):
            where = f"{page}:{block.line}"
            assert block.language in ("", "console", "sh", "bash", "python", "toml", "sql"), where
            if block.shell and not block.not_run:
                assert all(step.words[0] in ("wattline", "python", "make", "pip") for step in block.steps()), where
                assert block.steps(), where
    assert all(len(reason) > 5 for reason in PARSED.values())


PAGE = """# Page

```
$ wattline gpus
...
old  41.5 W
```

<!-- not run: takes an hour -->
```
$ wattline models
nothing
```

```
wattline kernel gemm --m 8 \\
  --n 8  # small
```
"""


def test_blocks_are_read_as_their_readers_do() -> None:
    shown, kept, last = docs.blocks("docs/howto.md", PAGE)
    (step,) = shown.steps()
    assert (step.words, step.printed) == (("wattline", "gpus"), ("...", "old  41.5 W"))
    assert (shown.not_run, kept.not_run) == (None, "takes an hour")
    assert last.steps()[0].words == ("wattline", "kernel", "gemm", "--m", "8", "--n", "8")


@pytest.mark.parametrize(
    ("printed", "real", "stale"),
    [
        (["a 1.50 J"], ["a   1.51 J"], False),
        (["a 1.50 J"], ["a 1.52 J"], True),
        (["a 1.50 J"], ["b 1.50 J"], True),
        (["12 rows"], ["13 rows"], True),
        (["a"], ["a", "b"], True),
        (["a", "b"], ["a"], True),
        (["a", "..."], ["a", "b", "c"], False),
        (["...", "c"], ["a", "b", "c"], False),
        (["...", "b"], ["a", "b", "c"], True),
        (["a", "...", "c"], ["a", "b", "c"], False),
        (["...", "d"], ["a", "b", "c"], True),
        (["┏━━━┓"], ["┏━━━━┓"], False),
    ],
)
def test_stale_lines_are_seen(printed: list[str], real: list[str], stale: bool) -> None:
    assert bool(docs.differences(printed, real)) is stale


def test_writing_puts_the_real_output_in_and_keeps_what_is_elided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "run", lambda _: "first\nold  43.0 W\nlast\n")
    (told,) = docs.check("page.md", write=True)
    assert "- old  41.5 W\n+ old  43.0 W" in told
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text == PAGE.replace("old  41.5 W\n", "old  43.0 W\n...\n")
    assert docs.check("page.md") == []
