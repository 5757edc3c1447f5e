"""The forecast of policy `gp_voi`: the cost of a run at each batch size, at one moment of a job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bso_server.core.gp_voi.beliefs import Belief, Beliefs, posterior_of
from bso_server.core.gp_voi.gaussian_process import Posterior, cost_posterior
from bso_server.core.gp_voi.prior import CONSTANTS, Array, Sizes, bounded_exp, laws
from bso_server.core.gp_voi.run_costs import CostRun
from bso_server.core.model import History, TrialRecord

_LEAST_EPOCHS = 1e-300


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Joint samples of what is believed, S of them for B batch sizes; and one more value each, for a run to come.

    Attributes:
        log_epochs: Log epochs to the target that are expected, shape (S, B).
        log_costs: Log cost (J) of an epoch that is expected, shape (S, B).
        converges: False where a size never reaches the target, shape (S, B).
        luck: Standard normal deviations of a run from what is expected of it, shape (S,).
    """

    log_epochs: Array
    log_costs: Array
    converges: NDArray[np.bool_]
    luck: Array


@dataclass(frozen=True, eq=False)
class Forecast:
    """The beliefs about a run at each batch size, once one of them has reached the target.

    Attributes:
        sizes: The job's sizes.
        beliefs: What is remembered of each size.
        available: Indices of the sizes that may run, ascending.
        epochs: Log epochs to the target.
        epoch_costs: Log cost (J) of an epoch.
        retries: Log of the runs that it takes until one does not fail, shape (B,).
        incumbent: Index of the size to play when nothing is to be learned.
        in_flight: Number of trials under way by the index of their size.
        horizon: Later runs that may profit from what a try teaches.
        length: Trials that the job has had, which seeds the samples.
    """

    sizes: Sizes
    beliefs: Beliefs
    available: tuple[int, ...]
    epochs: Posterior
    epoch_costs: Posterior
    retries: Array
    incumbent: int
    in_flight: Mapping[int, int]
    horizon: float
    length: int

    @classmethod
    def of(
        cls, history: History, beliefs: Beliefs, in_flight: Iterable[TrialRecord], *, trusted: int | None = None
    ) -> Forecast:
        """The forecast with these beliefs, while these trials are under way; `trusted` as in `cost_posterior`.

        A run of failure chance p takes ``1/(1 − p)`` runs until one succeeds. At least one belief has an observation;
        trials under way are believed to end as expected.
        """
        sizes = Sizes.of(history.job)
        runs = Counter(sizes.batch_sizes.index(trial.batch_size) for trial in in_flight)
        epochs = posterior_of(sizes, beliefs).believing(runs)
        epoch_costs = cost_posterior(sizes, tuple(belief.costs for belief in beliefs), trusted).believing(runs)
        retries: Array = np.array([-math.log1p(-belief.failure_chance) for belief in beliefs])
        available = available_of(history)
        incumbent = _incumbent(epochs.mean + epoch_costs.mean + retries, beliefs, available)
        horizon = CONSTANTS.first_horizon + CONSTANTS.horizon_growth * history.recurrences
        length = sum(arm.trials for arm in history.arms.values())
        return cls(sizes, beliefs, available, epochs, epoch_costs, retries, incumbent, runs, horizon, length)

    @cached_property
    def mean(self) -> Array:
        """Log cost (J) that is expected of a run, c·T, one that fails being paid for and done again: shape (B,)."""
        mean: Array = self.epochs.mean + self.epoch_costs.mean + self.retries
        return mean

    @cached_property
    def variance(self) -> Array:
        """Variance of that as a belief, shape (B,): without what varies from run to run."""
        variance: Array = self.epochs.variance + self.epoch_costs.variance
        return variance

    def expected_cost_j(self, index: int) -> float:
        """Expected cost of a run at the size with this index: ``exp(μ + (V + s²)/2)``, the log-normal mean.

        s² is the variance from run to run, of epochs and of their cost together.
        """
        run_variance = self.epochs.run_variance + self.epoch_costs.run_variance
        return bounded_exp(float(self.mean[index]) + (float(self.variance[index]) + run_variance) / 2)

    def expected_cost_std_j(self, index: int) -> float:
        """Standard deviation of that as a belief: ``E · √(exp(V) − 1)``, without what varies from run to run."""
        return self.expected_cost_j(index) * math.sqrt(max(bounded_exp(float(self.variance[index])) - 1, 0.0))

    @property
    def incumbent_converges(self) -> bool:
        """True if the incumbent is known to reach the target."""
        return self.beliefs[self.incumbent].converged

    @property
    def tries_under_way(self) -> int:
        """Number of trials under way at other sizes than the incumbent's."""
        return sum(runs for index, runs in self.in_flight.items() if index != self.incumbent)

    @property
    def is_long(self) -> bool:
        """True if so many recurrences are to come that no size may stay in doubt."""
        return self.horizon >= CONSTANTS.long_horizon

    @property
    def is_unseen(self) -> NDArray[np.bool_]:
        """True for sizes that were never run, shape (B,)."""
        return np.array([not belief.has_cost for belief in self.beliefs])

    @cached_property
    def is_open(self) -> NDArray[np.bool_]:
        """True for sizes of which no run has reached the target, shape (B,)."""
        return np.array([not belief.exact.weight for belief in self.beliefs])

    @cached_property
    def samples(self) -> Samples:
        """Samples by common random numbers, which follow from the number of the job's trials alone.

        A size that has never reached the target may break every law, with a small chance: its epochs are anywhere
        around them then, but for what it has survived without. And the further it is from those that reach the target,
        the less sure is it that it ever will.
        """
        size = len(self.beliefs)
        ranks, normals = _random_numbers(CONSTANTS.samples, 2 * size + 1, size + 2, self.length)
        log_epochs = self.epochs.samples(ranks[:, size] / len(ranks), normals[:, :size])
        jumps = _jumps(CONSTANTS.samples)[ranks[:, :size].astype(int)]
        survived = np.log([max(belief.survived, _LEAST_EPOCHS) for belief in self.beliefs])
        log_epochs = log_epochs + np.where(self.is_open & (log_epochs + jumps > survived), jumps, 0.0)
        log_costs = self.epoch_costs.samples(ranks[:, size + 1] / len(ranks), normals[:, size : 2 * size])
        # In an order that no other column has: equal parts of every sample, whatever its other values.
        fails = ((np.arange(len(ranks)) * _GOLDEN) % 1.0)[:, None] < self._divergence
        return Samples(log_epochs, log_costs, ~fails, normals[:, -1])

    @property
    def _divergence(self) -> Array:
        """The chance of each size to never converge, shape (B,): ``1 − exp(−h · octaves)`` beyond those that do."""
        reaching = [index for index, belief in enumerate(self.beliefs) if belief.converged]
        chances: Array = np.zeros(len(self.beliefs))
        if not reaching:
            return chances
        octaves = laws(self.sizes).octaves[:, reaching].min(axis=1)
        chances = -np.expm1(-CONSTANTS.divergence * octaves)
        chances[reaching[0] : reaching[-1] + 1] = 0.0
        return chances


def available_of(history: History) -> tuple[int, ...]:
    """Indices of the sizes that may run, ascending."""
    return tuple(index for index, size in enumerate(history.job.batch_sizes) if size in history.runnable_sizes)


def beliefs_of(history: History, in_flight: Iterable[TrialRecord]) -> Beliefs:
    """The beliefs; where no trial has ended yet, one in flight tells what an epoch costs, from its second report on."""
    beliefs: dict[int, Belief] = dict(zip(history.job.batch_sizes, history.memory, strict=True))
    for trial in in_flight:
        belief = beliefs[trial.batch_size]
        run = CostRun.of(history.job, trial)
        if run is not None and not belief.has_cost:
            beliefs[trial.batch_size] = belief.costing(run)
    return tuple(beliefs.values())


def _incumbent(log_costs: Array, beliefs: Beliefs, available: Sequence[int]) -> int:
    """The cheapest size known to reach the target; if all of them broke down, the cheapest that missed least often."""
    candidates = [index for index in available if beliefs[index].converged]
    if not candidates:
        least = min((beliefs[index].missed for index in available), default=0)
        candidates = [index for index in available if beliefs[index].missed == least] or list(range(len(beliefs)))
    return min(candidates, key=log_costs.__getitem__)


# Multiples of it are spread evenly over [0, 1) (Knuth, The Art of Computer Programming 3, §6.4).
_GOLDEN = (math.sqrt(5) - 1) / 2


@lru_cache(maxsize=8)
def _random_numbers(samples: int, normals: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Ranks 0.5, 1.5, … over the number of samples in random orders, and standard normal values in others.

    Each column has one value from each of S equally probable intervals (a Latin hypercube: McKay, Beckman, Conover,
    Technometrics 21(2), 1979). Shapes (S, ranks) and (S, normals).
    """
    order = np.argsort(np.random.default_rng([seed, normals]).random((samples, normals + ranks)), axis=0)
    quantiles = _quantiles(samples)
    return np.asarray(order[:, :ranks] + 0.5, dtype=np.float64), quantiles[order[:, ranks:]]


@lru_cache(maxsize=8)
def _quantiles(count: int) -> Array:
    """The standard normal distribution at (k + ½)/n."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])


@lru_cache(maxsize=8)
def _jumps(count: int) -> Array:
    """By how much log epochs of a size that was not seen break the laws: 0 but for the first few of so many ranks."""
    broken = round(CONSTANTS.break_chance * count)
    return np.concatenate([CONSTANTS.break_sd * _quantiles(broken), np.zeros(count - broken)])
