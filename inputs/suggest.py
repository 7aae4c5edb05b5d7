"""What a refusal of an unknown name proposes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inputs.texts import Refusal, shown


def nearest(name: str, known: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6) -> str:
    """The nearest of the ``known`` names; where none is near, ``otherwise``, or all of them.

    >>> nearest("bacth", ("batch", "seq_len")), nearest("x", ("batch", "seq_len"))
    ("did you mean 'batch'?", 'known: batch, seq_len')
    """
    import difflib  # takes milliseconds, which only a refusal needs

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known: {', '.join(names)}" if otherwise is None else otherwise


def refuse_unknown(table: dict[str, Any], known: tuple[str, ...], where: str, refusal: Refusal) -> None:
    """Refuse keys of ``table`` that are not ``known``."""
    for key in table:
        if key not in known:
            raise refusal(f"{where}: unknown key {shown(key)}: {nearest(key, known)}")
