"""Pages of the dashboard as a test reads them: figures, links and text, without a browser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import httpx
from litestar import Litestar

from bso_server.app import create_app
from bso_server.settings import Settings
from bso_server.ui import html, units

JOB = "resnet50-cifar100"
SETTLED = "vit-imagenet"

# Elements without an end tag.
VOID = {"input", "link", "meta", "path", "use", "circle", "line", "rect", "br"}


class Page(HTMLParser):
    """A parsed page: figures, links, text and attributes; unbalanced elements are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.figures: list[tuple[str, str, str]] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self._figure: tuple[str, str] | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name) for name in found]
        self.links += [found[name] for name in ("href", "src", "action", "data-root") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        if tag == "data":
            self._figure = found["value"], found["data-of"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._figure is not None:
            self.figures.append((*self._figure, data))
            self._figure = None

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def assert_figures_match(page: Page, twin: Any) -> None:
    """Assert that each figure is a value of the page's twin in one of the formats, and that energies have one unit."""
    run_cost_j = (twin.get("cost_unit") or {}).get("cost_j")
    shown = set()
    for value, path, told in page.figures:
        expected = twin
        for name in path.split("."):
            expected = expected[int(name)] if isinstance(expected, list) else expected[name]
        assert json.loads(value) == expected, path
        if told in {say(expected) for say in html.FORMATS.values()}:
            continue
        of_page = {unit[1]: units.PageUnits(unit, run_cost_j) for unit in units.ENERGY_UNITS}
        if run_cost_j is not None and told in {of_page["J"].cost(expected), of_page["J"].runs(expected)}:
            continue
        found = [name for name, each in of_page.items() if told == each.energy(abs(expected))]
        assert found, (path, told)
        shown.update(found if expected else [])
    assert len(shown) <= 1, shown


def client_of(app: Litestar, address: str = "127.0.0.1") -> httpx.AsyncClient:
    """Return a client of an application in this process, at the given address."""
    transport = httpx.ASGITransport(app, client=(address, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")


@asynccontextmanager
async def in_app(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application in this process; yield a client on the same machine."""
    app = create_app(settings)
    async with app.lifespan(), client_of(app) as client:
        yield client
