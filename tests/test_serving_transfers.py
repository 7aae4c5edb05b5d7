"""Caches that move between replicas share ports: alone they take a send's time, together what max-min leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import simpy

from sim.serving import serve
from sim.serving.spec import ServeSpec
from sim.serving.transfers import CacheTransfers, transfer_cost

TWO = {"model": "llama3-8b", "tp": 8, "prefill_replicas": 2, "replicas": 2}  # a replica a node
TOKENS = 16384


def moved(spec: ServeSpec, moves: list[tuple[int, int]]) -> list[float]:
    """Seconds of caches of 16,384 tokens that leave at once, each from one replica to another."""
    env = simpy.Environment()
    transfers = CacheTransfers(env=env, spec=spec)
    took: dict[int, float] = {}

    def one(number: int, source: int, to: int) -> Any:
        took[number] = (yield from transfers.move(TOKENS, source, to)).time_s

    for number, (source, to) in enumerate(moves):
        env.process(one(number, source, to))
    env.run()
    return [took[number] for number in range(len(moves))]


def test_alone_a_cache_takes_what_a_send_takes() -> None:
    spec = ServeSpec.of(**TWO)
    (took,) = moved(spec, [(0, 3)])
    assert took == pytest.approx(transfer_cost(spec, TOKENS).time_s, rel=1e-9)
    rank_bytes = TOKENS * 32 * 2 * 1 * 128 * 2  # tokens, layers, K and V, heads of a rank, elements, 16 bit
    assert took == pytest.approx(rank_bytes / 50e9, rel=0.05)


def test_those_that_meet_at_a_nic_share_it_and_others_do_not() -> None:
    spec = ServeSpec.of(**TWO)
    (alone,) = moved(spec, [(0, 2)])
    assert moved(spec, [(0, 2), (1, 3)]) == pytest.approx([alone] * 2)
    for both in ([(0, 2), (0, 3)], [(0, 2), (1, 2)]):
        share = 50e9 / 2
        assert moved(spec, both) == pytest.approx([TOKENS * 32 * 2 * 128 * 2 / share] * 2, rel=1e-9)
        assert moved(spec, both)[0] > 1.9 * alone


def test_within_a_node_caches_share_the_links_of_their_gpus() -> None:
    spec = ServeSpec.of(**(TWO | {"tp": 1}))
    (alone,) = moved(spec, [(0, 2)])
    assert alone < 0.3 * moved(ServeSpec.of(**(TWO | {"tp": 1, "replicas": 8})), [(0, 9)])[0]
    assert moved(spec, [(0, 2), (1, 3)]) == pytest.approx([alone] * 2)
    assert moved(spec, [(0, 2), (0, 3)])[0] > alone


def test_a_narrow_network_slows_caches_and_with_them_second_tokens(tmp_path: Path) -> None:
    text = "\n".join(
        [
            'id = "narrow"', 'shape = "fat_tree"', 'routing = "spread"',
            *(
                f'{name} = {{ value = {value}, source = "test", confidence = "high" }}'
                for name, value in (
                    ("nodes_per_leaf", 1), ("spines", 1), ("uplink_bytes_per_s", 20e9), ("switch_latency_s", 1e-6),
                )
            ),
        ]
    )  # fmt: skip
    file = tmp_path / "narrow.toml"
    file.write_text(text)
    trace = tmp_path / "requests.csv"
    rows = {"arrival_s": [0.0, 0.0], "input_tokens": [8000, 8000], "output_tokens": [4, 4]}
    pd.DataFrame(rows).to_csv(trace, index=False)
    wide, narrow = (serve(trace=trace, network=network, **TWO) for network in (None, str(file)))
    for run, seconds in ((wide, 8000 * 65536 / 8 * 2 / 50e9), (narrow, 8000 * 65536 / 20e9 * 2)):
        took = [moved.end_s - moved.start_s for moved in run.log.transfers]
        assert len(took) == 2 and max(took) <= seconds * 1.1
    spent = [sum(m.end_s - m.start_s for m in run.log.transfers) for run in (wide, narrow)]
    assert spent[1] > 2 * spent[0]
    assert narrow.requests["e2e_s"].mean() > wide.requests["e2e_s"].mean()


def test_a_replica_over_two_nodes_has_its_cache_when_the_last_part_has_crossed() -> None:
    """GPUs 0 to 3 hand over to 4 to 11: two of four parts leave the node."""
    spec = ServeSpec.of(model="llama3-8b", tp=8, prefill_tp=4, prefill_replicas=1, replicas=1)
    (took,) = moved(spec, [(0, 1)])
    part_bytes = TOKENS * 32 * 2 * 8 * 128 * 2 / 4
    assert took == pytest.approx(part_bytes / 50e9, rel=0.05)
