"""Training steps without an optimiser: work of the gradients, what travels, memory, and rings compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from sim import simulate
from sim.cli import main
from sim.errors import ScenarioError
from workloads import Layout, Options, Program, WorkloadError, build_training, load_model, params, training_need
from workloads.program import Kernel
from workloads.work import AttentionWork, CollectiveOp, CollectiveWork, GemmWork

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


def flops(program: Program, phase: str) -> float:
    return sum(k.flops for k in kernels(program, phase) if isinstance(k.work, GemmWork | AttentionWork))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_cost_two_forward_passes(layout: Layout) -> None:
    program = build_training(load_model("llama-1b"), layout, batch=2, seq_len=1024, options=Options(layers=3))
    assert flops(program, "backward") == pytest.approx(2 * flops(program, "forward"), rel=1e-12)


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
    assert [[layer[before].name for before in layer[i].after] for i in sends] == [["attention_kv_grad"], ["merge_out"]]
    assert [kernel.after for kernel in layer if kernel.name == "rope_grad"] == [(sends[-1],)]
    sent = [k.work.op for k in layer if isinstance(k.work, CollectiveWork)]
    assert sent.count(CollectiveOp.SEND_RECV) == 3  # keys once, gradients twice


def test_balanced_rings_train_faster() -> None:
    """The claim of arXiv 2311.09431 inside a whole step."""
    runs = {
        mode: simulate(model="llama-1b", phase="train", cp=4, cp_mode=mode, seq_len=65_536, layers=2, lm_head=False)
        for mode in ("ring", "striped", "zigzag")
    }
    assert 1.3 < runs["ring"].latency_s / runs["striped"].latency_s < 1.6
    assert runs["zigzag"].latency_s < 1.02 * runs["striped"].latency_s
    power = runs["ring"].power_w_per_gpu
    assert power[0] < 0.7 * power[3]
    joules = {name: energy for name, (energy, _) in runs["striped"].sums_by("phase").items()}
    assert {"forward", "backward"} <= set(joules)
    assert 1.8 < joules["backward"] / joules["forward"] < 2.4


def test_memory_of_a_step() -> None:
    need = training_need(load_model("llama-7b"), Layout(), batch=1, seq_len=2048, layers=32, lm_head=True)
    assert str(need) == "weights 13.5 + gradients 13.5 + activations 8.8 = 35.7 GB a GPU"
    split = training_need(
        load_model("llama-7b"), Layout(cp=2, cp_mode="ring"), batch=1, seq_len=4096, layers=32, lm_head=True
    )
    assert split == need


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "mixtral-8x7b"}, "phase = 'train': mixtral-8x7b is no dense decoder: give one, like llama-7b"),
        ({"pp": 2}, "phase = 'train' is known with tp, cp and dp: leave pp, ep and sequence_parallel out"),
        ({"dtype": "fp8_e4m3"}, "kernels of gradients are bf16 ones of stack 'reference-torch': use these"),
        ({"tp": 2, "overlap_chunks": 4}, "no overlap of tensor-parallel sums is known: leave overlap out"),
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
    assert "llama-7b does not fit on h100-sxm-80gb: weights 13.5 + gradients 13.5 + activations 140.1 = 167.0" in error
