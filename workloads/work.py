"""What a kernel does, as sizes only: the vocabulary that meets hardware laws in ``sim.build.cost``.

Each class is one kernel family. Nothing here knows a GPU; nothing in ``hardware`` knows these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from workloads.kernel_names import AllReduce, CollectiveOp, Elementwise, EngineOp, EpKernels
from workloads.storage import BITS, Storage

# What of an 8-bit product's input has a scale of its own: a token, or 128 numbers of one.
Scales = Literal["token", "block"]
# FLOPs of attention's gradients over those of the forward pass: five products for its two (arXiv 2307.08691, 3.1).
ATTENTION_GRADIENT = 2.5


class DType(StrEnum):
    """Element types that tensor cores multiply, by the names that records and scenarios use."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8_e4m3"
    FP32 = "fp32"
    INT8 = "int8"
    FP4 = "fp4_e2m1"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return BITS[self.value]

    @property
    def bytes(self) -> int:
        """Bytes of one element of a whole number of them."""
        assert self.bits >= 8, "count 4-bit elements with Storage.bytes_of"
        return self.bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmWork:
    """``m x k`` by ``k x n`` (weights stored n x k), ``count`` independent products in one kernel.

    ``weights`` says how the weights are stored where that is not ``dtype``: they are turned into it on their way to
    the tensor cores, or their scales are multiplied in beside them. ``beside_ctas``: it leaves the SMs of so many
    blocks to a collective. ``part`` (i, n): the i-th of n shares of the kernel's waves of tiles on the SMs that it
    uses. ``engine`` names a serving engine whose own kernel this is, ``scales`` what of the input has a scale (8-bit
    products of engines).
    """

    m: int
    n: int
    k: int
    dtype: DType = DType.BF16
    out_dtype: DType = DType.BF16
    count: int = 1
    part: tuple[int, int] | None = None
    beside_ctas: int | None = None
    engine: str | None = None
    scales: Scales | None = None
    weights: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Flash attention: ``q_len`` new tokens per sequence over ``kv_len`` keys (decode: ``q_len`` 1).

    ``v_head_dim`` is the size of a value where that is not a key's. ``latent``: decode over one cached vector a
    token that is key and value of all heads (``head_dim`` long, its first ``v_head_dim`` are the value).
    ``backward``: the kernel that makes the gradients of queries, keys and values. ``masked``: a mask of padded keys is
    read, which hides none of the work.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: DType = DType.BF16
    kv_dtype: DType = DType.BF16
    v_head_dim: int | None = None
    latent: bool = False
    engine: str | None = None
    backward: bool = False
    masked: bool = False

    @property
    def mean_head_dim(self) -> int:
        """Mean of a key's and a value's size: what FLOPs and bytes of a prefill are proportional to."""
        return (self.head_dim + (self.v_head_dim or self.head_dim)) // 2

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key of one sequence and head that the mask leaves: none with a key after the query.

        >>> AttentionWork(batch=1, q_len=4, kv_len=4, q_heads=1, kv_heads=1, head_dim=64, causal=True).pairs
        10
        """
        return self.q_len * self.kv_len - (self.q_len * (self.q_len - 1) // 2 if self.causal else 0)

    @property
    def flops_per_pair(self) -> float:
        """FLOPs of one pair of a query and a key, all sequences and heads: a score and a value, or their gradients."""
        sizes = self.head_dim + (self.v_head_dim or self.head_dim)
        return 2.0 * self.batch * self.q_heads * sizes * (ATTENTION_GRADIENT if self.backward else 1.0)

    @property
    def flops(self) -> float:
        """FLOPs of all pairs that the mask leaves: flash kernels skip what it hides.

        >>> work = AttentionWork(batch=1, q_len=4, kv_len=4, q_heads=1, kv_heads=1, head_dim=64, causal=True)
        >>> work.flops == 2 * 10 * (64 + 64)
        True
        """
        return self.flops_per_pair * self.pairs

    @property
    def decode(self) -> bool:
        """True for the one-query kernel that streams the KV cache."""
        return self.q_len == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseWork:
    """A memory-bound kernel over ``rows`` x ``width`` elements that moves ``bytes_moved`` in all.

    ``blocks`` is the number of thread blocks where their launch may be what bounds it (rope). ``images``: of how many
    the rows are, where what a kernel takes depends on the size of each (a VAE decoder's); ``fresh``: the kernel before
    it wrote its input in place.
    """

    op: Elementwise | EngineOp
    rows: int
    width: int
    bytes_moved: int
    blocks: int | None = None
    images: int = 1
    fresh: bool = False
    dtype: DType = DType.BF16
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmWork:
    """Per-expert GEMMs in one kernel: ``rows`` token rows over ``distinct`` of ``experts`` experts hit.

    ``tiles128`` and ``tiles256`` are tiles of so many rows, each expert padded; ``rows_beyond128``: rows that experts
    have beyond their first 128: all three on average over draws. ``weights`` as in :class:`GemmWork`.
    """

    experts: int
    rows: int
    distinct: int
    tiles128: float
    tiles256: float
    rows_beyond128: float
    n: int
    k: int
    dtype: DType = DType.BF16
    beside_ctas: int | None = None
    weights: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedGemmWork:
    """An engine's product over rows sorted by expert: ``rows`` of ``tokens`` tokens over ``distinct`` of ``experts``.

    ``tiles`` pairs heights of tiles with how many there are, each expert padded: which height runs, the engine chooses
    on its GPU. ``inner`` is the width of an expert here.
    """

    engine: str
    experts: int
    inner: int
    tokens: int
    rows: int
    distinct: int
    tiles: tuple[tuple[int, float], ...]
    n: int
    k: int
    dtype: DType = DType.BF16
    scales: Scales | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterGemmWork:
    """One half of low-rank adapters (LoRA) on a product: ``rows`` tokens, sorted by which of ``distinct`` adapters each
    asks for, from the product's input of ``width`` down to ``slices`` of ``rank``, or from these up to an output of
    ``width``, ``widest`` of one slice, to which it is added (``up``). ``slots``: adapters that the server has room
    for (None: blocks are launched for rows only), ``tokens``: of the whole step (None: ``rows``). 16-bit, the sums
    between the halves in 32.
    """

    rows: int
    distinct: int
    slices: int
    rank: int
    width: int
    up: bool
    widest: int | None = None
    slots: int | None = None
    tokens: int | None = None
    dtype: DType = DType.BF16

    @property
    def weights(self) -> int:
        """Elements of the adapters that are read."""
        return self.distinct * self.rank * self.width * (1 if self.up else self.slices)

    @property
    def flops(self) -> float:
        """FLOPs of all rows."""
        return 2.0 * self.rows * self.weights / self.distinct

    @property
    def row_bytes(self) -> float:
        """Bytes that a row reads and writes: its output on the way up is read too."""
        return 4.0 * self.slices * self.rank + self.dtype.bytes * self.width * (2 if self.up else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionWork:
    """A convolution with a bias: ``pixels`` of the result, each of ``taps`` pixels of the ``read`` ones (padding too).

    32-bit ones are multiplied as tf32. ``channels_last``: channels of input and result lie innermost, as cuDNN wants
    them, so that neither is copied.
    """

    pixels: int
    read: int
    channels_in: int
    channels_out: int
    taps: int
    channels_last: bool = False
    dtype: DType = DType.BF16
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSizes:
    """What each rank sends to experts or gets back: ``tokens`` of ``hidden`` elements, ``top_k`` experts each."""

    tokens: int
    top_k: int
    hidden: int
    dtype: DType
    kernels: EpKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveWork:
    """One collective over ``ranks``; ``buffer_bytes`` is the full buffer as in the measurement records.

    All-gather counts its output, reduce-scatter its input, all-to-all the buffer of one rank, send/recv
    the bytes one rank sends; ``send`` goes one way, from the first rank to the second. ``ctas`` None leaves
    the number of blocks to the library, 0 leaves the copying to copy engines (send/recv only).
    ``algorithm`` is for all-reduces. ``sent_bytes`` and ``received_bytes`` are what this rank exchanges with all
    others in an uneven all-to-all; None: an even one. ``rival`` is a product that becomes ready with it, and
    may get the SMs first on some ranks; ``turn`` counts such collectives. ``engine``: a serving engine's own.
    ``exchange`` are the sizes of a dispatch or
    combine, whose ``buffer_bytes`` are all rows of a rank.
    """

    op: CollectiveOp
    ranks: tuple[int, ...]
    buffer_bytes: int
    ctas: int | None = None
    algorithm: AllReduce = AllReduce.LIBRARY
    sent_bytes: int | None = None
    received_bytes: int | None = None
    rival: GemmWork | None = None
    turn: int = 0
    engine: str | None = None
    exchange: ExchangeSizes | None = None


Work = (
    GemmWork | AttentionWork | ElementwiseWork | GroupedGemmWork | RoutedGemmWork | AdapterGemmWork | ConvolutionWork
    | CollectiveWork
)  # fmt: skip
