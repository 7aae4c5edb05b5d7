"""Which keys of a Hugging Face ``config.json`` are understood, from ``data/huggingface/keys.toml``; others are refused.

A key that nobody has read may change the work (a window, a soft cap, another mixer), so it is never passed over.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.quantization import KEYS as PRECISION_KEYS

_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
# What a class is called after its family's name.
_ENDS = re.compile(
    r"(Text)?(Config|Model|PreTrainedModel|LMHeadModel|Processor|ImageProcessor|Tokenizer(Fast)?"
    r"|For(CausalLM|ConditionalGeneration|(Sequence|Token)Classification|QuestionAnswering|MaskedLM|PreTraining))?$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a ``model_type`` may say: keys by what they do, and classes whose layers are the ones that are priced."""

    architectures: frozenset[str]
    known: frozenset[str]
    only: Mapping[str, tuple[Any, ...]]
    required: tuple[str, ...]


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    path = files("workloads") / "data" / "huggingface" / "keys.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def common_keys() -> frozenset[str]:
    """Keys that change nothing in any family, and those of precision, which are read apart."""
    return frozenset(key for table in _table()["harmless"] for key in table["keys"]) | set(PRECISION_KEYS)


def _changes_nothing(key: str) -> bool:
    """Whether a key that no family reads tells of training or of special tokens, by its ending."""
    return key.endswith(tuple(_table()["endings"]["keys"]))


def check_against(data: Mapping[str, Any], kind: str, family: Family, where: str) -> None:
    """Refuse the first key of a configuration that is not understood, or not with its value; what every family may say
    with one value only holds for each."""
    usual = {key: tuple(values) for key, values in _table()["only"].items()}
    family = replace(
        family, only={key: one for key, one in usual.items() if key not in family.known} | dict(family.only)
    )
    _check_classes(data, kind, family, where)
    for key, value in data.items():
        if value is None or key in family.known or key in ("architectures", "auto_map"):
            continue
        if key not in family.only and _changes_nothing(key):
            continue
        if key not in family.only:
            raise WorkloadError(
                f"{where}: key {shown(key)} = {shown(value)} is not understood for model_type '{kind}' and may change "
                "the work: take it out if it does not"
            )
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in family.only[key]):
            fits = " or ".join(str(known).lower() for known in family.only[key])
            raise WorkloadError(
                f"{where}: {key} = {shown(value)}: for model_type '{kind}' only {fits} leaves the layers as they are "
                "priced"
            )
    for key in family.required:
        if key not in data:
            raise WorkloadError(
                f"{where}: {key} is missing: give it: what transformers fills in is not what its absence says"
            )


def _check_classes(data: Mapping[str, Any], kind: str, family: Family, where: str) -> None:
    """Refuse a model class, or code of the model's own, whose layers are others than those of ``kind``."""
    classes = data.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise WorkloadError(f"{where}: architectures = {shown(classes)}: give a list of class names")
    if not family.architectures:
        return  # a family that names no class is for any
    known = ", ".join(sorted(family.architectures))
    for name in classes:
        if name not in family.architectures:
            raise WorkloadError(
                f"{where}: architectures = {shown([name])}: model_type '{kind}' is priced as {known}: another class "
                "may have other layers or another head"
            )
    code = data.get("auto_map") or {}
    stems = {name.removesuffix(next((h for h in _HEADS if name.endswith(h)), "")) for name in family.architectures}
    names = list(code.values()) if isinstance(code, dict) else [code]
    heads = [name for name in names if isinstance(name, str) and name.rsplit(".", 1)[-1] in family.architectures]
    files = {name.rpartition(".")[0] for name in heads} - {""}  # its own classes have any name
    for name in names:
        file, _, last = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        own = any(last.startswith(stem) and _ENDS.match(last, len(stem)) for stem in stems)
        if not own and file not in files:
            raise WorkloadError(
                f"{where}: auto_map = {shown(name)}: code of the model's own: model_type '{kind}' is priced as {known}"
            )


def check_nested(part: Any, path: list[str], known: list[str], where: str) -> None:
    """Refuse a key that nobody has read of a table inside the configuration, or of any in a list of tables."""
    if isinstance(part, list):
        for place, one in enumerate(part):
            check_nested(one, path, known, f"{where}[{place}]")
        return
    if part is not None and not isinstance(part, dict):
        raise WorkloadError(f"{where} = {shown(part)}: give a table")
    if path:
        check_nested((part or {}).get(path[0]), path[1:], known, f"{where}: {path[0]}")
        return
    for key, value in (part or {}).items():
        if value is not None and key not in known and key not in common_keys():
            raise WorkloadError(
                f"{where}: key {shown(key)} = {shown(value)} is not understood and may change the work: take it out if "
                "it does not"
            )
