"""Hugging Face ``config.json``: the fields that size a model, checked; a key that is not understood is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inputs.suggest import nearest
from inputs.texts import parse_json, shown
from workloads.errors import WorkloadError
from workloads.family import family_model
from workloads.family_file import FamilyFile, family_files
from workloads.model import ModelSpec
from workloads.params import weight_bytes
from workloads.precision import plain
from workloads.quantised_modules import Scheme
from workloads.quantization import TYPED, precision_of, scheme_of
from workloads.work import DType


def parse_config(text: str, *, where: str, family: FamilyFile | None = None) -> ModelSpec:
    """A model from its configuration, by ``family`` or the one that its ``model_type`` names."""
    data = parse_json(text, where, WorkloadError, unbounded="time_step_limit")
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: a configuration is an object, found {type(data).__name__}")
    return read_config(data, where=where, family=family)


def read_config(data: dict[str, Any], *, where: str, family: FamilyFile | None = None) -> ModelSpec:
    """:func:`parse_config` of what is parsed already."""
    kind = data.get("model_type")
    own = family or (family_files().get(kind) if isinstance(kind, str) else None)
    if own is None:
        known = supported_types() if isinstance(kind, str) else ()
        hint = nearest(str(kind).lower(), known, "'wattline models --all' lists those that are")
        raise WorkloadError(
            f"{where}: model_type = {shown(kind)} is not supported: {hint} (a family.toml beside it adds one)"
        )
    precision, scheme = precision_of(data, where=where), scheme_of(data, where=where)
    model = family_model(data, own, where=where, read=read_config)
    if "language" not in own.table or any(key in data for key in TYPED):
        model = replace(model, precision=precision)
    return replace(_stored(model, scheme), family=str(kind))


def supported_types() -> tuple[str, ...]:
    """Every ``model_type`` of a whole model that is read, sorted."""
    own = (kind for kind, family in family_files().items() if "tower" not in family.table["source"])
    return tuple(sorted(kind for kind in own if not kind.startswith("_")))


def how_checked(kind: str) -> tuple[str, str]:
    """How well what is read of a ``model_type`` was checked, and why it is not run (empty: it is).

    >>> how_checked("whisper")
    ('sizes by the published parameter count; runs unchecked: none was measured', '')
    """
    table = family_files()[kind].table
    return table["checked"], table.get("refused", "")


def _stored(model: ModelSpec, scheme: Scheme | None) -> ModelSpec:
    """The model as a scheme stores it; one that holds for none of its products is refused."""
    if scheme is None:
        return model
    precision = scheme.over(model.layers, tied=model.tied_embeddings, modules=model.modules)
    if scheme.of_products and weight_bytes(model, precision) == weight_bytes(model, plain(DType.BF16)):
        raise WorkloadError(f"{scheme.where}: {scheme.method} holds for none of this model's products: take it out")
    return replace(model, quantised=precision)
