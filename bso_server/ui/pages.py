"""The pages: a view and what is known of its reader in, HTML out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from bso_server.service.page_views import (
    HealthPage,
    JobPage,
    JobsPage,
    MomentPage,
    TokensPage,
    TrialPage,
    TrialPoint,
    WhatIfPage,
)
from bso_server.ui import units, words
from bso_server.ui.charts import job as job_charts
from bso_server.ui.charts import trial as trial_charts
from bso_server.ui.charts import what_if as what_if_charts
from bso_server.ui.charts.svg import colours
from zeus_plugins.protocol import JobRegistration

if TYPE_CHECKING:
    from jinja2 import Environment

THEMES = ("light", "dark")

MEDIA_TYPES = {"ui.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
"""The files beside the pages."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types zeus-bso"
)
"""The ``Content-Security-Policy`` of all pages."""

FORMATS: dict[str, Callable[[Any], str]] = {
    "energy": units.energy,
    "amount": lambda joules: units.energy(abs(joules)),
    "duration": units.duration,
    "time": lambda seconds: units.duration(abs(seconds)),
    "number": lambda value: units.number(value, 4),
    "exact": units.exact,
    "count": lambda value: units.number(value, 15),
    "size": str,
    "watts": lambda watts: f"{units.number(watts, 4)}{units.SPACE}W",
    "percent": units.percent,
    "epochs": units.count_of_epochs,
    "runs": lambda value: units.number(round(value, 3)),
}
"""The wording of a view's figures, by the names that templates use."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of a page, as far as the page knows.

    Attributes:
        root: The way from the page's address to ``/ui/``, relative.
        now: The present instant, aware.
        tag: The page's version, by which it is asked for again.
        theme: The theme that was chosen, or "" for that of the system.
        is_logged_in: Whether a session can be ended.
        is_report: Whether the page is a file to keep: with its style within, no script, and links to nothing.
    """

    root: str
    now: datetime
    tag: str = ""
    theme: str = ""
    is_logged_in: bool = False
    is_report: bool = False


@lru_cache(maxsize=16)
def static_file(name: str) -> bytes:
    """A file beside the pages; `KeyError` if there is none."""
    MEDIA_TYPES[name]
    return (files(__package__) / "static" / name).read_bytes()


@cache
def _version() -> str:
    return version("zeus-plugins")


@cache
def build() -> str:
    """A short text that changes with the pages' own look, so that browsers ask anew after an update."""
    parts = [_version().encode(), *map(static_file, MEDIA_TYPES)]
    templates = sorted((files(__package__) / "templates").iterdir(), key=lambda each: each.name)
    return hashlib.sha256(b"".join([*parts, *(each.read_bytes() for each in templates)])).hexdigest()[:12]


def jobs_page(page: JobsPage, reader: Reader) -> str:
    """The list of jobs."""
    charts = [
        job_charts.spark(line.latest, dict.fromkeys((point.batch_size for point in line.latest), "s5"))
        for line in page.jobs
    ]
    return _rendered("jobs.html", page, reader, headline=words.of_jobs(page), sparks=charts)


def job_page(page: JobPage, reader: Reader) -> str:
    """A job."""
    job, settings = page.view.job, page.view.job.model_dump(mode="json", exclude_none=True)
    return _rendered(
        "job.html",
        page,
        reader,
        headline=words.of_job(page),
        of_eta=words.of_eta(page) if page.best_by_eta else "",
        colour=colours(job.batch_sizes),
        costs=job_charts.costs(page, None if reader.is_report else f"{reader.root}jobs/{job.job_id}"),
        saved=job_charts.saved(page),
        front=job_charts.front(page),
        regret=job_charts.regret(page),
        spans=what_if_charts.spans_of_eta(job, page.best_by_eta),
        power=[trial_charts.power(profile, f"power-{profile.batch_size}") for profile in page.power_profiles],
        beliefs=job_charts.beliefs(page),
        **_key(job, page.points),
        settings={name: _setting(value) for name, value in settings.items()},
    )


def report_page(page: JobPage, now: datetime) -> str:
    """A job in one file, which needs nothing else and leads nowhere."""
    return job_page(page, Reader(root="", now=now, is_report=True))


def report_policy() -> str:
    """The ``Content-Security-Policy`` of such a file."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; frame-ancestors 'none'"


@cache
def _style() -> str:
    return static_file("style.css").decode()


def moment_page(page: MomentPage, reader: Reader) -> str:
    """A job as it was when one of its trials was chosen."""
    job, decision = page.job, page.explanation.decision
    return _rendered(
        "moment.html",
        page,
        reader,
        headline=words.of_moment(page),
        colour=colours(job.batch_sizes),
        beliefs=None if decision is None else job_charts.beliefs_of(decision, job, page.points),
        costs=job_charts.costs_until(
            page, f"{reader.root}jobs/{job.job_id}{'/' * (job.job_id or '').endswith('.json')}"
        ),
        **_key(job, page.points),
    )


def trial_page(page: TrialPage, reader: Reader) -> str:
    """A trial."""
    return _rendered(
        "trial.html",
        page,
        reader,
        headline=words.of_trial(page),
        belief=_index_of_belief(page),
        metric=trial_charts.metric(page),
        cost=trial_charts.cost(page),
        power=None if page.power_profile is None else trial_charts.power(page.power_profile, "power"),
    )


def what_if_page(page: WhatIfPage, reader: Reader) -> str:
    """A job under another η and β."""
    return _rendered(
        "whatif.html",
        page,
        reader,
        headline=words.of_what_if(page),
        said=words.of_replay(page),
        colour=colours(page.job.batch_sizes),
        spans=what_if_charts.spans_of_eta(page.job, page.best_by_eta, page.eta),
        costs=what_if_charts.costs_by_eta(page),
    )


def health_page(page: HealthPage, reader: Reader) -> str:
    """The state of the server."""
    return _rendered("health.html", page, reader, headline=words.of_health(page))


def tokens_page(page: TokensPage, reader: Reader) -> str:
    """The tokens."""
    return _rendered("tokens.html", page, reader, headline=words.of_tokens(page))


def login_page(reader: Reader, to: str, refused: str = "") -> str:
    """The form that takes a token; `to` is the page to go to then, relative to ``/ui/``."""
    return _rendered("login.html", None, reader, to=to, refused=refused)


def error_page(reader: Reader, status: int, title: str, message: str) -> str:
    """A page that cannot be shown, and why."""
    return _rendered("error.html", None, reader, status=status, title=title, message=message)


def _index_of_belief(page: TrialPage) -> int | None:
    """The place of the belief about the trial's size among those of its decision."""
    belief, decision = trial_charts.belief_of(page), page.explanation.decision
    return None if belief is None or decision is None else decision.sizes.index(belief)


def _key(job: JobRegistration, points: Sequence[TrialPoint]) -> dict[str, list[Any]]:
    """The states and sizes that a chart of trials has, in order."""
    states, sizes = {point.state for point in points}, {point.batch_size for point in points}
    return {
        "states": [state for state in words.STATES if state in states],
        "sizes": [size for size in job.batch_sizes if size in sizes],
    }


def _setting(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return units.exact(value)
        case list():
            return ", ".join(map(str, value))
        case dict():
            return ", ".join(f"{name} {part}" for name, part in value.items())
        case _:
            return str(value)


@cache
def _environment() -> Environment:
    # A server need not wait for it to listen.
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
        energy=units.energy,
        duration=units.duration,
        exact=units.exact,
        number=lambda value: units.number(value, 15),
        plural=units.count,
        percent=units.percent,
        state=words.state_words,
        origin=words.origin_words,
        interval=words.interval,
        sentence=words.sentence,
    )
    return environment


def _rendered(template: str, page: Any, reader: Reader, **parts: Any) -> str:
    def figure(path: str, kind: str = "count", none: str = "—") -> Markup:
        value = _at(page, path)
        if value is None:
            return Markup(f'<span class="none">{escape(none)}</span>')  # noqa: S704 - escaped
        # Paths are the templates' own.
        return Markup(f'<data value="{value!r}" data-of="{path}">{escape(FORMATS[kind](value))}</data>')  # noqa: S704 - likewise

    def ago(instant: datetime) -> Markup:
        # A file is read at any time.
        told = f"{instant:%Y-%m-%d %H:%M} UTC" if reader.is_report else escape(units.ago(instant, reader.now))
        return Markup(f'<time datetime="{instant.isoformat()}" class="ago">{told}</time>')  # noqa: S704 - likewise

    def money(energy_j: float) -> Markup:
        """The price and the carbon of saved energy, where the server's settings tell them."""
        tariff = page.tariff
        price, carbon_g = tariff.price(abs(energy_j)), tariff.carbon_g(abs(energy_j))
        told = [
            *([] if price is None or not tariff.currency else [f"{price:,.2f}{units.SPACE}{tariff.currency}"]),
            *([] if carbon_g is None else [f"{units.mass(carbon_g)} CO₂"]),
        ]
        return Markup(f'<span class="sub">{escape(" · ".join(told))}</span>' if told else "")  # noqa: S704 - likewise

    shown = {"page": page, "reader": reader, "n": figure, "ago": ago, "money": money, **parts}
    style = Markup(_style()) if reader.is_report else ""  # noqa: S704 - a file of ours
    found = _environment().get_template(template)
    return found.render(shown, style=style, build=build(), version=_version())


def _at(page: Any, path: str) -> Any:
    """The value at a path such as ``jobs.0.job.trials``."""
    for name in path.split("."):
        if isinstance(page, tuple):
            page = page[int(name)]
        elif isinstance(page, Mapping):
            page = page[name]
        else:
            page = getattr(page, name)
    return page
