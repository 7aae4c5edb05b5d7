"""The closed form itself. It is wattline's own: the published twelve-parameter formula is not public.

Every term is work that can be counted times one coefficient with a unit::

    stage   = ((roof(t_flop G, t_byte W) + t_attn A + t_elem B_shared) / tp + t_elem B_repeated + t_kernel K
               + [tp > 1] (t_sync L m + t_link R (tp - 1) / tp)) (1 + x_pipe (p - 1)) / (m p)
    latency = stage (m + p - 1)
    energy  = e_flop F + e_byte H + GPUs stage (m p_busy + (p - 1) p_idle)

G: FLOPs of matrix products, W: weight bytes, A: attention (FLOPs in prefill, KV bytes in decode), F: all FLOPs, H: all
HBM bytes, B: bytes of elementwise kernels, R: bytes that all-reduces reduce, K kernels, L layers, m micro-batches, p
pipeline stages (:class:`~sim.explore.closed_form.sizes.PassSizes`). Eight coefficients for time and four for energy, in
prefill and decode apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.explore.closed_form.sizes import PassSizes

Floats = NDArray[np.float64]

# Products are held up by the slower of arithmetic and weights; the corner between them is round. Fixed, not fitted.
ROOF = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One coefficient: its unit, what it means, where the fit starts, and the highest value that makes sense."""

    name: str
    unit: str
    meaning: str
    start: float
    top: float


# Starts are orders of magnitude of a data-centre GPU; the fit is free between 0 and ``top``.
PARAMETERS = (
    Parameter(name="t_flop", unit="s/FLOP", meaning="matrix products", start=1.6e-15, top=1e-13),
    Parameter(name="t_byte", unit="s/B", meaning="reading weights", start=3.5e-13, top=1e-11),
    Parameter(
        name="t_attn", unit="s/FLOP or s/B", meaning="attention: FLOPs, in decode KV bytes", start=1e-15, top=1e-11
    ),
    Parameter(name="t_elem", unit="s/B", meaning="elementwise work on activations", start=5e-13, top=1e-9),
    Parameter(name="t_kernel", unit="s", meaning="launch and floor of a kernel", start=3e-6, top=1e-3),
    Parameter(name="t_sync", unit="s", meaning="collectives of a layer, however small", start=2e-5, top=1e-3),
    Parameter(name="t_link", unit="s/B", meaning="collectives, by activation bytes", start=1e-11, top=1e-9),
    Parameter(name="x_pipe", unit="", meaning="slower by this for every further stage", start=0.1, top=2.0),
    Parameter(name="e_flop", unit="J/FLOP", meaning="matrix products", start=4e-13, top=1e-11),
    Parameter(name="e_byte", unit="J/B", meaning="reading weights", start=6e-11, top=1e-9),
    Parameter(name="p_busy", unit="W", meaning="a GPU while its stage works", start=200.0, top=1000.0),
    Parameter(name="p_idle", unit="W", meaning="a GPU in a pipeline bubble", start=100.0, top=1000.0),
)
NAMES = tuple(parameter.name for parameter in PARAMETERS)


def columns(sizes: Sequence[PassSizes]) -> dict[str, Floats]:
    """Sizes as columns."""
    return {field.name: np.array([getattr(s, field.name) for s in sizes], dtype=float) for field in fields(PassSizes)}


def predict(values: Floats | Sequence[float], work: dict[str, Floats]) -> tuple[Any, Any]:
    """Latency (s) and energy (J, all GPUs) of passes whose sizes are ``work``, coefficients in order of PARAMETERS."""
    t_flop, t_byte, t_attn, t_elem, t_kernel, t_sync, t_link, x_pipe, e_flop, e_byte, p_busy, p_idle = values
    tp, p, m, layers = work["tp"], work["pp"], work["micro_batches"], work["layers"]
    roof = ((t_flop * work["gemm_flops"]) ** ROOF + (t_byte * work["weight_bytes"]) ** ROOF) ** (1.0 / ROOF)
    shared = roof + t_attn * work["attention"] + t_elem * work["shared_bytes"]
    repeated = t_elem * work["repeated_bytes"] + t_kernel * work["kernels"]
    together = (tp > 1) * (t_sync * layers * m + t_link * work["link_bytes"] * (tp - 1) / tp)
    stage = (shared / tp + repeated + together) * (1.0 + x_pipe * (p - 1)) / (m * p)
    energy = e_flop * work["flops"] + e_byte * work["hbm_bytes"]
    return stage * (m + p - 1), energy + work["gpus"] * stage * (m * p_busy + (p - 1) * p_idle)
