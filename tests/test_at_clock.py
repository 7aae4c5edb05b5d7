"""Kernels at two true SM clocks: the suite's plan, what a fit makes of it, the shipped laws against the records."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hardware.calibrate.fit_clocks import clock_pairs, follow_the_clock, moved_bytes
from hardware.calibrate.suite import run
from hardware.calibrate.suite.at_clock import measure_at_clock
from hardware.calibrate.suite.plan import at_clock, copy, elementwise, moe_small
from hardware.calibrate.suite.plans import planned
from hardware.calibrate.suite.worker import SuiteOptions
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.laws import price
from hardware.laws.elementwise import elementwise_base_terms
from hardware.laws.terms import KernelTerms, part, time_s
from hardware.profile import profile_for

RECORDS = Path(__file__).parents[1] / "records/h100-sxm-80gb/calibration/clocks/clocks.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
H100 = load_gpu("h100-sxm-80gb")
PROFILE = profile_for(H100)
PAIRS = clock_pairs(ROWS, l2_bytes=H100.l2_bytes)
CLOCKS_HZ = [hz * 1e6 for hz in range(345, 1981, 15)]


def terms_of(row: dict[str, Any], gpu: str = "h100-sxm-80gb") -> KernelTerms:
    """The law's terms of an elementwise kernel row."""
    rows, moved = row.get("tokens") or row.get("rows") or 1, moved_bytes(row)
    blocks = rows * row["heads"] if row["kind"] == "rope" else int(moved // 8192)
    spec = load_gpu(gpu)
    return price.elementwise_terms(
        profile_for(spec), spec, op=row["kind"], rows=rows, bytes_moved=moved, launched_blocks=blocks
    )


def seconds_at(terms: KernelTerms, clock_hz: float, sms: float = 132.0) -> float:
    return time_s(terms, sms=sms, sm_clock_hz=clock_hz)


@pytest.mark.parametrize(
    "row", [row for pairs in PAIRS.values() for pair in pairs for row in pair if row["kind"] != "cat"]
)
def test_large_kernels_take_what_was_measured_at_either_clock(row: dict[str, Any]) -> None:
    assert seconds_at(terms_of(row), row["clock_hz"]) == pytest.approx(row["latency_s"], rel=0.05)


def test_which_kernels_follow_the_clock() -> None:
    assert {kind for kind, pairs in PAIRS.items() if follow_the_clock(pairs)} == {
        "rope", "gelu", "gather", "index_add", "topk_sum", "permute_copy",
    }  # fmt: skip
    assert {kind for kind, pairs in PAIRS.items() if not follow_the_clock(pairs)} == {
        "copy", "silu_mul", "add_rmsnorm", "cat",
    }  # fmt: skip
    for kind in ("rope", "gelu", "gather", "index_add", "topk_sum"):
        assert 0.01 < PROFILE.provenance.standard_errors[f"{kind}.log.follows_below"] < 0.03


@pytest.mark.parametrize(
    "row",
    [
        elementwise("rope", 8192, 40),
        elementwise("rope", 64, 40),
        elementwise("gelu", 4096, 8960),
        elementwise("silu_mul", 2048, 14336),
        elementwise("add_rmsnorm", 512, 8192),
        moe_small("gather", 16384),
        moe_small("index_add", 2048),
        moe_small("topk_sum", 16384),
        {"kind": "permute_copy", "tokens": 4096, "bytes_moved": 100_663_296},
        copy(1 << 28),
    ],
)
@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb"])
def test_a_lower_clock_is_never_faster_and_never_slower_than_in_proportion(row: dict[str, Any], gpu: str) -> None:
    terms = terms_of(row, gpu)
    for slow, fast in pairwise(CLOCKS_HZ):
        assert 1.0 - 1e-12 <= seconds_at(terms, slow) / seconds_at(terms, fast) <= fast / slow + 1e-12


def test_rope_is_launched_at_one_rate_down_to_a_clock_and_then_in_proportion() -> None:
    """Launching bounds it at any clock: 1.67 blocks a nanosecond, below 1640 MHz one a cycle."""
    terms = replace(terms_of(elementwise("rope", 8192, 40)), floor_s=0.0)
    assert seconds_at(terms, 1.98e9) == seconds_at(terms, 1.70e9) == terms.scale * terms.launch_s
    assert seconds_at(terms, 1.2e9) == pytest.approx(seconds_at(terms, 1.5e9) * 1.25)
    assert terms.blocks / seconds_at(terms, 1.4e9) / 1.4e9 == pytest.approx(1.02, abs=0.02)
    # The launcher serves any SMs; what they do themselves takes those that are left longer.
    assert seconds_at(terms, 1.98e9, sms=116.0) == seconds_at(terms, 1.98e9)
    assert seconds_at(terms, 1.2e9, sms=66.0) == pytest.approx(2.0 * seconds_at(terms, 1.2e9))
    assert seconds_at(part(terms, 0.25), 1.98e9) == pytest.approx(0.25 * seconds_at(terms, 1.98e9))


def test_without_rows_at_two_clocks_launches_follow_the_clock_and_memory_does_not() -> None:
    for kind, blocks, ratio in (("rope", 327_680, 2.0), ("gelu", 20_480, 1.0)):
        unknown = replace(PROFILE.elementwise[kind], follows_below=None, floor_s=0.0)
        terms = elementwise_base_terms(unknown, H100, rows=8192, bytes_moved=2.0**28, launched_blocks=blocks)
        assert seconds_at(terms, 0.99e9) / seconds_at(terms, 1.98e9) == pytest.approx(ratio)


def test_more_bandwidth_for_the_same_cycles_makes_a_kernel_follow_the_clock_sooner() -> None:
    h200 = profile_for(load_gpu("h200-sxm-141gb"))
    more = load_gpu("h200-sxm-141gb").hbm_bytes_per_s / H100.hbm_bytes_per_s
    known = {kind: c.follows_below for kind, c in PROFILE.elementwise.items() if c.follows_below}
    assert {kind: c.follows_below for kind, c in h200.elementwise.items() if c.follows_below} == pytest.approx(
        {kind: value if kind == "rope" else value * more for kind, value in known.items()}
    )


def test_pairs_lose_the_time_of_the_stamps_and_leave_out_what_l2_holds_and_what_ran_at_one_clock() -> None:
    large, small = copy(1 << 28), copy(1 << 24)
    rows: list[dict[str, Any]] = [
        {**at_clock(large, "alone"), "seconds": 91e-6, "clock_mhz": 1980.0, "samples": 6, "session": "mine"},
        {**at_clock(large, "capped"), "seconds": 131e-6, "clock_mhz": 1400.0, "samples": 9, "session": "mine"},
        {**at_clock(small, "alone"), "seconds": 4e-6, "clock_mhz": 1980.0, "samples": 6},
        {**at_clock(small, "capped"), "seconds": 8e-6, "clock_mhz": 1400.0, "samples": 6},
        {**at_clock(copy(1 << 29), "alone"), "seconds": 181e-6, "clock_mhz": 1980.0, "samples": 6},
        {**at_clock(copy(1 << 29), "alone"), "seconds": 182e-6, "clock_mhz": 1965.0, "samples": 6, "session": "again"},
        {**at_clock({"kind": "nothing"}, "alone"), "seconds": 1e-6, "clock_mhz": 1980.0, "samples": 6},
    ]
    ((slow, fast),) = clock_pairs(rows, l2_bytes=5e7)["copy"]
    assert (slow["latency_s"], slow["clock_hz"]) == pytest.approx((130e-6, 1.4e9))
    assert (fast["latency_s"], fast["clock_hz"]) == pytest.approx((90e-6, 1.98e9))
    assert follow_the_clock([(slow, fast)]) and not follow_the_clock([(fast, slow)]) and not follow_the_clock([])


def test_the_table_in_the_docs_is_what_the_records_hold() -> None:
    page = (Path(__file__).parents[1] / "docs" / "records.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if re.match(r"\| `\w+` \d+ x", line)]
    seen = {
        (row["work"], row.get("tokens") or row["rows"], row.get("width") or row["heads"], row["where"]): row
        for row in ROWS
        if row.get("tokens", row.get("rows")) and "parts" not in row
    }
    assert len(table) == 4
    for line in table:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        kind, rows, width = name.replace("`", "").replace(" x", "").split()
        found = [seen[kind, int(rows), int(width), where] for where in ("alone", "capped")]
        assert cells == [f"{1e6 * row['seconds']:.1f} us, {row['clock_mhz']:.0f} MHz" for row in found]


def test_a_dry_run_of_the_plan_gives_rows_as_the_records_have_them(tmp_path: Path) -> None:
    if not importlib.util.find_spec("torch"):
        pytest.skip("no torch: a dry run checks shapes with it")
    out = tmp_path / "dry.jsonl"
    rows = [row for row in planned(str(RECORDS)) if row.get("work") in ("gelu", "nothing")]
    assert run.run_rows(rows, SuiteOptions(out=out, world=1, dry=True), label="some") == 3
    (dry,) = (row for row in run.load(out) if row.get("work") == "gelu" and row["where"] == "capped")
    (real,) = (row for row in ROWS if row.get("work") == "gelu" and row["where"] == "capped")
    assert dry.keys() - {"dry_run"} == real.keys()
    assert (dry["seconds"], dry["clock_mhz"], dry["samples"]) == (1e-3, 1980.0, 6)


def test_a_place_that_the_suite_does_not_know_is_refused() -> None:
    bench: Any = None
    with pytest.raises(HardwareError, match="where = 'busy': alone or capped"):
        measure_at_clock(bench, at_clock(copy(4096), "busy"))
