"""Where blocks land on two H200s and what that costs products, against the engine's rules (kinds: records.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from hardware.calibrate.fit import read_fit_records
from hardware.errors import HardwareError
from hardware.laws.collective_time import default_ctas
from hardware.laws.terms import wanted_sms
from hardware.scheduling import scheduling
from sim.build.cost import Pricer
from sim.engine.graph import KernelClass
from sim.scenario.machine import machine
from sim.validation.validate import validate
from tests.engine_kit import COMPUTE, graph, run, with_terms
from tests.traces_kit import RECORDED, recorded_rows
from workloads.kernel_names import CollectiveOp
from workloads.program import Kernel
from workloads.work import CollectiveWork, GemmWork, Work

PATH = "h200-sxm-141gb/placement/placement.jsonl"
SMS = 132
MACHINE = machine("h200-sxm-141gb", 2)
OWN_TILES = scheduling().own_tiles
PRICER = Pricer(profile=MACHINE.profile, gpu=MACHINE.gpu, gap_s=0.0, chips=2, cluster=MACHINE.cluster)
MOVING = ("all_gather", "reduce_scatter", "sendrecv_ring")
Shape = tuple[int, int, int]


def priced(work: Work) -> KernelClass:
    return PRICER.price(Kernel(name=type(work).__name__, work=work, flops=0.0, bytes_moved=0.0))


def collective(op: str, ctas: int | None) -> KernelClass:
    """4 MiB, as in the records."""
    return priced(CollectiveWork(op=CollectiveOp(op), ranks=(0, 1), buffer_bytes=2**22, ctas=ctas))


@lru_cache
def product(mnk: Shape) -> KernelClass:
    m, n, k = mnk
    priced_ = priced(GemmWork(m=m, n=n, k=k))
    return replace(priced_, terms=replace(priced_.terms, floor_s=0.0))  # its stamps lie inside the launch


@lru_cache
def predicted_ps(mnk: Shape, sms: float) -> int:
    """The product on a pool of ``sms`` SMs, at the maximum clock."""
    return run(graph((0, [product(mnk)])), gpu=MACHINE.model, pool=[sms]).end_ps


def left_beside(op: str, ctas: int | None) -> int:
    """SMs that clusters of two blocks have beside the parked collective."""
    [row] = [r for r in recorded_rows(PATH, kind="beside_parked", op=op, cluster=2) if r["ctas"] == ctas]
    return int(row["resident"])


def beside(**fields: Any) -> list[tuple[Shape, int, float]]:
    """Shape, SMs left, and measured cycles over those alone of products beside parked collectives."""
    rows = recorded_rows(PATH, kind="gemm_beside", **fields)
    alone = {tuple(r["gemm_mnk"]): r["kcycles"] for r in recorded_rows(PATH, kind="gemm_beside", beside="nothing")}
    return [
        (shape, left_beside(r["beside"], r["ctas"]), r["kcycles"] / alone[shape])
        for r in rows
        if r["beside"] in MOVING and len(shape := tuple(r["gemm_mnk"])) == 3
    ]


def test_products_beside_held_sms_take_the_rounds_of_their_blocks() -> None:
    rows = beside()
    assert len(rows) == 147
    missed = []
    for shape, left, measured in rows:
        tiles = product(shape).terms.blocks
        ratio = predicted_ps(shape, float(left)) / predicted_ps(shape, float(SMS))
        if SMS < tiles <= OWN_TILES * SMS and left == SMS - 2:
            missed.append((tiles, round(ratio, 2), round(measured, 2)))
        else:
            assert ratio == pytest.approx(measured, rel=0.05), (shape, left)
    # 256 tiles: 124 blocks have two and 8 have one. The pair that is launched last has one tile only, and ends with the
    # others; the engine gives each block the mean, 1.94, and a third round to those that come late. (Beside two missing
    # pairs there is a third round, as predicted: one of those pairs seems to have two tiles.)
    assert len(missed) == 8 and {(tiles, ratio) for tiles, ratio, _ in missed} == {(256, 1.5)}
    assert [measured for _, _, measured in missed] == pytest.approx([1.0] * 8, abs=0.02)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("ctas", [1, 2, 4, 8, 16, 32, None])
def test_collectives_hold_the_sms_of_their_law(op: str, ctas: int | None) -> None:
    blocks = default_ctas(op) if ctas is None else ctas
    held = {1: 2, 2: 4}.get(blocks, blocks)
    assert SMS - left_beside(op, ctas) == held == wanted_sms(collective(op, ctas).terms, float(SMS))


def test_exchanges_hold_the_sms_of_their_blocks_up_to_16() -> None:
    # They lie on half as many SMs as they have blocks ("missing" of clusters of one), most of these alone in their
    # pair; of 32 blocks some share a pair. The law has no such rule: 2 blocks hold 2 SMs less, 32 blocks 8 less.
    measured = {ctas: SMS - left_beside("sendrecv_ring", ctas) for ctas in (1, 2, 4, 8, 16, 32, None)}
    assert measured == {1: 2, 2: 2, 4: 4, 8: 8, 16: 16, 32: 24, None: 24}
    law = {ctas: wanted_sms(collective("sendrecv_ring", ctas).terms, float(SMS)) for ctas in measured}
    assert {ctas: law[ctas] - measured[ctas] for ctas in measured} == {1: 0, 2: 2, 4: 0, 8: 0, 16: 0, 32: 8, None: 8}


def test_collectives_start_beside_the_blocks_that_the_rule_says() -> None:
    rows = recorded_rows(PATH, kind="starts", cluster=2)
    assert len(rows) == 7 * 15
    first: dict[int | None, int] = {}
    for row in rows:
        began = [end < held for end, held in zip(row["end_ms"], row["held_ms"], strict=True)]
        assert len(set(began)) == 1  # three repetitions agree
        holding = with_terms(COMPUTE, blocks=row["blocks"], cluster=2, cycles_per_block=4e6)  # 2 ms at 2 GHz
        late = replace(collective(row["op"], row["ctas"]), lead_s=3e-4)
        records = run(graph((0, [holding]), (0, [(late, 0)])), gpu=MACHINE.model)
        ends = dict(zip(records.span_op, records.span_end_ps, strict=True))
        assert (ends[1] < ends[0]) == began[0], (row["ctas"], row["blocks"])
        if began[0]:
            first.setdefault(row["ctas"], SMS - row["blocks"])
    assert first == {1: 2, 2: 2, 4: 6, 8: 6, 16: 6, 32: 6, None: 6}


def test_moving_collectives_cost_products_no_more_than_their_sms() -> None:
    parked = {
        (tuple(r["gemm_mnk"]), r["beside"], r["ctas"]): r["kcycles"]
        for r in recorded_rows(PATH, kind="gemm_beside")
        if r["beside"] in MOVING
    }
    rows = [
        (r["kcycles"] / parked[key], r["products"])
        for r in recorded_rows(PATH, kind="gemm_running")
        if (key := (tuple(r["gemm_mnk"]), r["beside"], r["ctas"])) in parked and r["products"]
    ]
    whole = [ratio for ratio, products in rows if products >= 10]
    assert len(whole) == 15 and whole == pytest.approx([1.0] * 15, rel=0.03)
    # Of the other, only one of three replays of five products ended before the collectives did.
    assert [(round(ratio, 3), products) for ratio, products in rows if products < 10] == [(1.044, 5)]


def test_what_ran_before_a_product_changes_its_cycles_by_2_percent_at_most() -> None:
    rows = recorded_rows(PATH, kind="gemm_after")
    alone = {tuple(r["gemm_mnk"]): r["kcycles"] for r in rows if r["before"] == "nothing"}
    ratios = [r["kcycles"] / alone[tuple(r["gemm_mnk"])] for r in rows]
    assert len(ratios) == 70 and ratios == pytest.approx([1.0] * 70, rel=0.022)


def test_grids_fill_the_gpu_in_clusters_of_one_and_two_only() -> None:
    late = {}
    for row in recorded_rows(PATH, kind="clusters"):
        late[row["cluster"]] = sum(start_us > 100.0 for start_us in row["start_us"])
        at_once = [sm for sm, start_us in zip(row["sm"], row["start_us"], strict=True) if start_us < 100.0]
        assert len(set(at_once)) == len(at_once)  # one block an SM
    assert late == {1: 0, 2: 0, 4: 12, 8: 8, 16: 16}


def test_no_fit_takes_the_records_and_validate_says_why_not() -> None:
    with pytest.raises(HardwareError, match="line 2: unknown kind 'clusters': leave the file out"):
        read_fit_records([RECORDED / PATH])
    reasons = {row.record.kind: row.skipped for row in validate([Path(RECORDED / PATH)])}
    told = "says where blocks land: held against the engine in tests/test_placement.py"
    kinds = ("clusters", "beside_parked", "starts", "gemm_after", "gemm_beside", "gemm_running")
    assert reasons == {"host": "describes the machine, measures nothing"} | dict.fromkeys(kinds, told)
