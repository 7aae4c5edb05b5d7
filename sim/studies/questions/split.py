"""A static split of prefill and decode, each side at its own layout and clock.

``python -m sim.studies.questions.split --out docs/studies/split.md`` writes the page.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hardware.catalog import load_gpu
from hardware.profile import profile_for
from sim.errors import MemoryShortError, SimError
from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.scenario.memory import check_memory
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from sim.serving.cost import Cost
from sim.serving.spec import ServeSpec
from sim.serving.transfers import transfer_cost
from sim.studies.fidelity_tables import table
from sim.studies.prose import prose
from sim.studies.questions.page import ENERGYLENS, command, head

GPUS = ("a100-sxm-80gb", "h100-sxm-80gb")
MODEL = "llama3-70b"
DEGREES = (2, 4, 8)
# Input and output tokens.
REQUESTS = ((1024, 256), (4096, 256), (1024, 1024))
PREFILL_BATCHES = (1, 2, 4, 8)
# Locked clocks as shares of the highest one; 1 leaves the clock free.
CLOCKS = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TTFT_S = 2.0
TPOT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """One phase on one group of GPUs. Energy is of all its GPUs, for one request."""

    tp: int
    clock_mhz: float | None
    batch: int
    latency_s: float
    energy_j: float
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSplit:
    """The most frugal prefill and decode apart, and both on one kind of group: at one clock, and with a free clock."""

    prefill: PhaseCost
    decode: PhaseCost
    transfer: Cost
    together: tuple[PhaseCost, PhaseCost]
    free: tuple[PhaseCost, PhaseCost]

    @property
    def energy_j(self) -> float:
        """Joules a request, the move of its cache included."""
        return self.prefill.energy_j + self.decode.energy_j + self.transfer.energy_j

    @property
    def saving(self) -> float:
        """What the split saves of the energy of one layout and clock for both phases."""
        return 1.0 - self.energy_j / _both_j(self.together)


def _both_j(sides: tuple[PhaseCost, PhaseCost]) -> float:
    return sum(side.energy_j for side in sides)


def largest_batch(gpu: str, tp: int, tokens: int) -> int:
    """The most sequences of ``tokens`` cached tokens that memory holds in decode; 0 where the weights do not fit.

    >>> largest_batch("h100-sxm-80gb", 1, 1024), largest_batch("h100-sxm-80gb", 4, 8192) > 1
    (0, True)
    """
    spec = load_gpu(gpu)

    def fits(batch: int) -> bool:
        try:
            check_memory(resolve_scenario(Scenario.of(**_decode(gpu, tp, batch, tokens))), spec)
        except MemoryShortError:
            return False
        return True

    return _largest(fits)


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest batch that ``holds``, which larger ones do not: doubled, then halved towards; 0 for none."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _decode(gpu: str, tp: int, batch: int, tokens: int, clock_mhz: float | None = None) -> dict[str, Any]:
    common = {"model": MODEL, "gpu": gpu, "tp": tp, "stack": "paged-kv", "sm_clock_mhz": clock_mhz}
    return common | {"phase": "decode", "batch": batch, "seq_len": tokens}


@lru_cache(maxsize=256)
def prefill_side(gpu: str, tp: int, clock_mhz: float | None, tokens_in: int) -> PhaseCost | None:
    """The most frugal prefill batch that meets the time to first token; None where none does."""
    found = []
    for batch in PREFILL_BATCHES:
        try:
            run = simulate(**_decode(gpu, tp, batch, tokens_in, clock_mhz) | {"phase": "prefill"}, shortcuts=True)
        except MemoryShortError:
            break
        if run.latency_s > TTFT_S:
            break
        found.append(_side(tp, clock_mhz, batch, run.latency_s, run.energy_j))
    return min(found, key=lambda side: side.energy_j, default=None)


def _side(tp: int, clock_mhz: float | None, batch: int, latency_s: float, energy_j: float) -> PhaseCost:
    return PhaseCost(
        tp=tp,
        clock_mhz=clock_mhz,
        batch=batch,
        latency_s=latency_s,
        energy_j=energy_j / batch,
        requests_per_s=batch / latency_s,
    )


@lru_cache(maxsize=256)
def decode_side(gpu: str, tp: int, clock_mhz: float | None, tokens_in: int, tokens_out: int) -> PhaseCost | None:
    """Decode at the largest batch that fits and meets the time per token; its latency is that of all steps."""
    room = largest_batch(gpu, tp, tokens_in + tokens_out)

    def step(batch: int) -> Timeline:
        return simulate(**_decode(gpu, tp, batch, tokens_in + tokens_out // 2, clock_mhz), shortcuts=True)

    batch = _largest(lambda b: b <= room and step(b).latency_s <= TPOT_S)
    if not batch:
        return None
    run, steps = step(batch), tokens_out - 1
    return _side(tp, clock_mhz, batch, steps * run.latency_s, steps * run.energy_j)


def clocks(gpu: str) -> Iterator[float | None]:
    """Free, then locked clocks on the card's own steps (MHz)."""
    spec = load_gpu(gpu)
    for share in CLOCKS:
        steps = round(share * spec.max_clock_hz / spec.clock_step_hz)
        yield None if share == 1.0 else steps * spec.clock_step_hz / 1e6


def split(gpu: str, tokens_in: int, tokens_out: int) -> PhaseSplit:
    """The best of every layout and clock, apart and together.

    Raises :class:`SimError` when no layout meets the limits.
    """
    both = [
        (prefill_side(gpu, tp, clock_mhz, tokens_in), decode_side(gpu, tp, clock_mhz, tokens_in, tokens_out))
        for tp, clock_mhz in itertools.product(DEGREES, clocks(gpu))
    ]
    pairs = [(p, d) for p, d in both if p is not None and d is not None]
    if not pairs:
        raise SimError(f"{gpu}, {tokens_in} tokens in: no layout meets {TTFT_S:g} s and {TPOT_S:g} s a token")
    prefill = min((p for p, _ in both if p is not None), key=lambda side: side.energy_j)
    decode = min((d for _, d in both if d is not None), key=lambda side: side.energy_j)
    narrow = min(prefill.tp, decode.tp)  # the narrower group's ranks carry the cache, each its part
    spec = ServeSpec.of(model=MODEL, gpu=gpu, tp=narrow, replicas=1, prefill_replicas=1)
    return PhaseSplit(
        prefill=prefill,
        decode=decode,
        transfer=transfer_cost(spec, tokens_in),
        together=min(pairs, key=_both_j),
        free=min((pair for pair in pairs if pair[0].clock_mhz is None), key=_both_j),
    )


def page(requests: Sequence[tuple[int, int]] = REQUESTS) -> str:
    """The page as Markdown."""
    lines, verdicts = [], []
    for gpu, (tokens_in, tokens_out) in itertools.product(GPUS, requests):
        found = split(gpu, tokens_in, tokens_out)
        room = "/".join(str(largest_batch(gpu, tp, tokens_in + tokens_out)) for tp in DEGREES)
        lines.append(
            (
                gpu.split("-")[0].upper(),
                f"{tokens_in} in, {tokens_out} out",
                _summary(found.prefill),
                _summary(found.decode),
                room,
                f"{found.prefill.energy_j:.1f}",
                f"{found.decode.energy_j:.1f}",
                f"{found.transfer.energy_j:.2f}",
                f"{1e3 * found.transfer.time_s:.2f}",
                f"{found.decode.requests_per_s / found.prefill.requests_per_s:.1f}",
                f"{_both_j(found.together):.1f}",
                f"{_both_j(found.free):.1f}",
                f"{100 * found.saving:.1f}",
            )
        )
        differ = (found.prefill.tp, found.prefill.clock_mhz) != (found.decode.tp, found.decode.clock_mhz)
        verdicts.append(
            f"- `{gpu}`, {tokens_in} in, {tokens_out} out: {'agrees' if differ else 'differs'}: the sides want "
            f"{'different groups' if differ else 'one kind of group'}, which saves {100 * found.saving:.1f} %; one for "
            f"both would be {_summary(found.together[0])} and {found.together[1].batch}."
        )
    names = (
        "GPU", "request", "prefill side", "decode side", f"fits at TP{'/'.join(map(str, DEGREES))}", "prefill J",
        "decode J", "move J", "move ms", "prefill groups a decode group", "together J", "free clock J", "saved %",
    )  # fmt: skip
    parts = [
        head("A static split of prefill and decode", "split", GPUS, QUESTION),
        table(names, lines, left=4) + "\n\n" + LEGEND,
        "## Against the published claim\n\n" + "\n".join(verdicts),
        WHY.format(floors=_floors()),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(side: PhaseCost) -> str:
    clock = "free clock" if side.clock_mhz is None else f"{side.clock_mhz:.0f} MHz"
    return f"TP{side.tp}, {clock}, batch {side.batch}"


QUESTION = (
    f"{ENERGYLENS} finds that prefill and decode want different configurations and calls that a motive for serving "
    "them apart; it gives no figures for such a split that we could read. Ours is static: Llama-3-70B, each side a "
    "group of 2, 4 or 8 GPUs at a clock of its own, least joules a request, with the first token within "
    f"{TTFT_S:g} s and {1e3 * TPOT_S:.0f} ms a token. Decode runs the largest batch that fits in memory and meets the "
    "time a token; queues are not part of it (`wattline serve` has them)."
)
LEGEND = prose("split", "legend")
WHY = prose("split", "why")


def _floors() -> str:
    """Where each profile's voltage stops falling."""
    floors = (f"{profile_for(load_gpu(gpu)).curve.floor_hz / 1e6:.0f} MHz in the profile of `{gpu}`" for gpu in GPUS)
    return f"The voltage stops falling at {' and '.join(floors)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    return command("split", page, argv)


if __name__ == "__main__":
    sys.exit(main())
