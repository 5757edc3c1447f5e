"""The metrics that count what happens. Their names begin with ``zeus_bso_``; `docs/metrics.md` describes each.

With several processes, each keeps its values in files of its own in the directory that ``PROMETHEUS_MULTIPROC_DIR``
names, and whichever of them is asked adds them up: the multiprocess mode of ``prometheus_client``. Nothing is lost when
a process ends, no process has to collect, and an increment writes to memory that is mapped from a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from http import HTTPMethod
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from bso_server.core.watch import (
    CallerRefused,
    Occurrence,
    Outcome,
    Refusal,
    ReportsCommitted,
    TransactionDone,
    TrialEnded,
    TrialStarted,
)
from bso_server.metrics.processes import DIRECTORY_VARIABLE
from zeus_plugins.protocol import FINAL, OWN_POLICIES, Origin, TrialState

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
    """Everything that is counted in this process, and in the others of this server."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._requests = Histogram(
            "zeus_bso_http_request_duration_seconds",
            "Time from a request's first byte of the application to the last of its answer.",
            ("method", "route", "status"),
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._transactions = Counter(
            "zeus_bso_transactions", "Database transactions that are over.", ("kind", "outcome"), registry=registry
        )
        self._transaction_times = Histogram(
            "zeus_bso_transaction_duration_seconds",
            "Time of a database transaction with all of its attempts and waits.",
            ("kind",),
            buckets=_TRANSACTION_S,
            registry=registry,
        )
        self._repeats = Counter(
            "zeus_bso_transaction_repeats",
            "Transactions that the database broke off and that were begun again.",
            registry=registry,
        )
        self._groups = Histogram(
            "zeus_bso_report_group_size",
            "Reports that shared one transaction.",
            buckets=_GROUP,
            registry=registry,
        )
        self._suggestions = Counter(
            "zeus_bso_suggestions", "Trials that were started.", ("policy", "origin"), registry=registry
        )
        self._ended = Counter("zeus_bso_trials_ended", "Trials that have ended.", ("state",), registry=registry)
        self._abandoned = Counter(
            "zeus_bso_trials_abandoned",
            "Times that a trial was given up, as nothing was heard of it.",
            registry=registry,
        )
        self._refused = Counter(
            "zeus_bso_auth_failures", "Requests that were turned away.", ("reason",), registry=registry
        )
        self.totals_errors = Counter(
            "zeus_bso_totals_errors", "Failures to read the totals of the database.", registry=registry
        )
        self._begin_at_nothing()
        directory = os.environ.get(DIRECTORY_VARIABLE)
        self.directory = None if directory is None else Path(directory)
        self.collector: Collector = registry
        if directory is not None:
            self.collector = MultiProcessCollector(None, directory)  # type: ignore[no-untyped-call]  # likewise
        self._requested: dict[tuple[str, str | None, int], Callable[[float], None]] = {}

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
        try:
            observe = self._requested[method, route, status]
        except KeyError:
            observe = self._histogram_of(method, route, status)
        observe(duration_s)

    def _histogram_of(self, method: str, route: str | None, status: int) -> Callable[[float], None]:
        known = method if method in _METHODS else _OTHER_METHOD
        observe = self._requests.labels(known, route or UNROUTED, status).observe
        if known == method:
            # Templates, statuses and methods are few.
            self._requested[method, route, status] = observe
        return observe

    def hear(self, occurrence: Occurrence) -> None:
        """Count an occurrence: a `core.watch.Listener`."""
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
