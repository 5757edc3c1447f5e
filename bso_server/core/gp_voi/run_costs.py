"""Cost of an epoch at each batch size, from its latest runs, some of which may have been slowed.

On a machine of its own, a size has equal costs in all runs, to a percent or two. On a busy machine the cost varies, and
now and then a run costs several times as much. Log costs are normal around the mean of their size, with a variance that
all sizes share; or, with a small chance, the run was slowed and the variance is far larger (a contaminated normal
distribution: Tukey, in Contributions to Probability and Statistics, 1960). Epochs of a run differ, too: the more evenly
they cost, the fewer of them are needed to know the cost of an epoch in this run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from bso_server.core.gp_voi.prior import CONSTANTS, Array, bounded_exp
from bso_server.core.model import TrialRecord, cost_deviations_j2, log_costs_per_epoch, set_apart
from bso_server.core.verdict import CompletedRun
from zeus_plugins.protocol import CreatedJob, is_busy

# Keeps ratios and logs of densities finite at extreme deviations.
_LEAST_DENSITY = 1e-300
# Beyond what any machine does, and finite.
_LARGEST_DEVIATIONS = 1e12
# A larger variance would give a run no weight.
_LARGEST_VARIANCE = 4.0

# Keeps the doubt finite for a run that only waited.
_MOST_WAITED = 0.99

SECOND_RUN = 1.5
"""A size whose runs have a smaller sum of trusts or weights has, in effect, a single run."""

# Number of the latest runs of a job that `drift_of` compares.
_DRIFT_RUNS = 20

# Least number of earlier runs to compare with, because a single earlier run may itself have been slowed.
_RUNS_BEFORE = 2


class CostRun(NamedTuple):
    """Evidence of one run about the cost of an epoch at its size.

    Attributes:
        log_cost: Log of the mean cost of an epoch (J).
        epochs: Number of epochs in that mean.
        deviations: Relative spread of the costs of these epochs: ``Σ e · (r/m − 1)²`` over the reports after the first,
            with e, r and m as in `Deviations`, for costs.
        freedom: Degrees of freedom of `deviations`: number of reports after the first, less one.
        doubt: Variance of log_cost for other reasons, such as an unusual wait for a CPU core.
        drift: Change of the log costs of another size since this run; 0 if none.
        number: Number of the trial.
        waited_share: Share of its time for which the run waited for a CPU core.
    """

    log_cost: float
    epochs: float
    deviations: float = 0.0
    freedom: float = 0.0
    doubt: float = 0.0
    drift: float = 0.0
    number: int = 0
    waited_share: float = 0.0

    @classmethod
    def of(cls, job: CreatedJob, trial: TrialRecord) -> Self | None:
        """Return the evidence of a trial without the part that is `set_apart`, or None."""
        _, log_cost = log_costs_per_epoch(job, trial)
        _, apart_epochs = set_apart(trial.startup_s, trial.first_time_s, trial.first_epoch)
        run = cls._at(trial, log_cost, trial.epoch - apart_epochs)
        deviations_j2 = cost_deviations_j2(job, trial)
        if run is None or log_cost is None or deviations_j2 is None:
            return run
        deviations = min(deviations_j2 * bounded_exp(-2 * log_cost), _LARGEST_DEVIATIONS)
        return run._replace(deviations=deviations, freedom=max(trial.report_count - 2.0, 0.0))

    @classmethod
    def until_first(cls, job: CreatedJob, trial: TrialRecord) -> Self | None:
        """Return the evidence of a trial until its first report, its start-up included, or None."""
        return cls._at(trial, log_costs_per_epoch(job, trial)[0], 1.0)

    @classmethod
    def _at(cls, trial: TrialRecord, log_cost: float | None, epochs: float) -> Self | None:
        if log_cost is None:
            return None
        return cls(log_cost, epochs, number=trial.trial_number, waited_share=trial.waited_share or 0.0)

    def drifted(self, share: float) -> CostRun:
        """Return the evidence as if the run's own size had changed by this share of the drift; the rest adds doubt."""
        rest = (1 - share) * self.drift
        return self._replace(log_cost=self.log_cost + share * self.drift, doubt=self.doubt + rest * rest, drift=0.0)

    def variance(self, epoch_variance: float) -> float:
        """Return the variance of the log cost within the run, given the relative variance of a single epoch."""
        return min(epoch_variance / self.epochs + self.doubt, _LARGEST_VARIANCE)


CostRuns: TypeAlias = tuple[CostRun, ...]
"""Latest runs of one batch size, oldest first."""


@dataclass(frozen=True, slots=True)
class CostSummary:
    """Summary of the runs of every size.

    Attributes:
        means: Log cost of an epoch of each size; 0 for a size without runs.
        weights: Number of undisturbed runs that each mean is worth; 0 for a size without runs.
        suspect: True for a size whose cost rests on a single run.
        run_variance: Variance of the log cost from run to run.
    """

    means: tuple[float, ...]
    weights: tuple[float, ...]
    suspect: tuple[bool, ...]
    run_variance: float


def summary_of(sizes: Sequence[CostRuns]) -> CostSummary:
    """Summarise the runs of every size."""
    sizes = _with_doubts(sizes)
    within = epoch_variance(sizes)
    variance = run_variance(sizes, within)
    owners = np.array([place for place, runs in enumerate(sizes) for _ in runs], dtype=np.intp)
    values = np.array([run.log_cost for runs in sizes for run in runs])
    variances = np.array([variance + run.variance(within) for runs in sizes for run in runs])
    off = values - np.array([center for runs in sizes if runs for center in [_center(runs)] * len(runs)])
    regular, slowed = _densities(off**2, variances)
    alone = np.array([len(runs) == 1 for runs in sizes])
    trusts = np.where(alone[owners], 1.0, regular / (regular + slowed + _LEAST_DENSITY))
    given = trusts * variance / variances
    weights = np.bincount(owners, given, len(sizes))
    means = np.bincount(owners, given * values, len(sizes)) / np.where(weights > 0, weights, 1.0)
    trusted = np.bincount(owners, trusts, len(sizes))
    suspect = [bool(runs) and trust < SECOND_RUN for runs, trust in zip(sizes, trusted.tolist(), strict=True)]
    return CostSummary(tuple(means.tolist()), tuple(weights.tolist()), tuple(suspect), variance)


def epoch_variance(sizes: Sequence[CostRuns]) -> float:
    """Return the relative variance of an epoch's cost within a run, pooled over all runs.

    ``(ν·σ₀² + Σ deviations) / (ν + Σ degrees of freedom)``, with σ₀ = `epoch_sd` and ν = `epoch_sd_freedom`.
    """
    freedom = CONSTANTS.epoch_sd_freedom
    deviations = freedom * CONSTANTS.epoch_sd**2 + sum(run.deviations for runs in sizes for run in runs)
    return deviations / (freedom + sum(run.freedom for runs in sizes for run in runs))


def run_variance(sizes: Sequence[CostRuns], within: float) -> float:
    """Return the variance of log costs from run to run: the posterior mean of σ² over a grid of σ.

    Deviations of n runs of a size are taken from the middle run, whose own deviation adds to theirs: each variance
    grows by the factor 1 + 1/(n − 1), and by the variance within the run, which follows from `within`, the relative
    variance of an epoch. σ has a log-normal prior around `cost_run_sd`.
    """
    squares, factors, doubts = [], [], []
    for runs in sizes:
        if len(runs) > 1:
            center = _center(runs)
            others = sorted(runs)
            del others[(len(others) - 1) // 2]
            factor = 1 + 1 / len(others)
            squares += [(run.log_cost - center) ** 2 for run in others]
            factors += [factor] * len(others)
            doubts += [factor * run.variance(within) for run in others]
    grid, log_chances = _grid()
    if squares:
        regular, slowed = _densities(np.array(squares), grid[:, None] ** 2 * np.array(factors) + np.array(doubts))
        log_chances = log_chances + np.log(regular + slowed + _LEAST_DENSITY).sum(axis=1)
    chances = np.exp(log_chances - log_chances.max())
    return float(chances @ grid**2 / chances.sum())


def change_of(sizes: Sequence[CostRuns], index: int) -> float | None:
    """Return the log of the factor by which the last two runs of a size changed in cost; None if it may be chance.

    A single slowed run is rare. Two in a row are as rare as a change of the job (longer texts, more data, another
    machine). So a change requires two runs in a row that both cost more, or both cost less, than at least two runs
    before them, all of them `comparable`.
    """
    if not sizes[index]:
        return None
    last = sizes[index][-1]
    own = comparable(sizes[index], last)
    before, latest = own[:-2], own[-2:]
    if len(before) < _RUNS_BEFORE:
        return None
    center = _center(before)
    if min(run.log_cost for run in latest) <= center <= max(run.log_cost for run in latest):
        return None
    off = np.array([run.log_cost for run in latest]) - center
    if np.abs(off).min() < _least_change():
        return None
    sizes = [comparable(runs, last) for runs in sizes]
    within = epoch_variance(sizes)
    variances = run_variance(sizes, within) + np.array([run.variance(within) for run in latest])
    regular, slowed = _densities(off**2, variances)
    return float(off.min()) if (slowed > regular).all() else None


def comparable(runs: CostRuns, last: CostRun) -> CostRuns:
    """Return the runs on busy machines if the run `last` was on a busy machine, otherwise the other runs."""
    busy = is_busy(last.waited_share)
    return tuple(run for run in runs if is_busy(run.waited_share) is busy)


def drift_of(job: CreatedJob, runs: Sequence[CompletedRun]) -> float | None:
    """Return the share by which the last two runs cost more (negative: less) than the runs before them, or None.

    Only runs at the batch size of the last run count. None means that the change may be chance, as in `change_of`.
    """
    alike = [run for run in runs if run.batch_size == runs[-1].batch_size][-_DRIFT_RUNS:]
    costs_j = [job.cost_j(time_s=run.time_s, energy_j=run.energy_j) for run in alike]
    if min(costs_j, default=0.0) <= 0:
        return None
    logs = zip(alike, map(math.log, costs_j), strict=True)
    change = change_of([tuple(CostRun(log, 1.0, waited_share=run.waited_share or 0.0) for run, log in logs)], 0)
    return None if change is None else math.expm1(change)


def _with_doubts(sizes: Sequence[CostRuns]) -> list[CostRuns]:
    """Add to the doubt of each run by how much its waiting differs from the job's usual waiting, as a variance.

    A run that waited a share s of its time took 1/(1 - s) times as long, if waiting was its only delay. The logs of
    these factors are compared with their median.
    """
    logs = sorted(_log_slowness(run) for runs in sizes for run in runs)
    usual = logs[(len(logs) - 1) // 2] if logs else 0.0
    return [tuple(run._replace(doubt=run.doubt + (_log_slowness(run) - usual) ** 2) for run in runs) for runs in sizes]


def _log_slowness(run: CostRun) -> float:
    return -math.log1p(-min(run.waited_share, _MOST_WAITED))


def _center(runs: CostRuns) -> float:
    """Return the median log cost; of two middle values the lower, because disturbances slow runs down."""
    return sorted(runs)[(len(runs) - 1) // 2].log_cost


def _densities(squares: Array, variances: Array) -> tuple[Array, Array]:
    """Return the densities of deviations of regular and of slowed runs, each times the chance of such a run."""
    wider = variances + CONSTANTS.slowed_sd**2
    regular = (1 - CONSTANTS.slowed_chance) * np.exp(-0.5 * squares / variances) / np.sqrt(variances)
    return regular, CONSTANTS.slowed_chance * np.exp(-0.5 * squares / wider) / np.sqrt(wider)


@cache
def _least_change() -> float:
    """Return a deviation below which no run counts as slowed, however little the cost varies from run to run."""
    variance = min(CONSTANTS.cost_run_sds) ** 2
    wider = variance + CONSTANTS.slowed_sd**2
    log_odds = math.log(1 / CONSTANTS.slowed_chance - 1) + 0.5 * math.log(wider / variance)
    return math.sqrt(2 * log_odds / (1 / variance - 1 / wider))


@cache
def _grid() -> tuple[Array, Array]:
    """Return the values of σ, and the log of their prior probabilities up to a constant."""
    grid = np.array(CONSTANTS.cost_run_sds)
    return grid, -0.5 * (np.log(grid / CONSTANTS.cost_run_sd) / CONSTANTS.cost_run_sd_spread) ** 2
