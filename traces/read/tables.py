"""Events of a category into the columns of their table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from traces.capture import NONE, Category, CollectiveArgs, MatrixProduct
from traces.read.columns import (
    MISSING,
    all_none,
    count_column,
    int_column,
    joules_of,
    name_column,
    ns_column,
    stream_number,
    text_of,
    times,
)
from traces.read.events import Reading
from traces.read.own import COUNTERS
from traces.read.rows import Rows, packed
from traces.read.schema import NOTHING, Args, Event
from traces.read.values import whole
from traces.records import Ints

WORK = {
    "kernel": Category.KERNEL, "gpu_memcpy": Category.MEMCPY, "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET, "memset": Category.MEMSET,
}  # fmt: skip
CALLS = {  # CUDA and HIP, Intel's XPU, other backends (libkineto's list of activities); without a prefix: 2021
    "cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver", "runtime",
    "driver",
}  # fmt: skip
ANNOTATIONS = {"user_annotation": 0, "gpu_user_annotation": 1, "layer": 1, "phase": 1}
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}  # place of the first factor among the inputs
STATED = (
    "family", "op", "m", "n", "k", "count", "dtype", "blocks", "rows", "width", "bytes_moved", "batch", "q_len",
    "kv_len", "q_heads", "kv_heads", "head_dim", "v_head_dim", "causal", "latent", "experts", "distinct",
    "tiles128", "tiles256", "rows_beyond128", "slices", "rank", "up", "widest", "slots", "out_dtype", "kv_dtype",
    "weights", "engine", "scales", "inner", "tokens", "tiles", "images", "fresh", "backward", "masked",
    "pixels", "read", "channels_in", "channels_out", "taps", "channels_last",
)  # fmt: skip


def table_of(category: str) -> Callable[[list[Event], str, Rows, Reading], None] | None:
    """What takes events of a category; None leaves them unread."""
    if category in WORK:
        return take_work
    if category in CALLS:
        return take_calls
    if category in ANNOTATIONS:
        return take_annotations
    if category == "cpu_op":
        return take_products
    return take_waits if category == "cuda_sync" else None


def take_work(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:
    """Kernels, copies and memsets."""
    events, start, dur = times(events, reading)
    if not events:
        return
    args = args_of(events)
    correlation, grids = [a.correlation for a in args], [a.grid for a in args]
    if None in correlation and (bare := [a for a in args if a.correlation is None].count(NOTHING)):
        reading.note("work-without-arguments", count=bare)
    many = len(events)
    # A comprehension a column: tuples of a row each would keep the garbage collector busy.
    family, operation = [a.family for a in args], [a.operation for a in args]
    ours, nothing = not all_none(family), np.full(many, NONE)
    joules = [a.energy_j for a in args]
    columns = [
        name_column([e.name or "unnamed" for e in events], rows),
        np.full(many, int(WORK[category]), dtype=np.int64),
        int_column(_else([a.device for a in args], (e.pid for e in events))),
        int_column(_else([a.stream for a in args], (e.tid for e in events)), stream_number),
        start,
        dur,
        int_column(correlation),
        np.array([_collective(a, rows) if a.operation is not None or a.family is not None else NONE for a in args])
        if ours or not all_none(operation)
        else nothing,
        int_column(_else([a.buffer_bytes for a in args], (a.moved_bytes for a in args))),
        int_column([a.blocks for a in args]) if all_none(grids) else _blocks(grids, args),
        count_column([a.block for a in args]),
        name_column(family, rows) if ours else nothing,
        int_column([a.external_id if a.family is None else _own_work(a, rows) for a in args])
        if ours
        else int_column([a.external_id for a in args]),
    ]
    ghost = (start == 0) & (dur == 0)
    if ghost.any():
        reading.note("kernel-without-time", count=int(ghost.sum()))
    keep = ~ghost
    energy_j = np.array([joules_of(value) for value in joules]) if not all_none(joules) else np.full(many, np.nan)
    rows.work.append(packed([column[keep] for column in columns]))
    rows.energy_j.append(energy_j[keep])


def _blocks(grids: list[Any], args: list[Args]) -> Ints:
    """Blocks of each grid, or those that stand in its place where there is none."""
    blocks = count_column(grids)
    for place in [number for number, grid in enumerate(grids) if grid is None] if None in grids else []:
        blocks[place] = whole(args[place].blocks)
    return blocks


def _else(values: list[Any], others: Iterator[Any]) -> list[Any]:
    """``values``, and where there is none, those of ``others``."""
    if None not in values:
        return values
    return [other if value is None else value for value, other in zip(values, others, strict=True)]


def take_calls(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:  # noqa: ARG001 - one signature
    """Calls of the host."""
    events, start, dur = times(events, reading)
    correlation = int_column([a.correlation for a in args_of(events)])
    name, thread = (
        name_column([e.name or "unnamed" for e in events], rows),
        int_column([e.tid for e in events], stream_number),
    )
    rows.calls.append(packed([name, thread, start, dur, correlation]))


def take_annotations(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:
    """Named regions."""
    events, start, dur = times(events, reading)
    name, process = name_column([e.name or "unnamed" for e in events], rows), int_column([e.pid for e in events])
    lane, on_gpu = (
        int_column([e.tid for e in events], stream_number),
        np.full(len(events), ANNOTATIONS[category], dtype=np.int64),
    )
    rows.annotations.append(packed([name, process, lane, on_gpu, start, dur]))


def take_waits(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:  # noqa: ARG001 - one signature
    """Waits for events."""
    events, start, dur = times(events, reading)
    args = args_of(events)
    kind = [a.cuda_sync_kind or e.name or "unnamed" for a, e in zip(args, events, strict=True)]
    device = [a.device if a.device is not None else e.pid for a, e in zip(args, events, strict=True)]
    columns = [
        name_column(kind, rows),
        int_column(device),
        int_column([a.stream for a in args]),
        int_column([a.wait_on_stream for a in args]),
        int_column([a.wait_on_cuda_event_record_corr_id for a in args]),
        int_column([a.correlation for a in args]),
        start,
        dur,
    ]
    rows.waits.append(packed(columns))


def take_products(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:  # noqa: ARG001 - one signature
    """Host operators that multiply two matrices whose shapes were recorded."""
    for event in events:
        first = PRODUCTS.get(event.name) if type(event.name) is str else None
        if first is None or not isinstance(event.args, Args) or (operator := whole(event.args.external_id)) == NONE:
            continue  # without an id it would be that of all work without one
        try:
            (m, k), (_, n) = msgspec.json.decode(event.args.input_dims, type=list[list[int]])[first : first + 2]
        except (msgspec.MsgspecError, ValueError):
            continue  # shapes not recorded, or not of two matrices
        rows.products[operator] = MatrixProduct(m=m, k=k, n=n)


def take_arrows(events: list[Event], rows: Rows, reading: Reading) -> None:
    """Arrows between kernels of ours."""
    half = np.array([int(e.ph == "f") for e in events])
    columns = [
        int_column([e.id for e in events]),
        half,
        int_column([e.pid for e in events]),
        int_column([e.tid for e in events]),
    ]
    time_ns = ns_column([e.ts for e in events], reading)
    rows.arrows.append(np.stack([*columns, time_ns])[:, time_ns != MISSING])


def take_counts(events: list[Event], rows: Rows, reading: Reading) -> None:
    """Values of our counters."""
    value = np.array([joules_of(getattr(a, "value", None)) for a in args_of(events)])
    name = np.array([COUNTERS.index(str(e.name)) for e in events])
    time_ns = ns_column([e.ts for e in events], reading)
    known = time_ns != MISSING
    rows.counts.append((np.stack([name, int_column([e.pid for e in events]), time_ns])[:, known], value[known]))


def args_of(events: list[Event]) -> list[Args]:
    """Their arguments; none where they are no table."""
    args: list[Any] = [event.args for event in events]
    if all(issubclass(kind, Args) for kind in set(map(type, args))):
        return args
    return [one if isinstance(one, Args) else NOTHING for one in args]


def _collective(a: Args, rows: Rows) -> int:
    own = a.family == "communication"  # written by wattline
    operation = a.op if own else a.operation
    if operation is None:
        return NONE
    size = len(a.own_ranks) if own and isinstance(a.own_ranks, list) else a.group_size
    args = CollectiveArgs(
        operation=str(operation), group=text_of(a.group), group_size=whole(size),
        ranks=text_of(a.own_ranks if own else a.ranks), dtype="byte" if own else text_of(a.dtype),
        elements_in=whole(a.buffer_bytes if own else a.elements_in), elements_out=whole(a.elements_out),
        sequence=whole(a.sequence),
    )  # fmt: skip
    return rows.collectives.setdefault(args, len(rows.collectives))


def _size(value: object) -> int | float | str | tuple[tuple[float, ...], ...] | None:
    """A size as it can be a key: a number, a name, or rows of numbers; None of anything else."""
    if isinstance(value, int | float | str):
        return value
    rows = value if isinstance(value, list) else ()
    if not rows or not all(isinstance(row, list) and all(isinstance(one, int | float) for one in row) for row in rows):
        return None
    return tuple(tuple(row) for row in rows)


def _own_work(a: Args, rows: Rows) -> int:
    """What a kernel of ours states of itself, as an operator that no host has."""
    sizes = ((name, _size(getattr(a, name, None))) for name in STATED)
    stated = tuple((name, size) for name, size in sizes if size is not None)
    product = MatrixProduct(m=whole(a.m), k=whole(a.k), n=whole(a.n))
    plain = a.family == "gemm" and a.count in (None, 1) and min(product.m, product.k, product.n) > 0
    return rows.own_work(stated, product if plain else None)
