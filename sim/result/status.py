"""What numbers rest on: whether runs of their kind, at their sizes, were ever held against a measurement.

The measured kinds and their ranges are data (:mod:`sim.result.checked`). A run inside has the status of its card's
profile; outside, it is ``extrapolated`` where only a size leaves the measured range and ``unchecked`` where no run of
its kind was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import workloads
from hardware.catalog import list_gpus, load_gpu
from hardware.cluster import default_node, load_node
from hardware.engine_laws import shipped_engines
from inputs.same import Keyed, Same
from sim.result.checked import Checked, measured_kind, other_kinds, unmeasured_sizes
from sim.result.notes import cap_notes, notes_of
from sim.scenario.kind import Kind, kind_of
from sim.scenario.machine import Machine
from sim.scenario.positions import positions
from sim.scenario.resolved import POLICY, Resolved
from sim.scenario.spec import Scenario

# From the best founded to the least. What is known of the card and what is known of the run are two things: the
# weaker one is the status.
STATUSES = ("calibrated", "forecast", "extrapolated", "unchecked", "uncalibrated")

# Fields that a kind or its sizes hold, or that change no number. Any other field that is not its default asks for
# something that no row ran, whoever adds it.
HELD = frozenset(
    {
        "model", "gpu", "profile", "node", "phase", "batch", "seq_len", "output_len", "layers", "lm_head", "dtype",
        "weight_dtype", "kv_dtype", "stack", "tp", "ep", "ep_mode", "sequence_parallel",
        "cp", "cp_mode", "dcp", "ulysses", "pp", "micro_batches", "dp",
        "expert_skew", "routing", "routing_seed", "tokens_per_ep_rank", "overlap_chunks", "overlap_ops", "comm_ctas",
        "launch", "lora_adapters", "max_loras", "max_lora_rank",
        "power_cap_w", "uncapped", "sm_clock_mhz", "chip_temperature_c", "chip_power_factor", "detail",
        "ignore_memory", "steps",
    }
)  # fmt: skip
# Of the power policy these are part of a kind or its sizes, or asked for where no row ran.
_policy_in_kinds = itemgetter("chip_temperature_c", *sorted(POLICY - HELD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The status of numbers and why: of the card's profile alone (``card``) and of the whole.

    ``unchecked`` and ``extrapolated`` hold what lies outside the measured, a sentence each.
    """

    card: str
    unchecked: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()
    expected_error: str = ""
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The weakest of what is known."""
        found = [self.card, *["unchecked"] * bool(self.unchecked), *["extrapolated"] * bool(self.extrapolated)]
        return max(found, key=STATUSES.index)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Everything that lies outside the measured."""
        return (*self.unchecked, *self.extrapolated)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "status": self.status,
            "status_of_card": self.card,
            "status_reasons": list(self.reasons),
            "status_notes": list(self.notes),
            "expected_error": self.expected_error,
        }

    def words(self) -> str:
        """Status, expected errors and reasons in one sentence."""
        return "; ".join(part for part in (self.status, self.expected_error, *self.reasons, *self.notes) if part)


def standing(
    resolved: Resolved, target: Machine, *, kernels_outside: Sequence[str] = (), drawn_w: float | None = None
) -> Standing:
    """What a run of a scenario on ``target`` rests on.

    ``kernels_outside`` names kernels beyond the rows that their laws were fitted on, ``drawn_w`` is the highest mean
    power of a GPU.
    """
    scenario = resolved.scenario
    parts = (Same(target.gpu), Same(target.profile), Same(target.cluster))
    asked = _policy_in_kinds(scenario.__dict__)
    work = _of_work(Keyed((resolved.work, *parts, asked), (scenario, target)))
    extrapolated = [*work.sizes, *_policy(scenario, target, work.known), *work.positions]
    if kernels_outside:
        more = ", ..." if len(kernels_outside) > 4 else ""
        extrapolated.append(f"outside the measured range: {', '.join(kernels_outside[:4])}{more}")
    if scenario.uncapped and drawn_w is not None and drawn_w > target.profile.limits.fast_limit_w:
        extrapolated.append(f"draws {drawn_w:.0f} W, more than a {target.gpu.id} was ever seen to draw")
    return Standing(
        card=work.card,
        unchecked=work.unchecked,
        extrapolated=tuple(extrapolated),
        expected_error=work.expected_beyond if extrapolated else work.expected_within,
        notes=(*cap_notes(scenario, target, drawn_w), *work.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkStanding:
    """What of a standing follows from the work and the machine, whatever its power limit and clock.

    Errors to expect ``within`` the measured ranges and ``beyond``.
    """

    known: Checked | None
    card: str
    unchecked: tuple[str, ...]
    sizes: tuple[str, ...]
    positions: tuple[str, ...]
    expected_within: str
    expected_beyond: str
    notes: tuple[str, ...]


@lru_cache(maxsize=16)
def _of_work(asked: Keyed[tuple[Scenario, Machine]]) -> _WorkStanding:
    scenario, target = asked.held
    unchecked = _of_machine(target)
    if scenario.profile is not None:
        unchecked.append("the profile is your own: no whole run was held against it (wattline validate)")
    for name, default in _defaults().items():
        value = getattr(scenario, name)
        if value != default:
            if isinstance(value, tuple):  # pairs of a name and what is said of it
                value = ",".join("=".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value)
            unchecked.append(f"{name} = {value} was never measured")
    unchecked.sort()
    kind = kind_of(scenario, target.gpu.id)
    known, missing = measured_kind(kind)
    unchecked += missing
    within, outside = (
        _expected(target, kind, known, unchecked=bool(unchecked), extrapolated=extrapolated)
        for extrapolated in (False, True)
    )
    return _WorkStanding(
        known=known,
        card=card_status(scenario, target, measured=known is not None),
        unchecked=tuple(unchecked),
        sizes=() if known is None else tuple(unmeasured_sizes(kind, known.kind)),
        positions=_positions(scenario),
        expected_within=within,
        expected_beyond=outside,
        notes=tuple(notes_of(scenario, target)),
    )


def _positions(scenario: Scenario) -> tuple[str, ...]:
    """Positions beyond those of the model."""
    reach = positions(scenario)
    if reach is None or not reach["beyond"]:
        return ()
    return (f"{reach['needed']:,} tokens are beyond the {reach['of_the_model']:,} positions of the model",)


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    """Defaults of the fields outside :data:`HELD`: no measured run has other values of them."""
    return {name: field.default for name, field in Scenario.model_fields.items() if name not in HELD}


def card_status(scenario: Scenario, target: Machine, *, measured: bool) -> str:
    """What the card's laws rest on: calibrated for a stack whose own kernels and whole runs were ``measured`` on it."""
    stack = workloads.load_stack(scenario.stack)
    engine = stack.engine or stack.passes
    if measured and engine is not None and engine in shipped_engines(target.gpu.id):
        return "calibrated"
    return target.profile.status


def standing_of_kind(asked: Kind, target: Machine) -> Standing:
    """What a run rests on that is no scenario (a ring of attention alone)."""
    known, missing = measured_kind(asked)
    unchecked = _of_machine(target) + missing
    extrapolated = [] if known is None else unmeasured_sizes(asked, known.kind)
    return Standing(
        card=target.profile.status,
        unchecked=tuple(unchecked),
        extrapolated=tuple(extrapolated),
        expected_error=_expected(target, asked, known, unchecked=bool(unchecked), extrapolated=bool(extrapolated)),
    )


def standing_of_laws(target: Machine, *, outside: bool = False, unmeasured: Sequence[str] = ()) -> Standing:
    """What single kernels rest on, which their laws price: the rows of the fit, at the card's own limit and clock.

    ``outside``: beyond the rows that a law was fitted on; ``unmeasured`` says what no row ever held.
    """
    extrapolated = ["outside the measured range"] if outside else []
    gpu = target.gpu
    if target.limits.cap_w != gpu.tdp_w:
        extrapolated.append("no measurement was taken under this power limit")
    if target.model.max_clock_hz < gpu.max_clock_hz:
        extrapolated.append("no measurement was taken at a locked clock")
    return Standing(
        card=target.profile.status,
        unchecked=(*_of_machine(target), *unmeasured),
        extrapolated=tuple(extrapolated),
        expected_error=target.profile.expected_error() if target.profile.status != "calibrated" else "",
    )


def _of_machine(target: Machine) -> list[str]:
    """What of the machine itself no row ran on."""
    gpu = target.gpu
    found = []
    if gpu.id in list_gpus() and not gpu.same_figures(load_gpu(gpu.id)):
        found.append(f"the figures of {gpu.id} are not the catalog's")
    if target.world > 1 and target.cluster.node != load_node(default_node(gpu)):
        found.append(f"node = {target.cluster.node.id} was never measured with {gpu.id}")
    return found


def _policy(scenario: Scenario, target: Machine, known: Checked | None) -> list[str]:
    """Power limits, clocks and chips outside the measured."""
    found = []
    cap_w = target.limits.cap_w
    usual = scenario.power_cap_w in (None, target.gpu.tdp_w)
    if known is not None:
        low_w, high_w = known.kind.sizes["power_cap_w"]
        usual = low_w <= cap_w <= high_w
    if scenario.uncapped or not usual:
        found.append("no measurement was taken under this power limit")
    if scenario.sm_clock_mhz is not None and target.model.max_clock_hz < target.gpu.max_clock_hz:
        found.append("no whole run was measured at a locked clock")
    if scenario.chip_power_factor not in (None, 1.0):
        found.append("no whole run was held against a chip_power_factor")
    return found


def _expected(target: Machine, asked: Kind, known: Checked | None, *, unchecked: bool, extrapolated: bool) -> str:
    """What to expect of the numbers, in words with figures where there are any."""
    if known is not None and not unchecked:
        return known.words() + (" within the measured range, unknown outside it" if extrapolated else "")
    if target.profile.status == "calibrated":
        return "expected error unknown"
    own_ranks = any(part.startswith("ep ") for part in asked.key["layout"].split(", "))
    also = ["experts", *["experts_ep"] * own_ranks] if "experts" in asked.sizes else []
    parts = [target.profile.expected_error(*also)]
    if target.profile.basis != target.gpu.id:  # else other figures under a catalog's id: no row is of that card
        parts.append(other_kinds(target.gpu.id))
    return "; ".join(part for part in parts if part)
