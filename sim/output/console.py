"""Where tables and messages meet a terminal: foreign text is text there, never markup and never a command."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from inputs.texts import truncated

LINE_LIMIT = 300  # characters of an error message


class PlainConsole(Console):
    """A console that shows every string as it is: no markup, no emoji codes, escape bytes made visible.

    Kernels are called ``f(...)::[lambda() (instance 1)]`` and may be called anything: whatever stands in a string, in a
    cell of a table as well, is shown. Bold and colours are asked for with :class:`rich.text.Text` or a style.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "markup": False, "emoji": False})

    def render_str(self, text: str, **options: Any) -> Text:
        """``text`` as rich draws it."""
        return super().render_str(visible(text), **options)


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
