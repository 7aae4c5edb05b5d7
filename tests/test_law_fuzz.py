"""A few dozen random runs held to laws; ``python -m tests.law_fuzz --cases 2000`` tries more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sim import simulate
from sim.result.report import summary, summary_text
from tests.law_fuzz import Case, _bounds, _memory, _power, _text, case_of, gpu_file, run, work


@pytest.mark.parametrize("seed", [41, 42])
def test_random_runs_keep_the_laws(seed: int) -> None:
    found = [(wrong, case.fields | {"model": case.config}) for case, wrong in run(16, seed) if wrong]
    assert found == []


def test_the_laws_see_what_is_wrong(tmp_path: Path) -> None:
    rng = random.Random(3)
    case = case_of(rng, tmp_path)
    while case.fields["phase"] != "prefill" or case.fields.keys() & {"tp", "regime", "uncapped", "sm_clock_mhz"}:
        case = case_of(rng, tmp_path)
    found, gpu = simulate(**case.fields), gpu_file(case.fields["gpu"])
    data, text = summary(found), summary_text(found)

    def wrong(case: Case = case, text: str = text, watts: float = 1.0, **other: object) -> int:
        said = data | other | {"power_w_per_gpu": [watts * one for one in data["power_w_per_gpu"]]}
        laws = (_bounds(case, said, gpu, 1), _power(case, "", said, gpu), _memory(case, said), _text(text, said))
        return sum(len(list(law)) for law in laws)

    least, read, most = work(case)
    assert wrong() == 0
    assert wrong(flops=0.9 * least) == 2  # and the MFU is of other FLOPs
    assert wrong(flops=1.1 * most) == 2
    assert wrong(hbm_bytes=0.3 * read) == 2
    assert wrong(latency_s=data["latency_s"] / 100) > 3
    assert wrong(watts=3.0) == 2
    assert wrong(watts=0.01) == 2
    assert wrong(sm_clock_hz_per_gpu=[3e9]) == 1
    held = data["memory_bytes_per_gpu"]
    assert wrong(memory_bytes_per_gpu=held | {"weights": 1.1 * held["weights"]}) == 1
    assert wrong(memory_bytes_per_gpu=held | {"kv_cache": 2.0 * held["kv_cache"]}) == 1
    assert (
        wrong(text=text.replace("FLOP/s (", "FLOP/s ( ").replace("% of bf16", "% of int8").replace("% of f", "% of g"))
        == 1
    )
