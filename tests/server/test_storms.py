"""Many concurrent requests to two servers on one database of each kind."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import httpx
import pytest

from tests.support.databases import DATABASES, MYSQL_SNAPSHOTS
from tests.support.jobs import THREE_SIZES, job
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.parametrize("database_url", [*DATABASES, MYSQL_SNAPSHOTS], indirect=True, scope="module")

PATIENCE_S = 120.0


Call = tuple[str, str, dict[str, Any]]
"""Method, path, and what `httpx.AsyncClient.request` takes beside them."""


@pytest.fixture(scope="module")
def servers(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two servers."""
    directory = tmp_path_factory.mktemp("servers")
    both = [ServerProcess(database_url, directory / f"server-{number}.log") for number in (1, 2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda server: server.start("--migrate"), both))
        yield [server.url for server in both]
    finally:
        for server in both:
            server.stop()


@pytest.fixture
def prefix() -> str:
    """A unique prefix for the jobs of this test."""
    return f"storm-{uuid.uuid4().hex[:8]}"


def job_of(prefix: str) -> dict[str, Any]:
    return job(**THREE_SIZES, eta_knob=1.0, job_id_prefix=prefix, job_id=prefix)


@pytest.fixture
def job_id(servers: Sequence[str], prefix: str) -> str:
    httpx.post(f"{servers[0]}/jobs", json=job_of(prefix)).raise_for_status()
    return prefix


def at_once(servers: Sequence[str], calls: Sequence[Call]) -> list[httpx.Response]:
    """Return the answers to concurrent calls, each over its own connection, to the servers in turn."""

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as http:
            return await asyncio.gather(
                *(
                    http.request(method, url + path, **request)
                    for url, (method, path, request) in zip(cycle(servers), calls, strict=False)
                )
            )

    return asyncio.run(run())


def suggest(job_id: str, **headers: str) -> Call:
    return "GET", "/jobs/batch_size", {"params": {"job_id": job_id}, "headers": headers}


def report(trial: dict[str, Any], *, cost_j: float, metric: float = 0.95, epoch: int = 2) -> Call:
    identity = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
    result = {"time": 1, "energy": cost_j, "metric": metric, "current_epoch": epoch, "energy_source": "nvml"}
    return "POST", "/report", {"json": identity | result}


def statuses(answers: Sequence[httpx.Response]) -> Counter[int]:
    return Counter(answer.status_code for answer in answers)


def read(servers: Sequence[str], path: str, **params: Any) -> Any:
    return httpx.get(servers[0] + path, params=params).raise_for_status().json()


def begin(servers: Sequence[str], job_id: str, number: int) -> list[dict[str, Any]]:
    answers = at_once(servers, [suggest(job_id)] * number)
    assert statuses(answers) == {200: number}
    return [answer.json() for answer in answers]


@pytest.mark.slow
def test_hundred_concurrent_suggests_get_distinct_trials(servers: Sequence[str], job_id: str) -> None:
    trials = begin(servers, job_id, 100)

    assert sorted(trial["trial_number"] for trial in trials) == list(range(1, 101))
    assert Counter(trial["origin"] for trial in trials) == {"exploration": 1, "concurrent": 99}
    told = {trial["trial_number"]: trial["batch_size"] for trial in trials}
    kept = read(servers, f"/api/jobs/{job_id}")["trials"]
    assert {trial["trial_number"]: trial["batch_size"] for trial in kept} == told
    (summary,) = read(servers, "/api/jobs", prefix=job_id)["jobs"]
    assert summary["trials"] == 100
    assert sum(arm["trials"] for arm in read(servers, f"/api/jobs/{job_id}")["arms"]) == 100


def test_twenty_different_final_reports_complete_a_trial_once(servers: Sequence[str], job_id: str) -> None:
    """The first report ends the trial; the other reports, with different costs, are refused."""
    (trial,) = begin(servers, job_id, 1)
    costs = [float(100 + number) for number in range(20)]
    answers = at_once(servers, [report(trial, cost_j=cost_j) for cost_j in costs])

    assert statuses(answers) == {200: 1, 409: 19}
    (taken,) = [cost_j for cost_j, answer in zip(costs, answers, strict=True) if answer.is_success]
    job = read(servers, f"/api/jobs/{job_id}")
    assert [(kept["state"], kept["energy_j"]) for kept in job["trials"]] == [("completed", taken)]
    (summary,) = read(servers, "/api/jobs", prefix=job_id)["jobs"]
    assert summary["min_cost_j"] == job["min_cost_j"] == taken


def test_concurrent_final_reports_of_all_trials_are_counted(servers: Sequence[str], job_id: str) -> None:
    trials = begin(servers, job_id, 50)
    costs = {trial["trial_number"]: 200.0 - trial["trial_number"] for trial in trials}
    answers = at_once(servers, [report(trial, cost_j=costs[trial["trial_number"]]) for trial in trials])

    assert statuses(answers) == {200: 50}
    assert all(answer.json()["converged"] for answer in answers)
    job = read(servers, f"/api/jobs/{job_id}")
    assert {trial["trial_number"]: trial["energy_j"] for trial in job["trials"]} == costs
    assert {trial["state"] for trial in job["trials"]} == {"completed"}
    (summary,) = read(servers, "/api/jobs", prefix=job_id)["jobs"]
    assert summary["min_cost_j"] == min(costs.values())
    (arm,) = [arm for arm in read(servers, f"/api/jobs/{job_id}")["arms"] if arm["trials"]]
    assert (arm["n"], arm["mean_cost_j"]) == (50, pytest.approx(sum(costs.values()) / 50))
    exported = httpx.get(f"{servers[0]}/api/jobs/{job_id}/export").raise_for_status().text.splitlines()[1:]
    events = [json.loads(line)[name] for line in exported for name in ("started_event", "ended_event")]
    assert sorted(events) == list(range(1, 101))


def test_job_registered_concurrently_takes_a_single_configuration(servers: Sequence[str], prefix: str) -> None:
    """Two configurations compete: one is accepted, the other is refused."""
    # Each twice in a row, so that each server gets both.
    limits = [10, 10, 11, 11] * 10
    bodies = [job_of(prefix) | {"max_epochs": limit} for limit in limits]
    answers = at_once(servers, [("POST", "/jobs", {"json": body}) for body in bodies])

    kept = read(servers, f"/api/jobs/{prefix}")["job"]["max_epochs"]
    agreeing = [answer for body, answer in zip(bodies, answers, strict=True) if body["max_epochs"] == kept]
    assert statuses(agreeing) == {201: 1, 200: 19}
    assert statuses(answers) == {201: 1, 200: 19, 409: 20}
    assert {answer.json()["max_epochs"] for answer in agreeing} == {kept}
