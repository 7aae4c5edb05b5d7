"""What runs cost and emit, by a user's own factors; there are no defaults, since they differ by place and contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pandas as pd

# A figure of one run, or a column of figures of many.
Figure = TypeVar("Figure", float, "pd.Series[float]")

J_PER_KWH = 3.6e6
S_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A price of a GPU for an hour and of a kWh, in one unit of money, and the grams of CO2e of a kWh."""

    price_per_gpu_hour: float | None = None
    price_per_kwh: float | None = None
    carbon_g_per_kwh: float | None = None

    def cost(self, energy_j: Figure, gpu_s: Figure) -> Figure | None:
        """Of so many joules and seconds of GPUs; None without a price.

        >>> Prices(price_per_kwh=0.1, price_per_gpu_hour=2.0).cost(3.6e6, 1800.0)
        1.1
        """
        if self.price_per_kwh is None and self.price_per_gpu_hour is None:
            return None
        kwh, hours = energy_j / J_PER_KWH, gpu_s / S_PER_HOUR
        return kwh * (self.price_per_kwh or 0.0) + hours * (self.price_per_gpu_hour or 0.0)

    def carbon_g(self, energy_j: Figure) -> Figure | None:
        """Grams of CO2e of so many joules; None without a factor.

        >>> Prices(carbon_g_per_kwh=400.0).carbon_g(3.6e6)
        400.0
        """
        return None if self.carbon_g_per_kwh is None else energy_j / J_PER_KWH * self.carbon_g_per_kwh

    def of(self, *, energy_j: float, gpu_s: float, counts: Mapping[str, float]) -> dict[str, float]:
        """Cost and carbon of the whole and of one of each of ``counts``, as far as the factors say.

        >>> Prices(carbon_g_per_kwh=400.0).of(energy_j=3.6e6, gpu_s=1.0, counts={"request": 8})
        {'carbon_g': 400.0, 'carbon_g_per_request': 50.0}
        """
        whole = {"cost": self.cost(energy_j, gpu_s), "carbon_g": self.carbon_g(energy_j)}
        return {
            name if each is None else f"{name}_per_{each}": value / count
            for name, value in whole.items()
            if value is not None
            for each, count in ({None: 1.0} | dict(counts)).items()
        }

    def rows(self, priced: Mapping[str, float]) -> list[tuple[str, str]]:
        """What :meth:`of` found, for people: a line each."""
        names = (("cost", "cost", ""), ("carbon_g", "carbon", " g CO2e"))
        return [
            (title, f"{priced[name]:.4g}{unit}" + _each(name, unit, priced))
            for name, title, unit in names
            if name in priced
        ]


NO_PRICES = Prices()


def _each(name: str, unit: str, priced: Mapping[str, float]) -> str:
    parts = [
        f"{value:.4g}{unit} per {other.removeprefix(name + '_per_').replace('_', ' ')}"
        for other, value in priced.items()
        if other.startswith(f"{name}_per_")
    ]
    return f"  ({', '.join(parts)})" if parts else ""
