"""The dashboard's versions of pages: conditional requests, and decisions that have passed."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from bso_server.core import policy
from bso_server.core.job import replay
from bso_server.storage.transaction import Transaction
from tests.support.dashboard_pages import JOB
from tests.support.jobs import job
from tests.support.service import open_store
from zeus_plugins.protocol import CreatedJob


class TestConditionalRequests:
    async def test_only_changes_give_pages_new_version(self, new_http: httpx.AsyncClient) -> None:
        addresses = ["/ui/", "/ui/jobs.json", "/ui/jobs/job-1", "/ui/jobs/job-1.json", "/ui/jobs/job-1/trials/1"]

        (await new_http.post("/jobs", json=job(job_id="job-1"))).raise_for_status()
        trial = (await new_http.get("/jobs/batch_size", params={"job_id": "job-1"})).json()
        trial = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
        result = {"energy_source": None, "metric": 0.1}
        tags: dict[str, str] = {}

        async def changed() -> set[str]:
            found = set()
            for address in addresses:
                answer = await new_http.get(address, headers={"If-None-Match": tags.get(address, "")})
                assert answer.status_code in {200, 304}
                if answer.status_code == 200:
                    found.add(address)
                    assert answer.headers["etag"] != tags.get(address)
                tags[address] = answer.headers["etag"]
            return found

        async def send(method: str, path: str, **options: Any) -> None:
            (await new_http.request(method, path, **options)).raise_for_status()

        async def report(epoch: int, metric: float) -> None:
            body = {**trial, "time": 10 * epoch, "energy": 500 * epoch, "current_epoch": epoch}
            await send("POST", "/report", json=body | result | {"metric": metric})

        everywhere = set(addresses)
        assert await changed() == everywhere
        assert await changed() == set()
        await report(1, 0.1)
        assert await changed() == everywhere
        await send("PATCH", "/trials/heartbeat", json={**trial, "regular": True})
        await changed()
        await send("PATCH", "/trials/heartbeat", json={**trial, "regular": True})
        assert await changed() == {"/ui/jobs/job-1/trials/1"}  # This page shows the lease.
        await report(2, 0.95)
        assert await changed() == everywhere
        await send("POST", "/api/jobs/job-1/trials/1/discard")
        assert await changed() == everywhere
        second = (await new_http.get("/jobs/batch_size", params={"job_id": "job-1"})).json()
        assert await changed() == everywhere
        # The job itself has no record of the second trial, which is not the cheapest.
        for epochs in (3, 4, 5):
            trial.update({name: second[name] for name in trial})
            await report(epochs, 0.95)
            second = (await new_http.get("/jobs/batch_size", params={"job_id": "job-1"})).json()
        assert await changed() >= {"/ui/", "/ui/jobs/job-1"}
        for number in (4, 3):
            await send("POST", f"/api/jobs/job-1/trials/{number}/discard")
            assert await changed() >= {"/ui/", "/ui/jobs.json", "/ui/jobs/job-1", "/ui/jobs/job-1.json"}
        assert await changed() == set()

    async def test_target_given_later_changes_the_list_of_jobs(self, new_http: httpx.AsyncClient) -> None:
        without = job(job_id="job-1", target_metric=None, max_epochs=2)
        (await new_http.post("/jobs", json=without)).raise_for_status()
        trial = (await new_http.get("/jobs/batch_size", params={"job_id": "job-1"})).json()
        trial = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
        for epoch in (1, 2):
            report = {**trial, "time": 10 * epoch, "energy": 500 * epoch, "current_epoch": epoch, "metric": 0.8}
            (await new_http.post("/report", json=report)).raise_for_status()
        known = (await new_http.get("/ui/jobs.json")).headers["etag"]
        (await new_http.post("/jobs", json=without | {"target_metric": 0.7})).raise_for_status()
        answer = await new_http.get("/ui/jobs.json", headers={"If-None-Match": known})
        assert answer.status_code == 200
        shown = (await new_http.get("/api/jobs/job-1")).json()
        assert answer.json()["jobs"][0]["job"]["min_cost_j"] == shown["min_cost_j"]


@pytest.mark.parametrize("job_id", [JOB, "bert-sst2"])
async def test_each_moment_agrees_with_replay_of_earlier_trials(
    dashboard_database: str, http: httpx.AsyncClient, job_id: str
) -> None:
    async with open_store(dashboard_database) as store:
        trials = await store.read(Transaction.all_trials, job_id)
    registration = CreatedJob.model_validate((await http.get(f"/ui/jobs/{job_id}.json")).json()["view"]["job"])
    rng, survivors = np.random.default_rng(registration.mab_seed), None
    for number, trial in enumerate(trials):
        chosen = policy.suggest(replay(registration, trials[:number], survivors), rng)
        survivors = chosen.survivors
        moment = (await http.get(f"/ui/jobs/{job_id}/trials/{number + 1}.json")).json()
        assert (moment["trial"]["batch_size"], moment["trial"]["reason"]) == (chosen.batch_size, chosen.reason)
        assert moment["explanation"]["sentence"].startswith(chosen.reason)
        assert [point["trial_number"] for point in moment["points"]] == [*range(1, trial.trial_number)]
        assert {point["state"] for point in moment["points"]} <= {each.state for each in trials[:number]}


async def test_past_moment_shows_nothing_of_concurrent_result(new_http: httpx.AsyncClient) -> None:
    (await new_http.post("/jobs", json=job(job_id="job-1"))).raise_for_status()
    for _ in range(2):
        (await new_http.get("/jobs/batch_size", params={"job_id": "job-1"})).raise_for_status()
    trial = {"job_id": "job-1", "batch_size": 16, "trial_number": 1}
    result = {"time": 10, "energy": 500, "metric": 0.95, "current_epoch": 2, "energy_source": None}
    (await new_http.post("/report", json=trial | result)).raise_for_status()
    (point,) = (await new_http.get("/ui/jobs/job-1/trials/2.json")).json()["points"]
    assert (point["state"], point["cost_j"]) == ("running", None)
