"""A data loader that measures a training, stops it in time, and tells its master what it came to.

Example:
    The loop of a script that `zeus_plugins.master` launches; it works as well alone, with the variables set by hand::

        train_loader = ZeusDataLoader(train_set, batch_size=batch_size, max_epochs=epochs, shuffle=True)
        eval_loader = ZeusDataLoader(eval_set, batch_size=256)

        for epoch in train_loader.epochs():
            for batch in train_loader:
                ...
            for batch in eval_loader:
                ...
            train_loader.report_metric(accuracy)

Environment variables: ``ZEUS_TARGET_METRIC`` is needed; ``ZEUS_LOG_DIR`` (``zeus_log`` by default), ``ZEUS_JOB_ID``
(``rec01+try01``), ``ZEUS_COST_THRESH`` (``inf``) and ``ZEUS_ETA_KNOB`` (0.5) are not. With ``ZEUS_PROFILE_PARAMS``
(steps of warm-up and of measurement, ``10,40`` say) the GPUs' best power limit is found in the first epochs, and kept,
or, with ``ZEUS_USE_OPTIMAL_PL=False``, only accounted for.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zeus_plugins import energy
from zeus_plugins.dataloader.power_limit import LoaderPower, is_observed, known_profile, profile_path, profiling_steps
from zeus_plugins.energy import EnergyMonitor, Measurement, WindowMonitor, adapted
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.power_limit import PowerLimitDevice, PowerLimitProfiler, ZeusCost, find_devices
from zeus_plugins.protocol import GpuConfig
from zeus_plugins.train_result import TrainResult, Variables, result_path
from zeus_plugins.training.adapters import decided_by_rank_zero

__all__ = ["ZeusDataLoader"]

_WINDOW = "zeus_dataloader"
_DEFAULT_JOB_ID = "rec01+try01"
_LEAST_TIME_S = 1e-6

_logger = logging.getLogger("zeus_plugins")

T = TypeVar("T")


@dataclass(frozen=True)
class _Settings:
    """What the environment variables say."""

    log_dir: Path
    job_id: str
    cost_thresh_j: float
    eta: float
    target_metric: float

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> _Settings:
        target = environ.get(Variables.TARGET_METRIC)
        if not target:
            raise ZeusBSOConfigError(
                f"{Variables.TARGET_METRIC} is not set: set it to the value of the validation metric to reach"
            )
        eta = _number(environ, Variables.ETA_KNOB, 0.5)
        if not 0 <= eta <= 1:
            raise ZeusBSOConfigError(f"{Variables.ETA_KNOB} is {eta}: η lies between 0 and 1")
        return cls(
            log_dir=Path(environ.get(Variables.LOG_DIR) or "zeus_log"),
            job_id=environ.get(Variables.JOB_ID) or _DEFAULT_JOB_ID,
            cost_thresh_j=_number(environ, Variables.COST_THRESH, math.inf),
            eta=eta,
            target_metric=_number(environ, Variables.TARGET_METRIC, math.nan),
        )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ZeusBSOConfigError(f"{name} is {text!r}: set it to a number")
    return number


class _Account:
    """What a training has cost, epoch by epoch. Knows neither loaders nor devices.

    Args:
        settings: Its η and threshold count.
        max_power_w: Maximum power, summed over the devices, watts.
    """

    def __init__(self, settings: _Settings, max_power_w: float) -> None:
        self._settings = settings
        self._max_power_w = max_power_w
        self.time_s = self.energy_j = 0.0
        self.epochs = 0
        self.source: str | None = None
        self._cost_before_epoch_j = 0.0
        self._last_epoch_j: float | None = None

    @property
    def cost_j(self) -> float:
        """``η·energy + (1 − η)·max_power·time``, joules."""
        return self._settings.eta * self.energy_j + (1 - self._settings.eta) * self._max_power_w * self.time_s

    def add(self, measured: Measurement) -> None:
        """Count a window."""
        self.time_s += measured.time_s
        self.energy_j += measured.energy_j
        self.source = measured.source

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.epochs += 1
        self._last_epoch_j = self.cost_j - self._cost_before_epoch_j
        self._cost_before_epoch_j = self.cost_j

    @property
    def next_would_cross(self) -> bool:
        """Whether another epoch like the last one would cross the threshold; not known before the first."""
        if self._last_epoch_j is None:
            return False
        return self.cost_j + self._last_epoch_j > self._settings.cost_thresh_j


class ZeusDataLoader(DataLoader[T]):
    """A `torch.utils.data.DataLoader` for training, if `max_epochs` is given, or else for evaluation.

    Time and energy are those of the passes over the training and the evaluation data; what is done between them (saving
    a checkpoint, say) is not counted. Only rank 0 measures and writes the result. It measures all visible devices of
    its machine; for several machines, or for other devices, pass a monitor.

    Args:
        dataset: As in `DataLoader`.
        batch_size: GLOBAL batch size: samples per optimizer step over all devices. In distributed training, each rank
            loads its share.
        max_epochs: Epochs to train at most; marks the loader of the training data.
        distributed: ``"dp"`` for data-parallel training with `torch.distributed` and a `DistributedSampler`.
        monitor: Measures energy and time. None: the best one that this machine offers (`zeus_plugins.energy.auto`).
        devices: The GPUs whose power limit is to be found. None: all visible ones, if torch can use any.
        train_loader: For an evaluation loader, the training loader that it belongs to. None: the one made last.
        environ: Environment variables; those of the process by default.
        options: Everything else goes to `DataLoader`.

    Raises:
        ZeusBSOConfigError: An argument or an environment variable cannot work; the sampler does not fit the ranks; or
            there is no training loader for this evaluation loader.
    """

    # The loader of training data that evaluation loaders belong to.
    _latest: weakref.ref[ZeusDataLoader[Any]] | None = None

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int,
        *,
        max_epochs: int | None = None,
        distributed: Literal["dp"] | None = None,
        monitor: EnergyMonitor | WindowMonitor | None = None,
        devices: Sequence[PowerLimitDevice] | None = None,
        train_loader: ZeusDataLoader[Any] | None = None,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if max_epochs is not None and max_epochs < 1:
            raise ZeusBSOConfigError(f"max_epochs is {max_epochs}: it is at least 1; leave it out to evaluate")
        if batch_size < 1:
            raise ZeusBSOConfigError(f"batch_size is {batch_size}: it is at least 1")
        self._rank, self._world_size = _ranks(distributed, options.get("sampler"), is_training=max_epochs is not None)
        if batch_size % self._world_size:
            raise ZeusBSOConfigError(
                f"batch_size {batch_size} is global and cannot be spread evenly over {self._world_size} ranks: choose "
                f"a multiple of {self._world_size}"
            )
        super().__init__(dataset, batch_size=batch_size // self._world_size, **options)
        self._global_batch_size = batch_size
        self._max_epochs = max_epochs
        self._training: _Training | None = None
        self._of: weakref.ref[ZeusDataLoader[Any]] | None = None
        if max_epochs is not None:
            if train_loader is not None:
                raise ZeusBSOConfigError("a loader with max_epochs trains: leave out either max_epochs or train_loader")
            environ = os.environ if environ is None else environ
            self._training = _Training(_Settings.of(environ), batch_size, max_epochs, monitor, is_main=self._rank == 0)
            self._training.power = self._power(environ, self._training, devices)
            ZeusDataLoader._latest = weakref.ref(self)
            return
        self._of = ZeusDataLoader._latest if train_loader is None else weakref.ref(train_loader)
        if self._of is None or self._of() is None:
            raise ZeusBSOConfigError(
                "an evaluation loader belongs to a training loader, and there is none: make that one first, with "
                "max_epochs, and keep it"
            )

    def epochs(self) -> Iterator[int]:
        """The epochs to train, from 0; ends when the target is reached, or before an epoch that would be too costly.

        Yields:
            The number of the epoch.

        Raises:
            ZeusBSOOperationOrderError: This is an evaluation loader, or its epochs were asked for before.
        """
        training = self._of_training("epochs()")
        training.begin()
        try:
            while self._decided(training.goes_on):
                if isinstance(self.sampler, DistributedSampler):
                    self.sampler.set_epoch(training.epoch)
                training.is_in_epoch = True
                yield training.epoch
                training.end_epoch()
        finally:
            training.end()

    def report_metric(self, metric: float, higher_is_better_metric: bool = True) -> None:
        """Report the validation metric of this epoch. When it reaches the target, the result is written at once.

        In distributed training, every rank may call this; rank 0's metric counts.

        Args:
            metric: The metric; one that is not finite reaches nothing.
            higher_is_better_metric: Whether it rises as the model improves.

        Raises:
            ZeusBSOOperationOrderError: This is an evaluation loader, or no epoch is under way.
        """
        self._of_training("report_metric()").report(float(metric), higher_is_better=higher_is_better_metric)

    @property
    def reached(self) -> bool:
        """Whether the target was reached, as far as this rank knows."""
        return self._training is not None and self._training.reached

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # a generator measures to the end, and to a break
        """The batches, measured.

        Raises:
            ZeusBSOOperationOrderError: This is a training loader, and no epoch is under way.
        """
        training = self._training
        if training is not None and not training.is_in_epoch:
            raise ZeusBSOOperationOrderError("train inside `for epoch in train_loader.epochs():`")
        if training is None:
            train_loader = self._of() if self._of is not None else None
            training = None if train_loader is None else train_loader._training
        # An evaluation before or after the training is none of its epochs.
        if training is None or not training.is_in_epoch:
            yield from super().__iter__()
            return
        if training is not self._training:
            with training.measured():
                yield from super().__iter__()
            return
        with training.measured(trains=True), training.stepping(self._steps()) as end_step:
            for batch in super().__iter__():
                yield batch
                end_step()

    def _steps(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # The data do not know their number.
            return None

    def _power(
        self, environ: Mapping[str, str], training: _Training, devices: Sequence[PowerLimitDevice] | None
    ) -> LoaderPower | None:
        """What finds the power limit, where one is wanted and there are GPUs."""
        steps, observe = profiling_steps(environ), is_observed(environ)
        if steps is None or (devices is None and not torch.cuda.is_available()):
            return None
        # One process of each machine controls its GPUs.
        controls = self._world_size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        path = profile_path(training.settings.log_dir, self._global_batch_size) if self._rank == 0 else None
        profiler = PowerLimitProfiler(
            (lambda: find_devices() if devices is None else devices) if controls else None,
            ZeusCost(training.settings.eta),
            warmup_steps=steps[0],
            profile_steps=steps[1],
            monitor=(training.monitor or energy.auto()) if controls else None,
            profile=None if path is None else known_profile(path),
            batch_size=self._global_batch_size,
            observe=observe,
            all_gather=None if self._world_size == 1 else self._gathered,
            synchronize=_synchronize,
        )
        return LoaderPower(profiler, path, observe=observe)

    def _gathered(self, thing: Any) -> list[Any]:
        gathered: list[Any] = [None] * self._world_size
        distributed.all_gather_object(gathered, thing)
        return gathered

    def _of_training(self, what: str) -> _Training:
        if self._training is None:
            raise ZeusBSOOperationOrderError(f"{what} is a matter of the training loader: the one with max_epochs")
        return self._training

    def _decided(self, decide: Callable[[], bool]) -> bool:
        def broadcast(answer: Any) -> Any:
            answers = [answer]
            distributed.broadcast_object_list(answers, src=0)
            return answers[0]

        return decided_by_rank_zero(decide, rank=self._rank, world_size=self._world_size, broadcast=broadcast)


class _Training:
    """One training: where it stands, what it has cost, and its result.

    Args:
        settings: From the environment.
        batch_size: Global batch size.
        max_epochs: Epochs to train at most.
        monitor: Measures; None: the best one of this machine.
        is_main: Whether this is rank 0, which measures and writes.
    """

    def __init__(
        self,
        settings: _Settings,
        batch_size: int,
        max_epochs: int,
        monitor: EnergyMonitor | WindowMonitor | None,
        *,
        is_main: bool,
    ) -> None:
        self.settings = settings
        self.power: LoaderPower | None = None
        self._batch_size = batch_size
        self._max_epochs = max_epochs
        self._is_main = is_main
        self.monitor: EnergyMonitor | None = None
        self._account: _Account | None = None
        if is_main:
            self.monitor = energy.auto() if monitor is None else adapted(monitor)
            gpus: GpuConfig = self.monitor.gpus()
            self._account = _Account(settings, gpus.max_power)
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
        """Whether another epoch is trained; the result is written when not. Rank 0 only."""
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
        if self.power is not None:
            self.power.close()

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
            if self._is_main:
                self._write(epochs=self.epoch + 1)

    @contextmanager
    def stepping(self, steps: int | None) -> Iterator[Callable[[], None]]:
        """A pass over the training data; gives what to call after each step.

        Args:
            steps: How many there will be; None: nobody knows.
        """
        if self.power is None:
            yield lambda: None
            return
        self.power.begin_pass(steps)
        try:
            yield self.power.end_step
        finally:
            self.power.end_pass()

    @contextmanager
    def measured(self, *, trains: bool = False) -> Iterator[None]:
        """Count what is done meanwhile.

        Args:
            trains: Whether it is a pass over the training data.
        """
        if self.monitor is None or self._account is None:
            yield
            return
        if self._is_measuring:
            raise ZeusBSOBadOperationError(
                "finish one pass over the data before the next begins: they would count twice"
            )
        self._is_measuring = True
        _synchronize()
        self.monitor.begin_window(_WINDOW)
        try:
            yield
        finally:
            self._is_measuring = False
            _synchronize()
            spent = self.monitor.end_window(_WINDOW)
            self._account.add(self.power.accounted(spent) if trains and self.power is not None else spent)

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
            time=max(account.time_s, _LEAST_TIME_S),
            cost=account.cost_j,
            num_epochs=self._max_epochs,
            reached=self.reached,
            end_epoch=self.epoch if epochs is None else epochs,
            metric=self._metric,
            power_limit_w=None if self.power is None else self.power.chosen_limit_w,
            energy_source=account.source,
        ).write(result_path(settings.log_dir, settings.job_id, self._batch_size))


def _ranks(mode: str | None, sampler: Any, *, is_training: bool) -> tuple[int, int]:
    """This rank, and how many there are.

    Raises:
        ZeusBSOConfigError: The sampler does not fit.
    """
    if mode is None:
        if isinstance(sampler, DistributedSampler):
            raise ZeusBSOConfigError("the sampler is a DistributedSampler: pass distributed='dp' too")
        return 0, 1
    if mode != "dp":
        raise ZeusBSOConfigError(f"distributed is {mode!r}: choose 'dp' (data parallel) or leave it out")
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ZeusBSOConfigError(
            "distributed='dp' needs torch.distributed.init_process_group first, as torchrun prepares it"
        )
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if not isinstance(sampler, DistributedSampler):
        if is_training:
            raise ZeusBSOConfigError(
                "distributed='dp' needs sampler=DistributedSampler(dataset): without it, every rank trains on all data"
            )
        return rank, world_size
    if (sampler.num_replicas, sampler.rank) != (world_size, rank):
        raise ZeusBSOConfigError(
            f"the DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, and this is rank {rank} of "
            f"{world_size}: leave out its num_replicas and rank"
        )
    return rank, world_size


def _synchronize() -> None:
    """Wait for what the device was given to do: its energy belongs to this window."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        torch.cuda.synchronize()
