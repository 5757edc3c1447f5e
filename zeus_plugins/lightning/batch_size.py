"""The batch size of a Lightning training."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Never

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
    is_rehearsal,
    logged_means,
    logs_now,
    mean_of_ranks,
    missed_validation,
    of_an_instance,
    scale_in_finetuning,
)
from zeus_plugins.training.arguments import TrialOptions
from zeus_plugins.training.batch_size import BatchSizeArguments
from zeus_plugins.training.defaults import check_epochs
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.run import TrialRun, error_of

_logger = logging.getLogger("zeus_plugins")


class ZeusBSOCallback(BatchSizeArguments, Callback):
    """Trains at the batch size that the server chooses, reports each validation, and stops when the server says so.

    The server stops a training at its target (docs/target.md), the value of the metric at which the model is good
    enough to deploy, or earlier if the trial becomes too costly or has used all its epochs.

    During `fit`, the callback sets the batch size of every train loader, whether it comes from a data module, the
    module's `train_dataloader` or an argument of `fit`, and any integer `batch_size` of the data module, the module or
    their hyperparameters. It restores all of them when `fit` ends. Without a validation loop, the callback reports each
    training epoch. Outside `fit`, in a `fast_dev_run` and under a `Tuner`, the callback does nothing.

    A training that resumes from a checkpoint (`fit(ckpt_path=…)`) continues the checkpoint's trial, at its batch size
    and with its costs so far. If the checkpoint has no trial, the script's own batch size is used without reports.
    """

    # The trial's name in a checkpoint. Lightning's default is the name of the class, which a subclass would change. A
    # property would cost time, because Lightning reads the key several times in each step.
    state_key = "zeus_bso"

    _awaits_checkpoint = False
    # Number of epochs that the trainer had trained before the trial began.
    _first_epoch = 0
    _validated_epoch = -1
    # Whether the validation lacked the metric, which is then one of the training epoch.
    _awaits_epoch = False

    def on_init_end(self, *_: Any, **__: Any) -> Never:
        """Refuse a Hugging Face Trainer, the only caller of this hook."""
        raise ZeusBSOConfigError(
            "ZeusBSOCallback is for Lightning: give the Hugging Face Trainer "
            "zeus_plugins.huggingface.ZeusBSOTrainerCallback"
        )

    # Use `setup`, because later hooks run after Lightning has counted the steps of an epoch.
    @of_an_instance
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
        if finders(trainer, "GradientAccumulationScheduler"):
            raise ZeusBSOConfigError(
                "GradientAccumulationScheduler changes the batch size within a training, and a trial has one batch "
                "size: remove it; Trainer(accumulate_grad_batches=…) accumulates in all epochs"
            )
        self._run = TrialRun(self._wish, self._options_for(trainer))
        self._first_epoch = trainer.current_epoch
        self._awaits_checkpoint = continues_checkpoint(trainer)
        if not self._awaits_checkpoint:
            self._check_epochs(trainer)
            self._run.begin(LightningPort(trainer, pl_module))
            self._take_charge(trainer)
            self._follow_loop(trainer, pl_module)

    # Lightning makes optimizers and schedulers after this hook. Its tuners also load checkpoints in the middle of `fit`
    # (see `_awaits_checkpoint`).
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._awaits_checkpoint:
            self._continue(trainer, pl_module, checkpoint["callbacks"].get(self.state_key))

    def state_dict(self) -> dict[str, Any]:
        """Return the trial with its totals and its first epoch, in plain types for a checkpoint."""
        state = self._run.state()
        return {**state, "first_epoch": self._first_epoch} if state else {}

    # Here, optimizers and schedulers exist. A checkpoint later overwrites their rates by rates that are scaled already.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._awaits_checkpoint:  # a checkpoint with only weights, for which Lightning calls no hook
            self._continue(trainer, pl_module, None)
        self._scale_rates(trainer)

    # Only warn, because a module may leave some metrics out of the sanity check.
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn, before an epoch is trained, if the sanity check has not logged the metric."""
        known, run = sorted(trainer.callback_metrics), self._run.active
        is_missing = known and self._metric_name not in known
        if is_missing and run is not None and run.is_reporting and trainer.is_global_zero:
            _logger.warning(
                "monitor=%r is not among the metrics of the sanity check %s: if neither the first validation nor its "
                "epoch logs it, the training ends there",
                *(self._metric_name, known),
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run.active is not None:
            self._run.active.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count the first batches and optimizer steps."""
        if self._run.active is not None:
            self._run.active.steps.batch_trained()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the validation, and stop the trainer when the server says so."""
        if not trainer.sanity_checking:
            self._validated_epoch = trainer.current_epoch
            self._awaits_epoch = not logs_now(trainer, self._metric_name)
            if not self._awaits_epoch:
                self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch if its validation did not; raise an error if a due validation was left out."""
        if self._awaits_epoch or not trainer.enable_validation:
            self._awaits_epoch = False
            if logs_now(trainer, self._metric_name):
                self._report(trainer)
            else:  # Lightning calls the module's hook next, which may log the metric, as for EarlyStopping
                hook = Patches()
                self._run.patches.include(hook)

                def report(_: object) -> None:
                    hook.undo()
                    self._report(trainer)

                hook.extend(pl_module, "on_train_epoch_end", then=report)
            return
        missed = None if self._validated_epoch == trainer.current_epoch else missed_validation(trainer)
        if missed is not None and self._run.active is not None and self._run.active.is_reporting:
            raise ZeusBSOConfigError(
                f"{missed} that the train loader's length announces, so that Lightning left its validation out: let "
                "__len__ of the loader's sampler or data set follow the batch size",
                of_size=True,
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run.active is not None:
            self._run.active.report_last_epoch(trainer.current_epoch - self._first_epoch)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo all changes, end the trial, and raise an error if it failed."""
        if stage == "fit" and self._run.active is not None:
            self._run.finish(early_end=early_end(trainer))
            self._run.raise_failure()

    # Lightning calls no teardown after an exception.
    @of_an_instance
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo all changes and end the trial."""
        self._awaits_checkpoint = False
        self._run.finish(exception)

    def _options_for(self, trainer: Trainer) -> TrialOptions:
        """Return the user's options, without `lr_scaling` if a `LearningRateFinder` finds the rate itself."""
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
        check_epochs(self._wish.said_epochs, limit, "Trainer(max_epochs={})", trained=self._first_epoch)
        every = trainer.check_val_every_n_epoch
        if trainer.enable_validation and every is not None and limit // every * every <= self._first_epoch:
            raise ZeusBSOConfigError(
                f"Trainer(check_val_every_n_epoch={every}) never validates in {limit - self._first_epoch} epochs, so "
                "there would be nothing to report: validate more often"
            )

    def _continue(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any] | None) -> None:
        """Resume from a checkpoint with this state of the callback."""
        self._awaits_checkpoint = False
        if state:
            self._first_epoch = state["first_epoch"]
            self._check_epochs(trainer)
        self._run.resume(LightningPort(trainer, pl_module), lambda: state)
        self._take_charge(trainer)
        self._follow_loop(trainer, pl_module)

    def _take_charge(self, trainer: Trainer) -> None:
        if self._run.active is not None:
            # Check after the hooks of all callbacks and modules, which may change the accumulation when an epoch
            # starts. The next hook, `on_train_batch_start`, would cost time in every step.
            self._run.patches.extend(trainer.fit_loop.epoch_loop, "run", first=self._run.active.check)

    def _scale_rates(self, trainer: Trainer) -> None:
        if self._run.active is not None:
            self._run.active.scale_learning_rate()
            if self._run.lr_factor != 1.0:
                scale_in_finetuning(trainer, self._run.active.unscaled_rates, self._run.patches)

    def _follow_loop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the fit loop run again if the target is missed, or an error ends the run, and it is to be finished."""
        if self._run.active is None or self._run.options.on_failure != "finish":
            return
        loop, strategy = trainer.fit_loop, trainer.strategy
        run_loop, set_up_optimizers = loop.run, strategy.setup_optimizers

        def is_followed(crash: Exception | None) -> bool:
            successor = self._run.finished_by(LightningPort(trainer, pl_module), crash)
            if successor is None:
                return False
            self._run, self._first_epoch = successor, trainer.current_epoch
            self._take_charge(trainer)
            self._follow_loop(trainer, pl_module)
            return True

        def run() -> None:
            if is_followed(error_of(run_loop)):
                self._scale_rates(trainer)
                loop.run()

        # The script's `configure_optimizers` makes the loaders if it asks for the number of steps.
        def set_up(*args: Any) -> None:
            crash = error_of(lambda: set_up_optimizers(*args))
            if crash is not None:
                is_followed(crash)

        self._run.patches.set_attribute(loop, "run", run)
        self._run.patches.set_attribute(strategy, "setup_optimizers", set_up)

    def _report(self, trainer: Trainer) -> None:
        run = self._run.active
        if run is not None and run.is_reporting:
            metric = self._metric(trainer)
            run.watch(logged_means(trainer, run.watched_names))
            run.report_evaluation(lambda: metric, epochs_trained(trainer) - self._first_epoch)

    def _metric(self, trainer: Trainer) -> float:
        if self._metric_name not in trainer.callback_metrics:
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} is not among the logged metrics {sorted(trainer.callback_metrics)}: "
                f"log it with self.log({self._metric_name!r}, …) in validation_step, or name one of these"
            )
        return mean_of_ranks(trainer, trainer.callback_metrics[self._metric_name])
