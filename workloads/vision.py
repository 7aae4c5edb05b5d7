"""``config.json`` of vision-language models: an image encoder, a projector, and a language model (LLaVA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from inputs.texts import shown
from workloads.config_keys import check_keys
from workloads.errors import WorkloadError
from workloads.fields import name_of
from workloads.layer_norm import layer_norm_model, patches
from workloads.model import ModelSpec, Vision
from workloads.quantization import precision_of, scheme_of

VISION_LANGUAGE = frozenset({"llava"})
ENCODERS = frozenset({"clip_vision_model", "siglip_vision_model"})
# LLaVA's text_config leaves out what the Llama it started from has by default.
_TEXT = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip


def vision_language_model(data: dict[str, Any], *, where: str, read: Callable[..., ModelSpec]) -> ModelSpec:
    """The language model of a configuration, with its image encoder in ``vision``.

    An encoder of the CLIP kind has a class token, which the language model does not see. ``read`` reads the language
    model's own configuration.
    """
    seen, text = (data.get(name) for name in ("vision_config", "text_config"))
    if not isinstance(seen, dict) or str(seen.get("model_type")) not in ENCODERS:
        kind = seen.get("model_type") if isinstance(seen, dict) else seen
        raise WorkloadError(
            f"{where}: vision_config.model_type = {shown(kind)}: known are {', '.join(sorted(ENCODERS))}"
        )
    if not isinstance(text, dict):
        raise WorkloadError(f"{where}: text_config is missing: give the language model's configuration")
    if data.get("vision_feature_select_strategy") not in (None, "default"):
        raise WorkloadError(
            f"{where}: vision_feature_select_strategy = {shown(data['vision_feature_select_strategy'])}: the patches "
            "without the class token ('default') are read only"
        )
    if text.get("model_type", "llama") == "llama":
        text = _TEXT | text
    language = read(text, where=f"{where}: text_config")
    precision_of(seen, where=f"{where}: vision_config")
    if scheme_of(seen, where=f"{where}: vision_config") is not None:
        raise WorkloadError(f"{where}: vision_config: a quantised image encoder is not simulated: take that out")
    check_keys(seen, seen["model_type"], f"{where}: vision_config")
    class_token = seen["model_type"] == "clip_vision_model"
    tokens = patches(seen, where=f"{where}: vision_config") - 1
    encoder = layer_norm_model(seen | {"model_type": "vit"}, where=f"{where}: vision_config")
    scheme = scheme_of(data, where=where)
    if scheme is not None:
        quantised = scheme.over(language.layers, tied=language.tied_embeddings)
        language = replace(language, quantised=quantised)
    return replace(
        language,
        id=name_of(data, where),
        source=str(data.get("_source") or where),
        family=data["model_type"],
        vision=Vision(model=encoder, patches=tokens + class_token, tokens=tokens),
    )
