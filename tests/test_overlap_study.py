"""``wattline overlap``: the grid, what is left out, advice, and a page whose points open their timelines."""

from __future__ import annotations

import base64
import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.explore.by_operator import per_operator
from sim.explore.operators import choices_of, flag
from sim.explore.overlap import (
    OverlapPoint,
    advice,
    default_of,
    headline_pair,
    study,
    transform,
)
from sim.explore.overlap_grid import read_grid, scenarios
from sim.explore.overlap_page import write_page
from sim.scenario.spec import Scenario
from tests.browser_kit import DESKTOP, PHONE, chromium, opened
from tests.command_kit import run
from workloads import Layout, WorkloadError, build_program, load_model
from workloads.model_file import parse_model

BASE = {"model": "llama3-70b", "layers": 1, "seq_len": 1024}


def grid(**axes: Any) -> list[Scenario]:
    return scenarios(BASE, {"tp": [2], "comm_ctas": [8], "overlap_chunks": [1, 4], **axes})


def test_the_grid_holds_each_schedule_once() -> None:
    found = grid(overlap=["chunks", "ring_exchange", "tile_signal", "two_batch"], sm_margin=[False, True])
    labels = [(transform(s), s.sm_margin) for s in found]
    assert labels == [
        ("sequential", False), ("4 chunks", False), ("4 chunks with SM margin", True), ("ring exchange", False),
        ("4 groups of signalling tiles", False), ("two micro-batches", False),
        ("two micro-batches with SM margin", True),
    ]  # fmt: skip
    assert all(s.sequence_parallel and not s.lm_head and s.phase == "prefill" for s in found)


def test_experts_are_spread_over_the_group() -> None:
    grid = {"tp": [8], "overlap": ["chunks", "bulk", "two_batch"], "comm_ctas": [8]}
    found = scenarios({"model": "deepseek-v3"}, grid)
    assert [(s.overlap, s.tp, s.ep, s.ep_mode, s.sequence_parallel) for s in found] == [
        ("chunks", 1, 8, "all_to_all", False), ("bulk", 1, 8, "all_to_all", False),
        ("two_batch", 1, 8, "all_to_all", False),
    ]  # fmt: skip


def test_pieces_of_exchanges_between_experts_are_refused_by_what_was_asked() -> None:
    """The group of ``tp`` holds experts: the message says so, and what cuts something instead."""
    base = {"model": "qwen3-30b-a3b", "layers": 1, "batch": 2}
    with pytest.raises(ScenarioError, match=r"chunks = 2 of qwen3-30b-a3b: its 2 ranks hold experts.*two_batch, or"):
        scenarios(base, {"tp": [2], "overlap_chunks": [1, 2]})
    found = scenarios(base | {"ep_mode": "all_reduce"}, {"tp": [2], "overlap_chunks": [2], "comm_ctas": [8]})
    assert [(one.tp, one.ep, one.overlap_chunks) for one in found] == [(2, 2, 2)]


def test_what_cannot_run_is_left_out_by_name_and_nothing_left_is_an_error() -> None:
    points, left_out = study(grid(overlap_chunks=[1, 3]))
    assert [transform(p.scenario) for p in points] == ["sequential"]
    assert [one.reason for one in left_out] == ["overlap_chunks = 3: does not divide the 2048 tokens over tp = 2 ranks"]
    with pytest.raises(Exception, match="overlap_chunks = 3: does not divide"):
        study(grid(overlap_chunks=[3]))


def point(latency_s: float, energy_j: float, **fields: Any) -> OverlapPoint:
    scenario = Scenario.of(model="llama3-70b", tp=2, batch=2, sequence_parallel=True, **fields)
    return OverlapPoint(
        scenario=scenario, tokens=4096, latency_s=latency_s, energy_j=energy_j, exposed_communication_s=0.0,
        on_front=True,
    )  # fmt: skip


def test_advice_compares_the_best_overlap_with_the_best_in_sequence_and_names_the_default() -> None:
    sequential = point(1.0, 100.0, comm_ctas=32)
    few = point(1.4, 130.0, comm_ctas=4)
    assert advice([sequential, few, point(1.26, 117.0, comm_ctas=4, overlap_chunks=4)]) == (
        "TP2, batch 2, sequential, 32 CTAs is best here, quickest and most frugal per token; the best overlap costs "
        "17.0 % energy and 26.0 % time over the best schedule in sequence (TP2, batch 2, 4 chunks, 4 CTAs, against "
        "32 CTAs)."
    )
    default = point(1.5, 150.0)
    assert advice([sequential, few, point(0.9, 99.0, comm_ctas=4, overlap_chunks=4)], default) == (
        "TP2, batch 2, 4 chunks, 4 CTAs is best here, quickest and most frugal per token; the best overlap saves 1.0 % "
        "energy and 10.0 % time over the best schedule in sequence (TP2, batch 2, 4 chunks, 4 CTAs, against 32 CTAs), "
        "and saves 34.0 % energy and 40.0 % time over the default (the library's CTAs in sequence)."
    )
    assert advice([sequential, point(0.9, 110.0, comm_ctas=32, overlap="two_batch")]) == (
        "TP2, batch 2, two micro-batches, 32 CTAs is quickest per token, TP2, batch 2, sequential, 32 CTAs most "
        "frugal; the best overlap costs 10.0 % energy and saves 10.0 % time over the best schedule in sequence "
        "(TP2, batch 2, two micro-batches, 32 CTAs, against 32 CTAs)."
    )


def test_a_grid_file_and_everything_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(
        '[base]\nmodel = "llama3-70b"\nlayers = 1\nseq_len = 1024\n[grid]\ntp = [2]\ncomm_ctas = [4, 8]\n'
        'overlap = ["chunks", "two_batch"]\noverlap_chunks = [1, 4]\n'
    )
    code, out, err = run(
        ["overlap", "grid.toml", "--ctas", "8", "--json", "--csv", "o.csv", "--plot", "o.png", "--html", "o.html",
         "--traces", "front"],
        capsys,
    )  # fmt: skip
    assert (code, err, out.count("\n")) == (0, "", 1)
    document = json.loads(out)
    points = document["points"]
    assert {p["comm_ctas"] for p in points} == {8}  # the flag won
    assert [p["transform"] for p in points] == ["sequential", "4 chunks", "two micro-batches"]
    fronts = [p["trace"] for p in points if p["pareto"]]
    assert fronts and all(Path(name).exists() for name in fronts) and document["left_out"] == []
    assert len(Path("o.csv").read_text().splitlines()) == 4
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")
    page = Path("o.html").read_text()
    assert (
        page.count("http")
        - page.count("http://www.w3.org")
        - page.count("http://purl.org")
        - page.count("https://matplotlib.org")
        - page.count("http://creativecommons.org")
        == 1
    )  # nothing is fetched: the viewer opens on a click
    assert "<title>Overlap study: llama3-70b on 2 x h100-sxm-80gb, prefill of 1,024 tokens</title>" in page
    carried = re.findall(r"id='t(\d+)' data-name='([^']+)'>([^<]+)</script>", page)
    assert len(carried) == len(points)
    for number, name, data in carried:
        assert f'xlink:href="#t{number}"' in page and f"href='#t{number}'" in page
        trace = json.loads(gzip.decompress(base64.b64decode(data)))
        assert len(trace["traceEvents"]) > 50 and name.startswith("TP2, batch 2, ")


def test_the_page_sorts_and_fits_a_phone(tmp_path: Path) -> None:
    base = {"model": "llama3-70b", "layers": 1, "seq_len": 1024, "tp": 2}
    points, _ = study(scenarios(base, {"comm_ctas": [4, 16], "overlap_chunks": [1, 2]}), events=False)
    write_page(points, tmp_path / "page.html", default=default_of(points))
    best, sequential = headline_pair(points) or (points[0], points[0])
    energy, time = best.energy_j / sequential.energy_j - 1.0, best.latency_s / sequential.latency_s - 1.0
    with chromium() as browser:
        for width in (DESKTOP, PHONE):
            with opened(browser, tmp_path / "page.html", width=width) as page:
                assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
                tiles = page.locator(".tile b").all_text_contents()
                assert tiles[0] == f"{best.latency_s * 1e3:.4g} ms, {best.energy_j:.4g} J"
                assert tiles[2] == f"energy {energy:+.1%}, time {time:+.1%}".replace("%", " %")
                assert page.locator("svg:visible").count() == 1
                page.click("th button:text-is('ms')")
                quick = page.locator("tbody tr td:nth-child(2)").all_text_contents()
                assert quick == sorted(quick, key=float) and len(quick) == len(points)
                page.click("th button:text-is('ms')")
                assert page.locator("tbody tr td:nth-child(2)").all_text_contents() == quick[::-1]
                page.click("th button:text-is('schedule')")
                order = page.locator("tbody tr td:first-child").all_text_contents()
                assert order == [point.label for point in points]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp = [2]\n", "unknown key 'tp' in g.toml: a grid has two tables, [base] and [grid]"),
        ("base = 3\n", "g.toml: base = 3: give a [base] table"),
        ("[grid]\ntp = 2\n", "g.toml: grid.tp = 2: give a list of values"),
        ("[grid]\ntp = []\n", "g.toml: grid.tp = []: give a list of values"),
        ("[grid]\ntp = [2]\n", "overlap study: model is missing: give a value"),
        ('[base]\nmodel = "llama3-8b"\n[grid]\nchunks = [2]\n', "unknown key 'chunks' in overlap study: did you mean "),
        (
            '[base]\nmodel = "llama3-8b"\n[grid]\noverlap = ["chunk"]\n',
            "overlap study: overlap = 'chunk': input should",
        ),
    ],
)
def test_a_grid_file_is_read_strictly(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("g.toml").write_text(text)
    code, out, err = run(["overlap", "g.toml"], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"wattline: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chunks", "0"], "Invalid value for '--chunks': '0': every number must be at least 1"),
        (["--overlap", "chunk"],
         "Invalid value for '--overlap': 'chunk' is not one of chunks, ring_exchange, tile_signal, two_batch, bulk, "
         "all"),
        ([], "overlap study: model is missing: give a value"),
    ],
)  # fmt: skip
def test_flags_are_read_strictly(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["overlap", *arguments], capsys) == (2, "", f"wattline: {message}\n")


def test_rolling_layers_have_slices_that_follow_one_another(tmp_path: Path) -> None:
    scenario = Scenario.of(**BASE | {"layers": 3, "tp": 2, "batch": 2, "overlap": "two_batch", "lm_head": False})
    points, _ = study([scenario], traces=tmp_path)
    assert points[0].trace is not None
    events = json.loads(gzip.decompress(points[0].trace.read_bytes()))["traceEvents"]
    layers = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "layer" and e["pid"] == 0)
    assert len(layers) == 3
    assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(layers))


def test_the_grid_of_the_page_is_a_grid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "overlap.md").read_text(encoding="utf-8")
    example = next(one for one in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL) if "[grid]" in one)
    (tmp_path / "grid.toml").write_text(example, encoding="utf-8")
    # Per group size and number of blocks: sequential, 4 chunks and two halves with and without margin, tiles.
    assert len(scenarios(*read_grid(tmp_path / "grid.toml"))) == 2 * 2 * (1 + 2 + 2 + 1)


def test_an_unknown_field_of_the_base_is_named() -> None:
    with pytest.raises(ScenarioError, match="unknown key 'modle' in overlap study: did you mean 'model'"):
        scenarios({"model": "llama3-70b", "modle": 1}, {})


def test_the_split_of_sms_is_searched_beside_chunks_and_blocks() -> None:
    axes = {"tp": [4], "comm_ctas": [8], "overlap_chunks": [1, 2], "comm_sms": [0, 16]}
    base = {"model": "llama3-70b", "layers": 1}
    found = scenarios(base, axes)
    assert [(one.overlap_chunks, one.sm_partitions) for one in found] == [
        (1, None),
        (2, None),
        (2, (("compute", 116), ("comm", 16))),
    ]
    for bad, message in (
        ({"comm_sms": [132]}, "comm_sms = 132: the GPU has 132 SMs, give 0 to 131"),
        ({"comm_sms": [8], "sm_partitions": ["a=8"]}, "comm_sms makes the sm_partitions: give one of them"),
    ):
        with pytest.raises(ScenarioError, match=message):
            scenarios(base, {"tp": [4], "comm_ctas": [8], "overlap_chunks": [2], **bad})


# -- one operator at a time -----------------------------------------------------------------------------------------


TWO_LAYERS = {"model": "llama3-70b", "layers": 2, "seq_len": 4096, "batch": 2, "tp": 2, "lm_head": False}


@pytest.mark.parametrize("rows", [False, True])
def test_the_same_setting_for_each_operator_is_one_for_all(rows: bool) -> None:
    products = ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm") if rows else ("o_gemm", "down_gemm")
    base = TWO_LAYERS | {"sequence_parallel": rows, "comm_ctas": 8}
    for_all = simulate(**base, overlap_chunks=4)
    each = simulate(**base, overlap_ops=dict.fromkeys(products, "4x8"))
    assert (each.latency_s, each.energy_j) == (for_all.latency_s, for_all.energy_j)
    assert each.standing.status == "unchecked"  # no run with settings by operator was measured


@pytest.mark.parametrize(
    "spelling",
    [
        "o_gemm=4x8,down_gemm=2",
        {"o_gemm": "4x8", "down_gemm": 2},
        {"o_gemm": {"chunks": 4, "comm_ctas": 8}, "down_gemm": "2"},
    ],
)
def test_settings_by_operator_are_spelled_as_text_or_tables(spelling: Any) -> None:
    found = Scenario.of(model="llama3-8b", tp=2, overlap_ops=spelling)
    assert found.overlap_ops == (("o_gemm", "4x8"), ("down_gemm", "2"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap_ops": "o_gemm=4y8"}, "overlap_ops = '4y8': give chunks, or chunks x blocks, for example 4x8"),
        ({"overlap_ops": "o_gemm=4x0"}, "overlap_ops = '4x0': sums need SMs"),
        ({"overlap_ops": "o_gemm=4,o_gemm=2"}, "overlap_ops = o_gemm, o_gemm: give each node one setting"),
        ({"overlap_ops": "o_gemm=4", "tp": 1}, "overlap_ops needs tp of at least 2"),
        ({"overlap_ops": "o_gemm=4", "overlap_chunks": 2}, "leave overlap and overlap_chunks out"),
        ({"overlap_ops": {"o_gemm": {"pieces": 4}}}, "overlap_ops.o_gemm = {'pieces': 4}: give chunks"),
        ({"overlap_ops": {"o_gemm": {"chunks": "many"}}}, "overlap_ops = 'many': give chunks"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(message)):
        Scenario.of(**({"model": "llama3-8b", "tp": 2} | fields))


def test_settings_by_operator_are_never_worse_than_the_best_for_all() -> None:
    axes = {"tp": [2], "batch": [2], "comm_ctas": [8, 16], "overlap_chunks": [1, 2, 4]}
    points, _ = study(scenarios(TWO_LAYERS | {"sequence_parallel": True}, axes))
    found = per_operator(points)
    assert found is not None
    frugal, quick = found.each
    assert frugal.energy_j <= min(p.energy_j for p in points)
    assert quick.latency_s <= min(p.latency_s for p in points)
    document = found.document()
    assert document["latency"]["latency_saved"] == 1.0 - quick.latency_s / found.for_all[1].latency_s >= 0.0
    # Here the best setting for all is in sequence, and yet some products gain from chunks.
    assert transform(found.for_all[1].scenario) == "sequential"
    assert any(not text.startswith("1") for _, text in quick.scenario.overlap_ops or ())
    again = simulate(quick.scenario, shortcuts=True)
    assert (again.latency_s, again.energy_j) == (quick.latency_s, quick.energy_j)
    assert "over the best one for all (sequential, 16 CTAs)" in found.words()


def test_products_that_can_be_cut_follow_from_the_layout() -> None:
    plain = Scenario.of(model="llama3-8b", tp=2)
    assert choices_of(plain).products == ("o_gemm", "down_gemm")
    assert choices_of(plain).stages == (("gate_up_gemm", "down_gemm"),)
    rows = Scenario.of(model="llama3-8b", tp=2, sequence_parallel=True)
    assert choices_of(rows).products == ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm")
    assert choices_of(Scenario.of(model="gpt2", tp=2)).products == ("o_gemm", "down_gemm")
    assert choices_of(Scenario.of(model="mixtral-8x7b", tp=2)).products == ("o_gemm",)


def test_a_grid_without_chunks_has_nothing_to_set_by_operator() -> None:
    points, _ = study(grid(overlap_chunks=[1]))
    assert per_operator(points) is None


def test_a_model_of_its_own_says_on_its_nodes_what_overlaps(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "overlap.md").read_text(encoding="utf-8")
    text = next(part for part in re.findall(r"```toml\n(.*?)```", page, re.S) if "staged-8b" in part)
    (tmp_path / "staged.toml").write_text(text)
    program = build_program(
        load_model(str(tmp_path / "staged.toml")), Layout(tp=2), phase="prefill", batch=1, seq_len=4096
    )
    layer = [(kernel.name, kernel.stream) for kernel in program.ranks[0].phases[0].segments[0].kernels]
    assert layer == [("up_gemm", 0), ("gelu", 0), ("down_gemm", 0), ("all_reduce_down", 1)] * 4
    # The study has a row of that, and one that is in sequence in truth: as the model is without its settings.
    base = {"model": str(tmp_path / "staged.toml"), "layers": 2}
    points, _ = study(scenarios(base, {"tp": [2], "batch": [2], "comm_ctas": [8], "overlap_chunks": [1, 4]}))
    assert [transform(point.scenario) for point in points] == ["as the model says", "sequential", "4 chunks"]
    (tmp_path / "plain.toml").write_text(re.sub(r"(overlap_stage|chunks|comm_ctas) = \d+\n", "", text))
    plain, _ = study(scenarios(base | {"model": str(tmp_path / "plain.toml")},
                               {"tp": [2], "batch": [2], "comm_ctas": [8], "overlap_chunks": [1, 4]}))  # fmt: skip
    assert [(p.latency_s, p.energy_j) for p in points[1:]] == [(p.latency_s, p.energy_j) for p in plain]
    found = per_operator(points)
    assert found is not None and found.for_all[0].sequential
    said = found.each[0].scenario
    again = simulate(**base, tp=2, batch=2, sequence_parallel=said.sequence_parallel, lm_head=False,
                     comm_ctas=said.comm_ctas, overlap_ops=flag(said), shortcuts=True)  # fmt: skip
    assert again.energy_j == found.each[0].energy_j
    with pytest.raises(WorkloadError, match="up_gemm: overlap_stage, comm_ctas without chunks: give the pieces"):
        parse_model(text.replace("chunks = 4\n", "", 1), where="m.toml")
