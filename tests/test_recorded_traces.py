"""What laws and comments say was seen in profiler traces, read again from the traces among the records."""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import mean, median

import pytest

from hardware.catalog import load_gpu
from hardware.laws.price import collective_terms, elementwise_terms, gemm_terms, prefill_terms
from hardware.laws.sizes import CollectiveSizes, GemmSizes, PrefillSizes
from hardware.laws.terms import KernelTerms, time_s
from hardware.power import steady_point
from hardware.profile import profile_for
from tests.traces_kit import OURS, RECORDED, Ran, ran, recorded, recorded_rows
from traces.read.load import read_trace

H100, H200 = "h100-sxm-80gb", "h200-sxm-141gb"
GPU = load_gpu(H100)
PROFILE = profile_for(GPU)
STEP = "llama3-70b-prefill-2x4096-tp2"
RANKS = (0, 1)
# Two steps of four layers. A layer has 4 products of each chunk (QKV, output, gate-up, down: in this order) and two
# rounds of both collectives: the all-gathers feed QKV and gate-up, the reduce-scatters follow output and down.
LAYERS = 8


needs_ours = pytest.mark.skipif(not OURS.is_dir(), reason=f"needs the first traces ({OURS}; set WATTLINE_SHARED)")


def chunked(chunks: int, ctas: int, rank: int = 0) -> list[Ran]:
    """The step whose collectives run beside products."""
    return recorded(H200, f"{STEP}-overlap_chunks{chunks}-comm_ctas{ctas}", rank)


def named(kernels: list[Ran], part: str) -> list[Ran]:
    return [kernel for kernel in kernels if part in kernel.name]


def tile_of(name: str) -> tuple[int, int] | None:
    found = re.search(r"nvjet_\w*?_(\d+)x(\d+)_", name)
    return (int(found[1]), int(found[2])) if found else None


def seconds_alone(ranks: list[list[Ran]], op: str) -> list[float]:
    """Each collective beside which neither rank ran anything, from the later arrival on: the shorter kernel's time."""
    pairs = zip(*(named(kernels, op) for kernels in ranks), strict=True)
    return [
        min(kernel.us for kernel in pair) * 1e-6
        for pair in pairs
        if not any(
            other is not kernel and other.beside(kernel)
            for kernel, kernels in zip(pair, ranks, strict=True)
            for other in kernels
        )
    ]


@pytest.mark.parametrize(("op", "kernel"), [("all_gather", "AllGather"), ("reduce_scatter", "ReduceScatter")])
@pytest.mark.parametrize("ctas", [4, 32])
def test_few_blocks_follow_the_clock_and_many_the_link(op: str, kernel: str, ctas: int) -> None:
    """Collectives of 32 MiB alone within a capped step, against loops at 1980 MHz and the law at the step's clock."""
    (loop,) = recorded_rows(f"{H100}/calibration/first/collective.jsonl", op=op, world=2, bytes=2**25, ctas=ctas)
    (step,) = recorded_rows(f"{H200}/validation/h200_two_gpus.jsonl", overlap_chunks=4, comm_ctas=ctas)
    assert loop["sm_clock_mhz"] == [1980, 1980]
    clock_hz = 1e6 * mean(step["sm_clock_mhz"])
    terms = collective_terms(
        PROFILE, GPU, CollectiveSizes(op=op, world=2, buffer_bytes=2**25, ctas=ctas, in_graph=True)
    )
    in_step_s = seconds_alone([chunked(4, ctas, rank) for rank in RANKS], kernel)
    assert len(in_step_s) >= 16
    slower = mean(in_step_s) / loop["latency_s"]
    if ctas == 4:
        assert step["sm_clock_mhz"] == [1620, 1635]
        assert slower == pytest.approx(1.17, abs=0.01)
        assert mean(in_step_s) == pytest.approx(time_s(terms, sms=132, sm_clock_hz=clock_hz), rel=0.02)
    else:
        assert step["sm_clock_mhz"] == [1500, 1500]
        assert slower == pytest.approx(0.95, abs=0.03)  # a launch less
        assert time_s(terms, sms=132, sm_clock_hz=clock_hz) == time_s(terms, sms=132, sm_clock_hz=1.98e9)


def test_the_all_gather_of_four_blocks_takes_351_us_in_the_step_and_299_in_a_loop() -> None:
    in_step_s = seconds_alone([chunked(4, 4, rank) for rank in RANKS], "AllGather")
    (loop,) = recorded_rows(f"{H100}/calibration/first/collective.jsonl", op="all_gather", world=2, bytes=2**25, ctas=4)
    assert (round(1e6 * mean(in_step_s)), round(1e6 * loop["latency_s"])) == (351, 299)


@pytest.mark.parametrize(("chunks", "ctas"), [(4, 4), (4, 32), (8, 4)])
def test_a_collective_is_a_grid_of_the_blocks_asked_for(chunks: int, ctas: int) -> None:
    """Where the SMs that a block takes come from: ``sms_per_cta`` of the profile."""
    assert {kernel.blocks for kernel in named(chunked(chunks, ctas), "nccl")} == {ctas}
    assert PROFILE.sharing.sms_per_cta == 1.0


def test_rings_take_24_blocks_and_an_exchange_of_two_as_many_as_32() -> None:
    for name in (STEP, "llama3-70b-prefill-1x4096-tp2", "llama3-70b-decode-32x2048-tp2"):
        assert {kernel.blocks for kernel in named(recorded(H200, name), "nccl")} == {24}
    assert {
        kernel.blocks for kernel in named(recorded(H200, "llama3-8b-prefill-4x2048-pp2-micro_batches2"), "SendRecv")
    } == {17}
    rows = [
        recorded_rows(f"{H100}/calibration/{file}.jsonl", op="all_to_all", world=2, bytes=2**28, ctas=ctas)
        for file, ctas in (("first/collective", None), ("pair/pair", 32))
    ]
    asked_for_none, asked_for_32 = (min(row["latency_s"] for row in found) for found in rows)
    assert (round(1e6 * asked_for_none), round(1e6 * asked_for_32)) == (506, 504)


def test_tiles_of_products_span_64_to_512_by_8_to_256() -> None:
    names = {name for path in RECORDED.glob("*/traces/*.gz") for name in read_trace(path).names if tile_of(name)}
    tiles = [tile for name in names if (tile := tile_of(name))]
    assert (min(a for a, _ in tiles), max(a for a, _ in tiles)) == (64, 512)
    assert (min(b for _, b in tiles), max(b for _, b in tiles)) == (8, 256)


@pytest.mark.parametrize("chunks", [4, 8])
def test_grids_are_as_many_blocks_as_tiles_up_to_132(chunks: int) -> None:
    """Columns of QKV, output, gate-up and down of Llama-3-70B on two ranks; rows of one chunk."""
    rows, columns = 8192 // chunks, (5120, 8192, 28672, 8192)
    products = named(chunked(chunks, 4), "nvjet")
    assert len(products) == LAYERS * 4 * chunks
    seen = set()
    for place, product in enumerate(products):
        across, down = tile_of(product.name) or (0, 0)
        tiles = -(-columns[place // chunks % 4] // across) * -(-rows // down)
        assert product.blocks == min(tiles, 132)
        seen.add(tiles)
    assert seen == ({256, 512, 1440} if chunks == 4 else {128, 256, 896})


def test_attention_of_a_prefill_is_a_grid_of_one_block_an_sm() -> None:
    prefills = [path for path in RECORDED.glob("*/traces/*.gz") if "-prefill-" in path.name]
    assert len(prefills) == 18
    for path in prefills:
        gpu, (name, rank) = path.parts[-3], path.name.removesuffix(".json.gz").split(".rank")
        flash = named(recorded(gpu, name, int(rank)), "sdpa_sm90_flash_fprop")
        assert {kernel.blocks for kernel in flash} == {132}


@pytest.mark.parametrize(("ctas", "late_rounds", "longer_rounds"), [(32, 0.8, 0.8), (4, 3.7, 0.7)])
def test_a_product_whose_last_blocks_start_late_fetches_whole_tiles(
    ctas: int, late_rounds: float, longer_rounds: float
) -> None:
    """Gate-up products of 1440 tiles, 11 rounds: the first beside an all-gather from its start, the last alone."""
    late, longer = [], []
    for rank in RANKS:
        kernels = chunked(4, ctas, rank)
        products, gathers = named(kernels, "nvjet"), named(kernels, "AllGather")
        for layer in range(LAYERS):
            first, alone = products[16 * layer + 8], products[16 * layer + 11]
            gather = gathers[8 * layer + 5]
            assert abs(gather.start - first.start) < 10.0
            round_us = alone.us / 11
            late.append((gather.end - first.start) / round_us)
            longer.append((first.us - alone.us) / round_us)
    assert len(late) == 2 * LAYERS
    assert median(late) == pytest.approx(late_rounds, abs=0.05)
    assert median(longer) == pytest.approx(longer_rounds, abs=0.05)


def wins(chunks: int, ctas: int) -> tuple[int, int, int, int]:
    """Who gets the SMs where one event releases a product and a collective.

    Reduce-scatters first or with the product, and all that did not queue behind another; products before the
    all-gather beside attention's QKV, and all.
    """
    scatter_first = scatters = product_first = gathers = 0
    for rank in RANKS:
        kernels = chunked(chunks, ctas, rank)
        products = named(kernels, "nvjet")
        scattered, gathered = named(kernels, "ReduceScatter"), named(kernels, "AllGather")
        for layer in range(LAYERS):
            for half in (0, 1):
                producers = products[(4 * layer + 1 + 2 * half) * chunks :][:chunks]
                out = scattered[(2 * layer + half) * chunks :][:chunks]
                for i in range(chunks - 1):
                    if i == 0 or out[i - 1].end <= producers[i].end:
                        scatters += 1
                        scatter_first += out[i].start < producers[i + 1].start + 0.5
            qkv, into = products[4 * layer * chunks :][:chunks], gathered[2 * layer * chunks :][:chunks]
            for i in range(chunks - 1):
                gathers += 1
                product_first += into[i + 1].start > qkv[i].start + 0.5
    return scatter_first, scatters, product_first, gathers


def test_who_gets_the_sms_of_a_product_and_a_collective_that_one_event_releases() -> None:
    four = [sum(pair) for pair in zip(wins(4, 4), wins(4, 32), strict=True)]
    assert four == [120, 139, 92, 96]
    assert wins(8, 4) == (0, 61, 107, 112)


def memsets_before_products(chunks: int) -> set[tuple[int, bool]]:
    """Place of a product in its layer, and whether the library clears memory before it."""
    capture = read_trace(RECORDED / H200 / "traces" / f"{STEP}-overlap_chunks{chunks}-comm_ctas4.rank0.json.gz")
    work = capture.work
    main = work.stream == work.stream[next(i for i in capture.kernels if "nvjet" in capture.names[work.name[i]])]
    names = [capture.names[name] for name in work.name[main]]
    places = [i for i, name in enumerate(names) if "nvjet" in name]
    return {(count // chunks % 4, "Memset" in names[i - 1]) for count, i in enumerate(places) if i}


def test_the_reduce_scatter_wins_where_the_library_clears_memory_before_the_next_product() -> None:
    qkv, out, up, down = range(4)
    assert memsets_before_products(4) == {(qkv, False), (out, True), (up, True), (down, True)}
    assert memsets_before_products(8) == {(qkv, False), (out, False), (up, True), (down, False)}


def test_a_settled_step_has_one_clock() -> None:
    """Kernels that draw little are as slow as the others: not what each would be at a clock of its own."""
    kernels = recorded(H100, "llama3-70b-prefill-1x3000")
    rows, limit_w = 3000, PROFILE.clock_limits(GPU, power_cap_w=None).slow_limit_w
    (step,) = recorded_rows(f"{H100}/validation/profiled.jsonl", model="llama3-70b", seq_len=rows)
    curve = PROFILE.power_curve(GPU).at(step["temperature_c"][0])

    def own_clock_us(terms: KernelTerms) -> float:
        limits = {"limit_w": limit_w, "min_clock_hz": GPU.min_clock_hz, "max_clock_hz": GPU.max_clock_hz}
        return 1e6 * steady_point(terms, curve, gpu_sms=132, **limits).latency_s

    rope = elementwise_terms(
        PROFILE, GPU, op="rope", rows=rows, bytes_moved=2 * rows * 72 * 128 * 2, launched_blocks=rows * 72
    )
    attention = prefill_terms(
        PROFILE, GPU, PrefillSizes(batch=1, q_len=rows, kv_len=rows, q_heads=64, kv_heads=8, head_dim=128, causal=True)
    )
    up = gemm_terms(PROFILE, GPU, GemmSizes(m=rows, n=57344, k=8192, dtype="bf16"))
    products = [kernel for kernel in named(kernels, "nvjet") if kernel.us > 3000.0]
    assert len(products) == 2 * 8
    assert median(kernel.us for kernel in named(kernels, "_rope")) == pytest.approx(145, abs=1)
    assert own_clock_us(rope) == pytest.approx(131, abs=1)
    assert median(kernel.us for kernel in named(kernels, "sdpa")) == pytest.approx(349, abs=1)
    assert own_clock_us(attention) == pytest.approx(319, abs=2)
    assert median(kernel.us for kernel in products) / own_clock_us(up) == pytest.approx(0.93, abs=0.01)


@needs_ours
def test_a_product_that_an_all_gather_releases_comes_before_the_next_all_gather() -> None:
    """Launched kernel by kernel, microseconds from the end of the all-gather before."""
    lags = []
    for rank in RANKS:
        kernels = ran(OURS / f"kineto_llama3-70b_sp_chunks4_w2_rank{rank}.json.gz")
        products = named(kernels, "nvjet")
        for before, after in pairwise(named(kernels, "AllGather")):
            released = [product.start - before.end for product in products if 0 <= product.start - before.end < 5]
            if released and after.start - before.end < 8:
                lags.append((released[0], after.start - before.end))
    assert (sum(product < gather for product, gather in lags), len(lags)) == (11, 12)
    assert [round(median(lag), 1) for lag in zip(*lags, strict=True)] == [2.3, 3.2]


@needs_ours
def test_kernels_launched_one_by_one_pause_for_two_and_a_half_us() -> None:
    work = read_trace(OURS / "kineto_llama3-8b_prefill_b1_s2048.json.gz").work
    ran = work.category == 0
    pauses_us = (work.start_ns[ran][1:] - work.end_ns[ran][:-1]) / 1e3
    assert mean(pauses_us[-18:]) == pytest.approx(2.62, abs=0.005)
