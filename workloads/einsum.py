"""The einsum interface: parse a pattern once, and everything about an operation follows from its sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from workloads.errors import WorkloadError

# Axes as the field writes them (after EnergyLens' interface): upper case counts heads.
AXES = {
    "b": "batch",
    "s": "new tokens of a sequence (1 in decode)",
    "z": "context tokens that they attend to",
    "m": "model width",
    "H": "query heads",
    "K": "key/value heads",
    "r": "query heads per key/value head",
    "h": "head size",
    "j": "size of a value, where it is not a key's",
    "f": "feed-forward width",
    "e": "experts",
    "k": "experts per token",
    "l": "width of what routed experts read, where it is not the model's",
    "v": "vocabulary",
    "d": "feed-forward width of the dense layers before the experts",
    "u": "width of the shared expert",
    "q": "query latent",
    "c": "key/value latent",
    "n": "head size without rotary part (latent attention)",
    "p": "rotary part of a head (latent attention)",
    "i": "inner width of a state-space mixer",
    "g": "groups x state of a state-space mixer",
    "t": "state-space heads",
}
# Any other upper-case letter is an axis of the model's own, whose size it names.
OWN_AXES = frozenset("ABCDEFGIJLMNOPQRSTUVWXYZ")
Reduction = Literal["all_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Einsum:
    """A parsed pattern: axes of each input and of the output, in order."""

    pattern: str
    inputs: tuple[str, ...]
    output: str

    @property
    def axes(self) -> str:
        """All axes in order of first appearance."""
        return _axes_of(self).all

    @property
    def selected(self) -> str:
        """``e`` where each token's ``k`` chosen experts pick a slice of the weight: looked up, not summed over."""
        return _axes_of(self).selected

    @property
    def contracted(self) -> str:
        """Axes that are summed over."""
        return _axes_of(self).contracted

    @property
    def of_activations(self) -> bool:
        """True of a product of two activations: its second operand has a batch or tokens of its own, so no weight.

        >>> parse("bKrsz,bKzh->bKrsh").of_activations, parse("bsf,mf->bsm").of_activations
        (True, False)
        """
        return len(self.inputs) == 2 and any(axis in self.inputs[1] for axis in "bsz")

    def flops(self, sizes: Mapping[str, int]) -> int:
        """Multiply-adds times two of a contraction; one per output element otherwise.

        >>> parse("bskm,emf->bskf").flops({"b": 1, "s": 3, "k": 2, "m": 8, "e": 64, "f": 4})
        384
        """
        axes = _axes_of(self)
        points = _points(self, axes.computed, sizes)
        return 2 * points if axes.contracted else points

    def input_elements(self, position: int, sizes: Mapping[str, int]) -> int:
        """Elements of one input."""
        return _points(self, self.inputs[position], sizes)

    def output_elements(self, sizes: Mapping[str, int]) -> int:
        """Elements of the output."""
        return _points(self, self.output, sizes)

    def reduction(self, parallel: str | None) -> Reduction | None:
        """What a rank that holds one slice of ``parallel`` owes the others before everyone has the output.

        A contracted axis leaves partial sums (all-reduce); an output axis leaves slices, which the next
        operation may take as they are (None here; :mod:`workloads.layer_passes.shard` says what is owed if it cannot).
        """
        if parallel is None:
            return None
        if parallel not in self.axes:
            raise WorkloadError(f"'{self.pattern}': parallel axis '{parallel}' is not in the pattern ({self.axes})")
        return "all_reduce" if parallel in self.contracted else None

    def gradient(self, position: int) -> Einsum:
        """The einsum that gives an input's gradient (0), or the weight's (1), from the output's.

        >>> up = parse("bsm,mf->bsf")
        >>> up.gradient(0).pattern, up.gradient(1).pattern
        ('bsf,mf->bsm', 'bsm,bsf->mf')
        """
        first, second = self.inputs
        left = f"{self.output},{second}" if position == 0 else f"{first},{self.output}"
        return parse(f"{left}->{self.inputs[position]}")

    @property
    def batched(self) -> str:
        """Axes of both operands and of the output: for each of their points a product of its own."""
        return _axes_of(self).batched

    def count(self, sizes: Mapping[str, int]) -> int:
        """Independent matrix products: one for each point of the axes that both operands have.

        >>> parse("bKrsz,bKzh->bKrsh").count({"b": 2, "K": 8, "r": 4, "s": 512, "z": 512, "h": 128})
        16
        """
        return _points(self, self.batched, sizes)

    def gemm(self, sizes: Mapping[str, int], weight: int = 1) -> tuple[int, int, int]:
        """(m, n, k) of the matrix product, or of each of :meth:`count` ones; ``weight`` is the weight's position.

        >>> parse("bsm,mHh->bsHh").gemm({"b": 1, "s": 8, "m": 16, "H": 2, "h": 4})
        (8, 8, 16)
        """
        axes = _axes_of(self, weight)
        return (
            _points(self, axes.rows, sizes),
            _points(self, axes.columns, sizes),
            _points(self, axes.contracted, sizes),
        )


class _Axes(NamedTuple):
    """Axes of an einsum by what becomes of them; ``rows`` and ``columns`` are those of each matrix product."""

    all: str
    selected: str
    contracted: str
    computed: str
    batched: str
    rows: str
    columns: str


@lru_cache(maxsize=1024)
def _axes_of(einsum: Einsum, weight: int = 1) -> _Axes:
    output, all_ = einsum.output, "".join(dict.fromkeys("".join(einsum.inputs) + einsum.output))
    selected = "e" if "k" in output and "e" in all_ and "e" not in output else ""
    batched = "".join(axis for axis in output if all(axis in axes for axes in einsum.inputs[:2]))
    weights = einsum.inputs[weight] if weight < len(einsum.inputs) else ""
    own = [axis for axis in output if axis not in batched]
    return _Axes(
        all=all_,
        selected=selected,
        contracted="".join(axis for axis in all_ if axis not in output and axis not in selected),
        computed="".join(axis for axis in all_ if axis not in selected),
        batched=batched,
        rows="".join(axis for axis in own if axis not in weights),
        columns="".join(axis for axis in own if axis in weights),
    )


@lru_cache(maxsize=1024)
def parse(pattern: str) -> Einsum:
    """Parse ``"bsm,mHh->bsHh"``; errors quote the pattern, the axis and what is missing.

    >>> parse("bKrsh,bKzh->bKrsz").contracted
    'h'
    """
    text = pattern.replace(" ", "")
    if text.count("->") != 1:
        raise WorkloadError(f"'{pattern}': an einsum has exactly one '->' between inputs and output")
    left, output = text.split("->")
    inputs = tuple(left.split(","))
    for part in (*inputs, output):
        if not part:
            raise WorkloadError(f"'{pattern}': an operand is empty; write its axes, for example 'bsm'")
        for axis in part:
            if axis not in AXES and axis not in OWN_AXES:
                known = " ".join(AXES)
                raise WorkloadError(f"'{pattern}': unknown axis '{axis}'; known axes are {known}")
        repeated = next((axis for axis in part if part.count(axis) > 1), None)
        if repeated:
            raise WorkloadError(f"'{pattern}': axis '{repeated}' stands twice in '{part}'; traces are not supported")
    missing = next((axis for axis in output if not any(axis in part for part in inputs)), None)
    if missing:
        raise WorkloadError(f"'{pattern}': output axis '{missing}' is in no input")
    return Einsum(pattern=text, inputs=inputs, output=output)


def _points(einsum: Einsum, axes: str, sizes: Mapping[str, int]) -> int:
    try:
        return math.prod([sizes[axis] for axis in axes])
    except KeyError:
        axis = next(axis for axis in axes if axis not in sizes)
        means = AXES.get(axis, "an axis of the model's own: give it under [axes]")
        raise WorkloadError(f"'{einsum.pattern}': size of axis '{axis}' ({means}) is missing") from None
