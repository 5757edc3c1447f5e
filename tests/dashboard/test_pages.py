"""The dashboard without a browser: figures against their twins, links, words, reports."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

from bso_server.cli import main
from bso_server.settings import Settings
from bso_server.ui import html, units
from bso_server.ui.html import MEDIA_TYPES, static_file
from bso_server.ui.words import STATES
from tests.support import ROOT, dashboards
from tests.support.dashboard_pages import JOB, SETTLED, Page, assert_figures_match, in_app
from tests.support.jobs import job
from tests.support.servers import ServerProcess
from tests.support.wire import assert_refused, begin, reached
from zeus_plugins.protocol import TrialState

UI = ROOT / "bso_server" / "ui"

ADDRESSES = [
    "",
    *(f"jobs/{name}" for name in (JOB, "bert-sst2", "llama-sft", dashboards.LONG_NAME[:200])),
    *(f"jobs/{JOB}/trials/{number}" for number in (1, 2, 10, 14, 15)),
    *(f"jobs/{name}/trials/{number}" for name, number in (("bert-sst2", 1), ("bert-sst2", 9), ("llama-sft", 1))),
]


@pytest.mark.parametrize("address", ADDRESSES)
async def test_each_figure_on_page_agrees_with_twin(http: httpx.AsyncClient, address: str) -> None:
    page = Page((await http.get(f"/ui/{address}")).raise_for_status().text)
    path, _, query = address.partition("?")
    twin = (await http.get(f"/ui/{path or 'jobs'}.json?{query}")).raise_for_status().json()
    assert len(page.figures) >= 1
    assert_figures_match(page, twin)
    assert len(page.ids) == len(set(page.ids))


@pytest.mark.parametrize("address", [*ADDRESSES, "jobs/unknown", "tokens"])
async def test_page_links_below_own_prefix_only_and_runs_no_text(http: httpx.AsyncClient, address: str) -> None:
    answer = await http.get(f"/ui/{address}")
    page = Page(answer.text)
    for link in page.links:
        if link.startswith(html.DOCS):
            assert (ROOT / "docs" / link.removeprefix(html.DOCS).partition("#")[0]).is_file()
            continue
        assert link.startswith("#") or urljoin(f"http://h/a/b/ui/{address}", link).startswith("http://h/a/b/ui/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not [name for _, name in page.attributes if name.startswith("on") or name == "style"]
    assert "alert(1)</script>" not in answer.text


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        (f"jobs/{JOB}/whatif", f"bso-server simulate --job {JOB} --eta"),
        (f"jobs/{JOB}/whatif.json", f"bso-server simulate --job {JOB} --eta"),
        (f"jobs/{JOB}/report.html", "Print or save"),
        ("health/", "GET /health/ready"),
        ("health.json", "GET /health/ready"),
        ("tokens", "bso-server token"),
        ("tokens.json", "bso-server token"),
    ],
)
async def test_removed_page_names_its_replacement(http: httpx.AsyncClient, address: str, instead: str) -> None:
    answer = await http.get(f"/ui/{address}")
    assert answer.status_code == 410
    assert instead.lower() in answer.text.lower()


async def test_command_on_page_replays_job(dashboard_database: str, tmp_path: Path) -> None:
    async with in_app(Settings(database_url=dashboard_database)) as http:
        text = (await http.get(f"/ui/jobs/{JOB}")).raise_for_status().text
    (command,) = re.findall("<code>bso-server (simulate .*?)</code>", text)
    results = tmp_path / "results.json"
    fewer = ["--recurrences", "10", "--seeds", "1", "--database-url", dashboard_database, "--json", str(results)]
    assert await asyncio.to_thread(main, [*command.split(), *fewer]) == 0
    found = json.loads(results.read_text())
    assert (found["workload"]["name"], found["eta"]) == (JOB, 0.9)


async def test_links_lead_to_pages_with_and_without_final_slash(http: httpx.AsyncClient) -> None:
    for address in (
        "",
        "/",
        "/?q=resnet",
        f"/jobs/{JOB}",
        f"/jobs/{JOB}/",
        f"/jobs/{JOB}/trials/2/",
        "/report",
        "/report/",
    ):
        links = Page((await http.get(f"/ui{address}")).text).links
        found = {urljoin(f"/ui{address}", link) for link in links if not link.startswith(("#", "https:"))}
        assert "/ui/" in found
        for link in found:
            assert link.startswith("/ui/")
            assert (await http.get(link)).status_code == 200, (address, link)


async def test_job_may_have_name_of_page(new_database: str, new_http: httpx.AsyncClient) -> None:
    dashboards.filled(new_database, dashboards.registering("ui"))
    for address in ("/ui/jobs/ui", "/ui/jobs/ui/"):
        links = Page((await new_http.get(address)).raise_for_status().text).links
        assert "/ui/report" in {urljoin(address, link) for link in links}


async def test_address_of_server_redirects_to_pages(http: httpx.AsyncClient) -> None:
    answer = await http.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "./ui/")


async def test_error_is_answered_as_page_or_as_json(http: httpx.AsyncClient) -> None:
    browser = {"Accept": "text/html,*/*"}
    for address, status in {
        "/ui/jobs/unknown": 404,
        f"/ui/jobs/{JOB}/trials/99": 404,
        "/ui/jobs/a%20b": 422,
    }.items():
        answer = await http.get(address, headers=browser)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        page = Page(answer.text)
        assert "All jobs" in page.text
        assert "/ui/report" in {urljoin(address, link) for link in page.links}
    # Unknown routes are answered alike for every client.
    for address in ("/ui/no/such/page", "/nowhere/at/all"):
        assert_refused(await http.get(address, headers=browser), 404, None, "Not Found")
    refused = await http.get("/report", headers=browser)
    assert (refused.status_code, "allow" in refused.headers) == (405, True)
    assert_refused(await http.get("/ui/jobs/unknown.json"), 404, None, "unknown")
    assert (await http.get("/ui/static/other.css")).status_code == 404


async def test_job_named_like_twin_has_page(new_database: str, new_http: httpx.AsyncClient) -> None:
    dashboards.filled(new_database, dashboards.registering("a.json", "a"))
    links = Page((await new_http.get("/ui/")).text).links
    assert {"./jobs/a", "./jobs/a.json/"} <= set(links)
    assert "a.json" in Page((await new_http.get("/ui/jobs/a.json/")).text).text
    assert (await new_http.get("/ui/jobs/a.json")).json()["view"]["job"]["job_id"] == "a"
    assert (await new_http.get("/ui/jobs/a.json.json")).json()["view"]["job"]["job_id"] == "a.json"


async def test_page_of_job_has_bands_of_explanation(http: httpx.AsyncClient) -> None:
    page = (await http.get(f"/ui/jobs/{JOB}")).text
    view = (await http.get(f"/api/jobs/{JOB}")).json()
    decision = (await http.get(f"/api/jobs/{JOB}/explanation")).json()["decision"]
    arms = {arm["batch_size"]: arm for arm in view["arms"]}
    unit = (await http.get(f"/ui/jobs/{JOB}.json")).json()["cost_unit"]
    show = units.PageUnits((1.0, "J"), unit["cost_j"])
    for size in decision["sizes"]:
        expected_j, low_j, high_j = (arms[size["batch_size"]][f"expected_{name}_j"] for name in ("cost", "low", "high"))
        assert (expected_j, low_j, high_j) == pytest.approx(
            (size["expected_cost_j"], size["low_j"], size["high_j"]), rel=1e-3
        )
        # As in a stored belief, to four digits.
        low, high = (show.cost(float(f"{end_j:.4g}")) for end_j in (low_j, high_j))
        assert f"90 % interval {low} to {high}" in page


async def test_jobs_are_found_by_part_of_name_page_by_page(new_database: str, new_http: httpx.AsyncClient) -> None:
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


async def test_jobs_that_missed_the_target_come_first_on_all_pages(new_database: str) -> None:
    async def fill(life: dashboards.Life) -> None:
        await dashboards.registering(*(f"job-{number:02}" for number in range(60)))(life)
        for name in ("job-40-missed", "job-55-missed"):
            await life.miss(await life.register(name, max_epochs=5))

    dashboards.filled(new_database, fill)
    # A slow machine needs more than the default's time for the first page.
    async with in_app(Settings(database_url=new_database)) as http:
        first = (await http.get("/ui/jobs.json")).raise_for_status().json()
        second = (await http.get("/ui/jobs.json", params={"after": first["next_cursor"]})).raise_for_status().json()
        pages = [[line["job"]["job_id"] for line in page["jobs"]] for page in (first, second)]
        jobs = [f"job-{number:02}" for number in range(60)]
        assert [*pages[0], *pages[1]] == ["job-40-missed", "job-55-missed", *jobs]
        assert [len(page) for page in pages] == [50, 12]
        # After a page that ends among them, the other one follows.
        rest = (await http.get("/ui/jobs.json", params={"after": "1job-40-missed"})).json()["jobs"]
        assert [line["job"]["job_id"] for line in rest][:2] == ["job-55-missed", "job-00"]
        text = Page((await http.get("/ui/")).text).text.replace("\N{NO-BREAK SPACE}", " ")
        assert re.search(r"never reached the target: 1 missed the target ?best metric 0\.\d+, spent [\d.]+ k", text)


async def test_jobs_with_problems_come_first_and_say_which(new_database: str, new_http: httpx.AsyncClient) -> None:
    async def fill(life: dashboards.Life) -> None:
        await life.run(await life.register("a-fine"))
        job = await life.register("b-slower", batch_sizes=(64,))
        for _ in range(12):
            await life.run(job, reports_each=False)
        for _ in range(2):
            await life.run(job, reports_each=False, slower=3)
        await life.fail(await life.register("c-crashed"))
        job = await life.register("d-stuck", batch_sizes=(64,), max_epochs=5)
        for _ in range(2):
            await life.miss(job)

    dashboards.filled(new_database, fill)
    lines = (await new_http.get("/ui/jobs.json")).json()["jobs"]
    assert [line["job"]["job_id"] for line in lines] == ["d-stuck", "c-crashed", "b-slower", "a-fine"]
    assert [line["stuck"] is not None for line in lines] == [True, False, False, False]
    assert [line["meets_at_once"] for line in lines] == [False, False, True, False]
    text = Page((await new_http.get("/ui/")).text).text.replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"stuck: 2 missed the target.* lower the target or raise max_epochs", text)
    assert re.search(r"last two cost [12]\d\d % more", text)
    assert text.count("target met at the first report") == 1
    assert [line["trouble"] for line in lines] == [0, 1, 3, 4]


async def test_job_that_never_reached_its_target_shows_best_metric_and_amount_spent(
    new_database: str, new_http: httpx.AsyncClient
) -> None:
    dashboards.filled(new_database, dashboards.never_reached)
    address = "/ui/jobs/llama-sft-unreachable"
    page, twin = Page((await new_http.get(address)).text), (await new_http.get(f"{address}.json")).json()
    assert_figures_match(page, twin)
    shown = {path: told for _, path, told in page.figures}
    metrics = [trial["metric"] for trial in twin["view"]["trials"]]
    assert shown["best_metric"] == units.number(max(metrics), 4)
    spent_j = sum(trial["energy_j"] for trial in twin["view"]["trials"])
    assert (
        json.loads(next(value for value, path, _ in page.figures if path == "view.savings.energy_j.spent")) == spent_j
    )
    assert "metrics" in page.ids
    assert "costs" not in page.ids
    text = page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Stuck: every batch size has missed the target No batch size has reached val_acc 0.9; the best run " in text
    assert f"reached {max(metrics):.4g} at " in text
    assert ": lower the target or raise max_epochs." in text


async def test_first_run_is_told_in_a_sentence_without_charts(new_database: str, new_http: httpx.AsyncClient) -> None:
    dashboards.filled(new_database, dashboards.one_run)
    page = Page((await new_http.get("/ui/jobs/first-try")).text)
    text = page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(
        r"The first run reached the target, 0\.9, at your default, 64 It took \d+ epochs, [\d a-z]+ and 0\.\d+ kWh\.",
        text,
    )
    assert {"costs", "metrics", "means", "quality"}.isdisjoint(page.ids)
    assert "Expected cost" not in text


async def test_settings_are_in_words_and_without_terms_that_the_policy_ignores(http: httpx.AsyncClient) -> None:
    texts = {name: Page((await http.get(f"/ui/jobs/{name}")).text).text for name in (JOB, "bert-sst2")}
    for text in texts.values():
        assert "Stop a run at … times the cheapest, β" in text
        assert not re.search("mab_|_knob|max_epochs", text.partition("Settings")[2])
    assert "Mean of the prior" in texts["bert-sst2"]
    assert "prior" not in texts[JOB]


@pytest.mark.parametrize(("page", "to"), [("", ""), ("/", ""), (".json", ".json")])
async def test_address_of_a_past_decision_leads_to_its_run(http: httpx.AsyncClient, page: str, to: str) -> None:
    answer = await http.get(f"/ui/jobs/{JOB}{page}", params={"at": 3})
    assert answer.status_code == 303
    assert (
        urljoin(f"http://h/ui/jobs/{JOB}{page}", answer.headers["location"]) == f"http://h/ui/jobs/{JOB}/trials/3{to}"
    )


async def test_costs_are_shares_of_a_run_at_the_default(http: httpx.AsyncClient) -> None:
    twin = (await http.get(f"/ui/jobs/{SETTLED}.json")).json()
    page = Page((await http.get(f"/ui/jobs/{SETTLED}")).text)
    arms = {arm["batch_size"]: arm["expected_cost_j"] for arm in twin["view"]["arms"]}
    default_j = arms[64]
    assert twin["cost_unit"] == {"batch_size": 64, "cost_j": default_j}
    assert (await http.get(f"/ui/jobs/{SETTLED}/trials/5.json")).json()["cost_unit"] == twin["cost_unit"]
    # The best size has one cost: beside the other sizes, and in the verdict.
    now = twin["view"]["savings"]["cost_j"]["now"]
    assert arms[256] / default_j == pytest.approx(1 - now["middle"])
    shown = {path: told for _, path, told in page.figures}
    for number, trial in enumerate(twin["view"]["trials"]):
        assert shown[f"view.trials.{number}.cost_j"] == f"{trial['cost_j'] / default_j:.0%}".replace(
            "%", f"{units.SPACE}%"
        )
    text = page.text.replace(units.SPACE, " ")
    words = "The dashed line, 100 %, is a run at your default, 64, now. The band is the 90 % interval of a run at 256."
    assert words in text
    assert len(re.findall(rf"\b{100 * now['middle']:.0f} % \(", text)) == 1
    assert "Exploration has cost as much as" in text
    assert not re.search(r"\d [kM]?J", text)


class TestWords:
    @pytest.mark.parametrize(
        ("address", "said"),
        [
            ("", "saved so far"),
            (f"jobs/{JOB}", "256 is the best batch size so far Whether 256 saves against your default, 64, is not"),
            (f"jobs/{JOB}", "is not shown yet: a run at 256 costs 65 % ("),
            (f"jobs/{JOB}", "Control runs are off."),
            (f"jobs/{SETTLED}", "256 saves "),
            (f"jobs/{SETTLED}", "Cost of all runs so far, against 64"),
            (
                "jobs/llama-sft",
                "No run has reached the target yet 2 crashed, 1 did not fit and 1 not heard of any more",
            ),
            (
                f"jobs/{JOB}",
                "Run 15 got 128. A trial: no run has shown yet that 128 costs more than 256, the best so far",
            ),
            (f"jobs/{JOB}/trials/3", "Expected cost of each batch size, before run 3"),
            (f"jobs/{JOB}/trials/1", "64 reached the target, 0.9, after"),
            (f"jobs/{JOB}/trials/10", "256 crashed"),
            (f"jobs/{JOB}/trials/15", "power limit of each GPU400 W"),
        ],
    )
    async def test_page_begins_with_most_important_statement(
        self, http: httpx.AsyncClient, address: str, said: str
    ) -> None:
        text = Page((await http.get(f"/ui/{address}")).text).text.replace("\N{NO-BREAK SPACE}", " ")
        assert said in text

    async def test_money_and_carbon_are_shown_where_settings_have_prices(self, dashboard_database: str) -> None:
        async with in_app(Settings(database_url=dashboard_database)) as http:
            text = (await http.get(f"/ui/jobs/{JOB}")).text
            assert "EUR" not in text
            assert "CO₂" not in text
        rates = {"price_per_kwh": 1000, "currency": "EUR", "carbon_g_per_kwh": 300}
        prices = Settings(database_url=dashboard_database, **rates)
        async with in_app(prices) as http:
            page = Page((await http.get(f"/ui/jobs/{SETTLED}")).text)
            saved = (await http.get(f"/ui/jobs/{SETTLED}.json")).json()["view"]["savings"]["energy_j"]["saved"]
            assert f"{saved / 3.6e6 * 1000:,.2f} EUR" in page.text
            assert re.search(r"\d+ g CO₂", page.text)

    async def test_empty_server_explains_first_steps(self, new_http: httpx.AsyncClient) -> None:
        page = Page((await new_http.get("/ui/")).text)
        assert "No job yet" in page.text
        assert "ZeusBSOCallback" in page.text
        assert "This page will show" in page.text


def test_revisions_stand_between_runs_of_job(any_server: ServerProcess) -> None:
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
        for address in ("", "/trials/2", "/trials/3"):
            page = Page(http.get(f"{path}{address}").raise_for_status().text)
            assert "Traceback" not in page.text


def test_every_kind_of_database_shows_pages(any_server: ServerProcess) -> None:
    job_id = f"ui_{uuid.uuid4().hex[:8]}-a"
    with httpx.Client(base_url=any_server.url) as http:
        http.post("/jobs", json=job(job_id=job_id, job_id_prefix=job_id)).raise_for_status()
        for cost_j in (500.0, 300.0):
            reached(http, begin(http, job_id), cost_j)
        begin(http, job_id)
        discarded = f"/api/jobs/{job_id}/trials/2/discard"

        def figures() -> list[dict[str, Any]]:
            addresses = ("", "/trials/3", "/trials/1")
            for address in addresses:
                Page(http.get(f"/ui/jobs/{job_id}{address}").raise_for_status().text)
            # An underscore is no wildcard, and upper and lower case differ where the database distinguishes them.
            assert http.get("/ui/jobs.json", params={"q": job_id[:5].replace("_", "%")}).json()["jobs"] == []
            (line,) = http.get("/ui/jobs.json", params={"q": job_id}).raise_for_status().json()["jobs"]
            http.get("/ui/jobs.json", params={"q": job_id, "after": job_id[:-1]}).raise_for_status()
            return [line, http.get(f"/ui/jobs/{job_id}.json").json()]

        line, page = figures()
        assert (line["running"], line["job"]["trials"], page["running"]) == (1, 3, 1)
        assert line["savings"] == page["view"]["savings"]
        assert [point["cost_j"] for point in page["points"]] == [500, 300, None]
        http.post(discarded).raise_for_status()
        line, page = figures()
        assert [point["state"] for point in line["latest"]] == ["completed", "withdrawn", "running"]
        assert [each["runs"] for each in page["means"]] == [1]


def test_pages_link_to_the_documentation_of_the_package() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == f"{html.DOCS}index.md"


def test_static_files_of_pages_are_small_and_relative() -> None:
    script = static_file("ui.js")
    assert len(script) <= 16 * 1024
    # Its addresses are relative, so that the pages work below any path of a proxy.
    assert not re.search(rb"""["'`]/""", script)
    files = [path for path in UI.rglob("*") if path.is_file() and path.suffix in {".css", ".html", ".js", ".svg"}]
    assert sum(path.stat().st_size for path in files) <= 88 * 1024
    assert {path.name for path in (UI / "static").iterdir()} == set(MEDIA_TYPES)


def test_every_state_has_shape_and_words() -> None:
    shapes = set(re.findall('id="m-([a-z_]+)"', (UI / "templates" / "parts.html").read_text()))
    assert set(TrialState) <= shapes
    assert set(STATES) == set(TrialState)


# --- Metrics at the end of runs ---------------------------------------------------------------------------------------


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
