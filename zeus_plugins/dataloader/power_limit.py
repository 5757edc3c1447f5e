"""The power limit of a script with `ZeusDataLoader`: found in its first epochs, then kept, or only accounted for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zeus_plugins.energy import Measurement
from zeus_plugins.power_limit import PowerLimitProfiler

__all__ = ["LoaderPower"]


class LoaderPower:
    """Keeps what a profiler finds, and accounts for what was only observed.

    Args:
        profiler: Finds the limit.
        path: Where the profile is kept; None on ranks that keep none.
        observe: Whether the limit is not set, and time and energy count as if it were.
    """

    def __init__(self, profiler: PowerLimitProfiler, path: Path | None, *, observe: bool) -> None:
        self.profiler = profiler
        self._path = path
        self._observe = observe

    def end_pass(self) -> None:
        """The pass over the training data ends; the profile is kept once it is whole."""
        self.profiler.on_epoch_end()
        profile = self.profiler.profile
        if self._path is None or profile is None or self.profiler.chosen_limit_w is None:
            return
        profile.save_or_warn(self._path)
        self._path = None

    def accounted(self, measured: Measurement) -> Measurement:
        """The measurement that a pass over the training data counts as: in observer mode, that under the best limit.

        Time and energy are multiplied with the ratio of those per step under the best limit to those under the highest
        one, once both are known; passes before that count as they were.
        """
        profile, chosen_w = self.profiler.profile, self.profiler.chosen_limit_w
        if not self._observe or profile is None or chosen_w is None:
            return measured
        best, highest = profile.only([chosen_w]).samples[0], profile.samples[-1]
        return replace(
            measured,
            time_s=measured.time_s * best.time_per_step_s / highest.time_per_step_s,
            energy_j=measured.energy_j * best.energy_per_step_j / highest.energy_per_step_j,
        )
