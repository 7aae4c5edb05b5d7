"""What a kernel of our own timelines states of its work."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from traces.capture import Stated
from workloads.errors import WorkloadError
from workloads.kernel_names import Elementwise, EngineOp
from workloads.storage import storage
from workloads.work import (
    AdapterGemmWork,
    AttentionWork,
    ConvolutionWork,
    DType,
    ElementwiseWork,
    GemmWork,
    GroupedGemmWork,
    RoutedGemmWork,
    Work,
)

Product = GemmWork | GroupedGemmWork | RoutedGemmWork | AdapterGemmWork | ConvolutionWork
SIZE_LIMIT, BYTES_LIMIT = 2.0**28, 2.0**40
# What a kernel states by name, and what may be 0 or false.
NAMES = frozenset({"op", "dtype", "out_dtype", "kv_dtype", "weights", "engine", "scales"})
MAY_BE_0 = frozenset(
    {"rows_beyond128", "bytes_moved", "causal", "latent", "up", "fresh", "backward", "masked", "channels_last"}
)


def work_of(stated: Stated) -> Work | None:
    """What a simulated kernel states of its work; None of a collective, and where this release has no such work.

    >>> work_of((("family", "gemm"), ("m", 8), ("n", 16), ("k", 32), ("dtype", "fp16"))).dtype
    <DType.FP16: 'fp16'>
    """
    said = dict(stated)
    marks = {"slices": AdapterGemmWork, "taps": ConvolutionWork, "tiles": RoutedGemmWork, "experts": GroupedGemmWork}
    kinds: dict[object, type[Product | AttentionWork | ElementwiseWork]] = {
        "gemm": next((kind for mark, kind in marks.items() if mark in said), GemmWork),
        "attention": AttentionWork,
        "elementwise": ElementwiseWork,
    }
    kind = kinds.get(said.get("family"))
    if kind is None:
        return None
    given: dict[str, Any] = {field.name: said[field.name] for field in fields(kind) if field.name in said}
    if not all(_sound(name, value) for name, value in given.items()):
        return None
    try:
        given |= {name: DType(given[name]) for name in ("dtype", "out_dtype", "kv_dtype") if name in given}
        given |= {"weights": storage(given["weights"])} if given.get("weights") is not None else {}
        return kind(**given | ({"op": _operation(given["op"])} if "op" in given else {}))
    except (TypeError, ValueError, WorkloadError):
        return None


def _sound(name: str, value: object) -> bool:
    """Whether a size, flag or name is one that a work can have."""
    if name in NAMES:
        return isinstance(value, str)
    if name == "tiles":
        return isinstance(value, tuple) and all(len(row) == 2 and min(row) > 0 for row in value)
    return (
        isinstance(value, int | float)
        and (value >= 0 if name in MAY_BE_0 else value > 0)
        and value <= (BYTES_LIMIT if name == "bytes_moved" else SIZE_LIMIT)
    )


def _operation(name: str) -> Elementwise | EngineOp:
    """An operation by its name, the framework's or an engine's."""
    return Elementwise(name) if name in set(Elementwise) else EngineOp(name)
