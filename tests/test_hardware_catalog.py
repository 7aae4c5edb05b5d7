"""The GPU catalog: every entry complete and sourced, names resolved, bad files refused in one line."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from hardware.catalog import CONFIDENCES, NUMBERS, gpu_aliases, list_gpus, load_gpu, parse_gpu
from hardware.errors import HardwareError

H100 = (files("hardware") / "data" / "gpus" / "h100-sxm-80gb.toml").read_text(encoding="utf-8")


def changed(field: str, line: str) -> str:
    """The H100's TOML with the line of ``field`` replaced (by nothing, when ``line`` is empty)."""
    text, count = re.subn(rf"^{field} = .*$", line, H100, flags=re.MULTILINE)
    assert count == 1, field
    return text


def test_the_catalog_holds_the_boards_people_ask_for() -> None:
    assert list_gpus() == (
        "a10-24gb", "a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-80gb", "b200-sxm-180gb",
        "b300-sxm-288gb", "gb200-nvl-186gb", "h100-nvl-94gb", "h100-pcie-80gb", "h100-sxm-80gb", "h20-sxm-96gb",
        "h200-sxm-141gb", "h800-sxm-80gb", "l4-24gb", "l40s-48gb", "mi300x-192gb", "rtx-4090-24gb", "v100-sxm2-32gb",
    )  # fmt: skip


@pytest.mark.parametrize("name", list_gpus())
def test_every_figure_has_a_source_and_stands_to_reason(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.id == name
    assert set(gpu.sources) == {*NUMBERS, *gpu.tensor_flops_per_s}
    assert all(source.strip() for source in gpu.sources.values())
    assert set(gpu.confidence.values()) <= set(CONFIDENCES)
    assert gpu.min_clock_hz < gpu.reference_clock_hz <= gpu.max_clock_hz < 4e9
    # The name carries the capacity; makers count GB as 10^9 or as 2^30.
    capacity_gb = int(re.findall(r"(\d+)gb$", name)[0])
    assert 0.95 <= gpu.memory_bytes / (capacity_gb * 1e9) <= 1.08
    # FLOP a cycle and SM of fp16 with wide accumulation: 512 on gaming Ada, 8192 on Blackwell.
    assert 500 <= gpu.tensor_flops_per_cycle_per_sm("fp16") <= 8_300
    if "int8" in gpu.tensor_flops_per_s:
        # Twice the rate of fp16; four times where gaming boards halve fp16 with fp32 accumulation.
        assert 1.9 <= gpu.tensor_flops_per_s["int8"] / gpu.tensor_flops_per_s["fp16"] <= 4.1


def test_published_figures() -> None:
    h100, a100 = load_gpu("h100-sxm-80gb"), load_gpu("a100-sxm-80gb")
    assert (h100.sms, h100.tdp_w, h100.link_bytes_per_s, h100.hbm_bytes_per_s) == (132, 700.0, 450e9, 3.35e12)
    assert (h100.min_clock_hz, h100.reference_clock_hz, h100.max_clock_hz) == (345e6, 1830e6, 1980e6)
    # 4096 dense bf16 FLOP a cycle and SM: 132 SMs x 4096 x 1.830 GHz = 989.4 TFLOP/s.
    assert h100.tensor_flops_per_cycle_per_sm("bf16") == pytest.approx(4096, rel=1e-3)
    # 108 SMs x 2048 x 1.410 GHz = 311.9 TFLOP/s.
    assert a100.tensor_flops_per_cycle_per_sm("bf16") == pytest.approx(2048, rel=1e-3)
    assert (a100.sms, a100.tdp_w, a100.link_bytes_per_s) == (108, 400.0, 300e9)


@pytest.mark.parametrize(("architecture", "per_cycle"), [("ampere", 2048), ("hopper", 4096), ("blackwell", 8192)])
def test_boards_of_one_chip_retire_the_same_flops_a_cycle(architecture: str, per_cycle: float) -> None:
    cut = load_gpu("h20")  # sold with a quarter of its chip's tensor rate
    assert cut.tensor_flops_per_cycle_per_sm("bf16") == pytest.approx(4096 / 4, rel=0.02)
    boards = [gpu for gpu in map(load_gpu, list_gpus()) if gpu.architecture == architecture and gpu.link != "none"]
    boards = [gpu for gpu in boards if gpu.id != cut.id]
    assert boards
    for gpu in boards:
        assert gpu.tensor_flops_per_cycle_per_sm("bf16") == pytest.approx(per_cycle, rel=5e-3), gpu.id


def test_names_resolve_by_alias_prefix_and_case() -> None:
    assert load_gpu("h100").id == "h100-sxm-80gb"
    assert load_gpu("H200").id == "h200-sxm-141gb"
    assert load_gpu("a100-pcie-80gb").id == "a100-pcie-80gb"
    assert load_gpu("h100-nvl").id == "h100-nvl-94gb"
    assert gpu_aliases() == {"h100": "h100-sxm-80gb"}


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("h2", "fits several GPUs: h20-sxm-96gb, h200-sxm-141gb"),
        ("l40", "did you mean 'l40s-48gb'"),
        ("mi300", "did you mean 'mi300x-192gb'"),
        ("a100", "fits several GPUs: a100-pcie-40gb, a100-pcie-80gb, a100-sxm-40gb, a100-sxm-80gb: name one"),
        ("a100-pcie-8", "did you mean 'a100-pcie-80gb'"),
        ("a100-sxm", "fits several GPUs: a100-sxm-40gb, a100-sxm-80gb: name one"),
        ("a", "fits several GPUs"),
        ("", "unknown gpu ''"),
    ],
)
def test_a_beginning_of_another_product_is_refused_with_the_candidates(name: str, candidates: str) -> None:
    with pytest.raises(HardwareError) as refused:
        load_gpu(name)
    assert candidates in str(refused.value) and "\n" not in str(refused.value)


def test_every_accepted_beginning_ends_at_a_dash_and_is_unique() -> None:
    """All beginnings of all ids, as an independent statement of the rule."""
    for known in list_gpus():
        for length in range(1, len(known)):
            name = known[:length]
            if name in list_gpus() or name in gpu_aliases():
                continue
            fits = [gpu for gpu in list_gpus() if gpu.startswith(name)]
            whole = [gpu for gpu in fits if gpu[length] == "-"]
            try:
                found = load_gpu(name).id
            except HardwareError as refused:
                assert len(whole) != 1 and any(gpu in str(refused) for gpu in fits)
            else:
                assert whole == [found]


def test_a_name_that_fits_several_or_none() -> None:
    with pytest.raises(HardwareError, match="gpu = 'h100-' fits several GPUs: h100-nvl-94gb, h100-pcie-80gb, h100-s"):
        load_gpu("h100-")
    with pytest.raises(HardwareError, match="unknown gpu 'h100-smx-80gb': did you mean 'h100-sxm-80gb'"):
        load_gpu("h100-smx-80gb")
    with pytest.raises(HardwareError, match="unknown gpu 'zzz': see 'wattline gpus'"):
        load_gpu("zzz")


def test_a_rate_of_16_bit_products_is_needed() -> None:
    with pytest.raises(
        HardwareError, match="mine: tensor_flops_per_s has no bf16 and no fp16: give the rate of 16-bit"
    ):
        parse_gpu(re.sub("^(bf16|fp16) = .*$", "", H100, flags=re.MULTILINE), where="mine")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(H100.replace('id = "h100-sxm-80gb"', 'id = "mine"'))
    assert load_gpu(str(path)).id == "mine"
    with pytest.raises(HardwareError, match=r"cannot read GPU file '.*absent\.toml': No such file or directory"):
        load_gpu(str(tmp_path / "absent.toml"))
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(HardwareError, match=r"latin\.toml': not UTF-8 text \(byte 8\)"):
        load_gpu(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize(
    ("field", "line", "message"),
    [
        ("sms", 'smss = { value = 1, source = "s", confidence = "high" }', "unknown key 'smss': did you mean 'sms'?"),
        ("sms", "", "sms is missing: give { value, source, confidence }"),
        ("sms", "sms = 132", "sms = 132 has no source: give { value, source, confidence }"),
        ("sms", 'sms = { value = 132, source = " ", confidence = "high" }', "sms = 132 has no source: say where"),
        ("sms", 'sms = { value = 132, sauce = "s" }', "sms: unknown key 'sauce': did you mean 'source'?"),
        ("sms", 'sms = { value = 1.5, source = "s", confidence = "high" }', "sms = 1.5: give a whole number"),
        ("sms", 'sms = { value = "1", source = "s", confidence = "high" }', "sms = '1': give a finite number"),
        ("sms", 'sms = { value = true, source = "s", confidence = "high" }', "sms = True: give a finite number"),
        ("tdp_w", 'tdp_w = { value = nan, source = "s", confidence = "high" }', "tdp_w = nan: give a finite number"),
        ("tdp_w", 'tdp_w = { value = inf, source = "s", confidence = "high" }', "tdp_w = inf: give a finite number"),
        ("tdp_w", 'tdp_w = { value = 0, source = "s", confidence = "high" }', "tdp_w = 0: must be positive"),
        ("tdp_w", 'tdp_w = { value = -7, source = "s", confidence = "high" }', "tdp_w = -7: must be positive"),
        ("tdp_w", 'tdp_w = { value = 9, source = "s", confidence = "high" }', "idle_w = 72.3 is not below tdp_w = 9"),
        ("tdp_w", 'tdp_w = { value = 9, source = "s", confidence = "sure" }', "confidence = 'sure': give one of high"),
        ("bf16", 'bf16 = { value = 0, source = "s", confidence = "high" }', "tensor_flops_per_s: bf16 = 0: must be"),
        ("link", "link = 4", "link = 4: give a text"),
        ("max_clock_hz", 'max_clock_hz = { value = 3e8, source = "s", confidence = "high" }', "is above max_clock_hz"),
        ("name", "name = ", "not valid TOML"),
    ],
)
def test_strict_loading(field: str, line: str, message: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_gpu(changed(field, line), where="mine.toml")
    assert str(error.value).startswith("mine.toml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_short_names_are_those_that_the_files_say() -> None:
    folder = files("hardware") / "data" / "gpus"
    said = {gpu: tomllib.loads((folder / f"{gpu}.toml").read_text(encoding="utf-8")) for gpu in list_gpus()}
    assert gpu_aliases() == {alias: gpu for gpu, table in said.items() for alias in table.get("aliases", ())}
    assert not gpu_aliases().keys() & set(list_gpus())  # an id means itself
