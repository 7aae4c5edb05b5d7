"""Ways of a collective: published figures, volumes, and which way wins where."""

from __future__ import annotations

import pytest

from hardware.catalog import load_gpu
from hardware.cluster import cluster_for, cluster_of, load_node
from hardware.errors import HardwareError
from hardware.laws.collective_time import bus_bytes
from hardware.laws.exchange import LAYOUT_S, Kernels, RoutedExchange, exchange_bytes, exchange_s
from hardware.laws.in_switch import in_switch_bytes
from hardware.laws.price import collective_terms
from hardware.laws.routes import (
    Span,
    between_nodes,
    direct_bytes,
    direct_choice,
    direct_s,
    hierarchical_s,
    ring_s,
    tree_s,
)
from hardware.laws.sizes import CollectiveSizes
from hardware.laws.terms import KernelTerms
from hardware.profile import profile_for

H100 = load_gpu("h100")
PROFILE = profile_for(H100)
KIB, MIB, GIB = 2**10, 2**20, 2**30
TWO_NODES = Span(nodes=2, per_node=8, nic_bytes_per_s=50e9, nic_latency_s=3e-6)


def terms(op: str, world: int, size: int, *, in_switch: bool = False, **more: object) -> KernelTerms:
    given = {"ctas": None, "in_graph": True} | more
    sizes = CollectiveSizes(op=op, world=world, buffer_bytes=size, **given)  # type: ignore[arg-type]
    return collective_terms(PROFILE, H100, sizes, in_switch=in_switch)


def in_node(op: str, world: int, size: int, **more: object) -> KernelTerms:
    """On one switch."""
    return terms(op, world, size, **({"in_switch": True} | more))


def free(*_: object) -> float:
    """A node whose links cost nothing: what is left is the network."""
    return 0.0


@pytest.mark.parametrize(
    ("world", "size", "microseconds"),
    [
        (2, 64 * KIB, 4.5),
        (2, MIB, 8.3),
        (4, 256 * KIB, 7.1),
        (4, 2 * MIB, 18.6),
        (8, 128 * KIB, 7.8),
        (8, 2 * MIB, 19.4),
    ],
)
def test_direct_all_reduces_take_what_vllms_kernel_takes(world: int, size: int, microseconds: float) -> None:
    """H100, in a graph (aiconfigurator-core 0.12.0, custom_allreduce table); eight GPUs are in no fit."""
    seconds = direct_s(direct_choice(world, size), world, size, 450e9)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.13)


@pytest.mark.parametrize(
    ("op", "size", "microseconds", "tolerance"),
    [
        ("all_gather", 8 * KIB, 11.0, 0.10),
        ("all_gather", 512 * MIB, 1400.5, 0.10),
        ("reduce_scatter", 512 * MIB, 1400.6, 0.10),
        ("all_to_all", 512 * MIB, 1480.4, 0.10),
        ("all_reduce", 8 * KIB, 16.4, 0.10),
        ("all_reduce", 4 * MIB, 50.5, 0.15),
        ("all_reduce", 512 * MIB, 2672.3, 0.10),  # of 8-bit integers, which no switch adds
    ],
)
def test_eight_gpus_follow_from_the_tables_of_two_and_four(
    op: str, size: int, microseconds: float, tolerance: float
) -> None:
    """NCCL on eight H100s (aiconfigurator-core 0.12.0, nccl table); no fit has seen them."""
    predicted = terms(op, 8, size)
    assert predicted.extrapolated
    assert predicted.floor_s * 1e6 == pytest.approx(microseconds, rel=tolerance)


def test_serving_engines_choose_by_size_and_world() -> None:
    """Thresholds of vLLM's custom_all_reduce.cuh."""
    assert [direct_choice(2, size) for size in (KIB, 4 * MIB, 8 * MIB)] == ["one_shot", "one_shot", "library"]
    assert [direct_choice(4, size) for size in (511 * KIB, 512 * KIB, 8 * MIB)] == ["one_shot", "two_shot", "library"]
    assert [direct_choice(8, size) for size in (255 * KIB, 256 * KIB, 8 * MIB)] == ["one_shot", "two_shot", "library"]
    assert direct_choice(16, KIB) == "library"


def test_two_shots_move_what_a_ring_moves_and_one_shot_more() -> None:
    for world in (2, 4, 8):
        assert direct_bytes("two_shot", world, MIB) == bus_bytes("all_reduce", world, MIB)
        assert direct_bytes("one_shot", world, MIB) == (world - 1) * MIB


def test_only_nccls_blocks_start_in_clusters() -> None:
    assert terms("all_reduce", 4, 256 * KIB, algorithm="library").cluster == 4
    for ctas in (None, 2):
        direct = terms("all_reduce", 4, 256 * KIB, algorithm="two_shot", ctas=ctas)
        assert (direct.cluster, direct.sms_per_block) == (1, 1.0)


def test_small_messages_gain_from_direct_access_and_large_ones_do_not() -> None:
    small = [terms("all_reduce", 4, 64 * KIB, algorithm=a).floor_s for a in ("auto", "library")]
    assert small[0] < small[1]
    large = [terms("all_reduce", 4, 64 * MIB, algorithm=a).floor_s for a in ("auto", "library", "one_shot")]
    assert large[0] == large[1] < large[2]
    assert terms("all_reduce", 4, 64 * KIB, algorithm="auto").blocks <= 36


def test_a_tree_in_one_node_is_a_slower_ring() -> None:
    assert terms("all_reduce", 4, GIB, algorithm="ring") == terms("all_reduce", 4, GIB)
    assert terms("all_reduce", 4, GIB, algorithm="tree").floor_s > terms("all_reduce", 4, GIB).floor_s


def test_rails_carry_a_ring_side_by_side() -> None:
    crossing_s = 2 * 15 / 16 * GIB / 8 / 50e9
    assert ring_s("all_reduce", TWO_NODES, GIB, free) == pytest.approx(crossing_s + 2 * 3e-6)


def test_a_hierarchy_is_the_sum_of_its_phases() -> None:
    def inside(op: str, world: int, size: float) -> float:
        return {"reduce_scatter": 1e-3, "all_gather": 2e-3}[op] * (world == 8) * (size == GIB)

    on_rails_s = 2 * (GIB / 8 / 2 / 50e9 + 3e-6)
    assert hierarchical_s("all_reduce", TWO_NODES, GIB, inside) == pytest.approx(3e-3 + on_rails_s)
    assert hierarchical_s("all_to_all", TWO_NODES, GIB, free) == pytest.approx(GIB / 2 / 50e9 + 3e-6)


def test_many_nodes_want_a_tree_for_small_messages_and_a_ring_for_large_ones() -> None:
    """NCCL's own reason to have both (its tuning model: 2 (N - 1) against 2 log2 N network latencies)."""
    many = Span(nodes=32, per_node=8, nic_bytes_per_s=50e9, nic_latency_s=3e-6)
    assert tree_s(many, 8 * KIB, free) < ring_s("all_reduce", many, 8 * KIB, free)
    assert tree_s(many, GIB, free) > ring_s("all_reduce", many, GIB, free)
    for size in (8 * KIB, MIB, GIB):
        best = between_nodes("all_reduce", "library", many, size, free).time_s
        ways = [tree_s(many, size, free), ring_s("all_reduce", many, size, free)]
        assert best == min(*ways, hierarchical_s("all_reduce", many, size, free))


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
def test_leaving_the_node_costs_time_and_more_bytes_more(op: str) -> None:
    world = 2 if op == "send" else 8
    apart = Span(nodes=2, per_node=world // 2, nic_bytes_per_s=50e9, nic_latency_s=3e-6)
    sizes = (8 * KIB, MIB, 64 * MIB, GIB)
    within = [terms(op, world, size).floor_s for size in sizes]
    across = [terms(op, world, size, span=apart).floor_s for size in sizes]
    assert all(far > near for far, near in zip(across, within, strict=True))
    assert across == sorted(across)


def test_activations_cross_a_nic_at_its_rate() -> None:
    cluster = cluster_for(H100, load_node("hgx-8"), 16)
    far = terms("send", 2, GIB, span=cluster.span((3, 11)))
    assert far.floor_s == pytest.approx(GIB / 50e9 + 3e-6, rel=1e-6)


def test_ranks_of_a_group_and_their_rails() -> None:
    cluster = cluster_of("h100", 16)
    assert cluster.span((0, 8)).per_node == 1
    assert cluster.span(range(16)).per_node == 8
    shared = cluster_for(H100, load_node("pcie-8"), 16).span(range(16))
    assert shared.nic_bytes_per_s == 12.5e9 * 2 / 8


def test_direct_access_ends_at_the_node() -> None:
    with pytest.raises(HardwareError, match="all_reduce = 'one_shot' reads peers of one node, these 16 ranks span"):
        terms("all_reduce", 16, KIB, algorithm="one_shot", span=TWO_NODES)


def test_a_receive_that_waits_takes_an_sm_a_block() -> None:
    """Blocks as forced, or by size: what our send/receive rows of 4 MiB (16 blocks) and 64 MiB (32) show.

    A lone block takes its SM's neighbour from kernels in clusters of two.
    """
    for ctas, size, blocks, sms in (
        (8, MIB, 8, 1.0),
        (None, 4 * MIB, 16, 1.0),
        (None, 64 * MIB, 32, 1.0),
        (None, 8, 1, 2.0),
    ):
        send = terms("send", 2, size, ctas=ctas)
        assert (send.blocks, send.sms_per_block) == (blocks, sms)
    assert terms("send", 2, 64 * MIB).waiting_power_w == pytest.approx(PROFILE.collective.waiting_power_w * 32 / 24)


def test_sixteen_gpus_reach_the_rate_of_their_nvlinks() -> None:
    """Eight rails of 400 Gbit/s carry what a node's ring does: a bus bandwidth between 300 and 400 GB/s at 1 GiB."""
    span = cluster_of("h100", 16).span(range(16))
    seconds = terms("all_reduce", 16, GIB, span=span).floor_s
    assert 300e9 < bus_bytes("all_reduce", 16, GIB) / seconds < 400e9


@pytest.mark.parametrize(
    ("size", "microseconds"), [(32, 199.9), (64, 324.0), (128, 578.1), (256, 1092.7), (512, 2112.0)]
)
def test_eight_hoppers_add_in_the_switch(size: int, microseconds: float) -> None:
    """NCCL on eight H100s, 16-bit floats (aiconfigurator-core 0.12.0, nccl table, 2.27.3)."""
    found = in_node("all_reduce", 8, size * MIB)
    assert found.floor_s * 1e6 == pytest.approx(microseconds, rel=0.03)
    assert found.link_bytes == in_switch_bytes(8, size * MIB) < bus_bytes("all_reduce", 8, size * MIB)
    assert found.blocks == 16 and found.extrapolated


def test_the_library_takes_what_its_tuner_does_and_a_named_one_is_kept() -> None:
    """At 9 MiB eight H100s take 88.4 us in the switch, which is the library's choice, and 75.8 in a ring (NCCL 2.28.9,
    torch-mojo-backend, agents_docs/mojo_collectives_nvls_results.md, 6.1): its tuner's lines, not the quicker way."""
    for size, taken, quicker in ((MIB, 0, 0), (8 * MIB, 1, 0), (64 * MIB, 1, 1), (1024 * MIB, 1, 1)):
        ways = [in_node("all_reduce", 8, size, algorithm=name).floor_s for name in ("ring", "nvls", "library")]
        assert ways[2] == ways[taken]
        assert ways[quicker] == min(ways[:2])
    assert in_node("all_gather", 8, 64 * MIB) == in_node("all_gather", 8, 64 * MIB, in_switch=False)
    assert in_node("all_reduce", 4, 64 * MIB) == in_node("all_reduce", 4, 64 * MIB, in_switch=False)
    bus = 1.75 * 1024 * MIB / in_node("all_reduce", 8, 1024 * MIB).floor_s
    assert 440e9 < bus < 500e9
    with pytest.raises(HardwareError, match="added in an NVSwitch of Hopper or later, over 8 ranks or more"):
        in_node("all_reduce", 4, MIB, algorithm="nvls")


# -- tokens to experts and back --------------------------------------------------------------------------------


def exchange(op: str, world: int, tokens: int = 128, kernels: Kernels = "low_latency") -> float:
    """On H800s in nodes of eight: FP8 there, bf16 back, hidden 7,168, top 8."""
    sizes = RoutedExchange(
        tokens=tokens, top_k=8, hidden=7168, element_bytes=1 if op == "dispatch" else 2, kernels=kernels
    )
    return exchange_s(op, sizes, cluster_of("h800", world).span(range(world)), 200e9)


@pytest.mark.parametrize(
    ("world", "dispatch_us", "combine_us"),
    [(8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369)],
)
def test_low_latency_kernels_take_what_deepep_publishes(world: int, dispatch_us: float, combine_us: float) -> None:
    assert exchange("dispatch", world) * 1e6 == pytest.approx(dispatch_us, rel=0.05)
    assert exchange("combine", world) * 1e6 == pytest.approx(combine_us, rel=0.13)


def test_normal_kernels_reach_the_published_rates() -> None:
    """DeepEP, 4,096 tokens a rank: 153 and 158 GB/s of NVLink on 8 GPUs, 51 and 50 GB/s by RDMA on 64."""
    for op, size, at_8, at_64 in (("dispatch", 1, 153e9, 51e9), ("combine", 2, 158e9, 50e9)):
        one = RoutedExchange(tokens=4096, top_k=8, hidden=7168, element_bytes=size, kernels="normal")
        spans = [cluster_of("h800", world).span(range(world)) for world in (8, 64)]
        told_s = LAYOUT_S if op == "dispatch" else 0.0  # they are with a layout that is known
        on_links = exchange_bytes(one, spans[0])[0] / (exchange_s(op, one, spans[0], 200e9) - told_s)
        by_rdma = exchange_bytes(one, spans[1])[1] / (exchange_s(op, one, spans[1], 200e9) - told_s)
        assert (on_links, by_rdma) == (pytest.approx(at_8, rel=0.05), pytest.approx(at_64, rel=0.12))


def test_few_tokens_belong_to_low_latency_kernels_and_many_to_normal_ones() -> None:
    for op in ("dispatch", "combine"):
        assert exchange(op, 64, 4096, "normal") < exchange(op, 64, 4096)
        assert exchange(op, 64, 128) < 2.0 * exchange(op, 64, 128, "normal")
        times = [exchange(op, 64, tokens) for tokens in (1, 16, 128, 1024)]
        assert times == sorted(times)
    with pytest.raises(HardwareError, match="'all_reduce' is no exchange of experts: dispatch or combine"):
        exchange("all_reduce", 8)


@pytest.mark.parametrize("world", [8, 16, 64])
def test_the_way_there_and_back_of_few_tokens_is_quicker_by_low_latency_kernels(world: int) -> None:
    """A normal dispatch waits for its layout; alone it would beat the kernels made for few tokens."""
    for tokens in (1, 16):
        low, normal = (
            sum(exchange(op, world, tokens, kernels) for op in ("dispatch", "combine"))
            for kernels in ("low_latency", "normal")
        )
        assert low < normal


@pytest.mark.parametrize(
    ("gpu", "node", "gpus"), [("h800", "hgx-8", 8), ("h20", "hgx-8", 8), ("b300", "hgx-8", 8), ("gb200", "nvl72", 72)]
)
def test_gpus_of_the_catalog_sit_in_their_nodes(gpu: str, node: str, gpus: int) -> None:
    cluster = cluster_of(gpu, gpus)
    assert (cluster.node.id, cluster.nodes, cluster.node.interconnect) == (node, 1, "nvswitch")
    assert not cluster_of(gpu, 2 * gpus).same_node(range(2 * gpus))
