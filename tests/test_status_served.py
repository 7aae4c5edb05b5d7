"""What a served run says that it rests on: servers that were measured, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from sim import serve


def standing(**fields: Any) -> tuple[str, str, list[str]]:
    given = {"model": "llama3-8b", "gpu": "h200-sxm-141gb", "requests": 8, "rate_per_s": 4.0, **fields}
    summary = serve(**given).summary
    return summary["status"], summary["expected_error"], summary["status_reasons"]


def test_a_server_like_those_measured_says_how_far_off_these_were() -> None:
    status, error, reasons = standing()
    assert (status, reasons) == ("calibrated", [])
    assert error.startswith("median time to first token -") and error.endswith("on 9 measured servers of this kind")


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"rate_per_s": 400.0}, "extrapolated", "requests_per_s = "),
        ({"requests": 1}, "calibrated", ""),
        ({"input_tokens": 30_000}, "extrapolated", "longest_tokens = "),
        ({"power_cap_w": 500.0}, "extrapolated", "no measurement was taken under this power limit"),
        ({"model": "qwen3-8b"}, "extrapolated", "d_ff = 12288 (measured: 14336 alone)"),
        ({"replicas": 2}, "unchecked", "no server was measured with replicas = 2;"),
        ({"sm_partition": "prefill=64,decode=68"}, "unchecked", "no server was measured with sm_partition = "),
        ({"arrivals": "constant"}, "unchecked", "no server was measured with arrivals = constant"),
        ({"max_num_batched_tokens": 512}, "unchecked", "no server was measured with max_num_batched_tokens = 512"),
        ({"host": "none"}, "unchecked", "no server was measured with host = none"),
        ({"tp": 2}, "calibrated", ""),
        ({"tp": 4}, "unchecked", "no server was measured"),
        ({"dtype": "fp8_e4m3"}, "unchecked", "no server was measured"),
        ({"stack": "paged-kv"}, "unchecked", "no server was measured"),
        ({"gpu": "a100-sxm-80gb"}, "unchecked", "no server was measured"),
    ],
)
def test_any_other_is_marked(fields: dict[str, Any], status: str, reason: str) -> None:
    found, _, reasons = standing(**fields)
    assert found == status
    assert any(one.startswith(reason) for one in reasons) or (reason, reasons) == ("", [])
