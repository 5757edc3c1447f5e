"""The search for the best power limit in a training, decided alike for all frameworks. Knows no framework."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from zeus_plugins.energy import EnergyMonitor, WindowMonitor, as_energy_monitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.power_limit.devices import PowerLimitDevice
from zeus_plugins.power_limit.finding import find_devices
from zeus_plugins.power_limit.profile import PowerLimitProfile
from zeus_plugins.power_limit.profiler import PowerLimitProfiler
from zeus_plugins.power_limit.selectors import OptimumSelector
from zeus_plugins.power_limit.states import Window
from zeus_plugins.protocol import PowerLimitChoice, PowerProfile
from zeus_plugins.training.placement import placed
from zeus_plugins.training.port import Ranks, node_monitor
from zeus_plugins.training.trial import TrialInfo

_METRIC = "zeus/power_limit_w"

_logger = logging.getLogger("zeus_plugins")


class TrialKeeper(Protocol):
    """The batch-size callback beside a power-limit callback, which knows the server."""

    @property
    def trial(self) -> TrialInfo | None:
        """The trial of this training."""

    def keep_power_limits(self, choice: PowerLimitChoice, /) -> None:
        """Have the server keep what was found out; called on the first of all processes."""


@dataclass(frozen=True)
class PowerOptions:
    """The arguments of a power-limit callback.

    Raises:
        ZeusBSOConfigError: One of them cannot work.
    """

    selector: OptimumSelector
    warmup_steps: int
    profile_steps: int
    limits_w: Sequence[float] | None
    profile_path: str | os.PathLike[str] | None
    energy_monitor: EnergyMonitor | WindowMonitor | None
    devices: Sequence[PowerLimitDevice] | None
    command: str | None
    wait_steps: int = 0
    warmup_s: float = 0.5
    profile_s: float = 2.0

    def __post_init__(self) -> None:
        Window(self.warmup_steps, self.profile_steps)  # it is possible, or it raises
        if self.energy_monitor is not None:
            as_energy_monitor(self.energy_monitor)  # likewise
        if self.wait_steps < 0 or self.warmup_s < 0 or self.profile_s < 0:
            raise ZeusBSOConfigError(
                f"wait_steps is {self.wait_steps}, warmup_s {self.warmup_s} and profile_s {self.profile_s}: none is "
                "below 0"
            )
        if self.limits_w is not None and not self.limits_w:
            raise ZeusBSOConfigError("limits_w is empty: list the power limits to measure, or leave it out")

    def profiler(
        self,
        ranks: Ranks,
        batch_size: int | None,
        known: PowerProfile | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> PowerLimitProfiler:
        """A profiler for a training.

        Args:
            ranks: The processes of the training; the first of each machine sets limits and measures.
            batch_size: Global batch size, or None when nobody knows.
            known: The measurements of earlier trainings at this batch size. None: those of the file.
            synchronize: As in `PowerLimitProfiler`.

        Raises:
            ZeusBSOConfigError: The GPUs cannot be measured together.
        """
        place = placed(ranks)
        controls = place.is_first
        return PowerLimitProfiler(
            (lambda: self._devices(place.gpus)) if controls else None,
            self.selector,
            warmup_steps=self.warmup_steps,
            profile_steps=self.profile_steps,
            wait_steps=self.wait_steps,
            warmup_s=self.warmup_s,
            profile_s=self.profile_s,
            monitor=node_monitor(place, self.energy_monitor) if controls else None,
            limits_w=self.limits_w,
            profile=self._known(batch_size, known) if ranks.rank == 0 else None,
            batch_size=batch_size,
            all_gather=ranks.all_gather if ranks.world_size > 1 else None,
            synchronize=synchronize if ranks.gpu_indices else None,
        )

    def save(self, profile: PowerLimitProfile | None) -> None:
        """Write a profile to its file, if there is one. A file that cannot be written is a warning."""
        path = self._path(None if profile is None else profile.batch_size)
        if path is not None and profile is not None:
            profile.save_or_warn(path)

    def _known(self, batch_size: int | None, known: PowerProfile | None) -> PowerLimitProfile | None:
        if known is not None:
            return PowerLimitProfile(gpus=known.gpus, batch_size=batch_size, samples=known.samples)
        path = self._path(batch_size)
        return None if path is None else PowerLimitProfile.load_if_kept(path)

    def _devices(self, gpus: Sequence[int | str]) -> Sequence[PowerLimitDevice]:
        return find_devices(gpus, command=self.command) if self.devices is None else self.devices

    def _path(self, batch_size: int | None) -> Path | None:
        if self.profile_path is None:
            return None
        return Path(os.fspath(self.profile_path).replace("{batch_size}", str(batch_size or "unknown")))


class PowerRun:
    """The search in one training: when it measures, what is kept of it, and its end.

    Steps are measured while nothing else happens: `interrupt` and `resume` stand around what a framework does between
    two steps, and a measurement that was cut short is made again.

    Args:
        options: The callback's arguments.
        ranks: The processes of the training.
        batch_size: Global batch size, where there is no trial that says it; None when nobody knows.
        keeper: The batch-size callback of this training, if there is one.
        log: Gives metrics to the framework's loggers; called on the first of all processes.
        on_done: Called once nothing is left to measure, so that a step costs nothing from then on.
        synchronize: Waits for the work queued on the GPUs that train.

    Raises:
        ZeusBSOConfigError: The GPUs cannot be measured together.
    """

    def __init__(
        self,
        options: PowerOptions,
        ranks: Ranks,
        batch_size: int | None = None,
        *,
        keeper: TrialKeeper | None = None,
        log: Callable[[dict[str, float]], None],
        on_done: Callable[[], None],
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        trial = None if keeper is None else keeper.trial
        known = None
        if trial is not None:
            batch_size, known = trial.batch_size, trial.power_profile
        self._profiler = options.profiler(ranks, batch_size, known, synchronize)
        self._options = options
        self._is_zero = ranks.rank == 0
        self._keeper = keeper
        self._log: Callable[[dict[str, float]], None] | None = log
        self._on_done: Callable[[], None] | None = on_done
        self._steps_in_a_row: int | None = None
        # Whether steps are being trained, and nothing else; whether they were when something interrupted them.
        self._is_training = False
        self._is_interrupted = False
        self._is_over = False

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit, watts of each GPU; None before it is known, and when no limit could be set."""
        return self._profiler.chosen_limit_w

    @property
    def profile(self) -> PowerLimitProfile | None:
        """The limits measured so far, and those that were known before."""
        return self._profiler.profile

    def begin_steps(self, steps_in_a_row: int | None = None) -> None:
        """Begin to measure, or go on with it.

        Args:
            steps_in_a_row: Steps until something interrupts them; None when nobody knows.
        """
        if self._is_over:
            return
        self._steps_in_a_row = steps_in_a_row
        self._is_training = True
        self._profiler.on_epoch_begin(steps_in_a_row)
        self._finish_search()

    def end_step(self) -> None:
        """Count a step."""
        self._profiler.on_step_end()
        self._finish_search()

    def end_steps(self) -> None:
        """Stop measuring until `begin_steps`."""
        self._is_interrupted = False
        if self._is_training:
            self._is_training = False
            self._profiler.on_epoch_end()

    def interrupt(self) -> None:
        """Stop measuring until `resume`."""
        was_training = self._is_training
        self.end_steps()
        self._is_interrupted = was_training

    def resume(self) -> None:
        """Go on after `interrupt`, if steps were being trained then."""
        if self._is_interrupted:
            self._is_interrupted = False
            self.begin_steps(self._steps_in_a_row)

    def disturb(self) -> None:
        """Measure the present limit anew: something else took time between two steps."""
        if self._is_training:
            self.interrupt()
            self.resume()

    def keep_unfinished(self) -> None:
        """Keep what was measured, if not everything was: the next training goes on from there."""
        if not self._is_over:
            self._keep()

    def close(self) -> None:
        """Put the limits back. Safe to call twice, on every way out."""
        self._is_over, self._is_training = True, False
        self._keeper = self._log = self._on_done = None
        self._profiler.close()

    def _finish_search(self) -> None:
        if self._is_over or not self._profiler.is_done:
            return
        self._is_over, self._is_training = True, False
        if self._on_done is not None:
            self._on_done()
        self._keep()
        if self._is_zero and self._log is not None and self.chosen_limit_w is not None:
            self._log({_METRIC: self.chosen_limit_w})

    def _keep(self) -> None:
        """Keep what is known by now, in the file and on the server."""
        if not self._is_zero:
            return
        self._options.save(self.profile)
        choice = None if self._keeper is None else _choice_of(self._profiler)
        if self._keeper is not None and choice is not None:
            self._keeper.keep_power_limits(choice)


def _choice_of(profiler: PowerLimitProfiler) -> PowerLimitChoice | None:
    """A profiler's findings for the batch size optimization server; None where there is nothing to keep."""
    profile = profiler.profile
    if profile is None or not profile.samples:
        return None
    try:
        return PowerLimitChoice(gpus=profile.gpus, samples=profile.samples, chosen_limit_w=profiler.chosen_limit_w)
    except ValidationError as error:
        _logger.warning("the server cannot keep the power limits: %s", error.errors()[0]["msg"])
        return None
