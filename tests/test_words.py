"""A run in the words of the trade, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim import simulate
from sim.cli import main
from sim.errors import MemoryShortError
from sim.explore.overlap import study, table
from sim.explore.row import figures
from sim.pages.sums import kernel_sums
from sim.result.rates import memory, rates, times, utilisation
from sim.result.report import summary
from sim.scenario.memory import memory_use
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from sim.serving import serve

DECODE = {"model": "llama3-8b", "phase": "decode", "batch": 16, "seq_len": 2048}


def test_a_prefill_in_tokens_flops_and_joules() -> None:
    run = simulate(model="llama3-8b", batch=2, seq_len=4096, lm_head=False)
    assert times(run) == {"ttft_s": run.latency_s}
    found = rates(run)
    assert found["tokens_per_s"] * run.latency_s == pytest.approx(8192)
    assert found["tokens_per_s_per_user"] * 2 == pytest.approx(found["tokens_per_s"])
    assert found["energy_wh_per_request"] * 3600 * 2 == pytest.approx(run.energy_j)
    used = utilisation(run)
    # 2 FLOPs a weight and token (6.98e9 weights in layers), and the causal half of two products of attention.
    weights, attention = 32 * 218.1e6, 32 * 2 * 2 * 4096**2 * 4096
    assert used["flops"] == pytest.approx(2 * weights * 8192 + attention, rel=0.01)
    assert used["mfu"] == pytest.approx(used["flops"] / run.latency_s / 989.4e12, rel=0.01)  # type: ignore[operator]
    assert used["mfu_at_clock"] > used["mfu"]  # type: ignore[operator]  # the cap holds the clock below boost


@pytest.mark.parametrize("mode", ["ring", "striped", "zigzag"])
def test_a_ring_prefill_has_the_mfu_of_a_gathered_one_at_equal_time(mode: str) -> None:
    """No pair behind the causal mask is counted, whichever GPU's key it is; a ring adds up its partial outputs."""
    split = {"model": "llama3-8b", "cp": 4, "seq_len": 32_768, "layers": 2, "lm_head": False}
    ring, gathered = simulate(**split, cp_mode=mode), simulate(**split)
    used, expected = utilisation(ring), utilisation(gathered)
    for name in ("mfu", "mfu_at_clock"):
        clock = 1.0 if name == "mfu" else sum(ring.sm_clock_hz_per_gpu) / sum(gathered.sm_clock_hz_per_gpu)
        at_equal_time = used[name] * ring.latency_s / gathered.latency_s * clock  # type: ignore[operator]
        assert at_equal_time == pytest.approx(expected[name], rel=1e-4)
    rows = kernel_sums(ring.outcome)
    assert sum(row.flops for row in rows) == pytest.approx(used["flops"])
    scores = sum(row.flops for row in rows if row.family == "attention")
    assert scores == 2 * 4 * 32 * 128 * (32_768 * 32_769 / 2)  # layers, 4 x heads x size, pairs


def test_a_decode_step_moves_its_weights_and_cache() -> None:
    run = simulate(**DECODE)
    used = utilisation(run)
    assert times(run) == {"tpot_s": run.latency_s}
    assert "energy_j_per_request" not in rates(run)  # a step is no request
    weights, cache = 2 * (32 * 218.1e6 + 128256 * 4096), 16 * 2048 * 131072
    assert weights + cache < used["hbm_bytes"] < 1.05 * (weights + cache)  # type: ignore[operator]
    assert used["mbu"] == pytest.approx(used["hbm_bytes"] / run.latency_s / 3.35e12, rel=0.01)  # type: ignore[operator]


@pytest.mark.parametrize("detail", ["full", "folded", "segment"])
def test_sums_do_not_depend_on_what_was_folded(detail: str) -> None:
    run = simulate(**DECODE, tp=2, layers=4, detail=detail)
    whole = simulate(**DECODE, tp=2, layers=4, detail="full")
    assert utilisation(run) == pytest.approx(utilisation(whole), rel=1e-9)


def test_memory_is_weights_cache_and_room() -> None:
    used = memory(simulate(**DECODE))
    assert used is not None and used.need.kv_bytes == 16 * 2048 * 131072
    assert used.need.bytes + used.room_bytes == used.gpu_bytes == 80e9
    most = used.largest_batch
    fitting, beyond = (
        memory_use(resolve_scenario(Scenario.of(**DECODE | {"batch": batch}))) for batch in (most, most + 1)
    )
    assert fitting.room_bytes >= 0 > beyond.room_bytes


def test_an_error_about_memory_names_what_would_fit() -> None:
    with pytest.raises(MemoryShortError, match="batch 7 fits here; the smallest layout that fits is tp 4; or --ignore"):
        simulate(model="llama3-70b", phase="decode", batch=64, seq_len=8192, tp=2)
    with pytest.raises(MemoryShortError, match="the smallest layout that fits is ep 8, pp 4; or --ignore-memory"):
        simulate(model="deepseek-v3", phase="decode", ep=8, ep_mode="all_to_all")


def test_the_memory_command(capsys: pytest.CaptureFixture[str]) -> None:
    main_args = ["memory", "llama3-70b", "--phase", "decode", "--batch", "64", "--seq-len", "8192"]
    main([*main_args, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["smallest_layout"], found["memory_bytes_per_gpu"]["largest_batch"]) == (
        False,
        "tp 4",
        0,
    )
    main([*main_args, "--tp", "4"])
    out = capsys.readouterr().out
    assert "weights     │ 35.28 │ 44.1%" in out and "largest batch that fits: 66" in out


def test_a_model_may_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", "llama3-8b", "--layers", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["model"] == "llama3-8b"
    for arguments, said in (
        (["llama3-8b", "--model", "llama3-70b"], "wattline: 'llama3-8b' and --model llama3-70b: give one model\n"),
        (["lama3-8b"], "wattline: unknown model 'lama3-8b': did you mean 'llama3-8b'?\n"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["simulate", *arguments])
        assert (stop.value.code, capsys.readouterr().err) == (2, said)


def test_types_without_a_datasheet_rate_have_no_mfu() -> None:
    data = summary(simulate(model="llama3-8b", layers=1, gpu="a100-sxm-80gb", dtype="bf16"))
    assert data["mfu"] is not None and data["memory_bytes_per_gpu"]["gpu"] == 80e9


PRICES = ["--price-per-gpu-hour", "2", "--price-per-kwh", "0.25", "--carbon-g-per-kwh", "400"]


def test_prices_give_what_a_run_costs_and_emits(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice two GPUs for its seconds, and its joules, of 8 sequences of 128 tokens."""
    command = ["simulate", "llama3-8b", "--layers", "2", "--tp", "2", "--batch", "8", "--seq-len", "128", "--quiet"]
    main([*command, "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert not any(name.startswith(("cost", "carbon")) for name in plain)
    main([*command, "--json", *PRICES])
    found = json.loads(capsys.readouterr().out)
    kwh = plain["energy_j"] / 3.6e6
    cost = 2 * 2 * plain["latency_s"] / 3600 + 0.25 * kwh
    assert found["cost"] == pytest.approx(cost)
    assert found["cost_per_request"] == pytest.approx(cost / 8)
    assert found["cost_per_million_tokens"] == pytest.approx(cost / 1024 * 1e6)
    assert found["carbon_g"] == pytest.approx(400 * kwh)
    main([*command, *PRICES])
    printed = capsys.readouterr().out
    assert f"carbon {400 * kwh:.4g} g CO2e" in " ".join(printed.split())
    assert "arithmetic intensity" in printed


def test_a_served_run_says_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", "llama3-8b", "--requests", "20", "--rate-per-s", "8", "--quiet", "--json", *PRICES]
    main(command)
    found = json.loads(capsys.readouterr().out)
    assert found["output_tokens_per_s_per_gpu"] == found["output_tokens_per_s"]
    assert found["output_tokens_per_s_per_user"] == pytest.approx(1 / found["tpot_s"]["mean"])
    assert found["energy_wh_per_request"] * 3600 == pytest.approx(found["energy_j_per_request"])
    hours, kwh = found["gpu_hours"], found["energy_j"] / 3.6e6
    assert found["cost"] == pytest.approx(2 * hours + 0.25 * kwh)
    assert found["carbon_g_per_million_output_tokens"] == pytest.approx(400 * kwh / (20 * 256) * 1e6)
    held = found["memory_bytes_per_gpu"]
    assert held["weights"] == pytest.approx(2 * 8.03e9, rel=0.01)
    parts = held["weights"] + held["activations"] + held["kv_cache"]
    assert parts + held["room"] == held["gpu"] == 80e9
    assert 0 < held["kv_cache_most"] < held["kv_cache"] <= 0.9 * 80e9


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}])
def test_a_served_run_uses_what_its_steps_use(layout: dict[str, int]) -> None:
    """A lone request is a prefill and its steps of decoding; in stages the joins between them are left out."""
    run = serve(model="llama3-8b", requests=1, input_tokens=1000, output_tokens=9, **layout)
    tp = {"tp": layout.get("tp", 1)}
    steps = [simulate(model="llama3-8b", phase="prefill", batch=1, seq_len=1000, stack="vllm", **tp)]
    steps += [
        simulate(model="llama3-8b", phase="decode", batch=1, seq_len=1001 + i, stack="vllm", **tp) for i in range(8)
    ]
    found = run.utilisation
    for name in ("flops", "hbm_bytes"):
        whole = sum(float(utilisation(step)[name] or 0.0) for step in steps)
        assert found[name] == pytest.approx(whole, rel=2e-3), name
    gpu, on_s = run.machine.gpu, run.summary["gpu_hours"] * 3600
    assert found["mfu"] == pytest.approx(found["flops"] / on_s / gpu.tensor_flops_per_s["bf16"])  # type: ignore[operator]
    assert found["mbu"] == pytest.approx(found["hbm_bytes"] / on_s / gpu.hbm_bytes_per_s)  # type: ignore[operator]
    assert 0 < found["mfu"] < found["mbu"] < 1  # type: ignore[operator]


def test_beginnings_that_a_cache_holds_are_no_work(tmp_path: Path) -> None:
    """Two prompts of three blocks that begin with the same two: the second computes its last block alone."""
    path = tmp_path / "requests.jsonl"
    rows = [
        {"timestamp": 4000 * i, "input_length": 1536, "output_length": 2, "hash_ids": [1, 2, 3 + i]} for i in (0, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cached, anew = (serve(model="llama3-8b", trace=path, prefix_caching=on).utilisation for on in (True, False))
    steps = [simulate(model="llama3-8b", phase="prefill", batch=1, seq_len=n, stack="vllm") for n in (1536, 1024)]
    whole, begin = (float(utilisation(step)["flops"] or 0.0) for step in steps)
    assert float(anew["flops"] or 0.0) - float(cached["flops"] or 0.0) == pytest.approx(begin, rel=2e-3)
    assert whole < float(cached["flops"] or 0.0) < 1.5 * whole


def test_drafts_are_work_too() -> None:
    load = {"model": "llama3-8b", "requests": 40, "rate_per_s": 20.0, "input_tokens": 500, "output_tokens": 40}
    plain, drafted = serve(**load), serve(**load, speculation="eagle", acceptance=0.7)
    assert plain.utilisation["flops"] < drafted.utilisation["flops"] < 1.6 * plain.utilisation["flops"]  # type: ignore[operator]
    assert drafted.utilisation["hbm_bytes"] < plain.utilisation["hbm_bytes"]  # type: ignore[operator]  # fewer steps


def test_rows_of_schedules_say_the_words_too() -> None:
    scenario = Scenario.of(model="llama3-8b", tp=2, batch=1, seq_len=2048, layers=2)
    points, _ = study([scenario])
    row = table(points).iloc[0]
    run = simulate(scenario)
    for name in ("mfu", "mbu", "flops_per_hbm_byte"):
        assert row[name] == pytest.approx(utilisation(run)[name]), name
    assert row["tokens_per_s_per_gpu"] == pytest.approx(rates(run)["tokens_per_s_per_gpu"])
    assert row["memory_need_bytes_per_gpu"] + row["memory_room_bytes_per_gpu"] == 80e9


def test_a_row_of_a_sweep_says_the_words_of_its_run() -> None:
    run = simulate(**DECODE, layers=2)
    row = figures(run)
    assert {name: row[name] for name in ("mfu", "mfu_at_clock", "mbu", "flops_per_hbm_byte")} == {
        name: value for name, value in utilisation(run).items() if name in row
    }
    used = memory(run)
    assert used is not None
    assert (row["memory_need_bytes_per_gpu"], row["memory_room_bytes_per_gpu"]) == (used.need.bytes, used.room_bytes)
    assert row["tokens_per_s_per_user"] == rates(run)["tokens_per_s_per_user"]
    drafted = simulate(**DECODE, layers=2, speculation="ngram", draft_tokens=3, acceptance=0.8)
    assert figures(drafted)["tpot_s"] == times(drafted)["tpot_s"] < drafted.latency_s  # several tokens a step
