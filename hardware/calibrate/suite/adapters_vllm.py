"""Random low-rank adapters in files, as a serving engine loads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomAdapters:
    """``count`` adapters of ``rank`` on ``modules`` of every layer, written into ``folder``.

    A step has sequences of ``slots`` of them at most (None: of all).
    """

    count: int
    rank: int
    folder: Path
    modules: tuple[str, ...] = MODULES
    slots: int | None = None


def write_adapters(adapters: RandomAdapters, model: Path) -> list[Path]:
    """Folders of the adapters of a Llama-like model whose ``config.json`` lies in ``model``; layers are alike.

    Made without torch: its threads in this process would hang the engine's, which are forked from it.
    """
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(7)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    sides = module_sides(config)
    folders = []
    for number in range(adapters.count):
        folder = adapters.folder / f"adapter-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for module in adapters.modules:
            inputs, outputs = sides[module]
            part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            down, up = (
                (0.01 * draw.standard_normal(shape, dtype=np.float32)).astype(np.float16)
                for shape in ((adapters.rank, inputs), (outputs, adapters.rank))
            )
            for layer in range(config["num_hidden_layers"]):
                name = f"base_model.model.model.layers.{layer}.{part}.{module}"
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        save_file(tensors, str(folder / "adapter_model.safetensors"))
        said = {
            "peft_type": "LORA", "r": adapters.rank, "lora_alpha": adapters.rank, "bias": "none",
            "target_modules": list(adapters.modules), "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
        folders.append(folder)
    return folders


def module_sides(config: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product of a Llama-like ``config.json``.

    >>> sizes = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
    >>> module_sides(sizes)["k_proj"], module_sides(sizes)["down_proj"]
    ((4096, 1024), (14336, 4096))
    """
    width, ff, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    return {
        "q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (queries, width),
        "gate_proj": (width, ff), "up_proj": (width, ff), "down_proj": (ff, width),
    }  # fmt: skip
