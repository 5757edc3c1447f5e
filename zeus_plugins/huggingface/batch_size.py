"""The batch size of a Hugging Face training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Never, cast

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.huggingface._trainer import (
    HuggingFacePort,
    TrainWrapper,
    can_find_size,
    checkpoint_of,
    checkpointed,
    early_end,
    from_start,
    not_attached,
    saved_in_checkpoint,
    warn_of_in_batch_negatives,
)
from zeus_plugins.signals import raise_at_sigterm
from zeus_plugins.training.batch_size import BatchSizeArguments
from zeus_plugins.training.defaults import check_epochs
from zeus_plugins.training.metrics import (
    EVALUATION_PREFIX,
    TRAINING_METRICS,
    EvaluationMetric,
    LoggedMetric,
    check_evaluated_metric,
    value_in,
)
from zeus_plugins.training.outcomes import is_out_of_memory, release_memory
from zeus_plugins.training.run import ActiveRun, TrialRun

_STATE_KEY = "zeus_bso"


class ZeusBSOTrainerCallback(BatchSizeArguments, TrainWrapper):
    """Trains at the batch size that the server chooses, reports each evaluation, and stops when the server says so.

    The server stops a training at its target (docs/target.md), the value of the metric at which the model is good
    enough to deploy, or earlier if the trial becomes too costly or has used all its epochs.

    Pass the callback in the trainer's `callbacks`, or call `attach` for an existing trainer. `Trainer.train` then asks
    for a batch size, which replaces the size in `per_device_train_batch_size` and `get_train_dataloader`, and restores
    all settings when it ends. With ``eval_strategy="no"``, the callback reports each epoch or, for a metric ``eval_…``,
    each `evaluate` that the script calls within the training. Evaluations and predictions outside `train` have no
    trial.

    Each call of `train` is a trial. A call that resumes from a checkpoint continues the checkpoint's trial. If the
    checkpoint has no trial, or if an earlier trial of the job has trained the model, the callback does nothing.
    """

    _OWNER = "zeus_bso_owner"

    # State of the running training.
    _port: HuggingFacePort | None = None
    _metric: EvaluationMetric | LoggedMetric | None = None
    _has_fractions = False

    def setup(self, *_: Any, **__: Any) -> Never:
        """Refuse Lightning's Trainer, the only caller of this hook."""
        raise ZeusBSOConfigError(
            "ZeusBSOTrainerCallback is for the Hugging Face Trainer: give Lightning's "
            "zeus_plugins.lightning.ZeusBSOCallback"
        )

    # Lightning reads these two attributes while it calls `setup`, and would raise its own errors without them.
    on_exception, state_key = setup, "zeus_bso"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer is None:
            raise not_attached()
        if (run := self._run_of(state, control)) is not None:
            self._keep_state(state)
            run.start()

    # The loader exists here, and other callbacks may have changed the accumulation in `on_train_begin`.
    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if (run := self._run_of(state, control)) is not None:
            run.check()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the first batches and optimizer steps."""
        if (run := self._run_of(state, control)) is not None:
            run.steps.batch_trained()

    on_substep_end = on_step_end

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kw: Any,
    ) -> None:
        """Report the evaluation, and stop the trainer when the server says so."""
        run, source, found = self._run_of(state, control), self._metric, metrics or {}
        # Skip an evaluation before the first step, and the script's own evaluations, which have other prefixes.
        if (
            self._trainer is None
            or run is None
            or not isinstance(source, EvaluationMetric)
            or state.global_step == 0
            or not source.is_evaluation(found)
        ):
            return
        data = self._trainer.eval_dataset
        data_sets = len(data) if isinstance(data, dict) else 1
        self._watch(run, found)
        # Wait, because watched metrics may come with other data sets of this evaluation.
        waits = bool(run.watched_names)
        self._report(run, lambda: source.value(found, step=state.global_step, data_sets=data_sets, waits=waits))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kw: Any,
    ) -> None:
        """Note the logged metrics; without evaluations, report the monitored metric."""
        run, source, logs = self._run_of(state, control), self._metric, logs or {}
        if run is None:
            return
        # Ignore an evaluation before the first step, because the model is untrained.
        if state.global_step > 0:
            self._watch(run, logs)
        if isinstance(source, EvaluationMetric):
            source.note(logs)
        elif source is not None and source.note(logs, step=state.global_step):
            self._report(run, source.value)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the epoch of a training without evaluations."""
        run, source = self._run_of(state, control), self._metric
        if run is None or not isinstance(source, LoggedMetric):
            return
        if source.awaits_log(step=state.global_step):
            control.should_log = True
        else:
            self._report(run, source.value)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if (run := self._run_of(state, control)) is not None:
            run.report_last_epoch(self._epochs(run))

    def _train(self, trainer: Trainer, train: functools.partial[Any]) -> Any:
        checkpoint = checkpoint_of(*train.args, **train.keywords)
        finds_size = trainer.args.auto_find_batch_size and checkpoint in (None, False) and can_find_size(trainer)
        too_large: int | None = None
        while True:
            try:
                return self._train_trial(trainer, train, checkpoint, too_large)
            except Exception as error:
                is_first_step = self.has_trial and trainer.state.global_step == 0
                if not (finds_size and is_first_step and is_out_of_memory(error)):
                    raise
                if too_large is not None and self.trial.batch_size >= too_large:
                    raise
                too_large = self.trial.batch_size
                release_memory(error)
                vars(trainer)["model_wrapped"] = trainer.model
            HuggingFacePort(trainer).say(
                f"zeus: batch size {too_large} ran out of memory: auto_find_batch_size asks for a smaller one"
            )

    def _train_trial(
        self, trainer: Trainer, train: functools.partial[Any], checkpoint: str | bool | None, too_large: int | None
    ) -> Any:
        """Train one trial, and the trial that finishes its run.

        Raises:
            MemoryError: The trial's batch size is not smaller than `too_large`.
        """
        self._check(trainer)
        warn_of_in_batch_negatives(trainer)
        is_evaluated = trainer.args.eval_strategy != "no" or self._metric_name.startswith(EVALUATION_PREFIX)
        self._has_fractions = is_evaluated and trainer.args.eval_strategy != "epoch"
        self._metric = EvaluationMetric(self._metric_name) if is_evaluated else LoggedMetric(self._metric_name)
        self._run, self._port = TrialRun(self._wish, self._options), HuggingFacePort(trainer)
        undo_signals = raise_at_sigterm()
        try:
            if checkpoint in (None, False):
                self._run.begin(self._port)
            else:
                self._run.resume(self._port, lambda: saved_in_checkpoint(checkpoint, trainer.args, _STATE_KEY))
            if too_large is not None and self.trial.batch_size >= too_large:
                raise MemoryError(f"batch size {too_large} ran out of memory, and there is no smaller one to train at")
            successor: TrialRun | None = self._run
            while successor is not None:
                self._prepare(trainer)
                crash: Exception | None = None
                try:
                    result = train()
                except Exception as error:
                    crash = error
                port = HuggingFacePort(trainer)
                successor = self._run.finished_by(port, crash)
                if successor is not None:
                    self._run, self._port, train = successor, port, from_start(train)
        except BaseException as error:
            self._run.finish(error)
            raise
        finally:
            self._port = None
            undo_signals()
        self._run.finish(early_end=early_end(trainer))
        self._run.raise_failure()
        return result

    def _prepare(self, trainer: Trainer) -> None:
        """Let the training that begins scale its learning rates and keep the trial in its checkpoints."""
        run = self._run
        if run.active is None:
            return
        # After `create_scheduler` the optimizer exists, too; a checkpoint's scaled rates are loaded later.
        scale = run.active.scale_learning_rate
        run.patches.extend(trainer, "create_scheduler", then=lambda _: scale())
        run.patches.extend(trainer, "_save_checkpoint", first=lambda: self._keep_state(trainer.state))
        # The trainer would warn of a callback of this name.
        run.patches.extend(
            trainer, "_load_callback_state", first=lambda: checkpointed(trainer.state).pop(_STATE_KEY, None)
        )

    def _check(self, trainer: Trainer) -> None:
        """Check the trainer before a trial begins."""
        args = trainer.args
        if trainer.is_deepspeed_enabled:
            raise ZeusBSOConfigError(
                "the ZeusBSOTrainerCallback cannot set the batch size of DeepSpeed: train without the callback, or "
                "shard the model by FSDP"
            )
        if hasattr(args, "steps_per_generation"):  # TRL's GRPO and RLOO
            raise ZeusBSOConfigError(
                f"the ZeusBSOTrainerCallback cannot set the batch size of a {type(trainer).__name__}, which generates "
                "its own training data: train without the callback"
            )
        if args.max_steps <= 0:
            epochs = math.ceil(args.num_train_epochs)
            check_epochs(self._wish.said_epochs, epochs, "TrainingArguments(num_train_epochs={})")
        logs_only_its_own = type(trainer).__module__.startswith("transformers.")
        others = trainer.callback_handler.callbacks  # the script's own callbacks may add metrics, or evaluate
        has_own = any(not type(each).__module__.startswith(("transformers.", "zeus_plugins.")) for each in others)
        may_evaluate = self._metric_name.startswith(EVALUATION_PREFIX) and (has_own or not logs_only_its_own)
        is_logged = not self._metric_name.startswith(EVALUATION_PREFIX) and not logs_only_its_own
        if args.eval_strategy == "no" and not (may_evaluate or is_logged or self._metric_name in TRAINING_METRICS):
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} would come from evaluations, and TrainingArguments(eval_strategy='no') "
                "makes none: set eval_strategy='epoch' or 'steps', or monitor a metric of the training such as 'loss'. "
                "Of evaluations by a callback of your own, monitor 'eval_…'"
            )
        if logs_only_its_own and not has_own and args.eval_strategy != "no" and trainer.compute_metrics is None:
            check_evaluated_metric(self._metric_name, trainer.eval_dataset)

    def _run_of(self, state: TrainerState, control: TrainerControl) -> ActiveRun | None:
        """Return the run of an event; None for an event of another trainer that shares the callback."""
        if self._trainer is None or self._port is None or self._trainer.state is not state:
            return None
        self._port.control = control
        return self._run.active

    def _report(self, run: ActiveRun, metric: Callable[[], float | None]) -> None:
        run.report_evaluation(metric, self._epochs(run))

    def _epochs(self, run: ActiveRun) -> float:
        port = cast("HuggingFacePort", self._port)
        return port.epochs_trained(run.record.job.max_epochs, has_fractions=self._has_fractions)

    def _watch(self, run: ActiveRun, metrics: dict[str, float]) -> None:
        found = {name: value_in(metrics, name) for name in run.watched_names}
        run.watch({name: value for name, value in found.items() if isinstance(value, (int, float))})

    def _keep_state(self, state: TrainerState) -> None:
        """Put the trial into the state that process 0 writes to checkpoints."""
        if state.is_world_process_zero:
            checkpointed(state)[_STATE_KEY] = self._run.state()
