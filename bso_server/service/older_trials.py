"""Trials that are too old to be shown one by one: what those of a few hundred in a row have cost, as quantiles."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from bso_server.core.model import TrialRecord
from bso_server.core.savings import Tally
from bso_server.service.page_views import TrialBin
from bso_server.storage import queries as stored_views
from bso_server.storage.rows import StoredJob
from bso_server.storage.transaction import Transaction
from zeus_plugins.protocol import TrialState

_LEAST_WIDTH = 100
_MOST_BINS = 50

# The middle of the runs: four in five of them.
_QUANTILES = (0.1, 0.5, 0.9)

_CACHED_JOBS = 200


@dataclass(frozen=True, slots=True)
class _Settled:
    """The trials up to the last whole bin.

    Attributes:
        version: That of the job, with the number of the last of them and of its trials that were set aside.
        event: The job's latest event by then.
        tallies: Theirs.
        bins: Theirs.
    """

    version: tuple[str | None, datetime, int, int]
    event: int
    tallies: Sequence[Tally]
    bins: tuple[TrialBin, ...]


class OlderTrials:
    """The trials before the latest ones, of which hardly any changes any more, so that most are read once."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Settled] = OrderedDict()
        # Transactions run in several threads.
        self._lock = threading.Lock()

    def look(
        self, transaction: Transaction, stored: StoredJob, alive: Sequence[TrialRecord], older: int
    ) -> tuple[list[Tally], tuple[TrialBin, ...]]:
        """The tallies of all trials of a job, and the bins of the first ones, so many of them."""
        width, job_id = _width(older), stored.job_id
        last = older // width * width
        if not last:
            return stored_views.tallies(transaction, job_id), _bins(transaction, stored, 1, older, width)
        settled = self._settled(transaction, stored, alive, last, width)
        rest = stored_views.tallies(transaction, job_id, first=last + 1)
        return [*settled.tallies, *rest], settled.bins + _bins(transaction, stored, last + 1, older, width)

    def _settled(
        self, transaction: Transaction, stored: StoredJob, alive: Sequence[TrialRecord], last: int, width: int
    ) -> _Settled:
        job_id = stored.job_id
        withdrawn = stored_views.withdrawn_count(transaction, job_id)
        version = (stored.registration.registration_id, stored.created_at, last, withdrawn)
        with self._lock:
            known = self._known.get(job_id)
        if known is not None and known.version == version and not any(each.trial_number <= last for each in alive):
            # One that was alive, or was brought back to life, has ended since.
            changed = stored_views.first_ended_after(transaction, job_id, known.event)
            if changed is None or changed > last:
                return known
        tallies = stored_views.tallies(transaction, job_id, last=last)
        bins = _bins(transaction, stored, 1, last, width)
        found = _Settled(version, stored.event_count, tallies, bins)
        with self._lock:
            self._known[job_id] = found
            self._known.move_to_end(job_id)
            if len(self._known) > _CACHED_JOBS:
                self._known.popitem(last=False)
        return found


def _width(older: int) -> int:
    """Trials in a bin: a hundred, doubled until there are few bins."""
    width = _LEAST_WIDTH
    while older > width * _MOST_BINS:
        width *= 2
    return width


def _bins(transaction: Transaction, stored: StoredJob, first: int, last: int, width: int) -> tuple[TrialBin, ...]:
    found: dict[int, list[float]] = {start: [] for start in range(first, last + 1, width)}
    cost_j = stored.registration.cost_j
    for number, state, time_s, energy_j in stored_views.consumption_between(transaction, stored.job_id, first, last):
        if state is TrialState.COMPLETED and time_s is not None and energy_j is not None:
            found[first + (number - first) // width * width].append(cost_j(time_s=time_s, energy_j=energy_j))
    return tuple(_bin(start, min(start + width - 1, last), costs) for start, costs in found.items())


def _bin(first: int, last: int, costs_j: Sequence[float]) -> TrialBin:
    low_j, median_j, high_j = np.quantile(costs_j, _QUANTILES).tolist() if costs_j else (None, None, None)
    return TrialBin(first, last, len(costs_j), low_j, median_j, high_j)
