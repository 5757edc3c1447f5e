"""The marks that server and callbacks are built to reach, and whether this run saw them reach them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.growth import Cost, GrowthFigures
from benchmarks.load import ECHO, EPOCH_REPORT, LoadFigures
from benchmarks.overhead import OverheadFigures
from benchmarks.suite import Results, Skipped

ENOUGH_CLIENTS = 16
ENOUGH_TRIALS = 5000
ENOUGH_EPOCHS = 20

EPOCH_REPORT_CPU_MS = 0.2
SHARE_OF_BARE_THROUGHPUT = 0.5
GROWTH_RATIO = 1.2
TWO_WORKERS_SPEED_UP = 1.5
EPOCH_RATIO = 1.01
ENOUGH_PRECISION = 0.01


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark.

    Attributes:
        what: What is compared.
        limit: The mark, with its direction.
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
        *_load_marks(results.load),
        *_growth_marks(results.growth),
        _workers_mark(results.workers),
        *(overhead_mark(framework, figures) for framework, figures in results.overhead.items()),
    )


def _load_marks(load: tuple[LoadFigures, ...]) -> Iterator[Mark]:
    server, bare = load
    reports, echoes = server.route(EPOCH_REPORT), bare.route(ECHO)
    too_few = None if server.clients >= ENOUGH_CLIENTS else f"{server.clients} clients"
    what = f"epoch report, {ENOUGH_CLIENTS} or more clients: "
    yield _at_most(f"{what}server CPU ms", EPOCH_REPORT_CPU_MS, reports.server_cpu_ms, too_few)
    throughput = reports.requests_per_s / echoes.requests_per_s
    yield _at_least(f"{what}throughput / bare route's", SHARE_OF_BARE_THROUGHPUT, throughput, too_few)


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


def _why_not_judged(growth: GrowthFigures, cost: Cost) -> str | None:
    trials = growth.points[-1].trials
    too_steep_already = growth.note is not None and cost.cpu_ratio is not None and cost.cpu_ratio > GROWTH_RATIO
    return None if trials >= ENOUGH_TRIALS or too_steep_already else f"{trials} trials"


def _workers_mark(workers: tuple[LoadFigures, ...] | Skipped) -> Mark:
    what = "epoch reports, two workers / one: throughput"
    if isinstance(workers, Skipped):
        return _at_least(what, TWO_WORKERS_SPEED_UP, None, workers.skipped)
    one, two = (figures.route(EPOCH_REPORT).requests_per_s for figures in workers)
    too_few = None if workers[0].clients >= ENOUGH_CLIENTS else f"{workers[0].clients} clients"
    return _at_least(what, TWO_WORKERS_SPEED_UP, two / one, too_few)


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
