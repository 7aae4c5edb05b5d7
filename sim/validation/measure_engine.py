"""A scenario, or a file of requests, on a real serving engine: what to start, and the records that it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from hardware.calibrate.suite.adapters_vllm import MODULES, RandomAdapters
from hardware.calibrate.suite.engine_vllm import (
    DECODE_TOKENS,
    Decode,
    Drafts,
    Prefill,
    Serve,
    ServerSpec,
    Work,
    measure_engine,
)
from hardware.nvml import detect
from sim.errors import ScenarioError
from sim.scenario.adapters import LORA_FIELDS
from sim.scenario.field_table import read_mapping
from sim.scenario.spec import Scenario
from sim.scenario.speculation import SPECULATION_FIELDS
from sim.serving.spec import ServeSpec
from sim.serving.traffic import LORA_TRAFFIC
from sim.validation.measure import refuse_others
from workloads import ModelSpec, load_model
from workloads.ops import decoder_block, expert_feed, gated_feed
from workloads.stack import STACKS

# Adapters of a server, and what its requests ask for.
LORA_SERVED = (*LORA_FIELDS, "max_loras", *LORA_TRAFFIC)
# Fields of a scenario that vLLM is started with, or that change nothing of what runs; any other is refused.
_RUN = frozenset(
    {
        "model", "gpu", "profile", "node", "phase", "batch", "seq_len", "layers", "dtype", "stack", "tp", "ep",
        "ep_mode", "dcp", *LORA_FIELDS, "max_loras", "output_len", "routing", "routing_seed", "chip_temperature_c",
        "chip_power_factor", "detail", "ignore_memory",
    }
)  # fmt: skip
# The same of a server; its traffic is a file of requests.
_SERVED = frozenset(
    {
        "model", "layers", "gpu", "profile", "node", "tp", "ep", "ep_mode", "dcp", "pp", *LORA_SERVED, "dtype",
        "stack", "host", "prefix_caching", "chip_temperature_c", "speculation", "draft_model", "draft_tokens",
        "acceptance", "max_num_batched_tokens", "max_num_seqs", "trace", "trace_block_tokens", "requests", "time_scale",
        "length_scale", "seed",
    }
)  # fmt: skip
REQUEST_FILES = (".csv", ".jsonl")


def stack_of(given: str | None) -> str:
    """The stack that predicts vLLM: what the user gave, else its own where there is one."""
    return given or ("vllm" if "vllm" in STACKS else "paged-kv")


def engine_of(scenario: Scenario, folder: Path, traces: Path | None) -> tuple[ServerSpec, Work]:
    """The server and the work of ``scenario``; its ``config.json`` is written into ``folder``."""
    refuse_others(scenario, _RUN, "vLLM is measured")
    if scenario.phase not in ("prefill", "decode"):
        raise ScenarioError(f"phase = '{scenario.phase}': vLLM is measured in prefill, decode, or on requests")
    if scenario.dtype not in ("bf16", "fp8_e4m3"):
        raise ScenarioError(f"dtype = '{scenario.dtype}': vLLM is measured in bf16 and fp8_e4m3")
    if scenario.ep > 1 and (scenario.tp != scenario.ep or scenario.ep_mode != "all_reduce"):
        raise ScenarioError(
            f"ep = {scenario.ep} with tp = {scenario.tp}, ep_mode = {scenario.ep_mode!r}: vLLM's experts lie on its "
            "tensor-parallel ranks: give tp = ep and ep_mode = 'all_reduce'"
        )
    if scenario.routing not in (None, "uniform"):
        raise ScenarioError(f"routing = '{scenario.routing}': vLLM is measured with routing = 'uniform' only")
    model = load_model(scenario.model)
    write_config(scenario.model, model, folder, layers=scenario.layers)
    tokens = scenario.batch * scenario.seq_len
    prefill = scenario.phase == "prefill"
    engine = ServerSpec(
        model=folder,
        vocabulary=model.vocab,
        gpus=scenario.world,
        context_ranks=scenario.dcp,
        expert_parallel=scenario.ep > 1,
        adapters=_adapters(scenario, model, folder / "adapters", slots=scenario.max_loras),
        dtype=scenario.dtype,
        max_model_len=scenario.seq_len + 2 * DECODE_TOKENS,
        max_num_batched_tokens=max(tokens, 1) if prefill else max(8192, scenario.batch),
        max_num_seqs=min(256, tokens) if prefill else max(256, scenario.batch),
        traces=traces,
    )
    work = Prefill if prefill else Decode
    return engine, work(batch=scenario.batch, seq_len=scenario.seq_len)


def measure_scenario(scenario: Scenario, folder: Path, traces: Path | None) -> tuple[list[dict[str, Any]], Scenario]:
    """Records of the host and of the step, and the scenario that ran: its context is that of the measured part."""
    engine, work = engine_of(scenario, folder, traces)
    facts, (measured,) = measure_engine(engine, [work])
    context = measured.pop("mean_context", None)
    ran = scenario if context is None else scenario.model_copy(update={"seq_len": round(context)})
    model = load_model(scenario.model)
    row = {
        "kind": "model_step", "gpu": scenario.gpu, "world": scenario.world, "model": scenario.model,
        "layers": scenario.layers or model.layers, "phase": scenario.phase, "batch": scenario.batch,
        "seq_len": ran.seq_len, "tp": scenario.tp, "ep": scenario.ep, "ep_mode": scenario.ep_mode, "lm_head": True,
        "dtype": scenario.dtype, "stack": scenario.stack, "regime": "steady", "launch": "graph",
        "routing": "uniform" if model.experts else None,
    } | _beside(scenario, (*LORA_FIELDS, "max_loras"))  # fmt: skip
    return [_host(scenario.gpu, scenario.world, facts), row | _joules(measured)], ran


def measure_requests(spec: ServeSpec, folder: Path, traces: Path | None) -> list[dict[str, Any]]:
    """Records of the host and of the requests of ``spec`` on a real server."""
    refuse_others(spec, _SERVED, "vLLM is measured")
    asked = spec.traffic().requests
    requests = tuple((request.arrival_s, request.input_tokens, request.output_tokens) for request in asked)
    adapters = tuple(request.adapter for request in asked) if spec.lora_adapters else ()
    model = load_model(spec.model)
    write_config(spec.model, model, folder, layers=spec.layers)
    engine = ServerSpec(
        model=folder,
        vocabulary=model.vocab,
        gpus=spec.gpus,
        stages=spec.pp,
        drafts=_drafts(spec, model, folder / "draft"),
        context_ranks=spec.dcp,
        expert_parallel=spec.ep > 1,
        adapters=_adapters(spec, model, folder / "adapters", slots=spec.max_loras),
        dtype=spec.dtype,
        max_model_len=max(i + o for _, i, o in requests) + 1,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        traces=traces,
    )
    facts, (measured,) = measure_engine(engine, [Serve(requests=requests, adapters=adapters)])
    row = {
        "kind": "served", "gpu": spec.gpu, "world": spec.gpus, "model": spec.model, "tp": spec.tp, "ep": spec.ep,
        "ep_mode": spec.ep_mode, "pp": spec.pp, "dtype": spec.dtype, "stack": spec.stack,
        "layers": spec.layers, "requests": [list(request) for request in requests],
    } | _beside(spec, (*LORA_FIELDS, "max_loras"))  # fmt: skip
    if adapters:
        row["adapters"] = list(adapters)
    if spec.speculation is not None:
        row |= {name: getattr(spec, name) for name in SPECULATION_FIELDS}
    return [_host(spec.gpu, spec.gpus, facts), row | _joules(measured)]


def _beside(spec: Scenario | ServeSpec, lora: Sequence[str]) -> dict[str, Any]:
    """Fields of a row that only some servers have: ranks that share out caches, and adapters."""
    found: dict[str, Any] = {"dcp": spec.dcp} if spec.dcp > 1 else {}
    if spec.lora_adapters:
        found |= {name: getattr(spec, name) for name in lora}
    return found


def _adapters(
    spec: Scenario | ServeSpec, model: ModelSpec, folder: Path, *, slots: int | None
) -> RandomAdapters | None:
    """Random adapters on the products that ``spec`` names, or on all that the model has but its experts."""
    if not spec.lora_adapters:
        return None
    known = MODULES[:4] if model.experts else MODULES
    wanted = spec.lora_targets or known
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    modules = tuple(part for name in wanted for part in parts.get(name, (name,)))
    if other := next((name for name in modules if name not in known), None):
        raise ScenarioError(f"lora_targets = {other}: vLLM is measured with {', '.join(known)} of this model")
    return RandomAdapters(
        count=spec.lora_adapters, rank=spec.max_lora_rank, folder=folder, modules=modules, slots=slots
    )


def _drafts(spec: ServeSpec, model: ModelSpec, folder: Path) -> Drafts | None:
    """What drafts tokens, its ``config.json`` written into ``folder``; eagle's is one layer of the model itself."""
    if spec.speculation is None:
        return None
    if spec.speculation not in ("draft_model", "eagle"):
        raise ScenarioError(f"speculation = '{spec.speculation}': vLLM is measured with draft_model and eagle")
    folder.mkdir()
    if spec.draft_model is not None:
        write_config(spec.draft_model, load_model(spec.draft_model), folder, layers=None)
    else:
        write_config(spec.model, model, folder, layers=1)
    return Drafts(method=spec.speculation, model=folder, rates=tuple(accumulate(spec.chances, mul)))


def gpu_here(given: str | None) -> str:
    """The GPU that the user named, else this machine's."""
    if given is not None:
        return given
    boards = detect()
    if not boards or boards[0].gpu_id is None:
        found = boards[0].name if boards else "no GPU"
        raise ScenarioError(f"gpu is missing: {found} is not in the catalog: describe it in a .toml file")
    return boards[0].gpu_id


def append(records: list[dict[str, Any]], out: Path) -> None:
    """Add ``records`` to a file of JSON lines."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in records)


def write_config(name: str, model: ModelSpec, folder: Path, *, layers: int | None) -> None:
    """A Hugging Face ``config.json`` in ``folder``: the user's own with other ``layers``, or one for ``model``."""
    own = Path(name)
    if own.suffix == ".json" and own.is_file():
        shutil.copy(own, folder / "config.json")
        config = dict(read_mapping(own))
    else:
        config = _config(model)
    if layers is not None:
        config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _config(model: ModelSpec) -> dict[str, Any]:
    """What vLLM has to read of a catalog's Llama-like model, or of a Qwen-like mixture of experts."""
    feed = (expert_feed(),) if model.experts else gated_feed()
    if model.blocks != (decoder_block(*feed, qk_norm=model.qk_norm),):
        raise ScenarioError(f"{model.id} has layers of its own kind: give its Hugging Face config.json as --model")
    config: dict[str, Any] = {
        "hidden_size": model.d_model, "num_hidden_layers": model.layers, "num_attention_heads": model.q_heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "vocab_size": model.vocab,
        "max_position_embeddings": max(model.max_positions, 131_072), "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if model.experts:
        return config | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": model.d_ff,
            "moe_intermediate_size": model.d_ff, "num_experts": model.experts, "num_experts_per_tok": model.top_k,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    family, kind = ("Qwen3ForCausalLM", "qwen3") if model.qk_norm else ("LlamaForCausalLM", "llama")
    return config | {"architectures": [family], "model_type": kind, "intermediate_size": model.d_ff}


def _host(gpu: str, world: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "host", "gpu": gpu, "world": world, **facts}


def _joules(measured: dict[str, Any]) -> dict[str, Any]:
    """``measured`` with the joules of all GPUs, where each was long enough for the counter."""
    watts = measured["power_w"]
    return measured | {"energy_j": None if None in watts else measured["latency_s"] * sum(watts)}
