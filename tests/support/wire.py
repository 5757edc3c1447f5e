"""The training routes over HTTP, as a Zeus client calls them."""

from __future__ import annotations

from typing import Any

import httpx


def begin(http: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = http.get("/jobs/batch_size", params={"job_id": job_id})
    assert answer.status_code == 200, answer.text
    trial: dict[str, Any] = answer.json()
    return {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}


# Distinguishes our client's reports from Zeus's, where each rank reports each epoch.
OURS: dict[str, Any] = {"energy_source": None}


def report(http: httpx.Client, trial: dict[str, Any], **result: Any) -> httpx.Response:
    return http.post("/report", json={**trial, **result})


def reached(http: httpx.Client, trial: dict[str, Any], cost_j: float) -> dict[str, Any]:
    """Report the target reached at `cost_j`, with η = 0.5 and 100 W."""
    answer = report(http, trial, time=cost_j / 100, energy=cost_j, metric=0.95, current_epoch=2, **OURS)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert body["converged"], body
    return body


def assert_refused(answer: httpx.Response, status: int, field: str | None, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["message"] == body["detail"]
    for word in words:
        assert word in body["message"]
    if field is not None:
        assert field in {error["field"] for error in body["errors"]}, body
