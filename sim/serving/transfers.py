"""Key/value caches on their way from the replicas of prompts to those that go on, over the ports that they share.

Each rank sends its part to its counterpart: out of its GPU's links within a node, through its NIC and the network's
switches beyond. Alone a cache takes what a send of its bytes takes; several on one port share it max-min.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from hardware.network import Port
from sim.engine.resources.network import Network
from sim.scenario.machine import Machine, machine, nodes_of, policy_of
from sim.scenario.spec import Scenario
from sim.serving.cost import Cost
from sim.serving.memory import memory_of
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec

Streams = tuple[tuple[Port, float], ...]


@dataclass(kw_only=True, slots=True, eq=False)
class CacheTransfers:
    """Moves caches between the replicas of ``spec``, which fill one node after another, those of prompts first."""

    env: simpy.Environment
    spec: ServeSpec
    group: Scenario = field(init=False)
    machine: Machine = field(init=False)
    network: Network = field(init=False)
    _prices: StepPrices = field(init=False)
    _costs: dict[tuple[int, bool], tuple[Cost, float]] = field(default_factory=dict)
    _streams: dict[tuple[int, int], Streams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        group = self.group = self.spec.group()
        world = group.world * (self.spec.replicas + self.spec.prefill_replicas)
        self.machine = machine(group.gpu, world, policy_of(group), nodes=nodes_of(group), profile=group.profile)
        self._prices = StepPrices(scenario=group, machine=self.machine)
        self.network = Network(self.env, ())

    def move(self, tokens: int, source: int, to: int) -> Generator[simpy.Event, Any, Cost]:
        """Move the cache of ``tokens`` from one replica to another; returns its cost above idle, of all ranks."""
        alone, rank_bytes = self.cost(tokens, source, to)
        begin_s = self.env.now
        yield self.network.move(rank_bytes, self._between(source, to), demand=rank_bytes / alone.time_s)
        return Cost(time_s=self.env.now - begin_s, energy_j=alone.energy_j)

    def cost(self, tokens: int, source: int, to: int) -> tuple[Cost, float]:
        """Time and energy above idle of a cache that moves alone, in whole blocks, and the bytes of one rank."""
        step, world = self.spec.block_tokens, self.group.world
        whole = -(-tokens // step) * step
        ranks = (source * world, to * world)
        near = self.machine.cluster.same_node(ranks)
        known = self._costs.get((whole, near))
        if known is None:
            rank_bytes = memory_of(self.spec, self.group, context=whole).kv_bytes
            sent = self._prices.send(round(rank_bytes), ranks=ranks)
            idle_j = 2 * sent.time_s * self.machine.model.idle_w(self.machine.model.max_clock_hz)
            cost = Cost(time_s=sent.time_s, energy_j=world * max(0.0, sent.energy_j - idle_j))
            known = self._costs[whole, near] = cost, rank_bytes
        return known

    def _between(self, source: int, to: int) -> Streams:
        known = self._streams.get((source, to))
        if known is None:
            crossing: dict[Port, float] = {}
            for rank in range(self.group.world):
                for port, count in self._way(source * self.group.world + rank, to * self.group.world + rank):
                    crossing[port] = crossing.get(port, 0.0) + count
            known = self._streams[source, to] = tuple(crossing.items())
        return known

    def _way(self, a: int, b: int) -> Streams:
        cluster, gpu = self.machine.cluster, self.machine.gpu
        if not cluster.same_node((a, b)):
            return cluster.streams((a, b), "one_way").crossing
        link = cluster.bottleneck_bytes_per_s((a, b)) if gpu.link_bytes_per_s else gpu.pcie_bytes_per_s
        return tuple((Port(name=name, tier="link", bytes_per_s=link), 1.0) for name in (f"gpu{a} out", f"gpu{b} in"))


def transfer_cost(spec: ServeSpec, tokens: int) -> Cost:
    """Time and energy above idle of the cache of ``tokens`` that moves alone from the first replica to the last one."""
    last = spec.replicas + spec.prefill_replicas - 1
    return CacheTransfers(env=simpy.Environment(), spec=spec).cost(tokens, 0, last)[0]
