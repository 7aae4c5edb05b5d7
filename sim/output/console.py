"""Where tables and messages meet a terminal: foreign text is text there, never markup and never a command."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from inputs.texts import truncated

TRAILING = re.compile(r"[ \t]+(?=\n|$)")
UNBOUNDED = 100_000  # columns that no table needs
LINE_LIMIT = 300  # characters of an error message


class PlainConsole(Console):
    """A console that shows every string as it is: no markup, no emoji codes, escape bytes made visible.

    Kernels are called ``f(...)::[lambda() (instance 1)]`` and may be called anything: whatever stands in a string, in a
    cell of a table as well, is shown. Bold and colours are asked for with :class:`rich.text.Text` or a style.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "markup": False, "emoji": False})

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does; tables that the width would cut are written row by row, and only terminals get blanks at ends
        of lines.
        """
        objects = tuple(stacked(one) if isinstance(one, Table) and self._cut(one) else one for one in objects)
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as drawn:
            super().print(*objects, **options)
        self.file.write(TRAILING.sub("", drawn.get()))

    def _cut(self, table: Table) -> bool:
        """Whether some word of ``table`` would not fit."""
        return Measurement.get(self, self.options.update(width=UNBOUNDED), table).minimum > self.width

    def render_str(self, text: str, **options: Any) -> Text:
        """``text`` as rich draws it."""
        return super().render_str(visible(text), **options)


def stacked(table: Table) -> Group:
    """Each row of ``table`` as lines of a heading and its value, the first cell above them."""
    lines: list[Any] = [Text(str(table.title), style="italic")] if table.title else []
    columns = [(str(column.header), list(column.cells)) for column in table.columns]
    for cells in zip(*(cells for _, cells in columns), strict=True):
        (_, first), *others = zip((heading for heading, _ in columns), cells, strict=True)
        lines.append(Text(visible(str(first)), style="bold"))
        lines += [Text(visible(f"  {heading}: {cell}".replace("\n", " "))) for heading, cell in others if str(cell)]
    return Group(*lines)


def visible(text: str) -> str:
    r"""``text`` with what would steer a terminal, or fool its reader, spelled out.

    >>> print(visible("k\x1b[2J\u202e"))
    k\x1b[2J\u202e
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\u00a0" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    r"""An error message as it is printed: one line of bounded length.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return truncated(visible(text).replace("\n", "\\n"), LINE_LIMIT)
