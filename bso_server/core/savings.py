"""Savings of a job so far, compared with always using its default batch size.

Runs at the default would have been made anyway, and cancel out. Each run of another size that reached the target
replaces a run at the default, whose expected cost is the mean cost of the default's runs, including their failures. The
cost of the replacement is that of all trials of other sizes, however they ended, and of the trials at the default that
the policy stopped.

A few runs at the default do not show well how much they vary, so the variance relative to the mean is pooled over all
batch sizes. With R runs elsewhere, n at the default of mean m, and the relative variance s² with ν degrees of freedom,
R more runs at the default would have cost ``R·m ± t_ν · m·s·√(R²/n + R)``, a prediction interval for a sum of normal
values (Hahn and Meeker, Statistical Intervals, 1991, §4.7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeus_plugins.protocol import CreatedJob, Origin, SavedView, SavingsView, TrialState

CERTAINTY = 0.9
"""Probability that savings lie within their interval."""

_UNSPENT = frozenset({TrialState.RUNNING, TrialState.SUSPENDED, TrialState.WITHDRAWN})


@dataclass(frozen=True, slots=True)
class Tally:
    """Number of the trials of one batch size, state and origin; sums of their energy (J), time (s), and products."""

    batch_size: int
    state: TrialState
    origin: Origin
    trials: int
    energy_j: float
    time_s: float
    energy_squared: float
    time_squared: float
    energy_times_time: float


def savings(job: CreatedJob, tallies: Sequence[Tally], best_cost_j: float | None) -> SavingsView | None:
    """Return the savings of a job so far; None before a run at the default has reached the target.

    `tallies` cover all trials of the job; `best_cost_j` is the expected cost of a run at the best size, or None.
    """
    spent = [tally for tally in tallies if tally.state not in _UNSPENT]
    completed = [tally for tally in spent if tally.state is TrialState.COMPLETED]
    if not any(tally.batch_size == job.default_batch_size for tally in completed):
        return None
    time_j_per_s = (1 - job.eta_knob) * job.max_power
    explored = [tally for tally in spent if tally.origin is Origin.EXPLORATION]
    explored_j = sum(_total(tally, job.eta_knob, time_j_per_s) for tally in explored)
    reached = sum(tally.trials for tally in explored if tally.state is TrialState.COMPLETED)
    return SavingsView(
        recurrences=sum(tally.trials for tally in completed),
        energy_j=_saved(job, spent, per_joule=1.0, per_second=0.0),
        time_s=_saved(job, spent, per_joule=0.0, per_second=1.0),
        cost_j=_saved(job, spent, per_joule=job.eta_knob, per_second=time_j_per_s),
        exploration_cost_j=max(explored_j - reached * (best_cost_j or 0.0), 0.0),
    )


def cost_of_default_j(job: CreatedJob, tallies: Iterable[Tally]) -> float | None:
    """Return the mean cost of a run at the default size, including failures, in joules; None without a success."""
    own = [
        tally for tally in tallies if tally.state not in _UNSPENT and _is_of_default(job, tally.batch_size, tally.state)
    ]
    runs = sum(tally.trials for tally in own if tally.state is TrialState.COMPLETED)
    per_second = (1 - job.eta_knob) * job.max_power
    return sum(_total(tally, job.eta_knob, per_second) for tally in own) / runs if runs else None


def gain_j(job: CreatedJob, batch_size: int, state: TrialState, cost_j: float, cost_of_default_j: float) -> float:
    """Return the contribution of one trial to the cost that a job has saved, in joules."""
    if state in _UNSPENT or _is_of_default(job, batch_size, state):
        return 0.0
    is_elsewhere = state is TrialState.COMPLETED and batch_size != job.default_batch_size
    return (cost_of_default_j if is_elsewhere else 0.0) - cost_j


def _is_of_default(job: CreatedJob, batch_size: int, state: TrialState) -> bool:
    """Return True if such a trial would also have been made without an optimizer."""
    return batch_size == job.default_batch_size and state is not TrialState.EARLY_STOPPED


def _saved(job: CreatedJob, spent: Sequence[Tally], *, per_joule: float, per_second: float) -> SavedView:
    """Return the savings of ``per_joule · energy + per_second · time``."""

    def total(tallies: Iterable[Tally]) -> float:
        return sum(_total(tally, per_joule, per_second) for tally in tallies)

    own = [tally for tally in spent if _is_of_default(job, tally.batch_size, tally.state)]
    runs = sum(tally.trials for tally in own if tally.state is TrialState.COMPLETED)
    mean = total(own) / runs
    elsewhere = sum(
        tally.trials
        for tally in spent
        if tally.state is TrialState.COMPLETED and tally.batch_size != job.default_batch_size
    )
    everything = total(spent)
    default = total(own) + elsewhere * mean
    saved = default - everything
    variance, freedom = _relative_variance(spent, per_joule, per_second)
    if elsewhere and not freedom:
        return SavedView(spent=everything, default=default, saved=saved, low=None, high=None)
    reach = mean * math.sqrt(variance * (elsewhere**2 / runs + elsewhere))
    if reach:
        reach *= student_quantile(freedom)
    return SavedView(spent=everything, default=default, saved=saved, low=saved - reach, high=saved + reach)


def _relative_variance(spent: Sequence[Tally], per_joule: float, per_second: float) -> tuple[float, int]:
    """Return the relative variance of runs that reached the target, pooled over sizes, and its degrees of freedom."""
    by_size: dict[int, list[Tally]] = {}
    for tally in spent:
        if tally.state is TrialState.COMPLETED:
            by_size.setdefault(tally.batch_size, []).append(tally)
    deviations, freedom = 0.0, 0
    for tallies in by_size.values():
        runs = sum(tally.trials for tally in tallies)
        mean = sum(_total(tally, per_joule, per_second) for tally in tallies) / runs
        squares = sum(
            per_joule**2 * tally.energy_squared
            + 2 * per_joule * per_second * tally.energy_times_time
            + per_second**2 * tally.time_squared
            for tally in tallies
        )
        if mean > 0:
            deviations += max(squares / mean**2 - runs, 0.0)
            freedom += runs - 1
    return (deviations / freedom if freedom else 0.0), freedom


def _total(tally: Tally, per_joule: float, per_second: float) -> float:
    return per_joule * tally.energy_j + per_second * tally.time_s


def student_quantile(freedom: int) -> float:
    """Return the two-sided quantile of Student's t distribution for the probability `CERTAINTY`.

    Closed forms for one and two degrees of freedom; from three on, the expansion of Abramowitz and Stegun (26.7.5),
    with an error below 0.5 %.
    """
    if freedom == 1:
        return math.tan(math.pi * CERTAINTY / 2)
    if freedom == 2:
        return CERTAINTY * math.sqrt(2 / (1 - CERTAINTY**2))
    z = 1.6448536269514722  # quantile of the normal distribution
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


@dataclass(frozen=True, slots=True)
class Line:
    """Mean cost of a batch size, joules, if only time counts (η = 0) and if only energy counts (η = 1)."""

    batch_size: int
    at_time_j: float
    at_energy_j: float

    def at(self, eta: float) -> float:
        """Return the cost at this η."""
        return (1 - eta) * self.at_time_j + eta * self.at_energy_j

    @property
    def slope(self) -> float:
        """Slope of the cost over η."""
        return self.at_energy_j - self.at_time_j


@dataclass(frozen=True, slots=True)
class Span:
    """Interval of η, from `low` to `high`, in which a batch size costs least."""

    low: float
    high: float
    batch_size: int


def best_by_eta(lines: Sequence[Line]) -> list[Span]:
    """Return the sizes that cost least for η from 0 to 1, exactly; of equal ones the smaller."""
    spans: list[Span] = []
    low, left = 0.0, list(lines)
    while left:
        # Of lines that meet at `low`, the one with the smallest slope is lowest beyond it.
        best = min(left, key=lambda line: (line.at(low), line.slope, line.batch_size))
        left = [line for line in left if line.slope < best.slope]
        crossings = [(line.at_time_j - best.at_time_j) / (best.slope - line.slope) for line in left]
        high = min([1.0, *crossings])
        spans.append(Span(low, high, best.batch_size))
        if high >= 1:
            break
        low = high
    return spans
