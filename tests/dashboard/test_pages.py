"""The dashboard without a browser: figures against their twins, links, words, reports."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

from bso_server.settings import Settings
from bso_server.ui import units
from bso_server.ui.html import MEDIA_TYPES, static_file
from bso_server.ui.words import STATES
from tests.support import ROOT, dashboards
from tests.support.dashboard_pages import JOB, SETTLED, Page, assert_figures_match, in_app
from tests.support.jobs import job
from tests.support.servers import ServerProcess, bso_server
from tests.support.wire import assert_refused, begin, reached
from zeus_plugins.protocol import TrialState

UI = ROOT / "bso_server" / "ui"

ADDRESSES = [
    "",
    *(f"jobs/{name}" for name in (JOB, "bert-sst2", "llama-sft", dashboards.LONG_NAME[:200])),
    *(f"jobs/{JOB}/trials/{number}" for number in (1, 2, 10, 15)),
    *(f"jobs/{name}?at={number}" for name, number in ((JOB, 1), (JOB, 2), (JOB, 14), ("bert-sst2", 9))),
    *(f"jobs/{name}/trials/1" for name in ("bert-sst2", "llama-sft")),
    *(f"jobs/{name}/whatif" for name in ("bert-sst2", "llama-sft")),
    f"jobs/{JOB}/whatif?eta=0.9&beta=",
    "health",
]


@pytest.mark.parametrize("address", ADDRESSES)
async def test_each_figure_on_a_page_is_its_twins(http: httpx.AsyncClient, address: str) -> None:
    page = Page((await http.get(f"/ui/{address}")).raise_for_status().text)
    path, _, query = address.partition("?")
    twin = (await http.get(f"/ui/{path or 'jobs'}.json?{query}")).raise_for_status().json()
    assert len(page.figures) >= 1
    assert_figures_match(page, twin)
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.parametrize("address", [*ADDRESSES, "jobs/unknown", "tokens"])
async def test_a_page_leads_nowhere_but_below_its_own_prefix_and_runs_no_text(
    http: httpx.AsyncClient, address: str
) -> None:
    answer = await http.get(f"/ui/{address}")
    page = Page(answer.text)
    for link in page.links:
        assert link.startswith("#") or urljoin(f"http://h/a/b/ui/{address}", link).startswith("http://h/a/b/ui/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not [name for _, name in page.attributes if name.startswith("on") or name == "style"]
    assert "alert(1)</script>" not in answer.text


async def test_links_lead_to_pages_wherever_a_slash_ends_an_address(http: httpx.AsyncClient) -> None:
    for address in (
        "",
        "/",
        "/?q=resnet",
        f"/jobs/{JOB}",
        f"/jobs/{JOB}/",
        f"/jobs/{JOB}/trials/2/",
        f"/jobs/{JOB}/whatif",
        f"/jobs/{JOB}/whatif/",
        "/health",
        "/health/",
        "/tokens",
    ):
        links = Page((await http.get(f"/ui{address}")).text).links
        found = {urljoin(f"/ui{address}", link) for link in links if not link.startswith("#")}
        assert "/ui/" in found
        for link in found:
            assert link.startswith("/ui/")
            if link == "/ui/tokens/create":  # it takes a form
                continue
            assert (await http.get(link)).status_code == 200, (address, link)


async def test_a_job_may_be_called_as_the_pages_are(new_database: str, new_http: httpx.AsyncClient) -> None:
    dashboards.filled(new_database, dashboards.registering("ui"))
    for address in ("/ui/jobs/ui", "/ui/jobs/ui/"):
        links = Page((await new_http.get(address)).raise_for_status().text).links
        assert "/ui/health" in {urljoin(address, link) for link in links}


async def test_somebody_sees_what_is_wrong_with_the_server(new_database: str, new_http: httpx.AsyncClient) -> None:
    assert "All is well" in Page((await new_http.get("/ui/health")).text).text
    twin = await new_http.get("/ui/health.json")
    found = twin.json()
    assert (found["database"], found["trouble"], found["process"]) == ("sqlite", None, os.getpid())
    assert found["schema_found"] == found["schema_needed"]
    again = await new_http.get("/ui/health.json", headers={"If-None-Match": twin.headers["etag"]})
    assert again.status_code == 304
    with closing(sqlite3.connect(new_database.removeprefix("sqlite:///"))) as database:
        database.execute("UPDATE alembic_version SET version_num = '0000'")
        database.commit()
    page = Page((await new_http.get("/ui/health")).raise_for_status().text)
    assert "Requests cannot be served The database has another schema" in page.text
    assert (await new_http.get("/ui/health.json")).json()["schema_found"] == "0000"


async def test_the_address_of_the_server_leads_to_its_pages(http: httpx.AsyncClient) -> None:
    answer = await http.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "./ui/")


async def test_what_is_wrong_is_told_as_a_page_or_as_json(http: httpx.AsyncClient) -> None:
    for address in ("jobs/unknown", f"jobs/{JOB}/trials/99", "jobs/a%20b"):
        answer = await http.get(f"/ui/{address}")
        assert answer.status_code in {404, 422}
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "All jobs" in Page(answer.text).text
    assert_refused(await http.get("/ui/jobs/unknown.json"), 404, None, "unknown")
    assert (await http.get("/ui/static/other.css")).status_code == 404


async def test_a_job_named_like_a_twin_has_a_page(new_database: str, new_http: httpx.AsyncClient) -> None:
    dashboards.filled(new_database, dashboards.registering("a.json", "a"))
    links = Page((await new_http.get("/ui/")).text).links
    assert {"./jobs/a", "./jobs/a.json/"} <= set(links)
    assert "a.json" in Page((await new_http.get("/ui/jobs/a.json/")).text).text
    assert (await new_http.get("/ui/jobs/a.json")).json()["view"]["job"]["job_id"] == "a"
    assert (await new_http.get("/ui/jobs/a.json.json")).json()["view"]["job"]["job_id"] == "a.json"


async def test_a_run_is_drawn_beside_what_was_expected_of_it(http: httpx.AsyncClient) -> None:
    bands = {}
    for number in (1, 3, 15):
        text = (await http.get(f"/ui/jobs/{JOB}/trials/{number}")).raise_for_status().text
        bands[number] = text.count('<rect class="predicted"')
    # Of the first run nothing was expected; the others have it beside the metric and beside the cost.
    assert bands == {1: 0, 3: 2, 15: 2}


async def test_a_jobs_page_has_the_bands_of_its_explanation(http: httpx.AsyncClient) -> None:
    page = (await http.get(f"/ui/jobs/{JOB}")).text
    view = (await http.get(f"/api/jobs/{JOB}")).json()
    decision = (await http.get(f"/api/jobs/{JOB}/explanation")).json()["decision"]
    arms = {arm["batch_size"]: arm for arm in view["arms"]}
    for size in decision["sizes"]:
        expected_j, low_j, high_j = (arms[size["batch_size"]][f"expected_{name}_j"] for name in ("cost", "low", "high"))
        assert (expected_j, low_j, high_j) == pytest.approx(
            (size["expected_cost_j"], size["low_j"], size["high_j"]), rel=1e-3
        )
        assert f"nine times in ten between {units.energy(low_j)} and {units.energy(high_j)}" in page


async def test_a_report_is_one_file_that_leads_nowhere(dashboard_database: str, tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    async with in_app(Settings(database_url=dashboard_database)) as http:
        answers.append((await http.get(f"/ui/jobs/{JOB}/report.html")).raise_for_status())
        assert (await http.get("/ui/jobs/unknown/report.html")).status_code == 404
    page, (style,) = Page(answers[0].text), re.findall("<style>(.*?)</style>", answers[0].text, re.DOTALL)
    assert page.links == [link for link in page.links if link.startswith("#m-")]
    assert "script" not in {tag for tag, _ in page.attributes}
    assert " ago" not in page.text
    assert "256 is the best batch size so far" in page.text
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answers[0].headers["content-security-policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")

    command = ["jobs", "report", JOB, "--database-url", dashboard_database]
    assert bso_server(*command, "--output", str(tmp_path / "report.html")).returncode == 0
    for text in (bso_server(*command).stdout, (tmp_path / "report.html").read_text()):
        assert Page(text).figures == page.figures


async def test_jobs_are_found_by_a_part_of_their_names_page_by_page(
    new_database: str, new_http: httpx.AsyncClient
) -> None:
    names = [f"job-{number:02}" for number in range(60)]
    dashboards.filled(new_database, dashboards.registering(*names, "other_x"))
    first = Page((await new_http.get("/ui/", params={"q": "job-"})).text)
    assert len([link for link in first.links if link.startswith("./jobs/job-")]) == 50
    (following,) = [link for link in first.links if link.startswith("?after")]
    second = Page((await new_http.get(urljoin("/ui/", following))).text)
    assert [link for link in second.links if link.startswith("./jobs/job-")] == [
        f"./jobs/job-{number}" for number in range(50, 60)
    ]
    for text, jobs in (("_x", 1), ("%", 0), ("_", 1)):
        assert len((await new_http.get("/ui/jobs.json", params={"q": text})).json()["jobs"]) == jobs
    assert "No job has “none”" in Page((await new_http.get("/ui/", params={"q": "none"})).text).text


class TestWords:
    @pytest.mark.parametrize(
        ("address", "said"),
        [
            ("", "saved so far"),
            (f"jobs/{JOB}", "256 is the best batch size so far A run at 256: expected"),
            (f"jobs/{JOB}", "Whether 256 saves against your default, 64, is not shown yet."),
            (f"jobs/{JOB}", "Control runs are off."),
            (f"jobs/{SETTLED}", "256 saves "),
            (f"jobs/{SETTLED}", "All runs so far, with exploration and control runs, saved "),
            ("jobs/llama-sft", "No run has reached the target yet 2 crashed and 1 does not fit"),
            (f"jobs/{JOB}", "Run 15 got 256. Best so far, expected"),
            (f"jobs/{JOB}/trials/3", "A run to the target was expected to cost "),
            (f"jobs/{JOB}/trials/1", "64 reached the target, 0.9, after"),
            (f"jobs/{JOB}/trials/10", "256 crashed"),
            (f"jobs/{JOB}/trials/15", "A step takes least energy"),
            (f"jobs/{JOB}", "Power limits at 256"),
        ],
    )
    async def test_a_page_says_first_what_matters(self, http: httpx.AsyncClient, address: str, said: str) -> None:
        text = Page((await http.get(f"/ui/{address}")).text).text.replace("\N{NO-BREAK SPACE}", " ")
        assert said in text

    async def test_a_job_of_which_every_size_has_missed_the_target_is_stuck(self, new_http: httpx.AsyncClient) -> None:
        terms = job(batch_sizes=(16,), default_batch_size=16, policy="gp_voi", max_epochs=2)
        terms["fingerprint"] = {"monitor": "val_acc"}
        assert (await new_http.post("/jobs", json=terms)).status_code == 201
        trial = (await new_http.get("/jobs/batch_size", params={"job_id": terms["job_id"]})).json()
        told = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
        totals = {"time": 1, "energy": 100, "metric": 0.5, "current_epoch": 2}
        assert (await new_http.post("/report", json=told | totals)).json()["stop_train"]
        text = Page((await new_http.get(f"/ui/jobs/{terms['job_id']}")).text).text.replace("\N{NO-BREAK SPACE}", " ")
        assert "Stuck: every batch size has missed the target No batch size has reached val_acc 0.9; " in text
        assert "the best run reached 0.5 at 16: lower the target or raise max_epochs." in text

    async def test_money_and_carbon_are_spoken_of_where_the_settings_tell_of_them(
        self, dashboard_database: str
    ) -> None:
        async with in_app(Settings(database_url=dashboard_database)) as http:
            text = (await http.get(f"/ui/jobs/{JOB}")).text
            assert "EUR" not in text
            assert "CO₂" not in text
        prices = Settings(database_url=dashboard_database, price_per_kwh=1000, currency="EUR", carbon_g_per_kwh=300)
        async with in_app(prices) as http:
            page = Page((await http.get(f"/ui/jobs/{SETTLED}")).text)
            saved = (await http.get(f"/ui/jobs/{SETTLED}.json")).json()["view"]["savings"]["energy_j"]["saved"]
            assert f"{saved / 3.6e6 * 1000:,.2f} EUR" in page.text
            assert re.search(r"\d+ g CO₂", page.text)

    async def test_an_empty_server_says_how_to_begin(self, new_http: httpx.AsyncClient) -> None:
        page = Page((await new_http.get("/ui/")).text)
        assert "No job yet" in page.text
        assert "ZeusBSOCallback" in page.text


def test_revisions_stand_between_the_runs_of_a_job(any_server: ServerProcess) -> None:
    with httpx.Client(base_url=any_server.url) as http:
        fields = job(policy="gp_voi")
        path = f"/ui/jobs/{fields['job_id']}"

        def register(**changes: Any) -> None:
            http.post("/jobs", json={**fields, **changes, "revise": True}).raise_for_status()

        register()
        for _ in range(2):
            reached(http, begin(http, fields["job_id"]), 500.0)
        register(batch_sizes=[16, 32], max_epochs=6)
        register(batch_sizes=[16, 32], max_epochs=6, gpu_model="H100")
        reached(http, begin(http, fields["job_id"]), 500.0)
        text = http.get(path).raise_for_status().text
        places = [
            text.index(part) for part in ("gpu_model V100 -&gt; H100", "batch_sizes +32 -8, max_epochs", 'id="run-2"')
        ]
        assert text.index('id="run-3"') < places[0] < places[1] < places[2]
        assert text.count('<span class="sub">other GPUs</span>') == 2
        twin = http.get(f"{path}.json").json()
        assert [each["trials"] for each in twin["view"]["revisions"]] == [2, 2]
        for address in ("", "/trials/2", "?at=3", "/whatif", "/report.html"):
            page = Page(http.get(f"{path}{address}").raise_for_status().text)
            assert "Traceback" not in page.text


def test_every_kind_of_database_shows_its_pages(any_server: ServerProcess) -> None:
    job_id = f"ui_{uuid.uuid4().hex[:8]}-a"
    with httpx.Client(base_url=any_server.url) as http:
        http.post("/jobs", json=job(job_id=job_id, job_id_prefix=job_id)).raise_for_status()
        for cost_j in (500.0, 300.0):
            reached(http, begin(http, job_id), cost_j)
        begin(http, job_id)
        discarded = f"/api/jobs/{job_id}/trials/2/discard"

        def figures() -> list[dict[str, Any]]:
            addresses = ("", "?at=3", "/trials/1", "/report.html")
            for address in addresses:
                Page(http.get(f"/ui/jobs/{job_id}{address}").raise_for_status().text)
            # An underscore is no wildcard, and letters keep their case where the database tells them apart.
            assert http.get("/ui/jobs.json", params={"q": job_id[:5].replace("_", "%")}).json()["jobs"] == []
            (line,) = http.get("/ui/jobs.json", params={"q": job_id}).raise_for_status().json()["jobs"]
            return [line, http.get(f"/ui/jobs/{job_id}.json").json()]

        line, page = figures()
        assert (line["running"], line["job"]["trials"], page["running"]) == (1, 3, 1)
        assert line["savings"] == page["view"]["savings"]
        assert [point["cost_j"] for point in page["points"]] == [500, 300, None]
        http.post(discarded).raise_for_status()
        line, page = figures()
        assert [point["state"] for point in line["latest"]] == ["completed", "withdrawn", "running"]
        assert [each["runs"] for each in page["means"]] == [1]


def test_the_files_beside_the_pages_are_small() -> None:
    assert len(static_file("ui.js")) <= 6 * 1024
    files = [path for path in UI.rglob("*") if path.is_file() and path.suffix in {".css", ".html", ".js", ".svg"}]
    assert sum(path.stat().st_size for path in files) <= 66 * 1024
    assert {path.name for path in (UI / "static").iterdir()} == set(MEDIA_TYPES)


def test_every_state_has_a_shape_and_words() -> None:
    shapes = set(re.findall('id="m-([a-z_]+)"', (UI / "templates" / "parts.html").read_text()))
    assert set(TrialState) <= shapes
    assert set(STATES) == set(TrialState)
