"""The dashboard's page of a job of thousands of runs: the latest one by one, the older ones as quantiles."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from bso_server.service.pages import POINTS_OF_A_JOB, Pages, bin_width
from bso_server.service.views import JobPage, Tariff
from bso_server.storage.queries import latest_trials
from bso_server.storage.transaction import Transaction
from bso_server.ui import html
from tests.support.dashboard_pages import Page, assert_figures_match
from tests.support.service import job_service, open_store, run_apart
from zeus_plugins.protocol import TrialState

RUNS = 5000
READER = html.Reader(root="../", now=datetime(2026, 1, 1, tzinfo=UTC), tag="")


@pytest.fixture(scope="module")
def costs_j() -> list[float]:
    return [float(round(cost)) for cost in np.random.default_rng(1).uniform(1e5, 2e5, RUNS)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, costs_j: list[float]) -> Path:
    """A database with one job: each tenth run was stopped. All runs but the first are rows that no server has made."""
    file = tmp_path_factory.mktemp("many") / "bso.sqlite3"

    async def fill() -> None:
        async with job_service(f"sqlite:///{file}", job_id="job") as server:
            await server.report(await server.suggest(), cost_j=costs_j[0], metric=0.95)
            (first,) = await server.store.read(latest_trials, "job", limit=1)
            others = [
                replace(
                    first,
                    trial_number=number,
                    idempotency_key=f"key-{number}",
                    started_event=2 * number - 1,
                    ended_event=2 * number,
                    state=TrialState.COMPLETED if number % 10 else TrialState.EARLY_STOPPED,
                    time_s=costs_j[number - 1] / 100,
                    energy_j=costs_j[number - 1],
                )
                for number in range(2, RUNS + 1)
            ]
            await server.store.write(Transaction.insert_trials, others)

    run_apart(fill)
    changed(file, "UPDATE jobs SET trial_count = 5000, event_count = 10000, folded_event = 10000")
    return file


def changed(file: Path, statement: str) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.executescript(statement)
        database.commit()


async def looked(file: Path, *changes: str) -> list[JobPage]:
    """Return the page of the job at first and after each of these changes, always from the same `Pages`."""
    pages, found = Pages(Tariff()), []
    async with open_store(f"sqlite:///{file}") as store:
        for change in ("", *changes):
            changed(file, change)
            _, page = await store.read(pages.job, "job")
            assert page is not None
            found.append(page)
    return found


async def test_latest_runs_are_shown_singly_and_older_runs_as_quantiles(file: Path, costs_j: list[float]) -> None:
    (page,) = await looked(file)
    assert [point.trial_number for point in page.points] == [*range(RUNS - POINTS_OF_A_JOB + 1, RUNS + 1)]
    assert [(each.first, each.last) for each in page.older] == [(first, first + 99) for first in range(1, 4001, 100)]
    for each in page.older:
        reached = [costs_j[number - 1] for number in range(each.first, each.last + 1) if number % 10]
        assert each.reached == len(reached)
        assert [each.low_j, each.median_j, each.high_j] == pytest.approx(np.quantile(reached, [0.1, 0.5, 0.9]))
    assert page.view.savings.recurrences == sum(number % 10 != 0 for number in range(1, RUNS + 1))
    assert page.view.trial_states == {TrialState.COMPLETED: RUNS * 9 // 10, TrialState.EARLY_STOPPED: RUNS // 10}


async def test_page_of_many_runs_is_small_and_agrees_with_twin(file: Path) -> None:
    (page,) = await looked(file)
    text, twin = html.page(page, READER), json.loads(page.model_dump_json())
    assert len(gzip.compress(text.encode(), compresslevel=4)) <= 150_000
    read = Page(text)
    assert "The latest 1000 runs one by one; of the 4000 before them" in read.text
    assert_figures_match(read, twin)


@pytest.mark.slow
async def test_remembered_old_runs_change_with_their_rows(file: Path) -> None:
    pages = await looked(
        file,
        "UPDATE trials SET state = 'withdrawn' WHERE trial_number = 55",
        # A run that had been given up reports again and ends.
        "UPDATE trials SET state = 'running', ended_event = NULL WHERE trial_number = 155",
        "UPDATE trials SET state = 'completed', ended_event = 10001, energy_j = 9e5 WHERE trial_number = 155;"
        "UPDATE jobs SET event_count = 10001",
        "UPDATE jobs SET event_count = 10002",
        # A target that its user gives later ends earlier epochs of the same runs.
        "UPDATE trials SET energy_j = 9e6 WHERE trial_number = 255;"
        "UPDATE jobs SET target_metric = 0.5, target_runs = '[]'",
    )
    reached = [[90, 90], [89, 90], [89, 89], [89, 90], [89, 90], [89, 90]]
    assert [[each.reached for each in page.older[:2]] for page in pages] == reached
    saved = [page.view.savings for page in pages]
    assert saved[3].energy_j.spent > saved[0].energy_j.spent
    assert saved[3] == saved[4]
    assert saved[5].energy_j.spent > saved[4].energy_j.spent + 8e6


def test_number_of_bins_stays_small() -> None:
    for older in (1, 100, 5000, 5001, 10_000, 123_456, 10**7):
        assert older <= 50 * bin_width(older)
        assert bin_width(older) == 100 or older > 25 * bin_width(older)
