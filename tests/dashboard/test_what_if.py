"""The dashboard's page of a job under another η and β, and the command on it that replays the job."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from bso_server.cli import main
from bso_server.settings import Settings
from tests.support import dashboards
from tests.support.dashboard_pages import JOB, Page, in_app


async def test_page_says_where_larger_size_would_be_best(new_database: str, new_http: httpx.AsyncClient) -> None:
    async def fill(life: dashboards.Life) -> None:
        # Large sizes are fast and take more power.
        registered = await life.register("job-1", eta_knob=0.2)
        for _ in range(12):
            await life.run(registered, reports_each=False)

    dashboards.filled(new_database, fill)
    twin = (await new_http.get("/ui/jobs/job-1/whatif.json")).json()
    assert (twin["eta"], twin["beta"]) == (0.2, 2.0)
    assert twin["batch_size"] == twin["own_batch_size"]
    for span in twin["best_by_eta"]:
        eta = (span["low"] + span["high"]) / 2
        there = (await new_http.get("/ui/jobs/job-1/whatif.json", params={"eta": eta})).json()
        assert there["batch_size"] == span["batch_size"]
        least = min(there["means"], key=lambda each: each["cost_j"])
        assert there["bound_j"] == pytest.approx(2 * least["cost_j"])
        cost_j = eta * least["energy_j"] + (1 - eta) * 700 * least["time_s"]
        assert least["cost_j"] == pytest.approx(cost_j)
    none = (await new_http.get("/ui/jobs/job-1/whatif.json", params={"beta": ""})).json()
    assert (none["beta"], none["bound_j"]) == (None, None)


@pytest.mark.parametrize("beta", [4 / 3, 1e6, 0.00125])
async def test_own_beta_of_job_is_accepted(new_database: str, new_http: httpx.AsyncClient, beta: float) -> None:
    dashboards.filled(new_database, dashboards.registering("job-1", beta_knob=beta))
    address = "/ui/jobs/job-1/whatif"
    page = Page((await new_http.get(address)).raise_for_status().text)
    (twin,) = [link for link in page.links if "whatif.json" in link]
    found = (await new_http.get(urljoin(address, twin))).raise_for_status().json()
    assert found["beta"] == pytest.approx(beta)


@pytest.mark.parametrize("query", ["eta=2", "eta=nan", "eta=x", "beta=0", "beta=-1", "beta=nan"])
async def test_values_outside_range_are_refused(http: httpx.AsyncClient, query: str) -> None:
    assert (await http.get(f"/ui/jobs/{JOB}/whatif?{query}")).status_code == 422


async def test_page_before_first_success_has_no_comparison(http: httpx.AsyncClient) -> None:
    page = Page((await http.get("/ui/jobs/llama-sft/whatif")).raise_for_status().text)
    assert "Nothing is known until a run has reached the target" in page.text
    assert "bso-server simulate" not in page.text
    assert (await http.get("/ui/jobs/unknown/whatif")).status_code == 404


@pytest.mark.parametrize(
    ("query", "etas", "options"),
    [
        ("", [0.5], "--eta 0.5 --beta 2"),
        ("?eta=0.1&beta=1.5", [0.5, 0.1], "--eta 0.5 --eta 0.1 --beta 1.5"),
        ("?eta=0.9&beta=", [0.5, 0.9], "--eta 0.5 --eta 0.9 --beta none"),
    ],
)
async def test_command_on_page_replays_job(
    dashboard_database: str, tmp_path: Path, query: str, etas: list[float], options: str
) -> None:
    async with in_app(Settings(database_url=dashboard_database)) as http:
        text = (await http.get(f"/ui/jobs/{JOB}/whatif{query}")).raise_for_status().text
    (command,) = re.findall('<code id="replay">bso-server (.*)</code>', text)
    assert command.endswith(options)
    results = tmp_path / "results.json"
    # This simulates fewer jobs than the command asks for: the last of two equal options counts.
    more = ["--seeds", "1", "--database-url", dashboard_database, "--json", str(results)]
    assert await asyncio.to_thread(main, [*command.split(), *more]) == 0
    found = json.loads(results.read_text())
    comparisons = found.get("workloads", [found])
    assert [each["eta"] for each in comparisons] == etas
    for each in comparisons:
        assert each["workload"]["name"] == JOB
        assert each["spending"]["recurrences"] == 50
        assert set(each["policies"]) == {"gp_voi"}
