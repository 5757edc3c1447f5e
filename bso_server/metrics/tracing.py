"""Traces by OpenTelemetry: a span for each request and for each transaction.

The environment variables of OpenTelemetry, such as ``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_TRACES_SAMPLER``, set
the destination and the sampling of the spans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus

from bso_server.core.occurrences import Occurrence, Outcome, TransactionDone
from bso_server.metrics.logs import TRACE_ID
from zeus_plugins.protocol import package_version

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ValueError(
        f"ZEUS_BSO_TRACING needs OpenTelemetry, and {error.name} is not installed: run "
        "pip install 'zeus-plugins[otel]', or take the setting away"
    ) from error

_NS = 1_000_000_000

# After a signal, the server's process ends within nine seconds, in which it must also close its database.
_FAREWELL_S = 2.0


class Tracing:
    """Spans of a server; `exporter` receives them, by default over OTLP and HTTP."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        resource = Resource({SERVICE_NAME: "zeus-bso"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource)
        self._exporter = exporter or OTLPSpanExporter()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("bso_server", package_version())
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[Callable[[str, str | None, int], None]]:
        """Trace a request as a part of the trace in its ``traceparent`` header."""
        parent = self._propagator.extract({name.decode("latin-1"): value.decode("latin-1") for name, value in headers})
        # Exceptions are not recorded, because their texts may name jobs; the status of the response marks errors.
        with self._tracer.start_as_current_span(
            "request", parent, trace.SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            known_as = TRACE_ID.set(trace.format_trace_id(span.get_span_context().trace_id))
            try:
                yield partial(_end_span, span)
            finally:
                TRACE_ID.reset(known_as)

    def hear(self, occurrence: Occurrence) -> None:
        """Trace a transaction that has ended; a `core.occurrences.Listener`."""
        if isinstance(occurrence, TransactionDone):
            now = time.time_ns()
            kind = "write" if occurrence.writes else "read"
            span = self._tracer.start_span(
                f"transaction {kind}",
                kind=trace.SpanKind.CLIENT,
                attributes={"zeus_bso.outcome": occurrence.outcome.value, "zeus_bso.repeats": occurrence.repeats},
                start_time=now - int(occurrence.duration_s * _NS),
            )
            if occurrence.outcome in {Outcome.UNAVAILABLE, Outcome.FAILED}:
                span.set_status(trace.StatusCode.ERROR)
            span.end(now)

    def close(self) -> None:
        """Export the remaining spans within `_FAREWELL_S` seconds, because the collector may be unreachable."""
        limit = threading.Timer(_FAREWELL_S, self._exporter.shutdown)
        limit.start()
        self._provider.shutdown()
        limit.cancel()


def _end_span(span: trace.Span, method: str, route: str | None, status: int) -> None:
    """Name the span of a request after its route; the route's template contains no job id."""
    span.update_name(method if route is None else f"{method} {route}")
    span.set_attribute("http.request.method", method)
    span.set_attribute("http.response.status_code", status)
    if route is not None:
        span.set_attribute("http.route", route)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(trace.StatusCode.ERROR)
