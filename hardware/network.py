"""Networks between nodes: leaves and spines as a graph, the routes of a collective's streams, what each port carries.

A stream goes from one NIC to another. The streams of a collective carry equal bytes, so that one number, the streams
that cross it, says what a port carries of it. ``rail``: each leaf joins the NICs of one place in their nodes (libraries
send to the same place and go on over NVLink); ``fat_tree``: a leaf joins all NICs of its nodes. Leaves meet in spines.
``dragonfly``: the leaves of a group are joined pairwise, and each two groups by one link between a leaf of either.
``spread`` routing sends a stream over all shortest ways alike (adaptive routing), ``ecmp`` over one, by a seeded hash.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from hardware.catalog import figure, refuse_unknown, text_of, whole
from hardware.errors import HardwareError
from inputs.texts import parse_toml

if TYPE_CHECKING:
    import networkx as nx

Shape = Literal["rail", "fat_tree", "dragonfly"]
Routing = Literal["spread", "ecmp"]
Placement = Literal["packed", "spread"]
Pattern = Literal["ring", "pairs", "one_way"]
TREE = ("nodes_per_leaf", "spines", "uplink_bytes_per_s", "switch_latency_s")
DRAGONFLY = ("nodes_per_leaf", "leaves_per_group", "local_bytes_per_s", "global_bytes_per_s", "switch_latency_s")
DEFAULT_NETWORK = "one-switch"
Nic = tuple[int, int]  # node, and place in it


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """Switches beyond the nodes: every leaf has one link of ``uplink_bytes_per_s`` (a direction) to every spine, or
    ``local_bytes_per_s`` to each other leaf of its group, and each two groups ``global_bytes_per_s`` between them.
    """

    id: str
    shape: Shape
    routing: Routing
    nodes_per_leaf: int
    switch_latency_s: float
    spines: int = 0
    uplink_bytes_per_s: float = 0.0
    leaves_per_group: int = 0
    local_bytes_per_s: float = 0.0
    global_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One direction of a link: where bytes leave a GPU, a NIC or a switch, or enter one."""

    name: str
    tier: Literal["link", "nic", "leaf", "spine", "global", "host", "disk", "store"]
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """A group's streams: how many cross each port (parts of one where it is spread), and how many a rank sends.

    ``switches`` is how many more than one a stream passes at most.
    """

    crossing: tuple[tuple[Port, float], ...]
    of_rank: int
    switches: int

    @property
    def alone_bytes_per_s(self) -> float:
        """What each stream gets where no other group sends."""
        return min(port.bytes_per_s / count for port, count in self.crossing)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """``nodes`` nodes of ``nics`` NICs on a network; ``placement``: consecutive nodes fill one leaf after another, or
    go to different ones."""

    spec: NetworkSpec
    nodes: int
    nics: int
    nic_bytes_per_s: float
    placement: Placement
    seed: int

    def leaf(self, nic: Nic) -> str:
        """The switch that a NIC hangs on.

        >>> spec = load_network("ib-ndr-rail")
        >>> Fabric(spec=spec, nodes=33, nics=8, nic_bytes_per_s=50e9, placement="packed", seed=0).leaf((32, 5))
        'leaf1.5'
        """
        node, place = nic
        per_leaf = self.spec.nodes_per_leaf
        number = node // per_leaf if self.placement == "packed" else node % -(-self.nodes // per_leaf)
        return f"leaf{number}.{place}" if self.spec.shape == "rail" else f"leaf{number}"

    def topology(self) -> nx.Graph[str]:
        """NICs, leaves and spines; edges carry bytes_per_s, a direction."""
        import networkx as nx  # few commands ask for routes, and all would wait for it

        graph: nx.Graph[str] = nx.Graph()
        for nic in ((node, place) for node in range(self.nodes) for place in range(self.nics)):
            graph.add_edge(nic_name(nic), self.leaf(nic), bytes_per_s=self.nic_bytes_per_s)
        if self.spec.shape == "dragonfly":
            self._join_groups(graph)
            return graph
        leaves = [name for name in graph if name.startswith("leaf")]
        for leaf in leaves if len(leaves) > 1 else ():
            for spine in range(self.spec.spines):
                graph.add_edge(leaf, f"spine{spine}", bytes_per_s=self.spec.uplink_bytes_per_s)
        return graph

    def _join_groups(self, graph: nx.Graph[str]) -> None:
        """Links within groups and between them: group g meets h at its leaf h, counted round."""
        size = self.spec.leaves_per_group
        used = {int(name.removeprefix("leaf")) // size for name in graph if name.startswith("leaf")}
        for group in used:
            for a, b in combinations(range(group * size, (group + 1) * size), 2):
                graph.add_edge(f"leaf{a}", f"leaf{b}", bytes_per_s=self.spec.local_bytes_per_s)
        for group, other in combinations(sorted(used), 2):
            ends = (group * size + other % size, other * size + group % size)
            graph.add_edge(*(f"leaf{end}" for end in ends), bytes_per_s=self.spec.global_bytes_per_s)


def nic_name(nic: Nic) -> str:
    """How a NIC is called.

    >>> nic_name((3, 0))
    'nic3.0'
    """
    return f"nic{nic[0]}.{nic[1]}"


@lru_cache(maxsize=64)
def _graph(fabric: Fabric) -> nx.Graph[str]:
    return fabric.topology()


@lru_cache(maxsize=65536)
def _ways(fabric: Fabric, leaf: str, other: str) -> tuple[tuple[str, ...], ...]:
    """All shortest ways between two switches."""
    import networkx as nx

    return tuple(sorted(map(tuple, nx.all_shortest_paths(_graph(fabric), leaf, other))))


def route(fabric: Fabric, a: Nic, b: Nic) -> tuple[str, ...]:
    """The switches that a stream passes (under ``spread`` routing, one of the ways that it takes)."""
    ways = _ways(fabric, fabric.leaf(a), fabric.leaf(b))
    key = f"{nic_name(a)}>{nic_name(b)}:{fabric.seed}".encode()
    return ways[int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % len(ways)]


def streams_of(fabric: Fabric, members: Sequence[Sequence[Nic]], pattern: Pattern) -> Streams:
    """The streams of a group whose ranks send through the NICs ``members``, node by node.

    ``ring``: each rank to the one of its place in the next node; ``pairs``: each to all of other nodes; ``one_way``:
    the first to the last.
    """
    sent: Counter[Nic] = Counter()
    received: Counter[Nic] = Counter()
    between: Counter[tuple[str, str]] = Counter()
    everyone = [nic for node in members for nic in node]
    if pattern == "pairs":
        under = Counter(map(fabric.leaf, everyone))
        between.update({(a, b): under[a] * under[b] for a in under for b in under})
        for node in members:
            sent.update({nic: count * (len(everyone) - len(node)) for nic, count in Counter(node).items()})
            own = Counter(map(fabric.leaf, node))
            between.subtract({(a, b): own[a] * own[b] for a in own for b in own})
        received = sent
    else:
        for a, b in _pairs(members, pattern):
            sent[a] += 1
            received[b] += 1
            between[fabric.leaf(a), fabric.leaf(b)] += 1
    crossing: defaultdict[tuple[str, str], float] = defaultdict(float)
    for nic, count in sent.items():
        crossing[nic_name(nic), fabric.leaf(nic)] += count
    for nic, count in received.items():
        crossing[fabric.leaf(nic), nic_name(nic)] += count
    switches = 0
    for way, share in _shares(fabric, members, pattern, between):
        switches = max(switches, len(way) - 1)
        for hop in pairwise(way):
            crossing[hop] += share
    return Streams(
        crossing=tuple((_port(fabric, *hop), count) for hop, count in crossing.items() if count),
        of_rank=len(everyone) - min(map(len, members)) if pattern == "pairs" else 1,
        switches=switches,
    )


def _pairs(members: Sequence[Sequence[Nic]], pattern: Pattern) -> Iterator[tuple[Nic, Nic]]:
    if pattern == "one_way":
        yield members[0][0], members[-1][0]
        return
    for number, node in enumerate(members):
        others = (
            members[(number + 1) % len(members) :][:1]
            if pattern == "ring"
            else [*members[:number], *members[number + 1 :]]
        )
        for other in others:
            yield from zip(node, other, strict=False) if pattern == "ring" else ((a, b) for a in node for b in other)


def _shares(
    fabric: Fabric, members: Sequence[Sequence[Nic]], pattern: Pattern, between: Counter[tuple[str, str]]
) -> Iterable[tuple[tuple[str, ...], float]]:
    """Ways between leaves and how many streams take each."""
    if fabric.spec.routing == "spread":
        for (leaf, other), count in between.items():
            ways = _ways(fabric, leaf, other) if leaf != other and count else ()
            yield from ((way, count / len(ways)) for way in ways)
        return
    for a, b in _pairs(members, pattern):
        if fabric.leaf(a) != fabric.leaf(b):
            yield route(fabric, a, b), 1.0


def _port(fabric: Fabric, a: str, b: str) -> Port:
    tier: Literal["nic", "leaf", "spine", "global"] = "spine"
    if "nic" in a + b:
        tier = "nic"
    elif a.startswith("leaf"):
        size = fabric.spec.leaves_per_group
        far = size and len({int(name.removeprefix("leaf")) // size for name in (a, b)}) == 2
        tier = "global" if far else "leaf"
    return Port(name=f"{a} to {b}", tier=tier, bytes_per_s=_graph(fabric).edges[a, b]["bytes_per_s"])


def load_network(name: str) -> NetworkSpec:
    """A network by id, or from a .toml file of one's own.

    >>> load_network("roce-400g").routing
    'ecmp'
    """
    text, where = text_of(name, "networks", "network")
    return parse_network(text, where=where)


def parse_network(text: str, *, where: str) -> NetworkSpec:
    """A network from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, HardwareError)
    figures = DRAGONFLY if data.get("shape") == "dragonfly" else TREE
    refuse_unknown(data, ("id", "shape", "routing", *figures), where)
    if not isinstance(data.get("id"), str) or not data["id"]:
        raise HardwareError(f"{where}: id = {data.get('id')!r}: give a text")
    for field, known in (("shape", get_args(Shape)), ("routing", get_args(Routing))):
        if data.get(field) not in known:
            raise HardwareError(f"{where}: {field} = {data.get(field)!r}: known are {', '.join(known)}")
    values: dict[str, Any] = {field: figure(data, field, where, {}, {}) for field in figures}
    for field in values.keys() & {"nodes_per_leaf", "spines", "leaves_per_group"}:
        values[field] = whole(values[field], field, where)
    return NetworkSpec(
        id=data["id"],
        shape=data["shape"],
        routing=data["routing"],
        **values,
    )
