"""The closed form: what it counts, that a fit finds what was put in, and how a choice is judged."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workloads
from sim import Scenario, simulate
from sim.cli import main
from sim.errors import SimError
from sim.explore.closed_form import rivals
from sim.explore.closed_form.export import to_latex, to_python
from sim.explore.closed_form.fit import Fitted, fit
from sim.explore.closed_form.formula import NAMES, PARAMETERS, columns, predict
from sim.explore.closed_form.judge import Score, Splits, interval, judge
from sim.explore.closed_form.samples import PHASES, Sample, by_work, parts
from sim.explore.closed_form.search import search
from sim.explore.closed_form.sizes import PassSizes, Phase
from sim.explore.grid import load_grid

ROOT = Path(__file__).parents[1]
# A machine of our own making: every coefficient 1.3 times where the fit starts, x_pipe apart.
TRUTH = np.array([parameter.start * 1.3 for parameter in PARAMETERS])


def made_up() -> list[Sample]:
    """Samples whose costs are the formula's own, at TRUTH."""
    samples = []
    for model in ("llama3-8b", "qwen3-30b-a3b"):
        for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 4)):
            for batch in (4, 16, 64):
                for seq_len in (256, 2048):
                    fields: dict[str, Any] = {"model": model, "phase": "generate", "tp": tp, "pp": pp, "batch": batch}
                    fields |= {"seq_len": seq_len, "output_len": 64, "ep": tp if "qwen" in model else 1}
                    fields |= {"ep_mode": "all_reduce"} if fields["ep"] > 1 else {}
                    samples.append(_at_truth(fields))
    return samples


def _at_truth(fields: dict[str, Any]) -> Sample:
    sizes: dict[Phase, PassSizes] = {
        phase: PassSizes.of(Scenario.of(**part), phase) for phase, part in parts(fields).items()
    }
    costs = {phase: predict(TRUTH, columns([sizes[phase]])) for phase in PHASES}
    return Sample(
        scenario=Scenario.of(**fields),
        sizes=sizes,
        latency_s={phase: float(costs[phase][0][0]) for phase in PHASES},
        energy_j={phase: float(costs[phase][1][0]) for phase in PHASES},
    )


def test_sizes_are_those_of_the_kernels_that_run() -> None:
    for phase, seq_len in (("prefill", 1024), ("decode", 2048)):
        for model in ("llama3-8b", "qwen3-30b-a3b"):
            scenario = Scenario.of(model=model, phase=phase, batch=8, seq_len=seq_len)
            sizes = PassSizes.of(scenario, phase)  # type: ignore[arg-type]
            run = simulate(scenario)
            kernels = run.graph.kernels - 1  # the head
            assert sizes.kernels == kernels
            if model == "llama3-8b":  # a mixture counts rows padded to tiles, which no kernel's FLOPs do
                flops = sum(run.graph.classes[c].describe["flops"] for c in run.graph.op_class)
                assert sizes.flops == pytest.approx(flops, rel=0.03 if phase == "prefill" else 0.12)


def test_a_decode_step_reads_the_cache_and_the_experts_that_its_tokens_choose() -> None:
    few, many = (
        PassSizes.of(Scenario.of(model="qwen3-30b-a3b", phase="decode", batch=batch, seq_len=1000), "decode")
        for batch in (1, 512)
    )
    model = workloads.load_model("qwen3-30b-a3b")
    embedding = model.vocab * model.d_model
    assert few.weight_bytes == pytest.approx(2 * (workloads.params(model, active=True) - embedding), rel=1e-9)
    assert many.weight_bytes == pytest.approx(2 * (workloads.params(model) - embedding), rel=1e-6)
    assert many.attention == 512 * few.attention == 512 * 1000 * 2 * 4 * 128 * 48 * 2


def test_a_fit_finds_the_coefficients_that_made_the_samples() -> None:
    samples = made_up()
    for phase in PHASES:
        form = rivals.fitted(samples)[phase]
        latency, energy = form.predict([s.sizes[phase] for s in samples])
        assert latency == pytest.approx([s.latency_s[phase] for s in samples], rel=1e-4)
        assert energy == pytest.approx([s.energy_j[phase] for s in samples], rel=1e-4)
        assert np.median(np.abs(form.values / TRUTH - 1)) < 0.01


def test_standard_errors_cover_noise() -> None:
    samples = made_up()
    rng = np.random.default_rng(7)
    sizes = [s.sizes["decode"] for s in samples]
    latency, energy = predict(TRUTH, columns(sizes))
    values, errors = [], []
    for _ in range(12):
        form = fit(sizes, latency * rng.lognormal(0, 0.03, len(sizes)), energy * rng.lognormal(0, 0.03, len(sizes)))
        values.append(form.values)
        errors.append(form.errors)
    # t_byte is what decode fixes best: its spread over repetitions is what each fit says of itself.
    at = NAMES.index("t_byte")
    spread, told = np.std([v[at] for v in values]), float(np.mean([e[at] for e in errors]))
    assert 0.4 < spread / told < 2.5
    assert abs(np.mean([v[at] for v in values]) - TRUTH[at]) < 3 * told


def test_scores_by_hand() -> None:
    group = made_up()[::6][:3]
    energies = [rivals.energy(s) for s in group]
    score = Score()
    score.add(group, np.array(energies))
    score.add(group, -np.array(energies))
    assert score.hits == [1.0, 0.0] and score.ordered == [1.0, 0.0]
    assert score.excess == [0.0, max(energies) / min(energies) - 1]
    assert interval([0.0, 1.0] * 50)[0] == 0.5 and 0.35 < interval([0.0, 1.0] * 50)[1] < 0.45


def test_judged_on_scenarios_that_no_sample_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = made_up()
    seen: list[set[Any]] = []
    tested: list[set[Any]] = []

    def spy(train: Any) -> dict[str, Fitted]:
        seen.append({s.work for s in train})
        tested.append(set())
        return {phase: Fitted(values=TRUTH, errors=TRUTH, samples=len(train)) for phase in PHASES}

    add = Score.add
    monkeypatch.setattr(rivals, "fitted", spy)
    monkeypatch.setattr(Score, "add", lambda self, group, p: (tested[-1].add(group[0].work), add(self, group, p))[1])
    verdict = judge(samples, Splits(number=3, samples=20, seed=1))
    assert all(not (trained & judged) for trained, judged in zip(seen, tested, strict=True))
    assert verdict.scores["closed form"]["top1"] == (1.0, 1.0, 1.0)
    assert verdict.errors["energy_prefill"][0] < 1e-12
    assert verdict.larger_batches["pairwise"][0] == 1.0
    assert verdict.scenarios == len(by_work(samples)) == 12 and verdict.fewest_layouts == 5


def test_python_export_says_what_the_fit_says() -> None:
    forms = {phase: Fitted(values=TRUTH, errors=TRUTH / 10, samples=50) for phase in PHASES}
    module: dict[str, Any] = {}
    exec(to_python(forms), module)
    for sample in made_up()[::7]:
        sizes = sample.sizes["decode"]
        inputs = {name: getattr(sizes, name) for name in sizes.__slots__}
        latency, energy = module["predict"](module["DECODE"], **inputs)
        assert (latency, energy) == pytest.approx((sample.latency_s["decode"], sample.energy_j["decode"]), rel=1e-12)
    assert to_latex(forms).count(r"\\") >= 2 + len(NAMES)


def test_the_benchmark_spans_what_it_says() -> None:
    grid = load_grid(ROOT / "benchmarks" / "closed_form.toml")
    fields = [case.fields for case in grid.cases]
    assert {f["model"] for f in fields} == {"llama3-8b", "llama3-70b", "qwen3-30b-a3b"}
    assert {f["tp"] for f in fields} == {1, 2, 4, 8} and {f["pp"] for f in fields} == {1, 2, 4}
    layouts: dict[tuple[Any, ...], int] = {}
    for f in fields:
        work = (f["model"], f["batch"], f["seq_len"], f["output_len"])
        layouts[work] = layouts.get(work, 0) + 1
    assert min(layouts.values()) >= 6 and max(f["batch"] for f in fields) == 128


def test_shell_fits_a_small_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.toml"
    file.write_text(
        '[base]\nmodel = "llama3-8b"\nphase = "generate"\noutput_len = 16\n'
        "[grid]\ntp = [1, 2, 4]\nbatch = [2, 8, 64]\nseq_len = [256, 1024]\n",
        encoding="utf-8",
    )
    args = ["fit", str(file), "--samples", "9", "--jobs", "1", "--json"]
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert "samples = 9: the closed form has 12 coefficients a phase" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", str(file), "--samples", "15", "--jobs", "1", "--json"])
    assert re.search(r"samples = 15: half of the scenarios have 9 layouts", capsys.readouterr().err)
    file.write_text(file.read_text(encoding="utf-8").replace("[256, 1024]", "[256, 512, 1024, 2048]"), encoding="utf-8")
    main(["fit", str(file), "--samples", "14", "--splits", "2", "--jobs", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert 0 <= found["top1"] <= 1 and 0.5 < found["pairwise"] <= 1 and found["energy_mape"] < 0.3
    assert set(found["parameters"]) == {"prefill", "decode"} and set(found["parameters"]["decode"]) == set(NAMES)


def test_a_search_finds_a_formula_close_to_the_law_that_made_the_samples_and_finds_it_again() -> None:
    pytest.importorskip("pyoperon")
    samples = [made_up()[i] for i in np.random.default_rng(1).permutation(60)]
    one, again = (search(samples[:40], "prefill", seed=1) for _ in range(2))
    assert one.formula == again.formula and "ln(" in one.formula
    truth = np.array([s.energy_j["prefill"] for s in samples[40:]])
    errors = np.log(one.energy_j(samples[40:], "prefill") / truth)
    assert np.mean(np.abs(errors)) < 0.1 < 0.1 * np.std(np.log(truth))


def test_a_search_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyoperon.sklearn", None)
    with pytest.raises(SimError, match=r"--search needs the extra: pip install 'wattline\[search\]'"):
        search(made_up()[:20], "prefill", seed=1)


def test_a_forest_gets_further_samples_and_is_judged_on_none_of_them() -> None:
    samples = made_up()
    judged = [s for s in samples if s.scenario.batch != 64]
    more = [s for s in samples if s.scenario.batch == 64]
    verdict = judge(judged, Splits(number=2, samples=14, seed=1), more=more)
    assert verdict.scenarios == len(by_work(judged)) and verdict.searched == {}
    # Half of the judged scenarios and all further ones, all that there are.
    assert f"random forest, {len(judged) // 2 + len(more)} samples" in verdict.scores


def test_only_requests_are_fitted() -> None:
    with pytest.raises(SimError, match=r"phase = 'decode': the closed form needs phase = 'generate'"):
        parts({"model": "llama3-8b", "phase": "decode"})


def test_the_step_at_the_mean_context_costs_the_mean_step() -> None:
    fields = {"model": "llama3-8b", "phase": "generate", "batch": 4, "seq_len": 512, "output_len": 256, "layers": 4}
    whole = simulate(**fields)  # type: ignore[arg-type]
    one = {phase: simulate(**part) for phase, part in parts(fields).items()}
    assert one["prefill"].latency_s + 255 * one["decode"].latency_s == pytest.approx(whole.latency_s, rel=0.005)
    assert one["prefill"].energy_j + 255 * one["decode"].energy_j == pytest.approx(whole.energy_j, rel=0.01)


# -- machines and types -----------------------------------------------------------------------------------------


def sizes_of(phase: Phase, **fields: Any) -> PassSizes:
    return PassSizes.of(
        Scenario.of(**{"model": "llama3-8b", "phase": phase, "batch": 8, "seq_len": 1024} | fields), phase
    )


def test_the_reference_card_at_its_clock_changes_nothing() -> None:
    one = sizes_of("prefill")
    assert (one.per_flop, one.per_byte, one.per_link_byte, one.per_joule, one.per_watt) == (1.0, 1.0, 1.0, 1.0, 1.0)


def test_what_other_machines_make_of_the_same_work_is_counted_from_datasheets() -> None:
    assert sizes_of("prefill", dtype="fp8").per_flop == pytest.approx(989.4 / 1978.9)
    assert sizes_of("prefill", dtype="fp8").weight_bytes < 0.55 * sizes_of("prefill").weight_bytes
    assert sizes_of("prefill", sm_clock_mhz=990).per_flop == 2.0
    assert sizes_of("prefill", sm_clock_mhz=990).per_joule == pytest.approx(0.85**2)
    assert sizes_of("decode", gpu="h200").per_byte == pytest.approx(3.35 / 4.8, rel=0.01)
    assert sizes_of("decode", gpu="a100-sxm-80gb").per_watt == pytest.approx(400 / 700)


def test_hybrids_attend_in_some_layers_and_images_are_encoded() -> None:
    hybrid = workloads.load_model("nemotron-h-8b")
    found = sizes_of("prefill", model="nemotron-h-8b")
    assert hybrid.attending(range(hybrid.layers)) == 4
    assert found.attention == 2.0 * 8 * 1024**2 * hybrid.q_heads * hybrid.head_dim * 4
    blind, seen = (sizes_of("prefill", model="llava-1.5-7b", images=count) for count in (0, 1))
    tower = workloads.load_model("llava-1.5-7b").vision
    assert tower is not None
    assert seen.gemm_flops - blind.gemm_flops == 2.0 * workloads.params(tower.model) * tower.patches * 8


def test_the_rule_of_the_fewest_gpus_can_be_wrong() -> None:
    """Cards and clocks that hold the same work: the rule does not tell them apart."""
    samples = [
        _at_truth({"model": "llama3-8b", "phase": "generate", "batch": 8, "seq_len": 1024, "output_len": 64} | fields)
        for fields in ({"gpu": "h100"}, {"gpu": "h100", "sm_clock_mhz": 1200}, {"gpu": "h200", "sm_clock_mhz": 1200})
    ]
    group = by_work(samples)[samples[0].work]
    assert len({sample.layout for sample in group}) == 3
    truth = [rivals.energy(sample) for sample in group]
    assert int(np.argmin(rivals.fewest_gpus(group))) != int(np.argmin(truth))
    assert int(np.argmin(rivals.fewest_on_best(samples)(group))) == int(np.argmin(truth))


def test_the_wide_grid_holds_cards_clocks_types_and_other_models() -> None:
    cases = load_grid(ROOT / "benchmarks" / "closed_form_wide.toml").cases
    fields = [Scenario.parse(case.fields, where="grid") for case in cases]
    assert {f.gpu for f in fields} == {"h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb"}
    assert {f.dtype for f in fields} == {"bf16", "fp8_e4m3"} and {f.sm_clock_mhz for f in fields} >= {None, 1200.0}
    assert {"nemotron-h-8b", "llava-1.5-7b"} <= {f.model for f in fields}
