"""Jobs that change, machines on which others work, and landscapes that are not smooth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bso_server.simulate.play import Conditions
from bso_server.simulate.workload import Epoch, Landscape, Workload

OUTLIER_FACTOR = 4.0
"""Factor on the time and energy of a trial that is an outlier."""


@dataclass(frozen=True)
class VaryingConditions(Conditions):
    """Conditions that change from recurrence to recurrence.

    Attributes:
        drift_at: The first recurrence after a drift, counted from 0; None without one.
        landscape_after: Every batch size from then on; None without a drift.
        cost_noise_sd: σ of the log of a factor on the time and energy of each trial, whose mean is 1: that of a machine
            on which others work, too.
        epoch_noise_sd: The same of each epoch of a trial, independently of the others.
        outlier: Number of the one trial that takes `OUTLIER_FACTOR` times its time and energy; None without one.
    """

    drift_at: int | None = None
    landscape_after: Landscape | None = None
    cost_noise_sd: float = 0.0
    epoch_noise_sd: float = 0.0
    outlier: int | None = None

    def landscape_at(self, recurrence: int) -> Landscape:
        """Every batch size at a recurrence, counted from 0."""
        has_drifted = self.drift_at is not None and recurrence >= self.drift_at
        return self.landscape_after if has_drifted and self.landscape_after is not None else self.landscape

    def slowness(self, trial_number: int, draws: np.random.Generator) -> float:
        """A factor on the time and energy of one trial."""
        sd = self.cost_noise_sd
        noise = float(draws.lognormal(-sd * sd / 2, sd)) if sd else 1.0
        return noise * OUTLIER_FACTOR if trial_number == self.outlier else noise

    def epoch_factors(self, epochs: int, draws: np.random.Generator) -> NDArray[np.float64] | None:
        """Factors on the time and energy of each epoch of one trial, shape (epochs,); None if all are 1."""
        sd = self.epoch_noise_sd
        return draws.lognormal(-sd * sd / 2, sd, epochs) if sd else None


def in_reverse(workload: Workload) -> Workload:
    """The same job after a drift: the largest size now needs the epochs that the smallest did, and so on."""
    return _needing(workload, [size.epochs_to_target for size in reversed(workload.sizes)])


def dearer_when_larger(workload: Workload) -> Workload:
    """The same job after a drift: an epoch costs what it did at the smallest size, and eight times that at the largest.

    So do, say, longer texts of which a large batch is mostly padding.
    """
    octaves = np.linspace(0, 3, len(workload.sizes)).tolist()
    sizes = (
        replace(size, epochs={power_w: _times(epoch, 2.0**octave) for power_w, epoch in size.epochs.items()})
        for size, octave in zip(workload.sizes, octaves, strict=True)
    )
    return replace(workload, sizes=tuple(sizes))


def shuffled(workload: Workload, seed: int) -> Workload:
    """A job that is not smooth: its sizes' epochs to the target, dealt out anew; the default reaches the target."""
    rng = np.random.default_rng(seed)
    while True:
        paths = [workload.sizes[index].epochs_to_target for index in rng.permutation(len(workload.sizes))]
        if min(paths[_default_place(workload)]) <= workload.max_epochs:
            return _needing(workload, paths)


def with_bad_neighbours(workload: Workload) -> Workload:
    """A job whose default is a hill's top as seen from beside it: the next sizes need three times their epochs."""
    place = _default_place(workload)
    factors = [3.0 if abs(number - place) == 1 else 1.0 for number in range(len(workload.sizes))]
    paths = [
        tuple(factor * epochs for epochs in size.epochs_to_target)
        for size, factor in zip(workload.sizes, factors, strict=True)
    ]
    return _needing(workload, paths)


def with_two_sizes(workload: Workload, sizes: Landscape) -> Workload:
    """A job of two sizes: the default, and the cheapest of the others (`sizes`: all that it has)."""
    others = [each for each in sizes.profiles.values() if each.batch_size != workload.default_batch_size]
    cheapest = min(others, key=lambda profile: profile.expected_cost_j)
    kept = {workload.default_batch_size, cheapest.batch_size}
    return replace(workload, sizes=tuple(size for size in workload.sizes if size.batch_size in kept))


def _times(epoch: Epoch, factor: float) -> Epoch:
    return Epoch(factor * epoch.time_s, factor * epoch.energy_j)


def _default_place(workload: Workload) -> int:
    return [size.batch_size for size in workload.sizes].index(workload.default_batch_size)


def _needing(workload: Workload, paths: Sequence[tuple[float, ...]]) -> Workload:
    sizes = (replace(size, epochs_to_target=path) for size, path in zip(workload.sizes, paths, strict=True))
    return replace(workload, sizes=tuple(sizes))
