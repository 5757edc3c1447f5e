"""What Prometheus reads: counts of what happens in a server, and totals of its database; see `docs/metrics.md`.

With several processes, each keeps its counts in files of its own in the directory that ``PROMETHEUS_MULTIPROC_DIR``
names, and whichever of them is asked adds them up: the multiprocess mode of ``prometheus_client``. Nothing is lost when
a process ends, no process has to collect, and an increment writes to memory that is mapped from a file.

The totals are read when somebody asks for the metrics and what is known is older than `PERIOD_S`, beside the requests:
who asks waits `_WAIT_S` for them and then gets what was known before. A reading that has taken long is followed by a
longer rest, so that it takes a tenth of the time at most. With several processes the one that has read leaves the
totals in their directory for the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import Context
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from http import HTTPMethod
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from bso_server.core.occurrences import (
    CallerRefused,
    Occurrence,
    Outcome,
    Refusal,
    ReportsCommitted,
    TransactionDone,
    TrialEnded,
    TrialStarted,
)
from bso_server.errors import BsoError
from bso_server.metrics import DIRECTORY_VARIABLE
from bso_server.service.health import JobTotals
from bso_server.service.reading import version_view
from zeus_plugins.protocol import FINAL, OWN_POLICIES, Origin, Stage, TrialState

UNROUTED = "none"
"""The route of requests that lead to none."""

_OTHER_METHOD = "other"

# Whoever calls may write anything there.
_METHODS = frozenset(HTTPMethod)

# Of transactions, by whether they may write.
_KINDS = ("read", "write")

_REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TRANSACTION_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 3.0)
_GROUP = (1, 2, 5, 10, 20, 50, 100, 200)

# They double the number of series, and Prometheus finds resets by itself.
disable_created_metrics()  # type: ignore[no-untyped-call]  # a function of the library without types


class Instruments:
    """The counts of this process, and of the other processes of its server."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._requests = histogram(
            "zeus_bso_http_request_duration_seconds",
            "HTTP request duration in seconds.",
            ("method", "route", "status"),
            buckets=_REQUEST_S,
        )
        self._transactions = counter("zeus_bso_transactions", "Ended database transactions.", ("kind", "outcome"))
        self._transaction_times = histogram(
            "zeus_bso_transaction_duration_seconds",
            "Duration of database transactions in seconds, with all attempts and waits.",
            ("kind",),
            buckets=_TRANSACTION_S,
        )
        self._repeats = counter("zeus_bso_transaction_repeats", "Attempts at transactions that the database broke off.")
        self._groups = histogram("zeus_bso_report_group_size", "Reports in one transaction.", buckets=_GROUP)
        self._suggestions = counter("zeus_bso_suggestions", "Trials that were started.", ("policy", "origin"))
        self._ended = counter("zeus_bso_trials_ended", "Trials that have ended.", ("state",))
        self._abandoned = counter("zeus_bso_trials_abandoned", "Trials that were abandoned when their leases ended.")
        self._refused = counter("zeus_bso_auth_failures", "Requests that were turned away.", ("reason",))
        self.totals_errors = counter("zeus_bso_totals_errors", "Failures to read the totals of the database.")
        self._begin_at_nothing()
        directory = os.environ.get(DIRECTORY_VARIABLE)
        self.directory = None if directory is None else Path(directory)
        self.collector: Collector = registry
        if directory is not None:
            self.collector = MultiProcessCollector(None, directory)  # type: ignore[no-untyped-call]  # likewise

    def _begin_at_nothing(self) -> None:
        """Make the series whose labels are known, so that their first increment is seen as one."""
        for kind in _KINDS:
            self._transaction_times.labels(kind)
            for outcome in Outcome:
                self._transactions.labels(kind, outcome.value)
        for policy in OWN_POLICIES:
            for origin in Origin:
                self._suggestions.labels(policy, origin.value)
        for state in sorted(FINAL):
            self._ended.labels(state.value)
        for reason in Refusal:
            self._refused.labels(reason.value)

    def request_done(self, method: str, route: str | None, status: int, duration_s: float) -> None:
        """Count a request to a route's template, None for those that lead to no route."""
        known = method if method in _METHODS else _OTHER_METHOD
        self._requests.labels(known, route or UNROUTED, status).observe(duration_s)

    def hear(self, occurrence: Occurrence) -> None:
        """Count an occurrence: a `core.occurrences.Listener`."""
        match occurrence:
            case TransactionDone(writes, outcome, duration_s, repeats):
                self._transactions.labels(_KINDS[writes], outcome.value).inc()
                self._transaction_times.labels(_KINDS[writes]).observe(duration_s)
                if repeats:
                    self._repeats.inc(repeats)
            case ReportsCommitted(0):
                pass
            case ReportsCommitted(reports):
                self._groups.observe(reports)
            case TrialStarted(policy, origin):
                self._suggestions.labels(policy, origin.value).inc()
            case TrialEnded(TrialState.ABANDONED):
                self._abandoned.inc()
            case TrialEnded(state):
                self._ended.labels(state.value).inc()
            case CallerRefused(reason):
                self._refused.labels(reason.value).inc()


PERIOD_S = 15.0
"""Seconds for which totals count as new."""

MOST_JOBS = 200
"""Jobs that are told of by name at most."""

_WAIT_S = 1.0
_DEADLINE_S = 60.0
# A rest is so many times as long as the reading before it.
_REST = 9.0

_FILE = "totals.json"

logger = logging.getLogger("bso_server")

Samples = dict[str, list[tuple[list[str], float]]]
"""The values of each metric by its labels' values."""

# Each metric: its description and its labels.
_FAMILIES = {
    "zeus_bso_jobs": ("Jobs.", ("policy", "stage")),
    "zeus_bso_trials": ("Trials.", ("state",)),
    "zeus_bso_silent_trials": ("Trials whose leases have run out and that nobody has abandoned.", ()),
    "zeus_bso_energy_joules": ("Energy that all trials have taken, as far as they have reported.", ()),
    "zeus_bso_saved_energy_joules": ("Energy saved over the default batch sizes, where that is known.", ()),
    "zeus_bso_saved_time_seconds": ("Time of trainings saved likewise.", ()),
    "zeus_bso_saved_cost_joules": ("Cost saved likewise.", ()),
    "zeus_bso_job_trials": ("Trials of a job.", ("job", "state")),
    "zeus_bso_job_energy_joules": ("Energy that the trials of a job have taken.", ("job",)),
    "zeus_bso_job_saved_energy_joules": ("Energy that a job has saved, if that is known.", ("job",)),
    "zeus_bso_job_saved_cost_joules": ("Cost that a job has saved, if that is known.", ("job",)),
    "zeus_bso_unnamed_jobs": ("Jobs that ZEUS_BSO_METRICS_JOBS names beyond the 200 that are told of.", ()),
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The totals as they were read.

    Attributes:
        read_at: Seconds since 1970.
        took_s: Seconds that the reading took.
        samples: The values.
    """

    read_at: float
    took_s: float
    samples: Samples = field(default_factory=dict)

    def is_new(self, now: float) -> bool:
        """Return whether the totals need not be read again; a clock that was set back makes them old."""
        return 0 <= now - self.read_at < max(PERIOD_S, _REST * self.took_s)


class DatabaseMetrics:
    """The totals of the database, as they were read last.

    Args:
        read: Reads the totals of all jobs by their ids.
        errors: Counts readings that failed.
        named: Pattern of the ids of jobs that are told of by name, such as ``nightly-*``; None: none are.
        directory: Shared by the processes of this server, if there are several: what one has read, the others find.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Mapping[str, JobTotals]]],
        errors: Counter,
        *,
        named: str | None = None,
        directory: Path | None = None,
    ) -> None:
        self._read = read
        self._errors = errors
        self._named = named
        self._file = None if directory is None else directory / _FILE
        self._known: Snapshot | None = None
        self._rests_until = 0.0
        self._reading: asyncio.Task[None] | None = None

    async def collector(self) -> Collector:
        """The totals that are known, read anew first if they are old and that takes no longer than `_WAIT_S`."""
        now = time.time()
        if self._reading is None and time.monotonic() >= self._rests_until and not self._has_new(now):
            # Of no request: its deadlines are not that of the reading, which goes on when somebody has left.
            self._reading = asyncio.get_running_loop().create_task(self._refresh(), context=Context())
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_WAIT_S)
        return _Gauges(self._known)

    async def close(self) -> None:
        """End a reading that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    def _has_new(self, now: float) -> bool:
        if self._known is not None and self._known.is_new(now):
            return True
        left = None if self._file is None else _left_in(self._file)
        if left is None or not left.is_new(now):
            return False
        self._known = left
        return True

    async def _refresh(self) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                totals = await self._read()
            took_s = time.monotonic() - begun
            self._known = Snapshot(time.time(), took_s, samples_of(totals, self._named))
            if self._file is not None:
                _leave(self._known, self._file)
        except Exception as error:
            # Whatever it is, there are other metrics to be told, and the next reading may fare better.
            self._errors.inc()
            self._rests_until = time.monotonic() + PERIOD_S
            expected = isinstance(error, BsoError | TimeoutError)
            logger.warning("could not read totals for the metrics: %s", error, exc_info=None if expected else error)
        finally:
            self._reading = None


class _Gauges(Collector):
    """A snapshot of the totals as metrics; no metrics without a snapshot."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        if self._snapshot is None:
            return
        for name, values in self._snapshot.samples.items():
            description, labels = _FAMILIES[name]
            family = GaugeMetricFamily(name, description, labels=labels)
            for label_values, value in values:
                family.add_metric(label_values, value)
            yield family
        age_s = max(0.0, time.time() - self._snapshot.read_at)
        yield GaugeMetricFamily("zeus_bso_totals_age_seconds", "Time since the totals were read.", value=age_s)


def samples_of(totals: Mapping[str, JobTotals], named: str | None) -> Samples:
    """The values of all metrics of these jobs, and of each of those jobs that the pattern names."""
    everything = list(totals.values())
    jobs: dict[tuple[str, str], int] = {(policy, stage): 0 for policy in OWN_POLICIES for stage in Stage}
    trials: dict[str, int] = dict.fromkeys(TrialState, 0)
    for each in everything:
        jobs[each.policy, each.stage] = jobs.get((each.policy, each.stage), 0) + 1
        for state, count in each.trials.items():
            trials[state] += count
    samples: Samples = {
        "zeus_bso_jobs": [(list(labels), count) for labels, count in jobs.items()],
        "zeus_bso_trials": [([state], count) for state, count in trials.items()],
        "zeus_bso_silent_trials": _alone(each.silent for each in everything),
        "zeus_bso_energy_joules": _alone(each.energy_j for each in everything),
        "zeus_bso_saved_energy_joules": _alone(each.saved_energy_j for each in everything),
        "zeus_bso_saved_time_seconds": _alone(each.saved_time_s for each in everything),
        "zeus_bso_saved_cost_joules": _alone(each.saved_cost_j for each in everything),
    }
    if named is not None:
        chosen = [job_id for job_id in totals if fnmatchcase(job_id, named)]
        samples |= _samples_by_job({job_id: totals[job_id] for job_id in chosen[:MOST_JOBS]})
        samples["zeus_bso_unnamed_jobs"] = [([], max(0, len(chosen) - MOST_JOBS))]
    return samples


def _alone(values: Iterable[float | None]) -> list[tuple[list[str], float]]:
    return [([], sum(value for value in values if value is not None))]


def _samples_by_job(jobs: Mapping[str, JobTotals]) -> Samples:
    known: dict[str, dict[str, float | None]] = {
        "zeus_bso_job_energy_joules": {job_id: job.energy_j for job_id, job in jobs.items()},
        "zeus_bso_job_saved_energy_joules": {job_id: job.saved_energy_j for job_id, job in jobs.items()},
        "zeus_bso_job_saved_cost_joules": {job_id: job.saved_cost_j for job_id, job in jobs.items()},
    }
    trials = [([job_id, state], float(count)) for job_id, job in jobs.items() for state, count in job.trials.items()]
    return {"zeus_bso_job_trials": trials} | {
        name: [([job_id], value) for job_id, value in values.items() if value is not None]
        for name, values in known.items()
    }


def _leave(snapshot: Snapshot, file: Path) -> None:
    """Leave what was read for the other processes, whole or not at all."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(snapshot)))
    part.replace(file)


def _left_in(file: Path) -> Snapshot | None:
    try:
        left: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return Snapshot(**left)


async def exposition(instruments: Instruments, database: DatabaseMetrics) -> bytes:
    """Return the text of all metrics, in version 0.0.4 of Prometheus's format."""
    registry = CollectorRegistry()
    registry.register(_Build())
    registry.register(instruments.collector)
    registry.register(await database.collector())
    # A hundred files take some milliseconds, for which nobody is to wait.
    return await asyncio.to_thread(generate_latest, registry)


class _Build(Collector):
    def collect(self) -> Iterator[Metric]:
        view = version_view()
        values = {"version": view.version, "schema": view.schema_revision, "python": platform.python_version()}
        yield InfoMetricFamily("zeus_bso_build", "The running version.", value=values)
