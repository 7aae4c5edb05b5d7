"""Nodes and clusters as a topology graph: which GPUs share a switch, which traffic crosses a NIC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from hardware.catalog import figure, load_gpu, refuse_unknown, text_of, whole
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.routes import Span, pcie_bus_bytes_per_s
from hardware.network import (
    DEFAULT_NETWORK,
    Fabric,
    NetworkSpec,
    Pattern,
    Placement,
    Streams,
    load_network,
    nic_name,
    route,
    streams_of,
)
from inputs.texts import parse_toml

if TYPE_CHECKING:
    import networkx as nx

Interconnect = Literal["nvswitch", "nvlink-mesh", "pcie"]
INTERCONNECTS: tuple[Interconnect, ...] = ("nvswitch", "nvlink-mesh", "pcie")
FIGURES = ("gpus_per_node", "nics_per_node", "nic_bytes_per_s", "nic_latency_s")
# What only caches outside the GPUs ask for; a node may leave it out.
STORES = ("host_memory_bytes", "disk_bytes", "disk_read_bytes_per_s", "disk_write_bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One server: how many GPUs, how they are joined, and what leaves it (bytes/s per NIC and direction); memory and
    disks of its host, 0 where its file does not say.
    """

    id: str
    gpus_per_node: int
    interconnect: Interconnect
    nics_per_node: int
    nic_bytes_per_s: float
    nic_latency_s: float
    host_memory_bytes: float = 0.0
    disk_bytes: float = 0.0
    disk_read_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Equal nodes of one GPU type on a network; ranks fill one node after another."""

    gpu: GpuSpec
    node: NodeSpec
    fabric: Fabric

    @property
    def nodes(self) -> int:
        """Nodes in all."""
        return self.fabric.nodes

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

    def streams(self, ranks: Sequence[int], pattern: Pattern = "ring") -> Streams:
        """What ``ranks``, which lie on several nodes, send over the network.

        A rank sends through the NIC of its position in the node (its rail).
        """
        return _streams(self, tuple(ranks), pattern)

    def span(self, ranks: Sequence[int], pattern: Pattern = "ring") -> Span:
        """How ``ranks`` lie on nodes; where nodes hold different numbers of them, the fewest sets the pace.

        GPUs that share a NIC share its rate; a network that carries less than the NICs send holds them back.

        >>> cluster_of("h100", 16).span(range(4, 12))
        Span(nodes=2, per_node=4, nic_bytes_per_s=50000000000.0, nic_latency_s=3e-06)
        """
        here = Counter(self.node_of(rank) for rank in ranks)
        node = self.node
        nic_bytes_per_s = node.nic_bytes_per_s * min(1.0, node.nics_per_node / node.gpus_per_node)
        latency_s = node.nic_latency_s
        if len(here) > 1:
            streams = self.streams(ranks, pattern)
            # Rounding of shares of a stream is no bottleneck.
            held_back = streams.alone_bytes_per_s * streams.of_rank
            nic_bytes_per_s = held_back if held_back < nic_bytes_per_s * (1.0 - 1e-9) else nic_bytes_per_s
            latency_s += streams.switches * self.fabric.spec.switch_latency_s
        return Span(
            nodes=len(here), per_node=min(here.values()), nic_bytes_per_s=nic_bytes_per_s, nic_latency_s=latency_s
        )

    def topology(self) -> nx.Graph[str]:
        """GPUs, switches, NICs, leaves and spines as a graph; edges carry bytes_per_s (per direction)."""
        graph = self.fabric.topology()
        node, gpu = self.node, self.gpu
        link = gpu.link_bytes_per_s if node.interconnect != "pcie" else gpu.pcie_bytes_per_s
        link = link or gpu.pcie_bytes_per_s
        for n in range(self.nodes):
            ranks = self.ranks_of_node(n)
            if node.interconnect == "nvlink-mesh":
                share = link / max(node.gpus_per_node - 1, 1)  # links are split evenly over the peers
                for a, b in combinations(ranks, 2):
                    graph.add_edge(f"gpu{a}", f"gpu{b}", bytes_per_s=share)
            else:
                for a in ranks:
                    graph.add_edge(f"gpu{a}", f"switch{n}", bytes_per_s=link)
            for a in ranks:
                graph.add_edge(f"gpu{a}", nic_name(self.nic_of(a)), bytes_per_s=gpu.pcie_bytes_per_s)
        return graph

    def nic_of(self, rank: int) -> tuple[int, int]:
        """Node and place of the NIC that ``rank`` sends through."""
        node = self.node_of(rank)
        return node, rank % self.node.gpus_per_node % self.node.nics_per_node

    def path(self, a: int, b: int) -> list[str]:
        """Hops between two ranks: the switch within a node, NICs and leaves between nodes."""
        import networkx as nx

        if self.node_of(a) == self.node_of(b):
            # Traffic within a node never goes out through a NIC.
            graph = self.topology()
            graph = graph.subgraph(n for n in graph if not n.startswith(("nic", "leaf", "spine")))
            found: list[str] = nx.shortest_path(graph, f"gpu{a}", f"gpu{b}")
            return found
        out, into = self.nic_of(a), self.nic_of(b)
        return [f"gpu{a}", nic_name(out), *route(self.fabric, out, into), nic_name(into), f"gpu{b}"]

    def bottleneck_bytes_per_s(self, ranks: Sequence[int]) -> float:
        """The slowest link that a ring over ``ranks`` crosses, per direction; a shared NIC is divided.

        Cards on PCIe meet over their host (:data:`hardware.laws.routes.PCIE_SHARES`).
        """
        node = self.node
        inside = self.gpu.link_bytes_per_s if node.interconnect != "pcie" else 0.0
        if not inside:
            here = max(Counter(self.node_of(rank) for rank in ranks).values())
            inside = pcie_bus_bytes_per_s(max(here, 2), self.gpu.pcie_bytes_per_s)
        if node.interconnect == "nvlink-mesh":
            inside /= max(node.gpus_per_node - 1, 1)
        if self.same_node(ranks):
            return inside
        return min(inside, node.nic_bytes_per_s * node.nics_per_node / node.gpus_per_node)


def load_node(name: str) -> NodeSpec:
    """A node type by id, or from a .toml file of one's own.

    >>> load_node("hgx-8").gpus_per_node
    8
    """
    text, where = text_of(name, "nodes", "node")
    return parse_node(text, where=where)


@lru_cache(maxsize=64)
def parse_node(text: str, *, where: str) -> NodeSpec:
    """A node from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, HardwareError)
    refuse_unknown(data, ("id", "interconnect", *FIGURES, *STORES), where)
    if not isinstance(data.get("id"), str) or not data["id"]:
        raise HardwareError(f"{where}: id = {data.get('id')!r}: give a text")
    if data.get("interconnect") not in INTERCONNECTS:
        known = ", ".join(INTERCONNECTS)
        raise HardwareError(f"{where}: interconnect = {data.get('interconnect')!r}: known are {known}")
    values = {field: figure(data, field, where, {}, {}) for field in FIGURES}
    return NodeSpec(
        id=data["id"],
        interconnect=data["interconnect"],
        gpus_per_node=whole(values["gpus_per_node"], "gpus_per_node", where),
        nics_per_node=whole(values["nics_per_node"], "nics_per_node", where),
        nic_bytes_per_s=values["nic_bytes_per_s"],
        nic_latency_s=values["nic_latency_s"],
        **{field: figure(data, field, where, {}, {}) for field in STORES if field in data},
    )


@lru_cache(maxsize=4096)
def _streams(cluster: Cluster, ranks: tuple[int, ...], pattern: Pattern) -> Streams:
    members: dict[int, list[tuple[int, int]]] = {}
    for rank in ranks:
        members.setdefault(cluster.node_of(rank), []).append(cluster.nic_of(rank))
    return streams_of(cluster.fabric, list(members.values()), pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How nodes meet: by which network, which of them under which leaf, and the seed of ECMP's hash."""

    network: NetworkSpec = field(default_factory=lambda: load_network(DEFAULT_NETWORK))
    placement: Placement = "packed"
    seed: int = 0


@lru_cache(maxsize=256)
def cluster_for(gpu: GpuSpec, node: NodeSpec, world: int, wiring: Wiring | None = None) -> Cluster:
    """The fewest nodes that hold ``world`` GPUs; without ``wiring``, all NICs on one switch.

    >>> from hardware.catalog import load_gpu
    >>> cluster_for(load_gpu("h100"), load_node("hgx-8"), 16).path(0, 9)
    ['gpu0', 'nic0.0', 'leaf0', 'nic1.1', 'gpu9']
    """
    wiring = wiring or Wiring()
    fabric = Fabric(
        spec=wiring.network,
        nodes=-(-world // node.gpus_per_node),
        nics=node.nics_per_node,
        nic_bytes_per_s=node.nic_bytes_per_s,
        placement=wiring.placement,
        seed=wiring.seed,
    )
    return Cluster(gpu=gpu, node=node, fabric=fabric)


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
