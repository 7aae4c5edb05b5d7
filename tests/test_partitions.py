"""Green contexts: what the suite plans, and what its records say of a GPU's partitions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hardware.calibrate.suite.partitions import BESIDE, SIZES, SPLITS, alone_rows, beside_rows, comm_rows
from hardware.calibrate.suite.run import share_of
from hardware.calibrate.suite.worker import nvml_index
from hardware.laws.streaming import on_few_sms
from hardware.laws.terms import KernelTerms
from sim.validation.validate import validate

RECORDS = Path(__file__).parents[1] / "records"
ONE_GPU = [f"{gpu}/partitions/one_gpu.jsonl" for gpu in ("h100-sxm-80gb", "h200-sxm-141gb")]


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / path).read_text("utf-8").splitlines()]


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
    """Rows that entered no fit but copy and add_rmsnorm, whose streaming rate is theirs."""
    rows = validate([RECORDS / ONE_GPU[0]])
    alone = [row for row in rows if row.record.kind == "partition" and row.record.inputs["kernel"]["kind"] == "gemm"]
    assert len(alone) == 50
    errors = [abs(error) for row in alone if (error := row.error("latency_s")) is not None]
    assert sum(errors) / len(errors) < 0.035
    beside = [row for row in rows if row.record.kind == "partitions" and _products(row.record.inputs)]
    both = [row.error(name) for row in beside for name in ("latency_s", "beside_s")]
    assert len(both) == 10 and max(abs(error) for error in both if error is not None) < 0.06
    # Whatever runs side by side, on partitions or not: a few are off by half, none by a multiple.
    sides = [row.error("latency_s") for row in rows if row.record.kind == "partitions"]
    far = [abs(error) for error in sides if error is not None]
    assert len(far) == 30 and sum(far) / len(far) < 0.12 and max(far) < 0.6


def _products(inputs: Mapping[str, Any]) -> bool:
    """Two large products side by side."""
    return all(inputs[side]["kind"] == "gemm" and inputs[side]["m"] == 4096 for side in ("a", "b"))


def test_all_sms_are_no_partition() -> None:
    copy = KernelTerms(floor_s=0.0, blocks=9000, cycles_per_block=0.0, hbm_bytes=1e9, hbm_bytes_per_s=3e12)
    rates = [on_few_sms(copy, float(sms), 132.0).hbm_bytes_per_s for sms in range(1, 133)]
    assert rates[-1] == pytest.approx(3e12) and rates[0] == pytest.approx(81e9, rel=0.02)
    assert all(more > fewer for fewer, more in pairwise(rates))
