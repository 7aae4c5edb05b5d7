"""Striped over contiguous ring attention, against the published speed-ups of arXiv 2311.09431.

Both layouts of a Llama-like model run through the engine, a layer at a time, at datasheet rates: products at the
peak, attention by whole tiles (twice the time where it is TF32 beside bf16 products), blocks of keys and values over
the chip's links beside it. A backward pass doubles all of it and changes no ratio; the degree of model parallelism
divides work and bytes alike and changes none either. One constant is fitted: the share of a tile's time that a skipped
one still takes (its loop and its branch).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from scipy.optimize import minimize_scalar

from hardware.catalog import load_figures
from hardware.laws.terms import KernelTerms
from sim.build.lower import lower
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass
from sim.engine.running import GpuModel
from sim.errors import SimError
from workloads.catalog import load_model
from workloads.families.ring import Ring, RingLayout, ring_kernels, tile_scores
from workloads.program import Kernel, Phase, Program, RankProgram, Segment, in_turn
from workloads.work import AttentionWork, CollectiveWork, GemmWork

FREE_S = 1e-12  # the engine's grain: a transfer that costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A chip of the paper: catalog id, tile of (queries, keys), time of a score over that at the product's rate."""

    figures: str
    tile: tuple[int, int]
    score_cost: float


# arXiv 2311.09431: models of its experiments; tiles, and attention in TF32 beside bf16 on the A100.
MODELS = {"1B": "llama-1b", "3B": "llama-3b", "7B": "llama-7b"}
DEVICES = {
    "A100-SXM-80GB": Device(figures="a100-sxm-80gb", tile=(2048, 4096), score_cost=2.0),
    "TPUv3": Device(figures="tpu-v3-32gb", tile=(2048, 2048), score_cost=1.0),
    "TPUv4": Device(figures="tpu-v4-32gb", tile=(2048, 2048), score_cost=1.0),
}
# The two rows that the constant is fitted on: device, model, ring, tokens.
FITTED_ON = (("A100-SXM-80GB", "1B", 4, 65_536), ("A100-SXM-80GB", "1B", 4, 262_144))


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row of the paper's tables; ``bound`` is its theoretical maximum, where the file has it."""

    device: str
    model: str
    ring: int
    seq_len: int
    speedup: float
    bound: float | None = None

    @property
    def fitted(self) -> bool:
        """True for the rows that the constant is fitted on."""
        return (self.device, self.model, self.ring, self.seq_len) in FITTED_ON


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published speed-up beside ours: skipped tiles free, and at the fitted cost."""

    row: Published
    free: float
    fitted: float


def read_published(path: Path) -> list[Published]:
    """Rows of a CSV file: device, model, ring_devices, seq_len, measured_speedup, perhaps theoretical_max_speedup."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SimError(f"cannot read '{path}': {getattr(error, 'strerror', None) or error}") from None
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(table, start=2)]


def _row(line: dict[str, str | None], where: str) -> Published:
    for name, known in (("device", DEVICES), ("model", MODELS)):
        if line.get(name) not in known:
            raise SimError(f"{where}: {name} = {line.get(name)!r}: known are {', '.join(known)}")
    try:
        row = Published(
            device=str(line["device"]),
            model=str(line["model"]),
            ring=int(line["ring_devices"] or ""),
            seq_len=int(line["seq_len"] or ""),
            speedup=float(line["measured_speedup"] or ""),
            bound=float(cell) if (cell := line.get("theoretical_max_speedup")) else None,
        )
    except (KeyError, ValueError) as error:
        raise SimError(f"{where}: {error}: give ring_devices, seq_len and measured_speedup as numbers") from None
    if row.ring < 2 or row.seq_len < row.ring or row.seq_len % row.ring or not 0.0 < row.speedup < math.inf:
        raise SimError(f"{where}: {row.seq_len} tokens on a ring of {row.ring}: give a ring that divides the tokens")
    return row


def compare(rows: Sequence[Published]) -> tuple[float, list[Compared]]:
    """The fitted cost of a skipped tile, and every row beside its prediction."""
    known = [row for row in rows if row.fitted]
    if len(known) != len(FITTED_ON):
        raise SimError(f"the rows {FITTED_ON}, on which the constant is fitted, are not all there")

    def off(cost: float) -> float:
        return sum((speedup(row, skipped_cost=cost) / row.speedup - 1.0) ** 2 for row in known)

    cost = float(minimize_scalar(off, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-4}).x)
    return cost, [
        Compared(row=row, free=speedup(row, skipped_cost=0.0), fitted=speedup(row, skipped_cost=cost)) for row in rows
    ]


def speedup(row: Published, *, skipped_cost: float | None) -> float:
    """Time of a step with contiguous blocks over that with stripes.

    Without a ``skipped_cost`` the paper's theoretical maximum: scores instead of tiles, transfers free.
    """
    contiguous, striped = (step_s(row, layout, skipped_cost=skipped_cost) for layout in ("contiguous", "striped"))
    return contiguous / striped


@lru_cache(maxsize=4096)
def step_s(row: Published, layout: RingLayout, *, skipped_cost: float | None) -> float:
    """Seconds of a forward pass, all layers and the head."""
    device, model = DEVICES[row.device], load_model(MODELS[row.model])
    tokens = row.seq_len // row.ring
    ring = Ring(
        layout=layout, ranks=tuple(range(row.ring)), block=tokens, q_heads=1, kv_heads=1, head_dim=model.d_model
    )  # fmt: skip
    layer = model.d_model * (8 * model.d_model + 4 * model.d_ff)  # two feed-forward matrices are counted, as there
    products = Kernel(
        name="products",
        work=GemmWork(m=tokens, n=model.d_model, k=layer // (2 * model.d_model)),
        flops=float(tokens * layer),
        bytes_moved=0.0,
    )

    def rank(place: int) -> RankProgram:
        kernels = tuple(in_turn((products,), ring_kernels(ring, place, first=(-1,))))
        return RankProgram(phases=(Phase(name="forward", segments=(Segment(name="layer", kernels=kernels),)),))

    layer_s = seconds(Program(ranks=tuple(rank(place) for place in ring.ranks)), prices(device, skipped_cost))
    peak = load_figures(device.figures).tensor_flops_per_s["bf16"]
    return model.layers * layer_s + 2.0 * tokens * model.vocab * model.d_model / peak


def prices(device: Device, skipped_cost: float | None) -> Callable[[Kernel], KernelClass]:
    """What kernels cost at the device's datasheet rates; without a ``skipped_cost`` no tiles and free transfers."""
    chip = load_figures(device.figures)

    def price(kernel: Kernel) -> KernelClass:
        work = kernel.work
        if isinstance(work, CollectiveWork):
            return _class(kernel, FREE_S if skipped_cost is None else work.buffer_bytes / chip.link_bytes_per_s)
        flops = kernel.flops
        if isinstance(work, AttentionWork):
            flops *= device.score_cost
            if skipped_cost is not None:
                met, skipped = tile_scores(work.q_len, work.kv_len, work.causal, device.tile)
                flops = 4.0 * work.q_heads * work.head_dim * device.score_cost * (met + skipped_cost * skipped)
        return _class(kernel, flops / chip.tensor_flops_per_s["bf16"])

    return price


def _class(kernel: Kernel, seconds: float) -> KernelClass:
    collective = isinstance(kernel.work, CollectiveWork)
    terms = KernelTerms(floor_s=seconds, blocks=1, cycles_per_block=0.0, sms_per_block=0.1 if collective else 1.0)
    return KernelClass(name=kernel.name, family="ring", terms=terms, collective=collective)


def seconds(program: Program, price: Callable[[Kernel], KernelClass]) -> float:
    """Seconds until the last rank is done, on chips that run one kernel and its transfers at their own pace."""
    graph = lower(program, price)
    chip = GpuModel(
        sms=2,
        max_clock_hz=1e9,
        min_clock_hz=1e9,
        reference_clock_hz=1e9,
        clock_step_hz=0.0,
        hbm_bytes_per_s=math.inf,
        link_bytes_per_s=math.inf,
        idle_w=lambda _: 0.0,
        voltage_scale=lambda _: 1.0,
    )
    model = FluidModel(chip, graph.classes, [])
    core = Core(graph, [model] * graph.gpus, [math.inf] * graph.gpus)
    return Engine(core).run().end_ps * 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceErrors:
    """Absolute errors of a device's rows, as shares: mean and worst with skipped tiles free, then at their cost."""

    rows: int
    shares: tuple[float, float, float, float]


def errors_by_device(rows: Sequence[Compared]) -> dict[str, DeviceErrors]:
    """Errors of every device; rows that the constant was fitted on are left out."""
    found = {}
    for device in DEVICES:
        mine = [row for row in rows if row.row.device == device and not row.row.fitted]
        if mine:
            free, fitted = (
                [abs(getattr(row, name) / row.row.speedup - 1.0) for row in mine] for name in ("free", "fitted")
            )
            shares = (sum(free) / len(mine), max(free), sum(fitted) / len(mine), max(fitted))
            found[device] = DeviceErrors(rows=len(mine), shares=shares)
    return found
