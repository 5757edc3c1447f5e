"""The power limit of a script with `ZeusDataLoader`: found in its first epochs, then kept, or only accounted for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit import PowerLimitProfile, PowerLimitProfiler

__all__ = ["LoaderPower", "known_profile", "profile_path"]

_logger = logging.getLogger("zeus_plugins")


def profile_path(log_dir: Path, batch_size: int) -> Path:
    """The file that keeps the profile of a batch size, for later runs in the same directory of logs."""
    return log_dir / f"bs{batch_size}.power.json"


def known_profile(path: Path) -> PowerLimitProfile | None:
    """The profile of an earlier run, if there is one that can be read."""
    try:
        return PowerLimitProfile.load(path)
    except FileNotFoundError:
        return None
    except (OSError, ZeusBSOConfigError) as error:
        _logger.warning("power limits are measured anew: %s", error)
        return None


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
        path, self._path = self._path, None
        try:
            profile.save(path)
        except OSError as error:
            _logger.warning("the power-limit profile could not be saved: %s", error)

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
