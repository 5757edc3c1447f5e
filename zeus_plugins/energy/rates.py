"""Money and CO2 of energy at stated rates (docs/report.md)."""

from __future__ import annotations

from collections.abc import Mapping

from zeus_plugins.environment import CO2_G_PER_KWH, PRICE_PER_KWH, refuse_gone
from zeus_plugins.errors import ZeusBSOConfigError

JOULES_PER_KWH = 3_600_000


class Rates:
    """The stated price and CO2 intensity of energy.

    Args:
        environ: Environment variables. None: the process's.

    Raises:
        ZeusBSOConfigError: A variable is no number in its range, or is no longer read.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        refuse_gone(environ)
        self._rates: dict[str, float] = {}
        for name, variable in {"money": PRICE_PER_KWH, "co2_g": CO2_G_PER_KWH}.items():
            if (variable.text(environ) or "").lower().endswith(".csv"):
                raise ZeusBSOConfigError(
                    f"{variable} no longer names a table: set it to the mean rate, or unset it and multiply the logged"
                    " zeus/epoch_energy_j by your table"
                )
            if (number := variable.number(environ, is_positive=True)) is not None:
                self._rates[name] = number

    def of(self, energy_j: float) -> dict[str, float]:
        """Return ``money`` and ``co2_g`` (grams) of `energy_j`, as far as stated."""
        return {name: energy_j / JOULES_PER_KWH * rate for name, rate in self._rates.items()}
