"""What every operand of a model is stored as: weights, activations, KV cache, and the sums that products run in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from workloads.errors import WorkloadError
from workloads.ops import Op
from workloads.storage import Storage
from workloads.work import DType

# Types of a KV cache that attention reads, each with one scale for a tensor at most.
CACHED = (DType.BF16, DType.FP16, DType.FP8, DType.INT8)
ROUTER = "router"  # no public scheme quantises it


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Both operands of a product of activations and weights.

    Weights narrower than the activations are turned into their type first, so that the activations decide at which
    rate tensor cores run: 16 bit of W4A16, FP8 of W8A8.

    >>> from workloads.storage import storage
    >>> w4a16 = Product(weights=storage("awq"), activations=storage("bf16"))
    >>> w4a16.multiplies.value, w4a16.accumulates
    ('bf16', 'fp32')
    """

    weights: Storage
    activations: Storage

    def __post_init__(self) -> None:
        """Refuse pairs that no kernel multiplies."""
        weights, activations = self.weights, self.activations
        wider = weights.bits > activations.bits and not (weights.plain and activations.plain)
        mixed = weights.bits == activations.bits == 8 and weights.element[:3] != activations.element[:3]
        if wider or mixed or (activations.element.startswith("int") and not weights.element.startswith("int")):
            raise WorkloadError(
                f"weight_dtype = '{weights}' with activations in {activations}: no kernel multiplies these: keep "
                "activations in 16 bit (dtype = 'bf16'), or give weights that are as narrow as they"
            )

    @classmethod
    def of(cls, dtype: DType) -> Product:
        """Both operands of one type, without scales that would count.

        >>> Product.of(DType.FP8).stored is None
        True
        """
        return cls(weights=Storage(element=dtype.value), activations=Storage(element=dtype.value))

    @property
    def multiplies(self) -> DType:
        """The type that tensor cores multiply."""
        element = self.activations.element
        return DType.FP8 if element.startswith("fp8") else DType(element)

    @property
    def accumulates(self) -> str:
        """The type that they add up in."""
        return "int32" if self.multiplies is DType.INT8 else "fp32"

    @property
    def stored(self) -> Storage | None:
        """How the weights are stored, where that is more than elements of the type that is multiplied."""
        same = self.weights == Storage(element=self.multiplies.value) or (self.weights.plain and self.activations.plain)
        return None if same else self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceptions:
    """Layers ``first`` to ``stop`` (not included) whose products, by :func:`part_of`, are other ones; None: left in
    16 bit."""

    first: int
    stop: int
    products: tuple[tuple[str, Product | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Products of a model's layers in ``product`` but for ``exceptions``; all else (embeddings, norms, router) in
    ``base``, and so is the vocabulary head where ``head`` is None.

    ``method`` names the format of a quantised checkpoint. ``own`` are the exceptions of one run of layers.
    """

    base: DType = DType.BF16
    product: Product = field(default_factory=lambda: Product.of(DType.BF16))
    kv: DType = DType.BF16
    head: Product | None = None
    exceptions: tuple[Exceptions, ...] = ()
    method: str = ""
    own: tuple[tuple[str, Product | None], ...] = ()

    @property
    def kept(self) -> Product:
        """The products that are left as they are."""
        return Product.of(self.base)

    def of(self, op: Op) -> Product:
        """The operands of ``op``, which multiplies by a weight."""
        part = part_of(op)
        if part == ROUTER:
            return self.kept
        for name, product in self.own:
            if name == part:
                return product or self.kept
        return self.product

    def runs(self, layers: range) -> Iterator[tuple[Precision, range]]:
        """``layers`` as runs that are stored alike."""
        if not self.exceptions:
            yield self, layers
            return
        edges = {layers.start, layers.stop}
        for layers_apart in self.exceptions:
            edges |= {edge for edge in (layers_apart.first, layers_apart.stop) if layers.start < edge < layers.stop}
        ordered = sorted(edges)
        for first, stop in pairwise(ordered):
            own = next((part.products for part in self.exceptions if part.first <= first < part.stop), ())
            yield replace(self, exceptions=(), own=own), range(first, stop)

    @property
    def widest(self) -> Storage:
        """What weights are stored in that no public scheme quantises (image encoders)."""
        return self.kept.weights if self.method else self.product.weights

    @property
    def of_images(self) -> Precision:
        """What an image encoder beside the model runs in."""
        return replace(self, product=self.kept, exceptions=(), own=()) if self.method else self

    @property
    def narrow(self) -> bool:
        """Whether any product reads activations of fewer than 16 bits."""
        apart = [product for part in self.exceptions for _, product in part.products]
        return any(
            not product.activations.plain for product in (self.product, self.head, *apart) if product is not None
        )

    @property
    def uniform(self) -> bool:
        """Whether weights and activations share one type, and the KV cache has 16 bit: one word says it all."""
        return not self.exceptions and not self.method and self.product.stored is None and self.kv.bits == 16

    def words(self) -> str:
        """For a header: one type, or that of each operand.

        >>> str(Precision().words())
        'bf16'
        """
        product = self.product
        cache = f", {self.kv.value} KV cache" if self.kv.bits != 16 else ""
        if self.head is not None:
            cache = f", {self.head.weights} head{cache}"
        if apart := dict.fromkeys(str((one or self.kept).weights) for e in self.exceptions for _, one in e.products):
            cache = f", {' and '.join(apart)} in some products{cache}"
        if product.stored is None:
            return f"{product.activations}{cache}"
        return f"{product.weights} weights, {product.activations} activations{cache}"

    def as_json(self) -> dict[str, Any]:
        """The resolved type of each operand, by canonical names."""
        return {
            "weights": str(self.product.weights),
            "activations": str(self.product.activations),
            "kv_cache": self.kv.value,
            "accumulators": self.product.accumulates,
            "head": str((self.head or self.kept).weights),
            "other": self.base.value,
            "method": self.method or None,
        }


def part_of(op: Op) -> str:
    """What ``op`` multiplies by, in a word that :data:`workloads.quantization.MODULES` gives modules for."""
    axes = op.einsum.inputs[-1]
    if op.label == ROUTER:
        return ROUTER
    if "e" in axes:
        return f"expert {op.label}"
    if "u" in axes:
        return f"shared {op.label}"
    if "t" in axes:
        return "mixer steps"
    if any(axis in axes for axis in "ig"):
        return "mixer out" if op.label == "out" else "mixer in"
    return op.label


def plain(dtype: DType) -> Precision:
    """Everything in ``dtype``; what stays in 16 bit where that is narrower."""
    base = dtype if dtype.bits >= 16 else DType.BF16
    return Precision(base=base, product=Product.of(dtype))


def resolve(
    stored: Precision | None = None,
    *,
    dtype: DType = DType.BF16,
    weights: Storage | None = None,
    kv: DType | None = None,
    multiplied: frozenset[str] | None = None,
) -> Precision:
    """The precision of a run: what the checkpoint has ``stored`` (None: 16 bit), unless the run says otherwise.

    ``dtype`` is what is not quantised, and below 16 bit what activations are quantised to; ``weights`` replaces the
    checkpoint's. ``multiplied`` are the types that tensor cores know: elsewhere a checkpoint's activations stay in
    16 bit, and its weights are turned into that, as engines do it (NVFP4 on Hopper, FP8 on Ampere).
    """
    if kv is not None and kv not in CACHED:
        raise WorkloadError(f"kv_dtype = '{kv.value}': known are {', '.join(dtype.value for dtype in CACHED)}")
    found = _weights(stored, dtype, weights, multiplied)
    return found if kv is None else replace(found, kv=kv)


def _read(weights: Storage, dtype: DType) -> Storage:
    """Activations in ``dtype``: with a scale a token, or for as many numbers of one as a block of weights is deep,
    where weights of their type have scales of that kind."""
    if weights.element != dtype.value or not weights.rows:
        return Storage(element=dtype.value)
    return Storage(element=dtype.value, rows=1, depth=weights.depth)


@lru_cache(maxsize=256)
def _weights(
    stored: Precision | None, dtype: DType, weights: Storage | None, multiplied: frozenset[str] | None
) -> Precision:
    base = dtype if dtype.bits >= 16 else DType.BF16
    cached = stored.kv if stored is not None else DType.BF16
    if weights is not None:
        if weights.plain and weights.bits > base.bits:
            raise WorkloadError(f"weight_dtype = '{weights}': is wider than dtype = '{dtype.value}': give that")
        if weights.plain and dtype.bits >= 16:
            return replace(plain(dtype), kv=cached)
        if dtype is DType.FP32:
            raise WorkloadError(
                f"weight_dtype = '{weights}' with dtype = 'fp32': kernels of quantised weights are 16-bit"
            )
        return Precision(base=base, product=Product(weights=weights, activations=_read(weights, dtype)), kv=cached)
    if stored is None:
        return plain(dtype)
    if dtype is DType.FP32:
        raise WorkloadError("dtype = 'fp32': the checkpoint is quantised, whose kernels are 16-bit: use bf16")

    def run(product: Product | None) -> Product | None:
        if product is None:
            return None
        activations = product.activations
        if dtype.bits < 16 and not product.weights.plain:
            if activations.element != dtype.value:
                activations = Storage(element=dtype.value)
        elif activations.plain or (multiplied is not None and product.multiplies.value not in multiplied):
            activations = Storage(element=base.value)
        return Product(weights=product.weights, activations=activations)

    exceptions = tuple(
        replace(part, products=tuple((name, run(product)) for name, product in part.products))
        for part in stored.exceptions
    )
    whole = run(stored.product)
    assert whole is not None
    return replace(stored, base=base, product=whole, head=run(stored.head), exceptions=exceptions)
