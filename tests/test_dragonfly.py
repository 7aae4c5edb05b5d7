"""Dragonflies: groups of leaves that are joined pairwise, the ways between them and what their links carry."""

from __future__ import annotations

import pytest

from hardware.cluster import Cluster
from hardware.errors import HardwareError
from hardware.network import Pattern, load_network, parse_network, route
from tests.test_network import cluster

DRAGONFLY = """
id = "fly"
shape = "dragonfly"
routing = "{routing}"
nodes_per_leaf = {{ value = 1, source = "test", confidence = "high" }}
leaves_per_group = {{ value = 3, source = "test", confidence = "high" }}
local_bytes_per_s = {{ value = {local}, source = "test", confidence = "high" }}
global_bytes_per_s = {{ value = {far}, source = "test", confidence = "high" }}
switch_latency_s = {{ value = 1e-6, source = "test", confidence = "high" }}
"""


def dragonfly(nodes: int, *, local: float = 800e9, far: float = 400e9, routing: str = "spread") -> Cluster:
    return cluster(DRAGONFLY.format(routing=routing, local=local, far=far), nodes)


def test_leaves_of_a_group_are_one_link_apart_and_groups_three_at_most() -> None:
    """Nine leaves in three groups: group g meets h at its leaf h."""
    fly = dragonfly(9)
    graph = fly.fabric.topology()
    leaves = [name for name in graph if name.startswith("leaf")]
    links = [edge for edge in graph.edges if all(end.startswith("leaf") for end in edge)]
    assert (len(leaves), len(links)) == (9, 3 * 3 + 3)
    assert route(fly.fabric, (0, 0), (2, 5)) == ("leaf0", "leaf2")
    assert route(fly.fabric, (1, 0), (3, 0)) == ("leaf1", "leaf3")  # the gateways themselves
    assert route(fly.fabric, (0, 0), (5, 0)) == ("leaf0", "leaf1", "leaf3", "leaf5")


@pytest.mark.parametrize("routing", ["spread", "ecmp"])
@pytest.mark.parametrize("pattern", ["ring", "pairs"])
def test_what_enters_a_dragonfly_leaves_it_and_links_set_the_pace(routing: str, pattern: Pattern) -> None:
    fly = dragonfly(9, routing=routing)
    streams = fly.streams(range(72), pattern)
    by_leaf = dict.fromkeys((f"leaf{number}" for number in range(9)), 0.0)
    for port, count in streams.crossing:
        a, b = port.name.split(" to ")
        by_leaf[a] = by_leaf.get(a, 0.0) - count
        by_leaf[b] = by_leaf.get(b, 0.0) + count
        assert count * streams.alone_bytes_per_s <= port.bytes_per_s * (1 + 1e-9)
    assert all(by_leaf[f"leaf{number}"] == pytest.approx(0.0, abs=1e-6) for number in range(9))
    assert streams.switches == 3
    assert {port.tier for port, _ in streams.crossing} == {"nic", "leaf", "global"}


def test_wider_links_never_slow_a_job_and_narrow_global_ones_do() -> None:
    spans = [dragonfly(9, far=far).span(range(72)).nic_bytes_per_s for far in (50e9, 100e9, 400e9, 1600e9)]
    assert spans == sorted(spans) and spans[0] == pytest.approx(50e9 / 8) and spans[-1] == 50e9


def test_a_run_on_a_dragonfly_says_its_ports() -> None:
    found = load_network("slingshot-dragonfly")
    assert (found.shape, found.leaves_per_group, found.spines) == ("dragonfly", 32, 0)
    with pytest.raises(HardwareError, match=r"fly\.toml: unknown key 'spines'"):
        parse_network(
            DRAGONFLY.format(routing="ecmp", local=1e9, far=1e9)
            + 'spines = { value = 1, source = "test", confidence = "high" }',
            where="fly.toml",
        )
