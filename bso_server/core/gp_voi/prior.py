"""Prior of policy `gp_voi`: laws for how the epochs of a training, and their cost, depend on its batch size b.

Epochs to the target follow the critical batch size B (McCandlish et al., An Empirical Model of Large-Batch Training,
arXiv 1812.06162, §2.3, with a = 1; the curves of Shallue et al., JMLR 20(112), 2019, are flatter: a = ½). They rise
again below a batch size S whose gradients are too noisy::

    log T(b) = level + a·log(1 + b/B) + log(1 + (S/b)²) + residual

The cost of an epoch follows throughput, which saturates at a size b₀, gradually (p = 1) or abruptly (p = 2)::

    log c(b) = level + log(1 + (b₀/b)^p)/p + residual

B, a, S, b₀ and p of a job are unknown: each combination on a grid is a hypothesis. The levels are unknown, too, and the
residuals are Gaussian processes over log2 b. With a small chance a job follows none of these laws, and the epochs of
its sizes are nearly independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zeus_plugins.protocol import CreatedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class GpVoiConstants:
    """Constants of policy `gp_voi`, chosen on the data of docs/policy-figures.md. σ is short for standard deviation.

    Lengths are in octaves of the batch size.
    """

    # Prior of log epochs to the target.
    level_variance: float = 9.0  # variance of the levels of epochs and of their cost: large enough to be flat
    critical_step: float = 0.75  # octaves between critical batch sizes on the grid
    exponents: tuple[float, ...] = (0.5, 1.0)  # by which epochs rise beyond the critical batch size
    flat_chance: float = 0.15  # chance that epochs do not rise at all
    too_small_chance: float = 0.3  # chance that some sizes are too small to make progress
    smooth_sd: float = 0.2  # σ of the residual's part that is smooth in log2 of the batch size
    smooth_length: float = 3.0  # length scale of the smooth part
    arm_sd: float = 0.08  # σ of each batch size's own part of the residual
    lawless_chance: float = 0.003  # chance that a job follows no law; then the next three constants hold
    lawless_sd: float = 0.5
    lawless_length: float = 4.0
    lawless_arm_sd: float = 0.4
    break_chance: float = 0.05  # chance that a size without a success breaks the laws,
    break_sd: float = 0.7  # and by how much: σ of its log epochs
    divergence: float = 0.03  # hazard, per octave from the sizes that reach the target, that a size never does

    # Prior of the log cost of an epoch.
    saturation_step: float = 0.75  # octaves between sizes of saturation on the grid
    cost_sd: float = 0.15  # like `smooth_sd`, `smooth_length` and `arm_sd`
    cost_length: float = 4.0
    cost_arm_sd: float = 0.03

    # Variation between the runs of one size.
    run_sd: float = 0.08  # prior median of the σ of log epochs,
    run_sd_spread: float = 0.5  # and σ of its log
    run_sds: tuple[float, ...] = (0.02, 0.04, 0.08, 0.16, 0.32, 0.6)  # grid of that σ
    band_freedom: float = 3.0  # degrees of freedom of bands before any size has run twice
    cost_run_sd: float = 0.015  # prior median of the σ of the log cost of an epoch,
    cost_run_sd_spread: float = 1.2  # and σ of its log
    cost_run_sds: tuple[float, ...] = (0.01, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5)  # grid of that σ
    slowed_chance: float = 0.02  # chance that a run is slowed,
    slowed_sd: float = 1.0  # and by how much: σ of its log cost
    epoch_sd: float = 0.06  # prior guess of the σ of an epoch's cost within a run, as a share of the mean
    epoch_sd_freedom: float = 2.0  # degrees of freedom that this guess is worth
    most_cost_runs: int = 8  # number of latest runs of a size that count for the cost of an epoch
    scale_dof: float = 4.0  # degrees of freedom of the Student-t process: fewer widen beliefs sooner after a surprise
    largest_scale: float = 16.0  # largest factor by which a variance is widened

    # Value of a trial.
    samples: int = 128  # joint samples of the beliefs
    candidates: int = 3  # largest number of sizes that are compared with the incumbent,
    open_horizon: float = 10.0  # and the horizon from which on less likely sizes and an unseen size may be among them
    tries_at_once: int = 4  # largest number of trials under way at sizes other than the incumbent
    most_missed: int = 2  # after this number of misses, only the incumbent runs until a run reaches the target
    crash_wait: int = 10  # a size waits one recurrence after a crash; each further crash multiplies the wait by this
    first_horizon: float = 5.0  # future recurrences that the first decision counts on
    horizon_growth: float = 0.5  # by how much each completed recurrence raises the horizon
    largest_cost: float = 2.5  # largest cost of a later run, in runs of the incumbent; higher costs are cut to it
    least_worth: float = 0.01  # least worth of a trial, in runs of the incumbent,
    least_saving: float = 0.002  # and least saving, as a share of later runs, by a size that has reached the target
    check_share: float = 0.01  # share of a job's cost for trials of sizes that only a law excludes
    neighbour_share: float = 0.12  # loss allowed next to the incumbent, per run of the horizon beyond `open_horizon`
    check_saving: float = 0.05  # after its first success, such a size is tried if it may save at least this (log)
    patient_from: float = 0.5  # allowance, in runs of the incumbent, from which on a trial may cost a whole run
    further: float = 1.25  # a stopped size is tried again for this factor times the epochs that it has survived
    stop_shares: tuple[float, ...] = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)  # costs at which a trial may be stopped

    # Bound of the incumbent, in expected epochs.
    incumbent_allowance: float = 2.0  # at least this factor,
    incumbent_sds: float = 4.0  # and at least this many σ more

    # Warm start.
    warm_sd: float = 0.15  # σ by which the log epochs of a size may differ between GPUs
    warm_wrong: float = 0.6  # chance that what another job has learned says nothing about this job
    warm_surprise: float = 2.5  # deviation, in σ, of a run from what another job has learned that refutes it

    # Changes of the job, and forgetting.
    failure_prior: float = 0.02  # pseudo-count of runs that fail, per size (Beta prior),
    success_prior: float = 1.0  # and of runs that do not
    streak_chance: float = 0.005  # a streak of failures with a lower probability shows a change of the job,
    least_streak: int = 2  # if it is at least this long
    cusum_step: float = 0.5  # subtracted from each deviation (in σ) in a cumulative sum,
    largest_surprise: float = 4.0  # after the deviation was limited to this
    cusum_bound: float = 8.0  # a larger sum shows a change of the job
    kept_weight: float = 0.1  # weight of each size's observations (in runs) after such a change
    forgetting: float = 0.997  # factor on each observation's weight per recurrence


CONSTANTS = GpVoiConstants()


Array: TypeAlias = NDArray[np.float64]

# Batch sizes in octaves that stand for infinity and, negated, for zero.
_NEVER = 60.0


class Sizes(NamedTuple):
    """Batch sizes of a job, ascending, and the index of its default."""

    batch_sizes: tuple[int, ...]
    default: int

    @classmethod
    def of(cls, job: CreatedJob) -> Sizes:
        """Return the sizes of this job."""
        return cls(job.batch_sizes, job.batch_sizes.index(job.default_batch_size))


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Gaussian processes over B batch sizes that differ only in their means.

    `means` of H hypotheses have the shape (H, B), the logs of their prior probabilities `log_weights` (H,), and the
    covariance `kernel` (B, B).
    """

    means: Array
    log_weights: Array
    kernel: Array


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """Prior of a job.

    Attributes:
        octaves: Difference |log2 a − log2 b| between each two sizes, shape (B, B).
        epochs: Two families about log epochs to the target, of jobs that follow the laws and of others. Their arrays
            have a further axis, the first; the smaller family is filled up with hypotheses of probability 0.
        costs: Family about log costs of an epoch.
    """

    octaves: Array
    epochs: Family
    costs: Family


@lru_cache(maxsize=64)
def laws(sizes: Sizes) -> Laws:
    """Return the laws for these sizes; the default is not expected to be much too small."""
    log_sizes = np.log2(np.array(sizes.batch_sizes, dtype=float))
    octaves = np.abs(log_sizes[:, None] - log_sizes[None, :])
    means, log_weights = _epoch_laws(log_sizes, float(log_sizes[sizes.default]))
    smooth = _kernel(octaves, CONSTANTS.smooth_sd, CONSTANTS.smooth_length, CONSTANTS.arm_sd)
    own = _kernel(octaves, CONSTANTS.lawless_sd, CONSTANTS.lawless_length, CONSTANTS.lawless_arm_sd)
    lawless = np.full(len(means), -np.inf)
    lawless[0] = math.log(CONSTANTS.lawless_chance)
    log_weights = np.array([log_weights + math.log1p(-CONSTANTS.lawless_chance), lawless])
    epochs = Family(np.array([means, np.zeros_like(means)]), log_weights, np.array([smooth, own]))
    costs = _cost_laws(log_sizes)
    kernel = _kernel(octaves, CONSTANTS.cost_sd, CONSTANTS.cost_length, CONSTANTS.cost_arm_sd)
    cost_family = Family(costs, np.full(len(costs), -math.log(len(costs))), kernel)
    return Laws(octaves, epochs, cost_family)


def _kernel(octaves: Array, smooth_sd: float, length: float, arm_sd: float) -> Array:
    """Return the sum of level, squared exponential (Rasmussen, Williams 2006, equation 4.9) and own covariance."""
    smooth = smooth_sd**2 * np.exp(-0.5 * (octaves / length) ** 2)
    covariance: Array = CONSTANTS.level_variance + smooth + arm_sd**2 * np.eye(len(octaves))
    return covariance


def _epoch_laws(log_sizes: Array, log_default: float) -> tuple[Array, Array]:
    """Return the means of log epochs, shape (H, B), and their log prior probabilities (H,)."""
    low, high = float(log_sizes.min()), float(log_sizes.max())
    critical = np.arange(low - 1, high + 3.01, CONSTANTS.critical_step)
    each = (1 - CONSTANTS.flat_chance) / (len(critical) * len(CONSTANTS.exponents))
    rises = [(_NEVER, 1.0, CONSTANTS.flat_chance)]
    rises += [(float(size), exponent, each) for size in critical for exponent in CONSTANTS.exponents]
    too_small = np.arange(low - 1.5, log_default + 0.01, 1.0)
    each = CONSTANTS.too_small_chance / len(too_small)
    falls = [(-_NEVER, 1 - CONSTANTS.too_small_chance)] + [(float(size), each) for size in too_small]
    means, chances = [], []
    for log_critical, exponent, rise_chance in rises:
        for log_small, fall_chance in falls:
            if log_small <= log_critical:
                rise = exponent * np.log1p(np.exp2(log_sizes - log_critical))
                means.append(rise + np.log1p(np.exp2(2 * (log_small - log_sizes))))
                chances.append(rise_chance * fall_chance)
    return np.array(means), np.log(np.array(chances) / sum(chances))


def _cost_laws(log_sizes: Array) -> Array:
    """Return the means of the log cost of an epoch, shape (H, B), which are equally probable."""
    low, high = float(log_sizes.min()), float(log_sizes.max())
    return np.array(
        [
            np.log1p(np.exp2(power * (saturation - log_sizes))) / power
            for saturation in np.arange(low - 4, high + 4.01, CONSTANTS.saturation_step)
            for power in (1.0, 2.0)
        ]
    )


# Beyond all real costs and epochs, and small enough that products and ratios stay finite.
_LARGEST_LOG = 300.0


def bounded_exp(log: float) -> float:
    """Return ``e^log``, finite and above 0 even for absurd reports."""
    return math.exp(min(max(log, -_LARGEST_LOG), _LARGEST_LOG))
