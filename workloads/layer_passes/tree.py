"""What the passes put into a layer beside the nodes that a model names: parts of experts and head, and collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from workloads.kernel_names import CollectiveOp
from workloads.ops import Attention, Gemm, Group, Indexer, LatentAttention, Op, Pointwise, StateSpace
from workloads.parallel import Layout
from workloads.work import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
    """What groups of ranks hold in slices, beside what ``parallel`` of a node says.

    ``rows``: the residual stream, each rank of a tensor group some of the tokens (sequence parallelism). ``experts``:
    ranks hold whole experts, and all of them the same tokens, or each its own. ``context``: the tokens of a sequence,
    of which attention reads all keys: ``heads`` are exchanged for tokens (Ulysses), or the keys are ``gathered``; both
    where groups of ranks do the one and groups of groups the other.
    """

    rows: bool = False
    experts: Literal["same_tokens", "own_tokens"] | None = None
    context: tuple[Literal["heads", "gathered"], ...] = ()

    @classmethod
    def of(cls, layout: Layout) -> RankSplit:
        """What ``layout`` splits."""
        experts: dict[str | None, Literal["same_tokens", "own_tokens"]]
        experts = {"all_reduce": "same_tokens", "all_to_all": "own_tokens"}
        context: Literal["heads", "gathered"] = "heads" if layout.cp_mode == "ulysses" else "gathered"
        return cls(
            rows=layout.sequence_parallel,
            experts=experts.get(layout.ep_mode),
            context=(context,) if layout.cp > 1 else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouter:
    """Scores of all experts, and the choice of some."""

    name: str
    op: Op
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Tokens as rows of experts: quantised once, then sorted by rank, by expert, or by where they came from.

    ``parallel`` is what they are split along: ``e`` where each rank takes the rows of its experts.
    """

    name: Literal["quantise_rows", "gather_dispatch", "gather", "gather_return"]
    op: Op  # the product that reads them
    parallel: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Products of rows with the weights of their experts, in one kernel: those before the activation are ``first``."""

    name: str
    ops: tuple[Op, ...]
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAct:
    """The activation between an expert's products."""

    name: str
    down: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine:
    """A token's chosen experts summed; ``partial``: those of one rank only, added to the others' in an all-reduce."""

    name: str = "combine"
    parallel: str | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The output of an earlier node added."""

    name: str
    source: str
    parallel: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Rows of the vocabulary's table, one a token: a sum over the vocabulary, which ranks hold in slices."""

    name: str
    op: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTokens:
    """The last token of each sequence, which is scored."""

    name: str = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The product with the vocabulary."""

    name: str
    op: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleToken:
    """Draws a token from the logits of the whole vocabulary."""

    name: str = "sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective over arrays of ``axes``; put in by the shard pass, typed by nobody.

    ``rows``: it gathers or scatters slices of the tokens, so that it can be cut along them. ``parallel`` is an axis of
    which it moves a rank's slice only. ``travel``: rows go to the ranks of their experts, or come home. ``op`` reads
    them. ``ctas`` are its blocks where an operator says so.
    """

    name: str
    op: CollectiveOp
    axes: tuple[str, ...]
    group: Group | Literal["context", "stages"] = "tensor"
    rows: bool = False
    parallel: str | None = None
    element_bytes: int = DType.BF16.bytes
    travel: Literal["away", "home"] | None = None
    reader: Op | None = None
    ctas: int | None = None

    def elements(self, sizes: Mapping[str, int]) -> int:
        """Elements of its arrays."""
        return elements_of(self.axes, sizes)


def elements_of(arrays: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Elements of arrays that are given by their axes.

    >>> elements_of(("bsH", "bsK"), {"b": 2, "s": 3, "H": 8, "K": 2})
    60
    """
    return sum(math.prod(sizes[axis] for axis in one) for one in arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRounds:
    """Attention whose keys are gathered a rank's block at a time: one is attended to while the next is on its way."""

    gather: Exchange
    attention: Attention

    @property
    def name(self) -> str:
        """That of the attention."""
        return self.attention.name


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """The annotation of a pipeline: what is held here goes on to the ranks that hold the next layers."""

    name: str = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permute:
    """A copy that sorts arrays of ``axes`` by rank, before or after an exchange of heads for tokens."""

    name: str
    axes: tuple[str, ...]


Placed = (
    Gemm | Attention | LatentAttention | Indexer | StateSpace | Pointwise | ExpertRouter | ExpertRows | Grouped
    | ExpertAct | Combine | Join | Embedding | LastTokens | Head | SampleToken | Exchange | Permute | KeyRounds
    | StageEnd
)  # fmt: skip
