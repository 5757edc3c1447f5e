"""Money and CO2 by numbers and by tables, such as exports of Electricity Maps and ENTSO-E."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.reporting import warnings_in
from zeus_plugins.energy.rates import Rates
from zeus_plugins.errors import ZeusBSOConfigError

KWH = 3.6e6

ELECTRICITY_MAPS = """\
Datetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO₂eq/kWh (direct),Carbon intensity gCO₂eq/kWh (Life cycle),\
Carbon-free energy percentage (CFE%),Renewable energy percentage (RE%),Data source,Data estimated,Data estimation method
2026-11-25 10:00:00,Germany,Germany,DE,250.5,300,45.2,40.1,entsoe.eu,false,
2026-11-25 11:00:00,Germany,Germany,DE,350.5,400,45.2,40.1,entsoe.eu,false,
2026-11-25 12:00:00,Germany,Germany,DE,450.5,500,45.2,40.1,entsoe.eu,false,
"""

# With a second auction, an hour without a price, and a negative price.
ENTSOE = """\
"MTU (CET/CEST)","Area","Sequence","Day-ahead Price (EUR/MWh)","Intraday Period (CET/CEST)","Intraday Price (EUR/MWh)"
"25/11/2026 11:00:00 - 25/11/2026 11:15:00","BZN|DE-LU","Sequence 1","100","",""
"25/11/2026 11:00:00 - 25/11/2026 11:15:00","BZN|DE-LU","Sequence 2","999","",""
"25/11/2026 11:15:00 - 25/11/2026 11:30:00","BZN|DE-LU","Sequence 1","n/e","",""
"25/11/2026 11:30:00 - 25/11/2026 11:45:00","BZN|DE-LU","Sequence 1","-50","",""
"""

# The hour that comes twice, as older exports write it.
AUTUMN = """\
"MTU (CET/CEST)","Day-ahead Price [EUR/MWh]","Currency","BZN|DE-LU"
"25.10.2026 01:00 - 25.10.2026 02:00","100","EUR",""
"25.10.2026 02:00 - 25.10.2026 03:00","200","EUR",""
"25.10.2026 02:00 - 25.10.2026 03:00","300","EUR",""
"25.10.2026 03:00 - 25.10.2026 04:00","400","EUR",""
"""

# The same hour, as present exports write it.
MARKED = """\
"MTU (CET/CEST)","Area","Sequence","Day-ahead Price (EUR/MWh)"
"25/10/2026 01:00:00 (CEST) - 25/10/2026 02:00:00 (CEST)","BZN|DE-LU","Without Sequence","100"
"25/10/2026 02:00:00 (CEST) - 25/10/2026 02:00:00 (CET)","BZN|DE-LU","Without Sequence","200"
"25/10/2026 02:00:00 (CET) - 25/10/2026 03:00:00 (CET)","BZN|DE-LU","Without Sequence","300"
"25/10/2026 03:00:00 - 25/10/2026 04:00:00","BZN|DE-LU","Without Sequence","400"
"""

OWN = """\
time,price_per_kwh
2026-11-25T10:00+00:00,0.10
2026-11-25T12:00+01:00,0.20
2026-11-25 12:00,0.40
"""


def at(hour: int, minute: int = 0, *, day: int = 25, month: int = 11) -> float:
    return datetime(2026, month, day, hour, minute, tzinfo=UTC).timestamp()


def table(folder: Path, text: str) -> str:
    file = folder / "rates.csv"
    file.write_text(text, "utf-8")
    return str(file)


def test_money_and_co2_follow_the_stated_rates() -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": "0.30", "ZEUS_CO2_G_PER_KWH": "380"})
    assert rates.of(2 * KWH, 10.0) == {"money": pytest.approx(0.6), "co2_g": pytest.approx(760.0)}
    assert Rates({}).of(2 * KWH, 10.0) == {}


def test_host_overhead_is_added_and_pue_multiplied() -> None:
    environ = {"ZEUS_PRICE_PER_KWH": "0.5", "ZEUS_PUE": "1.2", "ZEUS_HOST_OVERHEAD_W": "500"}
    assert Rates(environ).of(KWH, 3600.0) == {"money": pytest.approx(1.5 * 1.2 * 0.5)}


def test_electricity_maps_export_gives_life_cycle_intensity_of_the_time_of_use(tmp_path: Path) -> None:
    rates = Rates({"ZEUS_CO2_G_PER_KWH": table(tmp_path, ELECTRICITY_MAPS)}, at(10))
    assert rates.of(KWH, 60.0, at(10, 30)) == {"co2_g": 300.0}
    # A quarter of the time at 300, half at 400, a quarter at 500.
    assert rates.of(KWH, 7200.0, at(12, 30))["co2_g"] == pytest.approx(400.0)
    assert rates.of(2 * KWH, 3600.0, at(11, 45))["co2_g"] == pytest.approx(2 * (300 / 4 + 400 * 3 / 4))


def test_entsoe_export_gives_prices_of_its_first_auction(tmp_path: Path) -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, ENTSOE)}, at(10))
    prices = [rates.of(KWH, 60.0, at(10, minute))["money"] for minute in (5, 20, 35)]
    assert prices == pytest.approx([0.1, 0.1, -0.05])


@pytest.mark.parametrize("text", [AUTUMN, MARKED], ids=["older", "present"])
def test_hour_that_comes_twice_in_autumn_has_two_prices(tmp_path: Path, text: str) -> None:
    # 01:00 in summer time is 23:00 UTC of the day before.
    begin_s = at(23, day=24, month=10)
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, text)}, begin_s)
    prices = [rates.of(KWH, 60.0, begin_s + 3600 * hour + 1800)["money"] for hour in range(4)]
    assert prices == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_times_of_a_table_follow_its_zone_whatever_the_order_of_its_rows(tmp_path: Path) -> None:
    rows = ("25/11/2026 12:00,2", "25/11/2026 11:00,1")
    for zone, shift in (("CET/CEST", 1), ("WET/WEST", 0), ("EET/EEST", 2), ("UTC", 0)):
        file = table(tmp_path, "\n".join((f"MTU ({zone}),Day-ahead Price (EUR/MWh)", *rows)))
        rates = Rates({"ZEUS_PRICE_PER_KWH": file}, at(11 - shift))
        prices = [rates.of(KWH, 60.0, at(hour - shift, 30))["money"] for hour in (11, 12)]
        assert prices == pytest.approx([0.001, 0.002])


def test_table_with_a_byte_order_mark_lasts_until_the_stated_end_of_its_last_row(tmp_path: Path) -> None:
    row = "25/11/2026 11:00 - 25/11/2026 15:00"
    file = table(tmp_path, f"\ufeffMTU (UTC),price\n25/11/2026 10:00 - 25/11/2026 11:00,1\n{row},2\n")
    assert Rates({"ZEUS_PRICE_PER_KWH": file}, at(14, 59)).of(KWH, 60.0, at(14)) == {"money": 2.0}
    with pytest.raises(ZeusBSOConfigError, match="10:00 to 2026-11-25 15:00 UTC, but none for now"):
        Rates({"ZEUS_PRICE_PER_KWH": file}, at(15))


def test_own_table_states_offsets_or_utc(tmp_path: Path) -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, OWN)}, at(10))
    assert [rates.of(KWH, 60.0, at(hour, 30))["money"] for hour in (10, 11, 12)] == pytest.approx([0.1, 0.2, 0.4])


def test_table_must_cover_the_present(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    rows = [f"{now + timedelta(hours=hours):%Y-%m-%d %H:%M},{rate}\n" for hours, rate in ((-2, 1), (-1, 2), (3, 4))]
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, "".join(("time,price\n", *rows)))})
    assert rates.of(KWH, 60.0) == {"money": 2.0}
    with pytest.raises(ZeusBSOConfigError, match="but none for now"):
        Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, "".join(("time,price\n", *rows[:1])))})


def test_last_rate_continues_after_the_table_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, OWN)}, at(12))
    for hour in (14, 15):
        assert rates.of(KWH, 60.0, at(hour)) == {"money": 0.4}
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    ("environ", "text", "problem"),
    [
        ({"ZEUS_PRICE_PER_KWH": "cheap"}, None, "ZEUS_PRICE_PER_KWH is 'cheap'"),
        ({"ZEUS_PUE": "0.5"}, None, "ZEUS_PUE is 0.5: a PUE is at least 1"),
        ({"ZEUS_PRICE_PER_KWH": "absent.csv"}, None, r"ZEUS_PRICE_PER_KWH=absent.csv cannot be read: .*No such file"),
        ({}, "", "no column that begins with 'mtu' or 'datetime' or 'time': its first line names none"),
        (
            {},
            "time,rate\n2026-11-25,1\n",
            "no column that begins with 'day-ahead price' or 'price'.* names 'time', 'rate'",
        ),
        ({}, "time,price\n2026-11-25,cheap\n", r"rates.csv, line 2: could not convert string to float: 'cheap'"),
        ({}, "time,price\nyesterday,1\n", r"rates.csv, line 2: Invalid isoformat string: 'yesterday'"),
        ({}, "time,price\n2026-11-25,inf\n", r"rates.csv, line 2: 'inf' is no rate"),
        ({}, "time,price\n", "rates.csv has no row with a rate"),
        ({}, "time,price\n2025-01-01,1\n2025-01-02,1\n", r"2025-01-01 00:00 to 2025-01-03 00:00 UTC, but none for now"),
    ],
)
def test_rate_that_cannot_be_used_is_an_error_at_start(
    tmp_path: Path, environ: dict[str, str], text: str | None, problem: str
) -> None:
    if text is not None:
        environ = {"ZEUS_PRICE_PER_KWH": table(tmp_path, text)}
    with pytest.raises(ZeusBSOConfigError, match=problem):
        Rates(environ, at(10))
