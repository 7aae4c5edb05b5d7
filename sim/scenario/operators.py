"""Overlap of single operators: ``o_gemm=4x8,down_gemm=2x16`` is 4 pieces on 8 blocks, 2 on 16."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sim.scenario.partition import pairs
from workloads.ops import Overlap

_SETTING = re.compile(r"(\d+)(?:x(\d+))?(?:@(\d+))?")
_KEYS = ("chunks", "comm_ctas", "overlap_stage")


def setting(text: str) -> Overlap:
    """``4``: four pieces; ``4x8``: on eight blocks; ``4x8@1``: in one stage with other nodes of ``@1``.

    >>> setting("4x8").comm_ctas, setting("2@1").stage
    (8, 1)
    """
    found = _SETTING.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise ValueError(f"overlap_ops = '{text}': give chunks, or chunks x blocks, for example 4x8")
    chunks, ctas, stage = (None if part is None else int(part) for part in found.groups())
    assert chunks is not None
    if ctas == 0:
        raise ValueError(f"overlap_ops = '{text}': sums need SMs: give at least one block, or none to leave it open")
    return Overlap(chunks=chunks, comm_ctas=ctas, stage=stage)


def spelled(one: Overlap) -> str:
    """The text of :func:`setting`.

    >>> spelled(Overlap(chunks=4, comm_ctas=8, stage=1))
    '4x8@1'
    """
    ctas = "" if one.comm_ctas is None else f"x{one.comm_ctas}"
    return f"{one.chunks}{ctas}" + ("" if one.stage is None else f"@{one.stage}")


def operators(value: object) -> object:
    """Pairs of a node's name and its setting, from text, a table of texts, or a table of tables.

    >>> operators("o_gemm=4x8"), operators({"o_gemm": {"chunks": 4, "comm_ctas": 8}}), operators({"o_gemm": 4})
    ((('o_gemm', '4x8'),), (('o_gemm', '4x8'),), (('o_gemm', '4'),))
    """
    found = pairs(value)
    if not isinstance(found, tuple):
        return found
    return tuple((name, _text(name, one)) for name, one in found)


def _text(name: Any, one: Any) -> Any:
    if isinstance(one, int) and not isinstance(one, bool):
        return str(one)
    if not isinstance(one, Mapping):
        return one
    unknown = [key for key in one if key not in _KEYS]
    if unknown or "chunks" not in one:
        raise ValueError(f"overlap_ops.{name} = {dict(one)}: give chunks, and comm_ctas or overlap_stage if need be")
    return spelled(Overlap(chunks=one["chunks"], comm_ctas=one.get("comm_ctas"), stage=one.get("overlap_stage")))


def check_operators(found: Iterable[tuple[str, str]] | None, *, tp: int, others: bool) -> None:
    """Refuse settings that cannot be read, or beside one for all operators."""
    names = [name for name, _ in found or ()]
    if len(set(names)) < len(names):
        raise ValueError(f"overlap_ops = {', '.join(names)}: give each node one setting")
    for _, text in found or ():
        setting(text)
    if names and tp == 1:
        raise ValueError("overlap_ops needs tp of at least 2: only its collectives can be cut")
    if names and others:
        raise ValueError("overlap_ops gives each operator its own chunks: leave overlap and overlap_chunks out")
