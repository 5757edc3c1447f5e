"""Estimated energies and busy machines on the pages and in the console."""

from __future__ import annotations

import httpx
import pytest

from bso_server.cli import main
from tests.support import dashboards
from tests.support.dashboard_pages import Page

BY_TIME = "estimate: 65 W stated"
BY_CPU_TIME = "estimate: 65 W stated × CPU time / 8 cores"


def job_of(database_url: str, energy_source: str, waited_share: float | None = None) -> None:
    async def fill(life: dashboards.Life) -> None:
        registered = await life.register("job-1")
        for _ in range(5):
            await life.run(registered, energy_source=energy_source, waited_share=waited_share)

    dashboards.filled(database_url, fill)


async def text_of(http: httpx.AsyncClient, address: str) -> str:
    text = Page((await http.get(f"/ui/{address}")).raise_for_status().text).text
    return text.replace("\N{NO-BREAK SPACE}", " ")


PAGES = ("", "jobs/job-1", "jobs/job-1/trials/2")


@pytest.mark.parametrize("address", PAGES)
async def test_estimate_is_marked_beside_each_energy(
    address: str, new_database: str, new_http: httpx.AsyncClient
) -> None:
    job_of(new_database, BY_CPU_TIME)
    text = await text_of(new_http, address)
    assert "Energy" in text
    assert "estimated" in text
    assert "partly" not in text


@pytest.mark.parametrize("address", PAGES)
async def test_measured_energy_has_no_mark(address: str, new_database: str, new_http: httpx.AsyncClient) -> None:
    job_of(new_database, "nvml")
    assert "estimated" not in await text_of(new_http, address)


@pytest.mark.parametrize(
    ("address", "without"),
    [
        ("", ["J saved so far", "Wh saved so far"]),
        ("jobs/job-1", ["Energy saved", "Time and energy"]),
        ("jobs/job-1/trials/2", []),
    ],
)
async def test_energy_from_watts_and_time_is_shown_once(
    address: str, without: list[str], new_database: str, new_http: httpx.AsyncClient
) -> None:
    job_of(new_database, BY_TIME)
    page = Page((await new_http.get(f"/ui/{address}")).raise_for_status().text)
    assert [path for path, *_ in page.figures if "energy_j" in path] == []
    assert "estimated" in page.text
    assert [words for words in without if words in page.text] == []


async def test_energies_of_both_kinds_are_partly_estimated(new_database: str, new_http: httpx.AsyncClient) -> None:
    async def fill(life: dashboards.Life) -> None:
        registered = await life.register("job-1")
        for source in ("nvml", BY_TIME, "nvml"):
            await life.run(registered, energy_source=source)

    dashboards.filled(new_database, fill)
    assert "energy partly estimated: 65 W stated; nvml" in await text_of(new_http, "jobs/job-1")


async def test_busy_machine_is_shown_on_pages_of_run_and_job(new_database: str, new_http: httpx.AsyncClient) -> None:
    job_of(new_database, BY_CPU_TIME, 0.46)
    remark = "n a busy machine: it waited 46% of its time for a core"
    assert remark in await text_of(new_http, "jobs/job-1/trials/2")
    text = await text_of(new_http, "jobs/job-1")
    assert "busy machine" in text
    assert remark in text
    assert (await new_http.get("/ui/jobs/job-1/trials/2.json")).json()["trial"]["waited_share"] == 0.46


async def test_idle_machine_is_not_mentioned(new_database: str, new_http: httpx.AsyncClient) -> None:
    job_of(new_database, BY_CPU_TIME, 0.19)
    for address in PAGES:
        assert "busy" not in await text_of(new_http, address)


@pytest.mark.parametrize(("source", "marks"), [(BY_CPU_TIME, 3), ("nvml", 0)])
async def test_costs_of_decision_are_marked_as_estimates(
    source: str, marks: int, new_database: str, new_http: httpx.AsyncClient
) -> None:
    job_of(new_database, source)
    text = await text_of(new_http, "jobs/job-1?at=4")
    assert "Expected cost of each batch size" in text
    assert text.count("estimated") == marks
    # Before the first run, the source of the energy is unknown.
    assert (await new_http.get("/ui/jobs/job-1.json?at=1")).json()["energy_sources"] == []


def command_of(database_url: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["jobs", "show", "job-1", "--database-url", database_url]) == 0
    return capsys.readouterr().out


def test_command_marks_each_estimated_figure(new_database: str, capsys: pytest.CaptureFixture[str]) -> None:
    job_of(new_database, BY_CPU_TIME)
    shown = command_of(new_database, capsys)
    head, savings, *_ = shown.splitlines()[::2]
    assert head.endswith("J, estimated")
    assert savings.endswith(" Costs are estimated.")
    for column in ("EXPECTED COST J", "ENERGY J", "COST J"):
        assert f"  {column} (ESTIMATED)" in shown


def test_command_shows_watts_times_time_once(new_database: str, capsys: pytest.CaptureFixture[str]) -> None:
    job_of(new_database, BY_TIME)
    shown = command_of(new_database, capsys)
    assert "ENERGY J" not in shown
    assert "TIME S COST J (ESTIMATED) METRIC" in " ".join(shown.split())
    assert shown.endswith("energy estimated: 65 W stated × time\n")


def test_command_has_no_mark_for_measured_energies(new_database: str, capsys: pytest.CaptureFixture[str]) -> None:
    job_of(new_database, "nvml")
    shown = command_of(new_database, capsys)
    assert "estimated" not in shown.lower()
    assert "TIME S ENERGY J COST J METRIC" in " ".join(shown.split())
    assert shown.endswith("energy by nvml\n")
