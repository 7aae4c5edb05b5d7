"""The measuring suite without a GPU: plans, resuming, routing, settling, and a dry run where torch exists."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hardware.calibrate.suite import cases_pair, run, timing
from hardware.calibrate.suite.cases_pair import collective_of
from hardware.calibrate.suite.comm import QuietComm, part_bytes
from hardware.calibrate.suite.duty import work_row
from hardware.calibrate.suite.meter import DryMeter, HostFacts, Tick, slope_w
from hardware.calibrate.suite.plan import done_already, estimated_s, least_world, planned
from hardware.calibrate.suite.plans import PLANS
from hardware.calibrate.suite.routing import route
from hardware.calibrate.suite.worker import append, block_counts, gpu_id_of
from hardware.errors import HardwareError

MEASURED = {"latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "period_s", "iter_s", "clock_mhz"}
MEASURED |= {"a_alone_s", "b_alone_s", "a_together_s", "b_together_s", "log", "marks", "columns"}
COUNTED = {
    "rows",
    "distinct",
    "max_rows",
    "tiles128",
    "tiles64",
    "tiles256",
    "n_per_burst",
    "bursts",
    "tokens_per_ep_rank",
}
HOST_FACTS = {"name", "limit_w", "max_sm", "max_mem", "driver", "torch", "nccl"}
# What planned rows say beyond the fields of earlier records of their kind.
MORE = {
    "gemm": {"values"},
    "grouped_gemm": {"resident"},
    "small_kernels": {"m"},
    "in_context": {"ctas"},
    "collective": {"launch"},
    "duty": {"kernel"},
    "transient": {"model", "layers", "prefill_batch", "decode_batch", "seq_len"},
    "alone": {"batch", "seq_len", "q_heads", "kv_heads", "head_dim", "causal"},
    "together": {"batch", "seq_len", "q_heads", "kv_heads", "head_dim", "causal"},
    "model_step": {"launch", "cp", "ulysses", "pp", "micro_batches"},
}
SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[1].parent / "shared")) / "measurements"


@pytest.mark.parametrize(
    ("name", "world", "most_s"),
    [("calibrate", 1, 360), ("gaps", 1, 420), ("validate1", 1, 150), ("pair", 2, 400), ("validate2", 2, 240)],
)
def test_plans_fit_their_time(name: str, world: int, most_s: float) -> None:
    assert sum(map(estimated_s, planned(name, world=world))) < most_s


@pytest.mark.parametrize("name", PLANS)
def test_planned_rows_are_distinct_and_survive_json(name: str) -> None:
    rows = planned(name, world=max(2, least_world(name)))
    assert json.loads(json.dumps(rows)) == rows
    for i, row in enumerate(rows):
        assert not done_already(row, rows[:i])


def test_a_misspelled_plan_names_the_nearest() -> None:
    with pytest.raises(HardwareError, match="unknown plan 'calibrat': did you mean 'calibrate'"):
        planned("calibrat")
    with pytest.raises(HardwareError, match="needs at least 2 GPUs"):
        planned("pair", world=1)


@pytest.mark.parametrize("name", PLANS)
def test_rows_have_the_fields_of_earlier_records(name: str) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"no measurements at {SHARED}")
    fields: dict[str, list[set[str]]] = {}
    for path in SHARED.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            counted = COUNTED if record["kind"] in ("grouped_gemm", "duty", "model_step") else set()
            inputs = set(record) - MEASURED - counted - HOST_FACTS - {"gpu"}
            if inputs not in fields.setdefault(record["kind"], []):
                fields[record["kind"]].append(inputs)
    for row in planned(name, world=max(2, least_world(name))):
        if row["kind"] in fields:
            mine = set(row) - MORE.get(row["kind"], set())
            known = [one - MORE.get(row["kind"], set()) for one in fields[row["kind"]]]
            # A contention row names the sizes of its own neighbour only.
            beside = row["kind"] in ("together", "alone")
            assert mine in known or (beside and any(mine <= one for one in known)), row


def test_resume_skips_what_a_file_holds_and_cuts_a_half_written_line(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    rows = planned("validate1")
    append(out, {"gpu": "x", **rows[2], "latency_s": 0.1, "power_w": [math.nan]})
    with out.open("a") as file:
        file.write('{"kind": "model_step", "lat')
    records = run.load(out)
    assert records == [{"gpu": "x", **rows[2], "latency_s": 0.1, "power_w": [None]}]
    assert out.read_text().endswith("}\n")
    assert run.pending(rows, records) == [row for row in rows if row != rows[2]]


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    out.write_text('{"kind": "idle"}\n{oops}\n')
    with pytest.raises(HardwareError, match="line 2: not valid JSON"):
        run.load(out)


def test_only_refuses_a_kind_the_plan_lacks() -> None:
    with pytest.raises(HardwareError, match="--only gem: the plan has"):
        run.pending(planned("gaps"), [], ["gem"])
    assert {row["kind"] for row in run.pending(planned("gaps"), [], ["duty", "idle"])} == {"duty", "idle"}


def test_routing_counts_by_hand() -> None:
    everyone = route(tokens=130, experts=4, top_k=4, skew=0.0)
    assert everyone.facts() == {
        "rows": 520,
        "distinct": 4,
        "max_rows": 130,
        "tiles128": 8,
        "tiles64": 12,
        "tiles256": 4,
    }
    slice_ = [route(tokens=64, experts=8, top_k=2, skew=0.8, first=f, count=4, seed=3) for f in (0, 4)]
    assert sum(part.rows for part in slice_) == 128
    assert route(tokens=2000, experts=128, top_k=8, skew=1.2).facts()["max_rows"] > 2 * 125
    assert list(everyone.token[:130]) == list(range(130))
    with pytest.raises(HardwareError, match="top_k = 9"):
        route(tokens=1, experts=8, top_k=9, skew=0.0)


def test_power_is_the_slope_between_ticks() -> None:
    ticks = [Tick(at_s=0.1 * n + 0.03, energy_j=70.0 * n) for n in range(20)]
    assert slope_w(ticks, 0.5, 1.2) == pytest.approx(700.0)
    assert slope_w(ticks, 0.5, 0.6) is None


def test_names() -> None:
    assert collective_of("sr16") == ("sendrecv_ring", 16)
    with pytest.raises(HardwareError, match="contention name 'xx4'"):
        collective_of("xx4")
    assert gpu_id_of("NVIDIA H200") == "h200-sxm-141gb"
    assert gpu_id_of("NVIDIA RTX 6000 Ada Generation") == "rtx-6000-ada-generation"
    assert part_bytes("reduce_scatter", 1024, 2) == 512
    with pytest.raises(HardwareError, match="unknown collective"):
        part_bytes("gossip", 1024, 2)
    assert block_counts(planned("pair", world=2)) == [None, 2, 4, 8, 16, 32]
    kernel = {"kind": "grouped_gemm", "tokens": 8}
    assert work_row({"kind": "duty", "work": "grouped_gate_up_128x8", "kernel": kernel}) == kernel


class FakeGpu:
    """A GPU with its own time: work takes what it takes, and waiting for it moves the clock."""

    def __init__(self, *, replay_s: float, watts: float) -> None:
        self.replay_s, self.watts = replay_s, watts
        self.queued_s = self.now_s = 0.0
        self.idle_s = 0.0
        self.cuda = self

    def replay(self) -> None:
        if self.queued_s < self.now_s:
            self.idle_s += self.now_s - self.queued_s
            self.queued_s = self.now_s
        self.queued_s += self.replay_s

    def synchronize(self) -> None:
        self.now_s = max(self.now_s, self.queued_s)

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.at_s = gpu, math.nan

    def record(self) -> None:
        self.at_s = max(self._gpu.queued_s, self._gpu.now_s)

    def synchronize(self) -> None:
        self._gpu.now_s = max(self._gpu.now_s, self.at_s)

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


class FakeMeter(DryMeter):
    """The fake GPU's energy counter, moving every 100 ms; remembers the windows asked about."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.facts = HostFacts(name="fake", limit_w=700.0, max_sm_mhz=1980, max_memory_mhz=2619, driver="0")
        self._gpu = gpu
        self.windows: list[tuple[float, float]] = []

    def power_w(self, start_s: float, end_s: float) -> float | None:
        self.windows.append((start_s, end_s))
        ticks = [Tick(at_s=0.1 * n, energy_j=0.1 * n * self._gpu.watts) for n in range(200)]
        return slope_w(ticks, start_s, end_s)


@pytest.mark.parametrize(
    ("replay_s", "watts", "settled_s"),
    [(0.004, 400.0, 0.45), (0.004, 690.0, 2.0), (0.7, 690.0, 2.0), (6e-4, 500, 0.45)],
)
def test_work_settles_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, replay_s: float, watts: float, settled_s: float
) -> None:
    gpu = FakeGpu(replay_s=replay_s, watts=watts)
    meter = FakeMeter(gpu)
    monkeypatch.setattr("time.monotonic", lambda: gpu.now_s)
    kernels: Any = None
    bench = timing.Bench(
        torch=gpu,
        device="cuda:0",
        kernels=kernels,
        meter=meter,
        comm=QuietComm(),
        gpu_id="fake",
        dry=False,
        pool=None,
    )
    replay: Callable[[], None] = gpu.replay
    seen = timing.steady(bench, replay, 10)
    assert seen.latency_s == pytest.approx(replay_s / 10)
    assert seen.power_w == pytest.approx(watts)
    start_s, end_s = meter.windows[-1]
    chunk_s = max(replay_s, 0.05)
    begun_s = meter.windows[0][0] - 0.1
    assert settled_s - 1e-9 <= start_s - begun_s <= settled_s + 1.05 * chunk_s
    assert timing.WINDOW_S - 1e-9 <= end_s - start_s <= timing.WINDOW_S + 1.05 * chunk_s
    assert gpu.idle_s == 0.0


class FakeStream:
    def __init__(self) -> None:
        self.free_s = 0.0

    def wait_stream(self, other: FakeStream) -> None:
        self.free_s = max(self.free_s, other.free_s)


class FakeTorch:
    """Streams that run side by side; only sleeping and synchronizing move the host's time."""

    int64 = "int64"

    def __init__(self) -> None:
        self.now_s = 0.0
        self.main = self.current = FakeStream()
        self.streams = [self.main]
        self.cuda = self

    def run(self, seconds: float) -> None:
        self.current.free_s = max(self.current.free_s, self.now_s) + seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self) -> None:
        self.now_s = max([self.now_s, *(stream.free_s for stream in self.streams)])

    def Event(self, *, enable_timing: bool) -> FakeTorchEvent:  # noqa: N802
        assert enable_timing
        return FakeTorchEvent(self)

    def zeros(self, *shape: int, **_: object) -> Any:
        return FakeRecord(shape)


class FakeTorchEvent:
    def __init__(self, torch: FakeTorch) -> None:
        self._torch, self.at_s = torch, math.inf

    def record(self) -> None:
        self.at_s = max(self._torch.current.free_s, self._torch.now_s)

    def query(self) -> bool:
        return self.at_s <= self._torch.now_s

    def elapsed_time(self, later: FakeTorchEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


class FakeRecord:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, "int64"

    def __getitem__(self, _: int) -> FakeRecord:
        return self

    def copy_(self, _: object) -> None:
        pass

    def cpu(self) -> FakeRecord:
        return self


@pytest.mark.parametrize(("a_s", "b_s"), [(0.002, 0.006), (0.003, 0.002), (0.0105, 0.002)])
def test_lanes_do_not_hold_each_other_back(monkeypatch: pytest.MonkeyPatch, a_s: float, b_s: float) -> None:
    """A lane twice as slow as its first guess must not slow the other one: each shows its own time."""
    torch = FakeTorch()
    monkeypatch.setattr("time.monotonic", lambda: torch.now_s)
    monkeypatch.setattr("time.sleep", torch.sleep)
    monkeypatch.setattr(cases_pair, "stamps_between", lambda *_: [(a_s, 1500.0)])
    kernels: Any = None
    bench = timing.Bench(
        torch=torch,
        device="cuda:0",
        kernels=kernels,
        meter=DryMeter(),
        comm=QuietComm(),
        gpu_id="fake",
        dry=False,
        pool=None,
    )
    slots = FakeRecord((2, 4, 2))
    lanes = [
        cases_pair.Lane(stream=FakeStream(), replay=partial(torch.run, t), count=2, each_s=0.001, slots=slots)
        for t in (a_s, b_s)
    ]
    torch.streams += [lane.stream for lane in lanes]
    seen = cases_pair._race(bench, lanes[0], lanes[1], seconds=0.5)
    assert seen.a_s == pytest.approx(a_s / 2, rel=0.02)
    assert seen.b_s == pytest.approx(b_s / 2, rel=0.02)
    assert len(lanes[1].ends) == 250
    assert seen.clock_mhz == 1500.0


def test_measuring_without_torch_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed here")
    assert run.main(["--plan", "smoke", "--out", str(tmp_path / "a.jsonl")]) == 2
    assert "measuring needs PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "world"), [("smoke", 1), ("smoke", 2)])
def test_a_dry_run_checks_every_row_and_resumes(tmp_path: Path, name: str, world: int) -> None:
    if not importlib.util.find_spec("torch"):
        pytest.skip("no torch: a dry run checks shapes with it")
    out = tmp_path / "dry.jsonl"
    gained = run.run_plan(name, out, world=world, dry_run=True)
    assert gained == len(planned(name, world=world))
    assert all(record["dry_run"] for record in run.load(out))
    assert run.run_plan(name, out, world=world, dry_run=True) == 0
