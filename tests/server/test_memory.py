"""Memory for unknown names: the server keeps none, with the whole application in this process."""

from __future__ import annotations

import gc
import importlib
import inspect
import math
import pkgutil
import sys
from functools import lru_cache
from typing import Any

import httpx
import pytest

import bso_server
from bso_server.settings import Settings
from tests.support.dashboard_pages import in_app
from tests.support.jobs import job
from tests.support.tokens import RESULT, bearer

# Litestar remembers the latest 1024 paths and queries, and the server remembers 1024 host names.
WARM_UP, REQUESTS = 1100, 7200
KINDS = 9

CachedFunction = type(lru_cache(len))


async def _ask(http: httpx.AsyncClient, trial: dict[str, Any], kind: int, number: int) -> httpx.Response:
    """Send a request with a unique name that the server does not know."""
    name = f"job-{number:0200}"
    stranger = {"job_id": name, "batch_size": 8, "trial_number": number + 1}
    match kind:
        case 0:
            return await http.get(f"/api/jobs/{name}/trials", params={name: name})
        case 1:
            return await http.get("/jobs/batch_size", params={"job_id": name}, headers={"Idempotency-Key": name})
        case 2:
            return await http.post("/report", json={**stranger, **RESULT})
        case 3:
            return await http.post("/report", json={**trial, **RESULT, "trial_number": number + 10})
        case 4:
            return await http.patch("/trials/heartbeat", json=stranger)
        case 5:
            return await http.delete("/jobs", params={"job_id": name})
        case 6:
            return await http.get(f"/{name}", headers={"User-Agent": name})
        case 7:
            return await http.get("/api/jobs", headers={"Host": name})
        case _:
            return await http.get("/api/jobs", headers=bearer(f"zbso_{number:08x}_{'x' * 43}"))


@pytest.mark.slow
async def test_unknown_names_are_not_stored(new_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The log of refusals names its senders during the warm-up only, also on a machine that takes several periods.
    monkeypatch.setattr("bso_server.api.auth.PERIOD_S", math.inf)
    async with in_app(Settings(database_url=new_database, allowed_hosts="localhost")) as http:
        job_id = (await http.post("/jobs", json=job())).json()["job_id"]
        trial = (await http.get("/jobs/batch_size", params={"job_id": job_id})).json()
        for number in range(WARM_UP):
            assert [(await _ask(http, trial, kind, number)).status_code for kind in (0, 7)] == [404, 400]
        for kind in range(KINDS):
            assert (await _ask(http, trial, kind, WARM_UP + kind)).status_code in {400, 401, 404}
        for number in range(REQUESTS // 8):
            await _ask(http, trial, number % KINDS, 2 * WARM_UP + number)
        gc.collect()
        before = sys.getallocatedblocks()
        for number in range(REQUESTS):
            await _ask(http, trial, number % KINDS, 3 * WARM_UP + number)
        gc.collect()
        # If one name in nine were stored, at least one block per name would remain.
        assert sys.getallocatedblocks() - before < REQUESTS / KINDS / 2


def test_every_cache_of_calls_has_a_bound() -> None:
    found = set()
    for module in pkgutil.walk_packages(bso_server.__path__, "bso_server."):
        if module.name.endswith("__main__") or ".migrations." in module.name:
            continue  # these run when they are imported
        for name, function in vars(importlib.import_module(module.name)).items():
            if isinstance(function, CachedFunction) and inspect.signature(function).parameters:
                found.add(name)
                assert function.cache_parameters()["maxsize"] is not None, f"{module.name}.{name}"
    assert found
