"""One self-contained page of sections: pictures that answer to the pointer, tables, and folded details."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import SimError
from sim.output.files import check_page_ending
from traces.write.files import installed

if TYPE_CHECKING:
    import plotly.graph_objects as go

NEEDED = ("plotly", "jinja2")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text. Columns in ``minor`` are left out on narrow screens, those in ``words`` are set flush left."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    minor: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a page: what it shows, and how to read it. ``folded`` ones open on a click."""

    title: str
    note: str = ""
    figures: Sequence[go.Figure] = ()
    table: TextTable | None = None
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page: ``tiles`` are (label, value, small print) of the headline figures."""

    title: str
    lead: str
    tiles: Sequence[tuple[str, str, str]]
    sections: Sequence[Section]
    command: str
    made_by: str


def check_report(path: Path) -> None:
    """Refuse, before anything is simulated, a file of another kind and a Python without the packages."""
    check_page_ending(path, "--report", "report")
    missing = [name for name in NEEDED if not installed(name)]
    if missing:
        raise SimError(f"--report needs {' and '.join(missing)}: pip install 'wattline[report]'")


def html(page: Page) -> str:
    """The page as text. It loads nothing: the plotting library is in it, compressed, and the browser unpacks it.

    plotly.js is 4.8 MB as text and 2 MB so; pictures of matplotlib would be a tenth of that, but neither fit a phone
    nor say their values.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    folder = files("sim.pages")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = [figure for section in page.sections for figure in section.figures]
    return environment.from_string((folder / "page.html").read_text(encoding="utf-8")).render(
        page=page,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        # A tag inside a string could end the script element.
        figures="[" + ",".join(_bare(figure) for figure in figures).replace("<", "\\u003c") + "]",
        library=base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode(),
    )


def _bare(figure: go.Figure) -> str:
    """Data and layout without plotly's default template: the page brings its own colours."""
    plain = json.loads(figure.to_json())
    plain["layout"].pop("template", None)
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))
