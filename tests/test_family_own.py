"""A family of one's own: what a stranger writes is right, or refused in one line that names the field."""

from __future__ import annotations

import json
import random
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz_cases import mutated, toml_text
from hardware.catalog import parse_gpu
from hardware.cluster import parse_node
from hardware.errors import HardwareError
from sim import simulate
from sim.errors import SimError
from workloads import Layout, WorkloadError, load_model, params
from workloads.families.transformer import build_program
from workloads.family_file import parse_family
from workloads.huggingface import parse_config
from workloads.params import facts

OWN = Path(__file__).parent / "own_families"
NAMES = ("kelp", "estuary", "couplet", "drift", "scribe")


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        # Embeddings twice, 36 attentions, a dense feed-forward, 35 times 98 experts and a router.
        ("kelp", 2 * 150_000 * 3072 + 36 * (3072 * 32 * 128 + 24 * 128 * 3072) + 3 * 3072 * 9216
         + 35 * (98 * 3 * 3072 * 1024 + 96 * 3072), 36 * 2 * 4 * 128 * 2),
        # One embedding, 24 feed-forwards, 8 attentions, 20 mixers of two products.
        ("estuary", 65_536 * 2048 + 24 * 3 * 2048 * 8192 + 8 * 2048 * (20 + 16) * 128
         + 20 * 2048 * (3 * 4096 + 2 * 4 * 128 + 64), 8 * 2 * 2 * 128 * 2),
        # One embedding, 24 encoder layers of two matrices, 6 decoder layers of two attentions and three matrices.
        ("couplet", 51_200 * 1024 + 24 * (4 + 2 * 4) * 1024**2 + 6 * (2 * 2.5 + 3 * 4) * 1024**2
         + 3 * 128 * 1024 + 3 * 1024**2, 6 * 2 * 4 * 64 * 2),
        # Embeddings twice, 10 attentions, 20 delta rules with a gate of rank 48, 28 times 50 experts, 2 dense layers.
        ("drift", 2 * 120_000 * 2560 + 10 * 2560 * 2 * (20 + 4) * 128
         + 20 * 2560 * (2 * 48 + 2 * 2560 + 2 * 960 + 40) + 28 * 2560 * (50 * 3 * 1024 + 48) + 2 * 3 * 2560 * 8192,
         10 * 2 * 4 * 128 * 2),
        # One embedding, 18 readers, 9 writers: attention, gated cross attention and two matrices.
        ("scribe", 64_000 * 768 + 18 * 768 * (4 * 768 + 3 * 2048)
         + 9 * 768 * ((2 + 2 / 3) * 768 + (3 + 2 / 3) * 768 + 2 * 3072), 9 * 2 * 4 * 64 * 2),
    ],
)  # fmt: skip
def test_sizes(name: str, parameters: float, kv_bytes: int) -> None:
    model = load_model(str(OWN / name))
    assert params(model) == pytest.approx(parameters, rel=1e-3)
    assert facts(model)["kv_bytes_per_token"] == kv_bytes


@pytest.mark.parametrize("name", NAMES)
def test_all_phases_run_on_one_gpu_and_on_two(name: str) -> None:
    model = str(OWN / name)
    for phase in ("prefill", "decode"):
        one, two = (simulate(model=model, phase=phase, batch=4, seq_len=1024, tp=tp) for tp in (1, 2))
        assert 1.3 * one.latency_s > two.latency_s > 0.3 * one.latency_s
        assert one.standing.status == "unchecked"


def test_halves_of_a_parallel_block_that_a_node_adds_up_are_summed_over_ranks_once() -> None:
    program = build_program(load_model(str(OWN / "estuary")), Layout(tp=2), phase="prefill", batch=1, seq_len=512)
    layer = next(one for one in program.ranks[0].phases[0].segments if one.name.startswith("P"))
    names = [kernel.name for kernel in layer.kernels]
    assert [name for name in names if "reduce" in name] == ["all_reduce_sum", "all_reduce_down"]
    assert names[names.index("out_gemm") : names.index("norm_ff")] == ["out_gemm", "sum", "all_reduce_sum"]


def test_a_gate_of_cross_attention_meets_its_heads_before_they_are_summed() -> None:
    """Slices of the gate and of the heads are alike, so that nothing is gathered: one sum behind the product."""
    program = build_program(load_model(str(OWN / "scribe")), Layout(tp=2), phase="prefill", batch=1, seq_len=512)
    layer = next(one for one in program.ranks[0].phases[0].segments if one.name == "layer")
    names = [kernel.name for kernel in layer.kernels]
    assert names[names.index("cross_gate_gemm") : names.index("norm_ff")] == [
        "cross_gate_gemm", "cross_q_gemm", "cross_kv_gemm", "cross_attention", "gated", "cross_o_gemm",
        "all_reduce_attn",
    ]  # fmt: skip
    widths = [kernel.work.width for kernel in layer.kernels if kernel.name == "gated"]  # type: ignore[union-attr]
    assert widths == [768 // 2]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("couplet", 'front = [["mels * 3", "d", 2], ["d * 3", "d", 1]]', 'front = ["d", "d"]',
         "family.toml: encoder: front = ['d', 'd']: give a list of [depth, width, rows a token]"),
        ("estuary", 'chunk = "ssm[\'chunk\']"', "", "state_space.chunk is missing: give a number or an expression"),
        ("estuary", "groups = \"ssm['groups']\"", "groups = 0", "is not a multiple of 0 = 0"),
        ("kelp", 'ignored = ["theta"]', "ignored = 5", "ignored = 5: give a list of texts"),
        ("kelp", 'ignored = ["theta"]', "", "key 'theta' = 500000.0 is not understood"),
        ("kelp", 'like = "llama"', 'like = ["llama"]', "like = ['llama']: give a text"),
        ("kelp", "[terms]", "[term]", "unknown key 'term': did you mean 'terms'?"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(name: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((OWN / name / "config.json").read_text())
    text = (OWN / name / "family.toml").read_text()
    assert old in text
    (tmp_path / "family.toml").write_text(text.replace(old, new))
    with pytest.raises((WorkloadError, SimError)) as stop:
        load_model(str(tmp_path))
    assert message in str(stop.value)


@pytest.mark.parametrize(("field", "value", "least"), [("hbm_bytes_per_s", 1.0, "1e+09"), ("bf16", 0.5, "1e+09")])
def test_a_gpu_that_takes_hours_a_kernel_is_refused(field: str, value: float, least: str) -> None:
    text = (files("hardware") / "data" / "gpus" / "h100-sxm-80gb.toml").read_text(encoding="utf-8")
    changed = re.sub(rf"(?m)^{field} = {{ value = [^,]+,", f"{field} = {{ value = {value},", text, count=1)
    with pytest.raises(HardwareError, match=re.escape(f"{field} = {value:g}: give at least {least}, in SI units")):
        parse_gpu(changed, where="g.toml")


@pytest.mark.parametrize(("field", "value"), [("disk_read_bytes_per_s", 5e8), ("nic_bytes_per_s", 125e6)])
def test_a_slow_disk_or_nic_of_a_node_is_none_of_these(field: str, value: float) -> None:
    """A SATA drive, and Ethernet of 1 Gbit/s."""
    text = (files("hardware") / "data" / "nodes" / "hgx-8.toml").read_text(encoding="utf-8")
    changed = re.sub(rf"(?m)^{field} = {{ value = [^,]+,", f"{field} = {{ value = {value},", text, count=1)
    assert getattr(parse_node(changed, where="n.toml"), field) == value


def test_true_and_false_are_known_in_expressions() -> None:
    assert load_model(str(OWN / "couplet")).tied_embeddings  # tied_embeddings = "true"


def test_mutated_families_are_read_or_refused() -> None:
    read = 0
    for number in range(300):
        rng = random.Random(f"family {number}")
        folder = OWN / rng.choice(NAMES)
        configured: Any = json.loads((folder / "config.json").read_text())
        table: Any = tomllib.loads((folder / "family.toml").read_text())
        if rng.random() < 0.75:
            table = mutated(table, rng)
        else:
            configured = mutated(configured, rng)
        try:
            made = parse_family(toml_text(table), where="family.toml")
            read += params(parse_config(json.dumps(configured), where="config.json", family=made)) > 0
        except WorkloadError as error:
            assert "family.toml" in str(error) or "config.json" in str(error)
    assert 30 < read < 200
