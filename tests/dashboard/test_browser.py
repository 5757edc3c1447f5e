"""The dashboard in a real browser: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.jobs import job
from tests.support.screenshots import browser_path
from tests.support.servers import ServerProcess, serving
from tests.support.tokens import bearer, make_token
from tests.support.wire import begin

EXECUTABLE = browser_path()

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="needs axe: pip install axe-playwright-python"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="needs a browser: apt-get install chromium-headless-shell"),
]

# This limit in milliseconds is above the time of any machine; a test waits until the limit only after a fault.
PATIENCE_MS = 60_000
JOB = "jobs/resnet50-cifar100"
PAGES = [
    "",
    JOB,
    "jobs/bert-sst2",
    "jobs/llama-sft",
    f"{JOB}/trials/1",
    f"{JOB}/trials/6",
    f"{JOB}/trials/15",
    "jobs/unknown",
    "jobs/vit-imagenet",
]

Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page with no message in the browser's console and no request to a foreign server."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = url

    def open(self, address: str = "") -> Page:
        self.page.goto(f"{self.url}/ui/{address}")
        return self.page

    def close(self) -> None:
        assert [text for text in self.said if "404" not in text] == []
        assert {url for url in self.asked if not url.startswith(self.url)} == set()
        self.page.context.close()


@pytest.fixture(scope="module")
def full(dashboard_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all kinds of jobs."""
    with serving(dashboard_database, tmp_path_factory.mktemp("dashboard")) as server:
        yield server


@pytest.fixture
def tab(browser: Any, full: ServerProcess) -> Iterator[Tab]:
    """A tab on that server."""
    tab = Tab(browser, full.url)
    yield tab
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", PAGES)
def test_page_is_accessible_and_fits_every_screen(browser: Any, full: ServerProcess, address: str, scheme: str) -> None:
    tab = Tab(browser, full.url, color_scheme=scheme, reduced_motion="reduce")
    page = tab.open(address)
    for width in (360, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        found = axe.Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found] == [], width
    tab.close()


def test_page_without_scripts_shows_same_content(browser: Any, full: ServerProcess) -> None:
    texts = []
    for scripts in (True, False):
        tab = Tab(browser, full.url, java_script_enabled=scripts)
        # The tools of the charts need scripts.
        tools = r"\s*Smooth\n" if scripts else r"(?!)"
        texts.append(re.sub(r"\d+\s\w+ ago|\s", "", re.sub(tools, "\n", tab.open(JOB).inner_text("main"))))
        tab.close()
    assert texts[0] == texts[1]


def test_page_follows_the_browsers_colour_scheme(browser: Any, full: ServerProcess) -> None:
    papers = []
    for scheme in ("light", "dark"):
        tab = Tab(browser, full.url, color_scheme=scheme)
        papers.append(tab.open(JOB).evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        tab.close()
    assert papers[0] != papers[1]


def test_chart_is_read_with_keyboard(tab: Tab) -> None:
    page = tab.open(JOB)
    page.focus("#costs")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("Run 1: batch size 64, reached the target")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#tip").startswith("Run 14:")
    page.keyboard.press("Escape")
    assert page.query_selector("#tip") is None
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_url("**/trials/1")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_browser_steps_through_decisions(tab: Tab) -> None:
    page = tab.open(JOB)
    page.click("#moments")
    page.wait_for_url("**/trials/15")
    page.click("#before")
    page.wait_for_url("**/trials/14")
    page.click("#costs a[href$='trials/3']")
    page.wait_for_url("**/trials/3")
    assert "A trial with about an even chance to beat 256" in page.inner_text(".said")
    # The page shows none of the later runs.
    assert len(page.query_selector_all("#costs > a")) == 2
    assert page.inner_text("tr.best >> nth=0").startswith("256")


def test_mark_shows_text_on_hover(tab: Tab) -> None:
    page = tab.open(JOB)
    page.hover("#costs a[href$='trials/10']")
    assert page.inner_text("#tip") == "Run 10: batch size 256, crashed"
    page.hover("h1")
    assert page.query_selector("#tip") is None
    page.click("#costs a[href$='trials/10']")
    page.wait_for_url("**/trials/10")


def shown_costs(page: Page) -> list[int]:
    return [int(text.split("\N{NO-BREAK SPACE}")[0]) for text in page.locator("#log tr.run td.cost").all_inner_texts()]


def test_forty_runs_print_on_three_pages_with_whole_words(tab: Tab) -> None:
    page = tab.open("jobs/vit-imagenet")
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))) <= 3
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})
    # All runs are printed, each outcome on one line.
    assert page.locator("#log tr.run:visible").count() == 40
    lines = page.eval_on_selector_all(
        "#log .state", "all => all.map(each => Math.round(each.getBoundingClientRect().height / 14))"
    )
    assert set(lines) == {1}


def test_table_of_runs_sorts_and_filters(tab: Tab) -> None:
    page = tab.open("jobs/vit-imagenet")
    rows = page.locator("#log tr.run:visible")
    page.click("#log th:has-text('Cost')")
    costs = shown_costs(page)
    assert len(costs) == rows.count() == 40
    assert costs == sorted(costs, reverse=True)
    page.click("#log th:has-text('Cost')")
    assert shown_costs(page) == costs[::-1]
    assert page.get_attribute("#log th:has-text('Cost')", "aria-sort") == "ascending"
    page.fill("#find-run", "control 64")
    assert 1 <= rows.count() < 10
    assert all("Control run" in text for text in rows.all_inner_texts())
    page.fill("#find-run", "")
    assert rows.count() == 40


def test_order_and_filter_of_jobs_outlast_a_refresh(browser: Any, server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as http:
        for name in ("job-b", "job-a", "other"):
            http.post("/jobs", json=job(job_id=name)).raise_for_status()
        begin(http, "job-a")
        tab = Tab(browser, server.url)
        page = tab.open()
        names = page.locator("#jobs tr.run:visible .name")
        assert names.all_inner_texts() == ["job-a", "job-b", "other"]
        page.click("#jobs th:has-text('Runs') >> nth=-1")
        page.fill("#q", "job-")
        page.click("#jobs th:has-text('Runs') >> nth=-1")
        assert names.all_inner_texts() == ["job-b", "job-a"]
        begin(http, "job-a")
        page.wait_for_selector(".live:has-text('2')")
        assert names.all_inner_texts() == ["job-b", "job-a"]
        tab.close()


def test_charts_of_runs_share_cursor_and_zoom(tab: Tab) -> None:
    page = tab.open("jobs/vit-imagenet")
    page.set_viewport_size({"width": 1280, "height": 1600})
    box = page.locator("#costs").bounding_box()
    y = box["y"] + box["height"] - 20
    page.mouse.move(box["x"] + box["width"] / 2, y)
    labels = "all => all.map(each => [each.closest('.plot').id, each.textContent])"
    found = dict(page.eval_on_selector_all("text.cursor", labels))
    assert set(found) == {"costs", "metrics"}
    assert len(set(found.values())) == 1
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, y)
    page.mouse.up()
    numbers = "all => all.map(each => each.parentElement.getAttribute('href')?.match(/\\d+$/)[0])"
    inside = [int(each) for each in page.eval_on_selector_all("#costs > a > use:not(.out)", numbers)]
    assert inside == [*range(inside[0], inside[-1] + 1)]
    assert 8 <= len(inside) <= 12
    assert page.locator("#metrics > use:not(.out)").count() == len(inside)
    page.click("#smooth-costs")
    assert page.locator("#costs .smooth").count() == 1
    page.mouse.dblclick(box["x"] + 20, y)
    assert page.locator("#costs > a > use:not(.out)").count() == 40


def begun(server: ServerProcess, token: str) -> tuple[httpx.Client, dict[str, Any]]:
    """Begin a training of a new job; return the job's client and the trial."""
    http = httpx.Client(base_url=server.url, headers=bearer(token))
    http.post("/jobs", json=job(job_id="job-live")).raise_for_status()
    return http, begin(http, "job-live")


def report(http: httpx.Client, trial: dict[str, Any], epoch: int) -> None:
    result = {"time": 100 * epoch, "energy": 5000 * epoch, "metric": 0.1 * epoch, "current_epoch": epoch}
    http.post("/report", json={**trial, **result, "energy_source": "nvml"}).raise_for_status()


@pytest.fixture
def token(server: ServerProcess) -> str:
    return make_token(server.database_url, "admin")


def as_password(token: str) -> dict[str, str]:
    return {"username": "any", "password": token}


def without_refusals(tab: Tab) -> None:
    """Leave out the browser's own messages about a page that was answered with 401 or by no server."""
    tab.said = [text for text in tab.said if "401" not in text and "ERR_CONNECTION" not in text]


def test_password_shows_page_and_arriving_epoch(browser: Any, server: ServerProcess, token: str) -> None:
    http, trial = begun(server, token)
    report(http, trial, 1)
    report(http, trial, 2)
    size = {"width": 800, "height": 500}
    tab = Tab(browser, server.url, viewport=size, http_credentials=as_password(token))
    page = tab.open("jobs/job-live/trials/1")
    assert page.url.endswith("/ui/jobs/job-live/trials/1")
    assert "0.2 after 2" in page.inner_text("h1")
    page.click("#epochs > summary")
    page.evaluate("scrollTo(0, 300)")
    report(http, trial, 3)
    page.wait_for_selector("h1:has-text('0.3 after 3')")
    assert page.evaluate("document.querySelectorAll('#epochs[open] tbody tr').length") == 3
    assert page.evaluate("scrollY") == 300
    assert page.evaluate("document.activeElement.matches('#epochs > summary')")

    page.goto(f"{server.url}/ui/")
    page.fill("#q", "job-li")
    begin(http, "job-live")
    page.wait_for_selector(".live:has-text('2')")
    assert page.input_value("#q") == "job-li"
    without_refusals(tab)
    tab.close()
    http.close()


def test_page_of_stopped_server_is_marked_stale_and_continues_after_restart(
    browser: Any, server: ServerProcess
) -> None:
    tab = Tab(browser, server.url)
    page = tab.open()
    server.kill()
    page.wait_for_selector(".stale >> text=Stale since")
    server.start()
    page.wait_for_selector(".stale", state="detached")
    without_refusals(tab)
    tab.close()


def test_hidden_tab_sends_no_requests(tab: Tab) -> None:
    page = tab.open()
    page.wait_for_load_state("networkidle")
    hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true })"
    page.evaluate(f"{hide % 'true'}; document.dispatchEvent(new Event('visibilitychange'))")
    before = len(tab.asked)
    page.wait_for_timeout(5000)  # A visible tab would have polled twice.
    assert len(tab.asked) == before
    with page.expect_request(lambda _: True):
        page.evaluate(f"{hide % 'false'}; document.dispatchEvent(new Event('visibilitychange'))")
