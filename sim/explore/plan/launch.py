"""A deployment as files that start it: vLLM, SGLang and TensorRT-LLM command lines, and a Kubernetes manifest.

Flags are those of vLLM 0.24, SGLang 0.5 and TensorRT-LLM 1.0 (their documentation). ``$MODEL`` stands for the model's
hub id or folder. Nothing here was run on a cluster.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sim.explore.plan.question import Deployment
from sim.output.files import write_atomically

Role = Literal["serve", "prefill", "decode"]
MODEL = "$MODEL"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "auto"}
PORT = 8000
VLLM_IMAGE = "vllm/vllm-openai:latest"


def roles(one: Deployment) -> dict[Role, int]:
    """How many replicas play which part."""
    if one.mode == "disaggregated":
        return {"prefill": one.spec["prefill_replicas"], "decode": one.spec["replicas"]}
    return {"serve": one.spec["replicas"]}


def vllm(one: Deployment, role: Role) -> list[str]:
    """``vllm serve``; prompts and decoding apart hand caches over by NIXL."""
    spec = one.server
    command = [
        "vllm", "serve", MODEL, "--tensor-parallel-size", str(one.group), "--dtype", DTYPES[spec.dtype],
        "--max-num-seqs", str(spec.max_num_seqs), "--max-num-batched-tokens", str(spec.max_num_batched_tokens),
        "--gpu-memory-utilization", f"{spec.memory_share:g}", "--max-model-len", str(_longest(one)),
        "--port", str(PORT),
    ]  # fmt: skip
    if spec.ep > 1:
        command.append("--enable-expert-parallel")
    if spec.dtype == "fp8_e4m3":
        command += ["--quantization", "fp8"]
    if role != "serve":
        command += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
    return command


def sglang(one: Deployment, role: Role) -> list[str]:
    """``sglang.launch_server``."""
    spec = one.server
    command = [
        "python", "-m", "sglang.launch_server", "--model-path", MODEL, "--tp-size", str(one.group),
        "--dtype", DTYPES[spec.dtype], "--max-running-requests", str(spec.max_num_seqs),
        "--chunked-prefill-size", str(spec.max_num_batched_tokens), "--mem-fraction-static", f"{spec.memory_share:g}",
        "--context-length", str(_longest(one)), "--port", str(PORT),
    ]  # fmt: skip
    if spec.ep > 1:
        command += ["--ep-size", str(spec.ep)]
    if spec.dtype == "fp8_e4m3":
        command += ["--quantization", "fp8"]
    if role != "serve":
        command += ["--disaggregation-mode", role]
    return command


def trtllm(one: Deployment, _: Role) -> list[str]:
    """``trtllm-serve``, the same for each role: a file of ``trtllm-serve disaggregated`` says who hands over."""
    spec = one.server
    command = [
        "trtllm-serve", MODEL, "--backend", "pytorch", "--tp_size", str(one.group),
        "--max_batch_size", str(spec.max_num_seqs), "--max_num_tokens", str(spec.max_num_batched_tokens),
        "--kv_cache_free_gpu_memory_fraction", f"{spec.memory_share:g}", "--max_seq_len", str(_longest(one)),
        "--port", str(PORT),
    ]  # fmt: skip
    if spec.ep > 1:
        command += ["--ep_size", str(spec.ep)]
    return command


ENGINES: dict[str, Callable[[Deployment, Role], list[str]]] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def script(one: Deployment, engine: str) -> str:
    """A shell script: what each role's replicas run, one after another to be copied to its machine."""
    lines = [
        "#!/bin/sh",
        f"# {one.question.model}: {one.label} ({one.mode}), planned by wattline.",
        "# One command a replica; MODEL is the model's hub id or folder.",
        "set -eu",
        ': "${MODEL:?set MODEL to the hub id or folder of the model}"',
    ]
    if clock := one.spec.get("sm_clock_mhz"):
        lines.append(f"# The plan locks the SM clock on every GPU first: nvidia-smi --lock-gpu-clocks={clock:.0f}")
    if cap_w := one.spec.get("power_cap_w"):
        lines.append(f"# The plan limits power on every GPU first: nvidia-smi --power-limit={cap_w:.0f}")
    for role, count in roles(one).items():
        lines.append(f'if [ "${{ROLE:-serve}}" = {role} ]; then  # {count} of these, {one.group} GPUs each')
        lines.append("  exec " + _shell(ENGINES[engine](one, role)))
        lines.append("fi")
    lines.append(f'echo "ROLE is one of: {", ".join(roles(one))}" >&2; exit 2')
    return "\n".join(lines) + "\n"


def manifest(one: Deployment) -> dict[str, Any]:
    """A Kubernetes list: a Deployment of vLLM a role, and a Service before it."""
    items: list[dict[str, Any]] = []
    for role, count in roles(one).items():
        name = f"wattline-{role}"
        labels = {"app": name}
        arguments = [argument.replace(MODEL, "$(MODEL)") for argument in vllm(one, role)[1:]]
        container = {
            "name": "vllm",
            "image": VLLM_IMAGE,
            "command": ["vllm"],
            "args": arguments,
            "env": [{"name": "MODEL", "value": one.question.model}],
            "ports": [{"containerPort": PORT}],
            "resources": {"limits": {"nvidia.com/gpu": one.group}},
        }
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
        items.append(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name},
                "spec": {"replicas": count, "selector": {"matchLabels": labels}, "template": template},
            }
        )
        items.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name},
                "spec": {"selector": labels, "ports": [{"port": PORT, "targetPort": PORT}]},
            }
        )
    return {"apiVersion": "v1", "kind": "List", "items": items}


def write_launch(one: Deployment, folder: Path) -> list[Path]:
    """``vllm.sh``, ``sglang.sh``, ``trtllm.sh``, ``kubernetes.json`` and ``serve.json`` (for ``wattline serve``)."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{engine}.sh": script(one, engine) for engine in ENGINES}
    texts["kubernetes.json"] = json.dumps(manifest(one), indent=2) + "\n"
    texts["serve.json"] = json.dumps(one.spec, indent=2) + "\n"
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in texts]


def _shell(command: list[str]) -> str:
    return " ".join('"$MODEL"' if part == MODEL else shlex.quote(part) for part in command)


def _longest(one: Deployment) -> int:
    return one.question.input_len + one.question.output_len
