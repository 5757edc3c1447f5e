"""The cost of an epoch at each batch size, by its latest runs, of which some may have been slowed.

On a machine of one's own the same size costs the same each time, to a percent or two; on a busy one it varies, and now
and then a run costs several times as much. Log costs are normal around their size's own, with a variance that all sizes
share, or, with a small chance, slowed: with a variance that is larger by far (a contaminated normal distribution:
Tukey, in Contributions to Probability and Statistics, 1960). Within a run its epochs differ, too: the more evenly they
cost, the surer is it after a few of them what an epoch costs in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from bso_server.core.gp_voi.prior import CONSTANTS, Array, bounded_exp
from bso_server.core.model import TrialRecord, log_costs_per_epoch
from zeus_plugins.protocol import CreatedJob

# Keeps ratios and logs of densities finite where a deviation is beyond all of them.
_LEAST_DENSITY = 1e-300
# Far beyond what any machine does, and finite.
_LARGEST_DEVIATIONS = 1e12
# A run that tells less than that would as good as not have been.
_LARGEST_VARIANCE = 4.0

# Runs that are trusted less together are one.
_SECOND_RUN = 1.5

# With fewer, it may be the earlier one that was slowed.
_RUNS_BEFORE = 2


class CostRun(NamedTuple):
    """The evidence of one run about the cost of an epoch at its size.

    Attributes:
        log_cost: Log of what an epoch cost (J).
        epochs: Number of epochs that it is the mean of.
        deviations: The spread of their costs: ``Σ e · (r/m − 1)²`` over its reports, in the notation of
            `TrialRecord.cost_deviations_j2`.
        freedom: Degrees of freedom of that: reports less one.
        doubt: Variance of log_cost for other reasons.
        drift: By how much log costs of another size have changed since; 0: by nothing.
    """

    log_cost: float
    epochs: float
    deviations: float = 0.0
    freedom: float = 0.0
    doubt: float = 0.0
    drift: float = 0.0

    @classmethod
    def of(cls, job: CreatedJob, trial: TrialRecord) -> Self | None:
        """The evidence of a trial since its first report; None if there is none."""
        _, log_cost = log_costs_per_epoch(job, trial)
        if log_cost is None:
            return None
        epochs, deviations_j2 = trial.epoch - trial.first_epoch, trial.cost_deviations_j2
        if deviations_j2 is None:
            return cls(log_cost, epochs)
        deviations = min(deviations_j2 * bounded_exp(-2 * log_cost), _LARGEST_DEVIATIONS)
        return cls(log_cost, epochs, deviations, max(trial.report_count - 2.0, 0.0))

    def drifted(self, share: float) -> CostRun:
        """The same if its own size has changed by so much of the drift, give or take the rest of it."""
        rest = (1 - share) * self.drift
        return CostRun(
            self.log_cost + share * self.drift, self.epochs, self.deviations, self.freedom, self.doubt + rest * rest
        )

    def variance(self, epoch_variance: float) -> float:
        """Variance of its log cost, beside that from run to run, with the relative variance of a single epoch."""
        return min(epoch_variance / self.epochs + self.doubt, _LARGEST_VARIANCE)


CostRuns: TypeAlias = tuple[CostRun, ...]
"""The latest runs of one batch size, oldest first."""


@dataclass(frozen=True, slots=True)
class CostSummary:
    """A summary of the runs of every size.

    Attributes:
        means: Log cost of an epoch of each size; 0 for one without runs.
        weights: How many runs that is worth; 0 for one without.
        suspect: True for a size whose cost rests on a single run.
        run_variance: Variance of the log cost from run to run.
    """

    means: tuple[float, ...]
    weights: tuple[float, ...]
    suspect: tuple[bool, ...]
    run_variance: float


def summary_of(sizes: Sequence[CostRuns]) -> CostSummary:
    """Summarise the runs of every size."""
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
    suspect = [bool(runs) and trust < _SECOND_RUN for runs, trust in zip(sizes, trusted.tolist(), strict=True)]
    return CostSummary(tuple(means.tolist()), tuple(weights.tolist()), tuple(suspect), variance)


def epoch_variance(sizes: Sequence[CostRuns]) -> float:
    """Variance of what an epoch costs within a run, as a share of its mean, squared; pooled over all runs.

    ``(ν·σ₀² + Σ deviations) / (ν + Σ degrees of freedom)``, σ₀ being `epoch_sd`.
    """
    freedom = CONSTANTS.epoch_sd_freedom
    deviations = freedom * CONSTANTS.epoch_sd**2 + sum(run.deviations for runs in sizes for run in runs)
    return deviations / (freedom + sum(run.freedom for runs in sizes for run in runs))


def run_variance(sizes: Sequence[CostRuns], within: float) -> float:
    """Variance of log costs from run to run: its mean over a grid of σ, as probable as they make what was seen.

    Runs of a size deviate from the middle one of them, whose own deviation adds to theirs: of n runs each by a factor
    of 1 + 1/(n − 1) in variance. `within`, that of an epoch, adds what each run's own epochs leave open. A σ has a
    log-normal prior around `cost_run_sd`.
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
    """By how much more the last two runs of a size cost than those before (log of a factor); None if by chance.

    That a run is slowed is rare, and that two in a row are is as rare as a change of the job: longer texts, more data,
    another machine. So it takes two of them, both dearer or both cheaper than two runs or more before them.
    """
    before, latest = sizes[index][:-2], sizes[index][-2:]
    if len(before) < _RUNS_BEFORE:
        return None
    off = np.array([run.log_cost for run in latest]) - _center(before)
    if off.min() <= 0 <= off.max():
        return None
    within = epoch_variance(sizes)
    variances = run_variance(sizes, within) + np.array([run.variance(within) for run in latest])
    regular, slowed = _densities(off**2, variances)
    return float(off.min()) if (slowed > regular).all() else None


def _center(runs: CostRuns) -> float:
    """The middle one of the log costs; of two the lower, for what goes wrong slows runs down."""
    return sorted(runs)[(len(runs) - 1) // 2].log_cost


def _densities(squares: Array, variances: Array) -> tuple[Array, Array]:
    """Densities of deviations of regular runs and of slowed ones, each times the chance of such a run."""
    wider = variances + CONSTANTS.slowed_sd**2
    regular = (1 - CONSTANTS.slowed_chance) * np.exp(-0.5 * squares / variances) / np.sqrt(variances)
    return regular, CONSTANTS.slowed_chance * np.exp(-0.5 * squares / wider) / np.sqrt(wider)


@cache
def _grid() -> tuple[Array, Array]:
    """Values of σ, and log of their prior probabilities up to a constant."""
    grid = np.array(CONSTANTS.cost_run_sds)
    return grid, -0.5 * (np.log(grid / CONSTANTS.cost_run_sd) / CONSTANTS.cost_run_sd_spread) ** 2
