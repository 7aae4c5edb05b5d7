"""What-ifs of kernels whose work nobody knows have a range, and boards that the catalog lacks a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.replay.boards import gpu_id_of, unknown_board
from sim.replay.changes import Changes, ReplayError
from sim.replay.report import as_document, notes_of
from sim.replay.study import Replayed, replay_trace
from tests.traces_kit import kernel, write
from traces.read.load import read_trace

H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3", "numSms": 132}]}


def moved(folder: Path, name: str, gpu: str) -> Replayed:
    """Ten kernels of 1 ms each on an H100, taken to another GPU."""
    events = [kernel(name, 1000.0 * number, 1000.0, grid=[132, 1, 1], block=[384, 1, 1]) for number in range(10)]
    return replay_trace([write(folder / "t.json", events, **H100)], Changes(gpu=gpu))


@pytest.mark.parametrize("name", ["fused_moe_kernel", "my_secret_sauce", "chunk_gated_delta_rule_fwd_kernel_h"])
def test_a_kernel_of_unknown_work_has_a_range(tmp_path: Path, name: str) -> None:
    """An H200 has the H100's SMs and 1.43 times its bandwidth: between as long and 1/1.43 of it, the middle 1/1.2.

    A grouped product of a mixture of experts took 1/1.18 there as measured.
    """
    result = moved(tmp_path, name, "h200-sxm-141gb")
    low_us, high_us = result.span_range_us or (0.0, 0.0)
    before_us, middle_us = result.unchanged.ranks[0].span_us, result.simulated.ranks[0].span_us
    assert before_us / low_us == pytest.approx(1.43, abs=0.03)
    assert before_us / high_us == pytest.approx(1.0, abs=0.03)
    assert before_us / middle_us == pytest.approx((1.43 * 1.0) ** 0.5, abs=0.03)
    document = as_document(result)
    assert document["simulated_span_range_us"] == [low_us, high_us]
    assert document["kernels_of_unknown_work"] == 10
    assert notes_of(result)[:1] == [
        "10 kernels are of unknown work (grouped products without sizes, or no known class): span "
        f"{low_us:,.1f} to {high_us:,.1f} us, as memory or compute bounds them; the middle is shown"
    ]


@pytest.mark.parametrize("name", ["nvjet_tst_128x256", "flash_fwd_kernel", "rms_norm_kernel"])
def test_a_kernel_of_a_known_class_has_none(tmp_path: Path, name: str) -> None:
    document = as_document(moved(tmp_path, name, "h200-sxm-141gb"))
    assert document["simulated_span_range_us"] is None
    assert document["kernels_of_unknown_work"] == 0


def test_nothing_changed_by_law_has_no_range(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("my_secret_sauce", 0.0, 1000.0)], **H100)
    document = as_document(replay_trace([path], Changes(faster={"other": 2.0})))
    assert document["simulated_span_range_us"] is None


@pytest.mark.parametrize(
    ("board", "gpu"),
    [
        ("AMD Instinct MI300X VF", "mi300x-192gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM-80GB", "a100-sxm-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-32gb"),
        ("NVIDIA H100 80GB HBM2e", "h100-pcie-80gb"),
        ("NVIDIA  H200", "h200-sxm-141gb"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA H20", "h20-sxm-96gb"),
        ("NVIDIA GB200", "gb200-nvl-186gb"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100-sxm-80gb:3g.40gb"),
    ],
)
def test_boards_are_known_as_clouds_report_them(tmp_path: Path, board: str, gpu: str) -> None:
    capture = read_trace(write(tmp_path / "t.json", [kernel("gemm", 0.0, 5.0)], deviceProperties=[{"name": board}]))
    assert (gpu_id_of(capture), unknown_board(capture)) == (gpu, None)


@pytest.mark.parametrize(
    ("board", "why"),
    [
        (
            "NVIDIA A800-SXM4-80GB",
            "GPU 'NVIDIA A800-SXM4-80GB': an A100 with slower NVLink (400 GB/s): its kernels are those of the A100, "
            "its collectives not: --trace-gpu a100-sxm-80gb comes nearest",
        ),
        (
            "NVIDIA H200 NVL",
            "GPU 'NVIDIA H200 NVL': the PCIe board: the catalog has the SXM one: --trace-gpu h200-sxm-141gb comes "
            "nearest",
        ),
        (
            "NVIDIA H20-3e",
            "GPU 'NVIDIA H20-3e': with more and quicker HBM than the H20 of the catalog: --trace-gpu h20-sxm-96gb "
            "comes nearest",
        ),
        (
            "NVIDIA A30 MIG 1g.6gb",
            "GPU 'NVIDIA A30 MIG 1g.6gb': a slice of a GPU, whose SMs and bandwidth are not known: "
            "no energies, no what-ifs by law",
        ),
        (
            "NVIDIA Nonesuch 9",
            "GPU 'NVIDIA Nonesuch 9': not in the catalog (wattline gpus): name the nearest with --trace-gpu",
        ),
    ],
)
def test_other_boards_are_said_to_be_unknown_and_why(tmp_path: Path, board: str, why: str) -> None:
    path = write(tmp_path / "t.json", [kernel("gemm", 0.0, 5.0)], deviceProperties=[{"name": board}])
    assert notes_of(replay_trace([path])) == [why]
    with pytest.raises(ReplayError) as error:
        replay_trace([path], Changes(sm_clock_mhz=1000))
    assert str(error.value) == f"trace_gpu is missing: {why}"
