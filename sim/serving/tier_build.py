"""The tiers of a server's replicas: how much each holds, and the ports on the way into it and out of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import assert_never

import simpy

from hardware.network import Port
from sim.engine.resources.network import Network
from sim.errors import ScenarioError
from sim.scenario.machine import Machine
from sim.serving.memory import stage_needs
from sim.serving.requests import Request
from sim.serving.spec import ServeSpec
from sim.serving.tiers import TIERS, CacheTiers, Tier, TierName, host_ports


def tiers_of(spec: ServeSpec, machine: Machine, traffic: Sequence[Request], env: simpy.Environment) -> list[CacheTiers]:
    """The tiers of each replica that computes prompts; none where ``spec`` has none."""
    asked = {name: gb for name in TIERS if (gb := getattr(spec, f"kv_{name}_gb")) is not None}
    if not asked:
        return []
    piece_tokens = next((request.block_tokens for request in traffic if request.prefix), 0)
    if not piece_tokens:
        raise ScenarioError(f"kv_{next(iter(asked))}_gb: these requests have no hash_ids: nothing begins like another")
    prefill = spec.prefill_replicas > 0
    group = spec.group(prefill=prefill)
    stages = stage_needs(spec, group, context=piece_tokens)
    piece_bytes = sum(need.kv_bytes for need in stages) * (group.world // group.pp)
    room = {name: int(gb * 1e9 / piece_bytes) for name, gb in asked.items()}
    for name, pieces in room.items():
        if not pieces:
            raise ScenarioError(
                f"kv_{name}_gb = {asked[name]:g}: holds no {piece_tokens} tokens, which are {piece_bytes / 1e9:.3g} GB"
            )
    replicas = range(spec.prefill_replicas or spec.replicas)
    _check_node(spec, machine, len(replicas))
    network, store = Network(env, ()), OrderedDict[int, None]()
    found = []
    for number in replicas:
        into_gpu, into_host = host_ports(machine, number, group.world)
        tiers: list[Tier] = []
        for name, pieces in room.items():
            into, out = _ports(spec, machine, name, number, group.world)
            tier = Tier(
                name=name,
                pieces=pieces,
                into=into if tiers else (into_host, *into),  # what comes out of a tier before has left the GPUs
                out=(*out, into_gpu),
                held=store if name == "remote" else OrderedDict(),
            )
            tiers.append(tier)
        one = CacheTiers(
            env=env, network=network, tiers=tuple(tiers), piece_bytes=piece_bytes, piece_tokens=piece_tokens
        )
        found.append(one)
    return found


def _check_node(spec: ServeSpec, machine: Machine, replicas: int) -> None:
    """Raise where a node's host or disks hold less than its replicas ask for, or are not known."""
    node = machine.cluster.node
    here = min(replicas, max(1, node.gpus_per_node // spec.gpus_of(0)))
    for name, has in (("host", node.host_memory_bytes), ("disk", node.disk_bytes)):
        gb = getattr(spec, f"kv_{name}_gb")
        if gb is not None and not has:
            raise ScenarioError(f"kv_{name}_gb = {gb:g}: node {node.id} does not say what it has: give it in its file")
        if gb is not None and here * gb * 1e9 > has:
            raise ScenarioError(
                f"kv_{name}_gb = {gb:g} for each of {here} replicas is more than a node's {has / 1e9:g} GB"
            )


def _ports(
    spec: ServeSpec, machine: Machine, name: TierName, number: int, gpus: int
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Ports on the way into a tier and out of it, beside the links of the GPUs."""
    node = machine.cluster.node
    nodes = max(1, gpus // node.gpus_per_node)  # a replica on several has the disks of all
    match name:
        case "host":
            return (), ()
        case "disk":
            place = number * gpus // node.gpus_per_node
            rates = (("write", node.disk_write_bytes_per_s), ("read", node.disk_read_bytes_per_s))
            write, read = (
                Port(name=f"disk {way} of node {place}", tier="disk", bytes_per_s=nodes * r) for way, r in rates
            )
            return (write,), (read,)
        case "remote":
            nics = max(1.0, gpus * min(1.0, node.nics_per_node / node.gpus_per_node))
            own_s = (spec.kv_remote_gb_per_s or 0.0) * 1e9
            ways: list[tuple[Port, ...]] = []
            for nic, end in (("from", "in"), ("to", "out")):
                port = Port(name=f"nics {nic} replica {number}", tier="nic", bytes_per_s=nics * node.nic_bytes_per_s)
                ways.append((port, Port(name=f"store {end}", tier="store", bytes_per_s=own_s)) if own_s else (port,))
            return ways[0], ways[1]
    assert_never(name)
