"""The batch size of a Lightning training."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from zeus_plugins.client.http import BsoClient, client_from_environment
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSOTrainFailError
from zeus_plugins.lightning._trainer import (
    STEP_HOOKS,
    Callback,
    CombinedLoader,
    LightningModule,
    Trainer,
    cluster_of,
    finders,
    is_rehearsal,
    node_monitor,
)
from zeus_plugins.protocol import JobSpec, PowerLimitChoice
from zeus_plugins.training.adapters import check_options, decided_by_rank_zero, failure, splits_of_job
from zeus_plugins.training.loaders import BatchSplit, delivered_batch_size, resize_loader
from zeus_plugins.training.lr_scaling import lr_factor, scale_learning_rate
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.session import (
    OnUnreachable,
    TrialInfo,
    TrialSession,
    check_on_unreachable,
    end_trial_from_another_rank,
)

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
        server_url: The batch size optimization server. None: the environment variable ``ZEUS_SERVER_URL``, and without
            that one a server in this process, on a SQLite file (needs the extra ``server``).
        token: The server's access token. None: the environment variable ``ZEUS_BSO_TOKEN``.
        lr_scaling: How the learning rates that the module configures, meant for `job.default_batch_size`, follow the
            batch size.
        energy_monitor: Measures energy and time; one that measures as Zeus's `ZeusMonitor` does will do. None: the best
            one that this machine offers.
        max_per_device_batch_size: Largest batch that one device holds. Larger global sizes are reached by accumulating
            gradients (`Trainer.accumulate_grad_batches` is raised).
        on_failure: What `fit` does when the trial ended without reaching the target: ``"raise"``
            `ZeusBSOTrainFailError` after all loops, checkpoints and loggers have finished, or just ``"stop"``.
        on_unreachable: What `fit` does when it begins while the server is away: ``"default"``, train with
            `job.default_batch_size` and have that trial recorded later; ``"raise"``, nothing. A server that goes away
            later never ends a training.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `fit` raises it for a job, trainer or data that cannot work.
    """

    # The name of the trial in a checkpoint. The default follows the name of the class: renaming it would lose the
    # trials of all checkpoints. No property, for Lightning asks for it several times in each step.
    state_key = "zeus_bso"

    def __init__(
        self,
        job: JobSpec,
        monitor: str,
        *,
        server_url: str | None = None,
        token: str | None = None,
        lr_scaling: Literal["none", "linear", "sqrt"] = "none",
        energy_monitor: EnergyMonitor | WindowMonitor | None = None,
        max_per_device_batch_size: int | None = None,
        on_failure: Literal["raise", "stop"] = "raise",
        on_unreachable: OnUnreachable = "default",
    ) -> None:
        check_options(on_failure=on_failure, max_per_device=max_per_device_batch_size)
        check_on_unreachable(on_unreachable)
        self._job = job
        self._metric_name = monitor
        self._server_url = server_url
        self._token = token
        self._lr_scaling = lr_scaling
        lr_factor(lr_scaling, job.default_batch_size, job.default_batch_size)  # There is such a rule, or it raises.
        self._energy_monitor = energy_monitor
        self._max_per_device = max_per_device_batch_size
        self._on_failure = on_failure
        self._on_unreachable = on_unreachable
        self._patches: Patches | None = None
        self._client: BsoClient | None = None
        self._session: TrialSession | None = None
        self._cluster: ClusterMonitor | None = None
        self._trial: TrialInfo | None = None
        self._awaits_checkpoint = False
        # Whether the server takes reports on the trial.
        self._open = False
        # Epochs that the trainer had trained before the trial began.
        self._first_epoch = 0
        self._lr_factor = 1.0

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

    @property
    def has_trial(self) -> bool:
        """Whether there is one."""
        return self._trial is not None

    # `setup` is the earliest hook that works: later ones come after Lightning has counted the steps of an epoch.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for a batch size and make the train loaders deliver it."""
        if stage != "fit" or is_rehearsal(trainer):
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
        self._cluster = cluster_of(trainer, self._energy_monitor)
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
        self._cluster = cluster_of(trainer, self._energy_monitor)
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
                    "zeus/trial_number": float(self.trial.trial_number or 0),
                    "zeus/lr_factor": self._lr_factor,
                },
                step=trainer.global_step,
            )
        if self._cluster is not None:
            self._cluster.synchronize()
        if self._session is not None and self._open:
            self._session.begin_measurement()

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

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have the server keep what a power-limit callback found out; called on rank 0.

        Args:
            choice: What it found out.
        """
        if self._session is not None and self._open:
            self._session.keep_power_limits(choice)

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
        monitor = self._cluster or node_monitor(trainer, self._energy_monitor)
        self._session = TrialSession(self._job, self._client, monitor, on_unreachable=self._on_unreachable)
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
        if self._lr_scaling != "none" and any(finders(trainer, "LearningRateFinder")):
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
        # Callbacks and modules may change the accumulation when an epoch starts, and the only hook that follows them
        # all, `on_train_batch_start`, costs something in every step.
        epoch_loop = trainer.fit_loop.epoch_loop
        run_epoch = epoch_loop.run

        def run_checked(*args: Any) -> None:
            self._check_delivered(trainer)
            run_epoch(*args)

        patches.set_attribute(epoch_loop, "run", run_checked)
        for hook in STEP_HOOKS:
            if getattr(type(self), hook) is getattr(Callback, hook):  # not one of a subclass of the user's
                patches.set_attribute(self, hook, None)

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
        if self._cluster is not None:
            self._cluster.synchronize()
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
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _say(trainer: Trainer, level: int, message: str) -> None:
    if trainer.is_global_zero:
        _logger.log(level, message)


def _refuse_batch_size_finder(trainer: Trainer) -> None:
    if finders(trainer, "BatchSizeFinder"):
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
