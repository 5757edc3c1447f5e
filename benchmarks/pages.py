"""The dashboard: the list of many jobs, first looked at and again, and polls of pages that have not changed."""

from __future__ import annotations

import asyncio
import html
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import workload
from benchmarks.driver import Driver, driving
from benchmarks.errors import BenchmarkError
from benchmarks.player import encode
from benchmarks.processes import Target, bso_server, serving
from benchmarks.workload import Job
from zeus_plugins.protocol import TrialId

CLIENTS = 10
TRIALS = 5
POLLS = 100
ROUNDS = 5
JOBS_ON_A_PAGE = 50

# As browsers do.
ACCEPTS = {"Accept-Encoding": "gzip"}
_TAG = re.compile(rb'data-live="([^"]*)"')


@dataclass(frozen=True, slots=True)
class PageFigures:
    """CPU time of the server for pages, milliseconds; None where it cannot be known.

    Attributes:
        jobs: Jobs that there are, each with a few trials.
        first_ms: The first page that anybody looks at: templates are read and compiled.
        overview_ms: A page of the list that nobody has looked at, the median over the pages.
        again_ms: The same when it was looked at before.
        poll_ms: A poll of a job's page that has not changed, in the round that took least.
        overview_poll_ms: The same of the list.
        bare_ms: A request to the bare route, in the round that took least.
    """

    jobs: int
    first_ms: float | None
    overview_ms: float | None
    again_ms: float | None
    poll_ms: float | None
    overview_poll_ms: float | None
    bare_ms: float | None


def run_pages(directory: Path, *, jobs: int) -> PageFigures:
    """Make so many jobs on a server of their own, and look at them.

    Raises:
        BenchmarkError: A server did not start, or did not do what was asked of it.
    """
    url = f"sqlite:///{directory / 'pages.sqlite3'}"
    bso_server(url, directory, "db", "upgrade")
    with (
        serving("pages", "bso_server", ("serve",), database_url=url, directory=directory) as server,
        serving("bare route", "benchmarks.bare", (), database_url=url, directory=directory) as bare,
    ):
        return asyncio.run(_measured(server, bare, jobs))


async def _measured(server: Target, bare: Target, count: int) -> PageFigures:
    names = [f"job-{number:04}" for number in range(count)]
    async with driving(server, CLIENTS) as driver, driving(bare, 1) as others:
        await _fill(driver, names)
        first = await driver.send([[_look("/ui/?q=nothing")]])
        lasts = names[JOBS_ON_A_PAGE - 1 : -1 : JOBS_ON_A_PAGE]
        overviews = [_look("/ui/"), *(_look(f"/ui/?after={last}") for last in lasts)]
        colds = [(await driver.send([[each]])).server_cpu_ms for each in overviews]
        again = [(await driver.send([[each]])).server_cpu_ms for each in overviews]
        polls = {address: await _poll(driver, address) for address in (f"/ui/jobs/{names[0]}", "/ui/")}
        trial = TrialId(job_id=names[0], batch_size=workload.BATCH_SIZES[0], trial_number=1)
        echo = workload.report(trial, epoch=1, epochs=2)
        requests = [(driver, poll) for poll in polls.values()] + [(others, echo)]
        least: list[list[float | None]] = [[] for _ in requests]
        for _ in range(ROUNDS):
            for found, (asked, request) in zip(least, requests, strict=True):
                found.append((await asked.send([[request] * POLLS])).server_cpu_ms)
        poll_ms, overview_poll_ms, bare_ms = (min(_known(found), default=None) for found in least)
        return PageFigures(
            jobs=count,
            first_ms=first.server_cpu_ms,
            overview_ms=_median(colds),
            again_ms=_median(again),
            poll_ms=poll_ms,
            overview_poll_ms=overview_poll_ms,
            bare_ms=bare_ms,
        )


async def _fill(driver: Driver, names: Sequence[str]) -> None:
    for first in range(0, len(names), CLIENTS):
        jobs = [Job(name, max_epochs=1, pruning_rounds=1) for name in names[first : first + CLIENTS]]
        await driver.send([[job.registration] for job in jobs])
        for _ in range(TRIALS):
            started = workload.dispatched(await driver.send([[job.suggest] for job in jobs]))
            await driver.send([[workload.report(trial, epoch=1, epochs=1) for trial in trials] for trials in started])


async def _poll(driver: Driver, address: str) -> bytes:
    """The request of a reader who has the page as it is."""
    ((shown,),) = (await driver.send([[encode("GET", address)]])).exchanges
    tag = _TAG.search(shown.body)
    if tag is None:
        raise BenchmarkError(f"the page {address} does not say its version")
    return encode("GET", address, headers={**ACCEPTS, "If-None-Match": html.unescape(tag[1].decode())})


def _look(address: str) -> bytes:
    return encode("GET", address, headers=ACCEPTS)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None
