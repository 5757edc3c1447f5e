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

Of the environment variables (docs/environment.md) ``ZEUS_TARGET_METRIC`` is needed. With ``ZEUS_PROFILE_PARAMS`` the
GPUs' best power limit is found in the first epochs, and kept, or, with ``ZEUS_USE_OPTIMAL_PL=False``, accounted for.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zeus_plugins import energy, environment
from zeus_plugins.energy import EnergyMonitor, Measurement, WindowMonitor, as_energy_monitor
from zeus_plugins.energy.monitor import MAX_SOURCE_LENGTH, BridgedMonitor
from zeus_plugins.energy.visible import cuda_devices
from zeus_plugins.errors import ZeusBSOBadOperationError, ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.placement import placed, this_machine
from zeus_plugins.power_limit import PowerLimitDevice, PowerLimitProfile, PowerLimitProfiler, ZeusCost, find_devices
from zeus_plugins.protocol import LEAST_TIME_S, cost
from zeus_plugins.train_result import TrainResult, result_path
from zeus_plugins.training.port import decided_by_rank_zero

T = TypeVar("T")

_WINDOW = "zeus_dataloader"

_logger = logging.getLogger("zeus_plugins")


@dataclass(frozen=True)
class _Settings:
    """The environment variables of a launched run, read.

    `profile_steps` are those of warm-up and of measurement for each power limit; without them limits are left alone. If
    it `is_observed`, the best limit is only looked for, and not set.
    """

    log_dir: Path
    job_id: str
    cost_thresh_j: float
    eta: float
    target_metric: float
    profile_steps: tuple[int, int] | None
    is_observed: bool

    @classmethod
    def of(cls, environ: Mapping[str, str] | None) -> _Settings:
        """Read the variables; one that cannot work, or a missing target, is a `ZeusBSOConfigError`."""
        target = environment.TARGET_METRIC.number(environ)
        if target is None:
            raise ZeusBSOConfigError(
                f"{environment.TARGET_METRIC} is not set: set it to the value of the validation metric to reach"
            )
        eta = environment.ETA_KNOB.number(environ)
        if eta is not None and not 0 <= eta <= 1:
            raise ZeusBSOConfigError(f"{environment.ETA_KNOB} is {eta}: η lies between 0 and 1")
        threshold_j = environment.COST_THRESHOLD_J.number(environ)
        sets_limit = environment.USE_BEST_POWER_LIMIT.text(environ) or "True"
        if sets_limit not in ("True", "False"):
            raise ZeusBSOConfigError(f"{environment.USE_BEST_POWER_LIMIT} is {sets_limit!r}: set it to True or False")
        return cls(
            log_dir=Path(environment.LOG_DIR.text(environ) or "zeus_log"),
            job_id=environment.JOB_ID.text(environ) or "rec01+try01",
            cost_thresh_j=math.inf if threshold_j is None else threshold_j,
            eta=0.5 if eta is None else eta,
            target_metric=target,
            profile_steps=_profile_steps(environ),
            is_observed=sets_limit == "False",
        )


def _profile_steps(environ: Mapping[str, str] | None) -> tuple[int, int] | None:
    text = environment.PROFILE_STEPS.text(environ)
    if not text:
        return None
    try:
        warmup, measure = (int(part) for part in text.split(","))
    except ValueError:
        raise ZeusBSOConfigError(
            f"{environment.PROFILE_STEPS} is {text!r}: set it to two whole numbers of steps, warm-up,measurement"
        ) from None
    return warmup, measure


class _Account:
    """The cost of a training, epoch by epoch, as its monitor measures it."""

    def __init__(self, settings: _Settings, monitor: EnergyMonitor) -> None:
        self.monitor = monitor
        self.time_s = 0.0
        self.energy_j = 0.0
        self._settings = settings
        self._bridged = BridgedMonitor(monitor)
        self._max_power_w = monitor.gpus().max_power
        self._sources: list[str] = []
        self._cost_before_epoch_j = 0.0
        self._last_epoch_j: float | None = None
        self._is_measuring = False

    @property
    def cost_j(self) -> float:
        """Cost so far, joules."""
        return cost(energy_j=self.energy_j, time_s=self.time_s, max_power_w=self._max_power_w, eta=self._settings.eta)

    @property
    def source(self) -> str | None:
        """Every way that the energy was obtained."""
        return " + ".join(self._sources)[:MAX_SOURCE_LENGTH] or None

    @property
    def next_would_cross(self) -> bool:
        """True when another epoch like the last one would cross the threshold; not known before the first."""
        return self._last_epoch_j is not None and self.cost_j + self._last_epoch_j > self._settings.cost_thresh_j

    def end_epoch(self) -> None:
        """Count an epoch."""
        self._last_epoch_j = self.cost_j - self._cost_before_epoch_j
        self._cost_before_epoch_j = self.cost_j

    @contextmanager
    def measured(self, accounted: Callable[[Measurement], Measurement]) -> Iterator[None]:
        """Count a pass over the data as what is accounted for its measurement."""
        if self._is_measuring:
            raise ZeusBSOBadOperationError(
                "finish one pass over the data before the next begins: they would count twice"
            )
        self._is_measuring = True
        _synchronize()
        self._bridged.begin_window(_WINDOW)
        try:
            yield
        finally:
            self._is_measuring = False
            _synchronize()
            measured = accounted(self._bridged.end_window(_WINDOW))
            self.time_s += measured.time_s
            self.energy_j += measured.energy_j
            if measured.source not in self._sources:
                self._sources.append(measured.source)


class _Training:
    """The state of one training at a global batch size; rank 0 alone has an account, decides and writes.

    Knows no loader. With a `profiler` it looks for the best power limit, and the rank that has a `profile_path` keeps
    what is found there.
    """

    def __init__(self, settings: _Settings, batch_size: int, max_epochs: int, account: _Account | None) -> None:
        self.settings = settings
        self.account = account
        self.profiler: PowerLimitProfiler | None = None
        self.profile_path: Path | None = None
        self.epoch = 0
        self.reached = False
        self.is_in_epoch = False
        self._batch_size = batch_size
        self._max_epochs = max_epochs
        self._has_begun = False
        self._metric: float | None = None

    def begin(self) -> None:
        """Begin, once."""
        if self._has_begun:
            raise ZeusBSOOperationOrderError("a loader trains once: make a new one for another training")
        self._has_begun = True

    def goes_on(self) -> bool:
        """Return whether another epoch is trained; write the result if not. Rank 0 only."""
        if self.reached:
            return False
        account = self._the_account
        crosses = account.next_would_cross
        if self.epoch < self._max_epochs and not crosses:
            return True
        self._write()
        if crosses:
            _logger.warning(
                "stopped after %d epochs: another one would cross the threshold, %.4g J, of which %.4g J are spent",
                self.epoch,
                self.settings.cost_thresh_j,
                account.cost_j,
            )
        return False

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.epoch += 1
        self.is_in_epoch = False
        if self.account is not None:
            self.account.end_epoch()

    def end(self) -> None:
        """End the training, however it ended."""
        self.is_in_epoch = False
        if self.profiler is not None:
            self.profiler.close()

    def take_metric(self, metric: float, *, higher_is_better: bool) -> None:
        """Take the metric of this epoch; write the result if it reaches the target."""
        if not self.is_in_epoch:
            raise ZeusBSOOperationOrderError("report the metric inside `for epoch in train_loader.epochs():`")
        if math.isnan(metric):
            return
        target = self.settings.target_metric
        self._metric = metric if math.isfinite(metric) else None
        if metric >= target if higher_is_better else metric <= target:
            self.reached = True
            if self.account is not None:
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

    def measured(self, *, trains: bool = False) -> AbstractContextManager[None]:
        """Count what is done meanwhile, on rank 0; it `trains` in a pass over the training data."""
        if self.account is None:
            return nullcontext()
        return self.account.measured(self._accounted if trains else lambda measured: measured)

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
        if self.account is None:
            raise ZeusBSOBadOperationError("only rank 0 decides")
        return self.account

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


def _synchronize() -> None:
    """Wait for what the device was given to do: its energy belongs to this window."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        torch.cuda.synchronize()


class ZeusDataLoader(DataLoader[T]):
    """A `torch.utils.data.DataLoader` for training, if `max_epochs` is given, or else for evaluation.

    Time and energy are those of the passes over the training and the evaluation data; what is done between them (saving
    a checkpoint, say) is not counted. Only rank 0 measures and writes the result. It measures the devices of its
    machine that the ranks have chosen, or all visible ones where some have not; for several machines, pass a monitor.

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
            self._place = placed(_LoaderRanks(self._rank, self._world_size))
            settings, account = _Settings.of(environ), None
            if self._rank == 0:
                account = _Account(
                    settings,
                    energy.auto(device_indices=self._place.gpus or None)
                    if monitor is None
                    else as_energy_monitor(monitor),
                )
            self._training = _Training(settings, batch_size, max_epochs, account)
            self._set_up_profiler(self._training, devices)
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

        Raises:
            ZeusBSOOperationOrderError: This is an evaluation loader, or its epochs were asked for before.
        """
        training = self._of_training("epochs()")
        training.begin()
        try:
            while decided_by_rank_zero(
                training.goes_on, rank=self._rank, world_size=self._world_size, broadcast=_broadcast
            ):
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
        self._of_training("report_metric()").take_metric(float(metric), higher_is_better=higher_is_better_metric)

    @property
    def reached(self) -> bool:
        """True once the target was reached, as far as this rank knows."""
        return self._training is not None and self._training.reached

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # a generator measures to the end, and to a break
        """The batches, measured; a training loader needs an epoch to be under way."""
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

    def _set_up_profiler(self, training: _Training, devices: Sequence[PowerLimitDevice] | None) -> None:
        steps = training.settings.profile_steps
        if steps is None or (devices is None and not torch.cuda.is_available()):
            return
        controls, gpus = self._place.is_first, self._place.gpus
        monitor = None if training.account is None else training.account.monitor
        if controls and monitor is None:
            monitor = energy.auto(device_indices=gpus or None)
        # For later runs in the same directory of logs.
        path = training.settings.log_dir / f"bs{self._global_batch_size}.power.json" if self._rank == 0 else None
        training.profile_path = path
        training.profiler = PowerLimitProfiler(
            (lambda: find_devices(gpus or None) if devices is None else devices) if controls else None,
            ZeusCost(training.settings.eta),
            warmup_steps=steps[0],
            profile_steps=steps[1],
            monitor=monitor if controls else None,
            profile=None if path is None else PowerLimitProfile.load_if_kept(path),
            batch_size=self._global_batch_size,
            observe=training.settings.is_observed,
            all_gather=None if self._world_size == 1 else _gathered,
            synchronize=_synchronize,
        )

    def _of_training(self, what: str) -> _Training:
        if self._training is None:
            raise ZeusBSOOperationOrderError(f"{what} is a matter of the training loader: the one with max_epochs")
        return self._training


def _broadcast(answer: Any) -> Any:
    answers = [answer]
    distributed.broadcast_object_list(answers, src=0)
    return answers[0]


def _gathered(thing: Any) -> list[Any]:
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, thing)
    return gathered


class _LoaderRanks:
    """The processes of the training, for `placed`."""

    gpu_indices: Sequence[int] = ()  # The loader does not know them.

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = int(environment.LOCAL_RANK.text() or 0)
        self.machine = this_machine()
        known = cuda_devices(torch)
        self.own_gpus: Sequence[str] = () if known is None else known[torch.cuda.current_device() :][:1]

    def all_gather(self, thing: Any) -> list[Any]:
        """Return what each rank passes."""
        return _gathered(thing)


def _ranks(mode: str | None, sampler: Any, *, is_training: bool) -> tuple[int, int]:
    """This rank, and how many there are; raises `ZeusBSOConfigError` if the sampler does not fit."""
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
