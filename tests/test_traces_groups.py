"""Which ranks run a collective together: rank files of every kind, whose groups and times are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sim.replay.changes import Changes
from sim.replay.study import replay_trace
from tests.traces_kit import Event, kernel, launch, write
from traces.classify import classify
from traces.collectives import match_collectives
from traces.read.load import read_trace

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CUSTOM = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)"
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"
BASE_NS = 1_700_000_000_000_000_000
PAUSE_US, NCCL_LEAD_US, GRAPH_US, FIRST_US = 1.2, 2.2, 49.0, 100.0  # as real files have them
TELLS = ("arguments", "names", "pg_config", "nothing")


@dataclass(slots=True)
class Ranks:
    """Files of several ranks, written kernel by kernel; ``truth``: ranks and end of each collective."""

    told: str
    graph: bool
    now: dict[int, float]
    groups: dict[str, list[list[int]]]
    events: dict[int, list[Event]] = field(default_factory=dict)
    truth: list[tuple[frozenset[int], float]] = field(default_factory=list)
    launched: dict[int, float] = field(default_factory=dict)

    def run(self, rank: int, name: str, dur: float, **args: Any) -> None:
        mine = self.events.setdefault(rank, [])
        first = self.launched.setdefault(rank, self.now[rank])
        number = 1 if self.graph else len(mine) + 1
        if self.graph and not mine:
            mine.append(launch(first - GRAPH_US, 1, name="cudaGraphLaunch", dur=3))
        elif not self.graph:
            mine.append(launch(first - 50 + 0.01 * number, number, dur=0.005))
        blocks = [132 if name == PRODUCT else 24, 1, 1]
        mine.append(kernel(name, self.now[rank], dur, correlation=number, grid=blocks, block=[384, 1, 1], **args))
        self.now[rank] += dur + PAUSE_US

    def together(self, kind: str, name: str, dur: float, operations: dict[int, str] | None = None) -> None:
        """One collective of each group of a kind: all leave ``dur`` after the last has come."""
        for group in self.groups[kind]:
            members = [rank for rank in group if operations is None or rank in operations]
            if len(members) < 2:
                continue
            for rank in members:
                self.now[rank] += NCCL_LEAD_US if self.graph and "nccl" in name else 0.0
            end = max(self.now[rank] for rank in members) + dur
            self.truth.append((frozenset(members), end))
            for rank in members:
                args: dict[str, Any] = {
                    "Collective name": (operations or {}).get(rank, "allreduce"),
                    "Group size": len(group),
                }
                args |= {"Process Group Name": f"{kind}{group[0]}", "dtype": "BFloat16", "In msg nelems": 4096}
                args |= {"Process Group Ranks": str(group)} if self.told == "arguments" else {}
                says = self.told in ("arguments", "names") and "nccl" in name
                self.run(rank, name, end - self.now[rank], **(args if says else {}))

    def write(self, folder: Path) -> None:
        for rank, events in self.events.items():
            info = {"backend": "nccl", "rank": rank, "world_size": len(self.now)}
            if self.told != "nothing":
                mine = [(f"{kind}{g[0]}", g) for kind, groups in self.groups.items() for g in groups if rank in g]
                config = [{"pg_name": name, "pg_size": len(group), "ranks": group} for name, group in mine]
                # PyTorch leaves the ranks of the default group out.
                info["pg_config"] = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": []}, *config]
            write(folder / f"rank{rank}.json", events, distributedInfo=info, baseTimeNanoseconds=BASE_NS)

    def found(self, folder: Path) -> list[tuple[set[int], float]]:
        """Ranks and end of each collective that is read."""
        capture = read_trace(folder)
        number = match_collectives(capture, classify(capture))
        rows = [(number == one).nonzero()[0] for one in range(number.max() + 1)]
        shift_ns = capture.origin_ns - BASE_NS
        return [
            (set(capture.work.rank[r].tolist()), float(capture.work.end_ns[r].max() + shift_ns) / 1e3) for r in rows
        ]

    def check(self, folder: Path) -> None:
        """Every collective is found; what is read as one ended at once; the replay is the file's."""
        self.write(folder)
        found = self.found(folder)
        for group, end in self.truth:
            assert any(group <= ranks and abs(end - ended) < 1.0 for ranks, ended in found)
        for ranks, ended in found:
            at_once = [group for group, end in self.truth if abs(end - ended) < 1.0]
            assert set().union(*at_once) >= ranks
        result = replay_trace([folder])
        for measured, again in zip(result.measured, result.unchanged.ranks, strict=True):
            assert again.span_us == pytest.approx(measured.span_us, rel=0.002)


def layouts(told: str, graph: bool, late: float, name: str, dp: str = NCCL) -> Ranks:
    """Two replicas of two ranks: four products and all-reduces of a replica, then one across replicas, six times."""
    now = {rank: FIRST_US + (late + 2 if rank == 3 else late if rank == 2 else 3.0 * rank) for rank in range(4)}
    run = Ranks(told, graph, now, {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]})
    for step in range(6):
        for part in range(4):
            for rank in range(4):
                run.run(rank, PRODUCT, 100.0 + 7 * ((5 * step + 3 * part + 11 * rank) % 4))
            run.together("tp", name, 30.0)
        run.together("dp", dp, 80.0)
    return run


@pytest.mark.parametrize("name", [NCCL, CUSTOM])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("told", TELLS)
@pytest.mark.parametrize("late", [0.0, 40.0, 400.0])
def test_groups_of_tensor_and_data_parallel_ranks(
    tmp_path: Path, late: float, told: str, graph: bool, name: str
) -> None:
    layouts(told, graph, late, name).check(tmp_path)


def test_replicas_that_never_meet_are_not_joined_by_equal_names(tmp_path: Path) -> None:
    run = layouts("pg_config", True, 400.0, CUSTOM)
    run.write(tmp_path)
    inside = {frozenset(ranks) for ranks, _ in run.found(tmp_path) if len(ranks) == 2}
    assert frozenset({0, 3}) not in inside
    assert frozenset({0, 1}) in inside


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("told", TELLS)
def test_a_send_and_its_receive_are_one_over_four_stages(tmp_path: Path, told: str, tp: int) -> None:
    """Products and their all-reduce on each stage, six microbatches; a jitter tells pairs of equal stages apart."""
    stages = [[stage * tp + one for one in range(tp)] for stage in range(4)]
    lines = [list(line) for line in zip(*stages, strict=True)]
    now = {rank: FIRST_US for stage in stages for rank in stage}
    run = Ranks(told, False, now, {"tp": [s for s in stages if tp > 1], "pp": lines})
    for step in range(9):
        for stage in reversed(range(4)):
            if not 0 <= step - stage < 6:
                continue
            for rank in stages[stage]:
                run.run(rank, PRODUCT, 200.0 + (13 * step + 5 * stage) % 17)
            if tp > 1:
                first, rest = stages[stage], run.groups["tp"]
                run.groups["tp"] = [first]
                run.together("tp", NCCL, 30.0)
                run.groups["tp"] = rest
            if stage < 3:
                for number, line in enumerate(lines):
                    before, after = list(pairwise(line))[stage]
                    run.groups["pp"] = [line]
                    run.together("pp", SENDRECV, 40.0 + 3 * number, {before: "send", after: "recv"})
                run.groups["pp"] = lines
    run.check(tmp_path)
    size = {len(ranks) for ranks, _ in run.found(tmp_path)}
    assert size == {2}


def test_communication_twice_as_fast_shortens_what_the_last_rank_makes_others_wait_for(tmp_path: Path) -> None:
    """Only the time once all are there halves: 24 all-reduces of 30 us and 6 of 80."""
    run = layouts("pg_config", False, 40.0, NCCL)
    run.write(tmp_path)
    result = replay_trace([tmp_path], Changes(faster={"communication": 2.0}))
    whole = [b.span_us - c.span_us for b, c in zip(result.unchanged.ranks, result.simulated.ranks, strict=True)]
    assert whole == pytest.approx([24 * 15 + 6 * 40] * 4, rel=0.01)
