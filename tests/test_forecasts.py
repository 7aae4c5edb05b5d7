"""Laws carried over to cards without rows: within what the card can do at all, and near what was published of it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.laws.terms import time_s
from hardware.profile import profile_for
from sim import simulate
from sim.result.report import summary

MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip
PREFILL: dict[str, Any] = {"batch": 4, "seq_len": 4096}
DECODE: dict[str, Any] = {"phase": "decode", "batch": 32, "seq_len": 4096}


@pytest.mark.parametrize("gpu", ["h20", "l40s", "rtx-4090", "a10", "a100-sxm-80gb", "mi300x", "b200", "h100-nvl"])
@pytest.mark.parametrize("stack", ["reference-torch", "vllm"])
def test_no_card_passes_its_own_rates(gpu: str, stack: str) -> None:
    """A mixture ran at 2.2 times the H20's tensor rate, and vLLM's decode at 1.2 times the L40S's bandwidth."""
    free: dict[str, Any] = {
        "gpu": gpu,
        "stack": stack,
        "layers": 1,
        "ignore_memory": True,
        "uncapped": True,
        "lm_head": False,
    }
    runs: list[dict[str, Any]] = [
        {"model": "mixtral-8x7b", **PREFILL}, {"model": "mixtral-8x7b", **DECODE}, {"model": "llama3-8b", **DECODE},
    ]  # fmt: skip
    if stack != "vllm":
        runs.append({"model": "mixtral-8x7b", "weight_dtype": "int4_g128", **PREFILL})
    for fields in runs:
        data = summary(simulate(**fields, **free))
        assert data["mfu_at_clock"] < 0.95 and data["mbu"] < 0.95, fields


# Milliseconds of both products of the experts and what lies between, tokens spread evenly over them, measured by
# aiconfigurator-core 0.12.0 (Triton's kernels; on the B200 another engine's, so where memory sets the pace alone).
PUBLISHED = [
    ("l40s", "bf16", 8, 4096, 14336, 64, 3.963), ("l40s", "bf16", 8, 4096, 14336, 2048, 7.012),
    ("l40s", "bf16", 8, 4096, 14336, 8192, 26.60), ("l40s", "bf16", 128, 2048, 768, 64, 1.706),
    ("l40s", "bf16", 128, 2048, 768, 8192, 4.278), ("l40s", "bf16", 128, 4096, 1536, 2048, 8.591),
    ("l40s", "fp8_e4m3", 8, 4096, 14336, 64, 2.174), ("l40s", "fp8_e4m3", 8, 4096, 14336, 8192, 14.92),
    ("l40s", "fp8_e4m3", 128, 2048, 768, 2048, 1.383), ("l40s", "fp8_e4m3", 128, 4096, 1536, 8192, 9.035),
    ("b200", "bf16", 128, 2048, 768, 64, 0.1875), ("b200", "bf16", 128, 4096, 1536, 64, 0.6769),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "dtype", "experts", "width", "inner", "tokens", "measured_ms"), PUBLISHED)
def test_experts_of_vllm_on_cards_without_rows(
    tmp_path: Path, gpu: str, dtype: str, experts: int, width: int, inner: int, tokens: int, measured_ms: float
) -> None:
    """They took a quarter as long as measured on the L40S, and twice as long on the B200: an H100's time."""
    top = 2 if experts == 8 else 8
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_local_experts": experts, "num_experts_per_tok": top}
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | sizes))
    run = simulate(
        model=str(tmp_path / "config.json"), gpu=gpu, dtype=dtype, stack="vllm", layers=1, seq_len=tokens,
        lm_head=False, ignore_memory=True, uncapped=True,
    )  # fmt: skip
    spec = run.machine.gpu
    terms = [kernel.terms for kernel in run.outcome.classes() if re.search("grouped|silu|expert", kernel.name)]
    seconds = sum(time_s(one, sms=spec.sms, sm_clock_hz=spec.max_clock_hz) for one in terms)
    assert 1e3 * seconds == pytest.approx(measured_ms, rel=0.2)


@pytest.mark.parametrize("stack", ["reference-torch", "vllm"])
def test_a_type_that_a_card_lacks_is_refused_under_every_stack(stack: str) -> None:
    with pytest.raises(HardwareError, match="dtype = 'fp8_e4m3': v100-sxm2-32gb has no GEMM figures for it; known: "):
        simulate(model="llama3-8b", gpu="v100-sxm2-32gb", dtype="fp8_e4m3", stack=stack, layers=1)


def test_other_figures_under_a_catalogs_id_are_another_card(tmp_path: Path) -> None:
    """Its coefficients are moved like those of any card without rows: it drew 2.7 times its bandwidth."""
    text = (files("hardware") / "data" / "gpus" / "h100-sxm-80gb.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(r"^hbm_bytes_per_s = \{ value = \S+", "hbm_bytes_per_s = { value = 1e12,", text, flags=re.M))
    fields: dict[str, Any] = {"model": "llama3-8b", "layers": 4, "lm_head": False, **DECODE}
    run, catalog = (simulate(gpu=gpu, **fields) for gpu in (str(path), "h100"))
    assert run.latency_s / catalog.latency_s == pytest.approx(3.35, rel=0.1)
    assert run.standing.status == "unchecked"
    assert "the figures of h100-sxm-80gb are not the catalog's" in run.standing.words()
    assert run.standing.expected_error == "scaled from h100-sxm-80gb by datasheets, error unknown"
    (tmp_path / "same.toml").write_text(text)
    assert profile_for(load_gpu(str(tmp_path / "same.toml"))) is profile_for(load_gpu("h100"))
