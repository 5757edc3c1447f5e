"""Metrics for Prometheus: counts of the events in a server, and totals of its database; see `docs/metrics.md`.

If the totals are older than `PERIOD_S`, a scrape starts to read them from the database, and waits for the reading up to
`_WAIT_S`. If the reading takes longer, the scrape returns the previous totals. After a long reading, the pause before
the next one is longer, so that readings take at most a tenth of the time.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import Context
from fnmatch import fnmatchcase
from functools import partial
from http import HTTPMethod
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bso_server.core.occurrences import (
    CallerRefused,
    Occurrence,
    Outcome,
    Refusal,
    TransactionDone,
    TrialEnded,
    TrialStarted,
)
from bso_server.errors import BsoError
from bso_server.service.health import JobTotals
from bso_server.service.reading import version_view
from zeus_plugins.protocol import FINAL, OWN_POLICIES, Origin, SavingsWord, Stage, TrialState

_METHODS = frozenset(HTTPMethod)

# Label of transactions, indexed by whether they may write.
_KINDS = ("read", "write")

_REQUEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TRANSACTION_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 3.0)

# Metrics of creation times would double the number of series, and Prometheus detects resets without them.
disable_created_metrics()  # type: ignore[no-untyped-call]  # a function of the library without types


class Metrics:
    """All metrics of a server: its counts, and the totals of its database; see `DatabaseMetrics` for the arguments."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, JobTotals]]], named: str | None) -> None:
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
        self._suggestions = counter("zeus_bso_suggestions", "Trials that were started.", ("policy", "origin"))
        self._ended = counter("zeus_bso_trials_ended", "Trials that have ended.", ("state",))
        self._abandoned = counter("zeus_bso_trials_abandoned", "Trials that were abandoned when their leases ended.")
        self._refused = counter("zeus_bso_auth_failures", "Requests that were turned away.", ("reason",))
        errors = counter("zeus_bso_totals_errors", "Failures to read the totals of the database.")
        self._begin_at_nothing()
        self._database = DatabaseMetrics(read, errors, named)
        registry.register(self._database)
        view = version_view()
        Info("zeus_bso_build", "The running version.", registry=registry).info(
            {"version": view.version, "schema": view.schema_revision, "python": platform.python_version()}
        )
        self._registry = registry

    def _begin_at_nothing(self) -> None:
        """Create the series with known labels at 0, so that Prometheus sees their first increment."""
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
        """Count a request; `route` is the template of its path, or None for an unknown route."""
        # Clients may send any text as a method, and each would become a series.
        known = method if method in _METHODS else "other"
        self._requests.labels(known, route or "none", status).observe(duration_s)

    def hear(self, occurrence: Occurrence) -> None:
        """Count an occurrence: a `core.occurrences.Listener`."""
        match occurrence:
            case TransactionDone(writes, outcome, duration_s):
                self._transactions.labels(_KINDS[writes], outcome.value).inc()
                self._transaction_times.labels(_KINDS[writes]).observe(duration_s)
            case TrialStarted(policy, origin):
                self._suggestions.labels(policy, origin.value).inc()
            case TrialEnded(TrialState.ABANDONED):
                self._abandoned.inc()
            case TrialEnded(state):
                self._ended.labels(state.value).inc()
            case CallerRefused(reason):
                self._refused.labels(reason.value).inc()

    async def exposition(self) -> bytes:
        """Return the text of all metrics, in version 0.0.4 of Prometheus's format."""
        await self._database.refresh()
        return generate_latest(self._registry)

    async def close(self) -> None:
        """Cancel the reading of totals."""
        await self._database.close()


PERIOD_S = 15.0
"""Seconds during which totals count as current."""

MOST_JOBS = 200
"""Maximum number of jobs whose metrics name them."""

_WAIT_S = 1.0
_DEADLINE_S = 60.0
# Minimum pause after a reading, in multiples of its duration.
_REST = 9.0

logger = logging.getLogger("bso_server")

Samples = dict[str, list[tuple[list[str], float]]]
"""Values of each metric with the values of its labels."""

# Description and labels of each metric.
_FAMILIES = {
    "zeus_bso_jobs": ("Jobs.", ("policy", "stage")),
    "zeus_bso_trials": ("Trials.", ("state",)),
    "zeus_bso_silent_trials": ("Trials with an expired lease that are not abandoned yet.", ()),
    "zeus_bso_energy_joules": ("Energy that all trials have taken, as far as they have reported.", ()),
    "zeus_bso_verdicts": ("Jobs whose best batch size saves, loses, or has not been shown to.", ("verdict",)),
    "zeus_bso_stuck_jobs": ("Jobs of which every batch size has missed the target.", ()),
    "zeus_bso_cost_changed_jobs": ("Jobs whose last two runs cost more, or less, than earlier ones.", ("change",)),
    "zeus_bso_saved_energy_joules": ("Energy saved over the default batch sizes, by jobs that have paid it back.", ()),
    "zeus_bso_saved_time_seconds": ("Training time saved over the default sizes, by jobs that have paid it back.", ()),
    "zeus_bso_saved_cost_joules": ("Cost saved over the default batch sizes, by jobs that have paid it back.", ()),
    "zeus_bso_job_trials": ("Trials of a job.", ("job_id", "state")),
    "zeus_bso_job_energy_joules": ("Energy that the trials of a job have taken.", ("job_id",)),
    "zeus_bso_job_saved_energy_joules": ("Energy that a job has saved, once it is paid back.", ("job_id",)),
    "zeus_bso_job_saved_cost_joules": ("Cost that a job has saved, once it is paid back.", ("job_id",)),
    "zeus_bso_job_verdict": ("Verdict on a job: 1 if it saves, -1 if it loses, 0 if neither is shown.", ("job_id",)),
    "zeus_bso_job_stuck": ("1 if every batch size of a job has missed the target, otherwise 0.", ("job_id",)),
    "zeus_bso_job_cost_change": ("Share by which the last two runs of a job cost more than earlier ones.", ("job_id",)),
    "zeus_bso_unnamed_jobs": ("Jobs matched by ZEUS_BSO_METRICS_JOBS beyond the first 200, which have no metrics.", ()),
}

# Figures of a job behind the sums over all jobs, and behind the metrics of a job.
_SUMS: dict[str, Callable[[JobTotals], float | None]] = {
    "zeus_bso_silent_trials": attrgetter("silent"),
    "zeus_bso_stuck_jobs": lambda job: job.verdict.stuck is not None,
    "zeus_bso_energy_joules": attrgetter("energy_j"),
    "zeus_bso_saved_energy_joules": attrgetter("verdict.savings.energy_j.saved"),
    "zeus_bso_saved_time_seconds": attrgetter("verdict.savings.time_s.saved"),
    "zeus_bso_saved_cost_joules": attrgetter("verdict.savings.cost_j.saved"),
}
_OF_A_JOB: dict[str, Callable[[JobTotals], float | None]] = {
    "zeus_bso_job_energy_joules": _SUMS["zeus_bso_energy_joules"],
    "zeus_bso_job_saved_energy_joules": _SUMS["zeus_bso_saved_energy_joules"],
    "zeus_bso_job_saved_cost_joules": _SUMS["zeus_bso_saved_cost_joules"],
    "zeus_bso_job_stuck": _SUMS["zeus_bso_stuck_jobs"],
    "zeus_bso_job_cost_change": attrgetter("verdict.drift"),
}
_SIGN_OF = {SavingsWord.SAVES: 1, SavingsWord.NOT_SHOWN: 0, SavingsWord.LOSES: -1}


class DatabaseMetrics(Collector):
    """Totals of the database as metrics; none before the first reading.

    Args:
        read: Reads the totals of all jobs, by job id.
        errors: Counts failed readings.
        named: Pattern of the ids of jobs whose metrics name them, such as ``nightly-*``; None: no job.
    """

    def __init__(
        self, read: Callable[[], Awaitable[Mapping[str, JobTotals]]], errors: Counter, named: str | None = None
    ) -> None:
        self._read = read
        self._errors = errors
        self._named = named
        self._samples: Samples = {}
        self._read_at = self._rests_until = 0.0
        self._reading: asyncio.Task[None] | None = None

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        if not self._samples:
            return
        for name, values in self._samples.items():
            description, labels = _FAMILIES[name]
            family = GaugeMetricFamily(name, description, labels=labels)
            for label_values, value in values:
                family.add_metric(label_values, value)
            yield family
        age_s = time.monotonic() - self._read_at
        yield GaugeMetricFamily("zeus_bso_totals_age_seconds", "Time since the totals were read.", value=age_s)

    async def refresh(self) -> None:
        """Start to read the totals if they are old; wait for the reading up to `_WAIT_S`."""
        if self._reading is None and time.monotonic() >= self._rests_until:
            # A new context, because the reading may outlive this request and must not share its deadline.
            self._reading = asyncio.get_running_loop().create_task(self._read_totals(), context=Context())
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_WAIT_S)

    async def close(self) -> None:
        """Cancel the current reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _read_totals(self) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                totals = await self._read()
            self._samples, self._read_at = samples_of(totals, self._named), time.monotonic()
            self._rests_until = self._read_at + max(PERIOD_S, _REST * (self._read_at - begun))
        except Exception as error:
            # Other metrics must be served despite any error, and the next reading may succeed.
            self._errors.inc()
            self._rests_until = time.monotonic() + PERIOD_S
            expected = isinstance(error, BsoError | TimeoutError)
            logger.warning("could not read totals for the metrics: %s", error, exc_info=None if expected else error)
        finally:
            self._reading = None


def samples_of(totals: Mapping[str, JobTotals], named: str | None) -> Samples:
    """Return the values of all metrics of these jobs, and of each job whose id matches the pattern `named`."""
    jobs: dict[tuple[str, str], int] = {(policy, stage): 0 for policy in OWN_POLICIES for stage in Stage}
    trials: dict[str, int] = dict.fromkeys(TrialState, 0)
    verdicts: dict[str, int] = dict.fromkeys(SavingsWord, 0)
    for each in totals.values():
        jobs[each.policy, each.stage] = jobs.get((each.policy, each.stage), 0) + 1
        verdicts[each.verdict.savings.word] += 1
        for state, count in each.trials.items():
            trials[state] += count
    samples: Samples = {
        "zeus_bso_jobs": [(list(labels), count) for labels, count in jobs.items()],
        "zeus_bso_verdicts": [([word], count) for word, count in verdicts.items()],
        "zeus_bso_trials": [([state], count) for state, count in trials.items()],
        "zeus_bso_cost_changed_jobs": [
            (["more"], sum((each.verdict.drift or 0) > 0 for each in totals.values())),
            (["less"], sum((each.verdict.drift or 0) < 0 for each in totals.values())),
        ],
    }
    for name, total in _SUMS.items():
        samples[name] = [([], sum(total(each) or 0 for each in totals.values()))]
    if named is not None:
        matching = [job_id for job_id in totals if fnmatchcase(job_id, named)]
        shown = {job_id: totals[job_id] for job_id in matching[:MOST_JOBS]}
        samples["zeus_bso_job_trials"] = [
            ([job_id, state], count) for job_id, job in shown.items() for state, count in job.trials.items()
        ]
        samples["zeus_bso_job_verdict"] = [
            ([job_id], _SIGN_OF[job.verdict.savings.word]) for job_id, job in shown.items()
        ]
        for name, total in _OF_A_JOB.items():
            values = {job_id: total(job) for job_id, job in shown.items()}
            samples[name] = [([job_id], value) for job_id, value in values.items() if value is not None]
        samples["zeus_bso_unnamed_jobs"] = [([], len(matching) - len(shown))]
    return samples
