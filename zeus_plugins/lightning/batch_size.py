"""The batch size of a Lightning training."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.lightning._trainer import (
    Callback,
    LightningModule,
    LightningPort,
    Trainer,
    continues_checkpoint,
    early_end,
    epochs_trained,
    finders,
    hide_step_hooks,
    is_rehearsal,
    mean_of_ranks,
)
from zeus_plugins.training.defaults import check_epochs
from zeus_plugins.training.run import BatchSizeArguments, TrialOptions, TrialRun

_logger = logging.getLogger("zeus_plugins")


class ZeusBSOCallback(BatchSizeArguments, Callback):
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
        job: The recurring job, or its fields in a mapping. Its batch sizes are global: samples per optimizer step over
            all devices and accumulated batches. None: `target` is enough, and the rest is read from the training;
            docs/reference.md says how.
        monitor: Name of the logged metric that `job.target_metric` is about.
        target: Value of the metric at which the training is done; in place of a job.
        job_id: The job's id, in place of one that is made of the script's name, the model's class, the data's length
            and the GPUs.
        higher_is_better_metric: Whether the metric rises as the model improves; None: its name tells.
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
        strict: Whether it is an error, and not a warning, that earlier trainings of the job had another model,
            framework or optimizer.
        quiet: Whether to leave out the lines that tell of the trial at its begin and end.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `fit` raises it for a job, trainer or data that cannot work.
    """

    # The name of the trial in a checkpoint. The default follows the name of the class: renaming it would lose the
    # trials of all checkpoints. No property, for Lightning asks for it several times in each step.
    state_key = "zeus_bso"

    _awaits_checkpoint = False
    # Epochs that the trainer had trained before the trial began.
    _first_epoch = 0

    # `setup` is the earliest hook that works: later ones come after Lightning has counted the steps of an epoch.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for a batch size and make the train loaders deliver it."""
        if stage != "fit" or is_rehearsal(trainer):
            return
        if finders(trainer, "BatchSizeFinder"):
            raise ZeusBSOConfigError(
                "BatchSizeFinder and ZeusBSOCallback both set the batch size: remove BatchSizeFinder, and give the "
                "largest size that a device holds as max_per_device_batch_size (Tuner.scale_batch_size finds it before "
                "fit)"
            )
        self._run = TrialRun(self._wish, self._options_for(trainer))
        self._first_epoch = trainer.current_epoch
        self._awaits_checkpoint = continues_checkpoint(trainer)
        if not self._awaits_checkpoint:
            self._check_epochs(trainer)
            self._run.begin(LightningPort(trainer, pl_module))
            self._take_charge(trainer)

    # Optimizers and schedulers are made after this. Lightning's own tools load checkpoints too, in the midst of a fit.
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue the checkpoint's trial."""
        if self._awaits_checkpoint:
            self._continue(trainer, pl_module, checkpoint["callbacks"].get(self.state_key))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain types: the trial with its totals, and its first epoch."""
        state = self._run.state()
        return {**state, "first_epoch": self._first_epoch} if state else {}

    # Optimizers and schedulers exist by now. What a checkpoint says of them comes later and stands.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the learning rate."""
        if self._awaits_checkpoint:  # A checkpoint with weights alone has no part for callbacks.
            self._continue(trainer, pl_module, None)
        if self._run.active is not None:
            self._run.active.scale_learning_rate()

    # A module may leave some metrics out of the sanity check, so that this is no error yet.
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn of a metric that the sanity check has not logged, before an epoch is trained."""
        known, run = sorted(trainer.callback_metrics), self._run.active
        is_missing = known and self._metric_name not in known
        if is_missing and run is not None and run.is_reporting and trainer.is_global_zero:
            _logger.warning(
                "monitor=%r is not among the metrics of the sanity check %s: if the first validation does not log it "
                "either, the training ends there",
                *(self._metric_name, known),
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the choice, and begin to measure."""
        if self._run.active is not None:
            self._run.active.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the first batches and optimizer steps."""
        if self._run.active is None:
            return
        steps = self._run.active.steps
        steps.batch_trained()
        if not steps.is_counting and type(self).on_train_batch_end is ZeusBSOCallback.on_train_batch_end:
            self._run.patches.set_attribute(self, "on_train_batch_end", None)  # nothing is left to do in a step

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the validation, and stop the trainer when the server says so."""
        if not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch of a training that has no validation loop."""
        if not trainer.enable_validation:
            self._report(trainer)

    # Lightning need not validate after the last epoch.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the end of a training whose last validation was earlier."""
        if self._run.active is not None:
            self._run.active.report_last_epoch(trainer.current_epoch - self._first_epoch)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take all changes back; raise when the trial failed."""
        if stage == "fit" and self._run.active is not None:
            self._run.finish(early_end=early_end(trainer))
            self._run.raise_failure()

    # Lightning calls no teardown after an exception.
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take all changes back and end the trial."""
        self._awaits_checkpoint = False
        self._run.finish(exception)

    def _options_for(self, trainer: Trainer) -> TrialOptions:
        """The user's options, but for the scaling of a rate that is found for the size in force."""
        if self._options.lr_scaling == "none" or not finders(trainer, "LearningRateFinder"):
            return self._options
        if trainer.is_global_zero:
            _logger.info(
                "lr_scaling=%r is left out: LearningRateFinder finds the learning rate for the batch size in force",
                str(self._options.lr_scaling),
            )
        return replace(self._options, lr_scaling="none")

    def _check_epochs(self, trainer: Trainer) -> None:
        limit = trainer.max_epochs
        if limit is None or limit < 0:
            return
        check_epochs(self._wish.job, limit, "Trainer(max_epochs={})", trained=self._first_epoch)
        every = trainer.check_val_every_n_epoch
        if trainer.enable_validation and every is not None and limit // every * every <= self._first_epoch:
            raise ZeusBSOConfigError(
                f"Trainer(check_val_every_n_epoch={every}) never validates in {limit - self._first_epoch} epochs, so "
                "there would be nothing to report: validate more often"
            )

    def _continue(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint that holds this of ours."""
        self._awaits_checkpoint = False
        if state:
            self._first_epoch = state["first_epoch"]
            self._check_epochs(trainer)
        self._run.resume(LightningPort(trainer, pl_module), lambda: state)
        self._take_charge(trainer)

    def _take_charge(self, trainer: Trainer) -> None:
        if self._run.active is not None:
            # Callbacks and modules may change the accumulation when an epoch starts, and the only hook that follows
            # them all, `on_train_batch_start`, costs something in every step.
            self._run.patches.extend(trainer.fit_loop.epoch_loop, "run", first=self._run.active.check)
            hide_step_hooks(self, self._run.patches)

    def _report(self, trainer: Trainer) -> None:
        run = self._run.active
        if run is not None and run.is_reporting:
            metric = self._metric(trainer)
            run.report_evaluation(lambda: metric, epochs_trained(trainer) - self._first_epoch)

    def _metric(self, trainer: Trainer) -> float:
        if self._metric_name not in trainer.callback_metrics:
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} is not among the logged metrics {sorted(trainer.callback_metrics)}: "
                f"log it with self.log({self._metric_name!r}, …) in validation_step, or name one of these"
            )
        return mean_of_ranks(trainer, trainer.callback_metrics[self._metric_name])
