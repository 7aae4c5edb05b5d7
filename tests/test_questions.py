"""The published questions: what their studies count adds up, and bends the way physics says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware.catalog import load_gpu
from sim.errors import MemoryShortError
from sim.scenario.memory import check_memory
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from sim.studies.questions import fusion, optima, split, spread
from sim.studies.questions.page import command

H100 = "h100-sxm-80gb"


def test_parts_of_a_fusion_saving_add_up_to_it() -> None:
    one = fusion.saving(H100, "prefill", "graph", 1, 4096)
    assert sum(one.parts.values()) == pytest.approx(one.energy, abs=1e-12)
    assert one.parts["other"] < 0.2 * one.energy


def test_fusion_saves_more_of_short_work_and_most_where_the_host_holds_the_step_back() -> None:
    short, long = (fusion.saving(H100, "prefill", "graph", 1, tokens) for tokens in (256, 4096))
    assert short.energy > long.energy > 0.0
    graph, eager = (fusion.saving(H100, "decode", launch, 1, 1024) for launch in ("graph", "eager"))
    assert eager.energy > 2 * graph.energy > 0.0
    # At the power cap joules follow seconds; below it a busier GPU draws more.
    assert long.energy == pytest.approx(long.time, rel=0.1)
    assert graph.time > 1.5 * graph.energy
    # Six kernels a layer are gone: sum, two of three products, one of two, the other sum, the gate.
    assert graph.kernels[0] - graph.kernels[1] == 6 * 80


def test_fusion_page_holds_every_case_and_both_verdicts() -> None:
    text = fusion.page(fusion.CASES[:1] + fusion.CASES[5:6])
    assert text.count("| H100 |") == text.count("| A100 |") == 2
    assert "- Prefill on `h100-sxm-80gb`: " in text and "- Decode on `a100-sxm-80gb`: " in text
    assert all(word in text for word in ("4.37 %", "8.18 %"))


def test_a_page_is_written_whole_or_its_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("fusion", lambda: "text\n", ["--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == "text\n"
    assert command("fusion", lambda: "text\n", ["--out", str(tmp_path / "none" / "page.md")]) == 2
    assert capsys.readouterr().err.startswith("fusion: cannot write ")


def test_decode_spreads_with_batch_and_prefill_hardly() -> None:
    prefill, decode = (spread.points(H100, phase, (1, 16)) for phase in ("prefill", "decode"))
    # A step reads each weight once: sixteen sequences come nearly for one, never for less.
    by_batch = spread.spreads(decode, lambda point: (point.tp, point.seq_len))
    assert 16.0 > max(by_batch) > 12.0
    assert spread.spread(decode) >= max(by_batch)
    assert spread.spread(prefill) < 2.5
    # GPUs that move data draw less than GPUs that multiply.
    assert all(0.0 < point.all_reduce < point.all_reduce_time < 1.0 for point in (*prefill, *decode))


def test_spread_page_says_what_is_published_and_what_ours_is() -> None:
    text = spread.page((("decode", (1, 64)),))
    assert text.count("published up to 52.9 times, ours up to ") == len(spread.GPUS)
    assert text.count("23.0% is above ours") == len(spread.GPUS)


def test_quickest_and_most_frugal_layout_part_less_the_more_idle_gpus_cost() -> None:
    runs = [optima.costs(H100, "llama3-8b", batch, 512, 64) for batch in (1, 16)]
    requests = [run["request"] for run in runs]
    assert all(len(layouts) == len(optima.LAYOUTS) for layouts in requests)
    free = optima.optima(requests)
    assert free.scenarios == 2 and free.differ == 1.0 and free.energy_excess > 0.2
    # The more the waiting GPUs draw, the less it pays to leave them waiting.
    waiting = [optima.optima(map(optima.whole_node(watts), requests)).energy_excess for watts in (0.0, 100.0, 400.0)]
    assert waiting[0] == pytest.approx(free.energy_excess) and waiting[0] > waiting[1] > waiting[2]
    frugal = optima.optima(map(optima.whole_node(1e6), requests)).commonest[1]
    assert frugal in optima.all_used(requests[0])
    assert set(optima.all_used(requests[0])) == {(8, 1), (4, 2), (2, 4)}


def test_layouts_that_lack_memory_for_the_cache_are_left_out_of_both_phases() -> None:
    run = optima.costs(H100, "llama3-70b", 1, 512, 64)
    assert set(run["prefill"]) == set(run["decode step"]) == set(run["request"])
    assert (1, 1) not in run["request"] and (8, 1) in run["request"]


def test_largest_batch_is_the_last_that_memory_holds() -> None:
    batch = split.largest_batch(H100, 4, 4096 + 256)
    fields = {"model": "llama3-70b", "gpu": H100, "tp": 4, "phase": "decode", "seq_len": 4096 + 256}
    spec = load_gpu(H100)
    check_memory(resolve_scenario(Scenario.of(**fields, batch=batch)), spec)
    with pytest.raises(MemoryShortError):
        check_memory(resolve_scenario(Scenario.of(**fields, batch=batch + 1)), spec)
    assert split.largest_batch(H100, 8, 4096 + 256) > 2 * batch  # weights take a smaller part


def test_a_split_meets_its_limits_and_is_never_dearer_than_one_group_for_both_but_for_the_move() -> None:
    found = split.split(H100, 1024, 256)
    assert found.prefill.latency_s <= split.TTFT_S and found.decode.latency_s <= 255 * split.TPOT_S
    together = sum(side.energy_j for side in found.together)
    assert found.prefill.energy_j + found.decode.energy_j <= together <= sum(side.energy_j for side in found.free)
    assert found.saving == pytest.approx(1 - found.energy_j / together)
    # 320 KiB a token over NVLink: far from free in time, next to nothing in joules.
    assert 0.0 < found.transfer.energy_j < 0.01 * found.energy_j
    assert 1024 * 327_680 / 2 / 450e9 < found.transfer.time_s < 5e-3


def test_prefill_wants_fewer_gpus_than_decode() -> None:
    found = split.split(H100, 1024, 256)
    assert found.prefill.tp < found.decode.tp
    # Where the voltage falls no more, a lower clock only takes longer.
    sides = {clock: split.decode_side(H100, 8, clock, 1024, 256) for clock in split.clocks(H100)}
    energies = [side.energy_j for side in sides.values() if side is not None]
    assert min(energies) < 0.8 * energies[0]
