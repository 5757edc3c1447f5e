"""A data loader that measures a training, stops it at its cost threshold, and writes the result for its master.

Example:
    The loop of a script that `zeus_plugins.master` launches. The script also runs alone if you set the variables::

        train_loader = ZeusDataLoader(train_set, batch_size=batch_size, max_epochs=epochs, shuffle=True)
        eval_loader = ZeusDataLoader(eval_set, batch_size=256)

        for epoch in train_loader.epochs():
            for batch in train_loader:
                ...
            for batch in eval_loader:
                ...
            train_loader.report_metric(accuracy)

Of its environment variables (docs/environment.md) only ``ZEUS_TARGET_METRIC`` is required. ``ZEUS_PROFILE_PARAMS``
makes the loader find the GPUs' best power limit in the first epochs, and keep it.
"""

from __future__ import annotations

import logging
import math
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

from zeus_plugins import energy, environment
from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH, BridgedMonitor
from zeus_plugins.energy.nvml import cuda_devices
from zeus_plugins.energy.processes import synchronize
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.placement import placed, this_machine
from zeus_plugins.power_limit import PowerLimitDevice, PowerLimitProfile, PowerLimitProfiler, ZeusCost, find_devices
from zeus_plugins.protocol import LEAST_TIME_S, cost
from zeus_plugins.train_result import TrainResult, result_path
from zeus_plugins.training.port import decided, node_monitor

T = TypeVar("T")

_WINDOW = "zeus_dataloader"

_logger = logging.getLogger("zeus_plugins")


@dataclass(frozen=True)
class _Settings:
    """Values of the environment variables of a launched run.

    Attributes:
        profile_steps: Steps of warm-up and of measurement for each power limit; None: change no limits.
    """

    log_dir: Path
    job_id: str
    cost_thresh_j: float
    eta: float
    target_metric: float
    profile_steps: tuple[int, ...] | None

    @classmethod
    def of(cls, environ: Mapping[str, str] | None) -> _Settings:
        """Read the variables.

        Raises:
            ZeusBSOConfigError: A value is invalid, or the target is missing.
        """
        target = environment.TARGET_METRIC.number(environ)
        if target is None:
            raise ZeusBSOConfigError(
                f"{environment.TARGET_METRIC} is not set: set it to the value of the validation metric to reach"
            )
        eta = environment.ETA_KNOB.number(environ)
        if eta is not None and not 0 <= eta <= 1:
            raise ZeusBSOConfigError(f"{environment.ETA_KNOB} is {eta}: η lies between 0 and 1")
        threshold_j = environment.COST_THRESHOLD_J.number(environ)
        if environment.USE_BEST_POWER_LIMIT.text(environ) == "False":
            raise ZeusBSOConfigError(
                f"{environment.USE_BEST_POWER_LIMIT}=False is gone: unset {environment.PROFILE_STEPS} to leave power "
                "limits unchanged"
            )
        steps = environment.PROFILE_STEPS.text(environ)
        try:
            profile_steps = tuple(int(part) for part in steps.split(",")) if steps else None
        except ValueError:
            profile_steps = ()
        if profile_steps is not None and len(profile_steps) != 2:
            raise ZeusBSOConfigError(
                f"{environment.PROFILE_STEPS} is {steps!r}: set it to two whole numbers of steps, warm-up,measurement"
            )
        return cls(
            log_dir=Path(environment.LOG_DIR.text(environ) or "zeus_log"),
            job_id=environment.JOB_ID.text(environ) or "rec01+try01",
            cost_thresh_j=math.inf if threshold_j is None else threshold_j,
            eta=0.5 if eta is None else eta,
            target_metric=target,
            profile_steps=profile_steps,
        )

    def profile_path(self, batch_size: int) -> Path:
        return self.log_dir / f"bs{batch_size}.power.json"


class _Training:
    """State and costs of one training. Rank 0 has a `monitor`, makes the decisions and writes the result.

    With a `profiler` the training finds the best power limit.
    """

    def __init__(
        self,
        settings: _Settings,
        batch_size: int,
        max_epochs: int,
        monitor: EnergyMonitor | None,
        profiler: PowerLimitProfiler | None,
    ) -> None:
        self.epoch = 0
        self.reached = False
        self.is_in_epoch = False
        self._settings = settings
        self._profiler = profiler
        self._saves_profile = monitor is not None
        self._batch_size = batch_size
        self._max_epochs = max_epochs
        self._has_begun = False
        self._metric: float | None = None
        self._monitor = None if monitor is None else BridgedMonitor(monitor)
        self._max_power_w = 0.0 if monitor is None else monitor.gpus().max_power
        self._is_measuring = False
        self.time_s = 0.0
        self._energy_j = 0.0
        self._sources: list[str] = []
        self._cost_before_epoch_j = 0.0
        self._last_epoch_j: float | None = None

    def begin(self) -> None:
        if self._has_begun:
            raise ZeusBSOOperationOrderError("a loader trains once: make a new one for another training")
        self._has_begun = True

    def goes_on(self) -> bool:
        """Return True if another epoch follows, and write the result otherwise; for rank 0."""
        if self.reached:
            return False
        threshold_j = self._settings.cost_thresh_j
        crosses = self._last_epoch_j is not None and self._cost_j + self._last_epoch_j > threshold_j
        if self.epoch < self._max_epochs and not crosses:
            return True
        self._write(self.epoch)
        if crosses:
            _logger.warning(
                "stopped after %d epochs: another one would cross the threshold, %.4g J, of which %.4g J are spent",
                *(self.epoch, threshold_j, self._cost_j),
            )
        return False

    def end_epoch(self) -> None:
        self.epoch += 1
        self.is_in_epoch = False
        self._last_epoch_j = self._cost_j - self._cost_before_epoch_j
        self._cost_before_epoch_j = self._cost_j

    def end(self) -> None:
        """Restore the power limits; call it on every way out."""
        self.is_in_epoch = False
        if self._profiler is not None:
            self._profiler.close()

    def take_metric(self, metric: float, *, higher_is_better: bool) -> None:
        """Keep the metric of this epoch, and write the result if it reaches the target."""
        if not self.is_in_epoch:
            raise ZeusBSOOperationOrderError("report the metric inside `for epoch in train_loader.epochs():`")
        if math.isnan(metric):
            return
        target = self._settings.target_metric
        self._metric = metric if math.isfinite(metric) else None
        if metric >= target if higher_is_better else metric <= target:
            self.reached = True
            if self._monitor is not None:
                self._write(self.epoch + 1)

    @contextmanager
    def stepping(self, steps: int | None) -> Iterator[Callable[[], None]]:
        """Profile a pass of `steps` (None if unknown) over the training data; yield a function to call after each."""
        if self._profiler is None:
            yield lambda: None
            return
        self._profiler.on_epoch_begin(steps)
        try:
            yield self._profiler.on_step_end
        finally:
            self._profiler.on_epoch_end()
            profile = self._profiler.profile
            # Save the profile once, when it is complete.
            if self._saves_profile and profile is not None and self._profiler.chosen_limit_w is not None:
                profile.save(self._settings.profile_path(self._batch_size))
                self._saves_profile = False

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a pass over the data on rank 0."""
        if self._monitor is None:
            yield
            return
        if self._is_measuring:
            raise ZeusBSOBadOperationError(
                "finish one pass over the data before the next begins: they would count twice"
            )
        self._is_measuring = True
        synchronize()
        self._monitor.begin_window(_WINDOW)
        try:
            yield
        finally:
            self._is_measuring = False
            synchronize()
            measured = self._monitor.end_window(_WINDOW)
            self.time_s += measured.time_s
            self._energy_j += measured.energy_j
            if measured.source not in self._sources:
                self._sources.append(measured.source)

    @property
    def _chosen_limit_w(self) -> float | None:
        return None if self._profiler is None else self._profiler.chosen_limit_w

    @property
    def _cost_j(self) -> float:
        eta, max_power_w = self._settings.eta, self._max_power_w
        return cost(energy_j=self._energy_j, time_s=self.time_s, max_power_w=max_power_w, eta=eta)

    def _write(self, epochs: int) -> None:
        settings = self._settings
        settings.log_dir.mkdir(parents=True, exist_ok=True)
        TrainResult(
            energy=self._energy_j,
            time=max(self.time_s, LEAST_TIME_S),
            cost=self._cost_j,
            num_epochs=self._max_epochs,
            reached=self.reached,
            end_epoch=epochs,
            metric=self._metric,
            power_limit_w=self._chosen_limit_w,
            energy_source=" + ".join(self._sources)[:MAX_SOURCE_LENGTH] or None,
        ).write(result_path(settings.log_dir, settings.job_id, self._batch_size))


class ZeusDataLoader(DataLoader[T]):
    """A `torch.utils.data.DataLoader` of training data, with `max_epochs`, or of evaluation data, without.

    Time and energy cover the passes over the training and evaluation data, without the work between them, such
    as saving a checkpoint. Rank 0 measures and writes the result. It measures the devices of its machine that the ranks
    have chosen, or all visible devices if some ranks have chosen none. For several machines, pass a monitor.

    Args:
        dataset: As in `DataLoader`.
        batch_size: GLOBAL batch size: samples per optimizer step over all devices. In distributed training, each rank
            loads its share.
        max_epochs: Largest number of epochs; marks the loader of the training data.
        distributed: ``"dp"`` for data-parallel training with `torch.distributed` and a `DistributedSampler`.
        monitor: Measures energy and time. None: the best monitor of this machine (`zeus_plugins.energy.auto`).
        devices: GPUs on which to find the best power limit. None: all visible GPUs, if torch can use any.
        train_loader: Training loader of an evaluation loader. None: the latest.
        environ: Environment variables. None: the process's.
        options: Further arguments of `DataLoader`.

    Raises:
        ZeusBSOConfigError: An argument or an environment variable is invalid; the sampler does not fit the ranks; or an
            evaluation loader has no training loader.
    """

    # The training loader of later evaluation loaders.
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
        self._ranks = ranks = _ranks(distributed, options.get("sampler"), is_training=max_epochs is not None)
        if batch_size % ranks.world_size:
            raise ZeusBSOConfigError(
                f"batch_size {batch_size} is global and cannot be spread evenly over {ranks.world_size} ranks: choose "
                f"a multiple of {ranks.world_size}"
            )
        super().__init__(dataset, batch_size=batch_size // ranks.world_size, **options)
        self._global_batch_size = batch_size
        self._max_epochs = max_epochs
        self._training: _Training | None = None
        self._of: weakref.ref[ZeusDataLoader[Any]] | None = None
        if max_epochs is not None:
            if train_loader is not None:
                raise ZeusBSOConfigError("a loader with max_epochs trains: leave out either max_epochs or train_loader")
            self._place = placed(ranks)
            settings = _Settings.of(environ)
            measures = None
            if ranks.rank == 0:
                measures = node_monitor(self._place, monitor)
            profiler = self._profiler(settings, measures, devices)
            self._training = _Training(settings, batch_size, max_epochs, measures, profiler)
            ZeusDataLoader._latest = weakref.ref(self)
            return
        self._of = ZeusDataLoader._latest if train_loader is None else weakref.ref(train_loader)
        if self._of is None or self._of() is None:
            raise ZeusBSOConfigError(
                "an evaluation loader belongs to a training loader, and there is none: make that one first, with "
                "max_epochs, and keep it"
            )

    def epochs(self) -> Iterator[int]:
        """Yield the epochs, from 0, until the target is reached or another epoch would cross the cost threshold.

        Raises:
            ZeusBSOOperationOrderError: This is an evaluation loader, or a second call.
        """
        training = self._of_training("epochs()")
        training.begin()
        try:
            while decided(self._ranks, training.goes_on):
                if isinstance(self.sampler, DistributedSampler):
                    self.sampler.set_epoch(training.epoch)
                training.is_in_epoch = True
                yield training.epoch
                training.end_epoch()
        finally:
            training.end()

    def report_metric(self, metric: float, higher_is_better_metric: bool = True) -> None:
        """Report the validation metric of this epoch, and write the result as soon as it reaches the target.

        In distributed training, every rank may call this; rank 0's metric counts.

        Args:
            metric: The metric. NaN is ignored.
            higher_is_better_metric: True if the metric rises as the model improves.

        Raises:
            ZeusBSOOperationOrderError: This is an evaluation loader, or the call is outside an epoch.
        """
        self._of_training("report_metric()").take_metric(float(metric), higher_is_better=higher_is_better_metric)

    @property
    def reached(self) -> bool:
        """True once this rank has reported a metric that reaches the target."""
        return self._training is not None and self._training.reached

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # a generator measures to the end, and to a break
        """Yield the batches, and measure the pass if it is within an epoch."""
        training = self._training
        if training is not None and not training.is_in_epoch:
            raise ZeusBSOOperationOrderError("train inside `for epoch in train_loader.epochs():`")
        if training is None:
            train_loader = self._of() if self._of is not None else None
            training = None if train_loader is None else train_loader._training
        # An evaluation outside the epochs does not count.
        if training is None or not training.is_in_epoch:
            yield from super().__iter__()
            return
        if training is not self._training:
            with training.measured():
                yield from super().__iter__()
            return
        with training.measured(), training.stepping(self._steps()) as end_step:
            for batch in super().__iter__():
                yield batch
                end_step()

    def _steps(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # a stream has no length
            return None

    def _profiler(
        self, settings: _Settings, monitor: EnergyMonitor | None, devices: Sequence[PowerLimitDevice] | None
    ) -> PowerLimitProfiler | None:
        steps = settings.profile_steps
        if steps is None or (devices is None and not torch.cuda.is_available()):
            return None
        controls, gpus = self._place.is_first, self._place.gpus
        # Later runs in the same log directory read the profile.
        path = settings.profile_path(self._global_batch_size)
        return PowerLimitProfiler(
            (lambda: find_devices(gpus) if devices is None else devices) if controls else None,
            ZeusCost(settings.eta),
            warmup_steps=steps[0],
            profile_steps=steps[1],
            monitor=monitor or energy.auto(device_indices=gpus) if controls else None,
            profile=PowerLimitProfile.load(path) if self._ranks.rank == 0 else None,
            batch_size=self._global_batch_size,
            all_gather=None if self._ranks.world_size == 1 else self._ranks.all_gather,
            synchronize=synchronize,
        )

    def _of_training(self, what: str) -> _Training:
        if self._training is None:
            raise ZeusBSOOperationOrderError(f"{what} is a matter of the training loader: the one with max_epochs")
        return self._training


class _LoaderRanks:
    """The processes of the training."""

    gpu_indices = None  # unknown here: all visible GPUs

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = int(environment.LOCAL_RANK.text() or 0)
        self.machine = this_machine()
        known = cuda_devices(torch) or ()
        current = torch.cuda.current_device() if known else 0
        # CUDA's first device is also the device of a process that has not chosen one.
        is_chosen = current > 0 or self.local_rank == 0 or len(known) == 1
        self.own_gpus: Sequence[str] = known[current : current + 1] if is_chosen else ()

    def broadcast(self, thing: Any) -> Any:
        things = [thing]
        distributed.broadcast_object_list(things, src=0)
        return things[0]

    def all_gather(self, thing: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        distributed.all_gather_object(gathered, thing)
        return gathered


def _ranks(mode: str | None, sampler: Any, *, is_training: bool) -> _LoaderRanks:
    """Return the processes of the training; raise `ZeusBSOConfigError` if the sampler does not fit them."""
    if mode is None:
        if isinstance(sampler, DistributedSampler):
            raise ZeusBSOConfigError("the sampler is a DistributedSampler: pass distributed='dp' too")
        return _LoaderRanks(0, 1)
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
    elif (sampler.num_replicas, sampler.rank) != (world_size, rank):
        raise ZeusBSOConfigError(
            f"the DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, and this is rank {rank} of "
            f"{world_size}: leave out its num_replicas and rank"
        )
    return _LoaderRanks(rank, world_size)
