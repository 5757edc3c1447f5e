"""Reading jobs over HTTP, on each kind of database: pages, parts of a job, events, and health."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from sqlalchemy.engine import URL, make_url

from bso_server.errors import DatabaseNotReadyError
from bso_server.service.commands import BatchSizeService, Commands
from bso_server.service.reading import JobReader
from bso_server.storage.migrations import HEAD
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support.jobs import job
from tests.support.servers import ServerProcess
from tests.support.service import open_store
from tests.support.wire import assert_refused, begin, reached, report
from zeus_plugins.client.http import BsoClient


@pytest.fixture
def prefix() -> str:
    """A unique prefix, because the tests of a module share a database."""
    return f"read-{uuid.uuid4().hex[:8]}"


def register(http: httpx.Client, job_id: str, prefix: str, **fields: object) -> str:
    body = job(job_id=job_id, job_id_prefix=prefix, **{"num_pruning_rounds": 1, "mab_seed": 1, **fields})
    http.post("/jobs", json=body).raise_for_status()
    return job_id


@pytest.fixture
def job_id(http: httpx.Client, prefix: str) -> str:
    return register(http, f"{prefix}-job", prefix)


def get(http: httpx.Client, path: str, **query: object) -> dict[str, Any]:
    body: dict[str, Any] = http.get(path, params=query).raise_for_status().json()
    return body


def pages(http: httpx.Client, path: str, **query: object) -> list[dict[str, Any]]:
    """Return every page until the last, which has no cursor."""
    found = [get(http, path, **query)]
    while found[-1]["next_cursor"] is not None:
        found.append(get(http, path, **query, cursor=found[-1]["next_cursor"]))
    return found


class TestJobs:
    def test_pages_hold_every_job_once(self, http: httpx.Client, prefix: str) -> None:
        made = {register(http, f"{prefix}-{letter}", prefix) for letter in "cabed"}
        found = pages(http, "/api/jobs", prefix=prefix, limit=2)

        assert [len(page["jobs"]) for page in found] == [2, 2, 1]
        assert [job["job_id"] for page in found for job in page["jobs"]] == sorted(made)

    def test_full_last_page_has_no_cursor(self, http: httpx.Client, prefix: str) -> None:
        for letter in "ab":
            register(http, f"{prefix}-{letter}", prefix)
        assert get(http, "/api/jobs", prefix=prefix, limit=2)["next_cursor"] is None

    def test_prefix_matches_only_the_whole_registered_prefix(self, http: httpx.Client, prefix: str) -> None:
        register(http, f"{prefix}-a", prefix)
        register(http, f"{prefix}-b", f"{prefix}-b")
        assert [job["job_id"] for job in get(http, "/api/jobs", prefix=prefix)["jobs"]] == [f"{prefix}-a"]
        assert get(http, "/api/jobs", prefix=prefix.upper())["jobs"] == []

    def test_jobs_are_filtered_by_stage(self, http: httpx.Client, prefix: str) -> None:
        register(http, f"{prefix}-pruning", prefix)
        register(http, f"{prefix}-bandit", prefix, num_pruning_rounds=0)
        begin(http, f"{prefix}-bandit")
        for stage in ("pruning", "bandit"):
            (job,) = get(http, "/api/jobs", prefix=prefix, stage=stage)["jobs"]
            assert (job["job_id"], job["stage"]) == (f"{prefix}-{stage}", stage)

    def test_summary_of_a_job_is_literal(self, http: httpx.Client, prefix: str, job_id: str) -> None:
        reached(http, begin(http, job_id), cost_j=500)
        begin(http, job_id)
        (job,) = get(http, "/api/jobs", prefix=prefix)["jobs"]
        assert (job["trials"], job["min_cost_j"], job["min_cost_batch_size"]) == (2, 500, 16)

    def test_client_lists_all_pages(self, http: httpx.Client, prefix: str, any_server: ServerProcess) -> None:
        for number in range(101):
            register(http, f"{prefix}-{number}", prefix)
        with BsoClient(any_server.url) as client:
            listed = {job.job_id for job in client.list_jobs().jobs}
        assert {f"{prefix}-{number}" for number in range(101)} <= listed


class TestJob:
    def test_view_of_a_job_shows_the_latest_trials_and_counts_all(self, http: httpx.Client, job_id: str) -> None:
        reached(http, begin(http, job_id), cost_j=500)
        for _ in range(4):
            begin(http, job_id)
        for limit, numbers in ((0, []), (2, [4, 5]), (100, [1, 2, 3, 4, 5])):
            job = get(http, f"/api/jobs/{job_id}", limit=limit)
            assert [trial["trial_number"] for trial in job["trials"]] == numbers
            assert (job["trial_count"], job["trial_states"]) == (5, {"completed": 1, "running": 4})
            assert (job["min_cost_j"], job["best_batch_size"]) == (500, 16)
            assert [(arm["batch_size"], arm["trials"], arm["n"]) for arm in job["arms"]] == [(8, 1, 0), (16, 4, 1)]

    def test_client_shows_all_trials(self, http: httpx.Client, job_id: str, any_server: ServerProcess) -> None:
        for _ in range(102):
            begin(http, job_id)
        assert [trial["trial_number"] for trial in get(http, f"/api/jobs/{job_id}")["trials"]] == [*range(3, 103)]
        with BsoClient(any_server.url) as client:
            view = client.show_job(job_id)
        assert [trial.trial_number for trial in view.trials] == [*range(1, 103)]


class TestTrials:
    def test_pages_hold_every_trial_once(self, http: httpx.Client, job_id: str) -> None:
        for _ in range(5):
            begin(http, job_id)
        found = pages(http, f"/api/jobs/{job_id}/trials", limit=2)

        trials = [trial for page in found for trial in page["trials"]]
        assert [len(page["trials"]) for page in found] == [2, 2, 1]
        assert [trial["trial_number"] for trial in trials] == [1, 2, 3, 4, 5]
        assert trials == get(http, f"/api/jobs/{job_id}")["trials"]

    def test_trials_are_filtered_by_state(self, http: httpx.Client, job_id: str) -> None:
        first, second, third = (begin(http, job_id) for _ in range(3))
        reached(http, second, cost_j=500)
        reached(http, third, cost_j=500)
        found = pages(http, f"/api/jobs/{job_id}/trials", state="completed", limit=1)
        assert [trial["trial_number"] for page in found for trial in page["trials"]] == [2, 3]
        (running,) = get(http, f"/api/jobs/{job_id}/trials", state="running")["trials"]
        assert running["trial_number"] == first["trial_number"]


class TestEpochs:
    def test_every_report_is_listed_including_the_final_report(self, http: httpx.Client, job_id: str) -> None:
        trial = begin(http, job_id)
        report(http, trial, time=1, energy=100, metric=0.25, current_epoch=0.5)
        report(http, trial, time=2, energy=250, metric=0.5, current_epoch=1)
        reached(http, trial, cost_j=500)
        found = get(http, f"/ui/jobs/{job_id}/trials/1.json")["epochs"]

        fields = ("report_number", "epoch", "time_s", "energy_j", "cost_j", "metric")
        assert [tuple(epoch[name] for name in fields) for epoch in found] == [
            (1, 0.5, 1, 100, 100, 0.25),
            (2, 1, 2, 250, 225, 0.5),
            (3, 2, 5, 500, 500, 0.95),
        ]
        instants = [epoch["reported_at"] for epoch in found]
        assert instants == sorted(instants)

    def test_trial_ended_without_a_final_report_lists_no_report_twice(self, http: httpx.Client, job_id: str) -> None:
        trial = begin(http, job_id)
        assert get(http, f"/ui/jobs/{job_id}/trials/1.json")["epochs"] == []
        report(http, trial, time=1, energy=100, metric=0.25, current_epoch=1)
        http.patch("/trials", json=trial).raise_for_status()
        assert len(get(http, f"/ui/jobs/{job_id}/trials/1.json")["epochs"]) == 1

    def test_unknown_trials_get_404(self, http: httpx.Client, job_id: str) -> None:
        begin(http, job_id)
        answer = http.get(f"/ui/jobs/{job_id}/trials/2.json")
        assert_refused(answer, 404, "trial_number", f"job '{job_id}' has no trial 2")


@pytest.mark.parametrize("part", ["", "/trials", "/export"], ids=lambda part: part)
def test_unknown_jobs_get_404(http: httpx.Client, part: str) -> None:
    assert_refused(http.get(f"/api/jobs/none{part}"), 404, "job_id", "unknown job 'none'")


def test_job_may_have_the_name_of_a_route(http: httpx.Client) -> None:
    register(http, "import", "import")
    assert get(http, "/api/jobs/import")["job"]["job_id"] == "import"
    assert get(http, "/api/jobs/import/trials")["trials"] == []


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?limit=many", "limit"),
        (f"?limit={2**70}", "limit"),
        ("?stage=late", "stage"),
        ("?prefix=a%00b", "prefix"),
        ("?prefix=%ED%A0%80", "prefix"),
        ("?prefix=", "prefix"),
        ("?cursor=a%00b", "cursor"),
        ("?cursor=" + "x" * 256, "cursor"),
        ("/{}/trials?state=lost", "state"),
        ("/{}/trials?cursor=-1", "cursor"),
        ("/{}/trials?cursor=x", "cursor"),
        (f"/{{}}/trials?cursor={2**31}", "cursor"),
        ("/{}/explanation?trial_number=0", "trial_number"),
        (f"/{{}}/explanation?trial_number={2**31}", "trial_number"),
        (f"/{{}}/explanation?trial_number={'9' * 30}", "trial_number"),
    ],
)
def test_invalid_queries_are_refused(http_on_sqlite: httpx.Client, path: str, field: str) -> None:
    assert_refused(http_on_sqlite.get("/api/jobs" + path.format("none")), 422, field)


@pytest.mark.parametrize("part", ["arms", "events", "power_profiles", "trials.csv", "trials/1/epochs"])
def test_removed_routes_name_their_replacements(http_on_sqlite: httpx.Client, part: str) -> None:
    answer = http_on_sqlite.get(f"/api/jobs/none/{part}")
    assert answer.status_code == 410
    assert "GET /api/jobs/none has the arms, its part /trials" in answer.json()["message"]


class TestHealth:
    def test_healthy_server_is_live_and_ready(self, http: httpx.Client) -> None:
        assert get(http, "/health/live") == {"status": "ok"}
        assert get(http, "/health/ready") == {"status": "ok"}

    def test_version_is_shown(self, http: httpx.Client) -> None:
        assert get(http, "/version") == {"version": version("zeus-plugins"), "schema_revision": HEAD}


class BrokenDatabase:
    """A database that fails immediately, or never answers."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    @property
    def url(self) -> URL:
        return make_url("postgresql://secret.example/bso")

    async def run(self, *_: object, **__: object) -> Any:
        if self._at_once:
            raise ConnectionRefusedError("secret.example refused")
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("at_once", [True, False])
async def test_silent_database_is_not_ready(at_once: bool) -> None:
    reader = JobReader(Store(BrokenDatabase(at_once=at_once)), patience_s=0.01)
    with pytest.raises(DatabaseNotReadyError, match="does not answer") as caught:
        await reader.check_ready()
    assert "secret" not in caught.value.message


async def test_read_blocks_no_writer_and_sees_a_single_snapshot(
    http: httpx.Client, any_server: ServerProcess, job_id: str
) -> None:
    begin(http, job_id)

    async def write() -> None:
        async with open_store(any_server.database_url) as store:
            await BatchSizeService(store).transact(Commands().begin_trial, job_id)

    def read(transaction: Transaction) -> tuple[int, int]:
        before = len(transaction.all_trials(job_id))
        with ThreadPoolExecutor(1) as another:
            another.submit(asyncio.run, write()).result(timeout=120)
        return before, len(transaction.all_trials(job_id))

    async with open_store(any_server.database_url) as store:
        assert await store.read(read) == (1, 1)
    assert len(get(http, f"/api/jobs/{job_id}")["trials"]) == 2
