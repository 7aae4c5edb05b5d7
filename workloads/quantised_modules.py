"""Which weights a quantisation holds for: lists of modules, as public checkpoints write them, over a model's layers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import groupby
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.precision import Exceptions, Precision, Product
from workloads.work import DType

# Names and modules of public checkpoints.
TABLE: Mapping[str, Any] = tomllib.loads(
    (files("workloads") / "data" / "huggingface" / "precision.toml").read_text(encoding="utf-8")
)
MODULES: dict[str, tuple[str, ...]] = {part: tuple(names) for part, names in TABLE["modules"].items()}
Modules = tuple[tuple[str, tuple[str, ...]], ...]  # what a family calls its modules, where that is not the usual
# Words of names that stand for parts no product of ours is quantised in: embeddings, norms, routers, encoders.
_ELSEWHERE = frozenset(name.rsplit(".", 1)[-1] for name in TABLE["no_product"]["names"])
# Where layers stand in a module's path; patterns are tried with each.
_PREFIXES = (
    "model.layers", "model.language_model.layers", "language_model.model.layers", "model.decoder.layers",
    "backbone.layers", "transformer.h", "layers",
)  # fmt: skip
# Words before a layer's number in names of other layers than the language model's.
_OTHERS = re.compile(r"(vision|visual|audio|speech|encoder|mtp|img)")
_LAYER = re.compile(r"(?:layers|h|blocks?|layer)\\?\.(\d{1,6})(?!\d)")
_EXPERT = re.compile(r"experts\\?\.([1-9]\d*)(?=\\?\.|$)")
_HEAD = "lm_head"
_CLASS = re.compile(r"[A-Z][a-z0-9]+[A-Z]\w*(?<!Linear)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """Modules by a pattern, and what their products are; None: left in 16 bit.

    A pattern is a name (which holds where its parts stand side by side in a module's path: ``self_attn``,
    ``model.layers.0``), a name with ``*``, or a regular expression after ``re:``.
    """

    pattern: str
    product: Product | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a quantised checkpoint says: ``product`` of every linear layer (None: of none), ``rules`` that come before.

    ``only``: the linear layers that it holds for, if not all. ``head``: the vocabulary head is one of them. ``where``
    it was read.
    """

    product: Product | None = None
    rules: tuple[ModuleRule, ...] = ()
    only: tuple[str, ...] = ()
    head: bool = False
    kv: DType = DType.BF16
    method: str = ""
    where: str = ""

    def named(self, method: str, where: str) -> Scheme:
        """The scheme under the name of its format, and where it was read."""
        return replace(self, method=method, where=where)

    def with_cache(self, kv: DType) -> Scheme:
        """The scheme with a quantised KV cache."""
        return replace(self, kv=kv)

    @property
    def of_products(self) -> bool:
        """Whether it says that weights of products are quantised, and not only the cache."""
        return self.product is not None or any(rule.product is not None for rule in self.rules)

    def over(self, layers: int, *, tied: bool, modules: Modules = ()) -> Precision:
        """The precision of a model of so many layers; ``tied``: its head is its embedding, which stays as it is;
        ``modules``: names of its own for some."""
        rules, known = rules_of(self.rules, self.where), MODULES | dict(modules)
        _check_found(rules, layers, known, self.where)
        by_layer = bool([rule for rule in rules if rule.by_layer])
        products = [self._products(rules, layer, known) for layer in (range(layers) if by_layer else (0,))]
        whole = self._most(products)
        exceptions, first = [], 0
        for own, run in groupby(products if by_layer else products * layers):
            stop = first + len(list(run))
            apart = tuple((part, product) for part, product in own if product != whole)
            if apart:
                exceptions.append(Exceptions(first=first, stop=stop, products=apart))
            first = stop
        head = None
        if self.head and not tied:
            said = next((rule for rule in rules if rule.names(_HEAD)), None)
            head = self.product if said is None else said.product
        return Precision(
            product=whole or Product.of(DType.BF16),
            kv=self.kv,
            head=head,
            exceptions=tuple(exceptions),
            method=self.method,
        )

    def _most(self, products: Sequence[tuple[tuple[str, Product | None], ...]]) -> Product | None:
        """What to call the model's precision: the scheme's own product, or the one of most modules."""
        if self.product is not None:
            return self.product
        found = [product for own in products for _, product in own if product is not None]
        return max(found, key=found.count) if found else None

    def _products(
        self, rules: Sequence[Matcher], layer: int, modules: Mapping[str, tuple[str, ...]]
    ) -> tuple[tuple[str, Product | None], ...]:
        here = [rule for rule in rules if rule.layer in (None, layer)]
        return tuple((part, self._product(here, layer, names)) for part, names in modules.items())

    def _product(self, rules: Sequence[Matcher], layer: int, names: tuple[str, ...]) -> Product | None:
        for rule in rules:
            if any(rule.holds(layer, name) for name in names):
                return rule.product
        if self.only and not any(_beside(module, name) for module in self.only for name in names):
            return None
        return self.product


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """A rule made ready: the number of a layer that it names, the only layer it can hold for, whether it looks at
    layers at all, and its tests of a module and of the head."""

    pattern: str
    product: Product | None
    named: int | None
    layer: int | None
    by_layer: bool
    holds: Callable[[int, str], bool]
    names: Callable[[str], bool]


def rules_of(rules: Sequence[ModuleRule], where: str) -> list[Matcher]:
    """Rules made ready to be tried on modules."""
    return [_matcher(rule, where) for rule in rules]


def _matcher(rule: ModuleRule, where: str) -> Matcher:
    pattern = rule.pattern
    found = _LAYER.search(pattern)
    named = int(found[1]) if found else None
    elsewhere = found is not None and _OTHERS.search(pattern[: found.start()]) is not None
    if pattern.startswith("re:") or "*" in pattern:
        tried = _compiled(pattern, where)

        def matches(at: int, name: str) -> bool:
            return any(tried.match(f"{prefix}.{at}.{name}") is not None for prefix in _PREFIXES)

        # "layers.1*" holds for layer 10 too, and so does an expression whose dot stands for any sign.
        dot = (r"\.", "[.]") if pattern.startswith("re:") else (".",)
        closed = found is not None and pattern[found.end() :].startswith(dot)
        return Matcher(
            pattern=pattern, product=rule.product, named=named, layer=named if closed else None, by_layer=True,
            holds=matches, names=lambda name: tried.match(name) is not None,
        )  # fmt: skip
    rest = pattern if found is None else pattern[found.end() :].removeprefix(".")

    def stands(_: int, name: str) -> bool:
        return not elsewhere and (not rest or _beside(rest, name))

    return Matcher(
        pattern=pattern, product=rule.product, named=named, layer=named, by_layer=named is not None, holds=stands,
        names=lambda name: _beside(pattern, name),
    )  # fmt: skip


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression as it stands; a name with ``*`` for a module, what stands above it or below it."""
    text = pattern[3:] if pattern.startswith("re:") else None
    if text is None:
        body = "(?:" + ".*".join(re.escape(part) for part in re.split(r"\*+", pattern)) + ")"
        text = rf"(?:.*\.)?{body}(?:\..*)?\Z"
    try:
        return re.compile(text)
    except (re.error, RecursionError):
        raise WorkloadError(f"{where}: {shown(pattern)} is no regular expression: mend it") from None


def _beside(parts: str, name: str) -> bool:
    """Whether the dotted parts of one name stand side by side in another.

    >>> _beside("mlp.gate", "mlp.gate_proj"), _beside("self_attn", "self_attn.q_proj")
    (False, True)
    """
    return f".{parts}." in f".{name}."


def _check_found(rules: Sequence[Matcher], layers: int, modules: Mapping[str, tuple[str, ...]], where: str) -> None:
    """Refuse a list that names what no known module is called: its weights would be counted as quantised."""
    patterns = {rule.pattern for rule in rules}
    for rule in rules:
        words = set(re.findall(r"\w+", rule.pattern.removeprefix("re:")))
        if words & _ELSEWHERE or any(_OTHERS.match(word) for word in words):
            continue
        if _CLASS.fullmatch(rule.pattern):  # of modules around products: what is inside is quantised all the same
            continue
        if rule.named is not None and rule.named >= layers:  # layers that predict more tokens
            continue
        if _EXPERT.search(rule.pattern):
            if _EXPERT.sub("experts.0", rule.pattern) in patterns:
                continue
            raise WorkloadError(f"{where}: {shown(rule.pattern)}: experts of one layer are read as stored alike")
        at = range(layers) if rule.layer is None else (rule.layer,)
        at = at if rule.by_layer else range(1)
        if not any(rule.holds(layer, name) for layer in at for names in modules.values() for name in names):
            raise WorkloadError(
                f"{where}: {shown(rule.pattern)} names no module that is known: name modules of this model"
            )
