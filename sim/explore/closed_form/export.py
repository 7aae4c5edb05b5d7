"""The fitted closed form as Python, LaTeX and JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.explore.closed_form.fit import Fitted
from sim.explore.closed_form.formula import NAMES, PARAMETERS, ROOF

_PYTHON = '''"""Latency and energy of LLM inference over layouts: wattline's own closed form, not the published one.

Inputs are plain numbers of one pass: FLOPs of matrix products and weight bytes (all micro-batches), attention (FLOPs in
prefill, KV bytes in decode), all FLOPs and all HBM bytes, elementwise bytes that ranks repeat and share, bytes that
all-reduces reduce, kernels and layers of a rank. What another card, clock or type makes of them (1: 16 bit on an H100
at its highest clock): time of a FLOP, of a byte, of attention, of a byte between GPUs, joules of a FLOP, watts.
"""

PREFILL = {prefill}
DECODE = {decode}


def predict(c, *, tp, pp, micro_batches, gpus, gemm_flops, weight_bytes, attention, flops, hbm_bytes,
            repeated_bytes, shared_bytes, link_bytes, kernels, layers, per_flop=1.0, per_byte=1.0,
            per_attention=1.0, per_link_byte=1.0, per_joule=1.0, per_watt=1.0):
    """Latency (s) and energy (J, all GPUs) of one pass with coefficients ``c``."""
    p, m, r = pp, micro_batches, {roof}
    roof = ((c["t_flop"] * per_flop * gemm_flops) ** r + (c["t_byte"] * per_byte * weight_bytes) ** r) ** (1 / r)
    shared = roof + c["t_attn"] * per_attention * attention + c["t_elem"] * per_byte * shared_bytes
    repeated = c["t_elem"] * per_byte * repeated_bytes + c["t_kernel"] * kernels
    together = (tp > 1) * (c["t_sync"] * layers * m + c["t_link"] * per_link_byte * link_bytes * (tp - 1) / tp)
    stage = (shared / tp + repeated + together) * (1 + c["x_pipe"] * (p - 1)) / (m * p)
    energy = c["e_flop"] * per_joule * flops + c["e_byte"] * hbm_bytes
    watts = gpus * per_watt * (m * c["p_busy"] + (p - 1) * c["p_idle"])
    return stage * (m + p - 1), energy + stage * watts
'''


def to_python(forms: dict[str, Fitted]) -> str:
    """A module without imports."""
    values = {phase: dict(zip(NAMES, form.values.tolist(), strict=True)) for phase, form in forms.items()}
    return _PYTHON.format(prefill=values["prefill"], decode=values["decode"], roof=ROOF)


def to_latex(forms: dict[str, Fitted]) -> str:
    """The formula and a table of coefficients with their standard errors."""
    rows = []
    for i, parameter in enumerate(PARAMETERS):
        cells = [_latex(float(form.values[i]), float(form.errors[i])) for form in forms.values()]
        rows.append(
            f"${_symbol(parameter.name)}$ & {parameter.meaning} & {parameter.unit or '--'} & {' & '.join(cells)} \\\\"
        )
    return "\n".join(
        [
            r"% wattline's own closed form, not the published one.",
            r"% F_g: FLOPs of products, W: weight bytes, A: attention,",
            r"% F: all FLOPs, H: HBM bytes, B_r, B_s: elementwise bytes that ranks repeat, share, R: reduced bytes,",
            r"% K: kernels, L: layers, m: micro-batches, p: stages, t: tensor degree, G: GPUs.",
            r"% For 16-bit products on an H100; other cards, clocks and types scale the terms (docs/closed_form.md).",
            r"\begin{align}",
            rf"\sigma &= \frac{{1 + {_symbol('x_pipe')}(p-1)}}{{mp}}\Bigl[\tfrac1t\bigl(\sqrt[{ROOF:g}]{{"
            rf"({_symbol('t_flop')}F_g)^{ROOF:g} + ({_symbol('t_byte')}W)^{ROOF:g}}} + {_symbol('t_attn')}A"
            rf" + {_symbol('t_elem')}B_s\bigr) + {_symbol('t_elem')}B_r + {_symbol('t_kernel')}K"
            rf" + [t>1]\bigl({_symbol('t_sync')}Lm + {_symbol('t_link')}R\tfrac{{t-1}}t\bigr)\Bigr] \\",
            r"T &= (m+p-1)\,\sigma \\",
            rf"E &= {_symbol('e_flop')}F + {_symbol('e_byte')}H"
            rf" + G\,\sigma\,(m\,{_symbol('p_busy')} + (p-1)\,{_symbol('p_idle')})",
            r"\end{align}",
            r"\begin{tabular}{lll" + "r" * len(forms) + "}",
            "coefficient & meaning & unit & " + " & ".join(forms) + r" \\",
            r"\hline",
            *rows,
            r"\end{tabular}",
            "",
        ]
    )


def to_json(forms: dict[str, Fitted]) -> dict[str, dict[str, Any]]:
    """Coefficients by phase; a standard error is None where a bound holds or no sample tells."""
    return {
        phase: {
            parameter.name: {
                "value": float(form.values[i]),
                "standard_error": None if np.isnan(form.errors[i]) else float(form.errors[i]),
                "unit": parameter.unit,
                "meaning": parameter.meaning,
            }
            for i, parameter in enumerate(PARAMETERS)
        }
        for phase, form in forms.items()
    }


def _symbol(name: str) -> str:
    letter, index = name.split("_")
    return rf"{letter}_{{\mathrm{{{index}}}}}"


def _latex(value: float, error: float) -> str:
    if value == 0.0:
        return "$0$ (bound)"
    power = int(np.floor(np.log10(value)))
    scale = 10.0**power
    if np.isnan(error):
        return rf"${value / scale:.2f}\cdot 10^{{{power}}}$ (not determined)"
    return rf"$({value / scale:.2f} \pm {error / scale:.2f})\cdot 10^{{{power}}}$"
