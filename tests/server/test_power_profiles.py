"""Power-limit profiles on the server: stored with the trial that measured new limits, and sent to later trials."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.support.exports import power_profiles_over
from tests.support.jobs import JOB, job
from tests.support.power_limit_bench import found_out
from tests.support.servers import ServerProcess, bso_server
from tests.support.wire import assert_refused, begin, reached


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
    before = power_profiles_over(http, job_id)
    assert [(each["trial_number"], each["batch_size"]) for each in before] == [(1, 16)]
    store(http, first, found_out(JOB))
    # A training without new measurements sends the profile that it received.
    store(http, second, found_out(JOB))
    assert power_profiles_over(http, job_id) == before


def test_later_profile_of_a_trial_replaces_the_earlier_profile(http: httpx.Client, job_id: str) -> None:
    first, second = begin(http, job_id), begin(http, job_id)
    store(http, first, found_out(JOB, 1.0, [80.0]))
    store(http, second, found_out(JOB, 2.0))
    store(http, first, found_out(JOB, 3.0))
    energies = [each["samples"][0]["energy_j"] for each in power_profiles_over(http, job_id)]
    assert energies == [3.0, 2.0]
    store(http, first, found_out(JOB, 3.0))
    assert [each["samples"][0]["energy_j"] for each in power_profiles_over(http, job_id)] == energies


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
    http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
    assert dispatched(http, job_id)["power_profile"] is None
