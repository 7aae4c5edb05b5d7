"""Tables as CSV that a spreadsheet shows and does not run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# A spreadsheet takes such a cell for a formula. The quotes before it are ours, or were there: one more is one to take.
FORMULA = re.compile(r"'*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf|nan")


def to_csv(table: pd.DataFrame) -> bytes:
    """``table`` as CSV; texts that would be formulas begin with a quote, numbers stay as they are.

    >>> import pandas as pd
    >>> to_csv(pd.DataFrame({"name": ["=1+1", "-5", "k"]})).decode().split()
    ['name', "'=1+1", '-5', 'k']
    """
    texts = _texts(table)
    safe = table.assign(**{name: table[name].astype(object).map(_quoted) for name in texts}) if texts else table
    return safe.rename(columns=_quoted).to_csv(index=False).encode("utf-8", "backslashreplace")


def without_quotes(table: pd.DataFrame) -> pd.DataFrame:
    """A table that :func:`to_csv` wrote, its texts as they were."""
    texts = _texts(table)
    return table.assign(**{name: table[name].map(_bare) for name in texts}) if texts else table


def _texts(table: pd.DataFrame) -> list[str]:
    """Columns that are no numbers."""
    import pandas as pd  # takes as long as a run: commands that write no table do not wait for it

    return [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]


def _quoted(cell: object) -> object:
    if isinstance(cell, str) and FORMULA.match(cell) and not NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def _bare(cell: object) -> object:
    return cell[1:] if isinstance(cell, str) and cell.startswith("'") and FORMULA.match(cell) else cell
