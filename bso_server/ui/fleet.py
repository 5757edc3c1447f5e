"""The report on all jobs in words and tables, which the page and Markdown share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from bso_server.core.verdict import Saved
from bso_server.service.views import FleetJob, FleetPage, FleetSum
from bso_server.ui import units, words
from bso_server.ui.words import Headline
from zeus_plugins.protocol import printable

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&!])")


class Section(NamedTuple):
    """A table with a title and a remark. The first column names the rows: by job ids if it `has_jobs`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    remark: str = ""
    has_jobs: bool = False

    @property
    def numbers(self) -> list[bool]:
        """True for each column of numbers."""
        return [n > 0 and column not in ("Verdict", "What to do") for n, column in enumerate(self.columns)]


def since(page: FleetPage) -> str:
    """Return the length of the period, as the page's form takes it."""
    amount, unit = _length(page)
    return f"{amount}{unit[0]}"


def headline(page: FleetPage) -> Headline:
    """Return a sentence that sums up the report, and the amounts saved."""
    jobs = page.total
    period = f"In the last {units.count(*_length(page))}"
    if not jobs.jobs:
        return Headline(f"{period}, no run has ended")
    parts = [
        f"{jobs.saves or 'none'} {'is' if jobs.saves <= 1 else 'are'} shown to save{_of(page.saving)}",
        *([f"{jobs.loses} {'loses' if jobs.loses == 1 else 'lose'}{_of(page.losing)}"] if jobs.loses else []),
    ]
    if unknown := _unknown(jobs):
        parts.append(f"{unknown} {'is' if unknown == 1 else 'are'} not shown yet")
    used = f"{units.count(jobs.jobs, 'job')} used {_energy(page)(jobs.energy_j)}{_mark(jobs)}"
    saved = [_amount(each, kind) for _, each, kind in _measures(page, jobs) if each is not None and each.is_shown]
    net = [f"Saved against the default batch sizes: {', '.join(saved)}."] if saved else []
    if page.outdated:
        net.append(f"The verdicts on {units.count(page.outdated, 'job')} do not include the latest runs yet.")
    return Headline(f"{period}, {used}; {', '.join(parts)}.", " ".join(net))


def _unknown(jobs: FleetSum) -> int:
    return jobs.jobs - jobs.saves - jobs.loses


def _of(jobs: FleetSum) -> str:
    """Return, in words, the share of their cost that these jobs saved or lost; "" if it is unknown."""
    saved = jobs.cost_saved_j
    if saved is None:
        return ""
    if saved.is_shown and (saved.middle > 0) is (jobs.saves > 0):
        return f" {saved.share.in_words} of {'its' if jobs.jobs == 1 else 'their'} cost"
    return " (their exploration is not paid back in this time)" if jobs.saves else ""


def _length(page: FleetPage) -> tuple[int, str]:
    hours = round((page.until - page.since).total_seconds() / 3600)
    return (hours, "hour") if hours % 24 else (hours // 24, "day")


def _energy(page: FleetPage) -> Callable[[float], str]:
    """Return a function that formats energies in the unit that fits the total energy of all jobs."""
    return partial(units.energy, unit=units.energy_unit(page.total.energy_j or 1.0))


def _mark(jobs: FleetSum) -> str:
    if not jobs.estimated_j:
        return ""
    return " (estimated)" if jobs.estimated_j >= 0.999 * jobs.energy_j else " (partly estimated)"


def _measures(page: FleetPage, jobs: FleetSum) -> Iterator[tuple[str, Saved | None, Callable[[float], str]]]:
    yield "Energy", jobs.energy_saved_j, _energy(page)
    for name, rate in words.rates(page.tariff).items():
        yield name, jobs.energy_saved_j, rate
    yield "Time", jobs.time_saved_s, units.duration


def _amount(saved: Saved | None, kind: Callable[[float], str]) -> str:
    """Return an amount saved with its 90 % interval; omit the amount itself if the interval includes 0."""
    if saved is None:
        return "not shown yet"
    low, high = ("no bound" if each is None else kind(each) for each in (saved.low, saved.high))
    if low.partition(units.SPACE)[2] == (unit := high.partition(units.SPACE)[2]):
        low = low.removesuffix(f"{units.SPACE}{unit}")
    return f"{kind(saved.middle)} ({low} to {high})" if saved.is_shown else f"not shown ({low} to {high})"


def sections(page: FleetPage) -> list[Section]:
    """Return the tables of the report, without empty tables."""
    jobs, rates, energy = page.total, words.rates(page.tariff), _energy(page)
    used = {"Energy": f"{energy(jobs.energy_j)}{_mark(jobs)}", "Time": units.duration(jobs.time_s)}
    used |= {name: rate(jobs.energy_j) for name, rate in rates.items()}
    rows = [
        (name, used[name], _amount(saved, kind), saved.share.in_words if saved is not None and saved.is_shown else "—")
        for name, saved, kind in _measures(page, jobs)
    ]

    def line(each: FleetSum) -> list[str]:
        money = [rate(each.energy_j) for rate in [*rates.values()][:1]]
        saved = "—" if each.energy_saved_j is None else _amount(each.energy_saved_j, energy)
        return [str(each.runs), energy(each.energy_j), *money, units.duration(each.time_s), saved]

    columns = ["Runs", "Energy", *[*rates][:1], "Time", "Energy saved"]
    groups = [
        [each.key, *map(str, (each.jobs, each.saves, each.loses, _unknown(each))), *line(each)]
        for each in (*page.groups, jobs)
    ]
    found = [
        Section(
            "Used and saved",
            ["", "Used", "Saved", "Share"],
            rows,
            "Saved: taken less than at the default batch sizes, with the 90 % interval. Losses, exploration and "
            "control runs are subtracted. Only jobs with a shown verdict count; what others may have saved does not.",
        ),
        Section(
            f"By {page.by}",
            [page.by.capitalize(), "Jobs", "Save", "Lose", "Not shown yet", *columns],
            groups if len(page.groups) > 1 else [],
        ),
        _advised("Stuck jobs", [(job, job.stuck) for job in page.stuck], page.stuck_jobs, energy),
        _advised("Jobs that save nothing or lose", [(job, job.advice) for job in page.idle], page.idle_jobs, energy),
        Section(
            "Most energy",
            ["Job", "Verdict", *columns],
            [[e.key, e.word, *line(e)] for e in page.costliest],
            has_jobs=True,
        ),
    ]
    return [each for each in found if each.rows and jobs.jobs]


def _advised(
    title: str, jobs: Sequence[tuple[FleetJob, str | None]], number: int, energy: Callable[[float], str]
) -> Section:
    rows = [[job.key, energy(job.energy_j), words.sentence(advice or "")] for job, advice in jobs]
    remark = f"{len(jobs)} of {number}, those that used the most energy." if number > len(jobs) else ""
    return Section(title, ["Job", "Energy", "What to do"], rows, remark, has_jobs=True)


def markdown(page: FleetPage) -> str:
    """Return the report as Markdown with tables, as GitHub renders it."""
    top = headline(page)
    lines = ["# Report", "", _escaped(top.text), *(["", _escaped(top.more)] if top.more else [])]
    for section in sections(page):
        marks = ["---:" if is_number else "---" for is_number in section.numbers]
        rows = [f"| {' | '.join(map(_escaped, row))} |" for row in (section.columns, *section.rows)]
        lines += ["", f"## {_escaped(section.title)}", "", rows[0], f"| {' | '.join(marks)} |", *rows[1:]]
        if section.remark:
            lines += ["", _escaped(section.remark)]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", printable(text))
