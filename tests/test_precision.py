"""Runs in any precision: bytes by hand, operands, and kernels that read what is stored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import Scenario
from sim.scenario.memory import memory_use
from sim.scenario.resolved import resolve_scenario
from tests.transformer_kit import build, kernels, names
from workloads import Options, WorkloadError
from workloads.precision import Precision, Product, plain, resolve
from workloads.storage import ALIASES, BITS, storage
from workloads.work import AttentionWork, CollectiveWork, DType, GemmWork, GroupedGemmWork

ROWS, DEPTH = 14336, 4096  # of one matrix
ALL = ROWS * DEPTH


# -- storage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "matrix_bytes"),
    [
        ("bf16", 2 * ALL),
        ("fp32", 4 * ALL),
        ("fp8_e4m3", ALL),  # one scale a tensor is an argument of the kernel
        ("fp8_e4m3_channel", ALL + ROWS * 4),
        ("fp8_e4m3_block128", ALL + 112 * 32 * 4),
        ("fp8_e4m3_g128", ALL + ROWS * 32 * 4),
        ("fp8_e4m3_g32", ALL + ALL // 32),  # MXFP8: powers of two
        ("int8_channel", ALL + ROWS * 4),
        ("int4_g128", ALL // 2 + ROWS * 32 * 2),
        ("int4_g128_zero", ALL // 2 + ROWS * 32 * 5 // 2),
        ("int4_g32", ALL // 2 + ROWS * 128 * 2),
        ("int3_g128", ALL * 3 // 8 + ROWS * 32 * 2),
        ("nvfp4", ALL // 2 + ALL // 16),
        ("mxfp4", ALL // 2 + ALL // 32),
        ("nf4_g64", ALL // 2 + ALL // 64 * 4),
        ("nf4_g64_double", ALL // 2 + ALL // 64 + ALL // 64 // 64),
    ],
)
def test_bytes_of_a_matrix_with_its_scales_and_zero_points(name: str, matrix_bytes: int) -> None:
    assert storage(name).bytes_of(ROWS, DEPTH) == matrix_bytes
    assert str(storage(name)) == name


@given(
    st.sampled_from(sorted(BITS)), st.integers(1, 300), st.integers(1, 300), st.sampled_from(["", "_channel", "_g32"])
)
def test_a_matrix_takes_its_elements_and_no_more_than_a_scale_for_each(
    element: str, rows: int, depth: int, layout: str
) -> None:
    kept = storage("nvfp4" if element == "fp4_e2m1" else element if storage(element).plain else element + layout)
    found = kept.bytes_of(rows, depth)
    assert rows * depth * kept.bits / 8 <= found <= rows * depth * (kept.bits + 32) / 8 + 1
    assert storage(str(kept)) == kept


def test_every_alias_is_a_name_and_what_is_none_is_refused_by_name() -> None:
    assert all(str(storage(alias)) == str(storage(name)) for alias, name in ALIASES.items())
    for name in ("int9", "fp8_g0", "bf16_g128", "int4_block", "nvfp4_zero", "x" * 500, ""):
        with pytest.raises(WorkloadError, match="is no known format: give one like bf16, fp8_e4m3"):
            storage(name)


# -- operands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "activations", "multiplied", "added"),
    [
        ("awq", "bf16", "bf16", "fp32"),
        ("nvfp4", "fp16", "fp16", "fp32"),
        ("fp8_e4m3", "bf16", "bf16", "fp32"),
        ("fp8_block128", "fp8_e4m3_g128", "fp8_e4m3", "fp32"),
        ("int4", "fp8", "fp8_e4m3", "fp32"),
        ("int8_channel", "int8_token", "int8", "int32"),
        ("nvfp4", "nvfp4", "fp4_e2m1", "fp32"),
    ],
)
def test_activations_decide_what_tensor_cores_multiply(
    weights: str, activations: str, multiplied: str, added: str
) -> None:
    product = Product(weights=storage(weights), activations=storage(activations))
    assert (product.multiplies.value, product.accumulates) == (multiplied, added)
    assert product.stored == storage(weights)


@pytest.mark.parametrize(
    ("weights", "activations"), [("bf16", "fp8"), ("fp8", "int8"), ("int8", "fp8"), ("nf4", "int8")]
)
def test_pairs_that_no_kernel_multiplies_are_refused(weights: str, activations: str) -> None:
    with pytest.raises(WorkloadError, match=r"^weight_dtype = '.*: no kernel multiplies these"):
        Product(weights=storage(weights), activations=storage(activations))


def test_a_run_takes_the_checkpoints_types_unless_it_says_otherwise() -> None:
    kept = Precision(product=Product(weights=storage("nvfp4"), activations=storage("nvfp4")), kv=DType.FP8, method="x")
    hopper, blackwell = frozenset({"bf16", "fp8_e4m3"}), frozenset({"bf16", "fp4_e2m1"})
    assert resolve(kept, multiplied=hopper).words() == "nvfp4 weights, bf16 activations, fp8_e4m3 KV cache"
    assert resolve(kept, multiplied=blackwell).product == kept.product
    assert resolve(kept, dtype=DType.FP8).words() == "nvfp4 weights, fp8_e4m3 activations, fp8_e4m3 KV cache"
    assert resolve(kept, weights=storage("bf16"), kv=DType.BF16) == plain(DType.BF16)
    assert resolve(None, weights=storage("fp8"), dtype=DType.FP8) == plain(DType.FP8)
    assert resolve(None, kv=DType.INT8).words() == "bf16, int8 KV cache"
    for told in ({"dtype": DType.FP32}, {"dtype": DType.FP32, "weights": storage("int4")}, {"kv": DType.FP32},
                 {"weights": storage("fp32")}):  # fmt: skip
        with pytest.raises(WorkloadError, match=r"dtype = '"):
            resolve(kept, **told)


# -- kernels ----------------------------------------------------------------------------------------------------


def test_weights_of_four_bits_are_read_as_such_and_multiplied_in_sixteen() -> None:
    stored = resolve(None, weights=storage("int4_g128"))
    wide, narrow = (build("llama3-8b", "decode", batch=4, precision=one) for one in (plain(DType.BF16), stored))
    assert names(wide) == names(narrow)  # nothing is quantised on the way
    for before, after in zip(kernels(wide), kernels(narrow), strict=True):
        assert before.flops == after.flops
        if isinstance(after.work, GemmWork):
            matrix = after.work.n * after.work.k
            assert after.work.dtype is DType.BF16
            assert before.bytes_moved - after.bytes_moved == matrix * 2 - (matrix // 2 + matrix // 128 * 2)


def test_experts_in_fp8_quantise_tokens_once_and_send_them_in_eight_bit() -> None:
    stored = resolve(None, dtype=DType.FP8, weights=storage("fp8_block128"))
    told: dict[str, Any] = {"ep": 8, "ep_mode": "all_to_all", "batch": 16}
    wide, narrow = (build("qwen3-30b-a3b", "decode", precision=one, **told) for one in (plain(DType.BF16), stored))
    before, after = ({k.name: k for k in kernels(program)} for program in (wide, narrow))
    assert sorted(set(after) - set(before)) == [
        "cast_down_grouped", "cast_gate_up_grouped", "cast_o_gemm", "cast_qkv_gemm",
    ]  # fmt: skip
    assert after["gather"].bytes_moved * 4096 == before["gather"].bytes_moved * (2048 + 2048 // 128 * 4)
    away, back = (after[f"all_to_all_{name}"].work for name in ("dispatch", "combine"))
    assert isinstance(away, CollectiveWork)
    assert isinstance(back, CollectiveWork)
    assert away.buffer_bytes * 4096 == back.buffer_bytes * (2048 + 2048 // 128 * 4)
    grouped = after["gate_up_grouped"].work
    assert isinstance(grouped, GroupedGemmWork)
    assert (grouped.dtype, grouped.weights) == (DType.FP8, storage("fp8_block128"))
    assert isinstance(after["router_gemm"].work, GemmWork)
    assert after["router_gemm"].work.dtype is DType.BF16


def test_a_cache_of_eight_bits_is_read_written_and_held_as_such() -> None:
    wide, narrow = (build("llama3-8b", "decode", batch=4, precision=resolve(None, kv=kv)) for kv in (None, DType.FP8))
    before, after = ({k.name: k for k in kernels(program)} for program in (wide, narrow))
    cached = 4 * 1024 * 2 * 8 * 128
    assert before["attention"].bytes_moved - after["attention"].bytes_moved == cached
    assert after["copy_k"].bytes_moved == 0.75 * before["copy_k"].bytes_moved
    latent = build("deepseek-v3", "decode", batch=4, precision=resolve(None, kv=DType.FP8), tp=8)
    work = next(k.work for k in kernels(latent) if isinstance(k.work, AttentionWork))
    assert work.kv_dtype is DType.FP8
    need = [
        memory_use(resolve_scenario(Scenario.of(model="llama3-8b", phase="decode", kv_dtype=kv))).need
        for kv in (None, "fp8")
    ]
    assert need[0].kv_bytes == 2 * need[1].kv_bytes
    assert need[0].weight_bytes == need[1].weight_bytes


def test_a_stack_that_multiplies_in_sixteen_bits_refuses_others() -> None:
    eight = resolve(None, dtype=DType.INT8)
    with pytest.raises(WorkloadError, match=r"^dtype = 'int8': sequence_parallel layers have 16-bit kernels only"):
        build("llama3-8b", tp=2, sequence_parallel=True, precision=eight)
    with pytest.raises(WorkloadError, match=r"^dtype = 'int8': stack 'eager-torch' is known with bf16 and fp32 only"):
        build("llama3-8b", stack="eager-torch", precision=eight)
    pieces = build(
        "llama3-8b", tp=2, sequence_parallel=True, overlap_chunks=2, precision=resolve(None, weights=storage("awq"))
    )
    assert {str(k.work.weights) for k in kernels(pieces) if isinstance(k.work, GemmWork)} == {"int4_g128_zero"}
    assert Options().precision is None
