"""What is decoded of an event of a Chrome trace: the arguments that are used, of profilers and of ours."""

from __future__ import annotations

import math
from typing import Any

import msgspec

Loose = int | float | str | None


class Args(msgspec.Struct, gc=False, rename={
    "external_id": "External id", "operation": "Collective name", "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems", "group_size": "Group size", "group": "Process Group Name",
    "ranks": "Process Group Ranks", "sequence": "Seq", "moved_bytes": "bytes", "input_dims": "Input Dims",
    "own_ranks": "ranks", "label": "name"
}):  # fmt: skip
    """The arguments that are used; all others are skipped unparsed. In Kineto's order: those are found quickest."""

    external_id: Loose = None
    device: Loose = None
    stream: Loose = None
    correlation: Loose = None
    grid: tuple[Loose, ...] | Loose = None
    block: tuple[Loose, ...] | Loose = None
    operation: Loose = None
    elements_in: Loose = None
    elements_out: Loose = None
    group_size: Loose = None
    group: Loose = None
    ranks: Loose | list[Loose] = None
    dtype: Loose = None
    sequence: Loose = None
    moved_bytes: Loose = None
    energy_j: Loose = None
    blocks: Loose = None
    family: Loose = None
    op: Loose = None
    own_ranks: Any = None  # this and the sizes below are anything in traces that are not ours
    buffer_bytes: Loose = None
    m: Any = None
    n: Any = None
    k: Any = None
    count: Any = None
    cuda_sync_kind: Loose = None
    input_dims: msgspec.Raw = msgspec.Raw(b"")  # read for the operators that matter only
    wait_on_stream: Loose = None
    wait_on_cuda_event_record_corr_id: Loose = None
    label: Loose = None  # of a process or thread
    correlation_id: Loose = None  # as XLA writes it


class OwnArgs(Args, gc=False):
    """Those of our own traces: sizes of kernels (``STATED``), values of counters, steps of a served run."""

    value: Any = None  # of a counter
    rows: Any = None
    width: Any = None
    bytes_moved: Any = None
    batch: Any = None
    q_len: Any = None
    kv_len: Any = None
    q_heads: Any = None
    kv_heads: Any = None
    head_dim: Any = None
    v_head_dim: Any = None
    causal: Any = None
    latent: Any = None
    experts: Any = None
    distinct: Any = None
    tiles128: Any = None  # of grouped products
    tiles256: Any = None
    rows_beyond128: Any = None
    slices: Any = None  # of low-rank adapters
    rank: Any = None
    up: Any = None
    widest: Any = None
    slots: Any = None
    weights: Any = None
    engine: Any = None
    scales: Any = None
    inner: Any = None  # of an engine's grouped products
    tokens: Any = None
    tiles: Any = None
    images: Any = None
    fresh: Any = None
    backward: Any = None
    masked: Any = None
    pixels: Any = None  # of convolutions
    read: Any = None
    channels_in: Any = None
    channels_out: Any = None
    taps: Any = None
    channels_last: Any = None
    out_dtype: Any = None
    kv_dtype: Any = None
    steps: Any = None


class Event(msgspec.Struct, gc=False):
    """One event; values may be of the wrong type, which is mended and counted, but not of a nested one.

    Times are numbers here, and where that would lose nanoseconds, or they are none, texts (:class:`ExactEvent`).
    """

    ph: str | None = None
    cat: str | None = None
    name: Loose = None
    pid: Loose = None
    tid: Loose = None
    ts: int | float | msgspec.Raw = math.nan
    dur: int | float | msgspec.Raw = math.nan
    id: Any = None
    args: Args | Loose | list[Any] = None


class QuickEvent(Event, gc=False):
    """One event whose times are numbers, which is most of a file."""

    ts: int | float = math.nan
    dur: int | float = math.nan


class ExactEvent(Event, gc=False):
    """One event whose times stay as written: a float of epoch microseconds would lose nanoseconds."""

    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")


class OwnQuickEvent(QuickEvent, gc=False):
    """One event of ours, its times numbers."""

    args: OwnArgs | Loose | list[Any] = None


class OwnExactEvent(ExactEvent, gc=False):
    """One event of ours, its times as written."""

    args: OwnArgs | Loose | list[Any] = None


NOTHING = Args()
