"""``wattline plan``: the queue against closed forms, the steady state against the server, launch files parsed."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, poisson

from sim.cli import main
from sim.errors import ScenarioError, SimError
from sim.explore.plan.launch import ENGINES as COMMANDS
from sim.explore.plan.launch import manifest, roles, script, sglang, trtllm, vllm, write_launch
from sim.explore.plan.question import Deployment, Question
from sim.explore.plan.queue import arrivals, bulk_queue
from sim.explore.plan.search import plan
from sim.explore.workers import Pool
from sim.serving import ServeSpec, serve

ASKED: dict[str, Any] = {"model": "llama3-8b", "gpus": 2, "input_len": 512, "output_len": 64, "slo_tpot_s": 0.02}


@pytest.fixture(scope="module")
def found() -> list[Deployment]:
    return plan(Question.of(**ASKED, slo_ttft_s=0.3))


# -- the queue -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_arrivals_have_their_mean_and_the_variance_of_a_shared_stream(streams: int) -> None:
    chance = arrivals(np.array([0.3, 2.0, 7.0]), 60, streams)
    count = np.arange(60)
    mean = chance @ count
    assert chance.sum(axis=1) == pytest.approx(1.0) and mean == pytest.approx([0.3, 2.0, 7.0])
    variance = chance @ count**2 - mean**2
    # A mixture of two whole numbers of trials adds at most a quarter of a trial's square.
    assert (variance >= mean / streams - 1e-9).all() and (variance <= mean / streams + 0.25).all()


def test_arrivals_are_poisson_at_one_server_and_binomial_at_a_whole_number_of_trials() -> None:
    means, count = np.array([0.0, 0.01, 3.0, 40.5]), np.arange(120)
    assert arrivals(means, 120, 1) == pytest.approx(poisson.pmf(count, means[:, None]), abs=1e-15)
    assert arrivals(np.array([6.0]), 120, 4)[0] == pytest.approx(binom.pmf(count, 8, 0.75), abs=1e-14)


def test_one_at_a_time_it_is_the_queue_of_the_textbook() -> None:
    queue = bulk_queue(7.0, np.array([0.0, 0.1]), idle=True)
    assert queue is not None and queue.busy == pytest.approx(0.7, rel=0.01)
    # Half of the requests of an M/D/1 queue at 70 % load wait less than a service (tables: mean 1.17 services).
    waits = [queue.waits_s(share) for share in (0.5, 0.9, 0.99)]
    assert waits == sorted(waits) and 0.1 < waits[0] < 0.25 and 0.3 < waits[1] < 0.6


def test_more_load_waits_longer_and_too_much_for_ever() -> None:
    times_s = np.array([0.02, 0.1, 0.18])
    waits = [queue.waits_s(0.99) for load in (0.1, 2.0, 6.0) if (queue := bulk_queue(load, times_s)) is not None]
    assert len(waits) == 3 and waits == sorted(waits)
    assert waits[0] == pytest.approx(0.12, rel=0.03)  # alone: the rest of an empty step, and its own
    assert bulk_queue(12.0, times_s) is None  # 2 prompts in 0.18 s are 11.1 a second


# -- deployments -----------------------------------------------------------------------------------------------


def test_every_deployment_uses_all_gpus_and_keeps_the_targets(found: list[Deployment]) -> None:
    assert {(one.mode, one.group()) for one in found} == {("aggregated", 1), ("aggregated", 2), ("disaggregated", 1)}
    assert [one.rank for one in found] == sorted(one.rank for one in found)
    for one in found:
        assert one.server.gpus == 2
        assert one.ttft_s <= 0.3 and one.tpot_s <= one.tpot_within_s <= 0.02
        assert one.energy_j_per_token * one.tokens_per_s == pytest.approx(2 * one.power_w_per_gpu)
        assert one.power_w_per_gpu <= 701.0 and one.binds and one.status == "unchecked"


def test_the_server_confirms_them(found: list[Deployment]) -> None:
    for one in found[:2]:
        served = serve(one.server.model_copy(update={"requests": 1500})).summary
        assert served["slo_share"] >= 0.98
        # The last requests have the server for themselves: 15 s of load, and up to one for these.
        assert served["requests_per_s"] == pytest.approx(one.load_per_s, rel=0.08)
        # Near its capacity a server takes hardly more load with many more sequences, and is slow to fill up: the plan
        # is on the safe side (16.3 ms a token where 15 s of the same load end at 9.0 ms, on two GPUs).
        assert served["tpot_s"]["mean"] < 1.05 * one.tpot_s
        assert served["power_w_per_gpu"] == pytest.approx(one.power_w_per_gpu, rel=0.07)


def test_a_tighter_target_serves_less_and_joules_choose_a_lower_clock(found: list[Deployment]) -> None:
    (tight,) = plan(Question.of(**ASKED | {"slo_tpot_s": 0.011, "modes": "aggregated", "gpus": 1}))
    alike = next(one for one in found if one.group() == 1 and one.mode == "aggregated")
    assert tight.tokens_per_s_per_gpu < alike.tokens_per_s_per_gpu
    frugal = plan(Question.of(**ASKED | {"objective": "energy", "modes": "aggregated", "gpus": 1}))[0]
    assert frugal.spec["sm_clock_mhz"] < 1900 and frugal.energy_j_per_token < alike.energy_j_per_token


def test_prices_rank_by_cost() -> None:
    prices = {"objective": "cost", "price_per_gpu_hour": 2.0, "price_per_kwh": 0.1}
    asked = Question.of(**ASKED | {"modes": "aggregated", "gpus": 1} | prices)
    best = plan(asked)[0]
    hours = 2.0 * 1e6 / best.tokens_per_s_per_gpu / 3600
    assert best.cost_per_million_tokens == pytest.approx(hours + 0.1 * best.energy_j_per_token / 3.6)


def test_a_load_is_carried_on_the_fewest_gpus_that_do(found: list[Deployment]) -> None:
    alone = ASKED | {"slo_ttft_s": 0.3, "modes": "aggregated", "gpus": 3}
    one = next(candidate for candidate in found if candidate.group() == 1 and candidate.mode == "aggregated")
    best, *others = plan(Question.of(**alone, rate_per_s=0.9 * one.load_per_s))
    assert best.question.gpus == 2 and best.load_per_s == pytest.approx(one.load_per_s)
    assert [candidate.question.gpus for candidate in others] == [3]
    (small,) = plan(Question.of(**alone | {"gpus": 1}, rate_per_s=0.1 * one.load_per_s))
    assert small.question.gpus == 1
    with pytest.raises(SimError, match=r"rate_per_s = 10000: .* carries it within the targets: .* give more gpus"):
        plan(Question.of(**alone | {"gpus": 1}, rate_per_s=1e4))


def test_power_limits_are_tried() -> None:
    alone = ASKED | {"modes": "aggregated", "gpus": 1, "power_caps_w": "400,700"}
    full, capped = plan(Question.of(**alone))
    assert "700 W" in full.label and "400 W" in capped.label and capped.server.power_cap_w == 400
    assert capped.power_w_per_gpu <= 401 and capped.load_per_s < full.load_per_s
    assert capped.energy_j_per_token < full.energy_j_per_token
    assert "--power-limit=400" in script(capped, "vllm")


def test_a_file_of_requests_gives_the_lengths_and_is_what_is_served(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    rows = [f"{number * 0.5},{500 + number % 3 * 12},{60 + number % 5 * 2}" for number in range(60)]
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]), encoding="utf-8")
    asked = Question.of(model="llama3-8b", gpus=1, slo_tpot_s=0.02, modes="aggregated", trace=file)
    assert (asked.input_len, asked.output_len) == (512, 64)
    (best,) = plan(asked)
    served = serve(best.server).summary
    assert served["requests"] == 60 and served["slo_share"] > 0.9
    with pytest.raises(ScenarioError, match="input_len = 9 contradicts trace"):
        Question.of(model="llama3-8b", input_len=9, trace=file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"power_cap_w": 500, "power_caps_w": "400"}, "power_cap_w = 500 contradicts power_caps_w"),
        ({"objective": "cost"}, "objective = cost: needs price_per_gpu_hour"),
        ({"slo_tpot_s": 0.001}, "no deployment of llama3-8b on 2 x h100-sxm-80gb: no load keeps the targets"),
        (
            {"model": "llama3-70b", "gpus": 1},
            "no deployment of llama3-70b on 1 x h100-sxm-80gb: llama3-70b does not fit",
        ),
        ({"dtypes": "int3"}, "dtypes.0 = 'int3'"),
        ({"gpus": 3, "max_num_seqs": 0}, "max_num_seqs = 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises((SimError, ScenarioError), match=message):
        plan(Question.of(**ASKED | change))


def test_the_server_confirms_the_first_three_of_a_70b_on_16_gpus() -> None:
    """docs/plan.md's question, with fewer requests than its table."""
    targets = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.05}
    asked = Question.of(model="llama3-70b", gpus=16, input_len=2048, output_len=256, **targets)
    best = plan(asked, pool=Pool(jobs=1))[:3]
    assert [(one.mode, one.group()) for one in best] == [("disaggregated", 4), ("aggregated", 4), ("aggregated", 8)]
    for one in best:
        served = serve(one.server.model_copy(update={"requests": 200})).summary
        assert served["slo_share"] >= 0.99, one.label


# -- files -----------------------------------------------------------------------------------------------------


def _parser(*flags: str) -> argparse.ArgumentParser:
    """A parser that knows the flags of an engine's documentation, and nothing else."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for flag in flags:
        parser.add_argument(flag)
    return parser


ENGINES = {
    "vllm": _parser(
        "--tensor-parallel-size", "--dtype", "--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization",
        "--max-model-len", "--port", "--kv-transfer-config", "--quantization",
    ),
    "sglang": _parser(
        "--model-path", "--tp-size", "--dtype", "--max-running-requests", "--chunked-prefill-size",
        "--mem-fraction-static", "--context-length", "--host", "--port", "--disaggregation-mode",
        "--quantization", "--ep-size",
    ),
    "trtllm": _parser(
        "--backend", "--tp_size", "--max_batch_size", "--max_num_tokens", "--kv_cache_free_gpu_memory_fraction",
        "--max_seq_len", "--host", "--port", "--ep_size",
    ),
}  # fmt: skip


def engine_is_installed(engine: str) -> bool:
    return find_spec({"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}[engine]) is not None


def _own_parser(engine: str) -> Callable[[list[str]], dict[str, Any]]:
    """The argument parser of an engine that is installed, on a machine without a GPU too; the test skips without."""
    match engine:
        case "vllm":
            pytest.importorskip("vllm", reason="vLLM is not installed")
            import vllm.platforms
            from vllm.entrypoints.common.cli_args import make_arg_parser
            from vllm.platforms.cpu import CpuPlatform
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            vllm.platforms._current_platform = CpuPlatform()
            whole = make_arg_parser(FlexibleArgumentParser())
            return lambda command: vars(whole.parse_args(command[2:]))
        case "sglang":
            pytest.importorskip("sglang", reason="SGLang is not installed")
            from sglang.srt.server_args import ServerArgs

            flags = argparse.ArgumentParser()
            ServerArgs.add_cli_args(flags)
            return lambda command: vars(flags.parse_args(command[3:]))
        case _:
            pytest.importorskip("tensorrt_llm", reason="TensorRT-LLM is not installed")
            from tensorrt_llm.commands.serve import serve as command_line

            return lambda command: dict(command_line.make_context("serve", command[1:]).params)


@pytest.mark.parametrize(
    ("engine", "sequences", "tokens"),
    [
        ("vllm", "max_num_seqs", "max_num_batched_tokens"),
        ("sglang", "max_running_requests", "chunked_prefill_size"),
        ("trtllm", "max_batch_size", "max_num_tokens"),
    ],
)
def test_an_engines_own_parser_takes_its_command(
    engine: str, sequences: str, tokens: str, found: list[Deployment]
) -> None:
    parse = _own_parser(engine)
    apart = next(one for one in found if one.mode == "disaggregated")
    experts = replace(
        apart,
        spec=apart.spec | {"model": "qwen3-30b-a3b", "ep": 2, "tp": 2, "ep_mode": "all_reduce", "dtype": "fp8_e4m3"},
    )
    for deployment in (found[0], apart, experts):
        for role in roles(deployment):
            known = parse(COMMANDS[engine](deployment, role))
            assert known[sequences] == deployment.server.max_num_seqs
            assert known[tokens] == deployment.server.max_num_batched_tokens


def test_launch_files_say_what_was_planned(found: list[Deployment], tmp_path: Path) -> None:
    best = next(one for one in found if one.mode == "disaggregated")
    assert len(write_launch(best, tmp_path / "launch")) == 5
    for engine in ("vllm", "sglang", "trtllm"):
        text = script(best, engine)
        assert subprocess.run(["sh", "-n", "-c", text], check=False).returncode == 0
        commands = [shlex.split(line.strip()) for line in text.splitlines() if line.strip().startswith("exec ")]
        assert len(commands) == 2
        for command in commands:
            start = {"vllm": 4, "sglang": 4, "trtllm": 3}[engine]
            known = vars(ENGINES[engine].parse_args(command[start:]))
            assert str(best.spec["max_num_seqs"]) in known.values()
    assert vllm(best, "serve")[:3] == ["vllm", "serve", "$MODEL"]
    assert "--disaggregation-mode" in sglang(best, "decode") and "--tp_size" in trtllm(best, "prefill")
    items = manifest(best)["items"]
    text = json.dumps(items)
    assert "HUB-ID-OR-FOLDER-OF/llama3-8b" in text and '"$(MODEL)"' in text and "$MODEL" not in text
    counts = {item["metadata"]["name"]: item["spec"]["replicas"] for item in items if item["kind"] == "Deployment"}
    assert counts == {"wattline-prefill": best.spec["prefill_replicas"], "wattline-decode": best.spec["replicas"]}
    again = json.loads((tmp_path / "launch" / "serve.json").read_text(encoding="utf-8"))
    assert again == best.spec


def test_prompts_and_decoding_on_unequal_degrees() -> None:
    found = plan(Question.of(**ASKED | {"gpus": 4, "modes": "disaggregated", "slo_ttft_s": 0.3}))
    one = next(deployment for deployment in found if "prefill_tp" in deployment.spec)
    assert {(d.group("prefill"), d.group("decode")) for d in found} >= {(1, 2), (2, 1), (1, 1), (2, 2)}
    sizes = one.group("prefill"), one.group("decode")
    assert one.server.gpus == 4 and sizes[0] != sizes[1]
    assert one.label.startswith(
        f"{one.spec['prefill_replicas']} x tp {sizes[0]} + {one.spec['replicas']} x tp {sizes[1]}"
    )
    served = serve(one.server.model_copy(update={"requests": 600})).summary
    assert served["slo_share"] >= 0.98 and served["power_w_per_gpu"] == pytest.approx(one.power_w_per_gpu, rel=0.1)
    for role, gpus in (("prefill", sizes[0]), ("decode", sizes[1])):
        command = vllm(one, role)  # type: ignore[arg-type]
        assert command[command.index("--tensor-parallel-size") + 1] == str(gpus)
    parts = [item["spec"]["template"]["spec"] for item in manifest(one)["items"] if item["kind"] == "Deployment"]
    limits = [part["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for part in parts]
    assert limits == list(sizes)
    assert one.server == ServeSpec.of(**one.served) and one.row()["prefill_tp"] == sizes[0]


@pytest.fixture(scope="module")
def staged() -> list[Deployment]:
    """Deployments of docs/plan.md's question on two stages and on four."""
    targets = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.05, "modes": "aggregated"}
    asked = Question.of(model="llama3-70b", gpus=8, input_len=2048, output_len=256, **targets)
    return [one for one in plan(asked, pool=Pool(jobs=1)) if one.spec.get("pp", 1) > 1]


def test_pipeline_stages_are_a_way_that_the_server_confirms(staged: list[Deployment]) -> None:
    assert {(d.spec["tp"], d.spec["pp"], d.spec["replicas"]) for d in staged} == {(2, 2, 2), (4, 2, 1), (2, 4, 1)}
    for one in staged:
        assert one.server.gpus == 8 == one.group() * one.spec["replicas"]
        assert f"tp {one.spec['tp']} pp {one.spec['pp']}" in one.label
        served = serve(one.server.model_copy(update={"requests": 150})).summary
        assert served["slo_share"] >= 0.99, one.label
        assert 0.8 * one.tpot_s < served["tpot_s"]["mean"] < 1.05 * one.tpot_s
        assert served["power_w_per_gpu"] == pytest.approx(one.power_w_per_gpu, rel=0.15)


def test_launch_files_carry_stages(staged: list[Deployment]) -> None:
    one = next(deployment for deployment in staged if deployment.spec["tp"] == deployment.spec["pp"])
    flags = {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size", "trtllm": "--pp_size"}
    widths = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size", "trtllm": "--tp_size"}
    for engine, flag in flags.items():
        command = COMMANDS[engine](one, "serve")
        assert command[command.index(flag) + 1] == "2" and command[command.index(widths[engine]) + 1] == "2"
        known = _own_parser(engine)(command) if engine_is_installed(engine) else {}
        assert known.get("pipeline_parallel_size", known.get("pp_size", 2)) == 2
    (part,) = [item for item in manifest(one)["items"] if item["kind"] == "Deployment"]
    assert part["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_copies_of_a_cache_may_be_spread_and_the_server_confirms_it() -> None:
    """Four ranks hold two KV heads twice, and each of latents all of them."""
    targets = {"slo_ttft_s": 0.15, "slo_tpot_s": 0.01, "modes": "aggregated"}
    asked = Question.of(model="qwen2-1.5b", gpus=4, input_len=4000, output_len=100, **targets)
    found = plan(asked, pool=Pool(jobs=1))
    (one,) = (deployment for deployment in found if deployment.spec.get("dcp"))
    assert (one.spec["tp"], one.spec["dcp"], one.group()) == (4, 2, 4) and "tp 4 dcp 2" in one.label
    assert one.row()["dcp"] == 2 and one.degrees("prefill")["dcp"] == 1
    assert "a cache of 2 ranks (dcp)" in " ".join(one.reasons)
    served = serve(one.server.model_copy(update={"requests": 300, "host": "none"})).summary  # hosts are not planned
    assert served["power_w_per_gpu"] == pytest.approx(one.power_w_per_gpu, rel=0.15)
    assert 0.8 * one.tpot_s < served["tpot_s"]["mean"] < 1.05 * one.tpot_s and served["slo_share"] >= 0.99
    flags = {"vllm": "--decode-context-parallel-size", "sglang": "--dcp-size"}
    for engine, flag in flags.items():
        command = COMMANDS[engine](one, "serve")
        assert command[command.index(flag) + 1] == "2"
        known = _own_parser(engine)(command) if engine_is_installed(engine) else {}
        assert known.get("decode_context_parallel_size", known.get("dcp_size", 2)) == 2
    assert "fewer sequences fit" in script(one, "trtllm") and "latent attention alone" in script(one, "sglang")


def test_experts_of_unequal_degrees_are_a_way_too() -> None:
    found = plan(Question.of(model="qwen3-30b-a3b", gpus=4, input_len=512, output_len=64, modes="disaggregated"))
    unequal = [one for one in found if {"prefill_tp", "prefill_ep"} & one.spec.keys()]
    assert unequal and all(one.server.gpus == 4 and one.load_per_s > 0 for one in unequal)


def test_the_command_answers_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "llama3-8b", "--gpus", "1", "--input-len", "512", "--output-len", "64", "--slo-tpot-s", "0.02"]
    arguments += ["--modes", "aggregated", "--jobs", "1"]
    main([*arguments, "--plot", str(tmp_path / "front.png"), "--csv", str(tmp_path / "all.csv")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama3-8b on 1 x h100-sxm-80gb, 512 tokens in, 64 out, TPOT <= 20 ms for 99 %")
    assert lines[1].startswith("Best for throughput: 1 x tp 1")
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert (tmp_path / "all.csv").read_text(encoding="utf-8").count("\n") == 2
    main([*arguments, "--json", "--confirm", "1"])
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["served"]["slo_share"] > 0.95 and document["question"]["gpus"] == 1
