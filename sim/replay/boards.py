"""Which GPU a trace is of, by the name that its driver or cloud gave the board; or why nobody's laws are of it."""

from __future__ import annotations

import re
from functools import cache

from hardware.catalog import list_gpus
from hardware.mig import mig_profiles
from hardware.nvml import CATALOG_IDS
from traces.capture import Capture

MAKER = re.compile(r"^(?:NVIDIA|AMD|Tesla|Instinct|GeForce|GRID)\s+", re.IGNORECASE)
VIRTUAL = re.compile(r"\s+VF$", re.IGNORECASE)  # a whole GPU, passed through to a virtual machine
# Boards in traces that NVML spells otherwise, or that differ from a catalog entry in the size of memory alone.
OTHERS = {
    "MI300X": "mi300x-192gb",
    "MI300X OAM": "mi300x-192gb",
    "A100-PG509-200": "a100-sxm-40gb",
    "A100-SXM-80GB": "a100-sxm-80gb",
    "H100 80GB HBM2E": "h100-pcie-80gb",
    "H100 SXM5 80GB": "h100-sxm-80gb",
    "H800": "h800-sxm-80gb",
    "H20": "h20-sxm-96gb",
    "B300": "b300-sxm-288gb",
    "B300 SXM6 AC": "b300-sxm-288gb",
    "GB200": "gb200-nvl-186gb",
    "V100-SXM2-16GB": "v100-sxm2-32gb",
}
# Boards that clouds have and the catalog has not: how they differ, and whose laws come nearest.
UNLIKE = (
    (r"\bMIG\b", "a slice of a GPU, whose SMs and bandwidth are not known", None),
    (r"^H800\b", "the PCIe board: the catalog has the SXM one", "h100-pcie-80gb"),
    (r"^H20\b", "with more and quicker HBM than the H20 of the catalog", "h20-sxm-96gb"),
    (r"^H200 NVL\b", "the PCIe board: the catalog has the SXM one", "h200-sxm-141gb"),
    (r"^A800\b", "an A100 with slower NVLink (400 GB/s): its kernels are those of the A100, its collectives not",
     "a100-sxm-80gb"),
    (r"^GH200\b", "an H100 under the power limit of its module, which its CPU shares", "h100-sxm-80gb"),
    (r"^H100$", "SXM, PCIe or NVL: the name does not say which", "h100-sxm-80gb"),
    (r"^A100$", "SXM or PCIe, 40 or 80 GB: the name does not say which", "a100-sxm-80gb"),
    (r"^MI3(?:00A|08X|25X|5\dX)\b", "no energies of it are published that would fit a profile", "mi300x-192gb"),
)  # fmt: skip


@cache
def _known() -> dict[str, str]:
    return {_plain(name): gpu for name, gpu in CATALOG_IDS.items()} | OTHERS


def _plain(name: str) -> str:
    """A board's name without its maker, and without what a virtual machine adds.

    >>> [_plain(name) for name in ("AMD Instinct MI300X VF", "Tesla V100-SXM2-32GB", "A100-SXM4-80GB")]
    ['MI300X', 'V100-SXM2-32GB', 'A100-SXM4-80GB']
    """
    text = " ".join(name.split())
    while (shorter := MAKER.sub("", text)) != text:
        text = shorter
    return VIRTUAL.sub("", text).upper()


def board_of(capture: Capture) -> str | None:
    """The name of the first GPU that the trace names; None if it names none."""
    for known in capture.metadata.values():
        for device in known.get("deviceProperties") or []:
            name = device.get("name") if isinstance(device, dict) else None
            if isinstance(name, str) and name.strip():
                return name.strip()
    return None


def gpu_id_of(capture: Capture) -> str | None:
    """The catalog's id of the GPU that the trace is of; None if it names none that the catalog holds."""
    for known in capture.metadata.values():
        own = known.get("wattline")  # a simulated run
        if isinstance(own, dict) and (found := _in_catalog(str(own.get("gpu")))):
            return found
    board, _, profile = _plain(board_of(capture) or "").partition(" MIG ")
    gpu = _known().get(board)
    return _in_catalog(f"{gpu}:{profile.lower()}") if profile else gpu


def _in_catalog(gpu: str) -> str | None:
    """``gpu`` where that is the id of a GPU or of a MIG slice of one."""
    card, _, profile = gpu.partition(":")
    known = profile in mig_profiles().get(card, ()) if profile else card in list_gpus()
    return gpu if known else None


def unknown_board(capture: Capture) -> str | None:
    """Why no laws are those of the GPU that the trace names, and which to name instead; None where it is known."""
    if gpu_id_of(capture) is not None:
        return None
    board = board_of(capture)
    if board is None:
        return None
    for pattern, why, nearest in UNLIKE:
        if re.search(pattern, _plain(board)) is not None:
            instead = f": --trace-gpu {nearest} comes nearest" if nearest else ": no energies, no what-ifs by law"
            return f"GPU '{board}': {why}{instead}"
    return f"GPU '{board}': not in the catalog (wattline gpus): name the nearest with --trace-gpu"
