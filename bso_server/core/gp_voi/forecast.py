"""Forecast of policy `gp_voi`: the cost of a run at each batch size, at one moment of a job."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bso_server.core.gp_voi.beliefs import Belief, Beliefs, posterior_of
from bso_server.core.gp_voi.gaussian_process import Posterior, cost_posterior, freedom_of
from bso_server.core.gp_voi.prior import CONSTANTS, Array, Sizes, bounded_exp, laws
from bso_server.core.gp_voi.run_costs import SECOND_RUN, CostRun
from bso_server.core.model import BAND_SDS, History, TrialRecord
from bso_server.core.quality import left_out

_LEAST_EPOCHS = 1e-300
_LEAST_SD = 1e-9
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """S joint samples of the beliefs about B batch sizes.

    Attributes:
        log_epochs: Expected log epochs to the target, shape (S, B).
        log_costs: Expected log cost (J) of an epoch, shape (S, B).
        converges: False where a size never reaches the target, shape (S, B).
        luck: Standard normal deviation of a future run from its expectation, shape (S,).
    """

    log_epochs: Array
    log_costs: Array
    converges: NDArray[np.bool_]
    luck: Array


@dataclass(frozen=True, eq=False)
class Forecast:
    """Beliefs about a run at each batch size, once a size has reached the target.

    Attributes:
        available: Indices of the sizes that may run, ascending.
        epochs: Posterior of log epochs to the target.
        epoch_costs: Posterior of the log cost (J) of an epoch.
        retries: Log of the expected number of runs until one does not fail, shape (B,).
        incumbent: Index of the size to run unless a trial of another size is worth more.
        in_flight: Number of trials under way, by index of the size.
        horizon: Number of later runs that may profit from the result of a trial.
        length: Number of trials that the job has had, which seeds the samples.
        max_epochs: Largest number of epochs of a run.
        known: `epochs` and `epoch_costs` without the trials under way.
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
    max_epochs: int
    known: tuple[Posterior, Posterior]

    @classmethod
    def of(
        cls, history: History, beliefs: Beliefs, in_flight: Iterable[TrialRecord], *, trusted: int | None = None
    ) -> Forecast:
        """Return the forecast as if trials under way had ended as expected; `trusted` as in `cost_posterior`.

        With failure chance p, it takes ``1/(1 − p)`` runs until one succeeds. At least one belief has an observation.
        """
        sizes = Sizes.of(history.job)
        runs = Counter(sizes.batch_sizes.index(trial.batch_size) for trial in in_flight)
        known = posterior_of(sizes, beliefs), cost_posterior(sizes, tuple(each.costs for each in beliefs), trusted)
        epochs, epoch_costs = (each.believing(runs) for each in known)
        retries: Array = np.array([-math.log1p(-belief.failure_chance) for belief in beliefs])
        available = available_of(history)
        # Without a size that is known to reach the target, the sizes with the fewest setbacks are next.
        candidates = [index for index in available if beliefs[index].converged]
        if not candidates:
            least = min((beliefs[index].setbacks for index in available), default=0)
            candidates = [index for index in available if beliefs[index].setbacks == least] or list(range(len(beliefs)))
        log_costs = epochs.mean + epoch_costs.mean + retries
        # A size that once reached the target may crash now, for example because of other data.
        incumbent = min(candidates, key=lambda index: (beliefs[index].crashed > 1, log_costs[index]))
        horizon = CONSTANTS.first_horizon + CONSTANTS.horizon_growth * history.recurrences
        length = sum(arm.trials for arm in history.arms.values())
        max_epochs = history.job.max_epochs
        return cls(
            sizes, beliefs, available, epochs, epoch_costs, retries, incumbent, runs, horizon, length, max_epochs, known
        )

    @cached_property
    def mean(self) -> Array:
        """Expected log cost (J) of a run, c·T, including the runs that fail before it: shape (B,)."""
        mean: Array = self.epochs.mean + self.epoch_costs.mean + self.retries
        return mean

    @cached_property
    def variance(self) -> Array:
        """Variance of the belief `mean`, without the variance from run to run: shape (B,)."""
        variance: Array = self.epochs.variance + self.epoch_costs.variance
        return variance

    def expected_cost_j(self, index: int) -> float:
        """Return the expected cost of a run at the size with this index, which ends at `max_epochs`.

        The cost of a run without this limit is log-normal, with the median ``exp(μ + s²/2)`` and the variance V of its
        log: V is the variance of the belief without the trials under way, whose results are not known yet; s² is the
        variance from run to run, of the epochs and of the cost of an epoch together.
        """
        median, limit, sd = self._limited(index)
        beyond, within = (limit - median) / sd, (limit - median) / sd - sd
        return bounded_exp(median + sd * sd / 2) * _NORMAL.cdf(within) + bounded_exp(limit) * _NORMAL.cdf(-beyond)

    def band_j(self, index: int) -> tuple[float, float] | None:
        """Return the ends of the 90 % band of the expected cost, ``exp(μ + s²/2 ∓ t·√V)``, with the same limit.

        t is the quantile of Student's distribution, because s is estimated from few runs. Return None if the whole band
        is at the limit.
        """
        median, limit, sd = self._limited(index)
        reach = _student(CONSTANTS.band_freedom + freedom_of([belief.exact for belief in self.beliefs])) * sd
        return (
            (bounded_exp(median - reach), bounded_exp(min(median + reach, limit))) if median - reach < limit else None
        )

    def _limited(self, index: int) -> tuple[float, float, float]:
        """Return the logs of the median cost and of the cost of `max_epochs` epochs, and the spread of the log cost."""
        epochs, costs = self.known
        median = float(self.mean[index]) + (epochs.run_variance + costs.run_variance) / 2
        log_epoch_cost = float(costs.mean[index]) + (float(costs.variance[index]) + costs.run_variance) / 2
        variance = sum(float(each.variance[index]) for each in self.known)
        return median, math.log(self.max_epochs) + log_epoch_cost, max(math.sqrt(variance), _LEAST_SD)

    @property
    def incumbent_converges(self) -> bool:
        """True if the incumbent is known to reach the target."""
        return self.beliefs[self.incumbent].converged

    @property
    def tries_under_way(self) -> int:
        """Number of trials under way at other sizes than the incumbent's."""
        return sum(runs for index, runs in self.in_flight.items() if index != self.incumbent)

    @cached_property
    def allowance(self) -> float:
        """Largest loss, in runs of the incumbent, of a trial of a size that only the laws speak against.

        It grows by `check_share` with each recurrence since the latest trial of a size, other than the incumbent, that
        has reached the target once or never.
        """
        others = [self.beliefs[index] for index in self.available if index != self.incumbent]
        once = [each for each in others if (each.survived or each.exact.weight) and each.exact.weight < SECOND_RUN]
        return CONSTANTS.check_share * min((each.idle for each in once), default=self.length)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """Indices of the sizes next to the incumbent, if no run has reached the target there."""
        place = bisect_left(self.available, self.incumbent)
        return tuple(index for index in self.available[max(place - 1, 0) : place + 2] if self.is_open[index])

    def allowed_loss(self, index: int) -> float:
        """Return the largest loss, in runs of the incumbent, of a trial of a size that only the laws speak against.

        It is `allowance`; for `neighbours`, it grows by `neighbour_share` with the horizon beyond `open_horizon`.
        """
        beyond = self.horizon - CONSTANTS.open_horizon if index in self.neighbours else 0.0
        return max(self.allowance, CONSTANTS.neighbour_share * beyond)

    @cached_property
    def is_open(self) -> NDArray[np.bool_]:
        """True for sizes of which no run has reached the target, shape (B,)."""
        return np.array([not belief.exact.weight for belief in self.beliefs])

    def is_in_doubt(self, index: int) -> bool:
        """Return True if only the laws, and not its own runs, say that a size costs more than the incumbent.

        A size without a success is in doubt until one of its runs has cost as much as a run of the incumbent. After a
        single success, it is in doubt if the lower end of that run's 90 % band is below the incumbent's cost by more
        than `check_saving` (log). After more successes, it is never in doubt: the value of information alone decides.
        """
        belief, (epochs, costs) = self.beliefs[index], self.known
        if not belief.has_cost:
            return True
        limit = float(self.mean[self.incumbent] - costs.mean[index] - self.retries[index])
        weight = belief.exact.weight
        if not weight:
            return math.log(belief.survived + 1) < limit
        sd = math.sqrt((epochs.run_variance + costs.run_variance) / weight)
        return weight < SECOND_RUN and belief.exact.mean - BAND_SDS * sd < limit - CONSTANTS.check_saving

    @cached_property
    def samples(self) -> Samples:
        """Samples by common random numbers, which depend only on `length`.

        A size that has never reached the target may, with a small chance, break every law: its epochs then scatter
        widely around the law, but above the epochs that its runs have survived. The chance that a size never reaches
        the target grows with its distance from the sizes that reach it.
        """
        size = len(self.beliefs)
        ranks, normals = _random_numbers(CONSTANTS.samples, 2 * size + 1, size + 2, self.length)
        log_epochs = self.epochs.samples(ranks[:, size] / len(ranks), normals[:, :size])
        jumps = _jumps(CONSTANTS.samples)[ranks[:, :size].astype(int)]
        survived = np.log([max(belief.survived, _LEAST_EPOCHS) for belief in self.beliefs])
        log_epochs = log_epochs + np.where(self.is_open & (log_epochs + jumps > survived), jumps, 0.0)
        log_costs = self.epoch_costs.samples(ranks[:, size + 1] / len(ranks), normals[:, size : 2 * size])
        # No other column has this order, so failures are spread evenly over the values of the other columns.
        fails = ((np.arange(len(ranks)) * _GOLDEN) % 1.0)[:, None] < self._divergence
        return Samples(log_epochs, log_costs, ~fails, normals[:, -1])

    @property
    def _divergence(self) -> Array:
        """Chance never to reach the target, shape (B,): ``1 − exp(−h · octaves)`` outside the sizes that reach it."""
        reaching = [index for index, belief in enumerate(self.beliefs) if belief.converged]
        if not reaching:
            return np.zeros(len(self.beliefs))
        octaves = laws(self.sizes).octaves[:, reaching].min(axis=1)
        chances: Array = -np.expm1(-CONSTANTS.divergence * octaves)
        chances[reaching[0] : reaching[-1] + 1] = 0.0
        return chances


def available_of(history: History) -> tuple[int, ...]:
    """Return the indices of the sizes that may run, ascending, without sizes that the job leaves out (`left_out`)."""
    allowed = history.runnable_sizes - left_out(history.job, history.arms).keys()
    return tuple(index for index, size in enumerate(history.job.batch_sizes) if size in allowed)


def beliefs_of(history: History, in_flight: Iterable[TrialRecord]) -> Beliefs:
    """Return the beliefs; a size of unknown cost takes its cost from a trial in flight that has reported twice."""
    beliefs: dict[int, Belief] = dict(zip(history.job.batch_sizes, history.memory, strict=True))
    for trial in in_flight:
        belief = beliefs[trial.batch_size]
        run = CostRun.of(history.job, trial)
        if run is not None and not belief.has_cost:
            beliefs[trial.batch_size] = belief.costing(run)
    return tuple(beliefs.values())


def _student(freedom: float) -> float:
    """Return the 95 % quantile of Student's distribution, for at least 3 degrees of freedom, to 0.01.

    (Abramowitz, Stegun, Handbook of Mathematical Functions, 1964, 26.7.5.)
    """
    z = BAND_SDS
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


# Multiples of the golden ratio are spread evenly over [0, 1) (Knuth, The Art of Computer Programming 3, §6.4).
_GOLDEN = (math.sqrt(5) - 1) / 2


@lru_cache(maxsize=8)
def _random_numbers(samples: int, normals: int, ranks: int, seed: int) -> tuple[Array, Array]:
    """Return columns of the ranks 0.5, 1.5, … and columns of standard normal values, each in a random order.

    Each column has one value from each of S equally probable intervals (a Latin hypercube: McKay, Beckman, Conover,
    Technometrics 21(2), 1979). Shapes (S, ranks) and (S, normals).
    """
    order = np.argsort(np.random.default_rng([seed, normals]).random((samples, normals + ranks)), axis=0)
    quantiles = _quantiles(samples)
    return np.asarray(order[:, :ranks] + 0.5, dtype=np.float64), quantiles[order[:, ranks:]]


@lru_cache(maxsize=8)
def _quantiles(count: int) -> Array:
    """Return the quantiles (k + ½)/n of the standard normal distribution."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])


@lru_cache(maxsize=8)
def _jumps(count: int) -> Array:
    """Return by how much log epochs of a size without a success break the laws: 0 except for the first few ranks."""
    broken = round(CONSTANTS.break_chance * count)
    return np.concatenate([CONSTANTS.break_sd * _quantiles(broken), np.zeros(count - broken)])
