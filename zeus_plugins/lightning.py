"""Batch size optimization for PyTorch Lightning: hooks only, the counting is `zeus_plugins.session`'s.

Example:
    The whole change to a training script::

        from zeus_plugins import JobSpec
        from zeus_plugins.lightning import ZeusBSOCallback

        job = JobSpec(
            job_id="digits-nightly", job_id_prefix="digits", batch_sizes=[16, 32, 64, 128], default_batch_size=64,
            target_metric=0.95, max_epochs=30,
        )
        Trainer(max_epochs=30, callbacks=[ZeusBSOCallback(job, monitor="val_acc")]).fit(model, datamodule)
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from zeus_plugins import energy
from zeus_plugins.client import BsoClient, client_from_environment
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSOTrainFailError
from zeus_plugins.loaders import BatchSplit, delivered_batch_size, resize_loader, split_batch
from zeus_plugins.lr_scaling import lr_factor, scale_learning_rate
from zeus_plugins.patches import Patches
from zeus_plugins.protocol import JobSpec, ReportResponse
from zeus_plugins.session import TrialInfo, TrialSession

__all__ = ["ZeusBSOCallback"]

T = TypeVar("T")

_logger = logging.getLogger("zeus_plugins")


class ZeusBSOCallback(Callback):
    """Trains with the batch size that the server chooses, reports what it costs, and stops on the server's word.

    The batch size is set for every train loader, however the data was given: a data module, the module's own
    `train_dataloader`, or a loader passed to `fit`. Where the data module, the module or their hyperparameters have an
    integer `batch_size`, it is set too. All of that is taken back when `fit` ends.

    A report follows each validation; without a validation loop, each training epoch. Outside `fit`, in a
    `fast_dev_run` and under a `Tuner`, the callback does nothing.

    Args:
        job: The recurring job. Its batch sizes are global: samples per optimizer step over all devices and accumulated
            batches.
        monitor: Name of the logged metric that `job.target_metric` is about.
        server_url: The batch size optimization server. None: the environment variable ``ZEUS_SERVER_URL``.
        token: The server's access token. None: the environment variable ``ZEUS_BSO_TOKEN``.
        lr_scaling: How the learning rates that the module configures, meant for `job.default_batch_size`, follow the
            batch size.
        energy_monitor: Measures energy and time. None: the best one that this machine offers.
        max_per_device_batch_size: Largest batch that one device holds. Larger global sizes are reached by accumulating
            gradients (`Trainer.accumulate_grad_batches` is raised).
        on_failure: What `fit` does when the trial ended without reaching the target: ``"raise"``
            `ZeusBSOTrainFailError` after all loops, checkpoints and loggers have finished, or just ``"stop"``.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `fit` raises it for a job, trainer or data that cannot work.
    """

    def __init__(
        self,
        job: JobSpec,
        monitor: str,
        *,
        server_url: str | None = None,
        token: str | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        energy_monitor: EnergyMonitor | None = None,
        max_per_device_batch_size: int | None = None,
        on_failure: Literal["raise", "stop"] = "raise",
    ) -> None:
        if on_failure not in ("raise", "stop"):
            raise ZeusBSOConfigError(f"on_failure is {on_failure!r}: choose 'raise' or 'stop'")
        if max_per_device_batch_size is not None and max_per_device_batch_size < 1:
            raise ZeusBSOConfigError(f"max_per_device_batch_size is {max_per_device_batch_size}: it is at least 1")
        self._job = job
        self._metric_name = monitor
        self._server_url = server_url
        self._token = token
        self._lr_scaling = lr_scaling
        self._lr_factors = {
            batch_size: lr_factor(lr_scaling, batch_size, job.default_batch_size) for batch_size in job.batch_sizes
        }
        self._energy_monitor = energy_monitor
        self._max_per_device = max_per_device_batch_size
        self._on_failure = on_failure
        self._patches: Patches | None = None
        self._client: BsoClient | None = None
        self._session: TrialSession | None = None
        self._trial: TrialInfo | None = None

    @property
    def trial(self) -> TrialInfo:
        """The trial of the present or latest `fit`: batch size, trial number, verdict, totals.

        Raises:
            ZeusBSOOperationOrderError: There was no `fit` yet.
        """
        if self._trial is None:
            raise ZeusBSOOperationOrderError("there is no trial before Trainer.fit has begun")
        return self._trial

    # `setup` is the earliest hook that works: later ones come after Lightning has counted the steps of an epoch.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for a batch size and make the train loaders deliver it."""
        if stage != "fit" or _is_rehearsal(trainer):
            return
        self._check_epochs(trainer)
        splits = self._splits(trainer)
        self._patches = Patches()
        self._trial = _decided_by_rank_zero(trainer, lambda: self._begin_trial(trainer))
        if self._trial.batch_size not in splits:
            raise ZeusBSOConfigError(
                f"the server chose batch size {self._trial.batch_size}, which is not one of the job's: "
                f"{list(self._job.batch_sizes)}"
            )
        self._apply(splits[self._trial.batch_size], trainer, pl_module, self._patches)

    # Optimizers and schedulers exist by now.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the learning rate."""
        if self._patches is None:
            return
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scale_learning_rate(trainer.optimizers, schedulers, self._lr_factors[self.trial.batch_size])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the choice, and begin to measure."""
        if self._patches is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(
                {
                    "zeus/batch_size": float(self.trial.batch_size),
                    "zeus/trial_number": float(self.trial.trial_number),
                    "zeus/lr_factor": self._lr_factors[self.trial.batch_size],
                },
                step=trainer.global_step,
            )
        if self._session is not None:
            self._session.begin_measurement()

    # The last hook before a step: other callbacks may change the accumulation when an epoch starts.
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make sure, once per epoch, that the batch size is in force."""
        if self._patches is not None and batch_idx == 0:
            self._check_delivered(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the validation, and stop the trainer when the server says so."""
        if not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch of a training that has no validation loop."""
        if not trainer.enable_validation:
            self._report(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take all changes back; raise when the trial failed."""
        if self._patches is None or stage != "fit":
            return
        self._finish()
        failure = self._failure()
        if failure is not None and self._on_failure == "raise":
            raise ZeusBSOTrainFailError(f"{failure}; launch the training again to try the next batch size")

    # Lightning calls no teardown after an exception, and one raised from here would hide it.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take all changes back and end the trial."""
        try:
            self._finish()
        except Exception:
            _logger.exception("could not clean up after the training failed")

    def _check_epochs(self, trainer: Trainer) -> None:
        limit = trainer.max_epochs
        if limit is not None and 0 <= limit < self._job.max_epochs:
            raise ZeusBSOConfigError(
                f"Trainer(max_epochs={limit}) ends before the job's max_epochs ({self._job.max_epochs}), so the server "
                f"would never learn that a batch size cannot reach the target: set JobSpec(max_epochs={limit}) or "
                f"Trainer(max_epochs={self._job.max_epochs})"
            )

    def _splits(self, trainer: Trainer) -> dict[int, BatchSplit]:
        """How each of the job's sizes is spread, all checked before a trial is spent on one that cannot be."""
        devices, accumulation = trainer.world_size, trainer.accumulate_grad_batches
        splits = {
            batch_size: split_batch(
                batch_size, world_size=devices, accumulation=accumulation, max_per_device=self._max_per_device
            )
            for batch_size in self._job.batch_sizes
        }
        uneven = [batch_size for batch_size, split in splits.items() if split is None]
        if uneven:
            raise ZeusBSOConfigError(
                f"the batch sizes {uneven} cannot be spread evenly over {devices} devices × {accumulation} accumulated "
                "batches: batch sizes are global, samples per optimizer step over all devices; choose multiples of "
                f"{devices * accumulation}"
            )
        return {batch_size: split for batch_size, split in splits.items() if split is not None}

    def _begin_trial(self, trainer: Trainer) -> TrialInfo:
        self._client = client_from_environment(self._server_url, self._token)
        monitor = self._energy_monitor or energy.auto(device_indices=_gpu_indices(trainer))
        self._session = TrialSession(self._job, self._client, monitor)
        self._session.ask()
        return self._session.trial

    def _apply(self, split: BatchSplit, trainer: Trainer, pl_module: LightningModule, patches: Patches) -> None:
        patches.set_attribute(trainer, "accumulate_grad_batches", split.accumulation)
        for holder in (getattr(trainer, "datamodule", None), pl_module):
            _set_batch_size_attributes(holder, split.per_device, patches)
        # Every way to a train loader leads through this method: Lightning's own set-up, the estimate of the number of
        # steps, and the reloading of loaders every n epochs.
        source = trainer.fit_loop._data_source
        original = source.dataloader

        def resized() -> Any:
            loaders = original()
            for loader in _each_loader(loaders):
                resize_loader(loader, split.per_device, patches)
            return loaders

        patches.set_attribute(source, "dataloader", resized)

    def _check_delivered(self, trainer: Trainer) -> None:
        """Never train at another size than the one that is reported."""
        expected, remainder = divmod(self.trial.batch_size, trainer.world_size * trainer.accumulate_grad_batches)
        combined = trainer.fit_loop._combined_loader
        delivered = [] if combined is None else [delivered_batch_size(loader) for loader in combined.flattened]
        if remainder or any(size != expected for size in delivered):
            raise ZeusBSOConfigError(
                f"the train loaders deliver {delivered} samples per batch instead of {expected} (batch size "
                f"{self.trial.batch_size} over {trainer.world_size} devices × {trainer.accumulate_grad_batches} "
                "accumulated batches): something set another size after the callback's setup"
            )

    def _report(self, trainer: Trainer) -> None:
        if self._patches is None or _over(self.trial.verdict):
            return
        metric = self._metric(trainer)
        epochs = _epochs_trained(trainer)
        self._trial = _decided_by_rank_zero(trainer, lambda: self._send_report(metric, epochs))
        if _over(self._trial.verdict):
            trainer.should_stop = True

    def _send_report(self, metric: float, epochs: float) -> TrialInfo:
        if self._session is None:
            raise ZeusBSOOperationOrderError("there is no trial to report on")
        self._session.report(metric, epochs)
        return self._session.trial

    def _metric(self, trainer: Trainer) -> float:
        if self._metric_name not in trainer.callback_metrics:
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} is not among the logged metrics {sorted(trainer.callback_metrics)}: "
                f"log it with self.log({self._metric_name!r}, …) in validation_step, or name one of these"
            )
        metric = trainer.callback_metrics[self._metric_name]
        if trainer.world_size > 1:
            metric = trainer.strategy.reduce(metric, reduce_op="mean")
        return _shortest_decimal(metric)

    def _finish(self) -> None:
        """Undo, and end a trial that has no verdict; nothing the second time."""
        if self._patches is not None:
            self._patches.undo()
            self._patches = None
        if self._session is not None:
            self._session.end()
            self._trial = self._session.trial if self._session.has_trial else self._trial
            self._session = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _failure(self) -> str | None:
        """Why the trial failed, or None when it reached its target."""
        verdict = self.trial.verdict
        if verdict is None or not verdict.stop_train:
            return "the training ended before the target was reached"
        return None if verdict.converged else verdict.message


def _over(verdict: ReportResponse | None) -> bool:
    return verdict is not None and verdict.stop_train


def _is_rehearsal(trainer: Trainer) -> bool:
    """Whether this `fit` is a `fast_dev_run` or a `Tuner`'s trial, and so no recurrence of the job."""
    # Lightning's connectors set these attributes, out of a type checker's sight.
    callbacks = getattr(trainer, "callbacks", ())
    finders = (each for each in callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder)))
    return bool(getattr(trainer, "fast_dev_run", False)) or any(finder._early_exit for finder in finders)


def _decided_by_rank_zero(trainer: Trainer, decide: Callable[[], T]) -> T:
    """Let rank 0 decide, and give every rank its answer or its error; a rank that raised alone would hang the rest."""
    if trainer.world_size == 1:
        return decide()
    outcome: tuple[Any, Exception | None] = (None, None)
    if trainer.is_global_zero:
        try:
            outcome = (decide(), None)
        except Exception as error:
            outcome = (None, error)
    answer, failure = trainer.strategy.broadcast(outcome, src=0)
    if failure is not None:
        raise failure
    return cast("T", answer)


def _each_loader(loaders: Any) -> list[Any]:
    """The loaders in what a user gives: one, a list or dict of them, or those that the user combined."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return combined.flattened


def _set_batch_size_attributes(holder: Any, batch_size: int, patches: Patches) -> None:
    """Set `batch_size` and the hyperparameter of that name, where they are integers that can be set."""
    if holder is None:
        return
    if isinstance(getattr(holder, "batch_size", None), int):
        # A read-only property follows from something else; the loaders are set in any case.
        with contextlib.suppress(AttributeError):
            patches.set_attribute(holder, "batch_size", batch_size)
    hparams = getattr(holder, "hparams", {})
    if isinstance(hparams.get("batch_size"), int):
        patches.set_item(hparams, "batch_size", batch_size)


def _shortest_decimal(metric: Tensor) -> float:
    """The number as people write it: 0.9 in single precision is 0.89999998, below a target of 0.9."""
    return float(str(metric.detach().float().cpu().numpy()))


def _epochs_trained(trainer: Trainer) -> float:
    """Epochs since the training began; within an epoch of unknown length, half of it."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch:
        return trainer.current_epoch + 1
    batches = trainer.num_training_batches
    return trainer.current_epoch + (progress.current.ready / batches if math.isfinite(batches) else 0.5)


def _gpu_indices(trainer: Trainer) -> Sequence[int]:
    """The GPUs that train, as indices into the visible ones; none on another accelerator."""
    return trainer.device_ids if trainer.strategy.root_device.type == "cuda" else ()
