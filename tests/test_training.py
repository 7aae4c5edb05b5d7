"""Training steps: work of the gradients, what travels, the optimiser, memory, rings compared, and public rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from sim import simulate
from sim.cli import main
from sim.errors import ScenarioError
from workloads import (
    Layout,
    MemoryLoad,
    Options,
    Program,
    WorkloadError,
    build_training,
    load_model,
    params,
    training_need,
)
from workloads.kernel_names import CollectiveOp
from workloads.program import Kernel
from workloads.work import AttentionWork, CollectiveWork, ElementwiseWork, GemmWork, GroupedGemmWork

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(dp=2),
    Layout(cp=2),
    *(Layout(cp=2, tp=2, cp_mode=mode) for mode in ("ring", "striped", "zigzag")),
]


def kernels(program: Program, phase: str, rank: int | None = None) -> Iterator[Kernel]:
    ranks = program.ranks if rank is None else (program.ranks[rank],)
    for one in ranks:
        for part in one.phases:
            if part.name == phase:
                for segment in part.segments:
                    for _ in range(segment.repeat):
                        yield from segment.kernels


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_cost_two_forward_products_and_two_and_a_half_attentions(layout: Layout) -> None:
    program = build_training(load_model("llama-1b"), layout, batch=2, seq_len=1024, options=Options(layers=3))

    def of(phase: str, kind: type) -> float:
        return sum(k.flops for k in kernels(program, phase) if isinstance(k.work, kind))

    assert of("backward", GemmWork) == pytest.approx(2 * of("forward", GemmWork), rel=1e-12)
    assert of("backward", AttentionWork) == pytest.approx(2.5 * of("forward", AttentionWork), rel=1e-12)


def test_six_flops_a_weight_and_token() -> None:
    """Products of a step: 6 N T (arXiv 2001.08361), N without the embedding."""
    model = load_model("llama-7b")
    program = build_training(model, Layout(), batch=1, seq_len=512)
    products = sum(
        k.flops for phase in ("forward", "backward") for k in kernels(program, phase) if isinstance(k.work, GemmWork)
    )
    assert products == pytest.approx(6 * 512 * (params(model) - model.vocab * model.d_model), rel=1e-3)
    assert params(model) == pytest.approx(6.74e9, rel=1e-3)  # Llama 7B, arXiv 2302.13971: 6.7B


def test_every_weight_is_summed_once() -> None:
    """Over the ranks that hold it: replicas and context slices, not members of a tensor group."""
    model = load_model("llama-1b")
    program = build_training(model, Layout(tp=2, cp=2, dp=2, cp_mode="zigzag"), batch=2, seq_len=1024)
    sums = [k.work for k in kernels(program, "backward", rank=3) if k.name == "all_reduce_weight_grad"]
    assert all(isinstance(work, CollectiveWork) and work.ranks == (1, 3, 5, 7) for work in sums)
    weights = sum(work.buffer_bytes / 2 for work in sums if isinstance(work, CollectiveWork))
    assert weights == pytest.approx((params(model) - model.vocab * model.d_model) / 2, rel=1e-3)


def test_gradients_of_keys_come_home_before_they_are_used() -> None:
    program = build_training(
        load_model("llama-1b"), Layout(cp=2, cp_mode="striped"), batch=1, seq_len=1024, options=Options(lm_head=False)
    )
    layer = program.ranks[1].phases[1].segments[0].kernels
    sends = [i for i, kernel in enumerate(layer) if kernel.name == "send_kv_grad"]
    assert [[layer[before].name for before in layer[i].after] for i in sends] == [["attention_grad"], ["merge_out"]]
    assert [kernel.after for kernel in layer if kernel.name == "rope_grad"] == [(sends[-1],)]
    sent = [k.work.op for k in layer if isinstance(k.work, CollectiveWork)]
    assert sent.count(CollectiveOp.SEND_RECV) == 3  # keys once, gradients twice


def test_balanced_rings_train_faster() -> None:
    """The claim of arXiv 2311.09431 inside a whole step."""
    runs = {
        mode: simulate(
            model="llama-1b",
            phase="train",
            cp=4,
            cp_mode=mode,
            seq_len=65_536,
            layers=2,
            lm_head=False,
            optimizer="none",
        )
        for mode in ("ring", "striped", "zigzag")
    }
    assert 1.3 < runs["ring"].latency_s / runs["striped"].latency_s < 1.6
    assert runs["zigzag"].latency_s < 1.02 * runs["striped"].latency_s
    power = runs["ring"].power_w_per_gpu
    assert power[0] < 0.7 * power[3]
    joules = {name: energy for name, (energy, _) in runs["striped"].sums_by("phase").items()}
    assert {"forward", "backward"} <= set(joules)
    assert 2.0 < joules["backward"] / joules["forward"] < 2.6


def test_memory_of_a_step() -> None:
    bare = Options(optimizer="none")
    model = load_model("llama-7b")
    need = training_need(model, Layout(), MemoryLoad(batch=1, context=2048, layers=32, lm_head=True), bare)
    assert str(need) == "weights 13.5 + gradients 13.5 + activations 8.8 = 35.7 GB a GPU"
    split = training_need(
        model, Layout(cp=2, cp_mode="ring"), MemoryLoad(batch=1, context=4096, layers=32, lm_head=True), bare
    )
    assert split == need


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "state"),
    [("ddp", 1, 1, 1), ("zero1", 1, 1, 8), ("zero2", 1, 8, 8), ("zero3", 8, 8, 8)],
)
def test_what_replicas_share_out(sharding: Any, weights: int, gradients: int, state: int) -> None:
    """arXiv 1910.02054, figure 1: 2 + 2 + 12 bytes a parameter, each over the replicas from its stage on."""
    model = load_model("llama-7b")
    need = training_need(
        model, Layout(dp=8), MemoryLoad(batch=8, context=128, layers=32, lm_head=True), Options(sharding=sharding)
    )
    whole = 2.0 * (params(model) - 65 * 4096)  # norms are not counted
    gathered = 2 * whole / 32 if weights > 1 else 0.0
    assert need.weight_bytes == pytest.approx(whole / weights + gathered, rel=1e-6)
    assert need.gradient_bytes == pytest.approx(whole / gradients, rel=1e-6)
    assert need.state_bytes == pytest.approx(6 * whole / state, rel=1e-6)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3"])
def test_what_travels_and_what_is_stepped(sharding: Any) -> None:
    """An all-reduce of gradients is a scatter and a gather: ZeRO-1 and 2 send as much, ZeRO-3 half as much again."""
    model = load_model("llama-1b")
    layers = params(model) - 2 * model.vocab * model.d_model - 65 * model.d_model  # without embeddings and norms
    options = Options(sharding=sharding, lm_head=False)
    program = build_training(model, Layout(dp=4), batch=4, seq_len=256, options=options)
    moved: dict[str, float] = {}
    stepped = 0
    for phase in ("forward", "backward", "optimizer"):
        for one in kernels(program, phase, rank=0):
            if isinstance(one.work, CollectiveWork):
                moved[one.work.op.value] = moved.get(one.work.op.value, 0.0) + one.work.buffer_bytes / 2 / layers
            if one.name == "adamw":
                assert isinstance(one.work, ElementwiseWork)
                stepped += one.work.bytes_moved
    extra = 1 + 1 / model.layers  # the first layer's weights are gathered before it
    right = {
        "ddp": {"all_reduce": 1.0},
        "zero1": {"reduce_scatter": 1.0, "all_gather": 1.0},
        "zero2": {"reduce_scatter": 1.0, "all_gather": 1.0},
        "zero3": {"reduce_scatter": 1.0, "all_gather": 2 * extra},
    }[sharding]
    assert moved == pytest.approx(right, rel=1e-3)
    assert stepped == pytest.approx(28 * layers / (1 if sharding == "ddp" else 4), rel=1e-3)


def test_parts_of_a_batch_add_up_their_gradients_and_are_summed_once() -> None:
    model, layout = load_model("llama-1b"), Layout(dp=2)
    whole = build_training(model, layout, batch=8, seq_len=256, options=Options(layers=2))
    parts = build_training(model, layout, batch=8, seq_len=256, options=Options(layers=2, accumulate=4))
    assert [phase.name for phase in parts.ranks[0].phases] == ["forward", "backward"] * 4 + ["optimizer"]

    def of(program: Program, phase: str, name: str) -> list[Kernel]:
        return [k for k in kernels(program, phase, rank=0) if k.name.endswith(name)]

    for phase in ("forward", "backward"):
        products = [sum(k.flops for k in kernels(one, phase) if isinstance(k.work, GemmWork)) for one in (whole, parts)]
        assert products[0] == pytest.approx(products[1], rel=1e-12)
    assert len(of(parts, "backward", "weight_grad")) > len(of(whole, "backward", "weight_grad"))
    sums = [
        [k for k in of(one, "backward", "weight_grad") if isinstance(k.work, CollectiveWork)] for one in (whole, parts)
    ]
    assert len(sums[0]) == len(sums[1]) == 2 * 2 + 1


def test_stages_hand_activations_on_and_gradients_back() -> None:
    program = build_training(load_model("llama-1b"), Layout(pp=2, micro_batches=2), batch=2, seq_len=256)
    names = [[one.name for one in phase.segments] for phase in program.ranks[0].phases]
    assert names[0] == ["micro-batch 0 layer", "send 0", "micro-batch 1 layer", "send 1"]
    assert names[1] == ["send 1 gradients", "micro-batch 1 layer backward", "send 0 gradients",
                        "micro-batch 0 layer backward"]  # fmt: skip
    last = [one.name for one in program.ranks[1].phases[0].segments]
    assert last == ["receive 0", "micro-batch 0 layer", "lm_head", "receive 1", "micro-batch 1 layer", "lm_head"]
    back = next(k for k in kernels(program, "backward", rank=0) if k.name == "send_grad")
    assert isinstance(back.work, CollectiveWork) and back.work.ranks == (1, 0)
    whole = build_training(load_model("llama-1b"), Layout(), batch=2, seq_len=256)
    for phase in ("forward", "backward"):
        products = [
            sum(k.flops for k in kernels(one, phase) if isinstance(k.work, GemmWork)) for one in (whole, program)
        ]
        assert products[0] == pytest.approx(products[1], rel=1e-12)
    run = simulate(model="llama-1b", phase="train", pp=2, micro_batches=2, batch=2, seq_len=256, sharding="zero1")
    assert run.standing.status == "unchecked"
    assert run.standing.notes == (
        "no kernel of gradients was measured: they run as today's forward kernels do, steps of 2023 took 1.3 to 2.3 "
        "times as long",
    )


def test_experts_train_and_are_summed_over_those_who_hold_them() -> None:
    model = load_model("mixtral-8x7b")
    layout = Layout(ep=4, ep_mode="all_to_all", dp=2)
    program = build_training(model, layout, batch=2, seq_len=512, options=Options(layers=2))
    sums = {k.work.ranks: k.work.buffer_bytes for k in kernels(program, "backward", rank=1)
            if isinstance(k.work, CollectiveWork) and k.name.endswith("weight_grad")}  # fmt: skip
    assert set(sums) == {(1, 5), tuple(range(8))}  # experts: the same member of each replica; all else: everyone
    grouped = {phase: sum(k.flops for k in kernels(program, phase) if isinstance(k.work, GroupedGemmWork))
               for phase in ("forward", "backward")}  # fmt: skip
    assert grouped["backward"] == pytest.approx(2 * grouped["forward"], rel=1e-12)
    # In slices (ZeRO-3) every weight is gathered from those who hold the same one: in both passes, the head's once.
    options = Options(layers=2, sharding="zero3")
    sliced = build_training(model, layout, batch=2, seq_len=512, options=options)
    gathers = [(k.name, k.work.ranks) for phase in ("forward", "backward") for k in kernels(sliced, phase, rank=1)
               if isinstance(k.work, CollectiveWork) and k.work.op is CollectiveOp.ALL_GATHER]  # fmt: skip
    assert set(gathers) == {("all_gather_weights", tuple(range(8))), ("all_gather_weights_experts", (1, 5)),
                            ("all_gather_weights_head", tuple(range(8)))}  # fmt: skip
    assert [sum(name == one for name, _ in gathers) for one in ("all_gather_weights", "all_gather_weights_experts",
                                                               "all_gather_weights_head")] == [6, 6, 1]  # fmt: skip
    run = simulate(model="mixtral-8x7b", phase="train", ep=4, ep_mode="all_to_all", seq_len=512, layers=2,
                   ignore_memory=True)  # fmt: skip
    assert run.standing.status == "unchecked"


def test_kernels_of_gradients_move_what_they_read_and_write() -> None:
    """Of a gated product: two inputs and the output's gradient in, two gradients out, where the forward moved three."""
    program = build_training(load_model("llama-1b"), Layout(), batch=1, seq_len=256, options=Options(layers=1))
    (ahead,) = (k for k in kernels(program, "forward") if k.name == "silu_mul")
    (back,) = (k for k in kernels(program, "backward") if k.name == "silu_mul_grad")
    assert (ahead.bytes_moved, back.bytes_moved) == (2 * 256 * 5504 * 3, 2 * 256 * 5504 * 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "deepseek-v3"}, "phase = 'train': deepseek-v3 has other layers than attention, feed-forwards"),
        ({"pp": 2, "cp": 2}, "phase = 'train': pp with cp is not known: use one of them"),
        (
            {"dtype": "fp8_e4m3"},
            "kernels of gradients are bf16 ones of stack 'reference-torch' or 'llm-foundry': use these",
        ),
        ({"tp": 2, "overlap_chunks": 4}, "no overlap of tensor-parallel sums is known: leave overlap out"),
        ({"accumulate": 3, "batch": 4}, "accumulate = 3 does not divide batch = 4"),
        ({"phase": "prefill", "sharding": "zero3"}, "sharding = 'zero3' is for phase 'train', not 'prefill'"),
    ],
)
def test_steps_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, WorkloadError), match=re.escape(message)):
        simulate(**{"model": "llama-7b", "phase": "train", "ignore_memory": True, **fields})


def test_what_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", "--model", "llama-7b", "--phase", "train", "--seq-len", "32768"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "llama-7b does not fit on h100-sxm-80gb: weights 13.5 + gradients 13.5 + optimizer 80.9 + " in error
