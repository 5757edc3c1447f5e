"""Pictures of the dashboard for the documentation: ``python -m tests.support.screenshots DATABASE FOLDER``."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import httpx

from tests.support.servers import serving

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Name of each picture, address of the page (J: the job), theme, and visible part.
PICTURES = (
    ("dashboard-job", "jobs/J", "light", 1180),
    ("dashboard-decision", "jobs/J/trials/3", "dark", 860),
)
WIDTH = 1280


def browser_path() -> str | None:
    """Return the browser in ``ZEUS_TEST_BROWSER`` or a browser of the system, or None."""
    return os.environ.get("ZEUS_TEST_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


def take(database: Path, folder: Path) -> None:
    """Draw the pictures of the database's first job, after all of its runs."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / database.name
        shutil.copy(database, copy)
        with serving(f"sqlite:///{copy}", Path(temporary)) as server:
            job = httpx.get(f"{server.url}/ui/jobs.json").json()["jobs"][0]["job"]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
                for name, address, theme, height in PICTURES:
                    page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=theme)
                    path = address.replace("J", job["job_id"])
                    page.goto(f"{server.url}/ui/{path}", wait_until="load")
                    page.screenshot(path=folder / f"{name}.png")
                    print(folder / f"{name}.png")
                browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("database", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    take(options.database, options.folder)
