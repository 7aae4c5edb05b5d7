"""Servers whose experts lie on several GPUs: the kernels that take tokens there, and the type they travel in."""

from __future__ import annotations

from typing import Any

import pytest

from sim.serving import serve
from sim.serving.cost import Batch, Chunk
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec
from sim.serving.stages import stage_prices
from workloads.errors import WorkloadError

BASE = {"model": "qwen3-30b-a3b", "ep": 8, "ep_mode": "all_to_all", "stack": "paged-kv"}
FEW = Batch(decoding=16, cached=16 * 500)
MANY = Batch(chunks=(Chunk(tokens=8192, context=8192),) * 4, ending=4)


def prices(**fields: Any) -> StepPrices:
    spec = ServeSpec.of(**(BASE | fields))
    (prices,) = stage_prices(spec, spec.group())
    return prices


def test_decoding_wants_low_latency_kernels_and_prompts_normal_ones() -> None:
    """Over two nodes, where a token goes once to each node, not once to each expert."""
    low, normal = (prices(ep=16, ep_kernels=kernels) for kernels in ("low_latency", "normal"))
    assert low.whole(FEW).time_s < normal.whole(FEW).time_s
    assert normal.whole(MANY).time_s < low.whole(MANY).time_s


def test_a_step_with_the_kernels_is_the_step_in_one_run() -> None:
    for kernels in ("low_latency", "normal"):
        found = prices(ep_kernels=kernels)
        parts, exact = found.whole(FEW), found.exact(FEW)
        assert parts.time_s == pytest.approx(exact.time_s, rel=0.01)
        assert parts.energy_j == pytest.approx(exact.energy_j, rel=0.01)


def test_tokens_in_fp8_travel_quicker() -> None:
    given = {"dtype": "fp8", "ep_kernels": "normal"}
    narrow, wide = (prices(**given, dispatch_dtype=kind).whole(MANY).time_s for kind in ("fp8", "bf16"))
    assert narrow < wide
    assert prices(**given).whole(MANY).time_s == narrow


def test_a_server_runs_on_them_and_says_that_nobody_measured_it() -> None:
    load = {"requests": 12, "rate_per_s": 20.0, "input_tokens": 300, "output_tokens": 20}
    runs = {by: serve(**BASE, **load, ep_kernels=by).summary for by in ("low_latency", "normal")}
    assert runs["low_latency"]["tpot_s"]["mean"] < runs["normal"]["tpot_s"]["mean"]
    assert all(data["status"] == "unchecked" for data in runs.values())
    apart = serve(**BASE, **load, ep_kernels="normal", prefill_replicas=1)
    assert bool(apart.requests["done_s"].notna().all())


def test_what_a_server_says_of_its_replicas_names_ranks_of_experts() -> None:
    """Replicas of four GPUs were ``1 x tp 1``."""
    assert ServeSpec.of(**BASE).roles == f"1 x tp 1 ep {BASE['ep']}"
    assert ServeSpec.of(**BASE, cp=2, pp=2).roles == f"1 x tp 1 ep {BASE['ep']} cp 2 pp 2"


def test_refusals_name_the_field() -> None:
    with pytest.raises(WorkloadError, match="dispatch_dtype = 'bf16' needs ep_kernels"):
        serve(**BASE, requests=1, dispatch_dtype="bf16")
