"""What a kernel is, by its name: GEMM, attention, norm, elementwise, state space, communication, memory, other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inputs.files import read_text
from inputs.texts import parse_toml
from traces.capture import NONE, Capture, Category
from traces.errors import TraceError
from traces.records import Ints

COMMUNICATION, MEMORY, OTHER = "communication", "memory", "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Kernels whose name holds ``pattern`` are of class ``cls``; the first rule that fits decides."""

    pattern: re.Pattern[str]
    cls: str


DATA = Path(__file__).parent / "data" / "kernels.toml"


@cache
def built_in() -> tuple[Rule, ...]:
    """The rules of ``data/kernels.toml``, from the most specific to the least."""
    return tuple(
        Rule(pattern=re.compile("|".join(rule["match"]), re.IGNORECASE), cls=rule["class"])
        for rule in parse_toml(DATA.read_text(encoding="utf-8"), DATA.name, TraceError)["rule"]
    )


def load_rules(path: Path) -> tuple[Rule, ...]:
    """A user's rules file (TOML), to be asked before the built-in rules.

    .. code-block:: toml

        [[rule]]
        match = "my_fused_mlp"   # a regular expression, searched in the kernel's name, case ignored
        class = "gemm"           # any name; "communication" counts as communication

    Raises :class:`TraceError` that names the rule and what would be right.
    """
    text = parse_toml(read_text(path, "rules", TraceError), f"rules '{path}'", TraceError)
    rules = text.get("rule")
    if not isinstance(rules, list) or set(text) != {"rule"}:
        raise TraceError(f"rules '{path}': holds {', '.join(text) or 'nothing'}: give one [[rule]] a rule")
    made = []
    for number, rule in enumerate(rules, start=1):
        if (
            not isinstance(rule, dict)
            or set(rule) != {"match", "class"}
            or not all(isinstance(v, str) for v in rule.values())
        ):
            raise TraceError(f'rules \'{path}\': rule {number}: give exactly match = "..." and class = "..."')
        try:
            made.append(Rule(pattern=re.compile(rule["match"], re.IGNORECASE), cls=rule["class"]))
        except re.error as error:
            raise TraceError(f"rules '{path}': rule {number}: match = '{rule['match']}': {error}") from None
    return tuple(made)


def class_of(name: str, rules: Sequence[Rule] = ()) -> str:
    """Class of a kernel called ``name``.

    >>> [class_of(name) for name in ("nvjet_sm90_tst_128x32", "ncclDevKernel_AllGather_RING_LL", "fmha_fwd")]
    ['gemm', 'communication', 'attention']
    >>> class_of("void dpsk::ep::internode::dispatch<false>(int)")
    'communication'
    """
    for rule in rules:
        if rule.pattern.search(name):
            return rule.cls
    name = _demangled(name)
    whole, own = _spellings(name), _spellings(_own_name(name))
    comm_rules = [rule for rule in built_in() if rule.cls == COMMUNICATION]
    rest = [rule for rule in built_in() if rule.cls != COMMUNICATION]
    for asked, spellings in ((comm_rules, whole), (rest, own), (rest, whole)):
        for rule in asked:
            if any(map(rule.pattern.search, spellings)):
                return rule.cls
    return OTHER


WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-")
RETURNS = re.compile(r"std::enable_if<.*?>::type |[\w:]+ (?=[\w(])")
PATH = re.compile(r"[\w.$~-]+(?:::[\w.$~-]+)*")


def _spellings(name: str) -> tuple[str, str]:
    """The name, and the name with its words set apart by ``_``."""
    return name, WORDS.sub("_", name)


def _demangled(name: str) -> str:
    """The path of a function whose name no tool demangled (too long, or cut): its identifiers carry their lengths.

    >>> _demangled("_ZN7deep_ep9intranode8dispatchILi8ELi768EEE")
    'deep_ep::intranode::dispatch<ILi8ELi768EEE'
    >>> _demangled("ampere_sgemm_128x64_tn")
    'ampere_sgemm_128x64_tn'
    """
    if not name.startswith("_Z"):
        return name
    at, parts = len("_ZN") if name.startswith("_ZN") else len("_Z"), []
    while (size := re.compile(r"\d+").match(name, at)) is not None:
        at = size.end() + int(size.group())
        parts.append(name[size.end() : at])
    return f"{'::'.join(parts)}<{name[at:]}" if parts else name


def _own_name(name: str) -> str:
    """The function alone: without what it returns, namespaces, template and other arguments.

    >>> _own_name("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)")
    'vectorized_layer_norm_kernel'
    >>> _own_name("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(float)")
    'kernel'
    """
    plain = name.replace("(anonymous namespace)::", "")
    returns = RETURNS.match(plain)
    path = PATH.match(plain, returns.end() if returns is not None else 0)
    return path.group().rsplit("::", 1)[-1] if path is not None else name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classes:
    """Class of every row of a capture's work: ``index`` into ``labels``."""

    labels: Sequence[str]
    index: Ints

    def is_class(self, label: str) -> NDArray[np.bool_]:
        """Rows of that class."""
        return np.asarray(self.index == (self.labels.index(label) if label in self.labels else NONE))


def classify(capture: Capture, rules: Sequence[Rule] = ()) -> Classes:
    """Class of each row: a user's rule, else the family that a simulated trace states, else by name; copies: memory."""
    work = capture.work
    labels: dict[str, int] = {COMMUNICATION: 0, MEMORY: 1}
    families = len(capture.names) + 1  # family -1 (none) counts as 0
    pairs, back = np.unique(work.name * families + work.family + 1, return_inverse=True)
    of_pair = []
    for name, family in zip((pairs // families).tolist(), (pairs % families - 1).tolist(), strict=True):
        label = class_of(capture.names[name], rules)
        if family != NONE and not any(rule.pattern.search(capture.names[name]) for rule in rules):
            label = capture.names[family]
        of_pair.append(labels.setdefault(label, len(labels)))
    index = np.array(of_pair, dtype=np.int64)[back]
    return Classes(labels=list(labels), index=np.where(work.category == Category.KERNEL, index, labels[MEMORY]))
