"""Nodes and clusters as a topology graph: which GPUs share a switch, which traffic crosses a NIC."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hardware.catalog import figure, load_gpu, refuse_unknown, shipped_ids
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.routes import Span
from inputs.files import read_text
from inputs.texts import parse_toml

if TYPE_CHECKING:
    import networkx as nx

Interconnect = Literal["nvswitch", "nvlink-mesh", "pcie"]
INTERCONNECTS: tuple[Interconnect, ...] = ("nvswitch", "nvlink-mesh", "pcie")
FIGURES = ("gpus_per_node", "nics_per_node", "nic_bytes_per_s", "nic_latency_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One server: how many GPUs, how they are joined, and what leaves it (bytes/s per NIC and direction)."""

    id: str
    gpus_per_node: int
    interconnect: Interconnect
    nics_per_node: int
    nic_bytes_per_s: float
    nic_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """``nodes`` equal nodes of one GPU type; ranks fill one node after another."""

    gpu: GpuSpec
    node: NodeSpec
    nodes: int

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.node.gpus_per_node

    def node_of(self, rank: int) -> int:
        """The node that holds ``rank``."""
        if not 0 <= rank < self.gpus:
            raise HardwareError(f"rank {rank} is outside the {self.gpus} GPUs of the cluster")
        return rank // self.node.gpus_per_node

    def ranks_of_node(self, node: int) -> range:
        """The ranks that sit on node number ``node``.

        >>> cluster_of("h100", 16).ranks_of_node(1)
        range(8, 16)
        """
        if not 0 <= node < self.nodes:
            raise HardwareError(f"node {node} is outside the {self.nodes} nodes of the cluster")
        return range(node * self.node.gpus_per_node, (node + 1) * self.node.gpus_per_node)

    def same_node(self, ranks: Sequence[int]) -> bool:
        """True when no traffic among ``ranks`` leaves its node."""
        return len({self.node_of(rank) for rank in ranks}) == 1

    def on_one_switch(self, ranks: Sequence[int]) -> bool:
        """True where ``ranks`` meet in one NVSwitch tier."""
        return self.node.interconnect == "nvswitch" and self.same_node(ranks)

    def span(self, ranks: Sequence[int]) -> Span:
        """How ``ranks`` lie on nodes; where nodes hold different numbers of them, the fewest sets the pace.

        A rank sends through the NIC of its position in the node (its rail); GPUs that share a NIC share its rate.

        >>> cluster_of("h100", 16).span(range(4, 12))
        Span(nodes=2, per_node=4, nic_bytes_per_s=50000000000.0, nic_latency_s=3e-06)
        """
        here = Counter(self.node_of(rank) for rank in ranks)
        return Span(
            nodes=len(here),
            per_node=min(here.values()),
            nic_bytes_per_s=self.node.nic_bytes_per_s * min(1.0, self.node.nics_per_node / self.node.gpus_per_node),
            nic_latency_s=self.node.nic_latency_s,
        )

    def topology(self) -> nx.Graph[str]:
        """GPUs, switches, NICs and rails as a graph; edges carry bytes_per_s (per direction) and latency_s."""
        import networkx as nx  # few commands ask for paths, and all would wait for it

        graph: nx.Graph[str] = nx.Graph()
        node, gpu = self.node, self.gpu
        link = gpu.link_bytes_per_s if node.interconnect != "pcie" else gpu.pcie_bytes_per_s
        link = link or gpu.pcie_bytes_per_s
        for n in range(self.nodes):
            ranks = self.ranks_of_node(n)
            if node.interconnect == "nvlink-mesh":
                share = link / max(node.gpus_per_node - 1, 1)  # links are split evenly over the peers
                for a in ranks:
                    for b in ranks:
                        if a < b:
                            graph.add_edge(f"gpu{a}", f"gpu{b}", bytes_per_s=share, latency_s=0.0)
            else:
                for a in ranks:
                    graph.add_edge(f"gpu{a}", f"switch{n}", bytes_per_s=link, latency_s=0.0)
            for position, a in enumerate(ranks):
                nic = position % node.nics_per_node
                graph.add_edge(f"gpu{a}", f"nic{n}.{nic}", bytes_per_s=gpu.pcie_bytes_per_s, latency_s=0.0)
                graph.add_edge(
                    f"nic{n}.{nic}", f"rail{nic}", bytes_per_s=node.nic_bytes_per_s, latency_s=node.nic_latency_s
                )
        for nic in range(1, node.nics_per_node):
            # Rails meet in the spine; a rank reaches another rail through it.
            graph.add_edge(f"rail{nic}", "rail0", bytes_per_s=node.nic_bytes_per_s, latency_s=node.nic_latency_s)
        return graph

    def path(self, a: int, b: int) -> list[str]:
        """Hops between two ranks: the switch within a node, a rail between nodes."""
        import networkx as nx

        self.node_of(a), self.node_of(b)
        graph = self.topology()
        if self.node_of(a) == self.node_of(b):
            # Traffic within a node never goes out through a NIC.
            graph = graph.subgraph(n for n in graph if not n.startswith(("nic", "rail")))
        found: list[str] = nx.shortest_path(graph, f"gpu{a}", f"gpu{b}")
        return found

    def bottleneck_bytes_per_s(self, ranks: Sequence[int]) -> float:
        """The slowest link that a ring over ``ranks`` crosses, per direction; a shared NIC is divided."""
        node = self.node
        inside = self.gpu.link_bytes_per_s if node.interconnect != "pcie" else 0.0
        inside = inside or self.gpu.pcie_bytes_per_s
        if node.interconnect == "nvlink-mesh":
            inside /= max(node.gpus_per_node - 1, 1)
        if self.same_node(ranks):
            return inside
        return min(inside, node.nic_bytes_per_s * node.nics_per_node / node.gpus_per_node)


@lru_cache(maxsize=1)
def list_nodes() -> tuple[str, ...]:
    """Ids of all node types in the catalog."""
    return shipped_ids("nodes")


@lru_cache(maxsize=32)
def load_node(name: str) -> NodeSpec:
    """A node type by id, or from a .toml file of one's own.

    >>> load_node("hgx-8").gpus_per_node
    8
    """
    if name.endswith(".toml"):
        return parse_node(read_text(Path(name), "node file", HardwareError), where=name)
    if name not in list_nodes():
        near = difflib.get_close_matches(name, list_nodes(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(list_nodes())}"
        raise HardwareError(f"unknown node '{name}': {hint}")
    text = (files("hardware") / "data" / "nodes" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_node(text, where=f"{name}.toml")


def parse_node(text: str, *, where: str) -> NodeSpec:
    """A node from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, HardwareError)
    refuse_unknown(data, ("id", "interconnect", *FIGURES), where)
    if not isinstance(data.get("id"), str) or not data["id"]:
        raise HardwareError(f"{where}: id = {data.get('id')!r}: give a text")
    if data.get("interconnect") not in INTERCONNECTS:
        known = ", ".join(INTERCONNECTS)
        raise HardwareError(f"{where}: interconnect = {data.get('interconnect')!r}: known are {known}")
    values = {field: figure(data, field, where, {}, {}) for field in FIGURES}
    return NodeSpec(
        id=data["id"],
        interconnect=data["interconnect"],
        gpus_per_node=int(values["gpus_per_node"]),
        nics_per_node=int(values["nics_per_node"]),
        nic_bytes_per_s=values["nic_bytes_per_s"],
        nic_latency_s=values["nic_latency_s"],
    )


@lru_cache(maxsize=256)
def cluster_for(gpu: GpuSpec, node: NodeSpec, world: int) -> Cluster:
    """The fewest nodes that hold ``world`` GPUs.

    >>> from hardware.catalog import load_gpu
    >>> cluster_for(load_gpu("h100"), load_node("hgx-8"), 16).path(0, 9)
    ['gpu0', 'nic0.0', 'rail0', 'rail1', 'nic1.1', 'gpu9']
    """
    return Cluster(gpu=gpu, node=node, nodes=-(-world // node.gpus_per_node))


def cluster_of(gpu_id: str, world: int) -> Cluster:
    """The usual nodes for a GPU, as few as hold ``world`` of them.

    >>> cluster = cluster_of("h100", 12)
    >>> cluster.node.id, cluster.nodes
    ('hgx-8', 2)
    """
    gpu = load_gpu(gpu_id)
    return cluster_for(gpu, load_node(default_node(gpu)), world)


def default_node(gpu: GpuSpec) -> str:
    """GPUs of a rack's switches sit in its domain, others with switched links on a board of eight, cards on PCIe."""
    if "NVL72" in gpu.link:
        return "nvl72"
    return "pcie-8" if gpu.link_bytes_per_s == 0.0 or "bridge" in gpu.link else "hgx-8"


def load_cluster(path: str) -> Cluster:
    """A cluster from a .toml file of three lines: ``gpu`` and ``node`` (ids or .toml paths) and ``nodes``."""
    return parse_cluster(read_text(Path(path), "cluster file", HardwareError), where=path)


def parse_cluster(text: str, *, where: str) -> Cluster:
    """A cluster from TOML text, loaded as strictly as its GPU and node.

    >>> parse_cluster('gpu = "a100-sxm-80gb"\\nnode = "hgx-8"\\nnodes = 4', where="mine.toml").gpus
    32
    """
    data = parse_toml(text, where, HardwareError)
    refuse_unknown(data, ("gpu", "node", "nodes"), where)
    for field in ("gpu", "node"):
        if not isinstance(data.get(field), str):
            raise HardwareError(f"{where}: {field} = {data.get(field)!r}: give an id or the path of a .toml file")
    nodes = data.get("nodes")
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise HardwareError(f"{where}: nodes = {nodes!r}: give a whole number, 1 or more")
    return Cluster(gpu=load_gpu(data["gpu"]), node=load_node(data["node"]), nodes=nodes)
