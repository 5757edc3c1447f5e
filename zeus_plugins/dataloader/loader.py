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

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from zeus_plugins import energy
from zeus_plugins.dataloader.settings import Settings
from zeus_plugins.dataloader.training import Training, synchronize
from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.energy.visible import cuda_devices
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.power_limit import PowerLimitDevice, PowerLimitProfile, PowerLimitProfiler, ZeusCost, find_devices
from zeus_plugins.training import environment
from zeus_plugins.training.placement import placed, this_machine
from zeus_plugins.training.port import decided_by_rank_zero

T = TypeVar("T")


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
        self._training: Training | None = None
        self._of: weakref.ref[ZeusDataLoader[Any]] | None = None
        if max_epochs is not None:
            if train_loader is not None:
                raise ZeusBSOConfigError("a loader with max_epochs trains: leave out either max_epochs or train_loader")
            self._place = placed(_LoaderRanks(self._rank, self._world_size))
            self._training = Training(
                Settings.of(environ), batch_size, max_epochs, monitor, is_main=self._rank == 0, gpus=self._place.gpus
            )
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

    def _set_up_profiler(self, training: Training, devices: Sequence[PowerLimitDevice] | None) -> None:
        steps = training.settings.profile_steps
        if steps is None or (devices is None and not torch.cuda.is_available()):
            return
        controls, gpus = self._place.is_first, self._place.gpus
        # For later runs in the same directory of logs.
        path = training.settings.log_dir / f"bs{self._global_batch_size}.power.json" if self._rank == 0 else None
        training.profile_path = path
        training.profiler = PowerLimitProfiler(
            (lambda: find_devices(gpus or None) if devices is None else devices) if controls else None,
            ZeusCost(training.settings.eta),
            warmup_steps=steps[0],
            profile_steps=steps[1],
            monitor=(training.monitor or energy.auto(device_indices=gpus or None)) if controls else None,
            profile=None if path is None else PowerLimitProfile.load_if_kept(path),
            batch_size=self._global_batch_size,
            observe=training.settings.is_observed,
            all_gather=None if self._world_size == 1 else _gathered,
            synchronize=synchronize,
        )

    def _of_training(self, what: str) -> Training:
        if self._training is None:
            raise ZeusBSOOperationOrderError(f"{what} is a matter of the training loader: the one with max_epochs")
        return self._training

    def _decided(self, decide: Callable[[], bool]) -> bool:
        def broadcast(answer: Any) -> Any:
            answers = [answer]
            distributed.broadcast_object_list(answers, src=0)
            return answers[0]

        return decided_by_rank_zero(decide, rank=self._rank, world_size=self._world_size, broadcast=broadcast)


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
