"""Partitions of a GPU's SMs: a stream's kernels hold SMs of its own partition, and never more than it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.catalog import load_gpu
from sim import simulate
from sim.engine.driver import Engine
from sim.engine.resources.sm_pool import SmPool
from sim.errors import ScenarioError
from sim.scenario.partition import Partitions, partitioned
from sim.scenario.spec import Scenario
from tests.engine_kit import COMPUTE, COPY, REDUCE, core_of, graph, run, spans, with_terms

OVERLAP = {
    "model": "llama3-70b", "tp": 4, "layers": 2, "lm_head": False, "sequence_parallel": True, "overlap_chunks": 4,
    "comm_ctas": 8, "seq_len": 4096,
}  # fmt: skip
HUNDRED = replace(load_gpu("h100-sxm-80gb"), sms=100)
KERNELS = (
    COMPUTE,
    COPY,
    with_terms(COMPUTE, blocks=281),
    with_terms(COMPUTE, blocks=150, quantised=False),
    with_terms(COPY, blocks=100, shrink="fluid"),
)


class Watched(SmPool):
    """A pool that checks itself whenever it decides."""

    def arbitrate(self) -> None:
        """Nobody holds what the pool does not have."""
        super().arbitrate()
        assert sum(one.held for one in self.users) + self.free == pytest.approx(self.capacity)
        assert all(0.0 <= one.held <= self.capacity for one in self.users) and self.free >= 0.0


@settings(deadline=None, max_examples=60)
@given(
    programs=st.lists(st.lists(st.integers(0, len(KERNELS)), min_size=1, max_size=6), min_size=1, max_size=3),
    sizes=st.lists(st.integers(2, 50), min_size=2, max_size=2),
    gpus=st.integers(1, 2),
)
def test_no_kernel_ever_holds_more_than_its_partition(programs: list[list[int]], sizes: list[int], gpus: int) -> None:
    queues = []
    for gpu in range(gpus):
        number = iter(range(100))
        queues += [
            (gpu, [KERNELS[i] if i < len(KERNELS) else (REDUCE, next(number)) for i in program]) for program in programs
        ]
    names = Partitions(sms=(("left", sizes[0]), ("right", sizes[1])), streams=(), gpu=HUNDRED)
    g = partitioned(graph(*queues), names)
    engine = Engine(core_of(g))
    for gpu in engine.core.gpus:
        gpu.pools = [Watched(engine.env, sms, engine.rounds, gpu.index) for sms in g.partition_sms]
    records = engine.run()
    assert len(records.span_op) == g.kernels


def test_kernels_of_two_partitions_do_not_wait_for_each_other() -> None:
    g = graph((0, [COMPUTE]), (0, [COMPUTE]))
    assert [end for *_, end in spans(g, run(g))] == [10.0, 20.0]
    # 100 tiles of 10 us on 80 SMs take two rounds, on 20 five.
    split = partitioned(g, Partitions(sms=(("most", 80), ("few", 20)), streams=(), gpu=HUNDRED))
    assert spans(split, run(split)) == [("gemm", 0, 0.0, 20.0), ("gemm", 0, 0.0, 50.0)]
    both = partitioned(g, Partitions(sms=(("most", 80), ("few", 20)), streams=((1, "most"),), gpu=HUNDRED))
    # The first one's last 20 tiles leave 60 SMs to the second from 10 us on, whose other 40 tiles end at 30 us.
    assert [end for *_, end in spans(both, run(both))] == [20.0, 30.0]


@pytest.mark.parametrize("sms", [32, 64, 128, 132])
def test_one_stream_on_part_of_the_sms_is_summed_as_events_run_it(sms: int) -> None:
    runs = [
        simulate(model="llama3-8b", seq_len=512, layers=2, sm_partitions={"own": sms}, sm_clock_mhz=1200, detail=detail)
        for detail in ("full", "segment")
    ]
    assert runs[0].latency_s == pytest.approx(runs[1].latency_s, rel=1e-9)
    assert runs[0].energy_j == pytest.approx(runs[1].energy_j, rel=1e-9)


def test_a_scenario_names_partitions_and_the_streams_that_they_serve() -> None:
    plain = simulate(**OVERLAP)
    split = simulate(**OVERLAP, sm_partitions={"compute": 116, "comm": 16})
    whole = simulate(**OVERLAP, sm_partitions={"all": 132})
    assert whole.latency_s == plain.latency_s and whole.energy_j == pytest.approx(plain.energy_j, rel=1e-9)
    assert split.latency_s != plain.latency_s
    started = split.kernels.query("stream == 0 and family == 'gemm'")
    assert len(started) and {c.describe["sm_partition"] for c in split.graph.classes if c.family == "gemm"} == {
        "compute (116 SMs)"
    }
    narrow = simulate(**OVERLAP, sm_partitions="compute=64,comm=16")
    assert narrow.latency_s > split.latency_s
    for detail in ("folded", "segment"):
        short = simulate(**OVERLAP, sm_partitions={"compute": 116, "comm": 16}, detail=detail)
        assert short.outcome.end_ps == split.outcome.end_ps
        assert short.energy_j == pytest.approx(split.energy_j, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sm_partitions": {"compute": 120, "comm": 16}}, "136 SMs in all, the GPU has 132: give less"),
        ({"sm_partitions": "a=10,a=20"}, "give each partition a name of its own"),
        ({"sm_partitions": "a=10", "sm_partition": "1=b"}, "sm_partition = 1=b: give one of a"),
        ({"sm_partitions": "a=10,b=20", "sm_partition": "0=a,0=b"}, "0=a, 0=b: give each stream one partition"),
        ({"sm_partition": "1=b"}, "sm_partition = 1=b: give sm_partitions too"),
        ({"sm_partitions": "a=none"}, "sm_partitions"),
        ({"sm_partitions": "a=0"}, "sm_partitions"),
    ],
)
def test_partitions_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        simulate(model="llama3-8b", layers=1, **fields)


def test_a_dumped_scenario_reads_back() -> None:
    one = Scenario.of(model="llama3-8b", sm_partitions="compute=100,comm=32", sm_partition={0: "comm"})
    assert Scenario.of(**one.model_dump()) == one
