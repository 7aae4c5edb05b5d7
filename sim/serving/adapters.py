"""Low-rank adapters (LoRA) of a replica: slots in its GPUs' memory, and adapters on their way into them.

The GPUs hold as many adapters as a step may ask for (vLLM's ``max_loras``), the host's memory all of them. What a step
asks for and is in no slot comes over each GPU's host link before the step begins, in the place of what was unused for
longest; the host issues its copies one by one, as vLLM does (``set_lora`` of each module). No joules are billed for the
links.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

import workloads
from hardware.network import Port
from sim.engine.resources.network import Network
from sim.errors import ScenarioError
from sim.scenario.adapters import adapters_in
from sim.scenario.layout import layout_of
from sim.scenario.machine import Machine
from sim.scenario.spec import Scenario
from sim.serving.tiers import host_ports
from workloads.families.adapters import COPY_ISSUE_S, AdapterSize, adapter_size


@dataclass(kw_only=True, slots=True, eq=False)
class AdapterSlots:
    """The ``slots`` of one replica, or of a ``stage`` of it, whose layers' part of each adapter they hold. An adapter
    takes ``own_bytes`` over the ``port``, and the host ``issue_s``.

    >>> env = simpy.Environment()
    >>> link = Port(name="host to replica 0", tier="host", bytes_per_s=2e9)
    >>> slots = AdapterSlots(env=env, network=Network(env, ()), port=link, slots=2, own_bytes=1e9, issue_s=0.1)
    >>> for asked in ({1, 2}, {1}, {3, 1}):
    ...     done = env.process(slots.bring(slots.missing(asked), asked))
    ...     env.run(until=done)
    >>> env.now, sorted(slots.held), slots.loads
    (1.5, [1, 3], 3)
    """

    env: simpy.Environment
    network: Network
    port: Port
    slots: int
    own_bytes: float
    issue_s: float
    stage: int = 0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the longest unused first
    loads: int = 0
    load_s: float = 0.0  # in which steps waited

    def missing(self, asked: Iterable[int]) -> list[int]:
        """Those of ``asked`` that are in no slot; the others are used."""
        found = []
        for adapter in sorted(asked):
            if adapter in self.held:
                self.held.move_to_end(adapter)
            else:
                found.append(adapter)
        return found

    def bring(self, adapters: list[int], asked: Iterable[int]) -> Generator[simpy.Event, Any, None]:
        """``adapters`` take the slots of others, none of those ``asked`` for."""
        if not adapters:
            return
        begin_s = self.env.now
        for adapter in adapters:
            if len(self.held) == self.slots:
                del self.held[next(one for one in self.held if one not in asked)]
            self.held[adapter] = None
        moved = self.network.move(len(adapters) * self.own_bytes, [(self.port, 1.0)])
        yield self.env.all_of([moved, self.env.timeout(len(adapters) * self.issue_s)])
        self.loads += len(adapters)
        self.load_s += self.env.now - begin_s


def own_sizes(group: Scenario) -> list[AdapterSize]:
    """One adapter on a rank of each stage of ``group``."""
    model, adapters, layout = workloads.load_model(group.model), adapters_in(group), layout_of(group)
    assert adapters is not None
    layers = group.layers or model.layers
    return [adapter_size(model, layout, layout.stage_layers(layers, stage), adapters) for stage in range(layout.pp)]


def adapter_slots(
    group: Scenario, machine: Machine, number: int, count: int, network: Network, env: simpy.Environment
) -> list[AdapterSlots]:
    """Those of each stage of replica ``number`` of a server with ``count`` adapters; of one stage, others may share its
    host link."""
    sizes, node = own_sizes(group), machine.cluster.node
    held = count * sum(one.rank_bytes for one in sizes) * group.tp
    if node.host_memory_bytes and held > node.host_memory_bytes:
        raise ScenarioError(
            f"lora_adapters = {count}: are {held / 1e9:,.0f} GB, a node's host has {node.host_memory_bytes / 1e9:,.0f}"
        )
    gpus = group.world // group.pp
    into = host_ports(machine, number, gpus)[0]
    return [
        AdapterSlots(
            env=env,
            network=network,
            port=into if group.pp == 1 else replace(into, name=f"{into.name}, stage {stage}"),
            slots=group.lora_adapters,
            own_bytes=one.rank_bytes * gpus,
            issue_s=one.copies * COPY_ISSUE_S,
            stage=stage,
        )
        for stage, one in enumerate(sizes)
    ]
