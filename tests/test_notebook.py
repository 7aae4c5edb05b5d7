"""The notebook of examples/ runs from top to bottom, and shows what it speaks of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[dev]'")
    pytest.importorskip("ipykernel", reason="pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "kept without outputs"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, folder


def shown(cell: Any) -> dict[str, str]:
    """What a cell shows, by its kind."""
    found: dict[str, str] = {}
    for output in cell.outputs:
        if output.output_type == "stream":
            found[output.name] = output.text
        else:
            found |= output.data
    return found


def test_every_cell_runs_and_shows_something(ran: Any) -> None:
    notebook, folder = ran
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(shown(cell) for cell in cells)
    assert all("stderr" not in shown(cell) for cell in cells)
    first, plotted, *_, refused = cells
    assert "<table>" in shown(first)["text/html"] and "exposed communication" in shown(first)["text/html"]
    assert "ms a step" in shown(plotted)["stdout"] and len(shown(plotted)["image/png"]) > 10_000
    assert "smallest layout that fits is tp 2" in shown(refused)["stdout"]
    assert (folder / "decode.json.gz").stat().st_size > 1_000


def test_the_tables_of_the_notebook_say_what_its_text_says(ran: Any) -> None:
    notebook, _ = ran
    caps = next(cell for cell in notebook.cells if "power_cap_w" in cell.source)
    rows = [line.split() for line in shown(caps)["text/plain"].splitlines()[2:]]
    latency, energy, clock = ([float(row[i]) for row in rows] for i in (1, 2, 3))
    assert latency == sorted(latency, reverse=True) and clock == sorted(clock)
    assert len(energy) == 5 and min(energy) < energy[-1]
