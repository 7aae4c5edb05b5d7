"""Topology: paths, bottlenecks and strict loading of node types."""

from __future__ import annotations

import pytest

from hardware.catalog import load_gpu
from hardware.cluster import Cluster, cluster_for, cluster_of, load_node, parse_node
from hardware.errors import HardwareError

GOOD = """
id = "mine"
interconnect = "nvswitch"
gpus_per_node = { value = 4, source = "s", confidence = "high" }
nics_per_node = { value = 4, source = "s", confidence = "high" }
nic_bytes_per_s = { value = 25e9, source = "s", confidence = "high" }
nic_latency_s = { value = 3e-6, source = "s", confidence = "high" }
"""


def two_nodes() -> Cluster:
    return cluster_for(load_gpu("h100"), load_node("hgx-8"), 16)


def test_ranks_fill_one_node_after_another() -> None:
    cluster = two_nodes()
    assert (cluster.nodes, cluster.gpus) == (2, 16)
    assert cluster.same_node((0, 7)) and not cluster.same_node((7, 8))


def test_the_ranks_of_a_node_are_those_it_holds() -> None:
    cluster = two_nodes()
    assert list(cluster.ranks_of_node(1)) == [8, 9, 10, 11, 12, 13, 14, 15]
    assert all(cluster.node_of(rank) == 1 for rank in cluster.ranks_of_node(1))
    with pytest.raises(HardwareError, match="node 2 is outside the 2 nodes of the cluster"):
        cluster.ranks_of_node(2)


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (8, 1), (9, 2), (16, 2), (64, 8)])
def test_the_fewest_usual_nodes_hold_the_world(world: int, nodes: int) -> None:
    assert (cluster_of("h100", world).node.id, cluster_of("h100", world).nodes) == ("hgx-8", nodes)
    # A bridge joins two cards, so eight of them meet on PCIe.
    assert cluster_of("h100-pcie", world).node.id == "pcie-8"


def test_every_edge_of_the_graph_carries_bandwidth_and_latency() -> None:
    graph = two_nodes().topology()
    # 16 GPUs, 2 switches, 16 NICs, the network's one switch; a GPU has two links, a NIC one more.
    assert (len(graph), graph.number_of_edges()) == (35, 16 * 2 + 16)
    assert all(edge["bytes_per_s"] > 0 for _, _, edge in graph.edges(data=True))
    assert graph.edges["gpu0", "switch0"]["bytes_per_s"] == 450e9


def test_paths_stay_in_the_node_or_take_the_rail() -> None:
    cluster = two_nodes()
    assert cluster.path(0, 7) == ["gpu0", "switch0", "gpu7"]
    assert cluster.path(0, 8) == ["gpu0", "nic0.0", "leaf0", "nic1.0", "gpu8"]


def test_the_slowest_link_bounds_a_ring() -> None:
    cluster = two_nodes()
    assert cluster.bottleneck_bytes_per_s(range(8)) == 450e9
    assert cluster.bottleneck_bytes_per_s(range(16)) == 50e9
    shared = cluster_for(load_gpu("l40s-48gb"), load_node("pcie-8"), 16)
    # Not the 31.5 GB/s of one card's PCIe: eight meet over their host (public tables of eight L40S).
    assert shared.bottleneck_bytes_per_s(range(8)) == pytest.approx(1.45e9, rel=0.01)
    assert shared.bottleneck_bytes_per_s(range(2)) == pytest.approx(20.1e9, rel=0.01)
    assert shared.bottleneck_bytes_per_s(range(16)) == shared.bottleneck_bytes_per_s(range(8))
    apart = cluster_for(load_gpu("l40s-48gb"), load_node("pcie-8"), 16).bottleneck_bytes_per_s((0, 8))
    assert apart == 12.5e9 * 2 / 8


def test_a_mesh_splits_its_links_over_the_peers() -> None:
    cluster = cluster_for(load_gpu("a100-sxm-40gb"), load_node("mesh-4"), 4)
    assert cluster.path(0, 3) == ["gpu0", "gpu3"]
    assert cluster.bottleneck_bytes_per_s((0, 1)) == 100e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("nvswitch", "nvlink"), "mine.toml: interconnect = 'nvlink': known are nvswitch, nvlink-mesh, pcie"),
        (
            ("nics_per_node = { value = 4", "nics_per_node = { value = 1.5"),
            "mine.toml: nics_per_node = 1.5: give a whole number",
        ),
        (
            ("nics_per_node = { value = 4", "nics_per_node = { value = 1e6"),
            "mine.toml: nics_per_node = 1e+06: give at most 4,096",
        ),
        (("nics_per_node", "nic_per_node"), "mine.toml: unknown key 'nic_per_node': did you mean 'nics_per_node'?"),
        (("value = 25e9", "value = -1.0"), "mine.toml: nic_bytes_per_s = -1: must be positive"),
        (('source = "s"', 'source = ""'), "mine.toml: gpus_per_node = 4 has no source: say where it is from"),
    ],
)
def test_strict_loading(change: tuple[str, str], message: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_node(GOOD.replace(*change, 1), where="mine.toml")
    assert str(error.value) == message


def test_a_rank_outside_is_an_error() -> None:
    with pytest.raises(HardwareError, match="rank 16 is outside the 16 GPUs"):
        two_nodes().path(0, 16)
