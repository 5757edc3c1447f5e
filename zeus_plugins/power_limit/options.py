"""What the power-limit callbacks of all frameworks are told, and do alike. Knows no framework."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeus_plugins import energy
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitDevice
from zeus_plugins.power_limit.find import find_devices
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.profiler import PowerLimitProfiler
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.power_limit.states import Window
from zeus_plugins.protocol import PowerLimitChoice, PowerProfile

__all__ = ["ProfilerOptions", "Rank", "choice_of"]

_logger = logging.getLogger("zeus_plugins")


@dataclass(frozen=True)
class Rank:
    """One process of a training, as the profiler sees it.

    Attributes:
        controls: Whether it is the one of its machine that sets limits and measures.
        is_zero: Whether it is the first of all, which reads and writes the profile's file.
        gpu_indices: The GPUs of its machine that train, as indices into the visible ones.
        all_gather: As in `PowerLimitProfiler`.
        synchronize: As in `PowerLimitProfiler`.
    """

    controls: bool
    is_zero: bool
    gpu_indices: Sequence[int]
    all_gather: Callable[[Any], Sequence[Any]] | None = None
    synchronize: Callable[[], None] | None = None


@dataclass(frozen=True)
class ProfilerOptions:
    """The arguments of a power-limit callback.

    Raises:
        ZeusBSOConfigError: One of them cannot work.
    """

    selector: OptimumSelector
    warmup_steps: int
    profile_steps: int
    limits_w: Sequence[float] | None
    profile_path: str | os.PathLike[str] | None
    energy_monitor: EnergyMonitor | None
    devices: Sequence[PowerLimitDevice] | None
    command: str | None

    def __post_init__(self) -> None:
        Window(self.warmup_steps, self.profile_steps)  # it is possible, or it raises
        if self.limits_w is not None and not self.limits_w:
            raise ZeusBSOConfigError("limits_w is empty: list the power limits to measure, or leave it out")

    def profiler(self, rank: Rank, batch_size: int | None, known: PowerProfile | None = None) -> PowerLimitProfiler:
        """A profiler for a training.

        Args:
            rank: This process.
            batch_size: Global batch size, or None when nobody knows.
            known: What earlier trainings at this batch size have measured. None: what the file says.

        Raises:
            ZeusBSOConfigError: The GPUs cannot be measured together.
        """
        return PowerLimitProfiler(
            (lambda: self._devices(rank)) if rank.controls else None,
            self.selector,
            warmup_steps=self.warmup_steps,
            profile_steps=self.profile_steps,
            monitor=(self.energy_monitor or energy.auto(device_indices=rank.gpu_indices)) if rank.controls else None,
            limits_w=self.limits_w,
            profile=self._known(batch_size, known) if rank.is_zero else None,
            batch_size=batch_size,
            all_gather=rank.all_gather,
            synchronize=rank.synchronize,
        )

    def save(self, profile: PowerLimitProfile | None) -> None:
        """Write a profile to its file, if there is one. A file that cannot be written is a warning."""
        path = self._path(None if profile is None else profile.batch_size)
        if path is None or profile is None:
            return
        try:
            profile.save(path)
        except OSError as error:
            _logger.warning("the power-limit profile could not be saved: %s", error)

    def _known(self, batch_size: int | None, known: PowerProfile | None) -> PowerLimitProfile | None:
        if known is None:
            return self._load(batch_size)
        return PowerLimitProfile(gpus=known.gpus, batch_size=batch_size, samples=known.samples)

    def _devices(self, rank: Rank) -> Sequence[PowerLimitDevice]:
        return find_devices(rank.gpu_indices, command=self.command) if self.devices is None else self.devices

    def _path(self, batch_size: int | None) -> Path | None:
        if self.profile_path is None:
            return None
        return Path(os.fspath(self.profile_path).replace("{batch_size}", str(batch_size or "unknown")))

    def _load(self, batch_size: int | None) -> PowerLimitProfile | None:
        path = self._path(batch_size)
        try:
            return None if path is None else PowerLimitProfile.load(path)
        except FileNotFoundError:
            return None
        except (OSError, ZeusBSOConfigError) as error:
            _logger.warning("the power limits are measured anew: %s", error)
            return None


def choice_of(profiler: PowerLimitProfiler) -> PowerLimitChoice | None:
    """What a batch size optimization server keeps of a profiler's findings; None where there is nothing to keep."""
    profile = profiler.profile
    if profile is None or not profile.samples:
        return None
    try:
        return PowerLimitChoice(gpus=profile.gpus, samples=profile.samples, chosen_limit_w=profiler.chosen_limit_w)
    except ValidationError as error:
        _logger.warning("the server cannot keep the power limits: %s", error.errors()[0]["msg"])
        return None
