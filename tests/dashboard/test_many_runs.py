"""The dashboard's page of a job of thousands of runs."""

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

from bso_server.service.pages import POINTS_OF_A_JOB, Pages
from bso_server.service.views import Tariff
from bso_server.storage.queries import latest_trials
from bso_server.storage.transaction import Transaction
from bso_server.ui import html
from tests.support.dashboard_pages import Page, assert_figures_match
from tests.support.service import job_service, open_store, run_apart
from zeus_plugins.protocol import TrialState

RUNS = 5000
READER = html.Reader(root="../", now=datetime(2026, 1, 1, tzinfo=UTC), tag="")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one job: each tenth run was stopped. All runs but the first are rows that no server has made."""
    file = tmp_path_factory.mktemp("many") / "bso.sqlite3"
    costs_j = [float(round(cost)) for cost in np.random.default_rng(1).uniform(1e5, 2e5, RUNS)]

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
    with closing(sqlite3.connect(file)) as database:
        database.execute("UPDATE jobs SET trial_count = 5000, event_count = 10000, folded_event = 0")
        database.commit()
    return file


async def test_charts_show_latest_runs_and_figures_agree_with_twin(file: Path) -> None:
    async with open_store(f"sqlite:///{file}") as store:
        _, page = await store.read(Pages(Tariff()).job, "job")
    assert page is not None
    assert [point.trial_number for point in page.points] == [*range(RUNS - POINTS_OF_A_JOB + 1, RUNS + 1)]
    assert page.view.savings.recurrences == sum(number % 10 != 0 for number in range(1, RUNS + 1))
    assert page.view.trial_states == {TrialState.COMPLETED: RUNS * 9 // 10, TrialState.EARLY_STOPPED: RUNS // 10}
    text, twin = html.page(page, READER), json.loads(page.model_dump_json())
    assert len(gzip.compress(text.encode(), compresslevel=4)) <= 150_000
    read = Page(text)
    assert "The charts show the latest 1000 of 5000 runs." in read.text
    assert_figures_match(read, twin)
