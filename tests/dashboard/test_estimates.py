"""Estimated energies and busy machines on the pages and in the console."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest

from bso_server.cli import main
from bso_server.settings import Settings
from tests.support import dashboards
from tests.support.dashboard_pages import Page, in_app

BY_TIME = "estimate: 65 W stated"
BY_CPU_TIME = "estimate: 65 W stated × CPU time / 8 cores"


def job_of(database_url: str, *energy_sources: str, **of_runs: float) -> None:
    async def fill(life: dashboards.Life) -> None:
        registered = await life.register("job-1")
        for source in energy_sources:
            await life.run(registered, energy_source=source, **of_runs)

    dashboards.filled(database_url, fill)


@pytest.fixture(scope="module", params=[BY_CPU_TIME, BY_TIME, "nvml"], ids=["CPU time", "time", "measured"])
def source(request: pytest.FixtureRequest) -> str:
    energy_source: str = request.param
    return energy_source


@pytest.fixture(scope="module")
def database(source: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a database with a job of five runs on an idle machine, with each kind of energy in turn."""
    url = f"sqlite:///{tmp_path_factory.mktemp('energy') / 'bso.sqlite3'}"
    job_of(url, *[source] * 5, waited_share=0.19)
    return url


@pytest.fixture
async def http_of_source(database: str) -> AsyncIterator[httpx.AsyncClient]:
    async with in_app(Settings(database_url=database)) as client:
        yield client


async def text_of(http: httpx.AsyncClient, address: str) -> str:
    text = Page((await http.get(f"/ui/{address}")).raise_for_status().text).text
    return text.replace("\N{NO-BREAK SPACE}", " ")


# Words on the pages about energy; an energy of watts times time would repeat the time.
PAGES = {
    "": ["J saved so far", "Wh saved so far"],
    "jobs/job-1": ["Energy saved", "Time and energy"],
    "jobs/job-1/trials/2": [],
}


async def test_estimates_are_marked_on_each_page(source: str, http_of_source: httpx.AsyncClient) -> None:
    for address, about_energy in PAGES.items():
        page = Page((await http_of_source.get(f"/ui/{address}")).raise_for_status().text)
        assert ("estimated" in page.text) is (source != "nvml")
        assert "partly" not in page.text
        assert "busy" not in page.text
        if source == BY_TIME:
            assert [path for path, *_ in page.figures if "energy_j" in path] == []
            assert [words for words in about_energy if words in page.text] == []
        else:
            assert "Energy" in page.text


async def test_costs_of_decision_are_marked_as_estimates(source: str, http_of_source: httpx.AsyncClient) -> None:
    text = await text_of(http_of_source, "jobs/job-1/trials/4")
    assert "Expected cost of each batch size" in text
    assert bool(re.search("Expected ?estimated", text)) is (source != "nvml")
    # Before the first run, the source of the energy is unknown.
    assert (await http_of_source.get("/ui/jobs/job-1/trials/1.json")).json()["energy_sources"] == []


async def test_energies_of_both_kinds_are_partly_estimated(new_database: str, new_http: httpx.AsyncClient) -> None:
    job_of(new_database, "nvml", BY_TIME, "nvml")
    assert "energy partly estimated: 65 W stated; nvml" in await text_of(new_http, "jobs/job-1")


async def test_busy_machine_is_shown_on_pages_of_run_and_job(new_database: str, new_http: httpx.AsyncClient) -> None:
    job_of(new_database, *[BY_CPU_TIME] * 5, waited_share=0.46)
    remark = "n a busy machine: it waited 46% of its time for a core"
    assert remark in await text_of(new_http, "jobs/job-1/trials/2")
    text = await text_of(new_http, "jobs/job-1")
    assert "busy machine" in text
    assert remark in text
    assert (await new_http.get("/ui/jobs/job-1/trials/2.json")).json()["trial"]["waited_share"] == 0.46


def command_of(database_url: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["jobs", "show", "job-1", "--database-url", database_url]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("source_of_all", "energy"), [(BY_TIME, ""), ("nvml", " (about 0.00179 kWh, in proportion to the time)")]
)
async def test_page_shows_start_up_with_energy_in_proportion(
    source_of_all: str, energy: str, new_database: str, new_http: httpx.AsyncClient
) -> None:
    job_of(new_database, *[source_of_all] * 2, startup_s=12.0)
    assert f"start-up 12 s{energy}" in await text_of(new_http, "jobs/job-1/trials/2")


def test_command_shows_known_start_ups(new_database: str, capsys: pytest.CaptureFixture[str]) -> None:
    job_of(new_database, "nvml")
    assert "START-UP S" not in command_of(new_database, capsys)
    job_of(new_database, "nvml", startup_s=12.0)
    assert "START-UP S" in command_of(new_database, capsys)


def test_command_marks_estimates(source: str, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = command_of(database, capsys)
    columns = " ".join(shown.split())
    if source == BY_CPU_TIME:
        head, savings, *_ = shown.splitlines()[::2]
        assert head.endswith("J, estimated")
        assert savings.endswith(" Costs are estimated.")
        for column in ("EXPECTED COST J", "ENERGY J", "COST J"):
            assert f"  {column} (ESTIMATED)" in shown
    elif source == BY_TIME:
        assert "ENERGY J" not in shown
        assert "TIME S COST J (ESTIMATED) METRIC" in columns
        assert shown.endswith("energy estimated: 65 W stated × time\n")
    else:
        assert "estimated" not in shown.lower()
        assert "TIME S ENERGY J COST J METRIC" in columns
        assert shown.endswith("energy by nvml\n")
