"""Made landscapes: 60 random jobs of ten families, and functions that change these jobs.

Each family has a shape of the curve of mean epochs to the target over batch size. Throughput saturates with larger
sizes. Some families have their own costs per epoch instead: nearly equal ones, so that only the epochs matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bso_server.simulate.results import Setting, landscape_of
from bso_server.simulate.workload import Epoch, SizeTrace, Workload
from zeus_plugins.protocol import cost

Array = NDArray[np.float64]

COUNT = 60
"""Number of landscapes; the families take turns."""

# Each landscape has its own random generator, so that a change to one family does not alter other families.
_SEED = 4181
_QUANTILES = 200
_LOW_LIMIT_SHARE = 0.7
# Factor on the time and energy of an epoch at the lower power limit. The maximum is therefore always the best limit,
# but the first epoch at each size tries both limits and costs 15 % more than later epochs.
_LOW_LIMIT_FACTOR = 1.3
# A landscape is drawn again if its default costs at least this many times as much as the best size.
_LARGEST_DEFAULT_RATIO = 8.0
# Chance that a run never reaches the target at the size next to the sizes that always fail.
_MISSING_BESIDE = 0.2


@dataclass(frozen=True, eq=False)
class MadeJob:
    """Recurring job on a made landscape; arrays have one value per batch size.

    Attributes:
        name: Family and number.
        batch_sizes: Batch sizes, ascending.
        default_place: Index of the default.
        max_epochs: Largest number of epochs of a run.
        eta: The job's η.
        max_power_w: Maximum power limit.
        mean_epochs: Mean epochs to the target.
        epochs_sd: σ of the log of a run's epochs to the target.
        missing: Chance that a run never reaches the target.
        epoch_s: Time of an epoch.
        epoch_j: Energy of an epoch.
        cost_noise_sd: σ of the log of a factor on the time and energy of each run.
    """

    name: str
    batch_sizes: tuple[int, ...]
    default_place: int
    max_epochs: int
    eta: float
    max_power_w: float
    mean_epochs: Array
    epochs_sd: float
    missing: Array
    epoch_s: Array
    epoch_j: Array
    cost_noise_sd: float

    @property
    def octaves(self) -> Array:
        """Base-2 logarithm of each size's ratio to the smallest size."""
        octaves: Array = np.log2(np.array(self.batch_sizes) / self.batch_sizes[0])
        return octaves

    @property
    def epoch_costs_j(self) -> Array:
        """Cost of an epoch at each size, in joules."""
        return np.array(
            [
                cost(energy_j=energy_j, time_s=time_s, max_power_w=self.max_power_w, eta=self.eta)
                for energy_j, time_s in zip(self.epoch_j, self.epoch_s, strict=True)
            ]
        )

    def workload(self) -> Workload:
        """Return the job as a workload, with quantiles of the epochs to the target in place of recorded runs."""
        return Workload(
            name=self.name,
            sizes=tuple(self._trace(place) for place in range(len(self.batch_sizes))),
            default_batch_size=self.batch_sizes[self.default_place],
            max_epochs=self.max_epochs,
            max_power_w=self.max_power_w,
        )

    def _trace(self, place: int) -> SizeTrace:
        missing = round(self.missing[place] * _QUANTILES)
        spread = self.epochs_sd * _quantiles(_QUANTILES - missing) - self.epochs_sd**2 / 2
        epochs = np.maximum(1.0, np.round(self.mean_epochs[place] * np.exp(spread)))
        time_s, energy_j = float(self.epoch_s[place]), float(self.epoch_j[place])
        return SizeTrace(
            self.batch_sizes[place],
            (*epochs.tolist(), *[math.inf] * missing),
            {
                _LOW_LIMIT_SHARE * self.max_power_w: Epoch(_LOW_LIMIT_FACTOR * time_s, _LOW_LIMIT_FACTOR * energy_j),
                self.max_power_w: Epoch(time_s, energy_j),
            },
        )


@lru_cache(maxsize=8)
def _quantiles(count: int) -> Array:
    """Return the quantiles (k + ½)/n of the standard normal distribution."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])


# Families


@dataclass(frozen=True, eq=False)
class _Shape:
    """Shape of a landscape: log epochs to the target, the chance of missing the target, and log cost of an epoch.

    Arrays have one value per batch size. `missing` None: no run misses. `log_costs` None: throughput saturates.
    """

    log_epochs: Array
    missing: Array | None = None
    log_costs: Array | None = None


def _law(octaves: Array, critical: float, slope: float) -> Array:
    """Return log epochs: constant below the critical size; above it, epochs grow like the size to the power `slope`."""
    return slope * np.log1p(np.exp2(octaves - critical))


def _lawful(rng: np.random.Generator, octaves: Array) -> _Shape:
    """Draw a critical size, a slope above it, and a second size below which jobs need more epochs, too."""
    span = octaves[-1]
    above = _law(octaves, rng.uniform(-1.0, span + 1.0), rng.choice([0.4, 0.7, 1.0, 1.3]))
    below = np.log1p(np.exp2(2.0 * (rng.uniform(-4.0, 1.0) - octaves)))
    return _Shape(above + below)


def _u_shape(rng: np.random.Generator, octaves: Array) -> _Shape:
    span = octaves[-1]
    least = rng.uniform(0.2 * span, 0.8 * span)
    return _Shape(rng.uniform(0.08, 0.3) * (octaves - least) ** 2)


def _failing(rng: np.random.Generator, octaves: Array, *, small: bool) -> _Shape:
    """Let up to half of the sizes, at one end, always miss the target, and the next size sometimes."""
    failing = int(rng.integers(1, max(2, len(octaves) // 2)))
    missing = np.zeros(len(octaves))
    missing[:failing], missing[failing] = 1.0, _MISSING_BESIDE
    return _Shape(_law(octaves, rng.uniform(0.0, octaves[-1]), 1.0), missing if small else missing[::-1])


def _small_fail(rng: np.random.Generator, octaves: Array) -> _Shape:
    return _failing(rng, octaves, small=True)


def _large_fail(rng: np.random.Generator, octaves: Array) -> _Shape:
    return _failing(rng, octaves, small=False)


def _flat(rng: np.random.Generator, octaves: Array) -> _Shape:
    return _Shape(np.zeros(len(octaves)), log_costs=rng.normal(0.0, 0.02, len(octaves)))


def _two_basins(rng: np.random.Generator, octaves: Array) -> _Shape:
    span = octaves[-1]
    basins = [0.25 * (octaves - place * span) ** 2 + rng.uniform(0.0, 0.5) for place in (0.15, 0.85)]
    return _Shape(np.minimum(*basins), log_costs=0.05 * (span - octaves))


def _edge(rng: np.random.Generator, octaves: Array) -> _Shape:
    """Put the critical size beyond the largest size, or below the smallest."""
    return _Shape(_law(octaves, octaves[-1] + 3.0, 1.0) if rng.random() < 0.5 else _law(octaves, -1.0, 1.3))


def _independent(rng: np.random.Generator, octaves: Array) -> _Shape:
    return _Shape(rng.uniform(0.0, 1.2, len(octaves)))


_Family = Callable[[np.random.Generator, Array], _Shape]

FAMILIES: dict[str, _Family] = {
    "law": _lawful,
    "u-shape": _u_shape,
    "small-sizes-fail": _small_fail,
    "large-sizes-fail": _large_fail,
    "flat": _flat,
    "two-basins": _two_basins,
    "edge": _edge,
    "few-sizes": _lawful,
    "independent-sizes": _independent,
    "twelve-odd-sizes": _lawful,
}
"""Shapes of landscapes by name; `few-sizes` and `twelve-odd-sizes` differ from `law` in their batch sizes only."""


def _sizes(rng: np.random.Generator, family: str) -> tuple[int, ...]:
    """Draw the batch sizes: powers of two, or numbers at uneven distances."""
    if family == "twelve-odd-sizes":
        factors = rng.uniform(1.25, 1.9, 11)
        return _uneven(int(rng.integers(3, 20)), factors)
    count = int(rng.integers(2, 4) if family == "few-sizes" else rng.integers(5, 13))
    if rng.random() < 0.4:
        return _uneven(int(rng.integers(4, 48)), rng.uniform(1.3, 2.6, count - 1))
    smallest = 2 ** int(rng.integers(2, 6))
    return tuple(smallest * 2**octave for octave in range(count))


def _uneven(smallest: int, factors: Array) -> tuple[int, ...]:
    """Return ascending integers with about these ratios between neighbours; each is at least 1 above the previous."""
    sizes = [smallest]
    for exact in smallest * np.cumprod(factors):
        sizes.append(max(round(exact), sizes[-1] + 1))
    return tuple(sizes)


def _drawn(family: str, name: str, rng: np.random.Generator) -> MadeJob:
    """Draw a job; its default may be too expensive or miss the target."""
    sizes = _sizes(rng, family)
    octaves: Array = np.log2(np.array(sizes) / sizes[0])
    count, span = len(sizes), octaves[-1]
    shape = FAMILIES[family](rng, octaves)
    log_epochs = shape.log_epochs + rng.normal(0.0, 0.05, count)
    mean_epochs = math.exp(rng.uniform(math.log(4.0), math.log(60.0))) * np.exp(log_epochs - log_epochs.min())
    max_power_w = float(rng.choice([150.0, 300.0, 700.0]))
    saturation, sharpness = rng.uniform(-1.0, span + 1.0), rng.choice([1.0, 1.5, 2.0])
    log_costs, utilisation = shape.log_costs, np.full(count, 2 / 3)
    if log_costs is None:
        log_costs = np.log1p(np.exp2(sharpness * (saturation - octaves))) / sharpness + rng.normal(0.0, 0.04, count)
        utilisation = np.clip(np.exp(-log_costs), 0.0, 1.0)
    epoch_s = 60.0 * np.exp(log_costs)
    place = int(rng.integers(count))
    return MadeJob(
        name=name,
        batch_sizes=sizes,
        default_place=place,
        max_epochs=math.ceil(3 * mean_epochs[place]),
        eta=float(rng.choice([0.0, 0.5, 1.0])),
        max_power_w=max_power_w,
        mean_epochs=mean_epochs,
        epochs_sd=math.exp(rng.uniform(math.log(0.05), math.log(0.6))),
        missing=np.zeros(count) if shape.missing is None else shape.missing,
        epoch_s=epoch_s,
        epoch_j=epoch_s * max_power_w * (0.3 + 0.6 * utilisation),
        cost_noise_sd=float(rng.choice([0.0, 0.02, 0.1, 0.3, 0.5])),
    )


@lru_cache(maxsize=1)
def made_jobs() -> tuple[MadeJob, ...]:
    """Return all jobs; each default reaches the target, and costs less than eight times as much as the best size."""
    return tuple(_made_job(number) for number in range(COUNT))


def _made_job(number: int) -> MadeJob:
    family = list(FAMILIES)[number % len(FAMILIES)]
    attempt = 0
    while True:
        job = _drawn(family, f"{family} {number}", np.random.default_rng([_SEED, number, attempt]))
        sizes = landscape_of(job.workload(), Setting(eta=job.eta))
        ratio = sizes.default.expected_cost_j / sizes.oracle.expected_cost_j
        if ratio < _LARGEST_DEFAULT_RATIO and not job.missing[job.default_place]:
            return job
        attempt += 1


# Changes


def from_the_best(job: MadeJob) -> MadeJob:
    """Return a job with the cheapest size as its default."""
    best = landscape_of(job.workload(), Setting(eta=job.eta)).oracle.batch_size
    return replace(job, default_place=job.batch_sizes.index(best))


def with_epoch_noise(job: MadeJob) -> MadeJob:
    """Return a job with log epochs of σ 0.6."""
    return replace(job, epochs_sd=0.6)


def with_epochs_reversed(job: MadeJob) -> MadeJob:
    """Return a job whose largest size needs the mean epochs of the smallest, and so on."""
    return replace(job, mean_epochs=job.mean_epochs[::-1])


def on_faster_gpu(job: MadeJob) -> MadeJob:
    """Return a job on a GPU on which an epoch at the default is 2.5 times cheaper.

    Throughput saturates on this GPU at 0.7 of the distance from the smallest to the largest size on a log scale.
    """
    log_costs = np.log1p(np.exp2(0.7 * job.octaves[-1] - job.octaves))
    costs_j = job.epoch_costs_j
    wanted_j = costs_j[job.default_place] / 2.5 * np.exp(log_costs - log_costs[job.default_place])
    return replace(job, epoch_s=job.epoch_s * wanted_j / costs_j, epoch_j=job.epoch_j * wanted_j / costs_j)
