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
from sim.run.plan import Plan, classifier
from sim.run.work import Work
from sim.scenario.machine import Machine, machine, nodes_of, policy_of
from sim.scenario.spec import Scenario
from sim.serving.cost import Cost
from sim.serving.memory import memory_of
from sim.serving.spec import ServeSpec
from sim.shortcuts.pieces import play
from workloads.kernel_names import CollectiveOp
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import CollectiveWork

Streams = tuple[tuple[Port, float], ...]


@dataclass(kw_only=True, slots=True, eq=False)
class CacheTransfers:
    """Moves caches between the replicas of ``spec``, which fill one node after another, those of prompts first."""

    env: simpy.Environment
    spec: ServeSpec
    group: Scenario = field(init=False)  # replicas that decode
    front: Scenario = field(init=False)  # those of prompts
    machine: Machine = field(init=False)
    network: Network = field(init=False)
    _costs: dict[tuple[int, bool], tuple[Cost, float]] = field(default_factory=dict)
    _streams: dict[tuple[int, int], Streams] = field(default_factory=dict)
    _last_part: dict[tuple[int, int], tuple[int, tuple[int, int], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        group = self.group = self.spec.group()
        self.front = self.spec.group(prefill=True)
        self.machine = machine(
            group.gpu, self.spec.gpus, policy_of(group), nodes=nodes_of(group), profile=group.profile
        )
        self.network = Network(self.env, ())

    def move(self, tokens: int, source: int, to: int) -> Generator[simpy.Event, Any, Cost]:
        """Move the cache of ``tokens`` from one replica to another; returns its cost above idle, of all ranks."""
        alone, rank_bytes = self.cost(tokens, source, to)
        begin_s = self.env.now
        yield self.network.move(rank_bytes, self._between(source, to), demand=rank_bytes / alone.time_s)
        return Cost(time_s=self.env.now - begin_s, energy_j=alone.energy_j)

    def cost(self, tokens: int, source: int, to: int) -> tuple[Cost, float]:
        """Time and energy above idle of a cache that moves alone, in whole blocks, and the bytes of one way.

        Ranks of the narrower replica have a way each: of the wider one's, one in so many.
        """
        step = self.spec.block_tokens
        whole = -(-tokens // step) * step
        count, ranks, near = self._last_part.get((source, to)) or self._last_part_of(source, to)
        known = self._costs.get((whole, near))
        if known is None:
            roles = (self.front, self.group)
            all_bytes = max(role.world * memory_of(self.spec, role, context=whole).kv_bytes for role in roles)
            rank_bytes = all_bytes / count
            alone = sent(self.machine, round(rank_bytes), ranks)
            idle_j = 2 * alone.time_s * self.machine.model.idle_w(self.machine.model.max_clock_hz)
            cost = Cost(time_s=alone.time_s, energy_j=count * max(0.0, alone.energy_j - idle_j))
            known = self._costs[whole, near] = cost, rank_bytes
        return known

    def _last_part_of(self, source: int, to: int) -> tuple[int, tuple[int, int], bool]:
        """How many parts a cache has, which comes last, and whether it stays in its node (none that leaves does)."""
        ways, same_node = self._ways(source, to), self.machine.cluster.same_node
        ranks = next((way for way in ways if not same_node(way)), ways[0])
        found = self._last_part[source, to] = (len(ways), ranks, same_node(ranks))
        return found

    def _between(self, source: int, to: int) -> Streams:
        known = self._streams.get((source, to))
        if known is None:
            crossing: dict[Port, float] = {}
            for way in self._ways(source, to):
                for port, count in self._way(*way):
                    crossing[port] = crossing.get(port, 0.0) + count
            known = self._streams[source, to] = tuple(crossing.items())
        return known

    def _ways(self, source: int, to: int) -> list[tuple[int, int]]:
        """Pairs of GPUs that send and receive parts of a cache."""
        count = min(self.spec.gpus_of(source), self.spec.gpus_of(to))
        return [(self._gpu(source, place, count), self._gpu(to, place, count)) for place in range(count)]

    def _gpu(self, replica: int, place: int, count: int) -> int:
        """The GPU of ``replica`` that is ``place`` of ``count`` spread over it."""
        before = sum(self.spec.gpus_of(other) for other in range(replica))
        return before + place * (self.spec.gpus_of(replica) // count)

    def _way(self, a: int, b: int) -> Streams:
        cluster, gpu = self.machine.cluster, self.machine.gpu
        if not cluster.same_node((a, b)):
            return cluster.streams((a, b), "one_way").crossing
        link = cluster.bottleneck_bytes_per_s((a, b)) if gpu.link_bytes_per_s else gpu.pcie_bytes_per_s
        return tuple((Port(name=name, tier="link", bytes_per_s=link), 1.0) for name in (f"gpu{a} out", f"gpu{b} in"))


def waiting_w(machine: Machine, ranks: tuple[int, int]) -> float:
    """What a rank draws above idle that waits in a send or receive for the other."""
    return classifier(machine, eager=False)(_send("send", 1, ranks)).terms.waiting_power_w


def _send(name: str, count: int, ranks: tuple[int, int]) -> Kernel:
    work = CollectiveWork(op=CollectiveOp.SEND, ranks=ranks, buffer_bytes=count)
    return Kernel(name=name, work=work, flops=0.0, bytes_moved=float(count))


def sent(machine: Machine, count: int, ranks: tuple[int, int], *, name: str = "send_kv") -> Cost:
    """Moving ``count`` bytes from one rank to another; joules of both."""
    price = classifier(machine, eager=False)(_send(name, count, ranks))
    kernel = _send(name, count, (0, 1))
    program = RankProgram(phases=(Phase(name="move", segments=(Segment(name="kv", kernels=(kernel,)),)),))
    moving = Work(program=Program(ranks=(program, program)), tokens=1, classify=lambda _: price, issue_s=None)
    plan = Plan(work=moving, model=machine.model)
    (part,) = play(plan.full.sequence, (machine.limits.fast_limit_w,) * 2)
    return Cost(time_s=part.played.records.end_ps * 1e-12, energy_j=sum(part.played.energy_j))


def transfer_cost(spec: ServeSpec, tokens: int) -> Cost:
    """Time and energy above idle of the cache of ``tokens`` that moves alone from the first replica to the last one."""
    last = spec.replicas + spec.prefill_replicas - 1
    return CacheTransfers(env=simpy.Environment(), spec=spec).cost(tokens, 0, last)[0]
