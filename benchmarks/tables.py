"""The results as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.growth import BLOCK_REQUESTS, Cost, GrowthFigures
from benchmarks.load import LoadFigures
from benchmarks.marks import Mark
from benchmarks.overhead import OverheadFigures, Ratio
from benchmarks.pages import PageFigures
from benchmarks.starts import StartFigures
from benchmarks.suite import Results, Skipped
from benchmarks.watching import WatchFigures

LOAD_COLUMNS = (
    *("server", "clients", "request", "n", "answers", "req/s"),
    *("server CPU ms", "least", "generator CPU ms", "p50 ms", "p95 ms", "p99 ms"),
)
GROWTH_COLUMNS = ("trials", "request", "n", "server CPU ms", "/ at 10", "p50 ms", "/ at 10")
OVERHEAD_COLUMNS = ("framework", "epochs", "steps", "epoch without ms", "epoch with ms", "report ms", "ratio", "of CPU")
NUMBER = re.compile(r"[\d.]+|–")
MARK_COLUMNS = ("mark", "goal", "measured", "result")


def text(results: Results, marks: Sequence[Mark]) -> str:
    """All tables."""
    return "\n".join(_lines(results, marks))


def _lines(results: Results, marks: Sequence[Mark]) -> Iterator[str]:
    machine, shape = results.machine, results.plan.shape
    yield f"{results.started_at}, {results.database}, {', '.join(f'{name} {of}' for name, of in machine.items())}"
    yield ""
    yield (
        f"Under load: {shape.jobs} jobs × {shape.concurrency} concurrent trials × {shape.epochs} epochs, "
        f"{results.load[0].rounds} of {shape.rounds} rounds"
    )
    yield from _load_table(results.load)
    yield f"One client: {shape.epochs} epochs, {results.one_client[0].rounds} of {shape.rounds} rounds"
    yield from _load_table(results.one_client)
    yield "Policy gp_voi: trials of a few epochs, with as many clients as under load"
    yield from _load_table((results.gp_voi,))
    yield "Peer: under load, then one client"
    yield from _load_table(results.peer)
    yield "Growth of one job, one client"
    yield from _growth_table(results.growth)
    yield "One and two workers under load"
    yield from _load_table(results.workers)
    yield "SQLite in threads (sqlite://) and over aiosqlite (sqlite+aiosqlite://) under load"
    yield from _load_table(results.drivers)
    yield from _driver_ratio(results.drivers)
    yield "SQLite and other databases under load"
    yield from _load_table(results.databases)
    yield f"The quickest of {results.starts.times} starts"
    yield from _start_lines(results.starts)
    yield "Ids, metrics and traces, without HTTP"
    yield from _watching_lines(results.watching)
    yield f"The dashboard with {results.pages.jobs} jobs, ms of server CPU"
    yield from _page_lines(results.pages)
    yield "Epochs of a training without and with the callback"
    yield from _overhead_table(results.overhead)
    yield "Marks"
    yield from _table(MARK_COLUMNS, [(mark.what, mark.limit, _number(mark.measured), mark.outcome) for mark in marks])


def _load_table(servers: Sequence[LoadFigures] | Skipped) -> Iterator[str]:
    if isinstance(servers, Skipped):
        yield f"  skipped: {servers.skipped}"
        yield ""
        return
    rows = [
        (
            server.target,
            str(server.clients),
            route.route,
            str(route.requests),
            " ".join(f"{n}×{status}" for status, n in route.answers.items()),
            f"{route.requests_per_s:.0f}",
            *map(_number, (route.server_cpu_ms, route.least_cpu_ms)),
            *map(_number, (route.generator_cpu_ms, route.p50_ms, route.p95_ms, route.p99_ms)),
        )
        for server in servers
        for route in server.routes
    ]
    yield from _table(LOAD_COLUMNS, rows)
    resident = (f"{server.target} {_mib(server.rss_mib)}" for server in servers)
    yield f"  resident memory afterwards: {', '.join(resident)}"
    yield ""


def _driver_ratio(drivers: Sequence[LoadFigures] | Skipped) -> Iterator[str]:
    if isinstance(drivers, Skipped):
        return
    threads_ms, aiosqlite_ms = (server.server_cpu_ms for server in drivers)
    if threads_ms is not None and aiosqlite_ms is not None:
        yield f"  server CPU per request over all routes, aiosqlite / in threads: {aiosqlite_ms / threads_ms:.2f}"
        yield ""


def _start_lines(starts: StartFigures) -> Iterator[str]:
    yield f"  server: {_number(starts.server_s)} s until it listens, {_number(starts.server_cpu_s)} s of CPU time"
    yield (
        f"  in a training's process: {_number(starts.embedded_s)} s of CPU time for the first request, "
        f"{_number(starts.embedded_imports_s)} s for the imports before it"
    )
    yield ""


def _watching_lines(watching: WatchFigures) -> Iterator[str]:
    yield (
        f"  ms of CPU a report: metrics {_number(watching.alone_ms)} in one process, {_number(watching.several_ms)} in "
        f"one of several; traces {_number(watching.traced_ms)}"
    )
    yield ""


def _page_lines(pages: PageFigures) -> Iterator[str]:
    yield f"  the first page of all: {_number(pages.first_ms)}"
    yield f"  a list of jobs that nobody has looked at: {_number(pages.overview_ms)}, again: {_number(pages.again_ms)}"
    yield (
        f"  a poll that finds no change: {_number(pages.poll_ms)} of a job, {_number(pages.overview_poll_ms)} of the "
        f"list; the bare route: {_number(pages.bare_ms)}"
    )
    yield ""


def _growth_table(growth: GrowthFigures | Skipped) -> Iterator[str]:
    if isinstance(growth, Skipped):
        yield f"  skipped: {growth.skipped}"
        yield ""
        return
    rows = [
        (str(point.trials), kind, str(times), *_cost_cells(cost))
        for point in growth.points
        for kind, times, cost in (
            ("suggest", point.requests, point.suggest),
            ("final report", point.requests, point.final_report),
            ("page", point.requests // BLOCK_REQUESTS, point.page),
        )
    ]
    yield from _table(GROWTH_COLUMNS, rows)
    yield f"  size of the last page as sent: {growth.points[-1].page_bytes / 1024:.1f} KiB"
    if growth.note is not None:
        yield f"  {growth.note}"
    yield ""


def _overhead_table(frameworks: Mapping[str, OverheadFigures | Skipped]) -> Iterator[str]:
    rows = []
    for name, figures in frameworks.items():
        if isinstance(figures, Skipped):
            yield f"  {name} skipped: {figures.skipped}"
            continue
        times_ms = (figures.without_ms, figures.with_ms, figures.report_ms)
        cells = (
            str(figures.epochs),
            str(figures.steps),
            *map(_number, times_ms),
            _ratio(figures.wall),
            _ratio(figures.cpu),
        )
        rows.append((name, *cells))
    if rows:
        yield from _table(OVERHEAD_COLUMNS, rows)
    yield ""


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ± {ratio.error:.3f}"


def _cost_cells(cost: Cost) -> tuple[str, ...]:
    return tuple(map(_number, (cost.server_cpu_ms, cost.cpu_ratio, cost.p50_ms, cost.p50_ratio)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    numeric = [all(map(NUMBER.fullmatch, cells)) for cells in zip(*rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} MiB"
