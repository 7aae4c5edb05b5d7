"""What served runs rest on: servers that were measured under their own arrivals, else the steps of their stack.

The measured servers are data (``served`` of ``hardware/data/checked_runs.toml``).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import workloads
from sim.result.checked import measured_kind, unmeasured_sizes
from sim.result.status import Standing, card_status, standing_of_laws
from sim.scenario.kind import KEY, Kind, kind_of
from sim.scenario.machine import Machine
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario

# Outputs of a server that are compared, and what they are called.
OUTPUTS = {
    "ttft_p50": "median time to first token",
    "ttft_p99": "its 99 %",
    "itl_p50": "median time between tokens",
    "itl_p99": "its 99 %",
    "energy": "joules",
}
LOAD_SIZES = ("requests_per_s", "longest_tokens")  # of Load
# Sizes of a kind that are the model's: a server's batch and context follow from its requests.
_MODEL_SIZES = frozenset({"d_model", "d_ff", "head_dim", "q_heads_per_kv_head", "experts", "top_k", "expert_skew"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedServers:
    """Measured servers of one kind: how many, in which files, at which sizes and rates, and the errors of predictions.

    ``errors``: least and greatest share by name of ``OUTPUTS``, with their signs.
    """

    kind: Kind
    rows: int
    files: tuple[str, ...]
    errors: Mapping[str, tuple[float, float]]

    def words(self) -> str:
        """The errors in words."""
        off = [
            f"{words} {100 * low:+.0f} %" if low == high else f"{words} {100 * low:+.0f} to {100 * high:+.0f} %"
            for words, (low, high) in self._named()
        ]
        servers = "one measured server" if self.rows == 1 else f"{self.rows} measured servers"
        return f"{', '.join(off)} on {servers} of this kind"

    def _named(self) -> list[tuple[str, tuple[float, float]]]:
        return [(words, self.errors[name]) for name, words in OUTPUTS.items() if name in self.errors]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests a second (None: a lone one, which waits for nobody), and tokens of the longest request."""

    requests_per_s: float | None
    longest_tokens: float

    @classmethod
    def of(cls, arrivals_s: Sequence[float], tokens: Sequence[float]) -> Load:
        """Of requests that arrive so, of so many tokens in and out; the rate is infinite where all come at once.

        >>> Load.of([0.0, 1.0, 2.0], [90, 500, 70])
        Load(requests_per_s=1.0, longest_tokens=500)
        >>> Load.of([3.0], [90]).requests_per_s, Load.of([0.0, 0.0], [9, 9]).requests_per_s
        (None, inf)
        """
        span_s = max(arrivals_s) - min(arrivals_s)
        rate = None if len(arrivals_s) < 2 else (len(arrivals_s) - 1) / span_s if span_s else math.inf
        return cls(requests_per_s=rate, longest_tokens=max(tokens))


def server_kind(group: Scenario, gpu_id: str, load: Load | None) -> Kind:
    """The kind of a server whose replica is ``group``; its sizes are the model's and those of its load, if known."""
    kind = kind_of(group, gpu_id)
    sizes = {name: span for name, span in kind.sizes.items() if name in _MODEL_SIZES}
    for name in LOAD_SIZES if load is not None else ():
        if (value := getattr(load, name)) is not None:
            sizes[name] = (value, value)
    return Kind(key={**kind.key, "phase": "served"}, sizes=sizes)


@lru_cache(maxsize=1)
def checked_servers() -> tuple[CheckedServers, ...]:
    """All measured kinds of servers."""
    text = (files("hardware") / "data" / "checked_runs.toml").read_text(encoding="utf-8")
    return tuple(_checked(entry) for entry in tomllib.loads(text).get("served", ()))


def _checked(entry: Mapping[str, Any]) -> CheckedServers:
    sizes = {name: (low, high) for name, (low, high) in entry["sizes"].items()}
    return CheckedServers(
        kind=Kind(key={name: entry[name] for name in KEY}, sizes=sizes),
        rows=entry["rows"],
        files=tuple(entry["files"]),
        errors={name: (low, high) for name, (low, high) in entry["errors"].items()},
    )


def standing_served(
    target: Machine,
    group: Scenario,
    *,
    asks: Sequence[str] = (),
    load: Load | None = None,
    beyond_positions: int = 0,
    images: bool = False,
) -> Standing:
    """What a served run of replicas like ``group`` rests on: servers of its kind, else measured steps of its stack.

    ``asks``: what it does that no measured server did; ``beyond_positions`` requests are longer than the positions of
    the model. ``images``: requests have any, which steps encode.
    """
    precision = precision_of(group)
    decode, missing = measured_kind(kind_of(group, target.gpu.id))
    steps_measured = decode is not None and not missing
    others = (
        (not precision.uniform, precision.words()),
        (group.lora_adapters > 0 and not steps_measured, "adapters"),
        (images, "images"),
        (group.cp > 1, f"a cache of {group.cp} ranks ({group.cp_mode})"),
        (group.dcp > 1 and not steps_measured, f"a cache of {group.dcp} ranks (dcp)"),
    )
    unlike = tuple(f"no step with {what} was measured" for there, what in others if there)
    laws = standing_of_laws(target, unmeasured=unlike)
    bare = group.model_copy(update={"lora_adapters": 0}) if group.lora_adapters else group  # ``asks`` says the rest
    asked = server_kind(bare, target.gpu.id, load)
    known = next((one for one in checked_servers() if one.kind.key == asked.key), None)
    if beyond_positions:
        longer = f"{beyond_positions:,} requests are longer than the positions of the model"
        laws = replace(laws, extrapolated=(*laws.extrapolated, longer))
    if known is not None and not unlike and not asks:
        return replace(
            laws,
            card=card_status(group, target, measured=True),
            extrapolated=(*laws.extrapolated, *unmeasured_sizes(asked, known.kind)),
            expected_error=known.words(),
        )
    if decode is not None and not missing and workloads.load_stack(group.stack).engine is not None:
        laws = replace(laws, expected_error=f"decode steps of this stack: {decode.words()}")
    drafts = (f"speculation = {group.speculation}",) if group.speculation is not None else ()
    beside = f" with {', '.join(asks or drafts)}" if drafts or (known is not None and asks) else ""
    none = f"no server was measured{beside}; kernels of a step: {laws.status}"
    return replace(laws, unchecked=(none, *laws.unchecked))
