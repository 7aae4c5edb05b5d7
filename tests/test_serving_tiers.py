"""Beginnings of prompts outside the GPUs' memory: what is found there, what it takes to bring back, who shares it."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sim.errors import ScenarioError
from sim.serving import serve
from sim.serving.result import ServeResult

MODEL = "llama3-8b"
PIECE = 512
PIECE_GB = PIECE * 32 * 2 * 8 * 128 * 2 / 1e9  # tokens, layers, K and V, heads, elements, 16 bit
LINK = 63e9  # bytes/s of a GPU's host link, each way
Row = tuple[float, int, Sequence[int]]  # seconds, tokens beyond whole pieces, hashes


def stream(folder: Path, rows: Sequence[Row], *, output: int = 1) -> Path:
    """Requests in Mooncake's format."""
    path = folder / "requests.jsonl"
    lines = [
        {"timestamp": at * 1e3, "input_length": PIECE * len(ids) + more, "output_length": output, "hash_ids": list(ids)}
        for at, more, ids in rows
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def served(path: Path, **fields: Any) -> ServeResult:
    return serve(model=MODEL, trace=path, host="none", **fields)


def conversations(seed: int, count: int, *, gap_s: float) -> list[Row]:
    """Prompts of 16 conversations, each of which goes on where it was, all with a beginning in common."""
    rng, turns, rows = random.Random(seed), dict.fromkeys(range(16), 0), []
    for number in range(count):
        one = min(rng.randrange(16), rng.randrange(16))
        turns[one] = turns[one] % 12 + rng.randint(1, 3)
        ids = [1, 2, *(1000 * (one + 1) + turn for turn in range(turns[one]))]
        rows.append((number * gap_s, 100, ids))
    return rows


def lru_hits(rows: Sequence[Row], room: int) -> list[int]:
    """Pieces that each prompt finds in a memory of ``room`` pieces that forgets the longest unused: by hand."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for _, _, ids in rows:
        known = next((number for number, one in enumerate(ids) if one not in held), len(ids))
        hits.append(known)
        old, new = ([one for one in reversed(ids) if (one in held) == known] for known in (True, False))
        for one in (*old, *new):
            held[one] = None
            held.move_to_end(one)
            if len(held) > room:
                held.popitem(last=False)
    return hits


@pytest.mark.parametrize("room", [20, 45, 90, 400])
def test_hits_are_those_of_the_least_recently_used_blocks(tmp_path: Path, room: int) -> None:
    """The GPU holds hardly more than a prompt, so that the host's memory decides; requests come one by one."""
    rows = conversations(3, 150, gap_s=5.0)
    run = served(stream(tmp_path, rows), kv_blocks=17 * PIECE // 16, kv_host_gb=(room + 0.5) * PIECE_GB)
    assert [hit // PIECE for hit in run.requests["hit_tokens"]] == lru_hits(rows, room)
    share = PIECE * sum(lru_hits(rows, room)) / run.requests["input_tokens"].sum()
    assert run.summary["hit_share"] == pytest.approx(share, rel=1e-12)


def test_more_room_finds_more(tmp_path: Path) -> None:
    path = stream(tmp_path, conversations(5, 120, gap_s=1.0))
    small = {"kv_blocks": 40 * PIECE // 16}
    runs = [served(path, **small), *(served(path, **small, kv_host_gb=gb) for gb in (1.0, 4.0, 30.0))]
    hits = [run.summary["hit_share"] for run in runs]
    assert hits == sorted(hits) and hits[-1] > 1.3 * hits[0]
    ttft = [run.requests["ttft_s"].mean() for run in runs]
    assert ttft[-1] < ttft[0]


AGAIN: list[Row] = [(0.0, 64, range(20)), (20.0, 64, range(100, 130)), (40.0, 64, range(20))]


def test_what_comes_back_takes_its_bytes_over_the_host_s_link(tmp_path: Path) -> None:
    """The second prompt takes the room of the first on the GPU; the third finds that one in the host's memory."""
    path = stream(tmp_path, AGAIN)
    few = {"kv_blocks": 31 * PIECE // 16}
    run, none = served(path, **few, kv_host_gb=100.0), served(path, **few)
    last, cold = run.requests.iloc[2], none.requests.iloc[2]
    assert (last["fetched_tokens"], last["hit_tokens"], cold["hit_tokens"]) == (20 * PIECE, 20 * PIECE, 0)
    assert last["fetch_s"] == pytest.approx(20 * PIECE_GB * 1e9 / LINK, rel=1e-9)
    assert last["started_s"] - last["received_s"] == pytest.approx(last["fetch_s"], rel=1e-9)
    assert last["ttft_s"] < 0.3 * cold["ttft_s"]
    assert run.summary["hit_tokens_by_tier"] == {"hbm": 0, "host": 20 * PIECE}
    wide = serve(model=MODEL, trace=path, host="none", tp=2, kv_host_gb=100.0, **few)
    assert wide.requests.iloc[2]["fetch_s"] == pytest.approx(last["fetch_s"] / 2, rel=1e-9)  # a link a GPU


def test_each_tier_s_slowest_port_sets_the_pace(tmp_path: Path) -> None:
    path = stream(tmp_path, AGAIN)
    size = 20 * PIECE_GB * 1e9
    few = {"kv_blocks": 31 * PIECE // 16}
    for tier, seconds in (
        ({"kv_disk_gb": 100.0}, size / 54.4e9),
        ({"kv_remote_gb": 100.0}, size / 50e9),
        ({"kv_remote_gb": 100.0, "kv_remote_gb_per_s": 7.0}, size / 7e9),
    ):
        run = served(path, **few, **tier)
        assert run.requests.iloc[2]["fetch_s"] == pytest.approx(seconds, rel=1e-9), tier


def test_what_a_tier_has_no_room_for_goes_to_the_next(tmp_path: Path) -> None:
    """The host keeps 30 pieces, so that the second prompt moves the first one to the disks."""
    path = stream(tmp_path, AGAIN)
    run = served(path, kv_blocks=31 * PIECE // 16, kv_host_gb=30.5 * PIECE_GB, kv_disk_gb=100.0)
    assert run.summary["hit_tokens_by_tier"] == {"hbm": 0, "disk": 20 * PIECE}
    lost = served(path, kv_blocks=31 * PIECE // 16, kv_host_gb=30.5 * PIECE_GB)
    assert lost.summary["hit_tokens"] == 0


BOTH: list[Row] = [(0.0, 64, range(20)), (0.0, 64, range(50, 70)), (20.0, 64, range(100, 130)),
                   (20.0, 64, range(200, 230)), (40.0, 64, range(20)), (40.0, 64, range(50, 70))]  # fmt: skip


def test_replicas_of_a_node_share_its_disks_and_each_has_its_own_link(tmp_path: Path) -> None:
    path = stream(tmp_path, BOTH)
    few = {"kv_blocks": 31 * PIECE // 16, "replicas": 2, "router": "round_robin"}
    size = 20 * PIECE_GB * 1e9
    host, disk = (served(path, **few, **{tier: 100.0}) for tier in ("kv_host_gb", "kv_disk_gb"))
    assert host.requests["fetch_s"].tolist()[4:] == pytest.approx([size / LINK] * 2, rel=1e-9)
    assert disk.requests["fetch_s"].tolist()[4:] == pytest.approx([2 * size / 54.4e9] * 2, rel=1e-9)


def test_a_store_behind_the_network_serves_all_replicas(tmp_path: Path) -> None:
    """The second prompt goes to the other replica, which has never seen its beginning."""
    path = stream(tmp_path, [(0.0, 64, range(20)), (20.0, 64, range(20))])
    two = {"replicas": 2, "router": "round_robin"}
    own, shared = (served(path, **two, **{tier: 100.0}) for tier in ("kv_host_gb", "kv_remote_gb"))
    assert (own.summary["hit_tokens"], shared.summary["hit_tokens"]) == (0, 20 * PIECE)


def test_a_router_knows_what_lies_outside(tmp_path: Path) -> None:
    rows: list[Row] = [(0.0, 64, range(20)), (20.0, 64, range(100, 130)), (40.0, 64, range(300, 325)), *AGAIN[2:]]
    rows[-1] = (60.0, 64, range(20))
    run = served(
        stream(tmp_path, rows), kv_blocks=31 * PIECE // 16, replicas=2, router="prefix_aware", kv_host_gb=100.0
    )
    assert run.requests["replica"].iloc[3] == run.requests["replica"].iloc[0]
    assert run.summary["hit_tokens"] == 20 * PIECE


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_while_caches_come_and_replicas_go(tmp_path: Path, seed: int) -> None:
    path = stream(tmp_path, conversations(seed, 80, gap_s=0.02), output=20)
    run = served(
        path,
        kills=[(0.5, 1)],
        replicas=2,
        kv_blocks=40 * PIECE // 16,
        kv_host_gb=60 * PIECE_GB,
        kv_disk_gb=100 * PIECE_GB,
        kv_remote_gb=200 * PIECE_GB,
        kv_remote_gb_per_s=2.0,
    )
    table = run.requests
    assert bool(table["done_s"].notna().all())
    assert (table["first_token_s"] >= table["received_s"] + table["fetch_s"] - 1e-9).all()
    assert run.summary["most_blocks"] <= 40 * PIECE // 16
    assert set(run.summary["hit_tokens_by_tier"]) > {"hbm"}
    parts = sum(run.energy_j_by_part.values())
    assert run.stretches["energy_j"].sum() == pytest.approx(parts, rel=1e-9)


def test_prompts_of_replicas_of_their_own_have_the_tiers(tmp_path: Path) -> None:
    path = stream(tmp_path, AGAIN, output=5)
    run = served(path, kv_blocks=31 * PIECE // 16, prefill_replicas=1, kv_host_gb=100.0)
    assert run.requests["fetched_tokens"].tolist() == [0, 0, 20 * PIECE]


def test_stages_of_a_pipeline_bring_their_layers_back_over_their_own_links(tmp_path: Path) -> None:
    """Hits are those of one stage's server; bytes too, over the links of all GPUs."""
    path = stream(tmp_path, AGAIN, output=3)
    run = served(path, pp=2, kv_blocks=31 * PIECE // 16, kv_host_gb=100.0)
    last = run.requests.iloc[2]
    assert run.requests["fetched_tokens"].tolist() == [0, 0, 20 * PIECE]
    assert last["hit_tokens"] == 20 * PIECE
    assert last["fetch_s"] == pytest.approx(20 * PIECE_GB * 1e9 / (2 * LINK), rel=1e-9)
    rows = conversations(3, 60, gap_s=5.0)
    runs = [served(stream(tmp_path, rows), pp=pp, kv_blocks=17 * PIECE // 16, kv_host_gb=3.0) for pp in (1, 2)]
    assert runs[0].requests["hit_tokens"].tolist() == runs[1].requests["hit_tokens"].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_pipelines_lose_nothing_while_caches_come_and_replicas_go(tmp_path: Path, seed: int) -> None:
    path = stream(tmp_path, conversations(seed, 60, gap_s=0.02), output=20)
    run = served(path, pp=2, kills=[(0.5, 1)], replicas=2, kv_blocks=40 * PIECE // 16, kv_host_gb=60 * PIECE_GB)
    table = run.requests
    assert bool(table["done_s"].notna().all()) and run.summary["hit_tokens_by_tier"]["host"] > 0
    assert (table["first_token_s"] >= table["received_s"] + table["fetch_s"] - 1e-9).all()
    assert run.summary["most_blocks"] <= 40 * PIECE // 16
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_host_gb": 0.01}, r"kv_host_gb = 0.01: holds no 512 tokens, which are 0.0671 GB"),
        ({"kv_host_gb": 900.0, "replicas": 4}, "more than a node's 2000 GB"),
        ({"kv_disk_gb": 100.0, "node": "pcie-8"}, "node pcie-8 does not say what it has"),
        ({"kv_remote_gb_per_s": 5.0}, "is of a store: give kv_remote_gb"),
        ({"kv_host_gb": 5.0, "prefix_caching": False}, "contradicts prefix_caching = false"),
        ({"kv_host_gb": 5.0, "sm_partition": "prefill=64,decode=68"}, "kv_host_gb = 5.0 is not known beside sm_part"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        served(stream(tmp_path, AGAIN), **fields)


def test_requests_without_hashes_have_nothing_to_keep() -> None:
    with pytest.raises(ScenarioError, match="kv_host_gb: these requests have no hash_ids"):
        serve(model=MODEL, requests=3, kv_host_gb=10.0)
