"""Money and CO2 of energy at stated rates: each a number or a CSV table of rates by time (docs/money-and-co2.md)."""

from __future__ import annotations

import csv
import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from zeus_plugins.energy.monitor import warn_once
from zeus_plugins.environment import CO2_G_PER_KWH, HOST_OVERHEAD_W, PRICE_PER_KWH, PUE, Variable
from zeus_plugins.errors import ZeusBSOConfigError

JOULES_PER_KWH = 3_600_000

# Beginnings of the names of columns, in small letters, in order of preference. Electricity Maps: "Datetime (UTC)",
# "Carbon intensity gCO₂eq/kWh (Life cycle)"; ENTSO-E: "MTU (CET/CEST)", "Day-ahead Price (EUR/MWh)".
_TIMES = ("mtu", "datetime", "time")
_LIFE_CYCLE = tuple(f"carbon intensity gco₂eq/kwh ({each}" for each in ("life cycle", "lca"))
_VALUES = {"money": ("day-ahead price", "price"), "co2_g": (*_LIFE_CYCLE, "carbon intensity", "co2")}

# Only the zone and auction of the first row are used: rows that differ from it in these columns are left out.
_SERIES = ("Area", "Sequence", "Zone id")

_MISSING = ("", "-", "n/e", "N/A")
_FORMATS = ("%d/%m/%Y %H:%M:%S", "%d/%m/%Y %H:%M")
_ZONES = {"(CET/CEST)": "Europe/Brussels", "(WET/WEST)": "Europe/Lisbon", "(EET/EEST)": "Europe/Athens"}
_MARKS = {"(CET)": timezone(timedelta(hours=1)), "(CEST)": timezone(timedelta(hours=2))}


class Rates:
    """The stated price, CO2 intensity, PUE and host overhead.

    The amounts are ``(energy + host overhead × time) × PUE × rate``. Of a table, the rate is its mean over the time.

    Args:
        environ: Environment variables. None: the process's.
        now_s: Unix time that the tables must cover. None: the present.

    Raises:
        ZeusBSOConfigError: A variable is no number in its range, or its file has no rate for the present.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, now_s: float | None = None) -> None:
        now_s = time.time() if now_s is None else now_s
        self._pue = PUE.number(environ, is_positive=True) or 1.0
        if self._pue < 1:
            raise ZeusBSOConfigError(f"the environment variable {PUE} is {self._pue:g}: a PUE is at least 1")
        self._host_w = HOST_OVERHEAD_W.number(environ, is_positive=True) or 0.0
        self._rates: dict[str, float | RateTable] = {}
        for name, variable in {"money": PRICE_PER_KWH, "co2_g": CO2_G_PER_KWH}.items():
            text = variable.text(environ) or ""
            if text.lower().endswith(".csv"):
                self._rates[name] = RateTable(variable, Path(text), _VALUES[name], now_s)
            elif (number := variable.number(environ, is_positive=True)) is not None:
                self._rates[name] = number

    def of(self, energy_j: float, time_s: float, ended_s: float | None = None) -> dict[str, float]:
        """Return ``money`` and ``co2_g`` (grams), as far as stated, of a window that ended at `ended_s` (None: now)."""
        ended_s = time.time() if ended_s is None else ended_s
        kwh = (energy_j + self._host_w * time_s) * self._pue / JOULES_PER_KWH
        return {
            name: kwh * (rate.mean(ended_s - time_s, ended_s) if isinstance(rate, RateTable) else rate)
            for name, rate in self._rates.items()
        }


class _Row(NamedTuple):
    begun_s: float
    ended_s: float | None
    per_kwh: float


class RateTable:
    """Rates per kWh by Unix time, from a CSV file.

    Each row lasts until the next row begins. The last row lasts until its stated end, else as long as the row before.

    Args:
        variable: The environment variable that names the file, for messages.
        path: The file, in UTF-8.
        values: Possible beginnings of the rate column's name, in order of preference.
        now_s: Unix time for which the table must have a rate.
    """

    def __init__(self, variable: Variable, path: Path, values: Sequence[str], now_s: float) -> None:
        self._place = f"{variable}={path}"
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = sorted(self._rows(csv.DictReader(file), values), key=lambda row: row.begun_s)
        except (OSError, UnicodeDecodeError, csv.Error, ZoneInfoNotFoundError) as error:
            raise ZeusBSOConfigError(f"{self._place} cannot be read: {error}") from error
        if not rows:
            raise ZeusBSOConfigError(f"{self._place} has no row with a rate")
        self._begins_s = [row.begun_s for row in rows]
        self._per_kwh = [row.per_kwh for row in rows]
        before_s = rows[-2].begun_s if len(rows) > 1 else rows[-1].begun_s - 3600
        self._end_s = rows[-1].ended_s or 2 * rows[-1].begun_s - before_s
        if not self._begins_s[0] <= now_s < self._end_s:
            span_s = self._begins_s[0], self._end_s
            span = " to ".join(f"{datetime.fromtimestamp(each, UTC):%Y-%m-%d %H:%M}" for each in span_s)
            raise ZeusBSOConfigError(f"{self._place} has rates for {span} UTC, but none for now: get a newer table")

    def mean(self, begun_s: float, ended_s: float) -> float:
        """Return the mean rate between two times; after the table's end, use its last rate and log a warning."""
        if ended_s > self._end_s:
            warn_once(f"{self._place} has ended: its last rate counts from now on")
        first, last = (max(0, bisect_right(self._begins_s, each) - 1) for each in (begun_s, ended_s))
        if first == last:
            return self._per_kwh[first]
        edges_s = [begun_s, *self._begins_s[first + 1 : last + 1], ended_s]
        shares_s = [after - before for before, after in pairwise(edges_s)]
        weighted = zip(shares_s, self._per_kwh[first : last + 1], strict=True)
        return sum(share_s * per_kwh for share_s, per_kwh in weighted) / (ended_s - begun_s)

    def _rows(self, reader: csv.DictReader[str], values: Sequence[str]) -> Iterator[_Row]:
        names = reader.fieldnames or ()
        when, what = self._column(names, _TIMES), self._column(names, values)
        per_mwh = "/mwh" in what.lower()
        clock = _Clock(next((ZoneInfo(zone) for mark, zone in _ZONES.items() if mark in when), UTC))
        series: list[str | None] | None = None
        for row in reader:
            own = [row.get(each) for each in _SERIES]
            series = series or own
            if own != series or (row[what] or "").strip() in _MISSING:
                continue
            try:
                begun, _, ended = (row[when] or "").partition(" - ")
                begun_s, ended_s = clock.unix_s(begun), clock.unix_s(ended) if ended else None
                rate = float(row[what])
                if not math.isfinite(rate):
                    raise ValueError(f"{row[what]!r} is no rate")
                yield _Row(begun_s, ended_s, rate / 1000 if per_mwh else rate)
            except ValueError as error:
                raise ZeusBSOConfigError(f"{self._place}, line {reader.line_num}: {error}") from error

    def _column(self, names: Sequence[str], beginnings: Sequence[str]) -> str:
        for beginning in beginnings:
            for name in names:
                if name.lower().startswith(beginning):
                    return name
        raise ZeusBSOConfigError(
            f"{self._place} has no column that begins with {' or '.join(map(repr, beginnings))}: its first line names"
            f" {', '.join(map(repr, names)) or 'none'}"
        )


class _Clock:
    """A parser of local times, called in the order of the table, so that it knows autumn's repeated hour."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._latest_s = -math.inf

    def unix_s(self, text: str) -> float:
        """Return the Unix time of a text; raise `ValueError` if it is no time."""
        text = text.strip()
        for mark, zone in _MARKS.items():
            if text.endswith(mark):
                return _parsed(text.removesuffix(mark).strip()).replace(tzinfo=zone).timestamp()
        found = _parsed(text)
        if found.tzinfo is not None:
            return found.timestamp()
        found = found.replace(tzinfo=self._zone)
        if found.timestamp() < self._latest_s:
            found = found.replace(fold=1)
        self._latest_s = found.timestamp()
        return self._latest_s


def _parsed(text: str) -> datetime:
    for form in _FORMATS:
        try:
            return datetime.strptime(text.replace(".", "/"), form)
        except ValueError:
            continue
    return datetime.fromisoformat(text)
