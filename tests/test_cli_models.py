"""What the command says of one model, of contexts beyond it, and of broken files: one line, 300 characters at most."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim import Scenario, simulate
from sim.errors import ScenarioError
from sim.result.report import status_text, summary
from sim.serving import ServeSpec, serve
from tests.config_kit import LLAMA, MISTRAL, QWEN3
from tests.test_cli import run


def test_models_says_what_is_read_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    code, out, _ = run(["models", str(tmp_path), "--json"], capsys)
    assert (code, json.loads(out)) == (
        0,
        {
            "id": f"{tmp_path}/config.json", "family": "qwen3", "precision": "bf16", "parameters": 596049920,
            "active_parameters": 596049920, "weight_bytes": 1192099840, "kv_bytes_per_token": 114688, "layers": 28,
            "max_positions": 40960, "window": None, "quantisation": None, "activations": "bf16", "kv_cache": "bf16",
            "not_quantised": "bf16",
        },
    )  # fmt: skip
    code, out, _ = run(["models", "mixtral-8x7b"], capsys)
    assert code == 0
    assert out.splitlines()[3:5] == ["parameters           46,702,792,704", "active parameters    12,879,925,248"]


def test_a_configuration_under_any_name_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my-qwen.json"
    path.write_text(json.dumps(QWEN3), encoding="utf-8")
    for command in ("simulate", "memory"):
        code, out, _ = run([command, str(path), "--json"], capsys)
        assert (code, json.loads(out)["model" if command == "simulate" else "scenario"] != {}) == (0, True)
    path.write_text('{"model": "qwen3-8b", "layers": 1}', encoding="utf-8")
    code, out, _ = run(["simulate", str(path), "--json"], capsys)
    assert (code, json.loads(out)["model"]) == (0, "qwen3-8b")


def test_a_run_beyond_rotary_positions_is_marked_in_words_and_numbers() -> None:
    inside, outside = (simulate(model="llama3-8b", layers=1, seq_len=tokens) for tokens in (8192, 8193))
    assert summary(inside)["positions"] == {"needed": 8192, "of_the_model": 8192, "beyond": False}
    assert summary(outside)["positions"] == {"needed": 8193, "of_the_model": 8192, "beyond": True}
    said = "8,193 tokens are beyond the 8,192 positions of the model"
    assert said in status_text(outside)
    assert "beyond" not in status_text(inside)


def test_positions_count_what_is_generated() -> None:
    fields = {"model": "llama3-8b", "layers": 1, "phase": "generate", "seq_len": 8000}
    assert summary(simulate(output_len=193, **fields))["positions"]["beyond"] is False
    assert summary(simulate(output_len=194, **fields))["positions"]["beyond"] is True
    assert summary(simulate(model="llama-1b", layers=1, seq_len=128))["positions"] is None  # its source says none


def test_a_server_refuses_what_has_no_position_and_counts_what_is_beyond(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,8000,193\n0,8000,194\n", encoding="utf-8")
    found = serve(ServeSpec.of(model="llama3-8b", trace=str(trace))).summary
    assert found["beyond_model_positions"] == 1
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MISTRAL), encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"^request 1: seq_len: .* attends over a window of 4096 tokens"):
        serve(ServeSpec.of(model=str(path), trace=str(trace)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", "id = " + "[" * 3000),
        ("deep.json", '{"model_type": ' + "[" * 100_000),
        ("nested.json", json.dumps(LLAMA)[:-1] + ', "rope_scaling2": ' + "[" * 900 + "]" * 900 + "}"),
        ("long.toml", f'id = "a"\nsource = "b"\nd_model = "{"a" * 5000}"'),
        ("number.toml", f'id = "a"\nsource = "b"\nd_model = {"9" * 5000}'),
        ("hex.toml", f'id = "a"\nsource = "b"\nd_model = 0x{"f" * 5000}'),
        ("key.toml", f"{'k' * 5000} = 1"),
        ("number.json", json.dumps(LLAMA).replace("4096", "9" * 5000)),
        ("value.json", json.dumps(LLAMA | {"vocab_size": "v" * 5000})),
        ("key.json", json.dumps(LLAMA | {"k" * 5000: 3})),
        ("kind.json", json.dumps(LLAMA | {"model_type": ["llama"] * 500})),
        ("layers.json", json.dumps(LLAMA | {"num_hidden_layers": 10**9})),
        ("format.json", json.dumps(LLAMA | {"quantization_config": {"quant_method": "q" * 5000, "format": "f" * 900}})),
        ("class.json", json.dumps(LLAMA | {"architectures": ["C" * 5000]})),
        ("types.json", json.dumps(LLAMA | {"layer_types": ["t" * 50] * 32})),
        ("lines.json", json.dumps(LLAMA | {"hidden_act": "a\nb\nc"})),
        ("nan.json", json.dumps(LLAMA | {"hidden_size": float("nan")})),
        ("list.json", "[" + "0, " * 10_000 + "0]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("phase", ["prefill", "denoise"])
def test_broken_model_files_are_one_short_line(
    name: str, text: str, phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    code, out, err = run(["simulate", "--model", str(path), "--phase", phase], capsys)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert len(err) <= 301
    assert name in err


_GPU = Path("hardware/data/gpus/h200-sxm-141gb.toml")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('confidence = "high"', f'confidence = "{"9" * 5000}"'),
        ("value = 132", f"value = '{'9' * 400}'"),
        ("sms = ", f"{'s' * 5000} = "),
        ('name = "', f'name = {["n"] * 500}\nother = "'),
    ],
)
def test_broken_gpu_files_are_one_short_line(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "g.toml"
    path.write_text((Path(__file__).parents[1] / _GPU).read_text(encoding="utf-8").replace(old, new, 1))
    code, out, err = run(["simulate", "--model", "llama3-8b", "--gpu", str(path)], capsys)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert len(err) <= 301
    assert "g.toml" in err


def test_a_model_that_never_ends_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["simulate", "--model", "/dev/zero"], capsys)
    assert code == 2
    assert err.startswith("wattline: cannot read model '/dev/zero': ")


def test_positions_of_a_denoising_step_are_none() -> None:
    assert summary(simulate(Scenario.of(model="wan2.1-1.3b", phase="denoise", seq_len=512)))["positions"] is None
