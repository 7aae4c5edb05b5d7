"""The hardware side of a scenario, resolved: GPU, profile, power curve, limits and the engine's model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hardware.catalog import load_gpu
from hardware.clock import ClockLimits
from hardware.cluster import Cluster, Wiring, cluster_for, default_node, load_node
from hardware.gpu import GpuSpec
from hardware.network import DEFAULT_NETWORK, Placement, load_network
from hardware.power import PowerCurve
from hardware.profile import Profile, own_profile, profile_for
from inputs.files import contents
from sim.engine.running import GpuModel
from sim.errors import ScenarioError
from sim.scenario.spec import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU type under one power policy, and how many of it."""

    gpu: GpuSpec
    profile: Profile
    curve: PowerCurve
    limits: ClockLimits
    model: GpuModel
    world: int
    cluster: Cluster

    @property
    def chips(self) -> int:
        """GPUs, or cards where they are MIG slices."""
        return -(-self.world // self.gpu.slices)

    @property
    def status(self) -> str:
        """``calibrated``, ``forecast`` or ``uncalibrated``: what the printed numbers rest on."""
        return self.profile.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Under what the GPUs run: power limit, clock, temperature, chips; None is the card's own, or typical."""

    power_cap_w: float | None = None
    uncapped: bool = False
    sm_clock_mhz: float | None = None
    chip_temperature_c: float | None = None
    chip_power_factor: float | None = None
    stepped: bool = False  # the clock stays on its 15 MHz grid
    links_asleep: bool = False  # several GPUs that exchange nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """What the GPUs sit in and how it is wired: names, or files; None is the usual one."""

    node: str | None = None
    network: str | None = None
    placement: Placement = "packed"
    ecmp_seed: int = 0

    def cluster(self, gpu: GpuSpec, world: int) -> Cluster:
        """The fewest of them that hold ``world`` GPUs."""
        wiring = Wiring(
            network=load_network(self.network or DEFAULT_NETWORK), placement=self.placement, seed=self.ecmp_seed
        )
        return cluster_for(gpu, load_node(self.node or default_node(gpu)), world, wiring)


def nodes_of(scenario: Scenario) -> Nodes:
    """The nodes that ``scenario`` asks for."""
    return Nodes(
        node=scenario.node,
        network=scenario.network,
        placement=scenario.placement,
        ecmp_seed=scenario.ecmp_seed,
    )


def machine(
    gpu_name: str, world: int = 1, policy: Policy = Policy(), *, nodes: Nodes = Nodes(), profile: str | None = None
) -> Machine:
    """Resolve names and policies once; equal requests share the object (and the memos behind it).

    ``profile`` None is the shipped one (else a file). Files that changed are read anew.
    """
    own = [name for name in (gpu_name, nodes.node, nodes.network) if name and name.endswith(".toml")]
    files = contents(*own, profile) if own or profile else ()
    return _machine(gpu_name, world, policy, nodes, profile, files)


@lru_cache(maxsize=256)
def _machine(
    gpu_name: str, world: int, policy: Policy, nodes: Nodes, profile: str | None, _: tuple[object, ...]
) -> Machine:
    gpu = load_gpu(gpu_name)
    return _resolved(gpu, _profile(gpu, profile), nodes, world, policy)


def _profile(gpu: GpuSpec, file: str | None) -> Profile:
    return profile_for(gpu) if file is None else own_profile(gpu, Path(file))


def profile_of(scenario: Scenario) -> Profile:
    """The profile that ``scenario`` names, whichever its run is priced with."""
    return _profile(load_gpu(scenario.gpu), scenario.profile)


def machine_with(scenario: Scenario, profile: Profile) -> Machine:
    """The machine that ``scenario`` describes, but with ``profile``."""
    policy = policy_of(scenario, stepped=scenario.regime == "cold")
    return _resolved(load_gpu(scenario.gpu), profile, nodes_of(scenario), scenario.world, policy)


def _resolved(gpu: GpuSpec, profile: Profile, nodes: Nodes, world: int, policy: Policy) -> Machine:
    power_cap_w, sm_clock_mhz = policy.power_cap_w, policy.sm_clock_mhz
    cluster = nodes.cluster(gpu, world)
    links_w = profile.collective.links_power_w if world > 1 and not policy.links_asleep else 0.0
    curve = _curve(profile.power_curve(gpu), policy.chip_temperature_c, links_w)
    limits = profile.clock_limits(gpu, power_cap_w=math.inf if policy.uncapped else power_cap_w)
    if gpu.card is not None:
        beside = _slices_at_work(gpu, world, alone=world == 1 or policy.links_asleep)
        curve, limits = curve.shared_by(beside), limits.under(limits.cap_w / beside)
    clock_hz = gpu.max_clock_hz
    if sm_clock_mhz is not None:
        clock_hz = sm_clock_mhz * 1e6
        if not gpu.min_clock_hz <= clock_hz <= gpu.max_clock_hz:
            raise ScenarioError(
                f"sm_clock_mhz = {sm_clock_mhz:g} is outside what {gpu.id} runs: "
                f"{gpu.min_clock_hz / 1e6:g} to {gpu.max_clock_hz / 1e6:g} MHz"
            )
    if power_cap_w is not None and not power_cap_w > gpu.idle_w:  # NaN too
        raise ScenarioError(f"power_cap_w = {power_cap_w:g} is not above the idle power of {gpu.id}, {gpu.idle_w:g} W")
    if power_cap_w is not None and power_cap_w > gpu.tdp_w:
        raise ScenarioError(
            f"power_cap_w = {power_cap_w:g} is beyond {gpu.id}, which takes at most {gpu.tdp_w:g} W: give at "
            "most that, or leave it out"
        )
    found = GpuModel(
        sms=gpu.sms,
        max_clock_hz=clock_hz,
        min_clock_hz=min(gpu.min_clock_hz, clock_hz),
        reference_clock_hz=gpu.max_clock_hz,
        clock_step_hz=gpu.clock_step_hz if policy.stepped else 0.0,
        hbm_bytes_per_s=profile.hbm_bytes_per_s(gpu),
        link_bytes_per_s=gpu.link_bytes_per_s or gpu.pcie_bytes_per_s,
        mixed_hbm_share=profile.sharing.mixed_hbm_share,
        chip_power_factor=1.0 if policy.chip_power_factor is None else policy.chip_power_factor,
        idle_w=curve.idle_w,
        voltage_scale=curve.voltage_scale,
    )
    return Machine(
        gpu=gpu, profile=profile, curve=curve, limits=limits, model=_one(found), world=world, cluster=cluster
    )


@lru_cache(maxsize=256)
def _one(model: GpuModel) -> GpuModel:
    """One object for equal models, whatever the power limit: memos can know it by which it is."""
    return model


def _slices_at_work(gpu: GpuSpec, world: int, *, alone: bool) -> int:
    """MIG slices of one card that run side by side: all do the same, so that each has an equal part of its watts."""
    if not alone:
        raise ScenarioError(
            f"gpu = {gpu.id}: MIG slices exchange nothing (no peer-to-peer): leave tp, ep, pp and cp at 1; dp runs one "
            "replica in each"
        )
    if world > gpu.slices and world % gpu.slices:
        raise ScenarioError(f"dp = {world}: a card has {gpu.slices} slices {gpu.id}: give up to that, or a multiple")
    return min(world, gpu.slices)


@lru_cache(maxsize=256)
def _curve(curve: PowerCurve, celsius: float | None, links_w: float) -> PowerCurve:
    """``curve`` at a temperature and with links awake: one object for equal wishes, by which GPU models are equal."""
    return (curve if celsius is None else curve.at(celsius)).plus(links_w)


def machine_of(scenario: Scenario, *, stepped: bool = False) -> Machine:
    """The machine that ``scenario`` describes; ``stepped`` keeps the clock on its 15 MHz grid."""
    policy = policy_of(scenario, stepped=stepped)
    return machine(scenario.gpu, scenario.world, policy, nodes=nodes_of(scenario), profile=scenario.profile)


def policy_of(scenario: Scenario, *, stepped: bool = False) -> Policy:
    """The power policy that ``scenario`` asks for."""
    return Policy(
        power_cap_w=scenario.power_cap_w,
        uncapped=scenario.uncapped,
        sm_clock_mhz=scenario.sm_clock_mhz,
        chip_temperature_c=scenario.chip_temperature_c,
        chip_power_factor=scenario.chip_power_factor,
        stepped=stepped,
        links_asleep=scenario.world == scenario.dp,
    )
