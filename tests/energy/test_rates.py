"""Money and CO2 by numbers and by tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.reporting import warnings_in
from zeus_plugins.energy.rates import Rates
from zeus_plugins.errors import ZeusBSOConfigError

KWH = 3.6e6

OWN = """\
time,price_per_kwh
2026-11-25T10:00+00:00,0.10
2026-11-25T12:00+01:00,0.20
2026-11-25 12:00,-0.40
"""


def at(hour: int, minute: int = 0) -> float:
    return datetime(2026, 11, 25, hour, minute, tzinfo=UTC).timestamp()


def table(folder: Path, text: str) -> str:
    file = folder / "rates.csv"
    file.write_text(text, "utf-8")
    return str(file)


def test_money_and_co2_follow_the_stated_rates() -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": "0.30", "ZEUS_CO2_G_PER_KWH": "380"})
    assert rates.of(2 * KWH, 10.0) == {"money": pytest.approx(0.6), "co2_g": pytest.approx(760.0)}
    assert Rates({}).of(2 * KWH, 10.0) == {}


def test_rate_in_the_middle_of_a_window_counts(tmp_path: Path) -> None:
    rows = "2026-11-25 12:00,500\n2026-11-25 10:00,300\n2026-11-25 11:00,400\n"
    rates = Rates({"ZEUS_CO2_G_PER_KWH": table(tmp_path, f"\ufefftime,CO2 in g\n{rows}")}, at(10))
    assert rates.of(KWH, 60.0, at(10, 30)) == {"co2_g": 300.0}
    assert rates.of(KWH, 7200.0, at(12, 30)) == {"co2_g": 400.0}
    assert rates.of(2 * KWH, 3600.0, at(11, 15)) == {"co2_g": 600.0}


def test_own_table_states_offsets_or_utc(tmp_path: Path) -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, OWN)}, at(10))
    assert [rates.of(KWH, 60.0, at(hour, 30))["money"] for hour in (10, 11, 12)] == pytest.approx([0.1, 0.2, -0.4])


def test_table_must_cover_the_present(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    rows = [f"{now + timedelta(hours=hours):%Y-%m-%d %H:%M},{rate}\n" for hours, rate in ((-2, 1), (-1, 2), (3, 4))]
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, "".join(("time,price\n", *rows)))})
    assert rates.of(KWH, 60.0) == {"money": 2.0}
    with pytest.raises(ZeusBSOConfigError, match="but none for now"):
        Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, "".join(("time,price\n", *rows[:1])))})


def test_last_rate_continues_after_the_table_with_a_single_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates = Rates({"ZEUS_PRICE_PER_KWH": table(tmp_path, OWN)}, at(12))
    for hour in (14, 15):
        assert rates.of(KWH, 60.0, at(hour)) == {"money": -0.4}
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    ("environ", "text", "problem"),
    [
        ({"ZEUS_PRICE_PER_KWH": "cheap"}, None, "ZEUS_PRICE_PER_KWH is 'cheap'"),
        ({"ZEUS_PUE": "1.2"}, None, "ZEUS_PUE is no longer read: multiply ZEUS_PRICE_PER_KWH and"),
        ({"ZEUS_PRICE_PER_KWH": "absent.csv"}, None, r"ZEUS_PRICE_PER_KWH=absent.csv cannot be read: .*No such file"),
        ({}, "", "needs the column 'time' and a column that begins with 'price': its first line names none"),
        ({}, "date,price\n2026-11-25,1\n", "needs the column 'time' .* names 'date', 'price'"),
        ({}, "time,rate\n2026-11-25,1\n", "a column that begins with 'price': its first line names 'time', 'rate'"),
        ({}, "MTU (CET/CEST),Day-ahead Price (EUR/MWh)\n", "needs the column 'time' .* names 'MTU .*money-and-co2"),
        ({"ZEUS_EMISSIONS_FILE": "rows.csv"}, None, "ZEUS_EMISSIONS_FILE is no longer written: unset it; trackers get"),
        ({}, "time,price\n2026-11-25,cheap\n", r"rates.csv, line 2: could not convert string to float: 'cheap'"),
        ({}, "time,price\nyesterday,1\n", r"rates.csv, line 2: Invalid isoformat string: 'yesterday'"),
        ({}, "time,price\n2026-11-25,inf\n", r"rates.csv, line 2: inf is no rate"),
        ({}, "time,price\n", "rates.csv has no row with a rate"),
        ({}, "time,price\n2025-01-01,1\n2025-01-02,1\n", r"2025-01-01 00:00 to 2025-01-03 00:00 UTC, but none for now"),
    ],
)
def test_unusable_rate_is_an_error_at_start(
    tmp_path: Path, environ: dict[str, str], text: str | None, problem: str
) -> None:
    if text is not None:
        environ = {"ZEUS_PRICE_PER_KWH": table(tmp_path, text)}
    with pytest.raises(ZeusBSOConfigError, match=problem):
        Rates(environ, at(10))
