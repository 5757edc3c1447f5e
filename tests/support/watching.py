"""An application in this process with readable metrics, and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bso_server.app import create_app
from bso_server.core.savings import savings
from bso_server.metrics import prometheus
from bso_server.service import verdicts
from bso_server.settings import Settings
from tests.support.dashboard_pages import client_of
from tests.support.jobs import job
from zeus_plugins.protocol import SavingsView

Use = Callable[[httpx.AsyncClient], Awaitable[None]]


@asynccontextmanager
async def watched(folder: Path, *, is_paid_back: bool = False, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application on a new SQLite file; yield a local client that waits for its totals.

    If `is_paid_back`, the metrics treat every job as having paid back its exploration, and then become costlier.
    """
    app = create_app(Settings.model_validate({"database_url": f"sqlite:///{folder / 'bso.sqlite3'}", **settings}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prometheus, "_WAIT_S", 60.0)
        if is_paid_back:
            patch.setattr(verdicts, "savings", _paid_back)
            patch.setattr(verdicts, "drift_of", lambda *_: 0.5)
        async with app.lifespan(), client_of(app) as http:
            yield http


def _paid_back(*given: Any) -> SavingsView:
    known = savings(*given)
    names = "cost_j", "energy_j", "time_s"
    return known.model_copy(update={name: getattr(known, name).model_copy(update={"saved": 1.0}) for name in names})


Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def values_in(text: str) -> Values:
    """Return the value of each series in an answer."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scraped(http: httpx.AsyncClient) -> Values:
    answer = await http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return values_in(answer.text)


def value(values: Values, name: str, **labels: str) -> float:
    """Return the sum of all series with this name and at least these labels."""
    wanted = frozenset(labels.items())
    found = [each for (own, other), each in values.items() if own == f"zeus_bso_{name}" and wanted <= other]
    assert found, (name, labels)
    return sum(found)


async def trained(http: httpx.AsyncClient, energy_j: float = 50.0, **fields: object) -> str:
    """Run one training to its target; return the id of its job."""
    job_id: str = (await http.post("/jobs", json=job(**fields))).json()["job_id"]
    trial = (await http.get("/jobs/batch_size", params={"job_id": job_id})).json()
    result = {"time": 2 * energy_j / 100, "energy": energy_j, "metric": 0.95, "current_epoch": 1}
    ours = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
    answer = await http.post("/report", json=ours | result)
    assert answer.json()["converged"], answer.text
    assert trial["batch_size"] == fields.get("default_batch_size", 16)
    return job_id
