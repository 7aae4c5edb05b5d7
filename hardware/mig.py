"""MIG slices: instances of a GPU with SMs, memory, bandwidth and L2 of their own: GPUs to their software."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files

from hardware.errors import HardwareError
from hardware.gpu import GpuSpec


@lru_cache(maxsize=1)
def mig_profiles() -> dict[str, dict[str, dict[str, int]]]:
    """Profiles by GPU and name, as ``hardware/data/mig.toml`` has them with their sources."""
    return tomllib.loads((files("hardware") / "data" / "mig.toml").read_text(encoding="utf-8"))


def mig_slice(card: GpuSpec, profile: str) -> GpuSpec:
    """One slice of ``card``; it has no link (MIG turns peer-to-peer off), its clock and its watts are the card's."""
    known = mig_profiles().get(card.id, {})
    if "+" in profile or "," in profile:
        raise HardwareError(
            f"gpu = '{card.id}:{profile}': slices of different sizes share no work, only the card's clock and watts: "
            "run each by itself, all at one sm_clock_mhz (docs/layouts.md, Slices of one card)"
        )
    if profile not in known:
        near = difflib.get_close_matches(profile, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        have = f"known are {', '.join(known)}" if known else f"known are slices of {', '.join(mig_profiles())}"
        raise HardwareError(f"gpu = '{card.id}:{profile}': {card.id} has no such MIG profile: {hint}{have}")
    found = known[profile]
    sms, memory, cache = found["sms"] / card.sms, found["memory_eighths"] / 8, found["l2_eighths"] / 8
    return replace(
        card,
        id=f"{card.id}:{profile}",
        name=f"{card.name} MIG {profile}",
        sms=found["sms"],
        tensor_flops_per_s={dtype: rate * sms for dtype, rate in card.tensor_flops_per_s.items()},
        memory_bytes=card.memory_bytes * memory,
        hbm_bytes_per_s=card.hbm_bytes_per_s * memory,
        l2_bytes=card.l2_bytes * cache,
        link="none (MIG)",
        link_bytes_per_s=0.0,
        card=card,
        slices=found["instances"],
    )
