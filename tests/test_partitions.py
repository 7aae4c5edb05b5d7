"""Green contexts: what the suite plans, and what its records say of a GPU's partitions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hardware.calibrate.suite.partitions import BESIDE, SIZES, SPLITS, alone_rows, beside_rows, comm_rows
from hardware.calibrate.suite.run import share_of
from hardware.calibrate.suite.worker import nvml_index
from hardware.catalog import load_gpu
from hardware.laws.gemm_grid import on_partition, rounds_on
from hardware.laws.streaming import few_sms, on_few_sms
from hardware.laws.terms import KernelTerms, time_s
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass
from sim.engine.running import GpuModel
from sim.validation.validate import Row, validate

RECORDS = Path(__file__).parents[1] / "records"
FEW_SMS = "h200-sxm-141gb/partitions/few_sms.jsonl"
ONE_GPU = [f"{gpu}/partitions/one_gpu.jsonl" for gpu in ("h100-sxm-80gb", "h200-sxm-141gb")]


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / path).read_text("utf-8").splitlines()]


@lru_cache
def predicted(path: str) -> tuple[Row, ...]:
    return tuple(validate([RECORDS / path]))


def of_kind(path: str, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows_of(path) if row["kind"] == kind]


def test_shares_of_the_rows_are_all_of_them_once() -> None:
    for rows, count in ((alone_rows, 9 * (1 + len(SIZES))), (beside_rows, len(BESIDE) * (1 + len(SPLITS)))):
        dealt = [json.dumps(row) for share in range(4) for row in rows(share, 4)]
        assert len(dealt) == len(set(dealt)) == count
        assert sorted(dealt) == sorted(json.dumps(row) for row in rows(0, 1))


def test_a_collective_gets_a_partition_that_holds_its_blocks() -> None:
    beside = [row for row in comm_rows() if row["kind"] == "partitions"]
    assert all(row["asked_b_sms"] is None or row["asked_b_sms"] >= row["b"]["ctas"] for row in beside)


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/2", "1/0"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="give i/n"):
        share_of(text)


def test_nvml_counts_all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [nvml_index(0), nvml_index(1)] == [2, 3]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert nvml_index(1) == 1


@pytest.mark.parametrize("path", ONE_GPU)
def test_kernels_of_a_green_context_ran_on_its_sms_alone(path: str) -> None:
    rows = of_kind(path, "partition")
    assert len(rows) == 90
    assert all(row["sms_seen"] == row["sms"] for row in rows)
    assert {row["sms"] % 8 for row in rows if row["asked_sms"] is not None} == {0}


@pytest.mark.parametrize("path", ONE_GPU)
def test_sides_of_a_split_are_the_whole_card(path: str) -> None:
    for row in of_kind(path, "partitions"):
        assert row["a_sms"] + row["b_sms"] == (264 if row["asked_b_sms"] is None else 132)


@pytest.mark.parametrize("path", ONE_GPU)
def test_a_prompt_scales_with_its_sms_until_the_cap(path: str) -> None:
    times = {
        row["sms"]: row["latency_s"] for row in of_kind(path, "partition") if row["kernel"].get("phase") == "prefill"
    }
    # 1980 MHz up to 64 SMs: time goes with the inverse of the SMs, to the waves of 128-row tiles.
    assert [times[8] / times[sms] for sms in (16, 32, 64)] == pytest.approx([2, 4, 8], rel=0.1)


def test_a_product_on_few_sms_waits_for_a_memory_that_others_fill_and_not_for_l2() -> None:
    """As docs/records.md says: the slower, the more the copy beside it moves through HBM; hardly beside one in L2."""
    path = "h200-sxm-141gb/partitions/beside_memory.jsonl"
    product = {"kind": "gemm", "world": 1, "m": 4096, "n": 6144, "k": 4096, "dtype": "bf16"}
    slower = {
        (row["kind"], row["b"]["bytes_moved"], row["b_sms"]): max(row["a_together_s"]) / row["a_alone_s"]
        for row in rows_of(path)
        if row["a"] == product and row["b"]["kind"] == "copy"
    }
    cold = [slower["partitions", 512 << 20, sms] for sms in (16, 32, 48, 64, 80, 96, 112)]
    assert cold == sorted(cold) and cold == pytest.approx([1.11, 1.20, 1.28, 1.39, 1.48, 1.61, 1.84], abs=0.01)
    assert slower["partitions_hot", 16 << 20, 96] == pytest.approx(1.03, abs=0.01)


def test_kernels_on_partitions_are_as_measured() -> None:
    """Bounds of rows that were all in view while the facts of few SMs were chosen (hardware/data/few_sms.toml)."""
    rows = predicted(ONE_GPU[0])
    alone = [row for row in rows if row.record.kind == "partition" and row.record.inputs["kernel"]["kind"] == "gemm"]
    assert len(alone) == 50
    errors = [abs(error) for row in alone if (error := row.error("latency_s")) is not None]
    assert sum(errors) / len(errors) < 0.035
    beside = [row for row in rows if row.record.kind == "partitions" and _products(row.record.inputs)]
    both = [row.error(name) for row in beside for name in ("latency_s", "beside_s")]
    assert len(both) == 10 and max(abs(error) for error in both if error is not None) < 0.06
    # Whatever runs side by side, on partitions or not.
    _are_within(rows, latency=0.065, beside=0.08, worst=0.25)


def test_a_product_waits_for_the_memory_that_a_copy_fills() -> None:
    """The rows that show why, and those of another machine; all were seen while the wait was fitted."""
    _are_within(predicted("h200-sxm-141gb/partitions/beside_memory.jsonl"), 0.08, 0.05, worst=0.25)
    _are_within(predicted(ONE_GPU[1]), 0.06, 0.08, worst=0.25)


def test_kernels_on_partitions_that_no_law_has_seen() -> None:
    """Other kernels, sizes and splits, measured on two other H200s: bars 5 % of time and 6 of power, 8 side by side.

    No coefficient was fitted on them, but what they missed said where to look for causes.
    """
    folder = "h200-sxm-141gb/partitions"
    alone = predicted(f"{folder}/unseen_alone.jsonl")
    assert len(alone) == 80 and {row.record.inputs["asked_sms"] for row in alone}.isdisjoint(SIZES)
    assert _mean_error(alone, "latency_s") < 0.036 and _mean_error(alone, "energy_j") < 0.05
    _are_within(predicted(f"{folder}/unseen_beside.jsonl"), 0.074, 0.08, worst=0.55)
    _are_within(predicted(f"{folder}/unseen_comm.jsonl"), 0.027, 0.045, worst=0.1)


def test_kernels_of_a_third_machine_are_as_measured() -> None:
    """Elementwise kernels of these rows gave their streams; products and attention of other sizes judge their laws."""
    rows = predicted(FEW_SMS)
    judged = [row for row in rows if row.record.inputs["kernel"]["kind"] in ("gemm", "attention")]
    assert (len(rows), len(judged)) == (53, 34)
    assert _mean_error(rows, "latency_s") < 0.037 and _mean_error(rows, "energy_j") < 0.052
    assert _mean_error(judged, "latency_s") < 0.036


def test_collectives_of_more_blocks_than_their_partition_has_sms_share_them() -> None:
    rows = [row for row in predicted("h200-sxm-141gb/partitions/two_gpus.jsonl") if row.record.kind == "partition"]
    crowded = [row for row in rows if row.record.inputs["kernel"]["ctas"] > row.record.inputs["sms"]]
    assert len(crowded) == 3 and _mean_error(crowded, "latency_s") < 0.06
    assert _mean_error(rows, "latency_s") < 0.03
    _are_within(predicted("h200-sxm-141gb/partitions/two_gpus.jsonl"), 0.032, 0.042, worst=0.35)


def test_tensor_cores_slow_the_clock_of_their_sms_whatever_nvml_says() -> None:
    clocks: dict[bool, list[float]] = {True: [], False: []}
    for row in rows_of(FEW_SMS):
        if (row["asked_sms"] or 132) <= 48:
            clocks[row["kernel"]["kind"] in ("gemm", "attention")].append(row["clock_mhz"])
            assert row["sm_clock_mhz"] == [1980]
    assert len(clocks[True]) == 25 and min(clocks[True]) >= 1787 and max(clocks[True]) <= 1824
    assert len(clocks[False]) == 16 and min(clocks[False]) >= 1977 and max(clocks[False]) <= 1980
    assert few_sms().tensor_clock_share == pytest.approx(median(clocks[True]) / 1980, abs=0.002)


def test_libraries_launch_the_same_grids_on_any_part_of_the_sms() -> None:
    """So that blocks beyond a partition's SMs come late. An SM has room for two of decode attention's."""
    grids: dict[str, set[str]] = {}
    for row in json.loads((RECORDS / "h200-sxm-141gb/partitions/grids.json").read_text("utf-8")):
        launched = json.dumps([[one["name"], one["grid"]] for one in row["kernels"]])
        grids.setdefault(json.dumps(row["kernel"]), set()).add(launched)
        kernel = row["kernel"]
        if kernel.get("phase") == "decode" and kernel["batch"] * kernel["kv_heads"] >= 0.8 * 132:
            (block,) = {(*one["grid"], one["shared"], *one["block"]) for one in row["kernels"]}
            assert block == (1, kernel["kv_heads"], kernel["batch"], 86336, 128, 1, 1)
    assert len(grids) == 25 and all(len(seen) == 1 for seen in grids.values())


@pytest.mark.parametrize("tiles", [1, 100, 128, 256, 264, 512, 768, 3000])
def test_a_grid_needs_no_less_rounds_than_its_tiles_and_no_more_on_more_gpcs(tiles: int) -> None:
    rounds = {sms: rounds_on(tiles, min(tiles, 132), 2, sms) for sms in (8, 16, 24, 40, 64, 112, 128, 132)}
    assert all(needed >= -(-tiles // sms) for sms, needed in rounds.items())
    assert all(fewer >= more for fewer, more in pairwise(rounds.values()))
    assert rounds[132] == -(-tiles // 132)


def test_a_product_alone_in_its_partition_is_one_kernel_of_whole_rounds() -> None:
    product = KernelTerms(floor_s=3e-6, blocks=256, cycles_per_block=2e5)
    alone = on_partition(product, 32, 132)
    assert (alone.blocks, alone.sms_cap) == (9 * 32, 32.0)
    assert time_s(alone, sms=32, sm_clock_hz=2e9) == pytest.approx(3e-6 + 9 * 1e-4)
    assert on_partition(product, 132, 132).blocks == 264
    assert on_partition(replace(product, sms_cap=24.0), 32, 132) == on_partition(product, 24, 132)
    assert on_partition(replace(product, blocks=8), 16, 132).blocks == 8


def test_decode_on_few_sms_takes_whole_rounds_of_two_blocks_an_sm() -> None:
    """Measured on 40 and 56 SMs: 207 and 210 us, two rounds each; on 72, one round, 126."""
    decode = KernelTerms(
        floor_s=0.0, blocks=128, cycles_per_block=0.0, quantised=False, hbm_bytes=537e6, hbm_bytes_per_s=4.3e12,
        tensor_share=1.0, sm_bytes_per_s=88e9, few_sms_sharpness=6.0, resident=2,
    )  # fmt: skip
    gpu = load_gpu("h200-sxm-141gb")
    seconds = [time_s(on_few_sms(decode, n, gpu), sms=n, sm_clock_hz=gpu.max_clock_hz) for n in (40.0, 56.0, 72.0)]
    assert seconds == pytest.approx([207e-6, 210e-6, 126e-6], rel=0.06)


def _mean_error(rows: Sequence[Row], output: str) -> float:
    errors = [abs(error) for row in rows if (error := row.error(output)) is not None]
    assert len(errors) == len(rows)
    return sum(errors) / len(errors)


def _are_within(rows: Sequence[Row], latency: float, beside: float, *, worst: float) -> None:
    """Mean absolute errors of both sides of rows side by side."""
    both = [row for row in rows if row.record.kind == "partitions"]
    for name, most in (("latency_s", latency), ("beside_s", beside)):
        errors = [abs(error) for row in both if (error := row.error(name)) is not None]
        assert len(errors) == len(both) >= 12
        assert sum(errors) / len(errors) < most and max(errors) < worst


@pytest.mark.parametrize(("path", "most"), [(ONE_GPU[0], 0.055), (ONE_GPU[1], 0.065)])
def test_power_on_few_sms_is_as_measured(path: str, most: float) -> None:
    """Arithmetic draws less on a few SMs than its share, streaming more; both cards' rows are in the fit."""
    alone = [row for row in predicted(path) if row.record.kind == "partition"]
    both = [(row.predicted.power_w, row.measured["power_w"]) for row in alone if row.predicted]
    errors = [abs(ours[0] / seen[0] - 1.0) for ours, seen in both if ours]
    assert len(errors) == 90 and sum(errors) / len(errors) < most


def _products(inputs: Mapping[str, Any]) -> bool:
    """Two large products side by side."""
    return all(inputs[side]["kind"] == "gemm" and inputs[side]["m"] == 4096 for side in ("a", "b"))


def test_all_sms_are_no_partition() -> None:
    copy = KernelTerms(
        floor_s=0.0, blocks=9000, cycles_per_block=0.0, quantised=False, hbm_bytes=1e9, hbm_bytes_per_s=3e12
    )
    few = [(on_few_sms(copy, sms, load_gpu("h100-sxm-80gb")), sms) for sms in map(float, range(1, 133))]
    rates = [1e9 / time_s(terms, sms=sms, sm_clock_hz=1.98e9) for terms, sms in few]
    assert rates[-1] == pytest.approx(3e12) and rates[0] == pytest.approx(81e9, rel=0.02)
    assert all(more > fewer for fewer, more in pairwise(rates))


def _beside(gpu: GpuModel, others_bytes: float) -> float:
    """Seconds at the maximum clock of a product on 36 SMs beside a kernel that reads so many bytes meanwhile."""
    product = KernelTerms(
        floor_s=0.0, blocks=36, cycles_per_block=2e6, hbm_bytes=1e8, hbm_bytes_per_s=3e12, load_wait=1.0
    )
    other = KernelTerms(
        floor_s=1e-3, blocks=96, cycles_per_block=0.0, hbm_bytes=others_bytes, hbm_bytes_per_s=3e12, quantised=False
    )
    classes = tuple(
        KernelClass(name=name, family="test", terms=terms) for name, terms in (("product", product), ("other", other))
    )
    model = FluidModel(gpu, classes, [])
    return 1e-12 / model.solve(((0, 36.0, False, 1.0), (1, 96.0, False, 1.0)), math.inf, 2e9).rates[0]


def test_a_product_waits_the_longer_the_more_moves_beside_it_and_not_beside_idle_memory() -> None:
    gpu = GpuModel(
        sms=132, max_clock_hz=2e9, min_clock_hz=1e9, reference_clock_hz=2e9, clock_step_hz=0.0, hbm_bytes_per_s=3e12,
        link_bytes_per_s=1e12, idle_w=lambda _: 100.0, voltage_scale=lambda _: 1.0,
    )  # fmt: skip
    seconds = [_beside(gpu, size) for size in (0.0, 1e8, 1e9, 1e10, 1e11)]
    assert seconds[0] == pytest.approx(1e-3)
    assert all(more >= fewer for fewer, more in pairwise(seconds)) and seconds[-1] > 1.5 * seconds[0]
    # A memory of four times the rate has no queue.
    assert _beside(replace(gpu, hbm_bytes_per_s=12e12), 1e9) < 1.05 * seconds[0]
