"""The sentences of the dashboard."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from bso_server.service.views import (
    CostUnit,
    JobPage,
    JobsPage,
    Tariff,
    TrialPage,
)
from bso_server.ui import units
from zeus_plugins.protocol import (
    ALIVE,
    CreatedJob,
    EndReason,
    JobView,
    MetricView,
    Origin,
    Revision,
    SavingsWord,
    TrialState,
    TrialView,
    busy_remark,
    is_estimated,
    is_time_alone,
)

STATES = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETED: "reached the target",
    TrialState.EARLY_STOPPED: "stopped as too costly",
    TrialState.EXHAUSTED: "missed the target",
    TrialState.FAILED: "crashed",
    TrialState.INFEASIBLE: "did not fit",
    TrialState.SUSPENDED: "suspended",
    TrialState.ABANDONED: "not heard of any more",
    TrialState.WITHDRAWN: "set aside",
}
"""Words for the state of a trial."""

ORIGINS = {
    Origin.EXPLORATION: "exploration",
    Origin.INCUMBENT: "best so far",
    Origin.CONTROL: "control run",
    Origin.CONCURRENT: "beside an exploration",
    Origin.BANDIT: "drawn",
    Origin.OFFLINE: "without the server",
    Origin.FINISH: "finishes a run",
}
"""Words for the origin of a trial."""


# The unit of a page fits energies of up to this multiple of a run's energy.
_ROOM = 5


def units_of(page: Any) -> units.PageUnits:
    """Return the units of a page: they fit a run's energy, or in the list of jobs the largest saving."""
    cost_unit: CostUnit | None = getattr(page, "cost_unit", None)
    match page:
        case JobsPage():
            all_jobs = [line.savings.energy_j for line in page.jobs]
            largest_j = max((each.saved or each.spent / _ROOM for each in all_jobs), default=0.0)
        case _ if cost_unit is not None:
            # The same on all pages of a job; a run's energy is about as large as its cost.
            largest_j = _ROOM * cost_unit.cost_j
        case TrialPage():
            largest_j = _ROOM * (page.trial.energy_j or 0.0)
        case _:
            largest_j = _ROOM * max((each.cost_j or 0.0 for each in getattr(page, "points", ())), default=0.0)
    return units.PageUnits(units.energy_unit(largest_j or 1.0), None if cost_unit is None else cost_unit.cost_j)


class Headline(NamedTuple):
    """The first sentence of a page, a second sentence in smaller type, and its mood: "gain", "loss" or ""."""

    text: str
    more: str = ""
    mood: str = ""


def of_jobs(page: JobsPage) -> Headline:
    """Summarise the jobs on the page."""
    if not page.jobs:
        if page.containing:
            return Headline(f"No job has “{page.containing}” in its name")
        return Headline("No job yet", "A job appears here as soon as a training starts with the callback.")
    running = sum(line.running for line in page.jobs)
    jobs = units.count(len(page.jobs), "job") + (" on this page" if page.next_cursor else "")
    under_way = f"{units.count(running, 'run')} under way" if running else "nothing under way"
    all_jobs = [line.savings for line in page.jobs]
    paid = [line for line in page.jobs if line.savings.energy_j.saved is not None]
    counts = {word.value: sum(each.word is word for each in all_jobs) for word in SavingsWord}
    # The list shows no verdict for jobs that have missed the target.
    missed = sum(line.has_missed for line in page.jobs)
    counts |= {SavingsWord.NOT_SHOWN.value: counts[SavingsWord.NOT_SHOWN] - missed, "never reached the target": missed}
    shown = [f"{word} {number}" for word, number in counts.items() if number]
    verdicts = f"Verdicts: {', '.join(shown)}."
    if not paid:
        return Headline(f"{jobs}, {under_way}", verdicts)
    sources = [source for line in paid for source in line.energy_sources]
    if by_time(sources):
        amount = units.duration(sum(line.savings.time_s.saved or 0.0 for line in paid))
    else:
        mark = f" ({estimated(sources)})" if estimated(sources) else ""
        amount = f"{units_of(page).energy(sum(line.savings.energy_j.saved or 0.0 for line in paid))}{mark}"
    return Headline(
        f"{amount} saved so far in {units.count(len(paid), 'job')}",
        f"{jobs}, {under_way}. {verdicts} The figure includes exploration and control runs.",
        "gain",
    )


def of_ends(states: dict[TrialState, int]) -> str:
    """Count the trials that have ended, such as ``2 crashed and 1 did not fit``; "" if none has."""
    return units.listed([f"{states[state]} {STATES[state]}" for state in STATES if state in states.keys() - ALIVE])


def estimated(sources: Collection[str | None]) -> str:
    """Return "estimated" if all energies of these sources are, "partly estimated" if some are, otherwise ""."""
    if not any(map(is_estimated, sources)):
        return ""
    return "estimated" if all(map(is_estimated, sources)) else "partly estimated"


def by_time(sources: Collection[str | None]) -> bool:
    """Return True if the energies only repeat the times: each is the same number of watts × time."""
    return bool(sources) and len(set(sources)) == 1 and all(map(is_time_alone, sources))


def of_energy(sources: Collection[str]) -> str:
    """Return how energy is estimated, such as ``energy estimated: 65 W stated × time``; "" if it is not."""
    mark, ways = estimated(sources), [source.removeprefix("estimate: ") for source in sources]
    return f"energy {mark}: {'; '.join(ways)}{' × time' if by_time(sources) else ''}" if mark else ""


def of_job(page: JobPage) -> Headline:
    """Summarise the state and success of the job."""
    view = page.view
    default, best = view.job.default_batch_size, view.best_batch_size
    reached = view.trial_states.get(TrialState.COMPLETED, 0)
    if not view.trial_count:
        return Headline("Nothing has run yet", f"The first run will take your default batch size, {default}.")
    if view.trial_count == 1 and reached and view.trials:
        return _of_first(page, view.trials[-1])
    if not reached or best is None:
        return _nothing_reached(page)
    savings = view.savings
    if not savings.is_shown:
        text = savings.claim if best == default else f"{best} is the best batch size so far"
        unknown = "" if best == default else f"{savings.claim}."
        return Headline(text, " ".join(filter(None, (unknown, savings.evidence, savings.control_runs))))
    return Headline(savings.claim, savings.control_runs, "gain" if savings.word is SavingsWord.SAVES else "loss")


def _of_first(page: JobPage, trial: TrialView) -> Headline:
    default = page.view.job.default_batch_size
    own = "your default, " if trial.batch_size == default else ""
    took = [units.duration(trial.time_s or 0.0)]
    if trial.epochs is not None:
        took.insert(0, units.count(trial.epochs, "epoch", 4))
    if not by_time(page.energy_sources):
        took.append(units_of(page).energy(trial.energy_j or 0.0))
    return Headline(
        f"The first run reached the target, {_target(page.view.job)}, at {own}{trial.batch_size}",
        f"It took {units.listed(took)}. Later runs try other batch sizes and are compared with {default}.",
    )


def revisions(view: JobView) -> dict[int, list[Revision]]:
    """Return the revisions, the newest first, by the number of the latest shown trial before each revision."""
    shown = [trial.trial_number for trial in view.trials]
    found: dict[int, list[Revision]] = {number: [] for number in shown}
    for each in reversed(view.revisions):
        if before := [number for number in shown if number <= each.trials]:
            found[before[-1]].append(each)
    return found


def qualities(view: JobView) -> list[tuple[int, MetricView, str]]:
    """Return the metrics of all sizes, ordered by metric: the size's position in `arms`, the metric, and its path."""
    rows = [
        (arm, metric, f"view.arms.{arm}.metrics.{number}.")
        for arm, each in enumerate(view.arms)
        for number, metric in enumerate(each.metrics)
    ]
    return sorted(rows, key=lambda row: row[1].name or "")


def setting(value: Any) -> str:
    """Format the value of a job's term."""
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


def _target(job: CreatedJob) -> str:
    return "not set yet" if job.target_metric is None else units.exact(job.target_metric)


def _nothing_reached(page: JobPage) -> Headline:
    states = page.view.trial_states
    ended = of_ends(states)
    target = _target(page.view.job)
    if not ended:
        latest = page.view.trials[-1] if page.view.trials else None
        so_far = ""
        if latest is not None and latest.metric is not None and latest.epochs is not None:
            metric, epochs = units.number(latest.metric, 4), units.count(latest.epochs, "epoch", 4)
            so_far = f"Run {latest.trial_number} with batch size {latest.batch_size} is at {metric} after {epochs}. "
        return Headline(
            f"{units.count(page.running, 'run')} under way",
            f"{so_far}Nothing is known until a run has reached the target, {target}.",
        )
    running = f" {units.count(page.running, 'run')} under way." if page.running else ""
    text = f"{ended.capitalize()}.{running}"
    if page.view.stuck is not None:
        return Headline("Stuck: every batch size has missed the target", f"{sentence(page.view.stuck)} {text}", "loss")
    return Headline("No run has reached the target yet", text, "loss")


def money(tariff: Tariff, energy_j: float) -> str:
    """Return the price and the carbon of energy, as far as the server's settings define them."""
    return " · ".join(each(energy_j) for each in rates(tariff).values())


def rates(tariff: Tariff) -> dict[str, Callable[[float], str]]:
    """Return formats of an energy (J) as money and as carbon, by their names, as far as the settings define them."""
    found: dict[str, Callable[[float], str]] = {}
    if tariff.price_per_kwh is not None and tariff.currency:
        per_j = tariff.price_per_kwh / 3.6e6
        found["Money"] = lambda energy_j: f"{energy_j * per_j:,.2f}{units.SPACE}{tariff.currency}".replace(
            "-", units.MINUS
        )
    if tariff.carbon_g_per_kwh is not None:
        carbon_per_j = tariff.carbon_g_per_kwh / 3.6e6
        found["CO₂"] = lambda energy_j: f"{units.mass(energy_j * carbon_per_j)} CO₂"
    return found


def of_trial(page: TrialPage) -> Headline:
    """Summarise the state or outcome of a trial."""
    trial, job = page.trial, page.job
    size, target = trial.batch_size, _target(job)
    spent = ""
    if by_time([trial.energy_source]) and trial.time_s is not None:
        spent = f" in {units.duration(trial.time_s)}"
    elif trial.energy_j is not None:
        spent = f" with {units_of(page).energy(trial.energy_j)}"
    epochs = "" if trial.epochs is None else units.count(trial.epochs, "epoch", 4)
    after = f" after {epochs}" if epochs else ""
    match trial.state:
        case TrialState.RUNNING if trial.metric is None:
            return Headline(f"Running with batch size {size}", "Its first validation has not been reported yet.")
        case TrialState.RUNNING | TrialState.SUSPENDED:
            word = "Running" if trial.state is TrialState.RUNNING else "Suspended"
            metric = units.number(trial.metric or 0.0, 4)
            return Headline(f"{word} with batch size {size}: {metric} after {epochs}", f"The target is {target}.")
        case TrialState.COMPLETED if job.target_metric is None:
            return Headline(f"{size} trained to its end{after}{spent}")
        case TrialState.COMPLETED:
            return Headline(f"{size} reached the target, {target},{after}{spent}", mood="gain")
        case TrialState.EARLY_STOPPED:
            return Headline(f"{size} was stopped{after}{spent}", _message(page), "loss")
        case TrialState.EXHAUSTED:
            return Headline(
                f"{size} missed the target, {target}{f', in {epochs}' if epochs else ''}", _message(page), "loss"
            )
        case TrialState.INFEASIBLE:
            why = "does not fit into memory" if trial.end_reason is EndReason.OUT_OF_MEMORY else "cannot run"
            return Headline(f"{size} {why}", _message(page), "loss")
        case _:
            return Headline(f"{size} {STATES[trial.state]}{after}", _message(page), "loss")


def _message(page: TrialPage) -> str:
    return sentence(_IN_BRACKETS.sub("", page.trial.message or ""), units_of(page))


def of_busy(waited_share: float | None) -> str:
    """Return a remark on a run whose machine was busy; "" for other runs."""
    return sentence(busy_remark(waited_share) or "")


_IN_BRACKETS = re.compile(r" \[[^\[\]]*\]")
_JOULES = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:e[+-]?\d+)?) ([kMG]?)J\b")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def sentence(words: str, of_page: units.PageUnits | None = None) -> str:
    """Return words as a sentence; joules become costs in the page's units, or without a page, energies."""
    tell = units.energy if of_page is None else of_page.cost
    words = _JOULES.sub(lambda found: tell(float(found[1]) * _PREFIXES[found[2]]), words)
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) or not words else ".")
