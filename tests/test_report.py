"""HTML reports: their sums are the run's, and a browser shows them on a phone and a desktop, light and dark."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sim import simulate
from sim.cli import app, main
from sim.errors import SimError
from sim.pages import page as page_module
from sim.pages.run import run_page, write_report
from sim.pages.served import served_page, write_served_report
from sim.pages.sums import binned, kernel_sums, mean_rates, split_of
from sim.result.timeline import Timeline
from sim.serving import serve
from sim.serving.result import ServeResult
from tests.browser_kit import DESKTOP, PHONE, chromium, opened

RUNS = {
    "one GPU": {"model": "llama3-8b", "layers": 2, "seq_len": 2048},
    "chunks": {"model": "llama3-70b", "layers": 2, "tp": 4, "seq_len": 2048, "overlap_chunks": 4},
    "generate": {"model": "llama3-8b", "layers": 2, "tp": 2, "phase": "generate", "seq_len": 512, "output_len": 8},
    "stages": {"model": "llama3-70b", "layers": 4, "pp": 2, "tp": 2, "batch": 4, "seq_len": 1024},
    "experts": {"model": "qwen3-30b-a3b", "layers": 2, "ep": 4, "ep_mode": "all_to_all", "expert_skew": 1.0},
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Timeline:
    return simulate(**RUNS[request.param])


def test_bins_hold_the_energy_of_the_run(run: Timeline) -> None:
    bins = binned(run.outcome, 300)
    width_s = np.diff(bins.edges_s)
    per_gpu = bins.power_w @ width_s
    for joules, ranks in zip(per_gpu, run.outcome.folding.classes, strict=True):
        assert joules == pytest.approx(run.energy_j_per_gpu[ranks[0]], rel=1e-9)
    by_family = {family: float(watts @ width_s) for family, watts in bins.family_w.items()}
    assert sum(by_family.values()) == pytest.approx(run.energy_j, rel=1e-9)
    for family, (energy_j, _) in run.sums_by("family").items():  # exact but for kernels that share a GPU
        assert by_family[family] == pytest.approx(energy_j, rel=0.05, abs=1e-9)


def test_bins_average_power_and_clock_as_the_table_of_steps_says(run: Timeline) -> None:
    bins = binned(run.outcome, 7)
    gpu = run.outcome.folding.classes[-1][0]
    steps = run.power[run.power["gpu"] == gpu]
    begin, end = steps["start_s"].to_numpy(), (steps["start_s"] + steps["duration_s"]).to_numpy()
    for mine, column in (
        (bins.power_w, "power_w"),
        (bins.clock_hz, "sm_clock_hz"),
        (bins.hbm_bytes_per_s, "hbm_bytes_per_s"),
    ):
        for number in range(7):
            low, high = bins.edges_s[number : number + 2]
            inside = np.clip(np.minimum(end, high) - np.maximum(begin, low), 0.0, None)
            assert mine[-1, number] == pytest.approx(float(inside @ steps[column] / (high - low)), rel=1e-6)


def test_kernels_and_idling_add_up(run: Timeline) -> None:
    rows = kernel_sums(run.outcome)
    assert sum(row.launches for row in rows) == run.outcome.kernels
    assert sum(row.energy_j for row in rows) + run.sums_by("phase")["idle"][0] == pytest.approx(run.energy_j, rel=1e-9)
    by_name = run.kernels.groupby("kernel")["energy_j"].sum()
    for name in {row.name for row in rows}:
        assert sum(row.energy_j for row in rows if row.name == name) == pytest.approx(by_name[name], rel=1e-9)


def test_no_kernel_is_above_the_roof_of_its_gpu(run: Timeline) -> None:
    gpu = run.machine.gpu
    peak = gpu.tensor_flops_per_cycle_per_sm("bf16") * gpu.sms * gpu.max_clock_hz
    assert all(row.flops / row.time_s <= peak for row in kernel_sums(run.outcome))


def test_the_time_of_a_gpu_is_split_without_rest(run: Timeline) -> None:
    split = split_of(run.outcome, run.exposed_and_waiting_s)
    parts = [split.compute_s, split.hidden_s, *split.exposed_s.values(), split.waiting_s, split.idle_s]
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx(run.latency_s, rel=1e-9)
    assert sum(split.exposed_s.values()) + split.waiting_s == pytest.approx(run.exposed_communication_s, rel=1e-9)


def test_overlapping_rates_add_up() -> None:
    means = mean_rates(
        np.array([0.0, 5.0, 6.0]), np.array([10.0, 6.0, 6.0]), np.array([2.0, 10.0, 99.0]), np.array([0.0, 5.0, 10.0])
    )
    assert means.tolist() == [2.0, 4.0]


def test_page_says_what_the_run_says(run: Timeline) -> None:
    page = run_page(run)
    tiles = {label: value for label, value, _ in page.tiles}
    assert tiles["energy, all GPUs"] == f"{run.energy_j:.4g} J"
    titles = [section.title for section in page.sections]
    assert ("Communication, hidden and exposed" in titles) == (run.gpus > 1)
    top = next(section.table for section in page.sections if section.title == "Top kernels")
    assert top is not None
    assert {row[1].split(" ")[0] for row in top.rows} <= set(run.kernels["kernel"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"power_cap_w": 500.0}, r"cap 500 W; the limiters settled at {clock:.0f} MHz"),
        ({"sm_clock_mhz": 1200.0}, r"cap 700 W; the limiters settled at 1200 MHz"),
        ({"uncapped": True}, r"cap off; the limiters settled at 1980 MHz"),
        ({"power_cap_w": 500.0, "regime": "cold"}, r"cap 500 W; at the end clocks yielded to {power:.0f} W"),
        ({"uncapped": True, "regime": "cold"}, r"cap off; clocks yield to no power"),
    ],
)
def test_page_says_where_the_limiters_stood(fields: dict[str, Any], told: str) -> None:
    run = simulate(model="llama3-70b", layers=4, tp=2, seq_len=4096, **fields)
    basis = next(section.table for section in run_page(run).sections if section.title == "What these numbers rest on")
    assert basis is not None
    assert dict(basis.rows)["power"] == told.format(clock=run.clock_limit_hz[0] / 1e6, power=run.power_limit_w[0])


def test_the_page_is_one_file_that_names_its_sources(tmp_path: Path) -> None:
    run = simulate(**RUNS["chunks"])
    write_report(run, tmp_path / "run.html")
    text = html.unescape((tmp_path / "run.html").read_text())
    assert "wattline simulate --model llama3-70b --layers 2 --tp 4 --overlap-chunks 4 --report run.html" in text
    assert run.machine.profile.provenance.command in text
    assert all(name in text for name in run.machine.profile.provenance.files)
    assert all(source in text for source in run.machine.gpu.sources.values())
    assert not re.search(r"(src|href)=", text)  # nothing is fetched
    figures = json.loads(text.split('id="figures" type="application/json">')[1].split("</script>")[0])
    assert len(figures) == 5
    assert len(text) < 2.5e6


def test_names_of_models_cannot_break_out_of_the_page() -> None:
    page = run_page(simulate(**RUNS["one GPU"]))
    evil = "</script><script>alert(1)</script>"
    bad = page_module.Page(
        title=evil, lead=evil, tiles=[(evil, evil, evil)], sections=page.sections[:1], command=evil, made_by=evil
    )
    assert "alert(1)</script>" not in page_module.html(bad)


def test_command_line_writes_it_and_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["simulate", "--model", "llama3-8b", "--layers", "1", "--seq-len", "512", "--quiet"]
    result = CliRunner().invoke(app, [*common, "--report", str(tmp_path / "run.html"), "--json"])
    assert json.loads(result.stdout)["files"]["report"] == str(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size > 1e6
    for target in (tmp_path / "run.pdf", tmp_path / "absent" / "run.html"):
        with pytest.raises(SystemExit) as stop:
            main([*common, "--report", str(target)])
        assert stop.value.code == 2
        assert str(target) in capsys.readouterr().err.splitlines()[-1]
        assert not target.exists()


def test_serve_writes_one_too(tmp_path: Path) -> None:
    path = tmp_path / "served.html"
    flags = ["serve", "--model", "llama3-8b", "--requests", "5", "--output-tokens", "5", "--quiet"]
    result = CliRunner().invoke(app, [*flags, "--report", str(path)])
    assert result.stdout.rstrip().endswith(f"report: {path}  (open it in a browser)")
    assert "wattline serve --model llama3-8b --requests 5 --output-tokens 5 --report served.html" in path.read_text()


def test_it_says_which_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "installed", lambda _: False)
    with pytest.raises(SimError, match=r"needs plotly and jinja2: pip install 'wattline\[report\]'"):
        page_module.check_report(Path("run.html"))


@pytest.fixture(scope="module")
def served() -> ServeResult:
    return serve(
        model="llama3-8b", replicas=2, rate_per_s=30.0, requests=120, input_tokens=500, output_tokens=40,
        length_spread=0.5, slo_ttft_s=0.05, slo_tpot_s=0.02,
    )  # fmt: skip


def test_the_page_of_a_server_says_what_the_run_says(served: ServeResult) -> None:
    page, data = served_page(served), served.summary
    tiles = {label: value for label, value, _ in page.tiles}
    assert tiles["requests"] == "120"
    assert tiles["within the objective"] == f"{data['slo_share']:.1%}"
    assert page.command.startswith("wattline serve --model llama3-8b --replicas 2 --rate-per-s 30 --requests 120")
    slowest = next(section.table for section in page.sections if section.title == "The slowest requests")
    assert slowest is not None
    assert slowest.rows[0][0] == str(served.requests["ttft_s"].idxmax())
    power = page.sections[0].figures[0].data[0]
    mine = served.stretches[served.stretches["replica"] == 0]
    joules = float(np.asarray(power.y, dtype=float)[:-1] @ np.diff(np.asarray(power.x, dtype=float)))
    assert joules == pytest.approx(mine["energy_j"].sum(), rel=1e-4)  # single precision on the page


def test_a_server_without_objective_or_second_token_has_a_page_too() -> None:
    run = serve(model="llama3-8b", concurrency=2, requests=4, input_tokens=64, output_tokens=1)
    labels = [label for label, _, _ in served_page(run).tiles]
    assert "time per output token, p99" not in labels
    assert "within the objective" not in labels


def test_browser_shows_them_at_every_width_and_scheme(served: ServeResult, tmp_path: Path) -> None:
    from PIL import Image

    write_report(simulate(**RUNS["chunks"]), tmp_path / "run.html")
    write_served_report(served, tmp_path / "served.html")
    with chromium() as browser:
        for name, figures in (("run", 5), ("served", 4)):
            with opened(browser, tmp_path / f"{name}.html", width=PHONE) as page:
                page.wait_for_function(f"document.documentElement.dataset.drawn === '{figures}'", timeout=120_000)
                for width, scheme in ((PHONE, "dark"), (DESKTOP, "light")):  # an open page follows
                    page.set_viewport_size({"width": width, "height": 900})
                    page.emulate_media(color_scheme=scheme)
                    assert page.evaluate("document.documentElement.scrollWidth") == width
                    traces = "[...document.querySelectorAll('.figure')].map(f => f.querySelectorAll('.trace').length)"
                    assert min(page.evaluate(traces)) >= 1
                    picture = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"))
                    assert (np.median(picture) > 200) == (scheme == "light")
                    assert np.ptp(picture) > 150  # the ink stands out from the ground
