"""The laws by which a training's epochs, and what they cost, depend on its batch size b: the prior of the policy.

Epochs to the target follow the critical batch size B (McCandlish et al., An Empirical Model of Large-Batch Training,
arXiv 1812.06162, §2.3, where a = 1; curves of Shallue et al., JMLR 20(112), 2019, are flatter, too: a = ½), and rise
again below a batch size S of which gradients are too noisy to get there::

    log T(b) = level + a·log(1 + b/B) + log(1 + (S/b)²) + residual

What an epoch costs follows throughput, which saturates at a size b₀, softly (p = 1) or with a bend (p = 2)::

    log c(b) = level + log(1 + (b₀/b)^p)/p + residual

Nobody knows B, a, S, b₀ and p of a job: each combination on a grid is a hypothesis. The levels are open, and the
residuals Gaussian processes over log2 b. Beside these laws stands a chance that a job follows none: epochs are then as
good as each size's own.
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
    """The numbers of policy `gp_voi`; chosen on the data named in docs/policy.md. σ is short for standard deviation.

    Lengths are in octaves of the batch size. A strength is the shape of a gamma distribution: 2 is 4 runs' worth.
    """

    # What is expected of log epochs to the target beforehand, by `laws`.
    level_variance: float = 9.0  # variance of the level, of epochs and of their cost: so large that it is flat
    critical_step: float = 0.75  # between the critical batch sizes that are thought of
    exponents: tuple[float, ...] = (0.5, 1.0)  # by which epochs rise beyond them
    flat_chance: float = 0.15  # of no rise at all
    too_small_chance: float = 0.3  # that some sizes are too small to get anywhere
    smooth_sd: float = 0.12  # σ of what the laws leave, the part that is smooth in log2 of the batch size
    smooth_length: float = 3.0  # length scale of that part
    arm_sd: float = 0.05  # σ of the part that is each batch size's own
    lawless_chance: float = 0.003  # that a job follows no law, and the same three of it then
    lawless_sd: float = 0.5
    lawless_length: float = 4.0
    lawless_arm_sd: float = 0.4
    break_chance: float = 0.05  # that a size which was not seen breaks the laws,
    break_sd: float = 0.7  # and by how much, in σ of its log epochs
    divergence: float = 0.03  # hazard, per octave beyond the sizes that reach the target, that one never does

    # What is expected of the log cost of an epoch.
    saturation_step: float = 0.75  # between the sizes of saturation that are thought of
    cost_sd: float = 0.15  # as above, the same three
    cost_length: float = 4.0
    cost_arm_sd: float = 0.03

    # From run to run at one size.
    run_sd: float = 0.08  # prior guess of the σ of log epochs
    run_sd_strength: float = 2.0  # how much that guess weighs
    least_run_sd: float = 0.02  # that σ is never taken to be smaller
    cost_run_sd: float = 0.015  # prior median of the σ of the log cost of an epoch,
    cost_run_sd_spread: float = 1.2  # and σ of its log
    cost_run_sds: tuple[float, ...] = (0.01, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5)  # the values that are thought of
    slowed_chance: float = 0.02  # that a run is slowed,
    slowed_sd: float = 1.0  # and by how much: σ of its log cost
    epoch_sd: float = 0.06  # prior guess of the σ of what an epoch costs within a run, as a share of the mean
    epoch_sd_freedom: float = 2.0  # degrees of freedom that this guess is worth
    first_epoch_sd: float = 0.5  # of what is left when a first epoch's cost is divided by a start-up seen elsewhere
    most_cost_runs: int = 8  # runs of a size that count for the cost of its epochs, so that a change is followed
    startup_sd: float = 0.2  # σ between sizes of the log of what the first epoch of a first run costs more
    scale_dof: float = 4.0  # degrees of freedom of the Student-t process: the fewer, the sooner surprises widen beliefs
    largest_scale: float = 16.0  # they are never widened by more than this factor of variance

    # What a try is worth.
    samples: int = 128  # joint samples of what is believed
    candidates: int = 3  # sizes that are weighed,
    open_horizon: float = 10.0  # and, from this horizon on, more and more doubtful ones, and one that was never run
    tries_at_once: int = 4  # trials under way elsewhere than at the incumbent, from which on nothing else is tried
    first_horizon: float = 5.0  # future recurrences that a first decision counts on
    horizon_growth: float = 0.5  # by how much every recurrence that is over raises that number
    largest_cost: float = 2.5  # of a later run, in runs of the incumbent: worse is not worth telling apart
    least_worth: float = 0.01  # of a try, in runs of the incumbent,
    least_saving: float = 0.002  # and of later runs, if a size has reached the target before: else it is not tried
    long_horizon: float = 55.0  # from here on, the 100th recurrence, tries get as far as a run of the incumbent costs,
    check_interval: int = 25  # and after each so many recurrences a size is tried that never got so far
    further: float = 1.25  # a size that was stopped is tried again for so many times the epochs that it has survived
    stop_shares: tuple[float, ...] = (
        0.35,
        0.5,
        0.7,
        0.85,
        1.0,
        1.2,
        1.5,
    )  # of such a run, at which a try may be stopped

    # When the incumbent is stopped.
    incumbent_allowance: float = 2.0  # it gets so many times the epochs that it is expected to need,
    incumbent_sds: float = 4.0  # and at least so many σ more

    # When the job has changed, and what is remembered.
    failure_prior: float = 0.02  # pseudo-count of runs that fail, per size (Beta prior),
    success_prior: float = 1.0  # and of runs that do not
    streak_chance: float = 0.005  # of a row of failures; a less probable one means that the job has changed
    drift_sds: float = 3.0  # so do two runs of a size in a row, so far from what was expected, or one twice as far
    kept_weight: float = 0.2  # what is left of each size's observations (in runs) after such a change
    forgetting: float = 0.997  # what is left of each observation's weight after each recurrence


CONSTANTS = GpVoiConstants()


Array: TypeAlias = NDArray[np.float64]

# As good as infinite, and as zero, among batch sizes in octaves.
_NEVER = 60.0


class Sizes(NamedTuple):
    """The batch sizes of a job, ascending, and the index of its default."""

    batch_sizes: tuple[int, ...]
    default: int

    @classmethod
    def of(cls, job: CreatedJob) -> Sizes:
        """Those of this job."""
        return cls(job.batch_sizes, job.batch_sizes.index(job.default_batch_size))


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Gaussian processes over B batch sizes that differ in their means alone.

    Attributes:
        means: Of each of H hypotheses, shape (H, B).
        log_weights: Log of their prior probabilities, shape (H,).
        kernel: Covariance, shape (B, B).
    """

    means: Array
    log_weights: Array
    kernel: Array


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """The prior of a job.

    Attributes:
        octaves: |log2 a − log2 b| of each two sizes, shape (B, B).
        epochs: Families of hypotheses about log epochs to the target; their weights add up to 1.
        costs: Those about the log cost of an epoch.
    """

    octaves: Array
    epochs: tuple[Family, ...]
    costs: Family


@lru_cache(maxsize=64)
def laws(sizes: Sizes) -> Laws:
    """The laws for these sizes; the default is thought not to be much too small."""
    log_sizes = np.log2(np.array(sizes.batch_sizes, dtype=float))
    octaves = np.abs(log_sizes[:, None] - log_sizes[None, :])
    lawful, lawless = math.log1p(-CONSTANTS.lawless_chance), math.log(CONSTANTS.lawless_chance)
    means, log_weights = _epoch_laws(log_sizes, float(log_sizes[sizes.default]))
    own = Family(
        np.zeros((1, len(log_sizes))),
        np.array([lawless]),
        _kernel(octaves, CONSTANTS.lawless_sd, CONSTANTS.lawless_length, CONSTANTS.lawless_arm_sd),
    )
    smooth = _kernel(octaves, CONSTANTS.smooth_sd, CONSTANTS.smooth_length, CONSTANTS.arm_sd)
    costs = _cost_laws(log_sizes)
    return Laws(
        octaves=octaves,
        epochs=(Family(means, log_weights + lawful, smooth), own),
        costs=Family(
            costs,
            np.full(len(costs), -math.log(len(costs))),
            _kernel(octaves, CONSTANTS.cost_sd, CONSTANTS.cost_length, CONSTANTS.cost_arm_sd),
        ),
    )


def _kernel(octaves: Array, smooth_sd: float, length: float, arm_sd: float) -> Array:
    """Level, smooth part (squared exponential; Rasmussen, Williams 2006, equation 4.9), and each size's own part."""
    smooth = smooth_sd**2 * np.exp(-0.5 * (octaves / length) ** 2)
    covariance: Array = CONSTANTS.level_variance + smooth + arm_sd**2 * np.eye(len(octaves))
    return covariance


def _epoch_laws(log_sizes: Array, log_default: float) -> tuple[Array, Array]:
    """Means of log epochs, shape (H, B), and log prior probabilities, shape (H,)."""
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
    """Means of the log cost of an epoch, shape (H, B); all are as probable."""
    low, high = float(log_sizes.min()), float(log_sizes.max())
    return np.array(
        [
            np.log1p(np.exp2(power * (saturation - log_sizes))) / power
            for saturation in np.arange(low - 4, high + 4.01, CONSTANTS.saturation_step)
            for power in (1.0, 2.0)
        ]
    )


# Far beyond all costs and epochs, and small enough that their products and ratios stay finite.
_LARGEST_LOG = 300.0


def bounded_exp(log: float) -> float:
    """``e^x``, finite and above 0 whatever absurd numbers were reported."""
    return math.exp(min(max(log, -_LARGEST_LOG), _LARGEST_LOG))
