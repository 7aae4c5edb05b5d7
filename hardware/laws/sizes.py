"""Sizes of kernels as the laws take them: one class for each class of kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hardware.laws.routes import Span

# Bits that are not 16: bytes of an element by type.
_ELEMENT_BYTES = {"fp32": 4, "fp8_e4m3": 1, "int8": 1, "fp4_e2m1": 0.5}


def element_bytes(dtype: str) -> float:
    """Bytes of one element."""
    return _ELEMENT_BYTES.get(dtype, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedSizes:
    """A memory-bound kernel of an engine: the name of its law, its rows and the bytes that it moves.

    ``images``: of how many the rows are, where an image's size counts and not that of all of them. ``fresh``: the
    kernel before it wrote its input in place.
    """

    op: str
    rows: int
    bytes_moved: float
    images: int = 1
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSizes:
    """``count`` products ``(m x k) . (k x n)`` of ``dtype`` in one kernel; ``out_bytes`` an element of the result."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    out_bytes: int = 2
    count: int = 1

    @property
    def wide(self) -> GemmSizes:
        """The one product with the columns of all."""
        return replace(self, n=self.n * self.count, count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSizes:
    """Attention of ``q_len`` new tokens a sequence to ``kv_len`` keys, of 16-bit elements."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """Attention of one new token a sequence to ``kv_len`` cached ones, of ``kv_bytes`` an element."""

    batch: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Attention of one new token a sequence to ``kv_len`` cached latents of ``cached_dim`` elements, which all heads
    share; ``v_dim`` of them are the value."""

    batch: int
    kv_len: int
    q_heads: int
    cached_dim: int
    v_dim: int
    kv_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSizes:
    """Products ``(rows x k) . (k x n)`` of the ``distinct`` of ``experts`` that were hit, with ``rows`` in all.

    ``tiles128`` is the sum over experts of ceil(rows / 128), ``tiles256`` of ceil(rows / 256), ``rows_beyond128`` of
    the rows of each beyond 128.
    """

    experts: int
    rows: int
    distinct: int
    tiles128: float
    tiles256: float
    rows_beyond128: float
    n: int
    k: int

    @property
    def weights(self) -> float:
        """Elements of the weights that are read."""
        return float(self.distinct * self.n * self.k)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOperands:
    """Operands of a grouped product that are not of 16 bits: ``weight_bytes`` of all weights that are read,
    ``row_bytes`` of a row of activations, multiplied as ``dtype``; ``turned``: weights are converted to it first."""

    dtype: str
    weight_bytes: float
    row_bytes: float
    turned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedSizes:
    """One product of a serving engine over ``rows`` sorted by expert, ``distinct`` of which are hit.

    ``tiles`` tiles of ``block_m`` rows and ``block_n`` columns; ``weight_type`` names the law of its weights.
    """

    rows: float
    distinct: float
    tiles: float
    block_m: int
    block_n: int
    n: int
    k: int
    weight_type: str

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the weights."""
        return 2 if self.weight_type == "bf16" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSizes:
    """One collective of ``world`` ranks over ``buffer_bytes``, with ``ctas`` blocks (None: the library's choice; 0:
    copy engines), in a CUDA graph of a step or as a bare loop.

    ``algorithm`` chooses among the ways of an all-reduce. ``span`` says how the ranks lie on nodes; None: on one.
    """

    op: str
    world: int
    buffer_bytes: int
    ctas: int | None
    in_graph: bool
    algorithm: str = "library"
    span: Span | None = None
