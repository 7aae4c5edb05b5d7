"""Drawing tokens from logits: measured time and energy, over rows and vocabulary."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import numpy as np

from hardware.catalog import load_gpu
from hardware.gpu import GpuSpec

Sampling = Literal["greedy", "random", "top_p"]


@lru_cache(maxsize=8)
def _table(how: Sampling) -> tuple[np.ndarray, np.ndarray, np.ndarray, GpuSpec]:
    """Logits, seconds and joules of the measured rows, and the GPU that they were measured on."""
    data = tomllib.loads((files("hardware") / "data" / "sampling.toml").read_text(encoding="utf-8"))
    rows, seconds, joules = np.array(data[how], dtype=float).T
    return rows * data["width"], seconds, joules, load_gpu(data["gpu"])


def sampling_cost(how: Sampling, rows: int, width: int, gpu: GpuSpec) -> tuple[float, float]:
    """Seconds and joules of drawing a token from each of ``rows`` rows of ``width`` logits.

    Linear between measured sizes, in proportion beyond them; another GPU takes time in proportion to its memory's
    speed, a guess. ``top_p`` sorts the vocabulary, as engines without a kernel of their own for it do. At clocks below
    the highest nothing was measured: the cost stays.

    >>> seconds, joules = sampling_cost("top_p", 256, 128_256, load_gpu("h100-sxm-80gb"))
    >>> round(seconds * 1e3, 2), round(joules, 2)
    (4.64, 2.18)
    """
    logits, seconds, joules, measured = _table(how)
    size = float(rows * width)
    beyond = max(1.0, size / logits[-1])
    slower = measured.hbm_bytes_per_s / gpu.hbm_bytes_per_s
    return (float(np.interp(size, logits, seconds)) * beyond * slower, float(np.interp(size, logits, joules)) * beyond)
