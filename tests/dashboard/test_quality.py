"""The metrics at the end of the runs of each size, on the job's page and in its report."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from tests.support.dashboard_pages import Page, assert_figures_match
from tests.support.jobs import job


async def ran(http: httpx.AsyncClient, runs: list[tuple[int, float]], **fields: Any) -> str:
    """Record runs that reached the target, each a batch size and its last metric; return the job's id."""
    job_id = f"job-{uuid.uuid4().hex[:8]}"
    (await http.post("/jobs", json=job(job_id=job_id, policy="gp_voi", **fields))).raise_for_status()
    for size, metric in runs:
        answer = await http.post(
            "/trials", json={"job_id": job_id, "batch_size": size}, headers={"Idempotency-Key": uuid.uuid4().hex}
        )
        trial = answer.raise_for_status().json()
        result = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
        result |= {"time": 5.0, "energy": 500.0, "metric": metric, "current_epoch": 2, "energy_source": "nvml"}
        assert (await http.post("/report", json=result)).raise_for_status().json()["converged"]
    return job_id


async def test_job_shows_metric_of_each_run_and_mean_by_size(new_http: httpx.AsyncClient) -> None:
    job_id = await ran(new_http, [(8, 0.91), (8, 0.95), (16, 0.92)])
    twin = (await new_http.get(f"/ui/jobs/{job_id}.json")).json()
    small, default = [arm["metrics"] for arm in twin["view"]["arms"]]
    assert [(each["name"], each["runs"], round(each["mean"], 9), round(each["std"], 9)) for each in small] == [
        (None, 2, 0.93, 0.028284271)
    ]
    (own,) = default
    assert (own["name"], own["runs"], own["mean"], own["std"], own["verdict"]) == (None, 1, 0.92, None, None)
    page = Page((await new_http.get(f"/ui/jobs/{job_id}")).text)
    assert_figures_match(page, twin)
    shown = {path: text for _, path, text in page.figures}
    assert [shown[f"view.trials.{number}.metric"] for number in range(3)] == ["0.91", "0.95", "0.92"]
    assert (shown["view.arms.0.metrics.0.mean"], shown["view.arms.0.metrics.0.std"]) == ("0.93", "0.0283")


async def test_each_size_has_verdict_against_default(new_http: httpx.AsyncClient) -> None:
    values = [0.9 + number / 10000 for number in range(8)]
    job_id = await ran(new_http, [(size, value) for value in values for size in (8, 16)])
    twin = (await new_http.get(f"/ui/jobs/{job_id}.json")).json()
    page = Page((await new_http.get(f"/ui/jobs/{job_id}")).text)
    assert_figures_match(page, twin)
    (found,) = twin["view"]["arms"][0]["metrics"]
    assert found["verdict"] == "no_worse"
    assert found["low"] == pytest.approx(-found["high"])
    assert "Is the model as good?" in page.text
    assert "no worse within ±0.009" in page.text
