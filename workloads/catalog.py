"""The catalog of models, and files of one's own: any name or path to a model."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from inputs.files import contents, read_text
from inputs.suggest import nearest
from workloads.errors import WorkloadError
from workloads.family_file import parse_family
from workloads.huggingface import parse_config
from workloads.model import ModelSpec
from workloads.model_file import parse_model
from workloads.quantization import BESIDE, quantised_beside

# A part of an id that says which size of a family it is ("-8b", "-8x7b", "-large"), unlike "-a3b", the active share.
SIZE = re.compile(r"-(\d+x)?\d+(\.\d+)?[bm](-|$)|-(tiny|small|base|medium|large|huge|xl)(-|$)")
# As hubs name a model: its owner, a slash, its name.
HUB = re.compile(r"[\w.-]+/(?![\w.-]*\.(toml|json)$)[\w.-]+")


@lru_cache(maxsize=1)
def list_models() -> tuple[str, ...]:
    """Ids of all models in the catalog, sorted."""
    folder = files("workloads") / "data"
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith((".toml", ".json")))
    return tuple(sorted(name.rsplit(".", 1)[0] for name in names))


def load_model(name: str) -> ModelSpec:
    """A model by any spelling that :func:`model_id` knows, .toml file of one's own, or Hugging Face ``config.json``.

    One object for equal names; for a file, as long as it and those beside it stay as they are.

    >>> load_model("llama3-70b").kv_heads
    8
    """
    if not is_path(name):
        return _shipped(name)
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    return _of_files(name, contents(path, *(path.parent / beside for beside in ("family.toml", *BESIDE))))


@lru_cache(maxsize=64)
def _of_files(name: str, _: tuple[object, ...]) -> ModelSpec:
    return _load_file(Path(name))


@lru_cache(maxsize=64)
def _shipped(name: str) -> ModelSpec:
    wanted = model_id(name)
    if wanted in _aliases()["variants"]:
        variant = _aliases()["variants"][wanted]
        return replace(load_model(variant["model"]), max_positions=variant["max_positions"])
    folder = files("workloads") / "data"
    if (folder / f"{wanted}.json").is_file():
        return _parse(f"{wanted}.json", (folder / f"{wanted}.json").read_text(encoding="utf-8"))
    return _parse(f"{wanted}.toml", (folder / f"{wanted}.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _aliases() -> dict[str, Any]:
    path = files("workloads") / "data" / "huggingface" / "aliases.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def aliases() -> Mapping[str, str]:
    """Names, in lower case, that mean a model of the catalog, or a variant of one.

    >>> aliases()["meta-llama/llama-3.1-8b"], aliases()["llama-3-8b"]
    ('llama-3.1-8b', 'llama3-8b')
    """
    found = {name: model for model, names in _aliases()["names"].items() for name in names}
    for variant, table in _aliases()["variants"].items():
        found |= dict.fromkeys((variant, *table["names"]), variant)
    return found


def is_path(name: str) -> bool:
    """Whether ``name`` is a file or folder rather than a model's name, which may have its owner before a slash."""
    return name.endswith((".toml", ".json")) or ("/" in name and name.lower() not in aliases())


@lru_cache(maxsize=256)
def model_id(name: str) -> str:
    """The id of the catalog that ``name`` means: an id, or a beginning of one id that says which size it is.

    A beginning ends at a ``-``. What names a family alone (``qwen2``, ``bert``) is refused even where one size of it
    is known here, since it may mean another.

    >>> model_id("Qwen3-30b")
    'qwen3-30b-a3b'
    """
    known, wanted = list_models(), name.lower()
    if wanted in known:
        return wanted
    if wanted in aliases():
        return aliases()[wanted]
    starts = [model for model in known if model.startswith(wanted)] if wanted else []
    whole = [model for model in starts if model.startswith(f"{wanted}-")]
    if len(whole) == 1 and not SIZE.search(whole[0].removeprefix(wanted)):
        return whole[0]
    if len(starts) > 1:
        raise WorkloadError(f"model = '{name}' fits several models: {', '.join(whole or starts)}: name one")
    if (files("workloads") / "data" / "dit" / f"{wanted}.toml").is_file():
        raise WorkloadError(f"model = '{name}' is a diffusion transformer: use phase = 'denoise', or wattline dit")
    if starts:
        raise WorkloadError(f"unknown model '{name}': did you mean '{starts[0]}'?")
    hint = nearest(wanted, known, "see 'wattline models'", cutoff=0.5)
    raise WorkloadError(f"unknown model '{name}': {hint}")


def _from_hub(name: str) -> str:
    """What to do about a model of a hub: wattline never downloads."""
    near = difflib.get_close_matches(name.lower(), list_models(), n=1, cutoff=0.6)
    like = f", or take the nearest one here, '{near[0]}'" if near else ""
    return f"download its config.json and give that file{like}"


def _load_file(path: Path) -> ModelSpec:
    if path.is_dir():
        path = path / "config.json"
    if HUB.fullmatch(str(path)) and not path.exists():
        raise WorkloadError(f"unknown model '{path}': no file, and the catalog has it not: {_from_hub(path.name)}")
    beside = path.parent / "family.toml"
    text = read_text(path, "model", WorkloadError)
    if path.suffix == ".json" and beside.is_file():
        family = parse_family(read_text(beside, "family", WorkloadError), where=str(beside))
        model = parse_config(text, where=str(path), family=family)
    else:
        model = _parse(str(path), text)
    if path.suffix == ".json" and model.quantised is None:
        quantised = quantised_beside(
            path.parent, layers=model.layers, tied=model.tied_embeddings, modules=model.modules
        )
        return model if quantised is None else replace(model, quantised=quantised)
    return model


def _parse(where: str, text: str) -> ModelSpec:
    if where.endswith(".json"):
        return parse_config(text, where=where)
    return parse_model(text, where=where)
