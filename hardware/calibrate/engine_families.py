"""Families of an engine's kernels fitted one after the other, each with its errors on rows left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardware.calibrate.fit_clocks import BETWEEN_SIGMA, Pair
from hardware.calibrate.fit_kit import (
    Constraints,
    FitSetting,
    FittedFamily,
    Law,
    Learning,
    Row,
    digest,
    fit_family,
    settled_limit,
)
from hardware.engine_laws import Learnt, LeftOutErrors

# Rows left out at a time where errors are reported: a fifth, drawn by their digests.
FOLDS = 5


class EngineFamilies:
    """Families one after the other, each with its errors on rows left out."""

    def __init__(self, setting: FitSetting) -> None:
        self.setting = setting
        self.corrections: dict[str, Learnt] = {}
        self.left_out: dict[str, LeftOutErrors] = {}
        self.errors: dict[str, float] = {}

    def add(
        self,
        name: str,
        rows: Sequence[Row],
        law: Law[Any],
        learning: Learning,
        priors: Mapping[str, float] | None = None,
        anchors: Sequence[Pair] = (),
    ) -> Any:
        """Fit ``name`` on ``rows`` and keep it; ``anchors`` are pairs of rows at two clocks."""
        setting = settled_limit(self.setting, rows)

        known = Constraints(priors=priors or {}, anchors=anchors, ratio_sigma=BETWEEN_SIGMA)

        def fit(some: Sequence[Row]) -> FittedFamily[Any]:
            return fit_family(some, setting, law, learning, known)

        family = fit(rows)
        learnt = family.corrections
        self.corrections[name] = Learnt(time=learnt.time, energy=learnt.energy)
        self.errors |= {f"{name}.log.{key}": round(value, 4) for key, value in family.errors.items()}
        time, energy = [], []
        folds = [[row for row in rows if int(digest(row), 16) % FOLDS == i] for i in range(FOLDS)]
        for fold in folds:
            rest = [row for row in rows if row not in fold]
            if len(rest) < 2 or not fold:
                continue
            other = fit(rest)
            for row in fold:
                point = setting.point(
                    other.terms(row), {"temperature_c": row.get("temperature_c"), "sm_clock_mhz": None}
                )
                time.append(abs(point.latency_s / row["latency_s"] - 1.0))
                energy.append(abs(point.latency_s * point.power_w / row["energy_j"] - 1.0))
        if time:
            self.left_out[name] = LeftOutErrors(
                rows=len(time), time=round(float(np.mean(time)), 4), energy=round(float(np.mean(energy)), 4)
            )
        return family.coefficients
