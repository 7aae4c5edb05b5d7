"""Files that users did not mean: the right answer, or one line that says what would be right."""

from __future__ import annotations

import gzip
import json
import os
import random
from importlib.resources import files
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.file_fuzz import KINDS, end_of, fault_of, run_one
from hardware.catalog import list_gpus, load_gpu
from hardware.profile import dump_profile, profile_for, read_profile
from inputs.texts import parse_json, parse_toml
from sim.errors import ScenarioError
from sim.explore.conditions import Condition
from sim.output.spreadsheet import to_csv, without_quotes
from sim.replay.inspect import inspect_trace
from sim.scenario.spec import Scenario
from sim.serving.request_files import read_traffic
from traces.read.values import product

SERVE = ["serve", "--model", "llama3-8b", "--trace"]


def kernel(name: str, ts: float, **more: object) -> dict[str, object]:
    args = {"stream": 7, "device": 0, "correlation": 1, "grid": [1, 1, 1]}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": 5, "args": args | more}


def trace(path: Path, *events: dict[str, object], **metadata: object) -> Path:
    path.write_text(json.dumps({**metadata, "traceEvents": events}))
    return path


# A gzip that ends in its middle; without a time of making, so that each worker names the test alike.
CUT = gzip.compress(b'{"timestamp":0,"input_length":100,"output_length":5}\n', mtime=0)[:40]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_mutated_files_end_in_a_result_or_one_clean_line(kind: str, tmp_path: Path) -> None:
    """Ten of a kind here; ``python -m benchmarks.file_fuzz`` runs as many as it is told."""
    for number in range(10):
        code, fault = run_one(kind, 7, number, tmp_path)
        assert fault is None, (number, fault)
        assert code in (0, 2)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("burst.csv", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,C\n"
         "45,ChatGPT,1087,230,1317,C\n185,ChatGPT,1360,0,1360,A\n", [(0.0, 472, 18), (40.0, 1087, 230)]),
        ("vidur.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n0.5,396,0\n1.2,879,55\n",
         [(0.0, 374, 44), (1.2, 879, 55)]),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.2500000,374,44\n"
         "2023-11-16 18:17:04.5000001,396,0\n2023-11-16 18:17:04.7500000,396,7\n", [(0.0, 374, 44), (1.5, 396, 7)]),
        ("mooncake.jsonl", '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
         '{"timestamp": 3052, "input_length": 500, "output_length": 0, "hash_ids": [0]}\n', [(0.0, 6758, 500)]),
        ("own.csv", "arrival_s,input_tokens,output_tokens\n0.0,374,44\n0.5,396,0\n", [(0.0, 374, 44)]),
    ],
)  # fmt: skip
def test_public_requests_are_read_and_one_without_output_is_left_out_everywhere(
    tmp_path: Path, name: str, text: str, expected: list[tuple[float, int, int]]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    traffic = read_traffic(file)
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in traffic.requests] == expected
    assert traffic.unanswered == 1
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_traffic(packed) == traffic


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("t.json", b'[{"id":"x1","conversations":[{"from":"human","value":"hello"}]}]', "ShareGPT"),
        ("t.csv", b"a,b\n1,2\n", "need arrival_s, input_tokens, output_tokens (Azure: TIMESTAMP, ContextTokens"),
        ("t.csv", b"num_prefill_tokens,num_decode_tokens\n1,2\n", "Vidur requests need arrived_at too"),
        ("t.csv", b"arrival_s,input_tokens,output_tokens\n0,100,inf\n", "line 2: output_tokens = inf"),
        ("t.csv", b"arrival_s,input_tokens,output_tokens,priority\n0,100,5,\n", "line 2: priority = ''"),
        ("t.csv", b"arrival_s,input_tokens,output_tokens\n0,100,1.5\n", "line 2: output_tokens = 1.5"),
        ("t.jsonl", b'{"timestamp":NaN,"input_length":100,"output_length":5}', "line 1: not valid JSON: NaN"),
        ("t.jsonl", b'{"timestamp":1e300,"input_length":100,"output_length":5}', "timestamp = 1e+300"),
        ("t.jsonl", b'{"timestamp":0,"input_length":9,"output_length":5,"hash_ids":[[1],2]}', "hash_ids = [[1], 2]"),
        ("t.jsonl", b'{"timestamp":0,"input_length":9,"input_length":5,"output_length":5}', "length' stands twice"),
        ("t.jsonl", b'{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2,3]}',
         "hash_ids: 3 hashes for a prompt of 2 blocks: say how many tokens a hash stands for (--trace-block-tokens)"),
        ("t.jsonl", b'{"timestamp":0,"input_length":1%s,"output_length":5}' % (b"0" * 400), "at most 64 bits"),
        ("t.jsonl.gz", CUT, "truncated gzip"),
    ],
)  # fmt: skip
def test_bad_requests_are_one_line(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    code, out, err = end_of([*SERVE, str(file)])
    assert code == 2
    assert says in err
    assert fault_of(code, out, err) is None


def test_requests_that_were_left_out_are_told(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,64,2\n1,64,0\n")
    code, out, _ = end_of([*SERVE, str(file), "--json"])
    assert code == 0
    assert (json.loads(out)["requests"], json.loads(out)["requests_left_out"]) == (1, 1)
    assert "1 requests of the file that got no output token" in end_of([*SERVE, str(file)])[1]
    file.write_text("arrival_s,input_tokens,output_tokens\n1,64,0\n")
    with pytest.raises(ScenarioError, match="holds no request with an output token"):
        read_traffic(file)


def test_what_has_no_end_is_refused_and_what_grows_out_of_proportion(tmp_path: Path) -> None:
    pipe, bomb = tmp_path / "pipe", tmp_path / "bomb.jsonl.gz"
    os.mkfifo(pipe)
    bomb.write_bytes(gzip.compress(b'{"timestamp":0,"input_length":100,"output_length":0}\n' * 400_000))
    for path in map(str, (pipe, Path(os.devnull))):
        for command in (["inspect", path], ["validate", path], ["simulate", path], [*SERVE, path],
                        ["simulate", "--model", path]):  # fmt: skip
            code, out, err = end_of(command)
            assert (code, fault_of(code, out, err)) == (2, None)
            assert "give a regular file" in err
    code, _, err = end_of([*SERVE, str(bomb)])
    assert code == 2
    assert "grows more than 100-fold" in err


def test_names_of_kernels_are_text(tmp_path: Path) -> None:
    names = ["f(at::Tensor&)::[lambda() (instance 1)]::operator()", "[/b]k", "k\x1b[2J\u202e", ":warning:"]
    path = trace(tmp_path / "t.json", *(kernel(name, 10.0 * i) for i, name in enumerate(names)))
    code, out, err = end_of(["inspect", str(path)])
    assert (code, fault_of(code, out, err)) == (0, None)
    for shown in (names[0], names[1], "k\\x1b[2J\\u202e", names[3]):
        assert shown in out


def test_cells_of_csv_are_no_formulas_and_numbers_stay(tmp_path: Path) -> None:
    table = pd.DataFrame({"=name": ["=1+1", "@x", "-5", "+2.5e3", "-x", "'=y", "k"], "n": [-1.5, 2, 3, 4, 5, 6, -7]})
    path = tmp_path / "t.csv"
    path.write_bytes(to_csv(table))
    assert path.read_text().splitlines()[:6] == ["'=name,n", "'=1+1,-1.5", "'@x,2.0", "-5,3.0", "+2.5e3,4.0", "'-x,5.0"]
    assert without_quotes(pd.read_csv(path))["'=name"].tolist() == table["=name"].tolist()


def test_metadata_and_times_of_another_shape_are_left_out_and_told(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "rank99999999999999999999.json", kernel("k", 10.0), kernel("k", 20.0), kernel("k", -5e12),
        deviceProperties=0.5, distributedInfo=[1],
    )  # fmt: skip
    found = inspect_trace((path,))
    assert found.summary.kernels == 2
    rules = {finding.rule: finding.count for finding in found.findings}
    assert (rules["time-far-from-all-others"], rules["metadata-of-wrong-type"]) == (1, 2)
    assert found.capture.ranks == [0]


def test_a_kernel_of_a_million_million_blocks_replays_at_once(tmp_path: Path) -> None:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": 1, "dur": 2}
    huge = kernel("gemm_kernel", 10.0, grid=[10**9, 1000, 1], block=[128, 1, 1])
    path = trace(tmp_path / "t.json", call | {"args": {"correlation": 1}}, huge,
                 deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])  # fmt: skip
    code, out, err = end_of(["replay", "--json", str(path)])
    assert (code, fault_of(code, out, err)) == (0, None)
    assert product(2**31 - 1, 65535, 65535) == -1  # no count of 64 bits


def test_busy_time_of_streams_is_a_union(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.json",
        kernel("k", 0.0),
        kernel("k", 3.0),
        kernel("k", 20.0, stream=9),
        kernel("k", 30.0, stream=9),
    )
    by_stream = {row.stream: (row.count, row.busy_us) for row in inspect_trace((path,)).summary.by_stream}
    assert by_stream[9] == (2, 10.0)
    assert by_stream[7][1] <= 8.0


@pytest.mark.parametrize("text", ["(" * 90 + "tp" + ")" * 90, "tp" + "+1" * 900, "not " * 900 + "tp", "tp" * 9000])
def test_conditions_have_a_bounded_depth(text: str) -> None:
    from sim.errors import SimError

    if text.startswith("("):  # brackets add no depth
        assert Condition.parse(text, known={"tp"}).holds({"tp": 1})
        return
    with pytest.raises(SimError):
        Condition.parse(text, known={"tp"})
    with pytest.raises(SimError, match="condition"):
        Condition.parse("9.0 ** 9 ** 9 > tp", known={"tp"}).holds({"tp": 1})


def test_texts_are_bounded() -> None:
    with pytest.raises(ValueError, match=r"x: a\.b = 1000.*: give a number of at most 64 bits"):
        parse_json('{"a": {"b": 1%s}}' % ("0" * 300), "x", ValueError)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 5000 + "]" * 5000, "x", ValueError)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml("a = " + "[" * 100 + "]" * 100, "x", ValueError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model": "llama3-8b", "layers": 1, "layers": 2}', "not valid JSON: key 'layers' stands twice"),
        ('{"model": "llama3-8b", "layers": true}', "layers = true: this is no switch: give its value"),
        ('{"model": "llama3-8b", "power_cap_w": false}', "power_cap_w = false: this is no switch: give its value"),
    ],
)
def test_what_a_scenario_says_twice_or_as_a_switch_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    assert end_of(["simulate", str(path)]) == (2, "", f"wattline: {path}: {says}\n")


@pytest.mark.parametrize("name", ["s.toml", "s.json"])
def test_the_mark_that_editors_put_before_a_text_is_no_part_of_it(tmp_path: Path, name: str) -> None:
    fields = {"s.toml": 'model = "llama3-8b"', "s.json": '{"model": "llama3-8b"}'}[name]
    (tmp_path / name).write_text(fields, encoding="utf-8-sig")
    assert Scenario.load(tmp_path / name) == Scenario.of(model="llama3-8b")


def test_a_journal_of_anything_is_no_hindrance(tmp_path: Path) -> None:
    grid, out = tmp_path / "g.json", tmp_path / "o.csv"
    grid.write_text(json.dumps({"base": {"model": "llama3-8b", "layers": 1}, "grid": {"batch": [1]}}))
    (tmp_path / "o.csv.journal").write_bytes(b'{}\n5\nnull\n[]\n{"scenario_id": 5}\n\xff\n{"scen')
    code, said, err = end_of(["sweep", str(grid), "--out", str(out), "--jobs", "1", "--quiet"])
    assert (code, fault_of(code, said, err)) == (0, None)
    assert len(pd.read_csv(out)) == 1


def test_the_fuzz_is_seeded() -> None:
    assert KINDS["requests"](random.Random(3)) == KINDS["requests"](random.Random(3))


@pytest.mark.parametrize(
    "head", [b"SQLite\x00 formatted\rwith a return\n", b"Name\r,Start (ns)\n", b'"' + b"x" * 140_000]
)
def test_a_first_line_that_no_table_has_is_one_line(tmp_path: Path, head: bytes) -> None:
    """Its readers stumbled over a return within the line, and over a cell of 140 kB."""
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(head)
    for command in (["inspect"], ["replay"]):
        code, out, err = end_of([*command, str(path)])
        assert code == 2
        assert fault_of(code, out, err) is None


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("prefill", "efficiency"), 0.0, "prefill.efficiency = 0: outside"),
        (("gemm", "bf16", "efficiency"), 1.5, "gemm.bf16.efficiency = 1.5: outside"),
        (("gemm", "bf16", "flop_energy_j"), -1e-12, "gemm.bf16.flop_energy_j = -1e-12: outside"),
        (("limits", "slow_limit_w"), 1e9, "limits.slow_limit_w = 1e+09: outside"),
        (("elementwise",), {}, "elementwise: add_rmsnorm is missing"),
        (("curve", "static_w"), -500.0, "curve: -422 W at rest: fit it again"),
        (("decode", "hbm_bytes_per_s"), 3e20, "decode.hbm_bytes_per_s = 3e+20: outside"),
        (("collective", "tables", 0, "rows", 0, 2), -1.0, "tables: all_gather: bytes and seconds are above 0"),
        (("prefill_corrections", "time", "lengths"), [1.0], "weights, lengths and points do not fit one another"),
        (("prefill_corrections", "time", "lengths", 0), 0.0, "prefill_corrections.time.lengths: give positive numbers"),
    ],
)  # fmt: skip
def test_a_profile_with_coefficients_that_no_gpu_has_is_refused(
    tmp_path: Path, place: tuple[str | int, ...], value: object, says: str
) -> None:
    """They were priced without a word, or a traceback."""
    table = json.loads((files("hardware") / "data" / "profiles" / "h100-sxm-80gb.json").read_text(encoding="utf-8"))
    inner = table
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path = tmp_path / "own.json"
    path.write_text(json.dumps(table))
    code, out, err = end_of(["simulate", "--model", "llama3-8b", "--layers", "1", "--profile", str(path)])
    assert (code, fault_of(code, out, err)) == (2, None)
    assert says in err


def test_every_cards_profile_is_one_of_ones_own_too(tmp_path: Path) -> None:
    for gpu in list_gpus():
        path = tmp_path / f"{gpu}.json"
        path.write_text(dump_profile(profile_for(load_gpu(gpu))))
        read_profile(path)


TABLE = "scenario_id,model,error,feasible,world,latency_s,energy_j_per_token,tokens_per_s\n"


@pytest.mark.parametrize("command", ["best", "pareto", "tornado"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scenario_id,model,error\nx,m,\n", "column feasible is missing"),
        (TABLE.replace(",latency_s", "") + "x,m,,True,1,1,1\n", "latency"),
        (TABLE + "x,m,,True,1,quick,1,1\n", "latency_s = quick: no number that 'wattline sweep' writes"),
        (TABLE + "x,m,,True,1,inf,1,1\n", "latency_s = inf: no number"),
        (TABLE + "x,m,,maybe,1,1,1,1\n", "column feasible: give True or False"),
    ],
)
def test_a_table_that_no_sweep_wrote_is_one_line(tmp_path: Path, command: str, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    flags = ["--objective", "latency"] if command != "pareto" else []
    code, out, err = end_of([command, str(path), *flags])
    assert (code, fault_of(code, out, err)) == (2, None)
    assert says in err


def test_a_cell_that_is_no_list_and_values_without_a_logarithm_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for text, command, says in (
        (
            TABLE.replace("\n", ",sm_partitions\n") + "x,m,,True,1,1,1,1,[/b]\n",
            "best",
            "column sm_partitions: not valid",
        ),
        (TABLE + "x,m,,True,1,0,1,1\ny,n,,True,1,1,1,1\n", "tornado", "latency_s = 0: factors are of values above 0"),
    ):
        path.write_text(text)
        flags = ["--objective", "latency", *(["--by", "model"] if command == "best" else [])]
        code, out, err = end_of([command, str(path), *flags])
        assert (code, fault_of(code, out, err)) == (2, None)
        assert says in err


def test_a_text_encoder_has_whole_heads(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    text = (files("workloads") / "data" / "dit" / "flux.1-dev.toml").read_text(encoding="utf-8")
    for width in ("1", "100"):
        path.write_text(text.replace("text_width = 4096", f"text_width = {width}"))
        code, out, err = end_of(["dit", "--model", str(path)])
        assert (code, fault_of(code, out, err)) == (2, None)
        assert f"text_width = {width}: give a multiple of 64" in err
