"""Money and CO2 at stated rates."""

from __future__ import annotations

import pytest

from zeus_plugins.energy.rates import Rates
from zeus_plugins.errors import ZeusBSOConfigError

KWH = 3.6e6

TABLE = (
    "no longer names a table: set it to the mean rate, or unset it and multiply the logged zeus/epoch_energy_j by your"
)


def test_money_and_co2_follow_the_stated_rates() -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": "0.30", "ZEUS_CO2_G_PER_KWH": "380"})
    assert rates.of(2 * KWH) == {"money": pytest.approx(0.6), "co2_g": pytest.approx(760.0)}
    assert Rates({}).of(2 * KWH) == {}


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"ZEUS_PRICE_PER_KWH": "cheap"}, "ZEUS_PRICE_PER_KWH is 'cheap'"),
        ({"ZEUS_PRICE_PER_KWH": "prices.csv"}, f"ZEUS_PRICE_PER_KWH {TABLE}"),
        ({"ZEUS_CO2_G_PER_KWH": "CO2.CSV"}, f"ZEUS_CO2_G_PER_KWH {TABLE}"),
        ({"ZEUS_PUE": "1.2"}, "ZEUS_PUE is no longer read: multiply ZEUS_PRICE_PER_KWH and"),
        ({"ZEUS_EMISSIONS_FILE": "rows.csv"}, "ZEUS_EMISSIONS_FILE is no longer written: unset it; trackers get"),
    ],
)
def test_unusable_rate_is_an_error_at_start(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=problem):
        Rates(environ)
