"""Hybrids of Mamba-2, attention and feed-forward layers (Nemotron-H, arXiv 2504.03624), from ``config.json``."""

from __future__ import annotations

from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.fields import flag, name_of, positive
from workloads.mixers import StateSpaceSizes
from workloads.model import ModelSpec
from workloads.ops import Block, Pointwise, StateSpace, attention, block, fuse, op, qkv_gemm
from workloads.positions import max_positions
from workloads.work import Elementwise

HYBRID = frozenset({"nemotron_h"})
_NORM = Pointwise(name="add_rmsnorm", op=Elementwise.ADD_RMSNORM)
# One letter a layer, as the configuration writes them.
PARTS: tuple[tuple[str, str, Block], ...] = (
    (
        "M",
        "mamba layer",
        block(
            _NORM,
            fuse(
                "in_gemm",
                op("bsm,mi->bsi", parallel="i", label="gate"),
                op("bsm,mi->bsi", parallel="i", label="X"),
                op("bsm,mg->bsg", parallel="g", label="B"),
                op("bsm,mg->bsg", parallel="g", label="C"),
                op("bsm,mt->bst", parallel="t", label="steps"),
            ),
            StateSpace(name="mixer"),
            fuse("out_gemm", op("bsi,mi->bsm", parallel="i", label="out")),
        ),
    ),
    (
        "*",
        "attention layer",
        block(
            _NORM,
            qkv_gemm(),
            attention("scale", "mask", "softmax_fp32"),
            fuse("o_gemm", op("bsHh,mHh->bsm", parallel="H", label="O")),
        ),
    ),
    (
        "-",
        "feed-forward layer",
        block(
            _NORM,
            fuse("up_gemm", op("bsm,mf->bsf", parallel="f", label="up")),
            Pointwise(name="relu_squared", op=Elementwise.RELU),
            fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down")),
        ),
    ),
)


def hybrid_model(data: dict[str, Any], *, where: str) -> ModelSpec:
    """A hybrid from its configuration; ``hybrid_override_pattern`` names each layer's kind."""

    def size(name: str, default: int | None = None) -> int:
        value = data.get(name)
        return positive(default if value is None else value, name, where)

    pattern, layers = data.get("hybrid_override_pattern"), size("num_hidden_layers")
    letters = "".join(letter for letter, _, _ in PARTS)
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set(letters):
        raise WorkloadError(
            f"{where}: hybrid_override_pattern = {shown(pattern)}: give one letter of '{letters}' for each of the "
            f"num_hidden_layers = {layers}"
        )
    if data.get("mlp_hidden_act") not in (None, "relu2"):
        raise WorkloadError(f"{where}: mlp_hidden_act = {shown(data['mlp_hidden_act'])}: only 'relu2' is known")
    heads, groups = size("mamba_num_heads"), size("n_groups")
    if heads % groups:
        raise WorkloadError(f"{where}: mamba_num_heads = {heads} is not a multiple of n_groups = {groups}")
    q_heads, width = size("num_attention_heads"), size("hidden_size")
    return ModelSpec(
        id=name_of(data, where),
        source=str(data.get("_source") or where),
        d_model=width,
        layers=layers,
        q_heads=q_heads,
        kv_heads=size("num_key_value_heads", q_heads),
        head_dim=size("attention_head_dim", data.get("head_dim") or width // q_heads),
        d_ff=size("intermediate_size"),
        vocab=size("vocab_size"),
        tied_embeddings=flag(data, "tie_word_embeddings", where),
        max_positions=max_positions(data, where),
        state_space=StateSpaceSizes(
            heads=heads,
            head_dim=size("mamba_head_dim"),
            groups=groups,
            state=size("ssm_state_size"),
            chunk=size("chunk_size", 256),
        ),
        pattern=pattern,
        parts=PARTS,
        block=next(part for letter, _, part in PARTS if letter == pattern[0]),
    )
