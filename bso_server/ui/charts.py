"""The charts of the pages: pure functions from views to the parts that ``templates/charts.html`` draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bso_server.core.savings import is_whole_run
from bso_server.service.views import (
    JobPage,
    TrialPage,
    TrialPoint,
)
from bso_server.ui import units
from bso_server.ui.plot import Box, Dot, Label, Line, Part, Picture, Plot, Scale, share
from bso_server.ui.words import STATES, units_of
from zeus_plugins.protocol import (
    ALIVE,
    CreatedJob,
    Decision,
    EndReason,
    Origin,
    SavingsView,
    SavingsWord,
    SizeBelief,
    TrialState,
)

COLOURS = 12
"""Number of colours for batch sizes in the stylesheet, from small to large."""

# Why a batch size is not tried again; else because it crashes.
_EXCLUSIONS = {EndReason.OUT_OF_MEMORY: "out of memory", EndReason.REFUSED: "refused by the training"}

# Above this number of trials, marks are drawn pale.
_MANY = 150

# Above this number of reports of a trial, only the last report has a mark on the trial's line.
_FEW = 60


def colours(job: CreatedJob) -> Mapping[int, str]:
    """Return the CSS classes of each batch size, the same in all charts of the job; ``ink`` for its former sizes.

    The colour depends on the size's rank among the job's sizes; the default has an outline.
    """
    last = max(len(job.batch_sizes) - 1, 1)
    classes = {size: f"s{round(rank * (COLOURS - 1) / last)}" for rank, size in enumerate(job.batch_sizes)}
    classes[job.default_batch_size] += " default"
    return defaultdict(lambda: "ink", classes)


def key(points: Sequence[TrialPoint]) -> tuple[list[TrialState], list[int]]:
    """Return the states and batch sizes in a chart of trials, ordered for its legend."""
    states, sizes = {point.state for point in points}, {point.batch_size for point in points}
    return [state for state in STATES if state in states], sorted(sizes)


# --- Run by run -------------------------------------------------------------------------------------------------------


def costs(page: JobPage, links: str) -> Plot | None:
    """Chart the cost of each trial, with the cost of a run now and its 90 % band; None for fewer than two costs.

    The shape of a mark shows the trial's state, and its colour the batch size. A mark links to `links` followed by the
    trial's number.
    """
    if page.cost_unit is None:
        return None
    job, show = page.view.job, units_of(page)
    levels = [(page.cost_unit.cost_j, "", "default")]
    if page.view.min_cost_j is not None and job.beta_knob is not None and job.policy == "zeus":
        bound_j = job.beta_knob * page.view.min_cost_j
        levels.append((bound_j, f"stopped above {show.cost(bound_j)}", "bound"))
    return _costs(page, job, links, levels, page.view.savings)


def costs_before(page: TrialPage, links: str) -> Plot | None:
    """Chart the cost of each trial before the page's trial, like `costs`."""
    return None if page.cost_unit is None else _costs(page, page.job, links)


def _costs(
    page: JobPage | TrialPage,
    job: CreatedJob,
    links: str,
    levels: Sequence[tuple[float, str, str]] = (),
    savings: SavingsView | None = None,
) -> Plot | None:
    points, show = page.points, units_of(page)
    known = [(point.trial_number, point.cost_j) for point in points if point.cost_j is not None]
    if len(known) < 2:
        return None
    costs_j = [cost_j for _, cost_j in known]
    # A bound far above all costs would squeeze them together.
    shown = [level for level in levels if level[2] != "bound" or level[0] < 1.5 * max(costs_j)]
    y = Scale.over([*costs_j, *(value for value, _, _ in shown)])
    told = (
        f"{units.count(len(known), 'run')} that cost between {show.cost(min(costs_j))} and "
        f"{show.cost(max(costs_j))}; the latest, run {known[-1][0]}, {show.cost(costs_j[-1])}."
    )
    plot = Plot("costs", "Cost of each run", told, _trial_scale(points), y, height=280)
    plot.axes(y.costs(show.run_cost_j), plot.x.whole_numbers(), "run")
    if savings is not None and show.run_cost_j is not None:
        _draw_run_now(plot, savings, show.run_cost_j)
    plot.levels(shown)
    colour, many = colours(job), " many" if len(points) > _MANY else ""
    for point in points:
        cost = "" if point.cost_j is None else f", {show.cost(point.cost_j)}"
        rest = ", the rest of an earlier run" if point.origin is Origin.FINISH else ""
        told = f"Run {point.trial_number}: batch size {point.batch_size}{rest}, {STATES[point.state]}{cost}"
        # The mark of a trial without a report is at the bottom of the chart.
        cost_j = y.low if point.cost_j is None else point.cost_j
        classes = f"{colour[point.batch_size]}{many}"
        href = f"{links}{point.trial_number}"
        plot.mark(point.trial_number, cost_j, point.state, classes, told, href)
    return plot


def _draw_run_now(plot: Plot, savings: SavingsView, default_j: float) -> None:
    """Draw the cost of a run now as a line with its 90 % band, computed from the saving over the default's cost."""
    now = savings.cost_j.now
    if now is None or now.low is None:
        return
    kind = {SavingsWord.SAVES: "gain", SavingsWord.LOSES: "loss"}.get(savings.word, "unshown")
    top, middle, bottom = (plot.top(default_j * (1 - saved)) for saved in (now.low, now.middle, now.high))
    plot.parts += [Box(f"now {kind}", top, max(bottom - top, 2)), Line(f"level {kind}", middle, middle)]


def _trial_scale(points: Sequence[TrialPoint]) -> Scale:
    """Return the axis of trial numbers, with room at both ends."""
    first, last = (points[0].trial_number, points[-1].trial_number) if points else (1, 1)
    room = max((last - first) * 0.015, 0.5)
    return Scale(first - room, last + room)


def metrics(page: JobPage) -> Plot | None:
    """Chart the last metric of each ended trial, with the target; None if fewer than two have one."""
    job, known = page.view.job, [each for each in page.points if each.metric is not None and each.state not in ALIVE]
    if len(known) < 2:
        return None
    values = [point.metric for point in known if point.metric is not None]
    target = [] if job.target_metric is None else [job.target_metric]
    y = Scale.over([*values, *target], zero=False)
    told = f"Between {units.number(min(values), 4)} and {units.number(max(values), 4)}"
    plot = Plot("metrics", "Metric at the end of each run", f"{told}.", _trial_scale(page.points), y, height=220)
    plot.axes([(value, units.number(value)) for value in y.ticks(4)], plot.x.whole_numbers(), "run")
    plot.levels([(value, "", "target") for value in target])
    colour, many = colours(job), " many" if len(known) > _MANY else ""
    for point in known:
        told = f"Run {point.trial_number}: batch size {point.batch_size}, {units.number(point.metric or 0.0, 4)}"
        plot.mark(point.trial_number, point.metric or 0.0, point.state, f"{colour[point.batch_size]}{many}", told)
    return plot


def spark(points: Sequence[TrialPoint]) -> Picture | None:
    """Draw the costs of the latest trials for a line of text; None before the first report."""
    known = [(index, point.cost_j, point) for index, point in enumerate(points) if point.cost_j is not None]
    if not known:
        return None
    costs_j = [cost_j for _, cost_j, _ in known]
    y, last = Scale.over(costs_j), max(len(points) - 1, 1)
    dots = [
        Dot(
            "s5" if is_whole_run(point) else "s5 hollow", share(0.03 + 0.94 * index / last), 25 - 22 * y.at(cost_j), 2.2
        )
        for index, cost_j, point in known
    ]
    change = units.percent(costs_j[-1] / costs_j[0]) if costs_j[0] else "more"
    told = f"Costs of the latest {units.count(len(known), 'run')}; the last one cost {change} of the first"
    return Picture(28, dots, told, "spark")


# --- Size by size -----------------------------------------------------------------------------------------------------


class BeliefTable(NamedTuple):
    """For each batch size, its notes and a picture of its expected and observed costs; and the axis of all pictures."""

    rows: list[tuple[list[str], Picture]]
    axis: Picture


def beliefs(page: JobPage) -> BeliefTable | None:
    """Return the expected cost of each size with its 90 % band, and its runs' costs; None without expected costs."""
    view, believed = page.view, []
    for arm in view.arms:
        notes = _notes(arm.batch_size, view.best_batch_size, view.job)
        if arm.infeasible is not None:
            notes.append(_EXCLUSIONS.get(arm.infeasible, "crashes"))
        elif not arm.trials:
            notes.append("never tried")
        expected_j, low_j, high_j = arm.expected_cost_j, arm.expected_low_j, arm.expected_high_j
        belief = SizeBelief(batch_size=arm.batch_size, expected_cost_j=expected_j, low_j=low_j, high_j=high_j)
        believed.append((notes, belief))
    return _belief_table(believed, page, view.job)


def beliefs_of(decision: Decision, page: TrialPage) -> BeliefTable | None:
    """Return the belief table as of a recorded decision."""
    believed = [(_notes(each.batch_size, decision.incumbent, page.job), each) for each in decision.sizes]
    return _belief_table(believed, page, page.job)


def _notes(batch_size: int, best: int | None, job: CreatedJob) -> list[str]:
    return [note for note, size in (("best", best), ("default", job.default_batch_size)) if size == batch_size]


def _told(belief: SizeBelief, runs: int, show: units.PageUnits) -> str:
    """Describe a belief, with the number of observed runs."""
    if belief.expected_cost_j is None:
        return "nothing is known of its cost"
    between = ""
    if belief.low_j is not None and belief.high_j is not None:
        between = f", 90 % interval {show.cost(belief.low_j)} to {show.cost(belief.high_j)}"
    return f"expected {show.cost(belief.expected_cost_j)}{between}; {units.count(runs, 'run')} observed"


def _belief_table(
    believed: Sequence[tuple[list[str], SizeBelief]], page: JobPage | TrialPage, job: CreatedJob
) -> BeliefTable | None:
    show = units_of(page)
    sizes = [belief for _, belief in believed]
    means = [each.expected_cost_j for each in sizes if each.expected_cost_j is not None]
    if not means:
        return None
    observed: dict[int, list[float]] = {}
    for point in page.points:
        if is_whole_run(point) and point.cost_j is not None:
            observed.setdefault(point.batch_size, []).append(point.cost_j)
    seen = [cost_j for found in observed.values() for cost_j in found]
    ends = [end for each in sizes for end in (each.low_j, each.high_j) if end is not None]
    # Cap the scale, because the wide band of a hardly known size would squeeze everything else together.
    most = 2.5 * max([*seen, min(means)])
    scale = Scale.over([min(value, most) for value in (*seen, *means, *ends)])
    ticks = [(share(scale.at(value)), label) for value, label in scale.costs(show.run_cost_j, 4)]
    grid = [Line("grid", 0, 32, x, x) for x, _ in ticks]
    colour, rows = colours(job), []
    for notes, each in believed:
        own, name = observed.get(each.batch_size, []), colour[each.batch_size]
        parts: list[Part] = [*grid]
        if each.low_j is not None and each.high_j is not None:
            low, high = (min(max(scale.at(end), 0.0), 1.0) for end in (each.low_j, each.high_j))
            parts.append(Box(f"band {name}", 9, 14, share(low), share(high - low)))
        # The latest 60 runs show the spread as well as a thousand would.
        parts += [Dot(f"run {name}", share(scale.at(cost_j)), 16, 2.5) for cost_j in own[-60:]]
        if each.expected_cost_j is not None and scale.at(each.expected_cost_j) <= 1:
            x = share(scale.at(each.expected_cost_j))
            parts.append(Line(f"mean {name}", 5, 27, x, x))
        rows.append((notes, Picture(32, parts, _told(each, len(own), show))))
    return BeliefTable(rows, Picture(16, [Label(x, 12, label, "tick mid") for x, label in ticks]))


# --- One trial --------------------------------------------------------------------------------------------------------


def metric(page: TrialPage) -> Plot:
    """Chart the metric of a trial by epoch, with the target; the trial must have reported."""
    target, last = page.job.target_metric, page.epochs[-1]
    metrics = [each.metric for each in page.epochs]
    y = Scale.over(metrics if target is None else [target, *metrics], zero=False)
    is_better = "rise to" if page.job.higher_is_better_metric else "fall to"
    goal = "a target that is not set yet" if target is None else units.exact(target)
    told = f"{units.number(last.metric, 4)} after {units.count(last.epoch, 'epoch', 4)}; it is to {is_better} {goal}."
    plot = Plot("metric", "Metric by epoch", told, _epoch_scale(page), y)
    plot.axes([(value, units.number(value)) for value in y.ticks(5)], plot.x.whole_numbers(), "epoch")
    colour = colours(page.job)[page.trial.batch_size]
    plot.path([(each.epoch, each.metric) for each in page.epochs], f"line {colour}")
    for each in page.epochs if len(page.epochs) <= _FEW else [last]:
        shape = page.trial.state if each is last else "epoch"
        told = f"Epoch {units.number(each.epoch, 4)}: {units.number(each.metric, 4)}"
        plot.mark(each.epoch, each.metric, shape, colour, told)
    if page.max_epochs <= plot.x.high:
        plot.upright(page.max_epochs, "level bound")
        bound = f"last epoch {page.max_epochs}"
        plot.parts.append(Label(plot.left(page.max_epochs), plot.height - 8, bound, "level-name end bound"))
    if target is not None:
        plot.level(target, f"target {units.exact(target)}", "target", above=y.at(target) < 0.85)
    return plot


def _epoch_scale(page: TrialPage) -> Scale:
    last = page.epochs[-1].epoch
    # The axis includes the bound on epochs only if the trial came near the bound.
    far = max(float(page.max_epochs), last) if page.max_epochs <= 2 * last else last
    return Scale(0.0, max(far, 1.0) * 1.04)
