"""A deployment as files that start it: vLLM, SGLang and TensorRT-LLM command lines, and a Kubernetes manifest.

The argument parsers of vLLM 0.33 and SGLang 0.5.23 take the flags; those of TensorRT-LLM were compared with its
``commands/serve.py``. ``$MODEL`` stands for the model's hub id or folder. Nothing here was run on a cluster.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.explore.plan.question import Deployment, Role
from sim.output.files import write_atomically

MODEL = "$MODEL"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "auto"}
PORT = 8000
ANYWHERE = "0.0.0.0"  # a router on another machine is to reach it; vLLM listens so by itself
ROUTERS = {
    "vllm": "the proxy of its disaggregated-serving examples",
    "sglang": "python -m sglang_router.launch_router --pd-disaggregation",
    "trtllm": "trtllm-serve disaggregated",
}
# Who else than vLLM does what a plan with dcp rests on.
SPREADS = {
    "sglang": "SGLang does for latent attention alone",
    "trtllm": "no flag of trtllm-serve does, so that fewer sequences fit",
}
VLLM_IMAGE = "vllm/vllm-openai:latest"


def roles(deployment: Deployment) -> dict[Role, int]:
    """How many replicas play which part."""
    if deployment.mode == "disaggregated":
        return {"prefill": deployment.spec["prefill_replicas"], "decode": deployment.spec["replicas"]}
    return {"serve": deployment.spec["replicas"]}


def vllm(deployment: Deployment, role: Role) -> list[str]:
    """``vllm serve``; prompts and decoding apart hand caches over by NIXL."""
    spec = deployment.server
    command = [
        "vllm", "serve", MODEL, "--tensor-parallel-size", str(deployment.width(role)), "--dtype", DTYPES[spec.dtype],
        "--max-num-seqs", str(spec.max_num_seqs), "--max-num-batched-tokens", str(spec.max_num_batched_tokens),
        "--gpu-memory-utilization", f"{spec.memory_share:g}", "--max-model-len", str(_longest(deployment)),
        "--port", str(PORT),
    ]  # fmt: skip
    if (pp := deployment.degrees(role)["pp"]) > 1:
        command += ["--pipeline-parallel-size", str(pp)]
    if (dcp := deployment.degrees(role)["dcp"]) > 1:
        command += ["--decode-context-parallel-size", str(dcp)]
    if deployment.degrees(role)["ep"] > 1:
        command.append("--enable-expert-parallel")
    if spec.dtype == "fp8_e4m3":
        command += ["--quantization", "fp8"]
    if role != "serve":
        command += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
    return command


def sglang(deployment: Deployment, role: Role) -> list[str]:
    """``sglang.launch_server``."""
    spec = deployment.server
    command = [
        "python", "-m", "sglang.launch_server", "--model-path", MODEL, "--tp-size", str(deployment.width(role)),
        "--dtype", DTYPES[spec.dtype], "--max-running-requests", str(spec.max_num_seqs),
        "--chunked-prefill-size", str(spec.max_num_batched_tokens), "--mem-fraction-static", f"{spec.memory_share:g}",
        "--context-length", str(_longest(deployment)), "--host", ANYWHERE, "--port", str(PORT),
    ]  # fmt: skip
    if (pp := deployment.degrees(role)["pp"]) > 1:
        command += ["--pp-size", str(pp)]
    if (dcp := deployment.degrees(role)["dcp"]) > 1:
        command += ["--dcp-size", str(dcp)]
    if (ep := deployment.degrees(role)["ep"]) > 1:
        command += ["--ep-size", str(ep)]
    if spec.dtype == "fp8_e4m3":
        command += ["--quantization", "fp8"]
    if role != "serve":
        command += ["--disaggregation-mode", role]
    return command


def trtllm(deployment: Deployment, role: Role) -> list[str]:
    """``trtllm-serve``, alike for each role: a file of ``trtllm-serve disaggregated`` says who hands over."""
    spec = deployment.server
    command = [
        "trtllm-serve", MODEL, "--backend", "pytorch", "--tp_size", str(deployment.width(role)),
        "--max_batch_size", str(spec.max_num_seqs), "--max_num_tokens", str(spec.max_num_batched_tokens),
        "--kv_cache_free_gpu_memory_fraction", f"{spec.memory_share:g}", "--max_seq_len", str(_longest(deployment)),
        "--host", ANYWHERE, "--port", str(PORT),
    ]  # fmt: skip
    if (pp := deployment.degrees(role)["pp"]) > 1:
        command += ["--pp_size", str(pp)]
    if (ep := deployment.degrees(role)["ep"]) > 1:
        command += ["--ep_size", str(ep)]
    if deployment.question.input_len > spec.max_num_batched_tokens - spec.max_num_seqs:
        command.append("--enable_chunked_prefill")  # else it refuses prompts longer than a step
    return command


ENGINES: dict[str, Callable[[Deployment, Role], list[str]]] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def script(deployment: Deployment, engine: str) -> str:
    """A shell script: what each role's replicas run, one after another to be copied to its machine."""
    lines = [
        "#!/bin/sh",
        f"# {deployment.question.model}: {deployment.label} ({deployment.mode}), planned by wattline.",
        "# One command a replica; MODEL is the model's hub id or folder.",
        "set -eu",
        ': "${MODEL:?set MODEL to the hub id or folder of the model}"',
    ]
    if clock := deployment.spec.get("sm_clock_mhz"):
        lines.append(f"# The plan locks the SM clock on every GPU first: nvidia-smi --lock-gpu-clocks={clock:.0f}")
    if cap_w := deployment.spec.get("power_cap_w"):
        lines.append(f"# The plan limits power on every GPU first: nvidia-smi --power-limit={cap_w:.0f}")
    if engine == "trtllm" and deployment.server.dtype == "fp8_e4m3":
        lines.append("# TensorRT-LLM takes FP8 from the checkpoint: MODEL is one that is quantised so.")
    if "dcp" in deployment.spec and engine != "vllm":
        lines.append(f"# The plan spreads caches over ranks that would hold copies of them: {SPREADS[engine]}.")
    if deployment.mode == "disaggregated":
        lines.append(f"# In front of them goes the engine's router of prefill and decode: {ROUTERS[engine]}.")
    for role, count in roles(deployment).items():
        lines.append(
            f'if [ "${{ROLE:-serve}}" = {role} ]; then  # {count} of these, {deployment.group(role)} GPUs each'
        )
        lines.append("  exec " + _shell(ENGINES[engine](deployment, role)))
        lines.append("fi")
    lines.append(f'echo "ROLE is one of: {", ".join(roles(deployment))}" >&2; exit 2')
    return "\n".join(lines) + "\n"


def manifest(deployment: Deployment) -> dict[str, Any]:
    """A Kubernetes list: a Deployment of vLLM a role, and a Service before it; who applies it fills ``MODEL`` in."""
    items: list[dict[str, Any]] = []
    for role, count in roles(deployment).items():
        name = f"wattline-{role}"
        labels = {"app": name}
        arguments = [argument.replace(MODEL, "$(MODEL)") for argument in vllm(deployment, role)[1:]]
        container = {
            "name": "vllm",
            "image": VLLM_IMAGE,
            "command": ["vllm"],
            "args": arguments,
            "env": [{"name": "MODEL", "value": f"HUB-ID-OR-FOLDER-OF/{deployment.question.model}"}],
            "ports": [{"containerPort": PORT}],
            "resources": {"limits": {"nvidia.com/gpu": deployment.group(role)}},
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


def write_launch(deployment: Deployment, folder: Path) -> list[Path]:
    """``vllm.sh``, ``sglang.sh``, ``trtllm.sh``, ``kubernetes.json`` and ``serve.json`` (for ``wattline serve``)."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{engine}.sh": script(deployment, engine) for engine in ENGINES}
    texts["kubernetes.json"] = json.dumps(manifest(deployment), indent=2) + "\n"
    texts["serve.json"] = json.dumps(deployment.served, indent=2) + "\n"
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    return [folder / name for name in texts]


def _shell(command: list[str]) -> str:
    return " ".join('"$MODEL"' if part == MODEL else shlex.quote(part) for part in command)


def _longest(deployment: Deployment) -> int:
    return deployment.question.input_len + deployment.question.output_len
