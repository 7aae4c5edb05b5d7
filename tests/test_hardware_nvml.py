"""Detecting and metering GPUs, against a stand-in for NVML."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from hardware import nvml
from hardware.calibrate.suite import meter as suite_meter
from hardware.catalog import list_gpus
from hardware.errors import HardwareError
from hardware.nvml import CATALOG_IDS, EnergyMeter, detect
from tests.fake_nvml import FakeClock, FakeNvml


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    clock = FakeClock()
    module = FakeNvml(clock=clock, names=["NVIDIA H100 80GB HBM3", b"NVIDIA GH200 480GB"])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(suite_meter, "time", clock)
    monkeypatch.setattr(nvml, "time", clock)
    yield module


def test_boards_map_to_the_catalog_or_to_nothing(fake: FakeNvml) -> None:
    h100, gh200 = detect()
    assert (h100.index, h100.uuid, h100.gpu_id) == (0, "GPU-0", "h100-sxm-80gb")
    assert (h100.power_limit_w, h100.max_sm_clock_hz, h100.sm_clock_hz) == (700.0, 1.98e9, 1.755e9)
    assert h100.memory_bytes == 85_520_809_984
    assert (gh200.name, gh200.gpu_id) == ("NVIDIA GH200 480GB", None)
    assert fake.opened == 0


def test_every_named_board_is_in_the_catalog() -> None:
    assert set(CATALOG_IDS.values()) == set(list_gpus()) - {"mi300x-192gb"}  # AMD boards do not speak NVML


def test_energy_is_the_slope_of_the_counter_times_the_window(fake: FakeNvml) -> None:
    with EnergyMeter() as meter:
        fake.clock.run_for(2.0)
    assert meter.gpus == (0, 1)
    one, two = meter.reading(0), meter.reading(1)
    # Ticks are seen within a poll of 2 ms, at both ends of at least 1.8 s.
    assert one.power_w == pytest.approx(400.0, rel=0.01) and two.power_w == pytest.approx(800.0, rel=0.01)
    assert one.duration_s >= 2.0
    assert one.energy_j == pytest.approx(one.power_w * one.duration_s)
    assert one.sm_clock_hz == 1.755e9


def test_a_window_without_two_ticks_is_refused(fake: FakeNvml) -> None:
    fake.tick_s = 50.0
    with EnergyMeter(gpus=[0]) as meter:
        fake.clock.run_for(0.05)
    with pytest.raises(HardwareError, match=r"GPU 0: \d\.\d+ s hold fewer than two moves .*: meter at least 0\.3 s"):
        meter.reading(0)


def test_what_cannot_be_read_is_one_line(fake: FakeNvml) -> None:
    with EnergyMeter(gpus=[0]) as meter, pytest.raises(HardwareError, match="the meter still runs"):
        meter.reading(0)
    with pytest.raises(HardwareError, match="GPU 1 was not metered: metered are 0"):
        meter.reading(1)
    with pytest.raises(HardwareError, match="NVML cannot meter GPU 7: Invalid Argument"), EnergyMeter(gpus=[7]):
        pass
    fake.names = []
    with pytest.raises(HardwareError, match="no GPU to meter"), EnergyMeter():
        pass
    fake.broken = "Driver Not Loaded"
    with pytest.raises(HardwareError, match="NVML cannot list GPUs: Driver Not Loaded; is an NVIDIA driver loaded"):
        detect()


def test_without_the_module_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(HardwareError, match="no module 'pynvml': install nvidia-ml-py"):
        detect()
