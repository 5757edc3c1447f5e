"""Lost connections to the database at the worst moments, and a database that is temporarily unreachable.

The server reaches its database through a relay that the tests open and close.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bso_server.core.access import Scope
from bso_server.errors import JobConflictError
from bso_server.service.tokens import Tokens
from bso_server.storage.database import open_database
from bso_server.storage.store import Store
from tests.support.databases import MYSQL, POSTGRESQL, end_sessions
from tests.support.exports import export_over, import_lines, renamed
from tests.support.jobs import job
from tests.support.relay import Relay, relay_to
from tests.support.servers import ServerProcess
from tests.support.wire import assert_refused, begin, reached

# A SQLite file has no connection to lose.
pytestmark = pytest.mark.parametrize("database_url", [POSTGRESQL, MYSQL], indirect=True, scope="module")

PATIENCE_S = 60.0
CUTS = 12
CLIENTS = 3


@pytest.fixture(scope="module")
def relay(database_url: str) -> Iterator[Relay]:
    with relay_to(database_url) as relay:
        yield relay


@pytest.fixture(scope="module")
def relayed_url(database_url: str, relay: Relay) -> str:
    return relay.url_of(database_url)


@contextmanager
def patient_for(limit_s: float, database_url: str, folder: Path) -> Iterator[ServerProcess]:
    """Yield a server that waits for its database for at most `limit_s` seconds."""
    server = ServerProcess(database_url, folder / "server.log", database_timeout_s=limit_s)
    server.start("--insecure", "--migrate")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def relayed_server(relayed_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with patient_for(45.0, relayed_url, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def impatient_server(relayed_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A second server on the same database."""
    with patient_for(3.0, relayed_url, tmp_path_factory.mktemp("impatient")) as server:
        yield server


@pytest.fixture
def http(relayed_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=relayed_server.url, timeout=PATIENCE_S) as client:
        yield client


def report(http: httpx.Client, trial: dict[str, Any], epoch: int) -> httpx.Response:
    """Report an epoch that does not end the training."""
    return http.post(
        "/report", json={**trial, "time": epoch, "energy": 100 * epoch, "metric": 0.25, "current_epoch": epoch}
    )


def epochs_of(http: httpx.Client, trial: dict[str, Any]) -> list[float]:
    path = f"/ui/jobs/{trial['job_id']}/trials/{trial['trial_number']}.json"
    return [epoch["epoch"] for epoch in http.get(path).raise_for_status().json()["epochs"]]


class TestAnswersThatGetLostAfterTheCommit:
    """Each transaction of these requests is committed when its connection is lost, and is repeated."""

    @pytest.fixture
    def lossy(self, http: httpx.Client, relay: Relay, relayed_server: ServerProcess) -> Iterator[httpx.Client]:
        # Fill the caches now.
        http.get("/api/jobs").raise_for_status()
        before = relay.lost_commits
        relay.lose_commits(True)
        yield http
        relay.lose_commits(False)
        assert relay.lost_commits > before
        assert "Traceback" not in relayed_server.log.read_text()

    def test_job_is_registered_despite_a_lost_commit_answer(self, lossy: httpx.Client) -> None:
        answer = lossy.post("/jobs", json=job(job_id="registered"))
        assert answer.status_code in {200, 201}, answer.text
        assert answer.json()["job_id"] == "registered"

    def test_job_gets_a_single_generated_id(self, lossy: httpx.Client) -> None:
        answer = lossy.post("/jobs", json={**job(job_id="named"), "job_id": None})
        assert answer.status_code in {200, 201}, answer.text
        (found,) = lossy.get("/api/jobs", params={"prefix": "named"}).raise_for_status().json()["jobs"]
        assert found["job_id"] == answer.json()["job_id"]

    def test_request_dispatches_a_single_trial(self, lossy: httpx.Client) -> None:
        lossy.post("/jobs", json=job(job_id="dispatched")).raise_for_status()
        query, headers = {"job_id": "dispatched"}, {"Idempotency-Key": "one"}
        trial = lossy.get("/jobs/batch_size", params=query, headers=headers).raise_for_status().json()
        assert trial["trial_number"] == 1
        trials = lossy.get("/api/jobs/dispatched/trials").raise_for_status().json()["trials"]
        assert [each["trial_number"] for each in trials] == [1]

    def test_trial_starts_and_ends_once(self, lossy: httpx.Client, relay: Relay) -> None:
        relay.lose_commits(False)
        lossy.post("/jobs", json=job(job_id="lived")).raise_for_status()
        first, second = begin(lossy, "lived"), begin(lossy, "lived")
        relay.lose_commits(True)

        for epoch in (1, 2):
            assert not report(lossy, first, epoch).raise_for_status().json()["stop_train"]
        assert epochs_of(lossy, first) == [1, 2]
        assert lossy.patch("/trials/heartbeat", json=first).raise_for_status().json()["state"] == "running"
        assert reached(lossy, first, cost_j=500)["converged"]
        lossy.patch("/trials", json=second).raise_for_status()
        shown = lossy.get("/api/jobs/lived").raise_for_status().json()
        assert [trial["state"] for trial in shown["trials"]] == ["completed", "failed"]
        assert [(arm["trials"], arm["n"]) for arm in shown["arms"]] == [(0, 0), (2, 1)]

    def test_job_is_imported_and_deleted_once(self, lossy: httpx.Client, relay: Relay, relayed_url: str) -> None:
        # Without a key, each attempt with a lost answer starts another trial, and may lose its answer again.
        relay.lose_commits(False)
        lossy.post("/jobs", json=job(job_id="moved")).raise_for_status()
        reached(lossy, begin(lossy, "moved"), cost_j=500)
        export = renamed(export_over(lossy, "moved"), "moved-2")
        relay.lose_commits(True)

        async def move() -> None:
            store = Store(open_database(relayed_url, patience_s=60.0), patience_s=60.0)
            try:
                assert (await import_lines(store, export)).trials == 1
                with pytest.raises(JobConflictError):
                    await import_lines(store, export)
            finally:
                await store.close()

        asyncio.run(move())
        assert lossy.delete("/jobs", params={"job_id": "moved-2"}).status_code == 200
        assert lossy.delete("/jobs", params={"job_id": "moved-2"}).status_code == 404

    @pytest.mark.usefixtures("lossy")
    def test_token_is_created_rotated_and_revoked_once(self, relayed_url: str) -> None:
        async def make() -> None:
            # Longer than the default: see `tests.support.servers.Server`.
            store = Store(open_database(relayed_url, patience_s=60.0), patience_s=60.0)
            try:
                tokens = Tokens(store)
                _, record = await tokens.create("once", [Scope.READ])
                assert await tokens.all() == [record]
                _, rotated = await tokens.rotate(record.token_id)
                assert rotated.previous_hash == record.token_hash
                assert await tokens.all() == [rotated]
                await tokens.revoke(record.token_id)
                assert [token.revoked_at is None for token in await tokens.all()] == [False]
            finally:
                await store.close()

        asyncio.run(make())


def test_terminated_sessions_fail_no_request(
    http: httpx.Client, relayed_server: ServerProcess, database_url: str
) -> None:
    http.post("/jobs", json=job(job_id="cut")).raise_for_status()
    over = threading.Event()
    answers = threading.Semaphore(0)

    def train(name: int) -> list[dict[str, Any]]:
        trials: list[dict[str, Any]] = []
        while not over.is_set():
            headers = {"Idempotency-Key": f"{name}-{len(trials)}"}
            answer = http.get("/jobs/batch_size", params={"job_id": "cut"}, headers=headers).raise_for_status().json()
            trial = {field: answer[field] for field in ("job_id", "batch_size", "trial_number")}
            for epoch in (1, 2):
                report(http, trial, epoch).raise_for_status()
                answers.release()
            reached(http, trial, cost_j=500)
            trials.append(trial)
        return trials

    ended = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        trainings = [pool.submit(train, name) for name in range(CLIENTS)]
        try:
            for _ in range(CUTS):
                # Some requests between two cuts; a failed training ends the wait.
                for _ in range(10):
                    while not answers.acquire(timeout=0.1):
                        if any(training.done() for training in trainings):
                            break
                ended += end_sessions(database_url)
        finally:
            over.set()
        trials = [trial for training in trainings for trial in training.result()]

    assert ended >= CUTS
    assert sorted(trial["trial_number"] for trial in trials) == list(range(1, len(trials) + 1))
    for trial in trials:
        assert epochs_of(http, trial) == [1, 2, 2], trial
    states = [trial["state"] for trial in http.get("/api/jobs/cut").raise_for_status().json()["trials"]]
    assert states == ["completed"] * len(trials)
    assert "Traceback" not in relayed_server.log.read_text()


def test_request_waits_for_a_returning_database(http: httpx.Client, relay: Relay) -> None:
    http.post("/jobs", json=job(job_id="waiting")).raise_for_status()
    trial = begin(http, "waiting")
    before = relay.turned_away
    relay.turn_away(True)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(report, http, trial, 1)
            while relay.turned_away < before + 2 and not answer.done():
                time.sleep(0.01)
            relay.turn_away(False)
            assert answer.result().status_code == 200
    finally:
        relay.turn_away(False)
    assert epochs_of(http, trial) == [1]


# A silent database: `TestASilentNetwork` of test_deadlines.py.
def test_unreachable_database_is_reported_and_survived(
    http: httpx.Client, relay: Relay, impatient_server: ServerProcess
) -> None:
    http.post("/jobs", json=job(job_id="away")).raise_for_status()
    trial = begin(http, "away")
    with httpx.Client(base_url=impatient_server.url, timeout=PATIENCE_S) as impatient:
        said = len(impatient_server.log.read_text())
        relay.close()
        try:
            with ThreadPoolExecutor(4) as pool:
                reports = [pool.submit(report, impatient, trial, 1) for _ in range(3)]
                suggest = pool.submit(impatient.get, "/jobs/batch_size", params={"job_id": "away"})
                answers = [future.result() for future in [*reports, suggest]]
            for answer in answers:
                assert_refused(answer, 503, None, "does not answer at present")
                assert int(answer.headers["retry-after"]) > 0
                assert str(relay.port) not in answer.text
            assert impatient.get("/health/ready").status_code == 503
            assert impatient.get("/health/live").status_code == 200
        finally:
            relay.open()

        # An interrupted transaction may keep its locks briefly.
        deadline = time.monotonic() + PATIENCE_S
        while report(impatient, trial, 1).status_code != 200:
            assert time.monotonic() < deadline
        assert impatient.get("/health/ready").status_code == 200
        assert epochs_of(impatient, trial) == [1]
    log = impatient_server.log.read_text()[said:]
    assert "Traceback" not in log
    lines = [line for line in log.splitlines() if "gave up" in line]
    assert 1 <= len(lines) <= len(answers)
    assert all(str(relay.port) in line for line in lines)


def test_schema_documents_the_unavailable_answers(http: httpx.Client) -> None:
    document = json.loads(http.get("/schema/openapi.json").raise_for_status().text)
    assert "503" in document["paths"]["/report"]["post"]["responses"]
    assert "503" not in document["paths"]["/health/live"]["get"]["responses"]
