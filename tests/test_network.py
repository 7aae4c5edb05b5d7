"""The network between nodes: routes, max-min shares, what each port carries, and jobs that share a leaf."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from hardware.catalog import load_gpu
from hardware.cluster import Cluster, Wiring, cluster_for, load_node
from hardware.errors import HardwareError
from hardware.laws.collective_time import default_ctas, seconds_within
from hardware.laws.in_switch import in_switch_of
from hardware.laws.routes import hierarchical_s, nvls_tree_s, ring_s, tree_s
from hardware.network import NetworkSpec, Pattern, Port, Shape, load_network, parse_network, route
from sim import simulate
from sim.engine.resources.network import Network
from sim.errors import FoldError
from sim.result.network import port_use
from sim.result.timeline import Timeline
from tests.perfetto_kit import losses, perfetto, rows

H100, HGX = load_gpu("h100"), load_node("hgx-8")
NARROW = """
id = "narrow"
shape = "fat_tree"
routing = "{routing}"
nodes_per_leaf = {{ value = 2, source = "test", confidence = "high" }}
spines = {{ value = {spines}, source = "test", confidence = "high" }}
uplink_bytes_per_s = {{ value = {uplink}, source = "test", confidence = "high" }}
switch_latency_s = {{ value = 1e-6, source = "test", confidence = "high" }}
"""


def narrow(*, spines: int = 1, uplink: float = 400e9, routing: str = "spread") -> str:
    """Two nodes a leaf, whose 16 NICs send 800 GB/s, over so few links."""
    return NARROW.format(routing=routing, spines=spines, uplink=uplink)


def cluster(text: str, nodes: int, placement: Any = "packed", seed: int = 0) -> Cluster:
    wiring = Wiring(network=parse_network(text, where="narrow.toml"), placement=placement, seed=seed)
    return cluster_for(H100, HGX, 8 * nodes, wiring)


# -- the resource alone --------------------------------------------------------------------------------------

PORTS = [Port(name=f"p{i}", tier="leaf", bytes_per_s=10.0 * (i + 1)) for i in range(4)]
CROSSINGS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(PORTS), st.sampled_from([0.5, 1.0, 2.0]), min_size=1),
        st.sampled_from([1.0, 4.0, 100.0]),
    ),
    min_size=1,
    max_size=6,
)


def shared(crossings: list[tuple[dict[Port, float], float]]) -> list[float]:
    network = Network(Environment(), PORTS, paced=True)
    made = [network.move(1.0, list(streams.items()), demand=demand) for streams, demand in crossings]
    network.divide()
    return [one.rate for one in made]


@given(CROSSINGS)
@settings(max_examples=200, deadline=None)
def test_shares_are_max_min(crossings: list[tuple[dict[Port, float], float]]) -> None:
    """No port above its capacity; who gets less than it asks for is among the best off on a port that is full."""
    rates = shared(crossings)
    used = {
        port: sum(streams.get(port, 0.0) * rate for (streams, _), rate in zip(crossings, rates, strict=True))
        for port in PORTS
    }
    assert all(used[port] <= port.bytes_per_s * (1 + 1e-9) for port in PORTS)
    for (streams, demand), rate in zip(crossings, rates, strict=True):
        assert 0.0 < rate <= demand
        if rate < demand * (1 - 1e-9):
            assert any(
                used[port] >= port.bytes_per_s * (1 - 1e-9)
                and rate >= max(r for (other, _), r in zip(crossings, rates, strict=True) if port in other) * (1 - 1e-9)
                for port in streams
            )


@given(CROSSINGS, st.integers(1, 10**6))
@settings(max_examples=50, deadline=None)
def test_every_byte_arrives_and_none_too_soon(crossings: list[tuple[dict[Port, float], float]], size: int) -> None:
    env = Environment()
    network = Network(env, PORTS)
    ends: list[float] = []

    def job(streams: dict[Port, float], demand: float) -> Any:
        yield network.move(size, list(streams.items()), demand=demand)
        ends.append(env.now)

    for streams, demand in crossings:
        env.process(job(streams, demand))
    env.run()
    assert len(ends) == len(crossings) and not network.put_queue
    assert not any(port.put_queue for port in network.ports.values())
    for port in PORTS:  # bytes over each link at its rate are the least that it can take
        crossed = sum(streams.get(port, 0.0) * size for streams, _ in crossings)
        assert max(ends) >= crossed / port.bytes_per_s * (1 - 1e-9)


def test_a_transfer_given_up_leaves_its_bandwidth_to_others() -> None:
    env = Environment()
    network = Network(env, PORTS[:1])
    ends: list[float] = []

    def job() -> Any:
        yield network.move(100, [(PORTS[0], 1.0)])
        ends.append(env.now)

    def quitter() -> Any:
        mine = network.move(1000, [(PORTS[0], 1.0)])
        yield env.timeout(4)
        network.end(mine)
        assert mine.left == 980

    env.process(job())
    env.process(quitter())
    env.run()
    assert ends == [12.0]  # 20 bytes in 4 s, 80 in 8


# -- routes ------------------------------------------------------------------------------------------------------


def test_neighbours_under_a_leaf_never_see_a_spine() -> None:
    one = cluster(narrow(), 4)
    assert one.path(0, 8) == ["gpu0", "nic0.0", "leaf0", "nic1.0", "gpu8"]
    assert one.path(0, 17) == ["gpu0", "nic0.0", "leaf0", "spine0", "leaf1", "nic2.1", "gpu17"]
    assert cluster(narrow(), 4, "spread").path(0, 8)[2:5] == ["leaf0", "spine0", "leaf1"]


def test_a_rail_joins_the_nics_of_one_place() -> None:
    rails = cluster_for(H100, HGX, 8 * 40, Wiring(network=load_network("ib-ndr-rail")))
    assert rails.path(3, 8 * 31 + 3)[2:-2] == ["leaf0.3"]
    assert rails.path(3, 8 * 32 + 3)[2:-2][::2] == ["leaf0.3", "leaf1.3"]
    assert rails.path(3, 8 + 4)[2:-2][::2] == ["leaf0.3", "leaf0.4"]


def test_ecmp_is_seeded_and_uses_all_spines() -> None:
    wide = narrow(spines=8, uplink=50e9, routing="ecmp")
    ways = [
        [route(cluster(wide, 4, seed=seed).fabric, (0, place), (2, place)) for place in range(8)] for seed in (0, 0, 1)
    ]
    assert ways[0] == ways[1] != ways[2]
    assert 3 < len(set(ways[0])) < 8  # some meet


@given(
    st.sampled_from(["rail", "fat_tree"]), st.sampled_from(["spread", "ecmp"]), st.sampled_from(["ring", "pairs"]),
    st.integers(2, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 8),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_leaves_nics_enters_nics_and_passes_every_switch(
    shape: Shape, routing: Any, pattern: Pattern, nodes: int, per_leaf: int, spines: int, gpus: int
) -> None:
    """Streams are conserved: as many arrive as are sent, and each spine passes on what it gets."""
    spec = NetworkSpec(
        id="x", shape=shape, routing=routing, nodes_per_leaf=per_leaf, spines=spines, uplink_bytes_per_s=1e9,
        switch_latency_s=1e-6,
    )  # fmt: skip
    where = cluster_for(H100, HGX, 8 * nodes, Wiring(network=spec))
    ranks = [8 * node + place for node in range(nodes) for place in range(gpus)]
    streams = where.streams(ranks, pattern)
    into: dict[str, float] = {}
    out: dict[str, float] = {}
    for port, count in streams.crossing:
        a, b = port.name.split(" to ")
        out[a] = out.get(a, 0.0) + count
        into[b] = into.get(b, 0.0) + count
    sent = sum(count for name, count in out.items() if name.startswith("nic"))
    assert sent == len(ranks) * streams.of_rank
    assert into.keys() == out.keys()
    assert all(into[name] == pytest.approx(out[name]) for name in into)


# -- price -------------------------------------------------------------------------------------------------------


def test_a_network_that_carries_all_that_nics_send_costs_nothing_but_its_switches() -> None:
    ranks = range(32)
    usual = cluster_for(H100, HGX, 32).span(ranks)
    full = cluster(narrow(uplink=800e9), 4).span(ranks)
    assert full.nic_bytes_per_s == usual.nic_bytes_per_s == 50e9
    assert full.nic_latency_s == pytest.approx(usual.nic_latency_s + 2e-6)
    # A ring over 4 nodes crosses the leaves' uplink in each direction once, an exchange of pairs twice as often.
    assert cluster(narrow(uplink=200e9), 4).span(ranks).nic_bytes_per_s == pytest.approx(25e9)
    assert cluster(narrow(uplink=400e9), 4).span(ranks, "pairs").nic_bytes_per_s == pytest.approx(400e9 * 24 / 256)


@given(st.integers(2, 8), st.integers(1, 6), st.sampled_from(["ring", "pairs"]), st.floats(1e9, 4e11))
@settings(max_examples=40, deadline=None)
def test_another_link_never_slows_a_single_job(nodes: int, spines: int, pattern: Pattern, uplink: float) -> None:
    """Streams spread over all spines: one more carries part of each. (A hash may send all of them to the new one.)"""
    ranks = range(8 * nodes)
    fewer = cluster(narrow(spines=spines, uplink=uplink), nodes).span(ranks, pattern)
    more = cluster(narrow(spines=spines + 1, uplink=uplink), nodes).span(ranks, pattern)
    wider = cluster(narrow(spines=spines, uplink=2 * uplink), nodes).span(ranks, pattern)
    assert more.nic_bytes_per_s >= fewer.nic_bytes_per_s * (1 - 1e-9)
    assert wider.nic_bytes_per_s >= fewer.nic_bytes_per_s * (1 - 1e-9)


def test_strict_loading() -> None:
    for change, message in (
        (('"spread"', '"hash"'), "n.toml: routing = 'hash': known are spread, ecmp"),
        (('"fat_tree"', '"torus"'), "n.toml: shape = 'torus': known are rail, fat_tree, dragonfly"),
        (("spines = { value = 1,", "spines = { value = 1.5,"), "n.toml: spines = 1.5: give a whole number"),
        (
            ("spines = { value = 1,", "spines = { value = 2147483648,"),
            "n.toml: spines = 2.14748e+09: give at most 4,096",
        ),
        (("spines", "spine"), "n.toml: unknown key 'spine': did you mean 'spines'?"),
    ):
        with pytest.raises(HardwareError) as error:
            parse_network(narrow().replace(*change, 1), where="n.toml")
        assert str(error.value) == message
    with pytest.raises(HardwareError, match="unknown network 'roce': did you mean 'roce-400g'"):
        load_network("roce")


# -- in a run ------------------------------------------------------------------------------------------------------


def run(folder: Path, *, uplink: float, dp: int, placement: str = "spread", **more: Any) -> Timeline:
    """Jobs of 16 GPUs each, two nodes under different leaves: a ring needs 400 GB/s of a leaf's uplink."""
    file = folder / f"narrow{uplink:g}.toml"
    file.write_text(narrow(uplink=uplink))
    fields = {"model": "llama3-8b", "gpu": "h100", "layers": 1, "lm_head": False, "seq_len": 8192, "tp": 16}
    fields |= {"placement": placement, "regime": "cold", "uncapped": True, "network": str(file)}
    return simulate(**(fields | {"dp": dp, "batch": dp} | more))


def crossing_s(run: Timeline) -> float:
    """Seconds in which something crosses the network."""
    times = [*run.records.crossing_time_ps, run.records.end_ps]
    return sum((b - a) * 1e-12 for (a, b), now in zip(pairwise(times), run.records.crossing, strict=True) if now)


def test_two_jobs_that_share_a_leaf_slow_down_as_max_min_says(tmp_path: Path) -> None:
    """Each would fill 90 % of the uplink: of the bytes each gets half of it, and takes 1.8 times as long."""
    alone = run(tmp_path, uplink=1e12, dp=2)
    (stream,) = {
        rate for moment in alone.records.crossing for _, rate in moment
    }  # bytes/s of one of the eight rails, on average over a collective
    wanted = 8 * stream
    both = run(tmp_path, uplink=wanted / 0.9, dp=2)
    assert crossing_s(both) == pytest.approx(crossing_s(alone) * 1.8, rel=1e-6)
    apart = run(tmp_path, uplink=wanted / 0.9, dp=2, placement="packed")  # each job under a leaf of its own
    assert crossing_s(apart) < crossing_s(alone)  # and two switches less
    one = run(tmp_path, uplink=2 * wanted, dp=2)
    assert one.latency_s == alone.latency_s


@pytest.mark.parametrize("uplink", [150e9, 300e9, 1e12])
def test_bytes_are_conserved_and_no_link_is_above_its_capacity(tmp_path: Path, uplink: float) -> None:
    done = run(tmp_path, uplink=uplink, dp=2)
    sent: dict[str, float] = {}
    for class_id, members in zip(
        (done.graph.op_class[m[0]] for m in done.graph.collective_members), done.graph.collective_members, strict=True
    ):
        transit = done.graph.classes[class_id].transit
        assert transit is not None and len(members) == 16
        for port, count in transit.streams.crossing:
            sent[port.name] = sent.get(port.name, 0.0) + count * transit.stream_bytes
    used = port_use(done)
    assert {one.port.name for one in used} == set(sent) and "leaf0 to spine0" in sent
    for one in used:
        assert one.bytes_per_s.max() <= one.port.bytes_per_s * (1 + 1e-6)
        assert one.bytes_until(done.records.end_ps) == pytest.approx(sent[one.port.name], rel=1e-6)


def test_what_crosses_alone_takes_its_price_and_the_price_is_the_sum_of_its_phases(tmp_path: Path) -> None:
    """Reduce-scatter in the node, half of each eighth there and back on its rail, all-gather in the node."""
    done = run(tmp_path, uplink=800e9, dp=1)
    where = done.machine.cluster.span(range(16))

    def inside(op: str, world: int, buffer_bytes: float) -> float:
        c = done.machine.profile.collective
        return seconds_within(c, op, world, buffer_bytes, default_ctas("all_reduce"), in_graph=True)

    total_s = 0.0
    for members in done.graph.collective_members:
        kernel = done.graph.classes[done.graph.op_class[members[0]]]
        size = float(str(kernel.describe["buffer_bytes"]))
        on_rails_s = 2 * (size / 8 / 2 / 50e9 + where.nic_latency_s)
        phases_s = inside("reduce_scatter", 8, size) + on_rails_s + inside("all_gather", 8, size)
        assert kernel.describe["op"] == "all_reduce"
        assert hierarchical_s("all_reduce", where, size, inside) == pytest.approx(phases_s, rel=1e-12)
        adder = in_switch_of("hopper", 450e9)
        assert adder is not None
        added_s = nvls_tree_s(where, size, adder)
        quickest = min(phases_s, ring_s("all_reduce", where, size, inside), tree_s(where, size, inside), added_s)
        assert kernel.terms.floor_s == pytest.approx(quickest, rel=1e-12)
        total_s += kernel.terms.floor_s + kernel.gap_s
    assert crossing_s(done) == pytest.approx(total_s, rel=1e-6)


def test_equal_jobs_that_crowd_a_port_are_all_simulated(tmp_path: Path) -> None:
    from sim.errors import FoldError

    assert run(tmp_path, uplink=1e12, dp=2, detail="folded").latency_s == run(tmp_path, uplink=1e12, dp=2).latency_s
    with pytest.raises(FoldError, match="equal groups of ranks crowd 'leaf0 to spine0' of the network: each is"):
        run(tmp_path, uplink=300e9, dp=2, detail="folded")


def test_jobs_that_share_a_leaf_are_seen_in_perfetto(tmp_path: Path) -> None:
    file = tmp_path / "run.json.gz"
    run(tmp_path, uplink=300e9, dp=2).to_chrome(file)
    with perfetto(file) as processor:
        assert losses(processor) == []
        found = dict(
            rows(
                processor,
                "select t.name as name, max(c.value) as most from counter c join process_counter_track t on "
                "c.track_id = t.id join process p using (upid) where p.name like 'network%' group by t.name",
            )
        )
    assert found["leaf0 to spine0 GB/s value"] == pytest.approx(300.0, rel=1e-3)
    assert found["nic0.0 to leaf0 GB/s value"] == pytest.approx(300.0 / 16, rel=1e-3)


@pytest.mark.parametrize("seq_len", [256, 320, 384, 512, 640, 1024])
def test_of_several_crowded_ports_the_first_is_named(seq_len: int) -> None:
    # Whatever order memory gives equal things: a set would name one of two ports by chance.
    with pytest.raises(FoldError, match=r"crowd 'nic0\.0 to leaf0' of the network"):
        simulate(
            model="llama3-70b", gpu="l40s-48gb", tp=8, pp=2, layers=4, batch=4, micro_batches=2, seq_len=seq_len,
            all_reduce="one_shot", overlap_chunks=4, comm_ctas=8, detail="folded", ignore_memory=True,
        )  # fmt: skip
