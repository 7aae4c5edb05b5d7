"""Buffers of a collective and the names of its cases."""

from __future__ import annotations

from typing import Any

from hardware.calibrate.suite.comm import part_bytes
from hardware.calibrate.suite.timing import Bench

BF16_BYTES = 2
# Operations by the first letters of what a row names.
PREFIX = {"rs": "reduce_scatter", "ar": "all_reduce", "ag": "all_gather", "aa": "all_to_all", "sr": "sendrecv_ring"}


def collective_buffers(bench: Bench, op: str, full_bytes: int) -> tuple[Any, Any]:
    """The full buffer and the other one of ``op``, random bf16."""
    part = part_bytes(op, full_bytes, bench.comm.world)
    buffer = bench.randn(full_bytes // BF16_BYTES)
    return buffer, buffer if op == "all_reduce" else bench.randn(part // BF16_BYTES)
