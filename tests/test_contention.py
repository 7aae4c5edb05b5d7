"""What a collective and its neighbour take from one another: mechanisms, the profile's section, and the records."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware.laws.collective import UNFITTED, ring_traffic
from hardware.profile import load_profile, profile_for
from sim.validation import lanes
from sim.validation.contention import machine_with_sharing, main, measured
from sim.validation.lanes import together
from sim.validation.predict import NotPredicted, predict
from sim.validation.records import RecordError, read_records

SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[1].parent / "shared")) / "measurements"
GPU = "h100-sxm-80gb"
COPY: Mapping[str, Any] = {
    "kind": "together", "gpu": GPU, "world": 2, "a": "copy", "b": "rs2", "ctas": 2, "comm_bytes": 2**27,
    "copy_bytes_moved": 2**28,
}  # fmt: skip
GEMM = {**COPY, "a": "gemm", "b": "rs8", "gemm_mnk": [2048, 8192, 14336], "comm_bytes": 2**25}


def sharing():  # type: ignore[no-untyped-def]
    profile = load_profile(GPU)
    assert profile is not None
    return profile.sharing


def test_a_copy_barely_feels_two_blocks_that_it_slows_down_threefold() -> None:
    # Measured (contention.jsonl, two GPUs): 1.053 and 3.49.
    copy, reduce = together(COPY, machine_with_sharing(GPU, 2, sharing())).slowdowns
    assert copy == pytest.approx(1.053, abs=0.04)
    assert reduce == pytest.approx(3.49, rel=0.1)


def test_a_collective_beside_a_gemm_of_persistent_blocks_gets_one_turn_a_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    # Measured (pair.jsonl): 771.4 us a GEMM and 771.7 us a reduce-scatter that alone takes 138. What their ends are
    # apart repeats every third turn: means of many.
    monkeypatch.setattr(lanes, "REPETITIONS", 60)
    seen = together(GEMM, machine_with_sharing(GPU, 2, sharing()))
    assert seen.a_together_s == pytest.approx(seen.b_together_s, rel=0.01)


def test_nothing_shared_is_nothing_lost() -> None:
    # A copy that stays far below the HBM rate, and a collective without HBM traffic of its own.
    quiet = replace(UNFITTED, traffic_scale=0.0)
    copy, reduce = together(COPY, machine_with_sharing(GPU, 2, quiet)).slowdowns
    assert copy == pytest.approx(1.0, abs=0.01)
    assert reduce == pytest.approx(1.0, abs=0.01)


def test_more_blocks_claim_more_of_hbm() -> None:
    slow = [
        together({**COPY, "b": f"rs{n}", "ctas": n}, machine_with_sharing(GPU, 2, sharing())).slowdowns[0]
        for n in (2, 8, 32)
    ]
    assert slow == sorted(slow)


def test_ring_traffic_counts_reads_and_writes_of_the_steps() -> None:
    # Two ranks, reduce-scatter: read both halves, one is written to us and read again, one sum is stored: 5 halves.
    assert ring_traffic("reduce_scatter", 2) == 5.0
    assert ring_traffic("all_reduce", 4) == pytest.approx(
        (ring_traffic("reduce_scatter", 4) + ring_traffic("all_gather", 4)) / 2
    )


def test_the_section_says_where_it_comes_from_and_forecasts_inherit_it() -> None:
    from hardware.catalog import load_gpu

    own = sharing()
    assert own.source and own.command and own.standard_errors and own.left_out
    assert profile_for(load_gpu("h200-sxm-141gb")).sharing == own


def test_rows_of_contention_are_predicted_by_validate() -> None:
    seen = predict("together", GEMM)
    assert seen.latency_s and seen.beside_s
    alone = predict("alone", {"gpu": GPU, "world": 2, "what": "gemm", "gemm_mnk": [2048, 8192, 14336]})
    assert alone.latency_s is not None and seen.latency_s > alone.latency_s
    chain = {"gpu": GPU, "world": 1, "work": "mix: rms gemm silu rms gemm"}
    # Measured (in_context.jsonl): 40.1 us.
    assert predict("small_kernels", chain).latency_s == pytest.approx(40.1e-6, rel=0.1)
    with pytest.raises(NotPredicted, match="work = 'sort'"):
        predict("small_kernels", {**chain, "work": "sort"})
    with pytest.raises(NotPredicted, match="b = 'xx4'"):
        predict("together", {**COPY, "b": "xx4"})


def test_a_fit_without_rows_says_so(tmp_path: Path) -> None:
    empty = tmp_path / "none.jsonl"
    empty.write_text('{"kind": "host", "gpu": "h100-sxm-80gb", "world": 2}\n')
    with pytest.raises(RecordError, match="no together rows"):
        main([str(empty), "--profile", str(Path("hardware/data/profiles/h100-sxm-80gb.json"))])


@pytest.mark.skipif(not SHARED.is_dir(), reason="measurements are not here")
def test_copies_of_the_records_are_within_ten_per_cent() -> None:
    errors = []
    for record in read_records(SHARED / "contention.jsonl"):
        if record.kind == "together" and record.inputs["a"] == "copy" and record.inputs["world"] == 2:
            seen = together(record.inputs, machine_with_sharing(GPU, 2, sharing())).slowdowns
            errors += [abs(math.expm1(math.log(p / m))) for p, m in zip(seen, measured(record).slowdowns, strict=True)]
    assert sum(errors) / len(errors) < 0.10
