"""The search for the best power limit in a training, independent of frameworks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Never

from zeus_plugins.energy import EnergyMonitor, WindowMonitor, as_energy_monitor
from zeus_plugins.placement import Ranks, placed
from zeus_plugins.power_limit.devices import PowerLimitDevice, find_devices
from zeus_plugins.power_limit.profile import PowerLimitProfile, profile_path_of
from zeus_plugins.power_limit.profiler import PowerLimitProfiler
from zeus_plugins.power_limit.selectors import OptimumSelector, ZeusCost
from zeus_plugins.protocol import PowerLimitChoice
from zeus_plugins.training.arguments import refuse_unknown
from zeus_plugins.training.batch_size import BatchSizeArguments
from zeus_plugins.training.port import node_monitor

_METRIC = "zeus/power_limit_w"


@dataclass(frozen=True)
class _Search:
    """The search in the present training, until the training ends or all limits are measured."""

    profiler: PowerLimitProfiler
    is_zero: bool
    path: Path | None
    known: PowerLimitProfile | None
    keeper: BatchSizeArguments | None
    log: Callable[[dict[str, float]], None]


class PowerRun:
    """The search in successive trainings.

    Before `begin`, after `close`, and once all limits are measured, the other methods do nothing. A measurement covers
    only uninterrupted steps, and starts again after an interruption: call `interrupt` and `resume` around the
    framework's work between two steps.

    Args:
        profiler: Makes a `PowerLimitProfiler` of the arguments that depend on the training.
        profile_path: See `PowerLimitFindings`, like the following arguments.
    """

    def __init__(
        self,
        profiler: Callable[..., PowerLimitProfiler],
        *,
        profile_path: str | os.PathLike[str] | None = None,
        energy_monitor: EnergyMonitor | WindowMonitor | None = None,
        devices: Sequence[PowerLimitDevice] | None = None,
    ) -> None:
        self._profiler_of = profiler
        self._profile_path = profile_path
        self._energy_monitor = energy_monitor
        self._devices = devices
        # The latest one, kept for its results after the training has ended.
        self.profiler: PowerLimitProfiler | None = None
        self._search: _Search | None = None
        self._steps_in_a_row: int | None = None
        # True while steps are trained without interruption; True in an interruption that `resume` must end.
        self._is_training = False
        self._is_interrupted = False

    def begin(
        self,
        ranks: Ranks,
        batch_size: int | None = None,
        *,
        keeper: BatchSizeArguments | None = None,
        log: Callable[[dict[str, float]], None],
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Prepare for a training, after closing an earlier one; no limit is changed yet.

        Args:
            ranks: The processes of the training.
            batch_size: Global batch size of a training without `keeper`, or None if unknown.
            keeper: The training's batch-size callback, if any.
            log: Logs metrics; called on the first of all processes.
            synchronize: Waits for the work queued on the training's GPUs.
        """
        self.close()
        batch_size = batch_size if keeper is None else keeper.trial.batch_size
        path = self._path(keeper, batch_size)
        known = PowerLimitProfile.load(path) if path is not None and ranks.rank == 0 else None
        place = placed(ranks)
        controls = place.is_first  # the first process of each machine sets limits and measures

        def devices() -> Sequence[PowerLimitDevice]:
            return find_devices(place.gpus) if self._devices is None else self._devices

        self.profiler = self._profiler_of(
            devices if controls else None,
            monitor=node_monitor(place, self._energy_monitor) if controls else None,
            profile=known,
            batch_size=batch_size,
            all_gather=ranks.all_gather if ranks.world_size > 1 else None,
            synchronize=synchronize if ranks.gpu_indices else None,
        )
        self._search = _Search(self.profiler, ranks.rank == 0, path, known, keeper, log)

    def begin_steps(self, steps_in_a_row: int | None = None) -> None:
        """Begin or continue to measure. `steps_in_a_row` is the number of uninterrupted steps to come, if known."""
        if self._search is not None:
            self._steps_in_a_row = steps_in_a_row
            self._is_training = True
            self._search.profiler.on_epoch_begin(steps_in_a_row)
            self._finish_search(self._search)

    def end_step(self) -> None:
        """Count a step."""
        if self._search is not None:
            self._search.profiler.on_step_end()
            self._finish_search(self._search)

    def end_steps(self) -> None:
        """Stop measuring until `begin_steps`."""
        self._is_interrupted = False
        if self._search is not None and self._is_training:
            self._search.profiler.on_epoch_end()
        self._is_training = False

    def interrupt(self) -> None:
        """Stop measuring until `resume`."""
        was_training = self._is_training
        self.end_steps()
        self._is_interrupted = was_training

    def resume(self) -> None:
        """Continue to measure if `interrupt` has stopped a measurement."""
        if self._is_interrupted:
            self._is_interrupted = False
            self.begin_steps(self._steps_in_a_row)

    def disturb(self) -> None:
        """Start the measurement of the present limit again, because other work took time between two steps."""
        if self._is_training:
            self.interrupt()
            self.resume()

    def keep_unfinished(self) -> None:
        """Keep the measurements of an unfinished search, from which the next training continues."""
        if self._search is not None:
            self._keep(self._search)

    def close(self) -> None:
        """Restore the limits. Safe to call twice, and on every exit path."""
        self._search = None
        self._is_training = self._is_interrupted = False
        if self.profiler is not None:
            self.profiler.close()

    def _finish_search(self, search: _Search) -> None:
        if not search.profiler.is_done:
            return
        self._search, self._is_training = None, False
        self._keep(search)
        if search.is_zero and search.profiler.chosen_limit_w is not None:
            search.log({_METRIC: search.profiler.chosen_limit_w})

    def _keep(self, search: _Search) -> None:
        """Keep the measurements in the file, and the choice in the trial's reports."""
        profile, chosen_w = search.profiler.profile, search.profiler.chosen_limit_w
        if not search.is_zero or profile is None or not profile.samples:
            return
        has_measured = profile != search.known
        if search.path is not None and has_measured:
            profile.save(search.path)
        if search.keeper is not None:
            choice = PowerLimitChoice(power_limit_w=chosen_w, power_limits=len(profile.samples))
            search.keeper.keep_power_limits(choice, has_measured=has_measured)

    def _path(self, keeper: BatchSizeArguments | None, batch_size: int | None) -> Path | None:
        if self._profile_path is None:
            return None if keeper is None else profile_path_of(keeper.trial.job_id, keeper.trial.batch_size)
        return Path(os.fspath(self._profile_path).replace("{batch_size}", str(batch_size or "unknown")))


class PowerLimitFindings:
    """Constructor and results of the power-limit callbacks."""

    def __init__(
        self,
        selector: OptimumSelector | None = None,
        *,
        warmup_steps: int = 10,
        profile_steps: int = 40,
        wait_steps: int = 0,
        warmup_s: float = 0.5,
        profile_s: float = 2.0,
        limits_w: Sequence[float] | None = None,
        profile_path: str | os.PathLike[str] | None = None,
        energy_monitor: EnergyMonitor | WindowMonitor | None = None,
        devices: Sequence[PowerLimitDevice] | None = None,
        **unknown: Never,
    ) -> None:
        """Keep the arguments; the training begins later.

        Args:
            selector: Chooses the limit: `zeus_plugins.power_limit.ZeusCost(eta)` (by the cost that batch sizes are
                compared by; the default), `Energy()`, `Time()` or `MaxSlowdown(factor)`.
            warmup_steps: Steps under a new limit before its measurement: Lightning's batches, or Hugging Face's
                optimizer steps.
            profile_steps: Steps measured under each limit.
            wait_steps: Steps before the first limit, in which the training compiles and the GPUs get warm.
            warmup_s: Least duration of the warm-up of a limit, in seconds.
            profile_s: Least duration of the measurement of a limit, in seconds.
            limits_w: Limits to measure, in watts of each GPU. None: from the present limit downwards in steps of 25 W.
            profile_path: File that keeps the measurements for later trainings on such GPUs at the same batch size,
                which replaces ``{batch_size}``. None: with a batch-size callback, a file of the job in
                ``ZEUS_STATE_DIR``; otherwise none.
            energy_monitor: Measures energy and time, with the interface of Zeus's `ZeusMonitor` or ours. None: the best
                monitor of this machine.
            devices: Devices of this machine whose limits to set. None: the NVIDIA GPUs that train. The command of
                ``ZEUS_POWER_LIMIT_COMMAND``, or else the driver, sets their limits.
            **unknown: Not allowed: raises an error that names the right argument.

        Raises:
            ZeusBSOConfigError: An argument is invalid or unknown. The training raises it for limits outside the GPUs'
                range.
        """
        refuse_unknown(type(self), unknown)
        profiler = partial(
            PowerLimitProfiler,
            selector=selector or ZeusCost(),
            warmup_steps=warmup_steps,
            profile_steps=profile_steps,
            wait_steps=wait_steps,
            warmup_s=warmup_s,
            profile_s=profile_s,
            limits_w=limits_w,
        )
        profiler(None, monitor=None)  # raises for arguments that cannot work
        if energy_monitor is not None:
            as_energy_monitor(energy_monitor)  # as above
        self._run = PowerRun(profiler, profile_path=profile_path, energy_monitor=energy_monitor, devices=devices)

    @property
    def chosen_limit_w(self) -> float | None:
        """The best limit in watts of each GPU; None if unknown or if no limit could be set."""
        return None if self._run.profiler is None else self._run.profiler.chosen_limit_w

    @property
    def profile(self) -> PowerLimitProfile | None:
        """The limits that the latest training measured, with those known from the file."""
        return None if self._run.profiler is None else self._run.profiler.profile


def batch_size_callback(callbacks: Iterable[Any]) -> BatchSizeArguments | None:
    """Return the callback that has a trial in this training, or None."""
    return next((each for each in callbacks if isinstance(each, BatchSizeArguments) and each.has_trial), None)
