"""Metrics watched by a training: stored with its trial, shown by size, and optional in reports."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest

from tests.support.exports import export_over, import_beside, renamed
from tests.support.jobs import job
from tests.support.wire import OURS, assert_refused, begin, report

pytestmark = pytest.mark.storage

FIRST = {"time": 1.0, "energy": 100.0, "metric": 0.5, "current_epoch": 1}
LAST = {"time": 2.0, "energy": 200.0, "metric": 0.95, "current_epoch": 2}


@pytest.fixture
def job_id(http: httpx.Client) -> str:
    job_id = f"watched-{uuid.uuid4().hex[:8]}"
    http.post("/jobs", json=job(job_id=job_id, num_pruning_rounds=1)).raise_for_status()
    return job_id


def shown(http: httpx.Client, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/api/jobs/{job_id}").raise_for_status().json()
    return found


def test_last_report_determines_the_watched_values_of_a_trial(http: httpx.Client, job_id: str) -> None:
    trial = begin(http, job_id)
    report(http, trial, **FIRST, **OURS, watched={"val_loss": 2.5, "gone": 1.0}).raise_for_status()
    assert shown(http, job_id)["trials"][0]["watched"] == {"val_loss": 2.5, "gone": 1.0}
    report(http, trial, **LAST, **OURS, watched={"val_loss": 0.1, "Ä/b": -1e-300}).raise_for_status()
    (seen,) = shown(http, job_id)["trials"]
    assert (seen["state"], seen["watched"]) == ("completed", {"val_loss": 0.1, "Ä/b": -1e-300})


def test_report_without_watched_values_keeps_earlier_values(http: httpx.Client, job_id: str) -> None:
    trial, of_zeus = begin(http, job_id), begin(http, job_id)
    report(http, trial, **FIRST, **OURS, watched={"val_loss": 2.5}).raise_for_status()
    report(http, trial, **LAST, **OURS).raise_for_status()
    report(http, of_zeus, **LAST).raise_for_status()
    assert [each["watched"] for each in shown(http, job_id)["trials"]] == [{"val_loss": 2.5}, None]


def test_each_size_shows_watched_values_of_completed_runs(http: httpx.Client, job_id: str) -> None:
    for values in ({"f1": 0.5, "val_loss": 1.0}, {"f1": 0.5, "val_loss": 2.0}, None):
        trial = begin(http, job_id)
        report(http, trial, **LAST, **OURS, watched=values).raise_for_status()
        # A crash in between contributes no value.
        crashed = begin(http, job_id)
        report(http, crashed, **FIRST, **OURS, watched={"f1": 0.0}).raise_for_status()
        http.patch("/trials", json=crashed).raise_for_status()
    metrics = {arm["batch_size"]: arm["metrics"] for arm in shown(http, job_id)["arms"]}
    runs = [each for found in metrics.values() for each in found]
    assert sum(each["runs"] for each in runs if each["name"] is None) == 3
    assert sum(each["runs"] * each["mean"] for each in runs if each["name"] == "val_loss") == 3.0
    assert sum(each["runs"] for each in runs if each["name"] == "f1") == 2
    # An imported job has the same counts.
    copy = renamed(export_over(http, job_id))
    import_beside(http, copy)
    again = shown(http, copy[0]["job"]["job_id"])
    assert {arm["batch_size"]: arm["metrics"] for arm in again["arms"]} == metrics


@pytest.mark.parametrize(
    "watched",
    [
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "much"}',
        '{"": 1}',
        '{"a\\u0000b": 1}',
        json.dumps({str(number): 1.0 for number in range(33)}),
    ],
)
def test_unstorable_watched_values_are_refused(http: httpx.Client, job_id: str, watched: str) -> None:
    trial = begin(http, job_id)
    body = json.dumps({**trial, **LAST, **OURS})[:-1] + f', "watched": {watched}}}'
    answer = http.post("/report", content=body, headers={"Content-Type": "application/json"})
    assert_refused(answer, 422, None, "watched")
    assert shown(http, job_id)["trials"][0]["state"] == "running"


def test_endless_new_names_do_not_enlarge_an_arm(http: httpx.Client, job_id: str) -> None:
    for number in range(8):
        trial = begin(http, job_id)
        names = {f"m{number}-{each:02}": 1.0 for each in range(16)}
        report(http, trial, **LAST, **OURS, watched=names).raise_for_status()
    # 32 names, and the job's own metric.
    assert max(len(arm["metrics"]) for arm in shown(http, job_id)["arms"]) == 33


MARGINS = {"test_acc": 0.005, "fid": -0.5}


@pytest.mark.parametrize("fields", [{"policy": "zeus"}, {}], ids=["zeus", "no policy"])
def test_margins_require_a_policy_with_margins(http_on_sqlite: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http_on_sqlite.post("/jobs", json=job(no_worse_than_default=MARGINS, **fields))
    assert_refused(answer, 422, "no_worse_than_default", "policy 'zeus'", "gp_voi")


@pytest.mark.parametrize("margins", [{}, {"": 1.0}, {"a": None}, {"a": "much"}, dict.fromkeys("abcdefghijklmnopq", 1)])
def test_invalid_margins_are_refused(http_on_sqlite: httpx.Client, margins: dict[str, Any]) -> None:
    answer = http_on_sqlite.post("/jobs", json=job(policy="gp_voi", no_worse_than_default=margins))
    assert_refused(answer, 422, None, "no_worse_than_default")


def test_margins_are_part_of_the_jobs_configuration(http: httpx.Client) -> None:
    body = job(policy="gp_voi", no_worse_than_default=MARGINS)
    assert http.post("/jobs", json=body).status_code == 201
    assert http.post("/jobs", json=body).json()["no_worse_than_default"] == MARGINS
    for other in (None, {"test_acc": 0.01}):
        assert_refused(http.post("/jobs", json=body | {"no_worse_than_default": other}), 409, None, "no_worse")


def test_size_worse_by_more_than_the_margin_is_left_out(http: httpx.Client) -> None:
    job_id = f"left-{uuid.uuid4().hex[:8]}"
    fields = {"job_id": job_id, "policy": "gp_voi", "no_worse_than_default": {"test_acc": 0.005}}
    http.post("/jobs", json=job(**fields)).raise_for_status()
    for number in range(12):
        size, cost_j = (16, 500.0) if number % 2 else (8, 50.0)
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        trial = http.post("/trials", json={"job_id": job_id, "batch_size": size}, headers=headers).json()
        trial = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
        values = {"test_acc": 0.9 + size / 1000 + number / 10000}
        result = LAST | {"time": cost_j / 100, "energy": cost_j}
        assert report(http, trial, **result, **OURS, watched=values).json()["converged"]
    small, default = shown(http, job_id)["arms"]
    assert default["left_out"] is None
    assert [each["verdict"] for each in default["metrics"]] == [None, None]
    assert small["left_out"].startswith("its test_acc is 0.0081 ± 0.00")
    assert small["left_out"].endswith(" below that of your default, 16, and you allow 0.005")
    _, acc = small["metrics"]
    assert (acc["name"], acc["verdict"], acc["margin"], acc["lower_is_better"]) == ("test_acc", "worse", 0.005, False)
    assert acc["low"] < -0.0081 < acc["high"] < -0.005
    # The size is left out although its runs cost a tenth.
    trial = http.get("/jobs/batch_size", params={"job_id": job_id}).json()
    assert trial["batch_size"] == 16
    assert trial["reason"].endswith(f"; 8 is left out: {small['left_out']}")
    text = http.get(f"/ui/jobs/{job_id}").text
    assert f"8 is left out: {small['left_out']}." in text
