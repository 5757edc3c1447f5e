"""Power limits of trials, which come with reports and endings."""

from __future__ import annotations

import uuid

import httpx
import pytest

from tests.support.jobs import job
from tests.support.servers import ServerProcess, bso_server
from tests.support.wire import OURS, assert_refused, begin, report


@pytest.fixture
def job_id(http: httpx.Client) -> str:
    job_id = f"limits-{uuid.uuid4().hex[:8]}"
    http.post("/jobs", json=job(job_id=job_id)).raise_for_status()
    return job_id


def test_each_trial_shows_its_power_limit(http: httpx.Client, job_id: str, any_server: ServerProcess) -> None:
    chosen, searching, crashed, without = (begin(http, job_id) for _ in range(4))
    first = {"time": 1, "energy": 100, "metric": 0.25, "current_epoch": 1, **OURS}
    # A report without a power limit keeps the limit of the report before.
    for epoch, limit in ((1, {"power_limits": 1}), (2, {"power_limit_w": 80, "power_limits": 2}), (3, {})):
        totals = {"time": epoch, "energy": 100 * epoch, "metric": 0.3 * epoch, "current_epoch": epoch}
        report(http, chosen, **totals, **OURS, **limit).raise_for_status()
    report(http, searching, **first, power_limits=1).raise_for_status()
    http.patch("/trials", json=crashed | {"power_limit_w": 60, "power_limits": 3}).raise_for_status()
    report(http, without, **first, power_limit_w=80).raise_for_status()
    limits = [(one["power_limit_w"], one["power_limits"]) for one in http.get(f"/api/jobs/{job_id}").json()["trials"]]
    assert limits == [(80.0, 2), (None, 1), (60.0, 3), (None, None)]
    for source in (["--database-url", any_server.database_url], ["--server-url", any_server.url]):
        shown = bso_server("jobs", "show", job_id, *source)
        assert shown.returncode == 0, shown.stderr
        table = shown.stdout.split("\n\n")[3].splitlines()
        column = table[0].index("POWER LIMIT W")
        assert [line[column:].split("  ")[0] for line in table[1:]] == ["80 of 2", "- of 1", "60 of 3", "-"]


@pytest.mark.parametrize("path", ["/trials/probe", "/trials/power_profile"])
def test_messages_of_earlier_clients_are_refused(http: httpx.Client, job_id: str, path: str) -> None:
    assert_refused(http.put(path, json=begin(http, job_id)), 404, None, "update zeus-plugins where the training runs")
