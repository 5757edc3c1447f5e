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
    """Passes on to a profiler what a loader does, keeps its profile, and accounts for what was only observed.

    Args:
        profiler: Finds the limit.
        path: Where the profile is kept; None on ranks that keep none.
        observe: Whether the limit is not set, and time and energy count as if it were.
    """

    def __init__(self, profiler: PowerLimitProfiler, path: Path | None, *, observe: bool) -> None:
        self._profiler = profiler
        self._path = path
        self._observe = observe

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit, watts of each GPU; None before it is known."""
        return self._profiler.chosen_limit_w

    def begin_pass(self, steps: int | None) -> None:
        """A pass over the training data begins."""
        self._profiler.on_epoch_begin(steps)

    def end_step(self) -> None:
        """A step has ended."""
        if not self._profiler.is_done:
            self._profiler.on_step_end()

    def end_pass(self) -> None:
        """The pass ends; the profile is kept once it is whole."""
        self._profiler.on_epoch_end()
        profile = self._profiler.profile
        if self._path is None or profile is None or self._profiler.chosen_limit_w is None:
            return
        path, self._path = self._path, None
        try:
            profile.save(path)
        except OSError as error:
            _logger.warning("the power-limit profile could not be saved: %s", error)

    def close(self) -> None:
        """The limits that were found are put back."""
        self._profiler.close()

    def accounted(self, measured: Measurement) -> Measurement:
        """The measurement that a pass over the training data counts as: in observer mode, that under the best limit.

        Time and energy are multiplied with the ratio of those per step under the best limit to those under the highest
        one, once both are known; passes before that count as they were.
        """
        profile, chosen_w = self._profiler.profile, self._profiler.chosen_limit_w
        if not self._observe or profile is None or chosen_w is None:
            return measured
        best, highest = profile.only([chosen_w]).samples[0], profile.samples[-1]
        return replace(
            measured,
            time_s=measured.time_s * best.time_per_step_s / highest.time_per_step_s,
            energy_j=measured.energy_j * best.energy_per_step_j / highest.energy_per_step_j,
        )
