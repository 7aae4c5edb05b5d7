"""A scenario as a row that the measuring suite can run, or one line that says why it cannot."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from pydantic import BaseModel

from hardware.calibrate.suite.plan import step
from hardware.calibrate.suite.shapes import HEAD_DIM, ModelShape
from hardware.calibrate.suite.steps_overlap import cuts_of
from sim.errors import ScenarioError
from sim.scenario.operators import setting
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from workloads import ModelSpec, load_model
from workloads.ops import decoder_block, expert_feed, gated_feed

# Fields of a scenario that the suite's steps run, or that change nothing of what runs; any other is refused.
_RUN = frozenset(
    {
        "model", "gpu", "profile", "node", "phase", "batch", "seq_len", "output_len", "layers", "lm_head", "dtype",
        "weight_dtype", "kv_dtype", "launch", "tp", "ep", "ep_mode", "sequence_parallel", "cp", "cp_mode", "ulysses",
        "pp", "micro_batches", "expert_skew", "overlap_chunks", "comm_ctas", "overlap_ops", "chip_temperature_c",
        "chip_power_factor", "detail", "ignore_memory",
    }
)  # fmt: skip
_DTYPES = ("bf16", "fp8_e4m3")
_PHASES = ("prefill", "decode", "generate")


def planned_row(scenario: Scenario) -> tuple[dict[str, Any], dict[str, ModelShape]]:
    """The suite's row for ``scenario`` and the shape of its model.

    >>> row, shapes = planned_row(Scenario.of(model="llama3-8b", phase="decode", batch=4, seq_len=1000))
    >>> row["kind"], row["batch"], shapes["llama3-8b"].width
    ('model_step', 4, 4096)
    """
    refuse_others(scenario, _RUN, "the suite measures")
    if scenario.phase not in _PHASES:
        raise ScenarioError(f"phase = '{scenario.phase}': the suite measures {', '.join(_PHASES)}")
    if scenario.dtype not in _DTYPES:
        raise ScenarioError(f"dtype = '{scenario.dtype}': the suite measures {' and '.join(_DTYPES)}")
    if not precision_of(scenario).uniform:
        raise ScenarioError(
            f"{precision_of(scenario).words()}: the suite measures one type for all, {' or '.join(_DTYPES)}"
        )
    if scenario.ep_mode == "all_to_all":
        raise ScenarioError("ep_mode = 'all_to_all': the suite measures expert parallelism by 'all_reduce'")
    model = load_model(scenario.model)
    if model.experts and scenario.tp > 1 and scenario.ep == 1:
        raise ScenarioError(f"tp = {scenario.tp} without ep: the suite holds whole experts: give ep = {scenario.tp}")
    shape = _shape(model)
    more: dict[str, Any] = {"tp": scenario.tp, "lm_head": scenario.lm_head, "dtype": scenario.dtype}
    more |= {"launch": scenario.launch, "world": scenario.world}
    if scenario.ep > 1:
        more |= {"ep": scenario.ep, "ep_mode": scenario.ep_mode}
    if model.experts:
        more["expert_skew"] = scenario.expert_skew
    for name in ("overlap_chunks", "comm_ctas", "overlap_ops"):
        value = getattr(scenario, name)
        if value != Scenario.model_fields[name].default and not scenario.sequence_parallel:
            raise ScenarioError(f"{name} = {value!r}: the suite cuts sequence_parallel collectives only")
    if scenario.sequence_parallel:
        more |= {"sequence_parallel": True, "overlap_chunks": scenario.overlap_chunks, "comm_ctas": scenario.comm_ctas}
    if scenario.cp > 1:
        _only(scenario, "cp", tp=1, pp=1, ep=1, phase="prefill", cp_mode="ulysses", lm_head=False)
        more |= {"cp": scenario.cp, "ulysses": scenario.cp}
    if scenario.pp > 1:
        _only(scenario, "pp", tp=1, ep=1, pp=2, phase="prefill")
        more |= {"pp": scenario.pp, "micro_batches": scenario.micro_batches or scenario.pp}
    if (settings := _settings(scenario)) is not None:
        more["overlap_ops"] = settings
        cuts_of(more)
    layers = scenario.layers or model.layers
    row = step(model.id, layers, scenario.phase, scenario.batch, scenario.seq_len, **more)
    if scenario.phase == "generate":
        row |= {"kind": "generate", "output_len": scenario.output_len}
    return row, {model.id: shape}


def refuse_others(asked: BaseModel, run: Set[str], who: str) -> None:
    """Refuse a field beyond those that are ``run``, where it is not its default: it would change nothing."""
    for name, field in type(asked).model_fields.items():
        value = getattr(asked, name)
        if name not in run and value != field.default:
            raise ScenarioError(f"{name} = {value!r}: {who} with {name} = {field.default!r} only")


def _settings(scenario: Scenario) -> dict[str, dict[str, int | None]] | None:
    """Chunks and blocks of single products, as a row has them."""
    found = {name: setting(text) for name, text in scenario.overlap_ops or ()}
    for name, one in found.items():
        if one.stage is not None:
            raise ScenarioError(f"overlap_ops.{name}: stage {one.stage}: the suite measures single products only")
    return {name: {"chunks": one.chunks, "comm_ctas": one.comm_ctas} for name, one in found.items()} or None


def _only(scenario: Scenario, name: str, **runs: Any) -> None:
    """Refuse a layout by ``name`` whose other fields differ from what the suite runs with it."""
    for field, value in runs.items():
        if getattr(scenario, field) != value:
            raise ScenarioError(
                f"{name} = {getattr(scenario, name)} with {field} = {getattr(scenario, field)!r}: "
                f"the suite measures it with {field} = {value!r} only"
            )


def _shape(model: ModelSpec) -> ModelShape:
    if model.head_dim != HEAD_DIM:
        raise ScenarioError(f"head_dim = {model.head_dim} of {model.id}: the suite's kernels have {HEAD_DIM}")
    feed = (expert_feed(),) if model.experts else gated_feed()
    if model.blocks != (decoder_block(*feed, qk_norm=model.qk_norm),):
        raise ScenarioError(f"{model.id} has layers of its own kind: the suite runs Llama-like layers only")
    return ModelShape(
        width=model.d_model,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        ff=model.d_ff,
        layers=model.layers,
        vocabulary=model.vocab,
        experts=model.experts,
        top_k=model.top_k,
    )
