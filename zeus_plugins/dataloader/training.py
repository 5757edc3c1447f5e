"""One training of a `ZeusDataLoader`: its epochs, its cost and its result. Knows no loader."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from zeus_plugins import energy
from zeus_plugins.dataloader.settings import Settings
from zeus_plugins.energy import EnergyMonitor, Measurement, WindowMonitor, as_energy_monitor
from zeus_plugins.energy.bridged import BridgedMonitor
from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOOperationOrderError
from zeus_plugins.power_limit import PowerLimitProfiler
from zeus_plugins.protocol import LEAST_TIME_S, cost
from zeus_plugins.train_result import TrainResult, result_path

_WINDOW = "zeus_dataloader"

_logger = logging.getLogger("zeus_plugins")


@dataclass
class _Account:
    """The cost of a training, epoch by epoch, on devices of this maximum power. Knows no device."""

    settings: Settings
    max_power_w: float
    time_s: float = 0.0
    energy_j: float = 0.0
    _sources: list[str] = field(default_factory=list)
    _cost_before_epoch_j: float = 0.0
    _last_epoch_j: float | None = None

    @property
    def cost_j(self) -> float:
        """Cost so far, joules."""
        return cost(energy_j=self.energy_j, time_s=self.time_s, max_power_w=self.max_power_w, eta=self.settings.eta)

    def add(self, measured: Measurement) -> None:
        """Count a window."""
        self.time_s += measured.time_s
        self.energy_j += measured.energy_j
        if measured.source not in self._sources:
            self._sources.append(measured.source)

    def end_epoch(self) -> None:
        """Count an epoch."""
        self._last_epoch_j = self.cost_j - self._cost_before_epoch_j
        self._cost_before_epoch_j = self.cost_j

    @property
    def source(self) -> str | None:
        """Every way that the energy was obtained."""
        return " + ".join(self._sources)[:MAX_SOURCE_LENGTH] or None

    @property
    def next_would_cross(self) -> bool:
        """True when another epoch like the last one would cross the threshold; not known before the first."""
        if self._last_epoch_j is None:
            return False
        return self.cost_j + self._last_epoch_j > self.settings.cost_thresh_j


class Training:
    """The state of one training at a global batch size; the main rank, 0, measures and writes.

    Without a monitor, it takes the best one of this machine, for these GPUs or all that are visible. With a `profiler`
    it looks for the best power limit, and the rank that has a `profile_path` keeps what is found there.
    """

    def __init__(
        self,
        settings: Settings,
        batch_size: int,
        max_epochs: int,
        monitor: EnergyMonitor | WindowMonitor | None,
        *,
        is_main: bool,
        gpus: Sequence[int | str] = (),
    ) -> None:
        self.settings = settings
        self.profiler: PowerLimitProfiler | None = None
        self.profile_path: Path | None = None
        self._batch_size = batch_size
        self._max_epochs = max_epochs
        self.monitor: EnergyMonitor | None = None
        self._bridged: BridgedMonitor | None = None
        self._account: _Account | None = None
        if is_main:
            self.monitor = energy.auto(device_indices=gpus or None) if monitor is None else as_energy_monitor(monitor)
            self._bridged = BridgedMonitor(self.monitor)
            self._account = _Account(settings, self.monitor.gpus().max_power)
        self.epoch = 0
        self.reached = False
        self.is_in_epoch = False
        self._has_begun = False
        self._is_measuring = False
        self._metric: float | None = None

    def begin(self) -> None:
        """Begin, once."""
        if self._has_begun:
            raise ZeusBSOOperationOrderError("a loader trains once: make a new one for another training")
        self._has_begun = True

    def goes_on(self) -> bool:
        """True when another epoch is trained; the result is written when not. Rank 0 only."""
        account = self._the_account
        crosses = account.next_would_cross
        if not self.reached and self.epoch < self._max_epochs and not crosses:
            return True
        if not self.reached:
            self._write()
        if crosses and not self.reached:
            _logger.warning(
                "stopped after %d epochs: another one would cross the threshold, %.4g J, of which %.4g J are spent",
                *(self.epoch, self.settings.cost_thresh_j, account.cost_j),
            )
        return False

    def end_epoch(self) -> None:
        """An epoch is over."""
        self.epoch += 1
        self.is_in_epoch = False
        if self._account is not None:
            self._account.end_epoch()

    def end(self) -> None:
        """The training is over, in whatever way."""
        self.is_in_epoch = False
        if self.profiler is not None:
            self.profiler.close()

    def report(self, metric: float, *, higher_is_better: bool) -> None:
        """Take a metric."""
        if not self.is_in_epoch:
            raise ZeusBSOOperationOrderError("report the metric inside `for epoch in train_loader.epochs():`")
        if math.isnan(metric):
            return
        target = self.settings.target_metric
        self._metric = metric if math.isfinite(metric) else None
        if metric >= target if higher_is_better else metric <= target:
            self.reached = True
            if self._account is not None:
                self._write(epochs=self.epoch + 1)

    @contextmanager
    def stepping(self, steps: int | None) -> Iterator[Callable[[], None]]:
        """A pass over the training data, of so many steps if that is known; gives what to call after each of them."""
        if self.profiler is None:
            yield lambda: None
            return
        self.profiler.on_epoch_begin(steps)
        try:
            yield self.profiler.on_step_end
        finally:
            self.profiler.on_epoch_end()
            profile = self.profiler.profile
            # It is kept once it is whole.
            if self.profile_path is not None and profile is not None and self.profiler.chosen_limit_w is not None:
                profile.save_or_warn(self.profile_path)
                self.profile_path = None

    @contextmanager
    def measured(self, *, trains: bool = False) -> Iterator[None]:
        """Count what is done meanwhile; it `trains` in a pass over the training data."""
        if self._bridged is None or self._account is None:
            yield
            return
        if self._is_measuring:
            raise ZeusBSOBadOperationError(
                "finish one pass over the data before the next begins: they would count twice"
            )
        self._is_measuring = True
        synchronize()
        self._bridged.begin_window(_WINDOW)
        try:
            yield
        finally:
            self._is_measuring = False
            synchronize()
            spent = self._bridged.end_window(_WINDOW)
            self._account.add(self._accounted(spent) if trains else spent)

    def _accounted(self, measured: Measurement) -> Measurement:
        """The measurement that a pass over the training data counts as: in observer mode, that under the best limit.

        Time and energy are multiplied with the ratio of those per step under the best limit to those under the highest
        one, once both are known; passes before that count as they were.
        """
        profile = None if self.profiler is None else self.profiler.profile
        if not self.settings.is_observed or profile is None or self._chosen_limit_w is None:
            return measured
        best, highest = profile.only([self._chosen_limit_w]).samples[0], profile.samples[-1]
        return replace(
            measured,
            time_s=measured.time_s * best.time_per_step_s / highest.time_per_step_s,
            energy_j=measured.energy_j * best.energy_per_step_j / highest.energy_per_step_j,
        )

    @property
    def _chosen_limit_w(self) -> float | None:
        return None if self.profiler is None else self.profiler.chosen_limit_w

    @property
    def _the_account(self) -> _Account:
        if self._account is None:
            raise ZeusBSOBadOperationError("only rank 0 decides")
        return self._account

    def _write(self, epochs: int | None = None) -> None:
        account, settings = self._the_account, self.settings
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        TrainResult(
            energy=account.energy_j,
            time=max(account.time_s, LEAST_TIME_S),
            cost=account.cost_j,
            num_epochs=self._max_epochs,
            reached=self.reached,
            end_epoch=self.epoch if epochs is None else epochs,
            metric=self._metric,
            power_limit_w=self._chosen_limit_w,
            energy_source=account.source,
        ).write(result_path(settings.log_dir, settings.job_id, self._batch_size))


def synchronize() -> None:
    """Wait for what the device was given to do: its energy belongs to this window."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        torch.cuda.synchronize()
