"""Ways to run communication beside compute: what each does to a layer, and what the engine makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.errors import HardwareError
from hardware.laws.gemm import wave_part
from hardware.laws.terms import KernelTerms, time_s
from sim import simulate
from sim.build.lower import lower
from tests.engine_kit import COMPUTE, GPU, REDUCE, graph, run, spans, with_terms
from tests.transformer_kit import build, gemm_flops, kernels
from workloads import WorkloadError
from workloads.families.interleave import two_batches
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import CollectiveWork, ElementwiseWork, GemmWork

SP = {"tp": 4, "sequence_parallel": True}
TILES = SP | {"overlap": "tile_signal", "overlap_chunks": 4, "comm_ctas": 8}
RING = SP | {"overlap": "ring_exchange"}


# -- tile-level signalling: the published recurrence ------------------------------------------------------------


def flash_overlap_s(groups: list[int], *, wave_s: float, sms: int, comm_s: list[float]) -> float:
    """FlashOverlap's own recurrence (its tune/search.py): groups of tiles on the SMs left, each then communicated."""
    compute_end = comm_end = 0.0
    before: float | None = None
    for tiles, comm in zip(groups, comm_s, strict=True):
        if before is not None:
            comm_end = max(compute_end, comm_end) + before
        compute_end += wave_s * math.ceil(tiles / sms)
        before = comm
    return max(compute_end, comm_end) + (before or 0.0)


def engine_end_s(groups: list[int], *, comm_s: list[float], taken: int) -> float:
    """The same on the engine: parts of one kernel on a stream, each one's collective on another, nothing shared."""
    parts = [with_terms(COMPUTE, blocks=tiles, sms_cap=float(GPU.sms - taken)) for tiles in groups]
    free = {"link_bytes": 0.0, "link_energy_j": 0.0, "blocks": 1, "sms_per_block": float(taken)}
    comms = [(with_terms(REDUCE, floor_s=comm, **free), i) for i, comm in enumerate(comm_s)]
    count = len(groups)
    g = graph((0, list(parts)), (0, list(comms)), edges=tuple((i, count + i) for i in range(count)))
    return run(g).end_ps * 1e-12


@pytest.mark.parametrize(
    ("groups", "comm_us", "expected_us"),
    [
        # 98 SMs, 10 us a wave. Communication hides behind the next group, its last one does not.
        ([98, 98, 98], [5.0, 5.0, 5.0], 35.0),
        # It does not keep up: 10, then three times 25.
        ([98, 98, 98], [25.0, 25.0, 25.0], 85.0),
        # 99 tiles are two waves on 98 SMs; the small last group shortens the tail.
        ([99, 196, 10], [12.0, 24.0, 2.0], 10 * (2 + 2) + 24.0 + 2.0),
    ],
)
def test_the_recurrence_by_hand_and_on_the_engine(groups: list[int], comm_us: list[float], expected_us: float) -> None:
    comm_s = [us * 1e-6 for us in comm_us]
    assert flash_overlap_s(groups, wave_s=1e-5, sms=98, comm_s=comm_s) == pytest.approx(expected_us * 1e-6, rel=1e-12)
    assert engine_end_s(groups, comm_s=comm_s, taken=2) == pytest.approx(expected_us * 1e-6, abs=1e-12 * len(groups))


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 60)), min_size=1, max_size=8),
    st.sampled_from([2, 4, 16]),
)
def test_the_engine_equals_the_recurrence(drawn: list[tuple[int, int]], taken: int) -> None:
    groups, comm_s = [tiles for tiles, _ in drawn], [us * 1e-6 for _, us in drawn]
    expected = flash_overlap_s(groups, wave_s=1e-5, sms=100 - taken, comm_s=comm_s)
    # Equal to the picosecond that each kernel's end is rounded up to.
    assert engine_end_s(groups, comm_s=comm_s, taken=taken) == pytest.approx(expected, abs=2e-12 * len(groups))


@given(st.integers(1, 5000), st.integers(1, 16), st.sampled_from([116.0, 130.0, 132.0]))
def test_parts_of_a_product_add_up_to_it(blocks: int, parts: int, sms: float) -> None:
    whole = KernelTerms(
        floor_s=1e-6, blocks=blocks, cycles_per_block=1e4, tail_cycles=5.0, hbm_bytes=1e8, l2_bytes=3e8,
        core_energy_j=0.5, hbm_energy_j=0.1,
    )  # fmt: skip
    waves = math.ceil(blocks / sms)
    if parts > waves:
        with pytest.raises(HardwareError, match=rf"overlap_chunks = {parts}: a product of {waves} waves"):
            wave_part(whole, index=0, parts=parts, sms=sms)
        return
    cut = [wave_part(whole, index=i, parts=parts, sms=sms) for i in range(parts)]
    for field in ("floor_s", "blocks", "tail_cycles", "hbm_bytes", "l2_bytes", "core_energy_j", "hbm_energy_j"):
        assert sum(getattr(part, field) for part in cut) == pytest.approx(getattr(whole, field)), field
    assert sum(math.ceil(part.blocks / sms) for part in cut) == waves  # whole waves: nothing is lost to the cut
    together = sum(time_s(part, sms=sms, sm_clock_hz=1.5e9) for part in cut)
    assert together == pytest.approx(time_s(whole, sms=sms, sm_clock_hz=1.5e9))


# -- what a layer becomes ---------------------------------------------------------------------------------------


def names(**fields: Any) -> list[str]:
    return [kernel.name for kernel in kernels(build("llama3-8b", **fields))]


def test_tiles_signal_from_one_kernel() -> None:
    found = [k for k in kernels(build("llama3-8b", **TILES)) if k.name == "o_gemm"]
    works = [k.work for k in found if isinstance(k.work, GemmWork)]
    assert [(w.m, w.part, w.beside_ctas) for w in works] == [(1024, (i, 4), 8) for i in range(4)]
    assert names(**TILES) == [
        "add_rmsnorm_attn", *["all_gather_attn", "qkv_gemm"] * 4, "rope", "attention",
        *["o_gemm", "reduce_scatter_attn"] * 4,
        "add_rmsnorm_ff", *["all_gather_ff", "gate_up_gemm"] * 4, "silu_mul", *["down_gemm", "reduce_scatter_ff"] * 4,
    ]  # fmt: skip


def test_a_ring_passes_each_piece_on_while_it_is_multiplied() -> None:
    found = kernels(build("llama3-8b", **RING))
    assert [k.name for k in found[:8]] == [
        "add_rmsnorm_attn", "exchange_attn", "qkv_gemm", "exchange_attn", "qkv_gemm", "exchange_attn", "qkv_gemm",
        "qkv_gemm",
    ]  # fmt: skip
    assert [k.after for k in found[:8]] == [(), (0,), (), (), (1,), (), (3,), (5,)]
    first = next(i for i, k in enumerate(found) if k.name == "o_gemm")
    assert [(k.name, tuple(p - first for p in k.after)) for k in found[first : first + 7]] == [
        ("o_gemm", ()), ("exchange_attn", (0,)), ("o_gemm", ()), ("add_partial", (1,)), ("exchange_attn", (3,)),
        ("o_gemm", ()), ("add_partial", (4,)),
    ]  # fmt: skip
    # n - 1 exchanges of 1/n move what the ring of an all-gather moves.
    sent = sum(k.work.buffer_bytes for k in found if isinstance(k.work, CollectiveWork) and k.name == "exchange_ff")
    assert sent == 2 * 3 / 4 * 1024 * 4096 * 2


@pytest.mark.parametrize("fields", [SP, SP | {"overlap_chunks": 4}, TILES, RING, SP | {"overlap": "two_batch"}])
def test_no_transform_changes_what_is_computed(fields: dict[str, Any]) -> None:
    whole = gemm_flops(build("llama3-70b", batch=2))[0]
    assert sum(gemm_flops(build("llama3-70b", batch=2, **fields))) == pytest.approx(whole, rel=1e-12)


def toy(name: str, collective: bool = False) -> Kernel:
    work = (
        CollectiveWork(op=CollectiveOp.ALL_REDUCE, ranks=(0,), buffer_bytes=1)
        if collective
        else ElementwiseWork(op=Elementwise.COPY, rows=1, width=1, bytes_moved=1)
    )
    return Kernel(name=name, work=work, flops=0.0, bytes_moved=0.0)


def test_two_halves_take_turns() -> None:
    made = two_batches([toy("a"), toy("b"), toy("x", True), toy("c"), toy("y", True)])
    assert [(k.name, k.stream, k.after) for k in made] == [
        ("a", 0, (-3,)), ("b", 0, ()), ("x", 1, (1,)),  # the first half waits for its y of the layer before
        ("a", 0, (-1,)), ("b", 0, ()), ("x", 1, (4,)),
        ("c", 0, (2,)), ("y", 1, (6,)), ("c", 0, (5,)), ("y", 1, (8,)),
    ]  # fmt: skip


def test_a_layer_that_ends_in_compute_needs_no_look_back() -> None:
    made = two_batches([toy("a"), toy("x", True), toy("b")])
    assert [(k.name, k.after) for k in made] == [
        ("a", ()), ("x", (0,)), ("a", ()), ("x", (2,)), ("b", (1,)), ("b", (3,)),
    ]  # fmt: skip


@pytest.mark.parametrize(("layers", "expected_us"), [(1, 30.0), (3, 70.0)])
def test_layers_roll_on_without_a_join(layers: int, expected_us: float) -> None:
    """Halves of 10 us of compute and 10 us of collective: the collectives of all but the last half hide."""
    classes = {"a": COMPUTE, "x": with_terms(REDUCE, sms_per_block=0.0)}
    classes["a"] = with_terms(COMPUTE, sms_cap=90.0, cycles_per_block=10_000.0)  # two waves of 5 us on 90 SMs
    segment = Segment(name="layer", kernels=tuple(two_batches([toy("a"), toy("x", True)])), repeat=layers)
    rank = RankProgram(phases=(Phase(name="p", segments=(segment,)),))
    g = lower(Program(ranks=(rank,)), lambda kernel: classes[kernel.name])
    assert run(g).end_ps == pytest.approx(expected_us * 1e6, abs=10 * layers)


@pytest.mark.parametrize("fields", [{"overlap_chunks": 4}, {"overlap": "tile_signal", "overlap_chunks": 4}])
def test_sums_behind_products_are_cut(fields: dict[str, Any]) -> None:
    found = kernels(build("llama3-8b", tp=2, comm_ctas=8, **fields))
    assert [k.name for k in found] == [
        "add_rmsnorm_attn", "qkv_gemm", "rope", "attention", *["o_gemm", "all_reduce_attn"] * 4,
        "add_rmsnorm_ff", "gate_up_gemm", "silu_mul", *["down_gemm", "all_reduce_down"] * 4,
    ]  # fmt: skip
    assert [k.after for k in found[4:14]] == [(), (4,), (), (6,), (), (8,), (), (10,), (11,), ()]
    sums = [k.work for k in found if isinstance(k.work, CollectiveWork)]
    assert sum(work.buffer_bytes for work in sums) == 2 * 1024 * 4096 * 2 and {work.ctas for work in sums} == {8}
    assert sum(gemm_flops(build("llama3-8b", tp=2, comm_ctas=8, **fields))) == gemm_flops(build("llama3-8b"))[0]


def test_bulk_runs_the_shared_expert_beside_the_exchanges() -> None:
    program = build("deepseek-v3", ep=8, ep_mode="all_to_all", overlap="bulk")
    layer = program.ranks[0].phases[0].segments[1].kernels
    order = [k.name for k in layer]
    assert order[order.index("all_to_all_dispatch") + 1] == "gate_up_shared_gemm"
    assert order[order.index("all_to_all_combine") + 1] == "down_shared_gemm"
    plain = build("deepseek-v3", ep=8, ep_mode="all_to_all").ranks[0].phases[0].segments[1].kernels
    assert sorted(order) == sorted(k.name for k in plain)
    assert {k.stream for k in program.ranks[0].phases[0].segments[0].kernels} == {0}  # dense layers have no experts
    margin = build("deepseek-v3", ep=8, ep_mode="all_to_all", overlap="bulk", sm_margin=True, comm_ctas=8)
    layer = margin.ranks[0].phases[0].segments[1].kernels
    left = {k.name for k in layer if isinstance(k.work, GemmWork) and k.work.beside_ctas == 8}
    assert left == {"gate_up_shared_gemm", "down_shared_gemm"}


# -- on the engine ----------------------------------------------------------------------------------------------


def test_copy_engines_start_beside_a_full_gpu_and_take_nothing() -> None:
    exchange = with_terms(REDUCE, sms_per_block=0.0, waiting_power_w=0.0)
    alone = run(graph((0, [COMPUTE])))
    both = graph((0, [COMPUTE]), (0, [(exchange, 0)]), (1, [(exchange, 0)]))
    records = run(both)
    assert spans(both, records) == [("all_reduce", 0, 0.0, 10.0), ("gemm", 0, 0.0, 10.0), ("all_reduce", 1, 0.0, 10.0)]
    assert records.end_ps == alone.end_ps


def test_a_product_that_leaves_sms_lets_a_collective_start_at_once() -> None:
    def starts(sms_cap: float) -> float:
        product = with_terms(COMPUTE, blocks=400, sms_cap=sms_cap)
        late = replace(REDUCE, lead_s=1e-6)
        g = graph((0, [product]), (0, [(late, 0)]))
        return next(start for name, _, start, _ in spans(g, run(g)) if name == "all_reduce")

    assert (starts(90.0), starts(math.inf) > 30.0) == (1.0, True)


@pytest.mark.parametrize(
    "fields",
    [
        SP | {"overlap": "ring_exchange", "comm_ctas": 0},
        TILES,
        SP | {"overlap_chunks": 4, "comm_ctas": 8, "sm_margin": True},
        {"tp": 4, "overlap": "two_batch"},
        {"tp": 4, "overlap": "tile_signal", "overlap_chunks": 4, "comm_ctas": 16},
    ],
    ids=["ring", "tiles", "margin", "two batches", "tiles of sums"],
)
def test_transforms_hide_communication(fields: dict[str, Any]) -> None:
    base = {"model": "llama3-70b", "layers": 2, "batch": 2, "seq_len": 4096, "lm_head": False, "uncapped": True}
    plain = simulate(**base, tp=4, sequence_parallel="sequence_parallel" in fields)
    cut = simulate(**base, **fields)
    assert cut.exposed_communication_s < plain.exposed_communication_s
    assert cut.tokens == plain.tokens
    busy = cut.energy_by("family")["energy_j"]
    assert busy.sum() == pytest.approx(cut.energy_j, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 2, "overlap": "ring_exchange"},
         "overlap = 'ring_exchange' needs sequence_parallel: its slices of the tokens travel"),
        ({"tp": 2, "overlap_chunks": 3}, "overlap_chunks = 3: does not divide the 1024 tokens of o_gemm"),
        (RING | {"overlap_chunks": 3},
         "overlap = 'ring_exchange' has one chunk a rank, tp = 4: leave overlap_chunks out"),
        (SP | {"overlap": "tile_signal", "comm_ctas": 4},
         "overlap = 'tile_signal' needs overlap_chunks of at least 2: groups of waves that signal"),
        (SP | {"overlap": "tile_signal", "overlap_chunks": 4},
         "overlap = 'tile_signal' needs comm_ctas: the blocks whose SMs the products leave free"),
        (SP | {"overlap_chunks": 4, "sm_margin": True},
         "sm_margin needs comm_ctas: the blocks whose SMs the products leave free"),
        ({"overlap": "two_batch", "batch": 2}, "overlap = 'two_batch' hides collectives: use tp or ep of at least 2"),
        ({"tp": 2, "overlap": "two_batch", "batch": 3},
         "overlap = 'two_batch' cuts the 3 sequences of a rank in two: give an even number"),
        (SP | {"overlap": "two_batch", "overlap_chunks": 2, "batch": 2},
         "overlap = 'two_batch' runs whole collectives: leave overlap_chunks out"),
        ({"tp": 2, "overlap": "bulk"},
         "overlap = 'bulk' needs work that no collective feeds: a shared expert beside the all-to-alls of "
         "ep_mode = 'all_to_all'"),
        (SP | {"comm_ctas": 0}, "comm_ctas = 0 (copy engines) is for overlap = 'ring_exchange': sums need SMs"),
    ],
)  # fmt: skip
def test_transforms_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build("llama3-8b", **fields)
    assert str(error.value) == message


def test_blocks_that_leave_no_sm_are_refused() -> None:
    fields = {
        "model": "llama3-8b",
        "layers": 1,
        "tp": 2,
        "overlap_chunks": 2,
        "sm_margin": True,
        "comm_ctas": 100,
        "gpu": "l4-24gb",
    }
    with pytest.raises(HardwareError, match="comm_ctas = 100: leaves none of 58 SMs to products"):
        simulate(**fields)
