"""Money and CO2 of energy at stated rates: each a number or a CSV table of rates by time (docs/report.md)."""

from __future__ import annotations

import csv
import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from zeus_plugins.energy.monitor import warn_once
from zeus_plugins.environment import CO2_G_PER_KWH, EMISSIONS_FILE, PRICE_PER_KWH, PUE, Variable
from zeus_plugins.errors import ZeusBSOConfigError

JOULES_PER_KWH = 3_600_000

_COLUMNS = {"money": "price", "co2_g": "co2"}
"""Beginnings of the names of the columns with the rates."""


class Rates:
    """The stated price and CO2 intensity of energy. Of a table, the rate in the middle of a window counts.

    Args:
        environ: Environment variables. None: the process's.
        now_s: Unix time that the tables must cover. None: the present.

    Raises:
        ZeusBSOConfigError: A variable is no number in its range, or its file has no rate for the present.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, now_s: float | None = None) -> None:
        now_s = time.time() if now_s is None else now_s
        if PUE.text(environ):
            raise ZeusBSOConfigError(f"{PUE} is no longer read: multiply {PRICE_PER_KWH} and {CO2_G_PER_KWH} by it")
        if EMISSIONS_FILE.text(environ):
            raise ZeusBSOConfigError(
                f"{EMISSIONS_FILE} is no longer written: unset it; trackers get zeus/energy_j and zeus/co2_g"
            )
        self._rates: dict[str, float | RateTable] = {}
        for name, variable in {"money": PRICE_PER_KWH, "co2_g": CO2_G_PER_KWH}.items():
            text = variable.text(environ) or ""
            if text.lower().endswith(".csv"):
                self._rates[name] = RateTable(variable, Path(text), _COLUMNS[name], now_s)
            elif (number := variable.number(environ, is_positive=True)) is not None:
                self._rates[name] = number

    def of(self, energy_j: float, time_s: float, ended_s: float | None = None) -> dict[str, float]:
        """Return ``money`` and ``co2_g`` (grams), as far as stated, of a window that ended at `ended_s` (None: now)."""
        ended_s = time.time() if ended_s is None else ended_s
        kwh = energy_j / JOULES_PER_KWH
        return {
            name: kwh * (rate.at(ended_s - time_s / 2) if isinstance(rate, RateTable) else rate)
            for name, rate in self._rates.items()
        }


class RateTable:
    """Rates per kWh by Unix time, from a CSV file with the column ``time`` and a column of rates.

    Each row lasts until the next row begins, and the last row as long as the row before.

    Args:
        variable: The environment variable that names the file, for messages.
        path: The file, in UTF-8.
        column: The beginning of the rate column's name.
        now_s: Unix time for which the table must have a rate.
    """

    def __init__(self, variable: Variable, path: Path, column: str, now_s: float) -> None:
        self._place = f"{variable}={path}"
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = sorted(self._rows(csv.DictReader(file), column))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ZeusBSOConfigError(f"{self._place} cannot be read: {error}") from error
        if not rows:
            raise ZeusBSOConfigError(f"{self._place} has no row with a rate")
        self._begins_s = [begun_s for begun_s, _ in rows]
        self._per_kwh = [per_kwh for _, per_kwh in rows]
        before_s = self._begins_s[-2] if len(rows) > 1 else self._begins_s[-1] - 3600
        self._end_s = 2 * self._begins_s[-1] - before_s
        if not self._begins_s[0] <= now_s < self._end_s:
            span_s = self._begins_s[0], self._end_s
            span = " to ".join(f"{datetime.fromtimestamp(each, UTC):%Y-%m-%d %H:%M}" for each in span_s)
            raise ZeusBSOConfigError(f"{self._place} has rates for {span} UTC, but none for now: get a newer table")

    def at(self, time_s: float) -> float:
        """Return the rate at a time; after the table's end, return its last rate and log a warning."""
        if time_s > self._end_s:
            warn_once(f"{self._place} has ended: its last rate counts from now on")
        return self._per_kwh[max(0, bisect_right(self._begins_s, time_s) - 1)]

    def _rows(self, reader: csv.DictReader[str], column: str) -> Iterator[tuple[float, float]]:
        """Yield the begin and the rate of each row; a time without an offset is UTC."""
        names = reader.fieldnames or ()
        rates = [name for name in names if name.lower().startswith(column)]
        if "time" not in names or not rates:
            raise ZeusBSOConfigError(
                f"{self._place} needs the column 'time' and a column that begins with {column!r}: its first line names"
                f" {', '.join(map(repr, names)) or 'none'} (docs/report.md#money-and-co2)"
            )
        for row in reader:
            try:
                begun, rate = datetime.fromisoformat((row["time"] or "").strip()), float(row[rates[0]])
                if not math.isfinite(rate):
                    raise ValueError(f"{rate!r} is no rate")
            except (TypeError, ValueError) as error:
                raise ZeusBSOConfigError(f"{self._place}, line {reader.line_num}: {error}") from error
            yield (begun if begun.tzinfo else begun.replace(tzinfo=UTC)).timestamp(), rate
