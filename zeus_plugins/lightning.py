"""Batch size optimization and energy for PyTorch Lightning: hooks only, the counting is done in other modules.

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
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from zeus_plugins import energy
from zeus_plugins.adapters import check_options, decided_by_rank_zero, failure, splits_of_job
from zeus_plugins.client import BsoClient, client_from_environment
from zeus_plugins.energy import EnergyMonitor, EpochMeter
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSOTrainFailError
from zeus_plugins.loaders import BatchSplit, delivered_batch_size, resize_loader
from zeus_plugins.lr_scaling import lr_factor, scale_learning_rate
from zeus_plugins.patches import Patches
from zeus_plugins.protocol import JobSpec
from zeus_plugins.session import TrialInfo, TrialSession, end_trial_from_another_rank

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
except ModuleNotFoundError:
    # The same classes under their other name, for those who install only that: distinct types to a type checker.
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    from pytorch_lightning.utilities.combined_loader import CombinedLoader  # type: ignore[assignment]

__all__ = ["ZeusBSOCallback", "ZeusEnergyCallback"]

T = TypeVar("T")

_logger = logging.getLogger("zeus_plugins")


class ZeusBSOCallback(Callback):
    """Trains with the batch size that the server chooses, reports what it costs, and stops on the server's word.

    The batch size is set for every train loader, however the data was given: a data module, the module's own
    `train_dataloader`, or a loader passed to `fit`. Where the data module, the module or their hyperparameters have an
    integer `batch_size`, it is set too. All of that is taken back when `fit` ends.

    A training that continues from a checkpoint (`fit(ckpt_path=…)`) continues its trial: at its batch size, and with
    what it has cost so far. From a checkpoint that was made without this callback it goes on at its own batch size, and
    nothing is reported.

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
        check_options(on_failure=on_failure, max_per_device=max_per_device_batch_size)
        self._job = job
        self._metric_name = monitor
        self._server_url = server_url
        self._token = token
        self._lr_scaling = lr_scaling
        lr_factor(lr_scaling, job.default_batch_size, job.default_batch_size)  # There is such a rule, or it raises.
        self._energy_monitor = energy_monitor
        self._max_per_device = max_per_device_batch_size
        self._on_failure = on_failure
        self._patches: Patches | None = None
        self._client: BsoClient | None = None
        self._session: TrialSession | None = None
        self._trial: TrialInfo | None = None
        self._awaits_checkpoint = False
        # Whether the server takes reports on the trial.
        self._open = False
        # Epochs that the trainer had trained before the trial began.
        self._first_epoch = 0
        self._lr_factor = 1.0

    # The default follows the name of the class: renaming it would lose the trials of all checkpoints.
    @property
    def state_key(self) -> str:
        """The name of the trial in a checkpoint."""
        return "zeus_bso"

    @property
    def trial(self) -> TrialInfo:
        """The trial of the present or latest `fit`: batch size, trial number, verdict, totals.

        Raises:
            ZeusBSOOperationOrderError: There was no `fit` yet, it continued a checkpoint without a trial, or it ran in
                processes that have ended (strategy ``ddp_spawn``).
        """
        if self._trial is None:
            raise ZeusBSOOperationOrderError(
                "there is no trial before Trainer.fit has begun, after it has run in spawned processes, or when it "
                "continues a checkpoint that holds no trial"
            )
        return self._trial

    # `setup` is the earliest hook that works: later ones come after Lightning has counted the steps of an epoch.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for a batch size and make the train loaders deliver it."""
        if stage != "fit" or _is_rehearsal(trainer):
            return
        _refuse_batch_size_finder(trainer)
        self._trial, self._open = None, False
        self._first_epoch = trainer.current_epoch
        self._patches = Patches()
        self._awaits_checkpoint = _continues_checkpoint(trainer)
        if self._awaits_checkpoint:
            _refuse_late_checkpoint(trainer)
            return
        self._check_epochs(trainer)
        # Before a trial is spent on a size that cannot be.
        self._splits(self._job, trainer, pl_module)
        self._trial = _decided_by_rank_zero(trainer, lambda: self._begin_trial(trainer))
        self._open = True
        if self._trial.batch_size not in self._job.batch_sizes:
            raise ZeusBSOConfigError(
                f"the server chose batch size {self._trial.batch_size}, which is not one of the job's: "
                f"{list(self._job.batch_sizes)}"
            )
        self._apply(trainer, pl_module, self._patches)

    # Optimizers and schedulers are made after this. Lightning's own tools load checkpoints too, in the midst of a fit.
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue the checkpoint's trial."""
        if self._patches is None or not self._awaits_checkpoint:
            return
        self._awaits_checkpoint = False
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            self._stay_out(trainer)
            return
        self._first_epoch = state["first_epoch"]
        self._check_epochs(trainer)
        # Before the trial runs again, so that it may still go on elsewhere.
        self._split(state["trial"]["batch_size"], trainer, pl_module)
        self._trial, self._open = _decided_by_rank_zero(trainer, lambda: self._resume_trial(trainer, state["trial"]))
        self._apply(trainer, pl_module, self._patches)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain types: the trial with its totals, and where it began."""
        if self._session is not None and self._session.has_trial:
            self._session.state_dict()  # Closes the open window into the totals.
            self._trial = self._session.trial
        if self._trial is None:
            return {}
        return {"trial": self._trial.model_dump(mode="json"), "first_epoch": self._first_epoch}

    # Optimizers and schedulers exist by now. What a checkpoint says of them comes later and stands.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the learning rate."""
        if self._patches is None:
            return
        if self._awaits_checkpoint:  # A checkpoint with weights alone has no part for callbacks.
            self._stay_out(trainer)
            return
        self._lr_factor = self._chosen_lr_factor(trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        scale_learning_rate(trainer.optimizers, schedulers, self._lr_factor)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the choice, and begin to measure."""
        if self._patches is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(
                {
                    "zeus/batch_size": float(self.trial.batch_size),
                    "zeus/trial_number": float(self.trial.trial_number),
                    "zeus/lr_factor": self._lr_factor,
                },
                step=trainer.global_step,
            )
        if self._session is not None and self._open:
            self._session.begin_measurement()

    # The last hook before a step: other callbacks may change the accumulation when an epoch starts.
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Make sure, once per epoch, that the batch size is in force."""
        if self._patches is not None and batch_idx == 0:
            self._check_delivered(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the validation, and stop the trainer when the server says so."""
        if not trainer.sanity_checking:
            self._report_metric(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch of a training that has no validation loop."""
        if not trainer.enable_validation:
            self._report_metric(trainer)

    # Lightning need not validate after the last epoch, but the server must hear that no more are allowed.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the end of a training whose last validation was earlier."""
        if self._patches is None or not self._open or self.trial.is_over or self.trial.metric is None:
            return
        epochs = trainer.current_epoch - self._first_epoch
        if epochs >= self._job.max_epochs and epochs > (self.trial.epoch or 0):
            self._report(trainer, self.trial.metric, epochs)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take all changes back; raise when the trial failed."""
        if self._patches is None or stage != "fit":
            return
        self._finish()
        reason = failure(self.trial.verdict) if self._open else None
        if reason is not None and self._on_failure == "raise":
            raise ZeusBSOTrainFailError(f"{reason}; launch the training again to try the next batch size")

    # Lightning calls no teardown after an exception, and one raised from here would hide it.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take all changes back and end the trial."""
        try:
            self._finish(exception)
        except Exception:
            _logger.exception("could not clean up after the training failed")

    def _check_epochs(self, trainer: Trainer) -> None:
        limit = trainer.max_epochs
        if limit is None or limit < 0:
            return
        first, needed = self._first_epoch, self._job.max_epochs
        if limit - first < needed:
            already = f" after the {first} epochs that this trainer has trained already" if first else ""
            raise ZeusBSOConfigError(
                f"Trainer(max_epochs={limit}) ends before the job's max_epochs ({needed}){already}, so the server "
                "would never learn that a batch size cannot reach the target: "
                + (
                    "make a new Trainer for each training"
                    if first
                    else f"set JobSpec(max_epochs={limit}) or Trainer(max_epochs={needed})"
                )
            )
        every = trainer.check_val_every_n_epoch
        if trainer.enable_validation and every is not None and limit // every * every <= first:
            raise ZeusBSOConfigError(
                f"Trainer(check_val_every_n_epoch={every}) never validates in {limit - first} epochs, so there would "
                "be nothing to report: validate more often"
            )

    def _splits(self, job: JobSpec, trainer: Trainer, pl_module: LightningModule) -> dict[int, BatchSplit]:
        devices, accumulation = trainer.world_size, trainer.accumulate_grad_batches
        splits = splits_of_job(job, devices=devices, accumulation=accumulation, max_per_device=self._max_per_device)
        if not pl_module.automatic_optimization and any(split.accumulation > 1 for split in splits.values()):
            raise ZeusBSOConfigError(
                f"with manual optimization Lightning accumulates no gradients, so sizes above "
                f"max_per_device_batch_size={self._max_per_device} × {devices} devices cannot be reached: raise it, or "
                "drop those batch sizes from the job"
            )
        return splits

    # A checkpoint's trial may have a size that the job no longer has.
    def _split(self, batch_size: int, trainer: Trainer, pl_module: LightningModule) -> BatchSplit:
        job = self._job.model_copy(update={"batch_sizes": (batch_size,)})
        return self._splits(job, trainer, pl_module)[batch_size]

    def _new_session(self, trainer: Trainer) -> TrialSession:
        self._client = client_from_environment(self._server_url, self._token)
        monitor = self._energy_monitor or energy.auto(device_indices=_gpu_indices(trainer))
        self._session = TrialSession(self._job, self._client, monitor)
        return self._session

    def _begin_trial(self, trainer: Trainer) -> TrialInfo:
        session = self._new_session(trainer)
        session.ask()
        return session.trial

    def _resume_trial(self, trainer: Trainer, state: dict[str, Any]) -> tuple[TrialInfo, bool]:
        session = self._new_session(trainer)
        goes_on = session.resume(state)
        return session.trial, goes_on

    def _stay_out(self, trainer: Trainer) -> None:
        self._awaits_checkpoint = False
        self._patches = None
        _say(
            trainer,
            logging.WARNING,
            "the checkpoint holds no trial, so this training goes on with its own batch size, and nothing of it is "
            "measured or reported: the rest of a training says nothing about a whole one. Train from the start to let "
            "the server choose",
        )

    def _chosen_lr_factor(self, trainer: Trainer) -> float:
        if self._lr_scaling != "none" and any(_finders(trainer, "LearningRateFinder")):
            _say(
                trainer,
                logging.INFO,
                f"lr_scaling={str(self._lr_scaling)!r} is left out: LearningRateFinder finds the learning rate for the "
                "batch size in force",
            )
            return 1.0
        return lr_factor(self._lr_scaling, self.trial.batch_size, self._job.default_batch_size)

    def _apply(self, trainer: Trainer, pl_module: LightningModule, patches: Patches) -> None:
        split = self._split(self.trial.batch_size, trainer, pl_module)
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

    def _report_metric(self, trainer: Trainer) -> None:
        if self._patches is not None and self._open and not self.trial.is_over:
            self._report(trainer, self._metric(trainer), _epochs_trained(trainer) - self._first_epoch)

    def _report(self, trainer: Trainer, metric: float, epochs: float) -> None:
        self._trial = _decided_by_rank_zero(trainer, lambda: self._send_report(metric, epochs))
        if self._trial.is_over:
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

    def _finish(self, error: BaseException | None = None) -> None:
        """Undo, and end a trial that has no verdict; nothing the second time."""
        if self._patches is None:
            return
        self._patches.undo()
        self._patches = None
        if self._session is not None:
            self._session.end(error)
            self._trial = self._session.trial if self._session.has_trial else self._trial
            self._session = None
        elif self._open and error is not None:
            with client_from_environment(self._server_url, self._token) as client:
                end_trial_from_another_rank(client, self._trial, error)
        if self._client is not None:
            self._client.close()
            self._client = None


class ZeusEnergyCallback(Callback):
    """Logs the time and energy of each epoch and of the training so far to the trainer's loggers; needs no server.

    The metrics are ``zeus/epoch_time_s``, ``zeus/epoch_energy_j``, ``zeus/time_s`` and ``zeus/energy_j``, in seconds
    and joules, validation included. Rank 0 measures the devices of its machine. A training that continues from a
    checkpoint continues its totals.

    Args:
        energy_monitor: Measures energy and time. None: the best one that this machine offers.
    """

    def __init__(self, energy_monitor: EnergyMonitor | None = None) -> None:
        self._energy_monitor = energy_monitor
        self._meter: EpochMeter | None = None
        self._totals: dict[str, float] = {}

    @property
    def state_key(self) -> str:
        """The name of the totals in a checkpoint."""
        return "zeus_energy"

    @property
    def time_s(self) -> float:
        """Seconds of all epochs of the present or latest training; 0 on other ranks than 0."""
        return self._totals.get("time_s", 0.0)

    @property
    def energy_j(self) -> float:
        """Joules of the same epochs."""
        return self._totals.get("energy_j", 0.0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin the totals anew."""
        if stage == "fit" and not _is_rehearsal(trainer):
            self._totals = {}

    def state_dict(self) -> dict[str, Any]:
        """The totals."""
        return dict(self._totals)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's totals."""
        self._totals = dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure."""
        if not trainer.is_global_zero or _is_rehearsal(trainer):
            return
        monitor = self._energy_monitor or energy.auto(device_indices=_gpu_indices(trainer))
        self._meter = EpochMeter(monitor, self._totals)
        self._meter.begin()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch."""
        if self._meter is None:
            return
        metrics = self._meter.end_epoch()
        self._totals = self._meter.totals
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop measuring."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop measuring."""
        self._end()

    def _end(self) -> None:
        if self._meter is not None:
            self._meter.end()
            self._meter = None


def _say(trainer: Trainer, level: int, message: str) -> None:
    if trainer.is_global_zero:
        _logger.log(level, message)


def _is_rehearsal(trainer: Trainer) -> bool:
    """Whether this `fit` is a `fast_dev_run` or a `Tuner`'s trial, and so no recurrence of the job."""
    # Lightning's connectors set this attribute, out of a type checker's sight.
    finders = _finders(trainer, "BatchSizeFinder", "LearningRateFinder")
    return bool(getattr(trainer, "fast_dev_run", False)) or any(finder._early_exit for finder in finders)


def _finders(trainer: Trainer, *kinds: str) -> list[Any]:
    """The trainer's callbacks of these kinds, of whichever of Lightning's two packages."""
    callbacks = getattr(trainer, "callbacks", ())
    return [each for each in callbacks if any(kind.__name__ in kinds for kind in type(each).__mro__)]


def _refuse_batch_size_finder(trainer: Trainer) -> None:
    if _finders(trainer, "BatchSizeFinder"):
        raise ZeusBSOConfigError(
            "BatchSizeFinder and ZeusBSOCallback both set the batch size: remove BatchSizeFinder, and give the largest "
            "size that a device holds as max_per_device_batch_size (Tuner.scale_batch_size finds it before fit)"
        )


def _continues_checkpoint(trainer: Trainer) -> bool:
    """Whether this `fit` loads a checkpoint later on.

    When callbacks are set up Lightning has said so to nobody: only its own running call knows.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            return frame.f_locals.get("ckpt_path") is not None
        frame = cast("Any", frame.f_back)
    return False


def _refuse_late_checkpoint(trainer: Trainer) -> None:
    if trainer.strategy.restore_checkpoint_after_setup:
        raise ZeusBSOConfigError(
            f"{type(trainer.strategy).__name__} loads checkpoints when it is too late to set the trial's batch size: "
            "train from the start, or with another strategy"
        )


def _decided_by_rank_zero(trainer: Trainer, decide: Callable[[], T]) -> T:
    return decided_by_rank_zero(
        decide,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        broadcast=lambda outcome: trainer.strategy.broadcast(outcome, src=0),
    )


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
