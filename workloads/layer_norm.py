"""``config.json`` of the LayerNorm families: GPT-2, OPT, BERT and vision transformers."""

from __future__ import annotations

from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.fields import flag, name_of, positive
from workloads.model import ModelSpec
from workloads.ops import Block, layer_norm_block
from workloads.work import Elementwise

LAYER_NORM = frozenset({"gpt2", "opt", "bert", "vit"})
# Positions a model has where its file does not say (transformers 4.57).
_POSITIONS = {
    "gpt2": ("n_positions", 1024),
    "opt": ("max_position_embeddings", 2048),
    "bert": ("max_position_embeddings", 512),
}
_ACTIVATIONS = {
    "gelu_new": Elementwise.GELU_TANH,
    "gelu_pytorch_tanh": Elementwise.GELU,  # one kernel
    "gelu": Elementwise.GELU,
    "quick_gelu": Elementwise.GELU,
    "relu": Elementwise.RELU,
}


def layer_norm_model(data: dict[str, Any], *, where: str) -> ModelSpec:
    """A model of one of the families in ``LAYER_NORM`` from its configuration.

    A vision transformer's ``vocab`` counts the inputs of a patch: the rows of its embedding.

    >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> model = layer_norm_model(config, where="config.json")
    >>> model.d_ff, model.causal
    (3072, True)
    """
    kind = data["model_type"]

    def sizes(name: str, default: int | None = None) -> int:
        return _size(data, name, default, where)

    if kind == "gpt2":
        names = ("n_embd", "n_layer", "n_head", "n_inner", "activation_function")
    elif kind == "opt":
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "activation_function")
    else:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
    width, heads = sizes(names[0]), sizes(names[2])
    if width % heads:
        raise WorkloadError(f"{where}: {names[0]} = {width} is not a multiple of {names[2]} = {heads}")
    if data.get("word_embed_proj_dim") not in (None, width) or not flag(
        data, "do_layer_norm_before", where, default=True
    ):
        raise WorkloadError(f"{where}: OPT of 350M (embedding narrower than the layers, norm after them) is not known")
    defaults = {"gpt2": "gelu_new", "opt": "relu", "bert": "gelu", "vit": "gelu"}
    activation = data.get(names[4], defaults[kind])
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise WorkloadError(f"{where}: {names[4]} = {shown(activation)}: known are {', '.join(_ACTIVATIONS)}")
    vocab = sizes("num_channels", 3) * sizes("patch_size", 16) ** 2 if kind == "vit" else sizes("vocab_size")
    return ModelSpec(
        id=name_of(data, where),
        source=str(data.get("_source") or where),
        d_model=width,
        layers=sizes(names[1]),
        q_heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        d_ff=sizes(names[3], 4 * width),
        vocab=vocab,
        tied_embeddings=flag(data, "tie_word_embeddings", where, default=True),
        max_positions=patches(data, where=where) if kind == "vit" else sizes(*_POSITIONS[kind]),
        learned_positions=True,
        causal=kind in ("gpt2", "opt"),
        block=_block(kind, _ACTIVATIONS[activation]),
    )


def patches(data: dict[str, Any], *, where: str) -> int:
    """Tokens of one image: its patches, and the class token.

    >>> patches({"image_size": 224, "patch_size": 16}, where="config.json")
    197
    """
    image, patch = _size(data, "image_size", 224, where), _size(data, "patch_size", 16, where)
    if image % patch:
        raise WorkloadError(f"{where}: image_size = {image} is not a multiple of patch_size = {patch}")
    return (image // patch) ** 2 + 1


def _block(kind: str, activation: Elementwise) -> Block:
    match kind:
        case "gpt2":
            return layer_norm_block("scale", "mask", "softmax", activation=activation, one_qkv=True)
        case "opt":
            return layer_norm_block("scale_queries", "mask", "softmax_fp32", activation=activation)
        case "bert":
            return layer_norm_block("scale", "mask", "softmax", activation=activation, norm_first=False)
        case _:
            return layer_norm_block("scale", "softmax", activation=activation)


def _size(data: dict[str, Any], name: str, default: int | None, where: str) -> int:
    value = data.get(name)
    return positive(default if value is None else value, name, where)
