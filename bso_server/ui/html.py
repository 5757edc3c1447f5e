"""The pages as HTML, made from a view and its reader."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from bso_server.service.pages import View
from bso_server.ui import charts, fleet, units, words
from bso_server.ui.plot import pixels
from zeus_plugins.protocol import package_version

if TYPE_CHECKING:
    from jinja2 import Environment

DOCS = "https://github.com/zeus-plugins/zeus-plugins/blob/main/docs/"
"""The address of the folder of the documentation."""

MEDIA_TYPES = {"ui.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
"""The static files of the pages."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types zeus-bso"
)
"""The ``Content-Security-Policy`` of all pages."""

FORMATS: dict[str, Callable[[Any], str]] = {
    "duration": units.duration,
    "time": lambda seconds: units.duration(abs(seconds)),
    "number": lambda value: units.number(value, 4),
    "short": units.number,
    "exact": units.exact,
    "whole": lambda value: units.number(value, 15),
    "size": str,
    "watts": lambda watts: f"{units.number(watts, 4)}{units.SPACE}W",
    "percent": units.percent,
    "saved": lambda share: f"{units.percent(abs(share))} {'more' if share < 0 else 'less'}",
    "change": lambda share: FORMATS["saved"](-share),
    "epochs": lambda epochs: units.count(epochs, "epoch", 4),
    "runs": lambda value: units.number(round(value, 3)),
}
"""The formats of a view's figures, by the names that templates use; see also `_rendered`."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of a page.

    Attributes:
        root: The relative address of ``/ui/`` from the page.
        now: The current time, aware.
        tag: The page's ``ETag``, which the page sends when it polls.
    """

    root: str
    now: datetime
    tag: str = ""


@lru_cache(maxsize=16)
def static_file(name: str) -> bytes:
    """Return a file of `MEDIA_TYPES`."""
    return (files(__package__) / "static" / name).read_bytes()


@cache
def build() -> str:
    """Return a short hash of all templates and static files, so that browsers reload them after an update."""
    parts = [package_version().encode(), *map(static_file, MEDIA_TYPES)]
    templates = sorted((files(__package__) / "templates").iterdir(), key=lambda each: each.name)
    return hashlib.sha256(b"".join([*parts, *(each.read_bytes() for each in templates)])).hexdigest()[:12]


def page(view: View, reader: Reader) -> str:
    """Return the page that shows a view; the template of a `JobsPage` is ``jobs.html``."""
    return _rendered(f"{type(view).__name__.removesuffix('Page').lower()}.html", view, reader)


def error_page(reader: Reader, status: int, title: str, message: str) -> str:
    """Return a page that explains an error."""
    return _rendered("error.html", None, reader, status=status, title=title, message=message)


@cache
def templates() -> Environment:
    """Return the templates, with the filters that they use."""
    # Imported at the first page, so that the server starts without waiting for it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(
        FORMATS,
        plural=units.count,
        state=words.STATES.__getitem__,
        origin=words.ORIGINS.__getitem__,
        busy=words.of_busy,
        sentence=words.sentence,
        setting=words.setting,
        pixels=pixels,
        kind=lambda part: type(part).__name__,
    )
    # Templates choose their charts and sentences.
    environment.globals.update(draw=charts, say=words, fleet=fleet, build=build(), docs=DOCS, version=package_version())
    return environment


def _rendered(template: str, view: Any, reader: Reader, **parts: Any) -> str:
    of_page = words.units_of(view)
    formats: dict[str, Callable[[Any], str]] = {
        **FORMATS,
        "energy": of_page.energy,
        "amount": lambda joules: of_page.energy(abs(joules)),
        "cost": of_page.cost,
        "as_runs": of_page.runs,
    }

    def figure(path: str, kind: str = "whole", none: str = "—") -> Markup:
        value = _at(view, path)
        if value is None:
            return Markup('<span class="none">{}</span>').format(none)
        return Markup('<data value="{!r}" data-of="{}">{}</data>').format(value, path, formats[kind](value))

    def doc(name: str, text: str) -> Markup:
        return Markup('<a href="{}{}" rel="noreferrer">{}</a>').format(DOCS, name, text)

    def ago(instant: datetime) -> Markup:
        told = units.ago(instant, reader.now)
        return Markup('<time datetime="{}" class="ago">{}</time>').format(instant.isoformat(), told)

    def money(energy_j: float) -> Markup:
        told = words.money(view.tariff, abs(energy_j))
        return Markup('<span class="sub">{}</span>').format(told) if told else Markup("")

    tell = partial(words.sentence, of_page=of_page)
    shown = {"page": view, "reader": reader, "n": figure, "ago": ago, "money": money, "tell": tell, "doc": doc, **parts}
    return templates().get_template(template).render(shown)


def _at(value: Any, path: str) -> Any:
    """Return the part of a view at a path such as ``jobs.0.job.trials``."""
    for name in path.split("."):
        if isinstance(value, tuple):
            value = value[int(name)]
        elif isinstance(value, Mapping):
            value = value[name]
        else:
            value = getattr(value, name)
    return value
