"""Algorithms of collectives: direct access within a node, rings, trees and hierarchies over several nodes.

Every function returns the seconds of one collective whose full buffer has ``buffer_bytes`` (as in the records).
``inside(op, world, bytes)`` is the law within a node; nothing here knows a table. No measurement of ours
crosses nodes or reads peers directly: these laws rest on the cited sources and are marked extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hardware.errors import HardwareError
from hardware.laws.in_switch import InSwitch, in_switch_s

Inside = Callable[[str, int, float], float]

# Serving engines' all-reduce by direct peer access: latency of one stage (arrive, read, leave), of the second, and the
# share of the link's rate that reads reach: fitted on vLLM's kernel on 2 and 4 H100s (aiconfigurator-core 0.12.0,
# custom_allreduce table, Apache-2.0; docs/laws.md).
ONE_SHOT_S, SECOND_SHOT_S, DIRECT_LINK_SHARE = 4.41e-6, 3.31e-6, 0.611
# The sizes below which vLLM takes one shot, by world, and below which it does not call NCCL (bytes; vLLM
# csrc/custom_all_reduce.cuh and its max_size). Its kernel runs in at most 36 blocks.
ONE_SHOT_BELOW = {2: 8 * 2**20, 4: 512 * 2**10, 8: 256 * 2**10}
DIRECT_BELOW = 8 * 2**20
DIRECT_CTAS = 36
NVLS_TREE = "nvls tree"
# Bus bandwidth of NCCL's rings and exchanges over PCIe without NVLink, as shares of the cards' own PCIe rate: 20.1, 5.1
# and 1.45 GB/s on two, four and eight L40S (PCIe 4.0 x16; all-reduces from 64 MiB on, aiconfigurator-core 0.12.0, nccl
# table, 2.27.3; all-gathers, reduce-scatters and all-to-alls there within 20 %). Four and eight meet over the host's
# sockets and memory; servers with a PCIe switch and peer access do better.
PCIE_SHARES = {2: 0.638, 4: 0.162, 8: 0.046}
# A tree reaches this share of a ring's bus bandwidth (NCCL 2.28 tuning.cc).
TREE_SHARE = 0.92
# A hop of a tree between nodes over one of a ring, which sends one way only: 5.0 and 2.7 us (LL; NCCL 2.27 tuning.cc).
TREE_HOP = 5.0 / 2.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How a group lies on a cluster: ``per_node`` ranks on each of ``nodes``, and each rank's share of its NICs."""

    nodes: int
    per_node: int
    nic_bytes_per_s: float
    nic_latency_s: float

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.nodes * self.per_node


def direct_choice(world: int, buffer_bytes: float) -> str:
    """What a serving engine takes for an all-reduce within one node: one_shot, two_shot or the library.

    >>> direct_choice(4, 2**18), direct_choice(4, 2**20), direct_choice(4, 2**25)
    ('one_shot', 'two_shot', 'library')
    """
    below = next((size for largest, size in ONE_SHOT_BELOW.items() if world <= largest), 0)
    if buffer_bytes >= DIRECT_BELOW or not below:
        return "library"
    return "one_shot" if buffer_bytes < below or world == 2 else "two_shot"


def pcie_bus_bytes_per_s(world: int, pcie_bytes_per_s: float) -> float:
    """Bus bandwidth of ``world`` cards of one node that meet over PCIe alone; more than eight are taken for eight.

    >>> [round(pcie_bus_bytes_per_s(world, 31.5e9) / 1e9, 1) for world in (2, 4, 8)]
    [20.1, 5.1, 1.4]
    """
    worlds, shares = list(PCIE_SHARES), list(PCIE_SHARES.values())
    share = math.exp(float(np.interp(math.log(world), np.log(worlds), np.log(shares))))
    return share * pcie_bytes_per_s


def direct_bytes(algorithm: str, world: int, buffer_bytes: float) -> float:
    """Bytes that one rank reads from its peers: (n-1) B in one shot, 2 (n-1)/n B in two."""
    return (world - 1) * buffer_bytes * (1.0 if algorithm == "one_shot" else 2.0 / world)


def direct_s(algorithm: str, world: int, buffer_bytes: float, link_bytes_per_s: float) -> float:
    """All-reduce by direct peer access: its stages' latencies and the bytes that one rank reads."""
    latency_s = ONE_SHOT_S + (SECOND_SHOT_S if algorithm == "two_shot" else 0.0)
    return latency_s + direct_bytes(algorithm, world, buffer_bytes) / (DIRECT_LINK_SHARE * link_bytes_per_s)


def ring_s(op: str, span: Span, buffer_bytes: float, inside: Inside) -> float:
    """One ring a rail through all nodes: the slower of NVLink and NICs, and a NIC's latency at each node.

    Each NIC carries its rail's part of what leaves a node: (n-1)/n B a direction, twice for an all-reduce.
    """
    laps = 2 if op == "all_reduce" else 1
    crossing = laps * (span.world - 1) / span.world * buffer_bytes / span.per_node
    on_link_s = inside(op, span.world, buffer_bytes)
    return max(on_link_s, crossing / span.nic_bytes_per_s) + laps * (span.nodes - 1) * span.nic_latency_s


def tree_copies(nodes: int) -> float:
    """How often a NIC of a double binary tree sends its rail's part: a node is a leaf of one tree, which sends up what
    is its half, and within the other, where it sends up once and down twice; two nodes send up and down once.

    >>> tree_copies(2), tree_copies(16)
    (1.0, 2.0)
    """
    return 1.0 if nodes == 2 else 2.0


def nvls_tree_s(span: Span, buffer_bytes: float, adder: InSwitch) -> float:
    """All-reduce that each node's switch adds, and a double binary tree over nodes meanwhile."""
    on_nic_s = tree_copies(span.nodes) * buffer_bytes / span.per_node / span.nic_bytes_per_s
    return max(in_switch_s(adder, span.per_node, buffer_bytes), on_nic_s) + _hops_s(span)


def _hops_s(span: Span) -> float:
    """Up and down a tree over nodes."""
    return 2.0 * math.ceil(math.log2(span.nodes)) * TREE_HOP * span.nic_latency_s


def tree_s(span: Span, buffer_bytes: float, inside: Inside) -> float:
    """Double binary tree over nodes, a chain within: all bytes up and down, latency by the tree's depth."""
    carried = buffer_bytes / TREE_SHARE
    within = max(2, span.per_node)
    on_link_s = inside("all_reduce", within, carried * within / (within - 1)) if span.per_node > 1 else 0.0
    on_nic_s = tree_copies(span.nodes) * carried / span.per_node / span.nic_bytes_per_s if span.nodes > 1 else 0.0
    return max(on_link_s, on_nic_s) + _hops_s(span)


def hierarchical_s(op: str, span: Span, buffer_bytes: float, inside: Inside) -> float:
    """Phase after phase: reduce-scatter in the node, the exchange of equal parts on every rail, all-gather in the node.

    An all-to-all sorts by rail in the node and then crosses once; a gather crosses first.
    """
    nodes, per_node = span.nodes, span.per_node
    outside = (nodes - 1) / nodes / span.nic_bytes_per_s
    latency_s = (nodes - 1) * span.nic_latency_s

    def within(name: str, size: float) -> float:
        return inside(name, per_node, size) if per_node > 1 else 0.0

    match op:
        case "all_reduce":
            part = buffer_bytes / per_node
            phases_s = within("reduce_scatter", buffer_bytes) + within("all_gather", buffer_bytes)
            return phases_s + 2.0 * (part * outside + latency_s)
        case "all_gather" | "reduce_scatter":
            return within(op, buffer_bytes) + buffer_bytes / per_node * outside + latency_s
        case "all_to_all":
            return within(op, buffer_bytes) + buffer_bytes * outside + latency_s
    raise HardwareError(f"'{op}' has no hierarchical form: use a ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a collective over several nodes takes, and the bytes that a rank sends beyond its node meanwhile."""

    name: str
    time_s: float
    beyond_bytes: float


def between_nodes(
    op: str, algorithm: str, span: Span, buffer_bytes: float, inside: Inside, adder: InSwitch | None = None
) -> Way:
    """A collective that leaves its node, by ``algorithm`` or by the quickest that its library knows.

    ``adder``: the additions of each node's switch; None without such switches.
    """
    part = buffer_bytes / span.per_node
    laps = 2 if op == "all_reduce" else 1
    match op:
        case "send" | "sendrecv_ring":
            moved_s = max(inside(op, 2, buffer_bytes), buffer_bytes / span.nic_bytes_per_s)
            return Way(name="pairs", time_s=moved_s + span.nic_latency_s, beyond_bytes=buffer_bytes)
        case "broadcast":
            moved_s = max(inside(op, span.world, buffer_bytes), part / span.nic_bytes_per_s)
            return Way(name="ring", time_s=moved_s + (span.nodes - 1) * span.nic_latency_s, beyond_bytes=part)
        case "all_to_all":
            crossing = (span.world - span.per_node) / span.world * buffer_bytes
            messages = span.world - span.per_node
            moved_s = max(inside(op, span.world, buffer_bytes), crossing / span.nic_bytes_per_s)
            pairwise_s = moved_s + messages * span.nic_latency_s
            sorted_s = hierarchical_s(op, span, buffer_bytes, inside)
            name = "pairs" if pairwise_s <= sorted_s else "hierarchical"
            return Way(name=name, time_s=min(pairwise_s, sorted_s), beyond_bytes=crossing)
    ring = Way(
        name="ring",
        time_s=ring_s(op, span, buffer_bytes, inside),
        beyond_bytes=laps * (span.world - 1) / span.world * part,
    )
    if algorithm == "ring":
        return ring
    ways = [
        ring,
        Way(
            name="hierarchical",
            time_s=hierarchical_s(op, span, buffer_bytes, inside),
            beyond_bytes=laps * (span.nodes - 1) / span.nodes * part,
        ),
    ]
    if op == "all_reduce":
        beyond_bytes = tree_copies(span.nodes) * part
        tree = Way(name="tree", time_s=tree_s(span, buffer_bytes, inside), beyond_bytes=beyond_bytes)
        if algorithm == "tree":
            return tree
        ways.append(tree)
        if adder is not None:
            added_s = nvls_tree_s(span, buffer_bytes, adder)
            added = Way(name=NVLS_TREE, time_s=added_s, beyond_bytes=beyond_bytes)
            if algorithm == "nvls":
                return added
            ways.append(added)
    return min(ways, key=lambda way: way.time_s)


def pattern_of(op: str) -> Literal["ring", "pairs", "one_way"]:
    """Which ranks of different nodes exchange data in a collective (:mod:`hardware.network`)."""
    match op:
        case "all_to_all" | "dispatch" | "combine":
            return "pairs"
        case "send":
            return "one_way"
    return "ring"
