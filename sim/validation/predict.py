"""Predict one record from its inputs alone, through the same engine and physics as everything else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from hardware.calibrate.engine_rows import ENGINE_KINDS
from hardware.laws.in_switch import IN_SWITCH_FROM
from inputs.texts import shown
from sim.run.repetition import Prediction, machine_for, run_program, run_works, seen
from sim.run.runner import simulate
from sim.scenario.adapters import LORA_FIELDS
from sim.scenario.spec import Scenario
from sim.scenario.speculation import SPECULATION_FIELDS
from sim.serving import serve
from sim.serving.requests import Request, Traffic
from sim.serving.spec import ServeSpec
from sim.validation import predict_time
from sim.validation.engine_kernels import before, engine_kernel
from sim.validation.engine_rows import served_latencies
from sim.validation.inputs import Inputs, NotPredicted, checked
from sim.validation.kernel_work import FAST_ACCUMULATION, kernel_work
from sim.validation.lanes import beside_waiting, computation, together
from sim.validation.partitions import on_partition, side_by_side
from sim.validation.records import MEASURED_FIELDS
from workloads.diffusion import load_dit, parse_video
from workloads.families.dit_layers import build_denoise
from workloads.families.dit_video import build_decoder
from workloads.families.ring import RingAttention, build_ring
from workloads.kernel_names import AllReduce, CollectiveOp, Elementwise
from workloads.work import CollectiveWork, ElementwiseWork, GemmWork, Work

# Sizes that are means of several draws, and the layers of a row without any of the transformer.
NOT_COUNTS = {"vllm_experts": frozenset({"rows", "distinct", "tiles"}), "diffusers_decode": frozenset({"layers"})}
# Fields of a model step that label it and change nothing.
STEP_LABELS = frozenset({"kind", "world", "gpu_index"})


def predict(kind: str, inputs: Inputs) -> Prediction:
    """The prediction for one record; raises :class:`NotPredicted` with the reason for other kinds."""
    assert not MEASURED_FIELDS & inputs.keys()
    predictor = PREDICTORS.get(kind)
    if predictor is None:
        raise NotPredicted(SKIPPED.get(kind, f"unknown kind '{kind}'"))
    besides = NOT_COUNTS.get(kind, frozenset())
    try:
        return predictor(checked(inputs, besides=besides))
    except KeyError as error:
        raise NotPredicted(f"field {error} is missing") from None
    except ValueError as error:  # an enum's: dtype or op that no record kind has
        raise NotPredicted(str(error)) from None


def scenario_of(inputs: Inputs) -> Scenario:
    """The scenario that a whole-model row ran; :class:`NotPredicted` names a field that scenarios lack."""
    for field, value in inputs.items():
        # A degree or option that scenarios do not have yet would silently be left out of the prediction.
        if field not in Scenario.model_fields and field not in STEP_LABELS and value not in (None, False, 1):
            raise NotPredicted(f"{field} = {value!r} is not a field of scenarios yet")
    known = {k: v for k, v in inputs.items() if k in Scenario.model_fields and v is not None}
    if int(inputs.get("world", 1)) >= IN_SWITCH_FROM:
        known.setdefault("all_reduce", AllReduce.RING.value)  # our suite turns the addition in the switch off
    return Scenario.parse(known | {"ignore_memory": True}, where="record")


def _model_step(inputs: Inputs) -> Prediction:
    if inputs.get("fast_accumulation"):
        raise NotPredicted(FAST_ACCUMULATION)
    run = simulate(scenario_of(inputs), shortcuts=True)
    return Prediction(
        latency_s=run.latency_s,
        energy_j=run.energy_j,
        power_w=list(run.power_w_per_gpu),
        sm_clock_mhz=[f / 1e6 for f in run.sm_clock_hz_per_gpu],
    )


def _works(inputs: Inputs, *works: Work, in_graph: bool = False, gap: bool = False) -> Prediction:
    """Kernels back to back on ``world`` GPUs until the power cap has settled."""
    world = int(inputs["world"])
    target = machine_for(inputs, world, apart=not any(isinstance(work, CollectiveWork) for work in works))
    return seen(*run_works(target, works, in_graph=in_graph, gap=gap))


def _dit_step(inputs: Inputs) -> Prediction:
    """One denoising branch in a graph."""
    spec = load_dit(str(inputs["model"]))
    if inputs.get("text_tokens", spec.text_tokens) != spec.text_tokens:
        spec = replace(spec, text_tokens=int(inputs["text_tokens"]))
    ulysses = int(inputs.get("ulysses", 1))
    program = build_denoise(spec, tokens=int(inputs["tokens"]), layers=int(inputs["layers"]), ulysses=ulysses)
    target = machine_for(inputs, ulysses)
    return seen(*run_program(target, program, in_graph=True, gap_s=target.profile.launch.graph_gap_s))


def _decoder(inputs: Inputs) -> Prediction:
    """A VAE's decoder, whose kernels the host launches well ahead of the GPU."""
    spec, target = load_dit(str(inputs["model"])), machine_for(inputs, 1)
    program = build_decoder(spec, parse_video(str(inputs["video"])), videos=int(inputs["batch"]))
    return seen(*run_program(target, program, in_graph=True, gap_s=target.profile.launch.graph_gap_s))


def _ring_attention(inputs: Inputs) -> Prediction:
    """A ring launched kernel by kernel."""
    world = int(inputs["world"])
    attention = RingAttention(
        q_heads=int(inputs["q_heads"]),
        kv_heads=int(inputs["kv_heads"]),
        head_dim=int(inputs["head_dim"]),
        causal=bool(inputs.get("causal", True)),
    )
    program = build_ring(inputs["layout"], attention, ranks=world, seq_len=int(inputs["seq_len"]))
    target = machine_for(inputs, world)
    return seen(*run_program(target, program, in_graph=True, gap_s=target.profile.launch.eager_gap_s))


def _kernel(inputs: Inputs) -> Prediction:
    return _works(inputs, kernel_work(inputs))


def _part(inputs: Inputs, name: str) -> Work:
    """The kernel that the field ``name`` of a row describes."""
    row = inputs[name]
    if not isinstance(row, Mapping):
        raise NotPredicted(f"{name} = {shown(row)}: give the fields of a kernel's row")
    return kernel_work(checked({**row, "world": inputs["world"]}))


def _on_partition(inputs: Inputs) -> Prediction:
    return on_partition(inputs, _part(inputs, "kernel"))


def _side_by_side(inputs: Inputs) -> Prediction:
    return side_by_side(inputs, _part(inputs, "a"), _part(inputs, "b"))


def _in_context(inputs: Inputs) -> Prediction:
    m, n, k = inputs["gemm_mnk"]
    works: list[Work] = [GemmWork(m=m, n=n, k=k)]
    if inputs["collective"] != "none":
        works.append(
            CollectiveWork(
                op=CollectiveOp(inputs["collective"]),
                ranks=tuple(range(inputs["world"])),
                buffer_bytes=inputs["bytes"],
                ctas=inputs.get("ctas"),
            )
        )
    return _works(inputs, *works, in_graph=True, gap=len(works) > 1)


def _waiting(inputs: Inputs) -> Prediction:
    target = machine_for(inputs, int(inputs["world"]))
    seconds, power_w, clock_hz = beside_waiting(inputs, target)
    return Prediction(latency_s=seconds, energy_j=None, power_w=[power_w], sm_clock_mhz=[clock_hz / 1e6])


def _alone(inputs: Inputs) -> Prediction:
    if "op" in inputs:
        return _works(inputs, kernel_work(inputs))
    return _works(inputs, computation(inputs, str(inputs["what"])))


def _together(inputs: Inputs) -> Prediction:
    target = machine_for(inputs, int(inputs["world"]))
    seen = together(inputs, target)
    return Prediction(
        latency_s=seen.a_together_s, energy_j=None, power_w=None, sm_clock_mhz=None, beside_s=seen.b_together_s
    )


def _small_kernels(inputs: Inputs) -> Prediction:
    """A GEMM, RMSNorm or SiLU of a decode layer, or the chain of five, named by ``work``."""
    name = str(inputs["work"])
    sizes = re.fullmatch(r"(gemm|add_rms|silu)(\d+)x.*", name)
    m = int(inputs.get("m") or (sizes[2] if sizes else 64))  # records without m have 64 tokens
    rms = ElementwiseWork(op=Elementwise.ADD_RMSNORM, rows=m, width=4096, bytes_moved=4 * m * 4096 * 2)
    silu = ElementwiseWork(op=Elementwise.SILU_MUL, rows=m, width=14336, bytes_moved=3 * m * 14336 * 2)
    gemm = GemmWork(m=m, n=4096, k=4096)
    chains: dict[str, tuple[Work, ...]] = {"gemm": (gemm,), "add_rms": (rms,), "silu": (silu,)}
    if name.startswith("mix"):
        return _works(inputs, rms, gemm, silu, rms, gemm, gap=True)
    if sizes is None:
        raise NotPredicted(f"work = {name!r}: a small_kernels row's work begins with gemm, add_rms, silu or mix")
    return _works(inputs, *chains[sizes[1]])


def _duty(inputs: Inputs) -> Prediction:
    return Prediction(**predict_time.duty(inputs))


def _transient(inputs: Inputs) -> Prediction:
    return Prediction(**predict_time.transient(inputs))


def _engine_kernel(inputs: Inputs) -> Prediction:
    """A lone kernel of an engine in a graph's loop."""
    work = engine_kernel(inputs)
    if work is None:
        raise NotPredicted("a chain of an engine's kernels: its parts are rows of their own")
    return _works(inputs, *before(inputs), work)


def served_spec(inputs: Inputs) -> ServeSpec:
    """The server of a row of requests."""
    return ServeSpec.of(
        host="stack", prefix_caching=False,
        **{name: inputs[name] for name in SERVED & inputs.keys() if inputs[name] is not None},
    )  # fmt: skip


def _engine_serve(inputs: Inputs) -> Prediction:
    """A server under the row's own arrivals; its time is the median request's between tokens."""
    spec = served_spec(inputs)
    rows = inputs["requests"]
    adapters = inputs.get("adapters") or [-1] * len(rows)
    numbers = range(-1, spec.lora_adapters)
    if not isinstance(adapters, list) or len(adapters) != len(rows) or any(one not in numbers for one in adapters):
        raise NotPredicted(f"adapters = {shown(adapters)}: give the number of each request's, -1 for none")
    traffic = Traffic(
        requests=[
            Request(
                number=number,
                arrival_s=float(at),
                input_tokens=int(asked),
                output_tokens=int(wanted),
                adapter=adapters[number],
            )
            for number, (at, asked, wanted) in enumerate(rows)
        ]
    )
    run = serve(spec, traffic=traffic)
    table = run.requests
    served = served_latencies({name: table[name].tolist() for name in ("ttft_s", "e2e_s")}, rows)
    return Prediction(
        latency_s=served["itl_p50_s"],
        energy_j=run.energy_j,
        power_w=[run.summary["power_w_per_gpu"]] * spec.gpus,
        sm_clock_mhz=None,
        served=served,
    )


# Fields of a served row that its server has.
SERVED = frozenset(
    {
        "gpu", "model", "layers", "tp", "ep", "ep_mode", "dcp", "pp", "dtype", "stack", "captured_tokens",
        "chip_temperature_c", *SPECULATION_FIELDS, *LORA_FIELDS, "max_loras",
    }
)  # fmt: skip


PREDICTORS: Mapping[str, Callable[[Inputs], Prediction]] = (
    {
        "model_step": _model_step,
        "generate": _model_step,
        "gemm": _kernel,
        "attention": _kernel,
        "grouped_gemm": _kernel,
        "collective": _kernel,
        "partition": _on_partition,
        "partitions": _side_by_side,
        "in_context": _in_context,
        "waiting": _waiting,
        "duty": _duty,
        "transient": _transient,
        "alone": _alone,
        "together": _together,
        "small_kernels": _small_kernels,
        "dit_step": _dit_step,
        "diffusers_decode": _decoder,
        "ring_attention": _ring_attention,
        "engine_serve": _engine_serve,
    }
    | {op.value: _kernel for op in Elementwise}
    | dict.fromkeys(ENGINE_KINDS, _engine_kernel)
)

SKIPPED = {
    "host": "describes the machine, measures nothing",
    "idle": "an input of the fit: idle power is a coefficient",
    "start": "says how the engine of the rows after it was started",
    "profile": "a profiler trace was taken: no time of its own",
    "link_power": "says what awake links draw: docs/records.md",
    "at_clock": "an input of the fit: what of a kernel's time follows the SM clock",
    "partitions_hot": "one side reads from L2, which the simulator never does: docs/records.md",
    "diffusers_step": "a few layers of a model: held against the stack in tests/test_dit_stack.py",
    "diffusers_text": "a text encoder alone: held against the stack in tests/test_decoder.py",
    "diffusers_blend": "an input of the decoder's tiles: the host's pace",
    "vllm_host": "an input of stack vllm: the host's pace",
    "vllm_host_step": "an input of stack vllm: what a step takes the host beside its layers",
    "vllm_stage": "an input of stack vllm: the host's pace in a pipeline",
    "vllm_wait": "an input of stack vllm: the GPU's wait for a host whose step shares out caches",
    "vllm_slot": "an input of servers with adapters: the host's copies of one into its slot",
    "vllm_adapter_file": "how long vLLM reads an adapter from its file, which no simulated server does",
    "uneven_attention": "of a kernel that no stack runs: held against its law in tests/test_serving_uneven.py",
} | dict.fromkeys(
    ("clusters", "beside_parked", "starts", "gemm_after", "gemm_beside", "gemm_running"),
    "says where blocks land: held against the engine in tests/test_placement.py",
)
