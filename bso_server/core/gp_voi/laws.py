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

from bso_server.core.gp_voi.constants import CONSTANTS
from zeus_plugins.protocol import JobRegistration

Array: TypeAlias = NDArray[np.float64]

# As good as infinite, and as zero, among batch sizes in octaves.
_NEVER = 60.0


class Sizes(NamedTuple):
    """The batch sizes of a job, ascending, and the index of its default."""

    batch_sizes: tuple[int, ...]
    default: int

    @classmethod
    def of(cls, job: JobRegistration) -> Sizes:
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
