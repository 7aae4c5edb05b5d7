"""Dataclasses with some fields changed: as the standard library does it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from hardware.laws.terms import KernelTerms
from inputs.changed import changed
from workloads.kernel_names import EngineOp
from workloads.program import Kernel
from workloads.work import ElementwiseWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x")


@dataclass(frozen=True)
class Loose:
    x: int


def test_a_changed_object_is_what_replace_makes() -> None:
    terms = KernelTerms(floor_s=1e-6, blocks=3, cycles_per_block=2.0, way="ring")
    work = ElementwiseWork(op=next(iter(EngineOp)), rows=4, width=8, bytes_moved=64)
    for one, values in ((terms, {"blocks": 5, "scale": 1.5}), (work, {"rows": 8}), (terms, {})):
        other = changed(one, **values)
        assert other == replace(one, **values)
        assert hash(other) == hash(replace(one, **values))
        assert type(other) is type(one)
    kernel = Kernel(name="add", work=work, flops=0.0, bytes_moved=64.0)
    assert changed(kernel, name="other").work is work
    with pytest.raises(FrozenInstanceError):
        changed(kernel).name = "again"  # type: ignore[misc]


def test_unknown_fields_and_failed_checks_are_refused() -> None:
    with pytest.raises(AttributeError, match="'KernelTerms' object has no attribute 'size'"):
        changed(KernelTerms(floor_s=0.0, blocks=1, cycles_per_block=0.0), size=3)
    assert changed(Checked(x=1), x=2).x == 2 and changed(Loose(x=1), x=2) == Loose(x=2)
    with pytest.raises(TypeError, match="size"):
        changed(Loose(x=1), size=3)
    with pytest.raises(ValueError, match="x"):
        changed(Checked(x=1), x=-1)
