"""Host's pace of a vLLM server in steps with prompts: lone prompts through models so narrow that the GPU waits for it.

Models of few and of many layers differ by the launches of the layers between, so that neither the way of a request nor
what a step costs beside its layers counts: ``python -m hardware.calibrate.suite.host_vllm --out F``. No profiler runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware.calibrate.suite.engine_vllm import Lone, ServerSpec, measure_engine, visible
from hardware.nvml import detect

LAYERS = (8, 40)
# Below and above the sizes that vLLM captures by itself.
TOKENS = (64, 256, 448, 576, 768, 1024)
_VOCABULARY = 32_000
_COMMON = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "vocab_size": _VOCABULARY, "max_position_embeddings": 8192, "head_dim": 128, "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 1024, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 2048,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 2048},
    "experts": _EXPERTS,
    # Layers as wide as those of Qwen3-30B-A3B, through which the GPU is quicker than the host too.
    "wide_experts": {
        **_EXPERTS, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "moe_intermediate_size": 768,
    },
}  # fmt: skip


def measure_one(kind: str, layers: int, *, gpu_id: str) -> list[dict[str, Any]]:
    """Records of one narrow model: seconds to the first token at each length."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIGS[kind], "num_hidden_layers": layers}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        works = [Lone(seq_len=tokens) for tokens in TOKENS]
        about, rows = measure_engine(ServerSpec(model=Path(folder), vocabulary=_VOCABULARY), works)
    card = detect()[visible(os.environ, 1)[0]]
    machine = card.uuid.removeprefix("GPU-")[:8]  # hosts differ: rows of one are compared
    given = {"kind": "vllm_host", "gpu": gpu_id, "machine": machine, "world": 1, "model": kind, "layers": layers}
    return [{**given, "tokens": work.seq_len, **row, **about} for work, row in zip(works, rows, strict=True)]


def main(arguments: Sequence[str]) -> None:
    """One server after the other, each in a process of its own: vLLM leaves what it took when its process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="records, one JSON object a line; appended to")
    parser.add_argument("--gpu", required=True, help="id of the GPU to write into records")
    parser.add_argument("--only", choices=[f"{kind}-{layers}" for kind in CONFIGS for layers in LAYERS])
    parser.add_argument("--model", choices=tuple(CONFIGS), help="one of these alone")
    asked = parser.parse_args(arguments)
    if asked.only is not None:
        kind, layers = asked.only.split("-")
        with asked.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in measure_one(kind, int(layers), gpu_id=asked.gpu))
        return
    for kind in (asked.model,) if asked.model else CONFIGS:
        for layers in LAYERS:
            alone = ["--out", str(asked.out), "--gpu", asked.gpu, "--only", f"{kind}-{layers}"]
            subprocess.run([sys.executable, "-m", "hardware.calibrate.suite.host_vllm", *alone], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
