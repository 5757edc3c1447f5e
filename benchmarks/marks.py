"""The marks that server and callbacks are built to reach, and whether this run saw them reach them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.driver import RouteFigures
from benchmarks.growth import Cost, GrowthFigures
from benchmarks.load import ECHO, EPOCH_REPORT, REGISTER_KNOWN, SUGGEST, LoadFigures
from benchmarks.overhead import OverheadFigures
from benchmarks.pages import PageFigures
from benchmarks.starts import StartFigures
from benchmarks.suite import Results, Skipped
from benchmarks.watching import WatchFigures

ENOUGH_CLIENTS = 16
ENOUGH_ROUNDS = 3
ENOUGH_TRIALS = 5000
ENOUGH_EPOCHS = 20
ENOUGH_STARTS = 3
ENOUGH_BLOCKS = 3
ENOUGH_JOBS = 200

# Ratios to the bare route's CPU time per request, or its throughput, under the same load.
EPOCH_REPORT_RATIO = 1.7
SHARE_OF_BARE_THROUGHPUT = 0.55
ONE_CLIENT_RATIO = 3.5
SUGGEST_RATIO = 10.0
REGISTER_KNOWN_RATIO = 3.0

OTHER_DATABASE_RATIO = 1.3
GROWTH_RATIO = 1.2
PAGE_MS = 30.0
PAGE_KB = 150.0
OVERVIEW_MS = 50.0
POLL_RATIO = 3.0
TWO_WORKERS_SPEED_UP = 1.0
SERVER_START_S = 0.8
EMBEDDED_START_S = 0.3
WATCHING_MS = 0.02
EPOCH_RATIO = 1.01
ENOUGH_PRECISION = 0.01


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark.

    Attributes:
        what: What is compared.
        limit: The goal, with its direction.
        measured: What was measured, or None.
        outcome: ``met``, ``not met`` or ``not judged: `` and why.
    """

    what: str
    limit: str
    measured: float | None
    outcome: str


def judge(results: Results) -> tuple[Mark, ...]:
    """Hold the results against the marks."""
    return (
        *_load_marks(results),
        *_growth_marks(results.growth),
        *_database_marks(results.databases),
        *_page_marks(results.pages),
        _workers_mark(results.workers),
        *_start_marks(results.starts),
        *_watching_marks(results.watching),
        *(overhead_mark(framework, figures) for framework, figures in results.overhead.items()),
    )


def _load_marks(results: Results) -> Iterator[Mark]:
    (server, bare), (alone, bare_alone) = results.load, results.one_client
    reports, echo = server.route(EPOCH_REPORT), bare.route(ECHO)
    under_load, not_judged = f"{ENOUGH_CLIENTS} or more clients, ", _too_little(server, clients=ENOUGH_CLIENTS)
    yield _at_most(f"{under_load}epoch report / bare: CPU", EPOCH_REPORT_RATIO, _ratio(reports, echo), not_judged)
    throughput = reports.requests_per_s / echo.requests_per_s
    yield _at_least(f"{under_load}epoch report / bare: req/s", SHARE_OF_BARE_THROUGHPUT, throughput, not_judged)
    for policy, figures in (("zeus", server), ("gp_voi", results.gp_voi)):
        what = f"{under_load}suggestion by {policy} / bare: CPU"
        yield _at_most(what, SUGGEST_RATIO, _ratio(figures.route(SUGGEST), echo), not_judged)
    known = _ratio(server.route(REGISTER_KNOWN), echo)
    yield _at_most(f"{under_load}known job registered / bare: CPU", REGISTER_KNOWN_RATIO, known, not_judged)
    ratio = _ratio(alone.route(EPOCH_REPORT), bare_alone.route(ECHO))
    yield _at_most("one client, epoch report / bare: CPU", ONE_CLIENT_RATIO, ratio, _too_little(alone, clients=1))


def _database_marks(databases: tuple[LoadFigures, ...] | Skipped) -> Iterator[Mark]:
    if isinstance(databases, Skipped):
        yield _at_most("other databases / SQLite: CPU", OTHER_DATABASE_RATIO, None, databases.skipped)
        return
    sqlite, *others = databases
    for other in others:
        for kind, route in (("epoch report", EPOCH_REPORT), ("suggestion", SUGGEST)):
            ratio = _ratio(other.route(route), sqlite.route(route))
            not_judged = _too_little(other, clients=ENOUGH_CLIENTS)
            yield _at_most(f"{other.target} / SQLite, {kind}: CPU", OTHER_DATABASE_RATIO, ratio, not_judged)


def _start_marks(starts: StartFigures) -> Iterator[Mark]:
    too_few = None if starts.times >= ENOUGH_STARTS else f"{starts.times} starts"
    yield _at_most("server: s until it listens", SERVER_START_S, starts.server_s, too_few)
    what = "server in a training's process: s of CPU beyond imports"
    yield _at_most(what, EMBEDDED_START_S, starts.embedded_s, too_few)


def _watching_marks(watching: WatchFigures) -> Iterator[Mark]:
    too_few = None if watching.blocks >= ENOUGH_BLOCKS else f"{watching.blocks} blocks"
    yield _at_most("metrics of one process: ms of CPU a request", WATCHING_MS, watching.alone_ms, too_few)
    yield _at_most("metrics of several processes: ms of CPU a request", WATCHING_MS, watching.several_ms, too_few)


def _ratio(figures: RouteFigures, others: RouteFigures) -> float | None:
    """By the rounds that took the least CPU time: what else the machine does falls on one more than on the other."""
    if figures.least_cpu_ms is None or others.least_cpu_ms is None:
        return None
    return figures.least_cpu_ms / others.least_cpu_ms


def _too_little(figures: LoadFigures, *, clients: int) -> str | None:
    if figures.clients < clients:
        return f"{figures.clients} clients"
    return None if figures.rounds >= ENOUGH_ROUNDS else f"{figures.rounds} rounds"


def _growth_marks(growth: GrowthFigures | Skipped) -> Iterator[Mark]:
    kinds = {"suggest": "suggest", "final_report": "final report"}
    for field, kind in kinds.items():
        what = f"{kind}, {ENOUGH_TRIALS} trials / 10: server CPU"
        if isinstance(growth, Skipped):
            yield _at_most(what, GROWTH_RATIO, None, growth.skipped)
            continue
        last = growth.points[-1]
        cost: Cost = getattr(last, field)
        yield _at_most(what, GROWTH_RATIO, cost.cpu_ratio, _why_not_judged(growth, cost))
    page = f"page of a job of {ENOUGH_TRIALS} trials"
    what, size = f"{page}: ms of server CPU", f"{page}: kB as sent"
    if isinstance(growth, Skipped):
        yield _at_most(what, PAGE_MS, None, growth.skipped)
        yield _at_most(size, PAGE_KB, None, growth.skipped)
    else:
        last = growth.points[-1]
        too_few = None if last.trials >= ENOUGH_TRIALS else f"{last.trials} trials"
        yield _at_most(what, PAGE_MS, last.page.server_cpu_ms, too_few)
        yield _at_most(size, PAGE_KB, last.page_bytes / 1000, too_few)


def _page_marks(pages: PageFigures) -> Iterator[Mark]:
    too_few = None if pages.jobs >= ENOUGH_JOBS else f"{pages.jobs} jobs"
    yield _at_most(f"list of {ENOUGH_JOBS} jobs, first look: ms of server CPU", OVERVIEW_MS, pages.overview_ms, too_few)
    for what, poll_ms in (("a job", pages.poll_ms), ("the list", pages.overview_poll_ms)):
        ratio = poll_ms / pages.bare_ms if poll_ms and pages.bare_ms else None
        yield _at_most(f"one client, unchanged poll of {what} / bare: CPU", POLL_RATIO, ratio, too_few)


def _why_not_judged(growth: GrowthFigures, cost: Cost) -> str | None:
    trials = growth.points[-1].trials
    too_steep_already = growth.note is not None and cost.cpu_ratio is not None and cost.cpu_ratio > GROWTH_RATIO
    return None if trials >= ENOUGH_TRIALS or too_steep_already else f"{trials} trials"


def _workers_mark(workers: tuple[LoadFigures, ...] | Skipped) -> Mark:
    what = "epoch reports, two workers / one: throughput"
    if isinstance(workers, Skipped):
        return _at_least(what, TWO_WORKERS_SPEED_UP, None, workers.skipped)
    one, two = (figures.route(EPOCH_REPORT).requests_per_s for figures in workers)
    return _at_least(what, TWO_WORKERS_SPEED_UP, two / one, _too_little(workers[0], clients=ENOUGH_CLIENTS))


def overhead_mark(framework: str, figures: OverheadFigures | Skipped) -> Mark:
    """Hold what one framework's callback costs against its mark."""
    what = f"{framework}: (epoch with the callback - a report) / epoch without"
    if isinstance(figures, Skipped):
        return _at_most(what, EPOCH_RATIO, None, figures.skipped)
    not_judged = None
    if figures.epochs < ENOUGH_EPOCHS:
        not_judged = f"{figures.epochs} epochs"
    elif figures.wall.error > ENOUGH_PRECISION:
        not_judged = f"the machine is too restless, ± {figures.wall.error:.3f}"
    return _at_most(what, EPOCH_RATIO, figures.wall.median, not_judged)


def _at_most(what: str, limit: float, measured: float | None, not_judged: str | None) -> Mark:
    met = measured is not None and measured <= limit
    return Mark(what, f"≤ {limit:g}", measured, _outcome(measured, not_judged, met=met))


def _at_least(what: str, limit: float, measured: float | None, not_judged: str | None) -> Mark:
    met = measured is not None and measured >= limit
    return Mark(what, f"≥ {limit:g}", measured, _outcome(measured, not_judged, met=met))


def _outcome(measured: float | None, not_judged: str | None, *, met: bool) -> str:
    if not_judged is not None:
        return f"not judged: {not_judged}"
    if measured is None:
        return "not judged: CPU time is known on Linux only"
    return "met" if met else "not met"
