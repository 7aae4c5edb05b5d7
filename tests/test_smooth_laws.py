"""One more unit of work: no law makes it cheaper, none jumps, but where measured rows show an edge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest

from hardware.catalog import load_gpu
from hardware.laws import price
from hardware.laws.residency import hbm_share
from hardware.laws.terms import KernelTerms
from hardware.power import point_at
from hardware.profile import load_profile
from sim import simulate
from workloads.routing import Choice, Routing, expert_loads

H100 = load_gpu("h100-sxm-80gb")
PROFILE = load_profile("h100-sxm-80gb")
CLOCKS_HZ = (1.98e9, 1.41e9, 0.9e9)
CHEAPER, JUMP = 0.005, 0.02


def steps(terms_of: Callable[[int], KernelTerms], sizes: Iterable[int]) -> dict[int, tuple[float, float]]:
    """By the larger of two neighbouring sizes: least and most change of latency and energy at any clock, the growth of
    the size itself taken off the most."""
    assert PROFILE is not None

    def costs(size: int) -> list[float]:
        terms = terms_of(size)
        sms = min(terms.blocks * terms.sms_per_block, float(H100.sms))
        found = []
        for clock_hz in CLOCKS_HZ:
            at = point_at(terms, PROFILE.curve, sms=sms, gpu_sms=H100.sms, sm_clock_hz=clock_hz)
            found += [at.latency_s, at.latency_s * at.power_w]
        return found

    known = [(size, np.array(costs(size))) for size in sizes]
    changes = {big: (now / before - 1.0, big / small - 1.0) for (small, before), (big, now) in pairwise(known)}
    return {size: (float(change.min()), float(change.max()) - grown) for size, (change, grown) in changes.items()}


def grouped(tokens: int, *, experts: int, top_k: int, n: int, k: int) -> KernelTerms:
    assert PROFILE is not None
    choice = Choice(experts=experts, top_k=top_k)
    (load,) = expert_loads(tokens=tokens, choice=choice, routing=Routing(), ranks=1)
    return price.grouped_gemm_terms(
        PROFILE,
        H100,
        experts=experts,
        n=n,
        k=k,
        **{name: value for name, value in asdict(load).items() if name != "small_tiles"},
    )


MIXTURES = [(8, 2, 28672, 4096), (8, 2, 4096, 14336), (128, 8, 1536, 2048), (128, 8, 2048, 768)]


@pytest.mark.parametrize(("experts", "top_k", "n", "k"), MIXTURES)
def test_a_token_more_never_makes_experts_cheaper_nor_jump(experts: int, top_k: int, n: int, k: int) -> None:
    """But where PyTorch changes kernel, beyond 128 rows an expert: 2,000 and 2,080 tokens of 128 experts took 383.2 and
    375.2, 210.4 and 207.9 us (experts.jsonl, 1,755 and 1,710 MHz), though the first had yet to climb to 128 rows."""
    edge = 129 * experts // top_k
    around = [*range(256, 640, 1), *range(edge - 40, edge + 40)]
    found = steps(lambda tokens: grouped(tokens, experts=experts, top_k=top_k, n=n, k=k), sorted(set(around)))
    at_edge = found.pop(edge)
    assert min(low for low, _ in found.values()) > -CHEAPER
    assert max(high for _, high in found.values()) < JUMP
    assert at_edge[0] > -0.15  # at 900 MHz, where no row of ours lies


def test_what_stays_in_l2_is_one_rule_without_steps() -> None:
    """5,579 to 5,581 rows of 128 experts moved 304.5 to 314.4 us and 5 % of the energy in HBM."""
    assert PROFILE is not None

    def few_rows(rows: int) -> KernelTerms:
        return price.grouped_gemm_terms(
            PROFILE, H100, experts=128, rows=rows, distinct=128, tiles128=128.0, tiles256=128.0, rows_beyond128=0.0,
            n=1536, k=2048,
        )  # fmt: skip

    found = steps(few_rows, range(3000, 9000, 5))
    assert min(low for low, _ in found.values()) > -0.0005 and max(high for _, high in found.values()) < 0.001
    shares = [hbm_share(size, 50e6) for size in range(0, 80_000_000, 100_000)]
    assert shares == sorted(shares) and max(b - a for a, b in pairwise(shares)) < 0.005
    assert (shares[0], shares[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("op", ["copy", "permute_copy", "silu_mul", "gelu", "gather", "rope"])
def test_elementwise_rows_never_jump(op: str) -> None:
    """Sorting 2,289 rows of 8 KB for 2,288 took 24 % longer, where its bytes were taken to leave L2 all at once."""
    assert PROFILE is not None

    def terms(rows: int) -> KernelTerms:
        moved = 16384 * rows
        blocks = 40 * rows if op == "rope" else 2 * rows
        return price.elementwise_terms(PROFILE, H100, op=op, rows=rows, bytes_moved=moved, launched_blocks=blocks)

    found = steps(terms, range(64, 6000))
    assert min(low for low, _ in found.values()) > -CHEAPER and max(high for _, high in found.values()) < 0.005


DECODES = [(1, 32, 8), (2, 32, 8), (8, 32, 8), (64, 32, 8), (1, 8, 1), (16, 32, 4), (1, 32, 32)]


@pytest.mark.parametrize(("batch", "q_heads", "kv_heads"), DECODES)
def test_a_longer_cache_never_jumps(batch: int, q_heads: int, kv_heads: int) -> None:
    """One key more than 128 cost 22 %, than 6,272 saved 9 %, where whole numbers of parts changed."""
    assert PROFILE is not None

    def terms(kv_len: int) -> KernelTerms:
        return price.attention_decode_terms(
            PROFILE, H100, batch=batch, kv_len=kv_len, q_heads=q_heads, kv_heads=kv_heads, head_dim=128, kv_bytes=2
        )

    found = steps(terms, [*range(1, 1500), *range(4000, 4300), *range(6000, 6400)])
    assert min(low for low, _ in found.values()) > -CHEAPER and max(high for _, high in found.values()) < JUMP


@pytest.mark.parametrize("kv_len", [512, 1024, 4096, 16384])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(32, 8), (8, 1), (32, 4)])
def test_a_sequence_more_never_makes_decode_cheaper(kv_len: int, q_heads: int, kv_heads: int) -> None:
    """A 13th sequence of 512 keys saved 8 %, a 100th of one head 12 %: from there on nothing was split."""
    assert PROFILE is not None

    def terms(batch: int) -> KernelTerms:
        return price.attention_decode_terms(
            PROFILE, H100, batch=batch, kv_len=kv_len, q_heads=q_heads, kv_heads=kv_heads, head_dim=128, kv_bytes=2
        )

    found = steps(terms, range(1, 300))
    assert min(low for low, _ in found.values()) > -CHEAPER and max(high for _, high in found.values()) < JUMP


@pytest.mark.parametrize(("model", "batch", "edge"), [("mixtral-8x7b", 1, 516), ("qwen3-30b-a3b", 4, 516)])
def test_a_mixture_prefill_grows_with_its_tokens(model: str, batch: int, edge: int) -> None:
    """At 1,410 MHz 500 to 510 tokens cost Mixtral 13.6 %, 514 to 516 saved 13.3 %: the draw of one routing and a padded
    pair of tiles counted as a full one. What is left at ``edge`` is PyTorch's change of kernel (experts.jsonl)."""

    def cost(tokens: int) -> tuple[float, float]:
        run = simulate(
            model=model, gpu="h100-sxm-80gb", layers=2, phase="prefill", batch=batch, seq_len=tokens, sm_clock_mhz=1410
        )
        return run.latency_s, run.energy_j

    for small, big in pairwise([496, 500, 504, 508, 512, 514, edge, edge + 2]):
        changes = np.array(cost(big)) / np.array(cost(small)) - 1.0
        assert changes.min() > (-0.065 if big == edge else -CHEAPER), (small, big)
        assert changes.max() < (0.06 if big == edge else 0.03), (small, big)
