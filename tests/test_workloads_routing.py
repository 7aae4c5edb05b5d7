"""Routing of tokens to experts: laws, recordings, fits to published figures, placement and its balance."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from tests.transformer_kit import build
from workloads import Layout, Routing, WorkloadError, load_model
from workloads.balance import balanced_placement, contiguous_placement
from workloads.memory import MemoryLoad, memory_need
from workloads.popularity import Busiest, GiniTarget, Recorded, Zipf, chosen_share, gini, parse_popularity
from workloads.routing import Choice, ExpertLoad, _draw, _normal_share, busiest_spread, expert_loads
from workloads.work import GroupedGemmWork

SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[1].parent / "shared"))
QWEN = Choice(experts=128, top_k=8)
DEEPSEEK = Choice(experts=256, top_k=8, groups=8, top_groups=4)


def loads(tokens: int = 64, ranks: int = 4, choice: Choice = QWEN, **fields: Any) -> tuple[ExpertLoad, ...]:
    rows = fields.pop("rows_per_rank", None)
    return expert_loads(tokens=tokens, choice=choice, routing=Routing(**fields), ranks=ranks, rows_per_rank=rows)


def busiest(found: tuple[ExpertLoad, ...]) -> float:
    """Rows of the busiest rank over the mean rank's."""
    return max(load.rows for load in found) * len(found) / sum(load.rows for load in found)


# -- the draw ---------------------------------------------------------------------------------------------------


@given(
    tokens=st.integers(1, 4096),
    top_k=st.integers(1, 8),
    skew=st.floats(0, 2),
    ranks=st.sampled_from([1, 2, 4, 8]),
    replicas=st.sampled_from([None, 0, 8, 16]),
)
def test_routing_gives_every_token_its_experts(
    tokens: int, top_k: int, skew: float, ranks: int, replicas: int | None
) -> None:
    found = loads(tokens, ranks, Choice(experts=32, top_k=top_k), popularity=Zipf(exponent=skew), replicas=replicas)
    assert sum(load.rows for load in found) == tokens * top_k
    slots = (32 + (replicas or 0)) // ranks
    for load in found:
        assert 0 <= load.distinct <= min(load.rows, slots)
        assert load.rows / 128 <= load.tiles128 <= load.rows / 128 + load.distinct


def test_skew_loads_one_rank_more_and_hits_fewer_experts() -> None:
    flat, steep = loads(), loads(popularity=Zipf(exponent=1.5))
    assert max(load.rows for load in steep) > max(load.rows for load in flat)
    assert sum(load.distinct for load in steep) < sum(load.distinct for load in flat)


def test_recorded_loads_replace_the_drawn_ones() -> None:
    found = loads(ranks=2, rows_per_rank=(500, 12))
    assert [load.rows for load in found] == [500, 12]
    assert found[1].distinct <= 12


def test_a_seed_is_the_same_every_time_and_another_one_another_draw() -> None:
    draw = expert_loads.__wrapped__
    fields: dict[str, Any] = {"tokens": 777, "choice": QWEN, "ranks": 4}
    one, other = Routing(popularity=Zipf(exponent=0.7)), Routing(popularity=Zipf(exponent=0.7), seed=1)
    assert draw(routing=one, **fields) == draw(routing=one, **fields) != draw(routing=other, **fields)


def test_fewer_tokens_are_the_first_of_more() -> None:
    whole = np.random.default_rng(7)
    order = whole.permutation(128)
    chosen = np.argpartition(np.log(-np.log(whole.random((1000, 128)))), 7, axis=1)[:, :8]
    for tokens in (1, 255, 256, 257, 1000):
        rows, place = _draw(tokens, QWEN, Zipf(), 7)
        assert rows.tolist() == np.bincount(chosen[:tokens].ravel(), minlength=128).tolist()
        assert place.tolist() == order.tolist()


def test_means_over_draws_are_the_normal_distributions() -> None:
    deviations = np.linspace(-12.0, 12.0, 4001)
    assert _normal_share(deviations) == pytest.approx(ndtr(deviations), rel=0.0, abs=3e-16)


def test_the_spread_of_draws_holds_most_seeds() -> None:
    law = Zipf(exponent=0.5)
    low, mean, high = busiest_spread(tokens=1024, choice=QWEN, routing=Routing(popularity=law), ranks=8)
    seeds = [busiest(loads(1024, 8, popularity=law, seed=seed)) for seed in range(12)]
    assert sum(0.97 * low <= ratio <= 1.03 * high for ratio in seeds) >= 11
    assert np.mean(seeds) == pytest.approx(mean, rel=0.08)


def test_a_grouped_router_reaches_few_groups() -> None:
    # One group a rank (8 experts of at most 4 of 8 groups): a token's rows go to at most 4 ranks.
    alone = loads(1, 8, DEEPSEEK)
    assert sum(load.rows for load in alone) == 8
    assert sum(load.rows > 0 for load in alone) <= 4
    spread = [sum(load.rows > 0 for load in loads(1, 8, Choice(experts=256, top_k=8), seed=s)) for s in range(20)]
    assert max(spread) > 4


# -- laws of popularity -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [Zipf(exponent=0.5), Zipf(exponent=1.0), Busiest(share=0.043, experts_for_90=65)])
def test_expected_shares_are_what_draws_give(law: Zipf | Busiest) -> None:
    share = chosen_share(law, 128, 8)
    counts = np.sort([expert_share(law, rank) for rank in range(128)])[::-1]
    assert share.sum() == pytest.approx(1.0)
    assert np.abs(counts - share).max() < 0.04 * share.max()


def expert_share(law: Zipf | Busiest, rank: int) -> float:
    found = loads(16384, 128, popularity=law)
    return found[rank].rows / (16384 * 8)


@pytest.mark.parametrize("target", [0.0, 0.105, 0.15, 0.3, 0.5])
def test_a_gini_target_is_met(target: float) -> None:
    assert gini(chosen_share(GiniTarget(gini=target), 64, 6)) == pytest.approx(target, abs=1e-6)


def test_uniform_draws_have_the_gini_and_peak_of_the_multinomial() -> None:
    # Computed figures of public/moe_imbalance.csv: Gini 0.29 / 0.07 / 0.03, max/mean 2.5 / 1.33 / 1.09.
    for tokens, expected_gini, peak in ((64, 0.29, 2.5), (1024, 0.07, 1.33), (8192, 0.03, 1.09)):
        rows = np.array([load.rows for load in loads(tokens, 128)], dtype=float)
        assert gini(rows) == pytest.approx(expected_gini, abs=0.03)
        assert rows.max() / rows.mean() == pytest.approx(peak, rel=0.15)


def test_a_recording_comes_back_as_recorded(tmp_path: Path) -> None:
    rows = [40.0, 10.0, 30.0, 0.0, 20.0, 20.0, 5.0, 35.0]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    (tmp_path / "r.csv").write_text("expert,rows\n" + "".join(f"{i},{r}\n" for i, r in enumerate(rows)))
    law = parse_popularity(str(tmp_path / "r.json"))
    assert law == parse_popularity(str(tmp_path / "r.csv")) == Recorded(rows=tuple(rows))
    assert chosen_share(law, 8, 2) == pytest.approx(np.array(rows) / 160)
    found = loads(16384, 8, Choice(experts=8, top_k=2), popularity=law)
    assert [load.rows / 32768 for load in found] == pytest.approx(np.array(rows) / 160, abs=0.02)


def test_published_imbalance_of_qwen3_30b() -> None:
    """Busiest expert and experts for 90 % of the rows, per workload, from the law fitted to the two."""
    path = SHARED / "public" / "moe_imbalance.csv"
    if not path.exists():
        pytest.skip(f"no {path}: set WATTLINE_SHARED to the folder that holds public/")
    with path.open(encoding="utf-8") as stream:
        table = [row for row in csv.DictReader(stream) if row["model"] == "Qwen3-30B-A3B"]
    shares = [float(row["value"]) / 100 for row in table if row["metric"].startswith("top expert share")]
    counts = [int(row["value"]) for row in table if row["metric"].startswith("experts for 90")]
    assert len(shares) == len(counts) == 2
    # Tokens of the two workloads: about 1k and about 8k.
    for share, count, tokens in zip(shares, counts, (1024, 8192), strict=True):
        law = Busiest(share=share, experts_for_90=count)
        rows = np.sort([load.rows for load in loads(tokens, 128, popularity=law)])[::-1] / (8 * tokens)
        assert rows.mean() == pytest.approx(1 / 128)
        assert rows[0] == pytest.approx(share, rel=0.08)
        assert int(np.searchsorted(np.cumsum(rows), 0.9)) + 1 == pytest.approx(count, abs=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zipff:1", "routing = 'zipff:1': give uniform, zipf:EXPONENT, gini:TARGET, "),
        ("zipf:-1", "routing = 'zipf:-1': give uniform, zipf:EXPONENT, gini:TARGET, "),
        ("gini:1", "routing = 'gini:1': give uniform, zipf:EXPONENT, gini:TARGET, "),
        ("busiest:0.1", "routing = 'busiest:0.1': give uniform, zipf:EXPONENT, gini:TARGET, "),
        ("none.json", "cannot read routing 'none.json': No such file or directory"),
        ("text.json", "routing 'text.json': not rows by expert: "),
        ("negative.json", "routing 'negative.json': give one number of rows an expert, none negative, not all zero"),
        ("gap.csv", "routing 'gap.csv': not rows by expert: column 'expert' must count from 0 without gaps"),
    ],
)
def test_routing_is_read_strictly(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("hello")
    Path("negative.json").write_text("[1, -1]")
    Path("gap.csv").write_text("expert,rows\n0,1\n2,1\n")
    with pytest.raises(WorkloadError) as error:
        parse_popularity(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (Recorded(rows=(1.0,) * 4), "routing: recorded rows of 4 experts, the model has 128"),
        (Recorded(rows=(1.0,) + (0.01,) * 127),
         "routing: recorded expert 0 has 1 rows, more than the 0.28375 tokens that choose 8 experts each"),
        (Busiest(share=0.2, experts_for_90=60),
         "routing = 'busiest:0.2,60': 8 of 128 experts: the share lies between 1/128 and 1/8"),
        (Busiest(share=0.02, experts_for_90=10),
         "routing = 'busiest:0.02,10': 8 of 128 experts: no such law puts 90 % of the rows on 10 experts with that "
         "share on one"),
        (GiniTarget(gini=0.99), "routing = 'gini:0.99': 8 of 128 experts reach at most 0.94"),
    ],
)  # fmt: skip
def test_laws_that_cannot_be_are_refused(law: Any, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        chosen_share(law, 128, 8)
    assert str(error.value) == message


# -- replication and placement ----------------------------------------------------------------------------------


def test_replicas_even_out_the_ranks_and_cost_memory() -> None:
    law = Zipf(exponent=1.0)
    plain, placed, copied = (loads(4096, 8, popularity=law, replicas=r) for r in (None, 0, 16))
    assert busiest(plain) > 1.4 > 1.13 > busiest(placed) > busiest(copied)
    assert busiest(copied) < 1.03
    model = load_model("qwen3-30b-a3b")
    need = {
        copies: memory_need(
            model, Layout(ep=8, ep_mode="all_to_all"),
            MemoryLoad(batch=1, context=1, layers=48, lm_head=False, expert_replicas=copies),
        ).weight_bytes
        for copies in (0, 16)
    }  # fmt: skip
    assert need[16] - need[0] == 2 * 48 * 2 * 3 * 2048 * 768  # two more experts a rank, two bytes a weight
    program = build("qwen3-30b-a3b", ep=8, ep_mode="all_to_all", routing=Routing(popularity=law, replicas=16))
    works = [k.work for r in program.ranks for k in r.phases[0].segments[0].kernels]
    grouped = [work for work in works if isinstance(work, GroupedGemmWork)]
    assert {work.experts for work in grouped} == {18}


@given(
    expected=st.lists(st.floats(0.001, 1.0), min_size=8, max_size=64).map(lambda x: tuple(x[: len(x) // 8 * 8])),
    copies=st.sampled_from([0, 8, 16]),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_every_expert_has_a_slot_and_ranks_hold_equally_many(
    expected: tuple[float, ...], copies: int, ranks: int
) -> None:
    placement = balanced_placement(expected, copies, ranks)
    slots = [expert for rank in placement.ranks for expert in rank]
    assert sorted(set(slots)) == list(range(len(expected))) and len(slots) == len(expected) + copies
    assert {len(rank) for rank in placement.ranks} == {len(slots) // ranks}
    rows = np.round(np.asarray(expected) * 1000)
    assert sum(mine.sum() for mine in placement.rows_by_rank(rows)) == rows.sum()


def test_the_most_loaded_expert_is_copied_and_its_copies_live_apart() -> None:
    placement = balanced_placement((9.0, 1.0, 1.0, 1.0, 1.0, 1.0), 2, 4)
    homes = [rank for rank, mine in enumerate(placement.ranks) if 0 in mine]
    assert len(homes) == 3 and max(map(len, placement.ranks)) == 2
    assert contiguous_placement(6, 3).ranks == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ep": 8, "ep_mode": "all_to_all", "routing": Routing(replicas=3)},
         "expert_replicas = 3: the 128 experts and their copies must fill ep = 8 ranks evenly: use 0, 8, ..."),
        ({"routing": Routing(replicas=8)},
         "expert_replicas = 8 needs ep of at least 2: copies balance ranks"),
        ({"ep": 2, "ep_mode": "all_reduce", "routing": Routing(replicas=2), "tokens_per_ep_rank": (1, 2)},
         "expert_replicas moves experts between ranks: leave tokens_per_ep_rank out"),
        ({"model": "llama3-8b", "routing": Routing(seed=1)}, "routing: llama3-8b has no experts to choose from"),
    ],
)  # fmt: skip
def test_placements_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build(**({"model": "qwen3-30b-a3b"} | fields))
    assert str(error.value) == message
