"""The charts of a job: what each trial has cost, what is believed of each size, what was saved, time against energy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from bso_server.service.page_views import JobPage, MomentPage, SizeMeans, TrialBin, TrialPoint
from bso_server.ui import units
from bso_server.ui.charts.scales import Scale
from bso_server.ui.charts.svg import Plot, colours, mark, pixels, share, text
from bso_server.ui.words import state_words
from zeus_plugins.protocol import Decision, JobRegistration, TrialState

Z90 = 1.6448536269514722
"""A normal variable lies within so many standard deviations with a probability of 90 %."""

# Means of sizes that lie so many times apart are shown on logarithmic axes.
_FAR = 3

# Of more trials than that, marks are drawn small and pale.
_MANY = 150


def ticks_of_energy(scale: Scale, most: int = 5) -> list[tuple[float, str]]:
    """Round energies in one unit for the whole axis; on a logarithmic one each has its own."""
    if scale.is_log:
        return [(value, units.energy(value)) for value in scale.ticks(most)]
    size, name = units.energy_unit(max(abs(scale.low), abs(scale.high)))
    inner = Scale(scale.low / size, scale.high / size)
    return [
        (value * size, f"{units.number(value)}{units.SPACE}{name}" if value else "0") for value in inner.ticks(most)
    ]


def ticks_of_time(scale: Scale, most: int = 5) -> list[tuple[float, str]]:
    """Round durations in one unit for the whole axis."""
    size, name = next(
        (each for each in ((86400, "d"), (3600, "h"), (60, "min")) if scale.high >= 2 * each[0]), (1, "s")
    )
    inner = Scale(scale.low / size, scale.high / size, scale.is_log)
    return [(value * size, f"{units.number(value)}{units.SPACE}{name}") for value in inner.ticks(most)]


def whole_ticks(scale: Scale, most: int = 10) -> list[tuple[float, str]]:
    """Round whole numbers, such as trials and epochs."""
    return [(value, units.exact(value)) for value in scale.ticks(most) if float(value).is_integer()]


def trial_scale(points: Sequence[TrialPoint], older: Sequence[TrialBin] = ()) -> Scale:
    """The axis of trials' numbers, with half a trial of room."""
    first, last = (points[0].trial_number, points[-1].trial_number) if points else (1, 1)
    first = older[0].first if older else first
    room = max((last - first) * 0.015, 0.5)
    return Scale(first - room, last + room)


def told_of(point: TrialPoint) -> str:
    """A trial in a sentence."""
    cost = "" if point.cost_j is None else f", {units.energy(point.cost_j)}"
    return f"Run {point.trial_number}: batch size {point.batch_size}, {state_words(point.state)}{cost}"


def costs(page: JobPage, address: str | None) -> Markup | None:
    """The cost of each trial: its state as a shape, its size as a colour; None before a trial has told of any.

    `address` is the job's; None: marks lead nowhere.
    """
    job = page.view.job
    levels = [
        (each.cost_j, f"your default, {each.batch_size}: {units.energy(each.cost_j)}", "default")
        for each in page.means
        if each.batch_size == job.default_batch_size
    ]
    if page.view.min_cost_j is not None and job.beta_knob is not None and job.policy == "zeus":
        bound_j = job.beta_knob * page.view.min_cost_j
        levels.append((bound_j, f"stopped above {units.energy(bound_j)}", "bound"))
    return _costs(
        page.points, job, levels, lambda number: "" if address is None else f"{address}/trials/{number}", page.older
    )


def costs_until(page: MomentPage, address: str) -> Markup | None:
    """The same of the trials before one; each leads to its own moment."""
    return _costs(page.points, page.job, [], lambda number: f"{address}?at={number}")


def _costs(
    points: Sequence[TrialPoint],
    job: JobRegistration,
    levels: Sequence[tuple[float, str, str]],
    href: Callable[[int], str],
    older: Sequence[TrialBin] = (),
) -> Markup | None:
    known = [point for point in points if point.cost_j is not None]
    if not known:
        return None
    # A bound far above all costs would press them together.
    most = 1.5 * max(point.cost_j or 0.0 for point in known)
    shown = [level for level in levels if level[2] != "bound" or level[0] < most]
    bins = [each for each in older if each.low_j is not None and each.high_j is not None]
    ends = [end for each in bins for end in (each.low_j or 0.0, each.high_j or 0.0)]
    y = Scale.over([point.cost_j or 0.0 for point in known] + [value for value, _, _ in shown] + ends)
    plot = Plot("costs", "Cost of each run", _told_costs(known, older), trial_scale(points, older), y, height=280)
    plot.y_axis(ticks_of_energy(y))
    plot.x_axis(whole_ticks(plot.x), "run")
    plot.levels(shown)
    _draw_older(plot, bins)
    colour, kind = colours(job.batch_sizes), " many" if len(points) > _MANY else ""
    for point in points:
        # What has told nothing stands at the foot.
        x, top = plot.left(point.trial_number), plot.top(y.low if point.cost_j is None else point.cost_j)
        classes = f"{colour[point.batch_size]}{kind}"
        plot.parts.append(mark(x, top, point.state, classes, told_of(point), href(point.trial_number)))
    return plot.drawn()


def _draw_older(plot: Plot, bins: Sequence[TrialBin]) -> None:
    """The median of each bin in the band of its middle, and a mark that tells of both."""
    if not bins:
        return
    upper, lower, middle = [
        [(end, getattr(each, name)) for each in bins for end in (each.first, each.last)]
        for name in ("high_j", "low_j", "median_j")
    ]
    plot.path([*upper, *reversed(lower)], "area older")
    plot.path(middle, "line older")
    for each in bins:
        low, median, high = (units.energy(end or 0.0) for end in (each.low_j, each.median_j, each.high_j))
        told = f"Runs {each.first} to {each.last}: half of {each.reached} below {median}, four in five {low} to {high}"
        at = plot.left((each.first + each.last) / 2)
        plot.parts.append(mark(at, plot.top(each.median_j or 0.0), "older", "older", told))


def _told_costs(points: Sequence[TrialPoint], older: Sequence[TrialBin]) -> str:
    costs_j = [point.cost_j or 0.0 for point in points]
    before = f" The {units.count(older[-1].last, 'run')} before them are shown as medians." if older else ""
    return (
        f"{units.count(len(points), 'run')} that cost between {units.energy(min(costs_j))} and "
        f"{units.energy(max(costs_j))}; the latest, run {points[-1].trial_number}, {units.energy(costs_j[-1])}.{before}"
    )


def saved(page: JobPage) -> Markup | None:
    """The cost saved over the default with all runs until each; None before that is known."""
    line = [(point.trial_number, point.saved_j) for point in page.points if point.saved_j is not None]
    if not line:
        return None
    y = Scale.over([value for _, value in line], log=False)
    number, last = line[-1]
    told = (
        f"After run {number} the job has {'saved' if last >= 0 else 'lost'} {units.energy(abs(last))} of cost over "
        "its default."
    )
    plot = _over_runs("saved", "Cost saved so far", told, page, y)
    whole = _through_zero(line)
    plot.path([(number, max(value, 0.0)) for number, value in whole], "area gain", down_to=0.0)
    plot.path([(number, min(value, 0.0)) for number, value in whole], "area loss", down_to=0.0)
    zero = pixels(plot.top(0.0))
    plot.parts.append(f'<line class="axis" x1="0" x2="100%" y1="{zero}" y2="{zero}"/>')
    plot.path(line, "line")
    if page.paid_back_in is not None:
        x = plot.left(page.paid_back_in)
        told = f"From run {page.paid_back_in} on, trying has paid itself back"
        plot.parts.append(mark(x, plot.top(0.0), "paid", "paid", told))
        is_right = plot.x.at(page.paid_back_in) > 0.6
        place = f"note {'end left' if is_right else 'right'}"
        plot.parts.append(text(x, plot.top(0.0) - 10, f"paid back in run {page.paid_back_in}", place))
    told = f"After run {number}: {units.energy(abs(last))} {'saved' if last >= 0 else 'lost'}"
    plot.parts.append(mark(plot.left(number), plot.top(last), "end", "gain" if last >= 0 else "loss", told))
    return plot.drawn()


def _through_zero(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same line with its points at 0."""
    found = list(line[:1])
    for (before, low), (after, high) in pairwise(line):
        if low * high < 0:
            found.append((before + (after - before) * low / (low - high), 0.0))
        found.append((after, high))
    return found


def regret(page: JobPage) -> Markup | None:
    """The cost beyond that of the best size with all runs until each; None before a size has reached the target."""
    line = [(point.trial_number, point.regret_j) for point in page.points if point.regret_j is not None]
    if not line:
        return None
    y = Scale.over([value for _, value in line], log=False)
    number, last = line[-1]
    told = f"After run {number}: {units.energy(last)} more than with the best size from the start"
    plot = _over_runs("regret", "Cost of not having known", f"{told}.", page, y)
    plot.path(line, "line")
    plot.parts.append(mark(plot.left(number), plot.top(last), "end", "ink", told))
    return plot.drawn()


def _over_runs(name: str, title: str, told: str, page: JobPage, y: Scale) -> Plot:
    plot = Plot(name, title, told, trial_scale(page.points), y, height=220)
    plot.y_axis(ticks_of_energy(y, 4))
    plot.x_axis(whole_ticks(plot.x), "run")
    return plot


def front(page: JobPage) -> Markup | None:
    """Mean time against mean energy of each size, with the line of those that no other size beats in both."""
    means = page.means
    if len(means) < 2:
        return None
    x, y = (_spread([getattr(each, name) for each in means]) for name in ("time_s", "energy_j"))
    best = pareto(means)
    sizes = units.listed([str(each.batch_size) for each in best])
    plot = Plot("front", "Time against energy", f"No size beats {sizes} in both time and energy.", x, y, height=220)
    plot.y_axis(ticks_of_energy(y, 4))
    plot.x_axis(ticks_of_time(x), "mean time of a run to the target")
    plot.path([(each.time_s, each.energy_j) for each in best], "line front")
    colour = colours(page.view.job.batch_sizes)
    for each in means:
        told = (
            f"{each.batch_size}: {units.duration(each.time_s)} and {units.energy(each.energy_j)}, "
            f"mean of {units.count(each.runs, 'run')}"
        )
        plot.parts.append(
            mark(plot.left(each.time_s), plot.top(each.energy_j), "completed", colour[each.batch_size], told)
        )
    plot.parts += _names(plot, [(each.time_s, each.energy_j, str(each.batch_size)) for each in means])
    return plot.drawn()


def _spread(values: Sequence[float]) -> Scale:
    """An axis on which the few largest values do not press the others together."""
    return Scale.over(values, zero=False, log=0 < _FAR * min(values) < max(values))


def pareto(means: Sequence[SizeMeans]) -> list[SizeMeans]:
    """The sizes that no other one beats in time and energy, by time."""
    found: list[SizeMeans] = []
    for each in sorted(means, key=lambda each: (each.time_s, each.energy_j)):
        if not found or each.energy_j < found[-1].energy_j:
            found.append(each)
    return found


def _names(plot: Plot, named: Sequence[tuple[float, float, str]], width: float = 280.0) -> list[str]:
    """Labels beside points, each where it hides no other one on a plot so many pixels wide; none where all would."""
    taken = [(plot.x.at(x) * width - 6, plot.top(y) - 6, 12.0, 12.0) for x, y, _ in named]
    found = []
    for x, y, name in named:
        across, down, wide = plot.x.at(x) * width, plot.top(y), 7.5 * len(name)
        places = [
            (9.0, 4.0, across + 9, "start"),
            (-9.0, 4.0, across - 9 - wide, "end"),
            (0.0, -10.0, across - wide / 2, "mid"),
            (0.0, 20.0, across - wide / 2, "mid"),
        ]
        for right, below, left, anchor in places:
            box = (left, down + below - 11, wide, 13.0)
            own = (across - 6, down - 6, 12.0, 12.0)
            if not any(_overlap(box, each) for each in taken if each != own) and left >= 0:
                taken.append(box)
                classes = f"size-name {anchor}{' right' if right > 0 else ' left' if right < 0 else ''}"
                found.append(text(plot.left(x), down + below, name, classes))
                break
    return found


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return (
        one[0] < other[0] + other[2]
        and other[0] < one[0] + one[2]
        and one[1] < other[1] + other[3]
        and other[1] < one[1] + one[3]
    )


@dataclass(frozen=True, slots=True)
class BeliefRow:
    """A batch size in the table of what is believed.

    Attributes:
        index: Its place among the sizes.
        colour: Its class.
        notes: What else there is to say of it.
        picture: What is believed and was observed, on an axis that all rows share.
    """

    index: int
    colour: str
    notes: tuple[str, ...]
    picture: Markup


@dataclass(frozen=True, slots=True)
class BeliefTable:
    """The rows, and the axis below them."""

    rows: tuple[BeliefRow, ...]
    axis: Markup


def beliefs(page: JobPage) -> BeliefTable | None:
    """The beliefs about each size: its expected cost with a band of 90 %, beside the costs of its runs.

    None while nothing is.
    """
    view = page.view
    notes: dict[int, list[str]] = {arm.batch_size: [] for arm in view.arms}
    for arm in view.arms:
        if arm.batch_size == view.best_batch_size:
            notes[arm.batch_size].append("best")
        if arm.batch_size == view.job.default_batch_size:
            notes[arm.batch_size].append("default")
        if arm.infeasible is not None:
            notes[arm.batch_size].append("out of memory" if arm.infeasible == "out_of_memory" else "crashes")
        elif not arm.trials:
            notes[arm.batch_size].append("never tried")
    believed = [
        Believed(arm.batch_size, arm.expected_cost_j, band(arm.expected_cost_j, arm.expected_cost_std_j))
        for arm in view.arms
    ]
    return belief_table(believed, page.points, colours(view.job.batch_sizes), notes)


def beliefs_of(decision: Decision, job: JobRegistration, points: Sequence[TrialPoint] = ()) -> BeliefTable | None:
    """The same when a decision was made."""
    notes = {
        each.batch_size: [
            *(["best"] if each.batch_size == decision.incumbent else []),
            *(["default"] if each.batch_size == job.default_batch_size else []),
        ]
        for each in decision.sizes
    }
    believed = [
        Believed(
            each.batch_size,
            each.expected_cost_j,
            None if each.low_j is None or each.high_j is None else (each.low_j, each.high_j),
        )
        for each in decision.sizes
    ]
    return belief_table(believed, points, colours(job.batch_sizes), notes)


@dataclass(frozen=True, slots=True)
class Believed:
    """The expected cost of a batch size, joules, and the ends of its 90 % band, as far as they are known."""

    batch_size: int
    mean_j: float | None
    ends: tuple[float, float] | None


def belief_table(
    believed: Sequence[Believed],
    points: Sequence[TrialPoint],
    colour: Mapping[int, str],
    notes: Mapping[int, Sequence[str]],
) -> BeliefTable | None:
    """A row for each batch size, with the costs of its runs that reached the target; None where nothing is believed."""
    if not any(each.mean_j is not None for each in believed):
        return None
    observed: dict[int, list[float]] = {}
    for point in points:
        if point.state is TrialState.COMPLETED and point.cost_j is not None:
            observed.setdefault(point.batch_size, []).append(point.cost_j)
    seen = [cost for found in observed.values() for cost in found]
    means = [each.mean_j for each in believed if each.mean_j is not None]
    ends = [end for each in believed if each.ends is not None for end in each.ends]
    # What is hardly known has a band that would press all else together.
    most = 2.5 * max([*seen, min(means)])
    scale = Scale.over([min(value, most) for value in (*seen, *means, *ends)], log=False)
    ticks = ticks_of_energy(scale)
    grid = "".join(
        f'<line class="grid" x1="{share(scale.at(tick))}" x2="{share(scale.at(tick))}" y1="0" y2="32"/>'
        for tick, _ in ticks
    )
    rows = []
    for index, each in enumerate(believed):
        own, name, parts = observed.get(each.batch_size, []), colour[each.batch_size], [grid]
        if each.ends is not None:
            low, high = (min(max(scale.at(end), 0.0), 1.0) for end in each.ends)
            parts.append(
                f'<rect class="band {name}" x="{share(low)}" width="{share(high - low)}" y="9" height="14" rx="3"/>'
            )
        # Of a thousand runs, the latest show where they lie.
        parts += [f'<circle class="run {name}" cx="{share(scale.at(cost))}" cy="16" r="2.5"/>' for cost in own[-60:]]
        if each.mean_j is not None and scale.at(each.mean_j) <= 1:
            x = share(scale.at(each.mean_j))
            parts.append(f'<line class="mean {name}" x1="{x}" x2="{x}" y1="5" y2="27"/>')
        told = escape(_told_belief(each, len(own)))
        picture = f'<svg class="row" height="32" role="img" aria-label="{told}">{"".join(parts)}</svg>'
        rows.append(BeliefRow(index, name, tuple(notes[each.batch_size]), Markup(picture)))  # noqa: S704 - numbers and escaped text
    labels = "".join(text(share(scale.at(tick)), 12, label, "tick mid") for tick, label in ticks)
    axis = f'<svg class="row" height="16" aria-hidden="true">{labels}</svg>'
    return BeliefTable(tuple(rows), Markup(axis))  # noqa: S704 - likewise


def band(mean_j: float | None, std_j: float | None) -> tuple[float, float] | None:
    """The ends of the 90 % band, joules; None where there is none."""
    if mean_j is None or std_j is None:
        return None
    return max(mean_j - Z90 * std_j, 0.0), mean_j + Z90 * std_j


def _told_belief(each: Believed, runs: int) -> str:
    if each.mean_j is None:
        return "nothing is known of its cost"
    between = ""
    if each.ends is not None:
        between = f", nine times in ten between {units.energy(each.ends[0])} and {units.energy(each.ends[1])}"
    return f"expected {units.energy(each.mean_j)}{between}; {units.count(runs, 'run')} observed"


def spark(points: Sequence[TrialPoint], colour: dict[int, str]) -> Markup:
    """The costs of the latest trials, as small as a word."""
    known = [(index, point.cost_j, point) for index, point in enumerate(points) if point.cost_j is not None]
    if not known:
        return Markup("")
    y = Scale.over([cost for _, cost, _ in known], log=False)
    last = max(len(points) - 1, 1)
    dots = [
        f'<circle class="{colour.get(point.batch_size, "s0")}'
        f'{"" if point.state is TrialState.COMPLETED else " hollow"}" '
        f'cx="{share(0.03 + 0.94 * index / last)}" cy="{pixels(25 - 22 * y.at(cost))}" r="2.2"/>'
        for index, cost, point in known
    ]
    costs_j = [cost for _, cost, _ in known]
    ends = f"{units.energy(costs_j[0])} to {units.energy(costs_j[-1])}"
    told = f"Costs of the latest {units.count(len(known), 'run')}: {ends}"
    return Markup(f'<svg class="spark" height="28" role="img" aria-label="{escape(told)}">{"".join(dots)}</svg>')  # noqa: S704 - likewise
