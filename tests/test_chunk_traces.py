"""What chunked steps on four H200s showed (records/h200-sxm-141gb/traces/chunks), and the engine's rules from it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from statistics import mean, median

import pytest

from hardware.catalog import load_gpu
from hardware.laws.gemm_grid import LEAST_ROWS
from hardware.laws.price import gemm_terms, launched_gemm
from hardware.laws.sizes import GemmSizes
from hardware.laws.terms import time_s
from hardware.profile import profile_for
from hardware.scheduling import scheduling
from sim import simulate
from sim.engine.resources.grid import Grid, room
from sim.validation.validate import validate
from tests.engine_kit import REDUCE, graph, run, spans, with_terms
from tests.test_engine_sms import HOPPER, holding
from tests.traces_kit import RECORDED, Ran, ran
from traces.rounds import TILE, tiles_of

GPU = load_gpu("h200-sxm-141gb")
PROFILE = profile_for(GPU)
TOKENS = (512, 1024, 2048, 4096)
# Llama-3-70B on four ranks: columns and depth of QKV, output, gate-up and down products, in the order of a layer.
PRODUCTS = {"qkv": (2560, 8192), "o": (8192, 2048), "gate_up": (14336, 8192), "down": (8192, 7168)}
LAYERS = 8  # two steps of four


@lru_cache
def step(tokens: int, chunks: int, rank: int = 0) -> list[Ran]:
    name = f"llama3-70b-prefill-1x{tokens}-tp4" + (f"-overlap_chunks{chunks}" if chunks > 1 else "")
    return ran(RECORDED / f"h200-sxm-141gb/traces/chunks/{name}-comm_ctas8.rank{rank}.json.gz")


def products(tokens: int, chunks: int) -> dict[str, list[Ran]]:
    """Products by their name; parts of a layer in a row."""
    found: dict[str, list[Ran]] = {name: [] for name in PRODUCTS}
    order = [name for name in PRODUCTS for _ in range(chunks)]
    gemms = [kernel for kernel in step(tokens, chunks) if "nvjet" in kernel.name]
    assert len(gemms) == LAYERS * len(order)
    for at, kernel in enumerate(gemms):
        found[order[at % len(order)]].append(kernel)
    return found


def test_launched_tiles_go_in_the_rounds_that_the_traces_show() -> None:
    right, grids = [], []
    for tokens in TOKENS:
        for chunks in (1, 2, 4):
            rows = tokens // chunks
            for name, kernels in products(tokens, chunks).items():
                n, k = PRODUCTS[name]
                tile = TILE.search(kernels[0].name)
                assert tile is not None
                real = tiles_of(tile, m=rows, n=n) * (3 if "4x2_h" in kernels[0].name else 1)
                real *= 2 if "splitK" in kernels[0].name and real <= 66 else 1
                made = launched_gemm(PROFILE, GPU, _terms(rows, n, k), GemmSizes(m=rows, n=n, k=k)).blocks
                right.append(-(-made // GPU.sms) == -(-real // GPU.sms))
                grids.append(min(made, GPU.sms))
                assert kernels[0].blocks >= 120
    assert len(right) == 48 and sum(right) >= 40
    assert min(grids) >= 120  # the law's own tiles leave 52 SMs free beside one of them: 80 blocks
    assert _terms(128, 2560, 8192).blocks == 80


def _terms(m: int, n: int, k: int):  # type: ignore[no-untyped-def]
    return gemm_terms(PROFILE, GPU, GemmSizes(m=m, n=n, k=k, dtype="bf16"))


@pytest.mark.parametrize("m", [4, 127, 128, 256, 1000, 4096])
def test_other_tiles_take_the_time_and_joules_of_the_law_alone(m: int) -> None:
    before = _terms(m, 14336, 8192)
    after = launched_gemm(PROFILE, GPU, before, GemmSizes(m=m, n=14336, k=8192))
    for clock_hz in (1.98e9, 1.2e9):
        alone = [time_s(t, sms=float(min(t.blocks, GPU.sms)), sm_clock_hz=clock_hz) for t in (before, after)]
        assert alone[1] == pytest.approx(alone[0], rel=1e-9)
    watts = [t.sm_power_w * min(t.blocks, GPU.sms) for t in (before, after)]
    assert watts[1] == pytest.approx(watts[0]) and after.core_energy_j == before.core_energy_j


# Rows, columns, depth and tiles (by name and grid, splits of k among them) of products in traces of decode steps:
# records/*/traces and measurements/kineto.
THIN = [
    (32, 5120, 8192, 120), (32, 8192, 4096, 128), (32, 8192, 14336, 128), (32, 2560, 8192, 80), (32, 8192, 2048, 128),
    (32, 8192, 7168, 128), (32, 6144, 4096, 96), (32, 4096, 4096, 128), (32, 4096, 14336, 128), (4, 6144, 4096, 96),
    (4, 4096, 4096, 128), (4, 4096, 14336, 128), (32, 5120, 2048, 80), (32, 2048, 4096, 96), (16, 5120, 2048, 80),
    (16, 2048, 4096, 64),
]  # fmt: skip


def test_products_of_few_rows_have_the_tiles_of_the_traces_whatever_their_rows() -> None:
    """So that what waits for SMs beside one does not find some because a token more has come."""

    def made(m: int, n: int, k: int) -> int:
        return launched_gemm(PROFILE, GPU, _terms(m, n, k), GemmSizes(m=m, n=n, k=k)).blocks

    assert sum(made(*sizes) == real for *sizes, real in THIN) == 14
    assert all(len({made(m, n, k) for m in range(1, LEAST_ROWS, 7)}) == 1 for _, n, k, _ in THIN)


def test_a_step_of_one_stream_knows_nothing_of_them() -> None:
    """One chip and one stream: launched tiles, joins and side streams change nothing there."""
    serial = simulate(model="llama3-8b", gpu="h200", layers=2, seq_len=512)
    classes = {c.name: c for c in serial.graph.classes}
    assert classes["gate_up_gemm"].terms.blocks == _terms(512, 28672, 4096).blocks
    assert serial.kernels["gap_s"].nunique() == 1


def test_collectives_start_in_the_last_round_of_a_product() -> None:
    """Beside one that fills the GPU once, with its end; never at its start, though 4 to 12 SMs are free then."""
    seen = 0
    for chunks in (2, 4):
        for kernels in (step(512, chunks), step(1024, chunks)):
            gemms = [k for k in kernels if "nvjet" in k.name and k.blocks < 132]
            for one in (k for k in kernels if "AllGather" in k.name):
                for gemm in gemms:
                    if gemm.start + 1.0 <= one.start < gemm.end:  # else a product that came late for its SMs
                        seen += 1
                        assert gemm.end - one.start < 15.0 and one.start - gemm.start > 10.0
    assert seen > 50


def test_a_few_loose_sms_hold_one_cluster_and_the_other_lasts_its_own_time() -> None:
    """All-gathers of 4 MiB: 48 us alone, 103 where they start in the second round of 256 tiles, 58 us after its end."""

    def of_gate_up(tokens: int, chunks: int) -> list[tuple[float, float]]:
        kernels = step(tokens, chunks)
        gemms = products(tokens, chunks)["gate_up"]
        gathers = [k for k in kernels if "AllGather" in k.name]
        return [(g.us, g.end - gemm.end) for gemm in gemms for g in gathers if gemm.start < g.start < gemm.end]

    eight, forty = of_gate_up(1024, 4), of_gate_up(2048, 4)
    assert len(eight) >= 20 and median(us for us, _ in eight) == pytest.approx(103.0, abs=3.0)
    assert median(after for _, after in eight) == pytest.approx(58.0, abs=3.0)  # as long as one that begins there
    assert median(after for _, after in forty) < 25.0  # of 8 MiB, which take 80 alone: all blocks ran beside it
    grid = Grid(sms=8, cluster=4, cluster_sms=6)
    assert room(grid, 8, 8, scattered=0, loose=True) == 4 and room(grid, 8, 40, scattered=0, loose=True) == 8
    assert room(grid, 8, 8, scattered=0) == 8


def test_blocks_of_a_collective_that_start_late_move_their_own_data() -> None:
    # Two rounds of 10 us: 8 SMs are left in the second one. The first cluster starts there, the second at the end, and
    # takes the 10 us that all blocks take alone.
    wide = with_terms(REDUCE, blocks=8, cluster=4, sms_per_block=1.0, link_bytes=0.0, moving_cycles=20_000.0)
    late = replace(wide, lead_s=1e-6)
    product = holding(132, 2.0, cluster=2)
    product = replace(product, terms=replace(product.terms, blocks=256, cycles_per_block=20_000.0))
    g = graph((0, [product]), (0, [(late, 0)]))
    assert [row[2:] for row in spans(g, run(g, gpu=HOPPER))] == [(0.0, 20.0), (10.0, 30.0)]


def _since_the_last(kernels: list[Ran], what: str) -> list[float]:
    """Pauses before kernels called ``what`` that follow the end of a collective by long and start beside nothing."""
    pauses = []
    for one in (k for k in kernels if what in k.name):
        before = [k for k in kernels if k.end <= one.start]
        if any(k.start < one.start < k.end for k in kernels) or not before:
            continue
        collective_ends = [k.end for k in before if "nccl" in k.name]
        others = [k.end for k in before if "nccl" not in k.name]
        if collective_ends and others and max(collective_ends) > max(others) + 5.0:
            pauses.append(one.start - max(collective_ends))
    return pauses


def test_edges_between_streams_cost_what_the_traces_show() -> None:
    every = [step(tokens, chunks, rank) for tokens in TOKENS for chunks in (2, 4) for rank in (0, 1)]
    joins = [pause for kernels in every for pause in _since_the_last(kernels, "nvjet")]
    follows = [pause for kernels in every for pause in _since_the_last(kernels, "nccl")]
    assert len(joins) > 400 and median(joins) == pytest.approx(scheduling().joining_gap_s * 1e6, abs=0.15)
    assert len(follows) > 200
    assert median(follows) == pytest.approx(scheduling().side_start_s * 1e6, abs=0.5)


def test_four_gpu_steps_of_few_tokens_keep_their_bars() -> None:
    """Latency and energy of chunked and sequential steps on four H200s; 7.6 % was the first before these rules."""
    rows = list(validate((RECORDED / "h200-sxm-141gb/study/chunks.jsonl",)))
    few, many = ([r for r in rows if (r.record.inputs["seq_len"] <= 1024) == small] for small in (True, False))
    assert len(few) == len(many) == 6
    for part, time_bar, energy_bar in ((few, 0.08, 0.08), (many, 0.035, 0.06)):
        for output, bar in (("latency_s", time_bar), ("energy_j", energy_bar)):
            errors = [row.error(output) for row in part]
            assert mean(abs(e) for e in errors if e is not None) < bar, output
