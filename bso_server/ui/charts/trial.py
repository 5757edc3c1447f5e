"""The charts of a trial: its metric and its cost by epoch, and what steps cost under each power limit."""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from bso_server.service.messages import PowerProfileView
from bso_server.service.page_views import TrialPage
from bso_server.ui import units
from bso_server.ui.charts.job import ticks_of_energy, whole_ticks
from bso_server.ui.charts.scales import Scale
from bso_server.ui.charts.svg import Plot, colours, mark, pixels, share, text
from zeus_plugins.protocol import SizeBelief

# What lies further above a curve is not drawn beside it.
_NEAR = 4

_FEW = 60
"""Of more reports than that only the line is drawn, and the last one."""


def metric(page: TrialPage) -> Markup | None:
    """The metric by epoch, with the target; None before the first report."""
    if not page.epochs:
        return None
    target, last = page.job.target_metric, page.epochs[-1]
    y = Scale.over([target, *(each.metric for each in page.epochs)], zero=False, log=False)
    is_better = "rise to" if page.job.higher_is_better_metric else "fall to"
    told = (
        f"{units.number(last.metric, 4)} after {units.count_of_epochs(last.epoch)}; it is to {is_better} "
        f"{units.exact(target)}."
    )
    plot = Plot("metric", "Metric by epoch", told, _epochs(page), y)
    plot.y_axis([(value, units.number(value)) for value in y.ticks(5)])
    plot.x_axis(whole_ticks(plot.x), "epoch")
    _draw_predicted_epochs(plot, page)
    plot.level(target, f"target {units.exact(target)}", "target", above=y.at(target) < 0.85)
    _series(plot, page, [(each.epoch, each.metric) for each in page.epochs], lambda value: units.number(value, 4))
    return plot.drawn()


def cost(page: TrialPage) -> Markup | None:
    """The cost by epoch, with what ends the trial; None before the first report."""
    if not page.epochs:
        return None
    bound_j = page.max_cost_j
    costs_j = [each.cost_j for each in page.epochs]
    near = [bound_j] if bound_j is not None and bound_j < _NEAR * max(costs_j) else []
    belief = belief_of(page)
    expected = [] if belief is None else [belief.expected_cost_j or 0.0, min(belief.high_j or 0.0, 2 * max(costs_j))]
    y = Scale.over([0.0, *costs_j, *near, *expected], log=False)
    told = f"{units.energy(costs_j[-1])} after {units.count_of_epochs(page.epochs[-1].epoch)}."
    plot = Plot("cost", "Cost by epoch", told, _epochs(page), y)
    plot.y_axis(ticks_of_energy(y))
    plot.x_axis(whole_ticks(plot.x), "epoch")
    if belief is not None:
        _draw_predicted_cost(plot, belief)
    if near and bound_j is not None:
        plot.level(bound_j, f"stopped above {units.energy(bound_j)}", "bound", above=y.at(bound_j) < 0.85)
    _series(plot, page, [(each.epoch, each.cost_j) for each in page.epochs], units.energy)
    return plot.drawn()


def belief_of(page: TrialPage) -> SizeBelief | None:
    """The belief about the trial's batch size when it was chosen; None where none is kept, or it was of no cost."""
    decision = page.explanation.decision
    known = [] if decision is None else decision.sizes
    found = next((each for each in known if each.batch_size == page.trial.batch_size), None)
    if found is None or found.expected_cost_j is None or found.low_j is None or found.high_j is None:
        return None
    return found


def predicted_epochs(page: TrialPage) -> tuple[float, float] | None:
    """The epochs in which a run of the predicted cost would end at what an epoch of this one costs; None if unknown."""
    belief, last = belief_of(page), page.epochs[-1] if page.epochs else None
    if belief is None or last is None or not last.cost_j:
        return None
    epochs_per_j = last.epoch / last.cost_j
    return (belief.low_j or 0.0) * epochs_per_j, (belief.high_j or 0.0) * epochs_per_j


def _draw_predicted_cost(plot: Plot, belief: SizeBelief) -> None:
    top, bottom = plot.top(belief.high_j or 0.0), plot.top(belief.low_j or 0.0)
    plot.parts.append(
        f'<rect class="predicted" x="0" width="100%" y="{pixels(top)}" height="{pixels(max(bottom - top, 2))}"/>'
    )
    at = plot.top(belief.expected_cost_j or 0.0)
    plot.parts.append(f'<line class="level predicted" x1="0" x2="100%" y1="{pixels(at)}" y2="{pixels(at)}"/>')
    plot.parts.append(
        text("4", at - 6, f"expected {units.energy(belief.expected_cost_j or 0.0)}", "level-name predicted")
    )


def _draw_predicted_epochs(plot: Plot, page: TrialPage) -> None:
    epochs = predicted_epochs(page)
    if epochs is None or epochs[0] >= plot.x.high:
        return
    left, right = plot.x.at(epochs[0]), min(plot.x.at(epochs[1]), 1.0)
    plot.parts.append(
        f'<rect class="predicted" x="{share(left)}" width="{share(max(right - left, 0.004))}" y="0" '
        f'height="{plot.height}"/>'
    )
    middle = share((left + right) / 2)
    plot.parts.append(text(middle, plot.height - 26, "expected", "level-name mid predicted"))


def _epochs(page: TrialPage) -> Scale:
    last = page.epochs[-1].epoch
    # The bound is on the axis where the trial came near it.
    far = max(float(page.max_epochs), last) if page.max_epochs <= 2 * last else last
    predicted = predicted_epochs(page)
    if predicted is not None and predicted[1] < _NEAR * last:
        far = max(far, predicted[1])
    return Scale(0.0, max(far, 1.0) * 1.04)


def _series(plot: Plot, page: TrialPage, points: list[tuple[float, float]], say: Callable[[float], str]) -> None:
    colour = colours(page.job.batch_sizes)[page.trial.batch_size]
    plot.path(points, f"line {colour}")
    for number, (epoch, value) in enumerate(points, start=1):
        is_last = number == len(points)
        if is_last or len(points) <= _FEW:
            shape = page.trial.state if is_last else "epoch"
            told = f"Epoch {units.number(epoch, 4)}: {say(value)}"
            plot.parts.append(mark(plot.left(epoch), plot.top(value), shape, colour, told))
    if page.max_epochs <= plot.x.high:
        x = plot.left(page.max_epochs)
        plot.parts.append(f'<line class="level bound" x1="{x}" x2="{x}" y1="0" y2="{plot.height}"/>')
        plot.parts.append(
            f'<text x="{x}" y="{plot.height - 8}" class="level-name end bound">last epoch {page.max_epochs}</text>'
        )


def power(profile: PowerProfileView, name: str) -> Markup:
    """Energy of a step under each power limit; `name` is the chart's id."""
    samples = profile.samples
    x = Scale.over([each.limit_w for each in samples], zero=False, log=False)
    y = Scale.over([each.energy_per_step_j for each in samples], log=False)
    least = min(samples, key=lambda each: each.energy_per_step_j)
    told = f"A step takes least energy, {units.energy(least.energy_per_step_j)}, at {units.number(least.limit_w)} W."
    plot = Plot(name, "Energy of a step under each power limit", told, x, y, height=200)
    plot.y_axis(ticks_of_energy(y, 4))
    plot.x_axis([(value, f"{units.number(value)}{units.SPACE}W") for value in x.ticks(6)], "power limit of each GPU")
    plot.path([(each.limit_w, each.energy_per_step_j) for each in samples], "line")
    for each in samples:
        told = (
            f"{units.number(each.limit_w)} W: {units.energy(each.energy_per_step_j)} and "
            f"{units.number(1000 * each.time_per_step_s)} ms a step"
        )
        plot.parts.append(mark(plot.left(each.limit_w), plot.top(each.energy_per_step_j), "epoch", "plain", told))
    return plot.drawn()
