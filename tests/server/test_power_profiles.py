"""Power-limit profiles on the server: stored with the trial that measured new limits, and sent to later trials."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from bso_server.service import reading
from bso_server.storage.transaction import Transaction
from tests.support.jobs import JOB, job
from tests.support.power_limit_bench import found_out
from tests.support.servers import ServerProcess, bso_server
from tests.support.service import HOUR_S, JobService
from tests.support.wire import assert_refused, begin, reached
from zeus_plugins.protocol import TrialDispatch, TrialPowerProfile


@pytest.fixture
def job_id(http: httpx.Client) -> str:
    job_id = f"limits-{uuid.uuid4().hex[:8]}"
    http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
    return job_id


def dispatched(http: httpx.Client, job_id: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Idempotency-Key": key}
    answer = http.get("/jobs/batch_size", params={"job_id": job_id}, headers=headers)
    trial: dict[str, Any] = answer.raise_for_status().json()
    return trial


def store(http: httpx.Client, trial: dict[str, Any], body: dict[str, Any]) -> None:
    http.put("/trials/power_profile", json=trial | body).raise_for_status()


def kept(http: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    answer = http.get(f"/api/jobs/{job_id}/power_profiles").raise_for_status()
    return list(answer.json()["profiles"])


def test_newest_profile_of_the_size_is_sent(http: httpx.Client, job_id: str) -> None:
    first = dispatched(http, job_id)
    assert first["power_profile"] is None
    store(http, first, found_out(JOB, 1.0))
    reached(http, {name: first[name] for name in ("job_id", "batch_size", "trial_number")}, 500)
    # The exploration continues with the next size; concurrent trials get this size.
    other, same = dispatched(http, job_id), dispatched(http, job_id)
    assert (other["batch_size"], other["power_profile"]) == (8, None)
    of_first = {name: found_out(JOB, 1.0)[name] for name in ("gpus", "samples")}
    assert (same["batch_size"], same["power_profile"]) == (16, of_first)
    store(http, same, found_out(JOB, 2.0, [60.0, 80.0, 100.0]))
    store(http, other, found_out(JOB, 3.0))
    assert dispatched(http, job_id)["power_profile"]["samples"] == found_out(JOB, 2.0, [60.0, 80.0, 100.0])["samples"]


def test_repeated_request_for_a_trial_gets_the_profile_too(http: httpx.Client, job_id: str) -> None:
    store(http, dispatched(http, job_id), found_out(JOB))
    same = [dispatched(http, job_id, "key") for _ in range(2)]
    assert same[0] == same[1]
    assert same[0]["power_profile"]["samples"] == found_out(JOB)["samples"]


def test_repeated_profile_is_stored_once(http: httpx.Client, job_id: str) -> None:
    first, second = begin(http, job_id), begin(http, job_id)
    store(http, first, found_out(JOB))
    before = kept(http, job_id)
    assert [(each["trial_number"], each["batch_size"]) for each in before] == [(1, 16)]
    store(http, first, found_out(JOB))
    # A training without new measurements sends the profile that it received.
    store(http, second, found_out(JOB))
    assert kept(http, job_id) == before


def test_later_profile_of_a_trial_replaces_the_earlier_profile(http: httpx.Client, job_id: str) -> None:
    first, second = begin(http, job_id), begin(http, job_id)
    store(http, first, found_out(JOB, 1.0, [80.0]))
    store(http, second, found_out(JOB, 2.0))
    store(http, first, found_out(JOB, 3.0))
    energies = [each["samples"][0]["energy_j"] for each in kept(http, job_id)]
    assert energies == [3.0, 2.0]
    store(http, first, found_out(JOB, 3.0))
    assert [each["samples"][0]["energy_j"] for each in kept(http, job_id)] == energies


def test_each_trial_shows_the_chosen_power_limit(http: httpx.Client, job_id: str, any_server: ServerProcess) -> None:
    chosen, measured_only, _ = (begin(http, job_id) for _ in range(3))
    store(http, chosen, found_out(JOB))
    store(http, measured_only, found_out(JOB, 5.0, [100.0]) | {"chosen_limit_w": None})
    limits = [(one["power_limit_w"], one["power_limits"]) for one in http.get(f"/api/jobs/{job_id}").json()["trials"]]
    assert limits == [(80.0, 2), (None, 1), (None, None)]
    for source in (["--database-url", any_server.database_url], ["--server-url", any_server.url]):
        shown = bso_server("jobs", "show", job_id, *source)
        assert shown.returncode == 0, shown.stderr
        table = shown.stdout.split("\n\n")[3].splitlines()
        column = table[0].index("POWER LIMIT W")
        assert [line[column:].split("  ")[0] for line in table[1:]] == ["80 of 2", "- of 1", "-"]


@pytest.mark.parametrize("is_late", [False, True])
def test_profile_is_stored_before_or_after_the_end_of_the_trial(http: httpx.Client, job_id: str, is_late: bool) -> None:
    trial = begin(http, job_id)
    if not is_late:
        store(http, trial, found_out(JOB))
        http.patch("/trials/heartbeat", json=trial).raise_for_status()
    reached(http, trial, 500)
    if is_late:
        store(http, trial, found_out(JOB))
    (shown,) = http.get(f"/api/jobs/{job_id}").json()["trials"]
    assert (shown["state"], shown["power_limit_w"], shown["power_limits"]) == ("completed", 80.0, 2)


def test_deleting_a_job_deletes_the_profiles(http: httpx.Client, job_id: str) -> None:
    trial = begin(http, job_id)
    store(http, trial, found_out(JOB))
    http.delete("/jobs", params={"job_id": job_id}).raise_for_status()
    assert_refused(http.put("/trials/power_profile", json=trial | found_out(JOB)), 404, None)
    assert http.get(f"/api/jobs/{job_id}/power_profiles").status_code == 404
    http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
    assert dispatched(http, job_id)["power_profile"] is None


async def test_old_profiles_are_pruned_and_the_newest_of_each_size_stays(bso: JobService) -> None:
    # Before all dates that other tests leave in the database.
    bso.now = datetime(2001, 1, 1, tzinfo=UTC)
    sizes = []
    for energy_j in (1.0, 2.0, 3.0, 4.0):
        trial: TrialDispatch = await bso.suggest()
        sizes.append(trial.batch_size)
        body = trial.model_dump() | found_out(bso.job.model_dump(), energy_j)
        await bso.service.transact(bso.service.commands.store_power_profile, TrialPowerProfile.model_validate(body))
        await bso.report(trial, cost_j=500.0, metric=1.0)
        bso.wait(HOUR_S)
    newest = [number for number, size in enumerate(sizes, 1) if size not in sizes[number:]]
    assert len(newest) < len(sizes)
    before = await bso.show()

    forget = Transaction.delete_power_profiles_before
    assert await bso.service.prune(forget, timedelta(hours=5)) == 0
    assert await bso.service.prune(forget, timedelta(0)) == len(sizes) - len(newest)
    assert await bso.service.prune(forget, timedelta(0)) == 0
    left = (await bso.store.read(reading.list_power_profiles, bso.job_id)).profiles
    assert [each.trial_number for each in left] == newest
    # The limit of each trial is kept.
    assert await bso.show() == before
