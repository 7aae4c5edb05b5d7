"""Prices of a server's steps: sums equal the engine, tables are shared, what is stored is what was worked out."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sim.engine.fluid import FluidModel
from sim.run.work import Work
from sim.scenario.machine import machine_of
from sim.scenario.spec import Scenario
from sim.serving import parts, price_cache, serve
from sim.serving.cost import Batch, Chunk, Cost, Part
from sim.serving.parts import PartTable, SumPart, played, table_of
from sim.serving.price import StepPrices
from sim.shortcuts.solo import whole_ps

SIZES = [("shared", 300, 0), ("head", 17, 0), ("decode", 24, 912), ("chunk", 257, 128)]


def prices_of(**fields: object) -> StepPrices:
    scenario = Scenario.of(**({"model": "llama3-8b", "phase": "decode"} | fields))
    return StepPrices(scenario=scenario, machine=machine_of(scenario))


@pytest.fixture
def forgotten() -> None:
    """No table of another test."""
    parts._table.cache_clear()
    parts._laid.cache_clear()


def part_work(prices: StepPrices, part: Part, rows: int, context: int) -> Work:
    return prices._work(prices.programs.part(part, rows, context))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4, "sm_clock_mhz": 1200.0},
        {"model": "qwen3-30b-a3b", "tp": 2, "stack": "vllm"},
        {"model": "qwen3-30b-a3b", "ep": 4, "ep_mode": "all_reduce"},
        {"launch": "eager"},
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_part_costs_what_the_engine_says(fields: dict[str, object], share: float) -> None:
    prices = prices_of(**fields)
    target_w = share * prices.machine.limits.fast_limit_w
    for part, rows, context in SIZES:
        work = part_work(prices, part, rows, context)
        table = PartTable(prices.table.key, prices.machine.model, parts.LaidParts())
        table._known = {}  # nothing stored
        quick = table.cost(part, rows, context, target_w, partial(part_work, prices, part))
        assert quick == pytest.approx(played(table.plan(work), target_w), rel=1e-12)


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb"])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.1])
def test_a_kernel_by_itself_is_the_engines_to_the_bit(gpu: str, share: float) -> None:
    prices = prices_of(gpu=gpu, tp=2)
    model, target_w = prices.machine.model, share * prices.machine.limits.fast_limit_w
    laid = parts.LaidParts()
    for part, rows, context in SIZES:
        laid.summed(part_work(prices, part, rows, context), model.sms)
    fluid = FluidModel(model, tuple(laid.classes), [])
    for kind in range(len(laid.classes)):
        sms = fluid.grid(kind).sms
        state = fluid.solve(((kind, sms, False, 1.0),), target_w, model.max_clock_hz)
        expected = (whole_ps(state.rates[0]), state.power_w, state.clock_hz)
        assert parts.LoneKernel(fluid.member(kind, sms, False), model).below(target_w) == expected


def test_a_step_costs_the_same_whatever_was_asked_before() -> None:
    """Contexts on a knot and between two, sizes beside one another, targets on the grid and between."""
    batches = [
        Batch(decoding=decoding, cached=decoding * context, chunks=chunks, ending=len(chunks))
        for decoding in (7, 300)
        for context in (256, 270, 500)
        for chunks in ((), (Chunk(tokens=500, context=500),), (Chunk(tokens=500, context=900),))
    ]
    used = prices_of()
    fast_w = used.machine.limits.fast_limit_w
    asked = [(batch, share * fast_w) for batch in batches for share in (1.0, 0.97, 0.72)]
    costs = [used.whole(*one) for one in asked]
    assert costs == [prices_of().whole(*one) for one in reversed(asked)][::-1]
    assert len(set(costs[::3])) == len(batches)  # of one target: no two batches cost the same


@pytest.mark.parametrize("target_w", [700.0, 655.0, 400.0])
def test_joules_by_themselves_are_those_of_a_steps_parts_to_the_bit(target_w: float) -> None:
    prices = prices_of()
    chunks = (Chunk(tokens=300, context=300), Chunk(tokens=200, context=1200))
    for batch in (Batch(decoding=9, cached=9 * 700, chunks=chunks, ending=1), Batch(decoding=9, cached=9 * 700)):
        cost, joules = prices.step(batch, target_w), prices.joules(batch, target_w)
        prompts = tuple(prompt.energy_j for prompt in cost.prompts)
        assert joules == (cost.shared.energy_j, prompts, cost.head.energy_j, cost.whole.energy_j)


def test_equal_ranks_of_one_stream_are_summed_and_others_run() -> None:
    summed = prices_of(tp=4)
    laid = parts.LaidParts()
    assert isinstance(laid.summed(part_work(summed, "shared", 8, 0), 132), SumPart)
    uneven = prices_of(model="qwen3-30b-a3b", ep=4, ep_mode="all_reduce", expert_skew=1.0)
    assert not isinstance(laid.summed(part_work(uneven, "shared", 64, 0), 132), SumPart)
    assert not isinstance(laid.summed(part_work(prices_of(launch="eager"), "shared", 8, 0), 132), SumPart)


@pytest.mark.usefixtures("forgotten")
def test_servers_that_differ_in_limits_share_a_table_and_clocks_share_what_runs() -> None:
    one, other = prices_of(), prices_of(power_cap_w=400.0)
    slow, wide = prices_of(sm_clock_mhz=900.0), prices_of(tp=2)
    assert one.table is other.table
    assert slow.table is not one.table and slow.table.laid is one.table.laid
    assert wide.table.laid is not one.table.laid


@pytest.mark.usefixtures("forgotten")
def test_what_is_stored_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTLINE_CACHE", str(tmp_path))
    first = serve(model="llama3-8b", requests=30, rate_per_s=10.0, input_tokens=300, output_tokens=20).summary
    known = dict(table_of(*_group()).__dict__["_known"])
    assert known
    parts._table.cache_clear()
    parts._laid.cache_clear()
    monkeypatch.setattr(PartTable, "_sum", lambda *_: pytest.fail("worked out again"))
    assert serve(model="llama3-8b", requests=30, rate_per_s=10.0, input_tokens=300, output_tokens=20).summary == first
    assert table_of(*_group())._known == known


def _group() -> tuple[Scenario, object, None]:
    from sim.serving.spec import ServeSpec

    group = ServeSpec.of(model="llama3-8b").group()
    return group, machine_of(group), None


def test_prices_lie_under_all_that_they_rest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTLINE_CACHE", str(tmp_path))
    kinds = [
        {},
        {"sm_clock_mhz": 900.0},
        {"tp": 2},
        {"model": "qwen3-8b"},
        {"gpu": "h200-sxm-141gb"},
        {"stack": "vllm"},
    ]
    texts = [prices_of(**fields).table.key.text() for fields in kinds]
    assert len(set(texts)) == len(kinds)
    assert not any(" at 0x" in text for text in texts)  # the same in another process
    digest = price_cache.stored_prices(texts[0]).digest
    monkeypatch.setattr(price_cache, "_code", lambda: "another version")
    assert price_cache.stored_prices(texts[0]).digest != digest


PRICES = {("shared", 8, 0, 700.0): Cost(1e-3, 0.5, 1e6), ("decode", 8, 128, 650.0): Cost(2e-3, 0.1 + 0.2, 3e6)}


def test_off_reads_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTLINE_CACHE", "off")
    monkeypatch.setenv("HOME", str(tmp_path))
    stored = price_cache.stored_prices("x")
    stored.write(PRICES)
    assert stored.read() == {}
    assert not list(tmp_path.iterdir())


def damage_head(file: Path) -> None:
    file.write_bytes(b"no database" * 100)


def damage_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    place = data.index(b"shared") + len("shared") + 12
    data[place] ^= 0x55
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def other_format(file: Path) -> None:
    with sqlite3.connect(file) as stored:
        stored.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("damage", [damage_head, damage_middle, cut, other_format])
def test_a_damaged_or_other_file_is_ignored_with_a_line_and_made_anew(
    damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WATTLINE_CACHE", str(tmp_path / "c"))
    stored = price_cache.stored_prices("x")
    stored.write(PRICES)
    assert stored.read() == PRICES
    damage(stored.file)  # type: ignore[operator]
    assert stored.read() == {}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and str(stored.file) in said[0]
    stored.write(PRICES)
    assert stored.read() == PRICES


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WATTLINE_CACHE", str(tmp_path / "file"))
    stored = price_cache.stored_prices("x")
    stored.write(PRICES)
    assert stored.read() == {}
    assert "not used" in capsys.readouterr().err


WRITER = """
import sys
from sim.serving import price_cache
from sim.run.work import Work
from sim.serving.cost import Batch, Chunk, Cost, Part
stored = price_cache.stored_prices("x")
for number in range(40):
    stored.write({("shared", int(sys.argv[1]) + number, 0, 700.0): Cost(number + 0.1, 0.5, 1e6)})
    stored.read()
"""


def test_processes_write_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTLINE_CACHE", str(tmp_path))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(first)], stderr=subprocess.PIPE, text=True)
        for first in (0, 1000)
    ]
    assert [writer.communicate()[1] for writer in writers] == ["", ""]
    found = price_cache.stored_prices("x").read()
    assert len(found) == 80
    assert found["shared", 1007, 0, 700.0] == Cost(7.1, 0.5, 1e6)


def test_no_cache_of_the_command(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from sim.cli import app

    arguments = ["serve", "llama3-8b", "--requests", "5", "--output-tokens", "4", "--json", "--quiet"]
    environment = {"WATTLINE_CACHE": str(tmp_path)}
    without = CliRunner().invoke(app, [*arguments, "--no-cache"], env=environment)
    assert without.exit_code == 0, without.output
    assert not list(tmp_path.iterdir())
    with_cache = CliRunner().invoke(app, arguments, env=environment)
    assert json.loads(with_cache.stdout) == json.loads(without.stdout)


def test_clocks_of_an_objective_and_plans_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.explore.plan.question import Question
    from sim.explore.plan.search import plan

    monkeypatch.setenv("WATTLINE_CACHE", str(tmp_path))

    def stored() -> int:
        with sqlite3.connect(tmp_path / "prices-1.sqlite") as file:
            return int(file.execute("SELECT count(DISTINCT digest) FROM prices").fetchone()[0])

    parts._table.cache_clear()
    options = {"clock_policy": "slo", "slo_tpot_s": 0.05, "requests": 5, "output_tokens": 4}
    serve(model="llama3-8b", **options)
    clocks = stored()
    assert clocks > 1
    plan(Question.of(model="llama3-8b", gpus=2, slo_tpot_s=0.05, modes="aggregated"))
    assert stored() > clocks
