"""Diffusion stacks as data: which memory-bound kernels an implementation runs around its products and attention."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from workloads.kernel_names import CollectiveOp, EngineOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Kernels of one implementation; ``cross`` and ``joint`` list them by their place in a layer.

    ``element_bytes`` are read and written for each element of a kernel's tensor. ``unfused_qk_norm`` replaces the norm
    of heads in the models ``without_fused_norm``; single layers of those in ``parted_models`` run ``parted`` as well.
    A ring of ranks runs ``ring_block`` after each attention, from the second on ``ring_merge`` and, on one number a
    head, ``ring_weights``, and ``ring_end`` after the last. The host takes ``launch_s`` a kernel, and as long as
    ``exchange_launches`` of them more for an exchange of the modules' own context parallelism.
    """

    id: str
    element_bytes: Mapping[EngineOp, int]
    cross: Mapping[str, tuple[EngineOp, ...]]
    joint: Mapping[str, tuple[EngineOp, ...]]
    unfused_qk_norm: tuple[EngineOp, ...]
    without_fused_norm: frozenset[str]
    parted: tuple[EngineOp, ...]
    parted_models: frozenset[str]
    ring_block: tuple[EngineOp, ...]
    ring_merge: tuple[EngineOp, ...]
    ring_weights: tuple[EngineOp, ...]
    ring_end: tuple[EngineOp, ...]
    launch_s: float
    exchange_launches: Mapping[CollectiveOp, int]

    def qk_norm(self, model: str) -> tuple[EngineOp, ...]:
        """The kernels that norm the queries' (or the keys') heads in layers that attend jointly."""
        return self.unfused_qk_norm if model in self.without_fused_norm else self.joint["qk_norm"]

    def single_joins(self, model: str) -> tuple[EngineOp, ...]:
        """The copies with which single layers put image and text together again."""
        return self.parted if model in self.parted_models else ()


@lru_cache(maxsize=4)
def load_passes(name: str) -> Passes:
    """An implementation by its stack's name.

    >>> passes = load_passes("diffusers")
    >>> sum(passes.element_bytes[op] for op in passes.cross["modulate"])
    36
    """
    data = tomllib.loads((files("workloads") / "data" / "stacks" / f"{name}.toml").read_text(encoding="utf-8"))
    unfused, parted = data["unfused_qk_norm"], data["parted"]
    return Passes(
        id=data["id"],
        element_bytes={EngineOp(op): size for op, size in data["passes"].items()},
        cross={place: _ops(names) for place, names in data["cross"].items()},
        joint={place: _ops(names) for place, names in data["joint"].items()},
        unfused_qk_norm=_ops(unfused["kernels"]),
        without_fused_norm=frozenset(unfused["models"]),
        parted=_ops(parted["kernels"]),
        parted_models=frozenset(parted["models"]),
        **{f"ring_{place}": _ops(names) for place, names in data["ring"].items()},
        launch_s=data["host"]["kernel_s"],
        exchange_launches={CollectiveOp(op): count for op, count in data["host"]["exchange_launches"].items()},
    )


def _ops(names: list[str]) -> tuple[EngineOp, ...]:
    return tuple(EngineOp(name) for name in names)
