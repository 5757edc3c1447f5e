"""`bso-server report` in each format, on a database and through a server, and the page ``/ui/report``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from markdown_it import MarkdownIt

from tests.support import dashboards
from tests.support.dashboard_pages import Page
from tests.support.servers import ServerProcess, bso_server, serving
from zeus_plugins.protocol import CONTROLS

FORMULA = "=cmd|x *b* <b>"
TABLES = ["Used and saved", "By team", "Stuck jobs", "Jobs that save nothing or lose", "Most energy"]


async def fill(life: dashboards.Life) -> None:
    await dashboards.settled(life)
    await dashboards.only_failures(life)
    job = await life.register("bert-sst2", tags={"team": FORMULA}, gpu_model="<i>GPU</i>", max_epochs=3)
    for _ in range(8):
        await life.run(job)
    job = await life.register("unet-maps", tags={"team": "maps"}, batch_sizes=(64, 128), controls=CONTROLS, mab_seed=1)
    for _ in range(5):
        await life.run(job, reports_each=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with jobs that save, that are not shown to save, and that are stuck; it has a price."""
    folder = tmp_path_factory.mktemp("report")
    url = f"sqlite:///{folder / 'bso.sqlite3'}"
    dashboards.filled(url, fill)
    with pytest.MonkeyPatch.context() as patch:
        for name, price in {"PRICE_PER_KWH": "0.25", "CURRENCY": "EUR", "CARBON_G_PER_KWH": "380"}.items():
            patch.setenv(f"ZEUS_BSO_{name}", price)
        with serving(url, folder) as server:
            yield server


@pytest.fixture(params=["--database-url", "--server-url"])
def source(request: pytest.FixtureRequest, server: ServerProcess) -> list[str]:
    return [request.param, server.database_url if request.param == "--database-url" else server.url]


def reported(*arguments: str) -> str:
    done = bso_server("report", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class Cells(HTMLParser):
    """The headings of a page and the cells of each table, by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - HTMLParser's
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th", "h2"}:
            self._into = self.headings if tag == "h2" else self.tables[-1][-1]
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in {"td", "th", "h2"}:
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data


def test_markdown_and_page_have_the_same_tables(server: ServerProcess, source: list[str]) -> None:
    markdown = reported("--by", "team", *source)
    rendered = Cells(MarkdownIt("gfm-like", {"linkify": False}).render(markdown))
    page = Cells(httpx.get(f"{server.url}/ui/report", params={"by": "team"}).raise_for_status().text)
    assert rendered.headings == page.headings == [title for title in TABLES if title in markdown]
    assert rendered.tables == page.tables
    used, groups, *_, jobs = rendered.tables
    assert [row[0] for row in used] == ["", "Energy", "Money", "CO₂", "Time"]
    assert {row[0] for row in groups} == {"Team", FORMULA, "maps", "no tag team", "total"}
    verdicts = {row[0]: row[1] for row in jobs}
    assert (verdicts["vit-imagenet"], verdicts["bert-sst2"]) == ("saves", "not shown yet")


def test_first_sentence_can_be_passed_on(server: ServerProcess) -> None:
    markdown = reported("--server-url", server.url)
    page = Page(httpx.get(f"{server.url}/ui/report").raise_for_status().text)
    _, sentence, amounts = [line for line in markdown.splitlines()[:6] if line]
    assert sentence.replace("\N{NO-BREAK SPACE}", " ").startswith("In the last 30 days, 4 jobs used ")
    assert " kWh; 1 is shown to save " in sentence.replace("\N{NO-BREAK SPACE}", " ")
    assert sentence.endswith(" of its cost, 3 are not shown yet.")
    assert amounts.startswith("Saved against the default batch sizes: ")
    assert " ".join(sentence.replace("\\", "").split()) in page.text
    assert "EUR" in amounts


def test_energies_of_the_report_have_one_unit_and_jobs_have_links(server: ServerProcess) -> None:
    page = Page(httpx.get(f"{server.url}/ui/report").raise_for_status().text)
    units = set(re.findall(r"[0-9] ?([kMG]?W?[hJ])\b", page.text.replace("\N{NO-BREAK SPACE}", " "))) - {"h"}
    assert units == {"kWh"}
    assert "./jobs/vit-imagenet" in page.links
    assert "By owner" not in page.text


def test_json_is_the_route_and_the_pages_twin(server: ServerProcess, source: list[str]) -> None:
    told = json.loads(reported("--by", "team", "--format", "json", *source))
    for path in ("/api/report", "/ui/report.json"):
        other = httpx.get(f"{server.url}{path}", params={"by": "team"}).raise_for_status().json()
        assert {**other, "since": None, "until": None} == {**told, "since": None, "until": None}
    assert told["total"]["jobs"] == 4


@pytest.mark.parametrize("command", [("report",), ("jobs", "export", "any")])
def test_removed_output_names_the_redirection(command: tuple[str, ...]) -> None:
    done = bso_server(*command, "--output", "file")
    assert (done.returncode, "--output was removed: the shell writes the file" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", ["a b", "", "tag:x", "team\n"])
def test_impossible_name_of_a_tag_is_an_error(name: str) -> None:
    done = bso_server("report", "--by", name)
    assert (done.returncode, f"argument --by: {name!r} cannot be the name of a tag" in done.stderr) == (2, True)


@pytest.mark.parametrize("removed", ["html", "csv"])
def test_removed_format_names_the_page(removed: str) -> None:
    done = bso_server("report", "--format", removed)
    assert done.returncode == 2
    assert "md or json; for HTML, save the page /ui/report" in done.stderr


@pytest.mark.parametrize(("name", "value"), [("since", "30"), ("since", "1d\n"), ("since", "12345h"), ("by", "a b")])
def test_wrong_period_or_group_is_refused(server: ServerProcess, name: str, value: str) -> None:
    answer = httpx.get(f"{server.url}/api/report", params={name: value})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, name)


def test_wrong_period_of_the_command_is_explained() -> None:
    done = bso_server("report", "--since", "30")
    assert (done.returncode, "'30' is no time: write hours, days or weeks as 12h, 30d or 8w" in done.stderr) == (
        2,
        True,
    )


def test_report_of_no_jobs_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
    dashboards.filled(url, dashboards.registering("bert-sst2"))
    text = reported("--since", "36h", "--database-url", url).replace("\N{NO-BREAK SPACE}", " ")
    assert text == "# Report\n\nIn the last 36 hours, no run has ended\n"


def test_jobs_are_tagged_and_shown_with_their_tags(source: list[str]) -> None:
    done = bso_server("jobs", "revise", "unet-maps", "--tags", "team=maps", "site=fra", *source)
    assert done.returncode == 0
    shown = bso_server("jobs", "show", "unet-maps", *source).stdout
    assert ", team=maps, site=fra\n" in shown
    assert bso_server("jobs", "revise", "unet-maps", "--tags", "team=maps", *source).returncode == 0
    refused = bso_server("jobs", "revise", "unet-maps", "--tags", "a b=maps", *source)
    assert (refused.returncode, "tags: " in refused.stderr) == (1, True)
