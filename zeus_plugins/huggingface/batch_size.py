"""The batch size of a Hugging Face training."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from zeus_plugins.client.http import BsoClient, client_from_environment
from zeus_plugins.energy import ClusterMonitor, EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError, ZeusBSOTrainFailError
from zeus_plugins.huggingface._attach import TrainWrapper
from zeus_plugins.huggingface._trainer import (
    afterwards,
    already_training,
    beforehand,
    checkpointed,
    cluster_of,
    node_monitor,
    not_attached,
)
from zeus_plugins.protocol import JobSpec, PowerLimitChoice
from zeus_plugins.training.adapters import check_options, decided_by_rank_zero, failure, splits_of_job
from zeus_plugins.training.loaders import BatchSplit, process_batch_sizes, resize_process_loader
from zeus_plugins.training.lr_scaling import lr_factor, scale_learning_rate
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.session import (
    OnUnreachable,
    TrialInfo,
    TrialSession,
    check_on_unreachable,
    end_trial_from_another_rank,
)
from zeus_plugins.training.signals import raise_at_sigterm

T = TypeVar("T")


_logger = logging.getLogger("zeus_plugins")


_STATE_KEY = "zeus_bso"


_EVALUATION_PREFIX = "eval_"


# What an unmodified Trainer logs while it trains.
_TRAINING_METRICS = ("loss", "grad_norm", "learning_rate")


@dataclass(eq=False)
class _Training:
    """One call of `Trainer.train`.

    Attributes:
        trainer: Whose.
        processes: Number of processes that train on different data.
        is_measured_by_logs: Whether the metric is one of the training's own logs, for want of evaluations.
        trial: As every process knows it; None when this training is no recurrence of the job.
        is_live: Whether the trial takes reports.
        has_fractions: Whether a fraction of an epoch was reported; None before the first report.
        missed: Names of the metrics of evaluations that lack the one to report.
        misses: Number of those evaluations.
        missed_at: Their step.
        evaluation_log: What was logged with an evaluation; some trainers add metrics there that it does not return.
        logged: Latest value of the metric in the logs.
        logged_at: The step of that log.
        awaits_log: Whether an epoch has ended that the next log is to be reported for.
        scaled: The optimizers and schedulers whose learning rates were scaled.
    """

    trainer: Trainer
    processes: int
    is_measured_by_logs: bool
    trial: TrialInfo | None = None
    is_live: bool = False
    client: BsoClient | None = None
    session: TrialSession | None = None
    cluster: ClusterMonitor | None = None
    patches: Patches = field(default_factory=Patches)
    has_fractions: bool | None = None
    missed: list[str] = field(default_factory=list)
    misses: int = 0
    evaluation_log: dict[str, float] = field(default_factory=dict)
    missed_at: int = -1
    logged: float | None = None
    logged_at: int = -1
    awaits_log: bool = False
    scaled: list[tuple[Any, Any]] = field(default_factory=list)


class ZeusBSOTrainerCallback(TrainWrapper):
    """Trains with the batch size that the server chooses, reports what it costs, and stops on the server's word.

    Give it to the trainer as one of its `callbacks`; `Trainer.train` then asks for a batch size and trains at it,
    whatever `per_device_train_batch_size` and `get_train_dataloader` say. All changes are taken back when `train` ends.
    A trainer that exists already takes the callback by `attach`.

    A report follows each evaluation; with ``eval_strategy="no"``, each epoch of the training. Each call of `train` is
    a trial of its own, except one that resumes from a checkpoint: it goes on with the checkpoint's trial. One from a
    checkpoint without a trial is left alone. Evaluating and predicting concern no trial.

    Args:
        job: The recurring job. Its batch sizes are global: samples per optimizer step over all devices and accumulated
            batches.
        monitor: Name of the metric that `job.target_metric` is about, with or without its prefix ``eval_``; with
            ``eval_strategy="no"``, a name in the training's logs such as ``loss``.
        server_url: The batch size optimization server. None: the environment variable ``ZEUS_SERVER_URL``, and without
            that one a server in this process, on a SQLite file (needs the extra ``server``).
        token: The server's access token. None: the environment variable ``ZEUS_BSO_TOKEN``.
        lr_scaling: How the learning rates, meant for `job.default_batch_size`, follow the batch size.
        energy_monitor: Measures energy and time. None: the best one that this machine offers.
        max_per_device_batch_size: Largest batch that one device holds. Larger global sizes are reached by accumulating
            gradients (`gradient_accumulation_steps` is raised).
        on_failure: What `train` does when the trial ended without reaching the target: ``"raise"``
            `ZeusBSOTrainFailError` after all checkpoints and loggers have finished, or just ``"stop"``.
        on_unreachable: What `train` does when it begins while the server is away: ``"default"``, train with
            `job.default_batch_size` and have that trial recorded later; ``"raise"``, nothing. A server that goes away
            later never ends a training.

    Raises:
        ZeusBSOConfigError: An argument cannot work. `train` raises it for a job, trainer or data that cannot work.
    """

    _OWNER = "zeus_bso_owner"

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
        lr_factor(lr_scaling, job.default_batch_size, job.default_batch_size)  # refuses an unknown rule here and now
        self._job = job
        self._metric_name = monitor
        self._server_url = server_url
        self._token = token
        self._lr_scaling = lr_scaling
        self._energy_monitor = energy_monitor
        self._max_per_device = max_per_device_batch_size
        self._on_failure = on_failure
        self._on_unreachable = on_unreachable
        self._training: _Training | None = None
        self._trial: TrialInfo | None = None

    @property
    def trial(self) -> TrialInfo:
        """The trial of the present or latest `train`: batch size, trial number, verdict, totals.

        Raises:
            ZeusBSOOperationOrderError: There was no `train` yet, or the latest was no recurrence of the job.
        """
        if self._trial is None:
            raise ZeusBSOOperationOrderError("there is no trial before Trainer.train has begun")
        return self._trial

    def is_training(self, trainer: Trainer) -> bool:
        """Whether there is a trial, and this trainer trains it."""
        training = self._training
        return training is not None and training.trainer is trainer and training.trial is not None

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have the server keep what a power-limit callback found out; called on process 0.

        Args:
            choice: What it found out.
        """
        training = self._training
        if training is not None and training.session is not None and training.is_live:
            training.session.keep_power_limits(choice)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the choice, and begin to measure."""
        if self._training is None:
            raise not_attached()
        training = self._active(state)
        if training is None or training.trial is None:
            return
        training.trainer.callback_handler.on_log(
            args,
            state,
            control,
            {
                "zeus/batch_size": float(training.trial.batch_size),
                "zeus/trial_number": float(training.trial.trial_number or 0),
                "zeus/lr_factor": self._lr_factor(training.trial.batch_size),
            },
        )
        self._keep_state(training)
        if training.cluster is not None:
            training.cluster.synchronize()
        if training.session is not None and training.is_live:
            training.session.begin_measurement()

    # Other callbacks may change the accumulation when the training begins, and a trainer makes its loader by then.
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make sure that the batch size is in force."""
        training = self._active(state)
        if training is not None and training.trial is not None:
            _check_delivered(training, training.trial.batch_size, args, kwargs.get("train_dataloader"))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the evaluation, and stop the trainer when the server says so."""
        training = self._active(state)
        # Before the first step there is nothing to report; other prefixes are of evaluations that the script makes.
        if training is None or training.is_measured_by_logs or state.global_step == 0 or not _is_evaluation(metrics):
            return
        known = {**training.evaluation_log, **(metrics or {})}
        training.evaluation_log = {}
        self._report(training, control, lambda: self._evaluated(training, known, state.global_step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note the metric of a training without evaluations, and those that are logged with an evaluation."""
        training = self._active(state)
        if training is not None and _is_evaluation(logs):
            training.evaluation_log = dict(logs or {})
        if training is None or not training.is_measured_by_logs or self._metric_name not in (logs or {}):
            return
        training.logged, training.logged_at = float((logs or {})[self._metric_name]), state.global_step
        if training.awaits_log:
            training.awaits_log = False
            self._report(training, control, lambda: training.logged)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the epoch of a training without evaluations."""
        training = self._active(state)
        if training is None or not training.is_measured_by_logs:
            return
        if self._metric_name in _TRAINING_METRICS and training.logged_at < state.global_step:
            training.awaits_log = control.should_log = True
        else:
            self._report(training, control, lambda: self._logged(training))

    def _train(self, trainer: Trainer, train: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        if self._training is not None:
            raise already_training()
        checkpoint, search_trial = _arguments_of_train(*args, **kwargs)
        if search_trial is not None:
            raise ZeusBSOConfigError(
                "hyperparameter_search trains with other settings each time, which are no recurrences of one job: "
                "search without the ZeusBSOTrainerCallback (trainer.remove_callback), then train with it"
            )
        training = self._checked(trainer)
        self._splits(training, self._job)  # before a trial is spent on a size that cannot be
        self._training, self._trial = training, None
        undo_signals = raise_at_sigterm()
        try:
            self._begin(training, checkpoint)
            if training.trial is not None:
                self._apply(training, training.trial.batch_size)
            result = train(*args, **kwargs)
        except BaseException as error:
            self._finish(training, error)
            raise
        finally:
            undo_signals()
        self._finish(training)
        if training.is_live and self._on_failure == "raise":
            reason = failure(self.trial.verdict)
            if reason is not None:
                raise ZeusBSOTrainFailError(f"{reason}; launch the training again to try the next batch size")
        return result

    def _checked(self, trainer: Trainer) -> _Training:
        """A training that can work, as far as can be said before it has a trial."""
        args = trainer.args
        if trainer.is_deepspeed_enabled:
            raise ZeusBSOConfigError(
                "DeepSpeed takes the batch size from its own configuration, which the callback does not change: train "
                "without DeepSpeed or without the ZeusBSOTrainerCallback"
            )
        if args.max_steps <= 0 and args.num_train_epochs < self._job.max_epochs:
            raise ZeusBSOConfigError(
                f"TrainingArguments(num_train_epochs={args.num_train_epochs:g}) ends before the job's max_epochs "
                f"({self._job.max_epochs}), so the server would never learn that a batch size cannot reach the target: "
                f"set JobSpec(max_epochs={int(args.num_train_epochs)}) or "
                f"TrainingArguments(num_train_epochs={self._job.max_epochs})"
            )
        is_measured_by_logs = args.eval_strategy == "no"
        logs_only_its_own = type(trainer).__module__.startswith("transformers.")
        if is_measured_by_logs and (
            self._metric_name.startswith(_EVALUATION_PREFIX)
            or (logs_only_its_own and self._metric_name not in _TRAINING_METRICS)
        ):
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} would come from evaluations, and TrainingArguments(eval_strategy='no') "
                "makes none: set eval_strategy='epoch' or 'steps', or monitor a metric of the training such as 'loss'"
            )
        # Tensor, context and sequence parallelism have several processes work on the same data.
        per_process = trainer._train_batch_size * args.gradient_accumulation_steps
        return _Training(trainer, trainer.get_total_train_batch_size(args) // per_process, is_measured_by_logs)

    def _begin(self, training: _Training, checkpoint: Any) -> None:
        """Ask for a trial, or go on with that of the checkpoint that is resumed from."""
        training.cluster = cluster_of(training.trainer, self._energy_monitor)

        def begin() -> tuple[TrialInfo | None, bool]:
            saved: Mapping[str, Any] | None = None
            if checkpoint not in (None, False):
                saved = _saved_state(checkpoint, training.trainer.args)
                if saved is None:
                    return None, False
            training.client = client_from_environment(self._server_url, self._token)
            monitor = training.cluster or node_monitor(training.trainer.args, self._energy_monitor)
            training.session = TrialSession(self._job, training.client, monitor, on_unreachable=self._on_unreachable)
            if saved is None:
                batch_size = training.session.ask()
                if batch_size not in self._job.batch_sizes:
                    raise ZeusBSOConfigError(
                        f"the server chose batch size {batch_size}, which is not one of the job's: "
                        f"{list(self._job.batch_sizes)}"
                    )
                return training.session.trial, True
            # Before the trial runs again, so that it may still go on elsewhere.
            self._split(training, saved["trial"]["batch_size"])
            training.has_fractions = saved["has_fractions"]
            is_live = training.session.resume(saved["trial"])
            return training.session.trial, is_live

        training.trial, training.is_live = _decided_by_process_zero(training.trainer, begin)
        self._trial = training.trial
        if training.trial is None:
            _logger.warning(
                "the checkpoint holds no trial of the batch size optimization: this training goes on at the script's "
                "own batch size, and nothing of it is measured or reported"
            )

    def _splits(self, training: _Training, job: JobSpec) -> dict[int, BatchSplit]:
        args = training.trainer.args
        return splits_of_job(
            job,
            devices=training.processes * max(1, args.n_gpu),
            accumulation=args.gradient_accumulation_steps,
            max_per_device=self._max_per_device,
        )

    # A checkpoint's trial may have a size that the job has no more.
    def _split(self, training: _Training, batch_size: int) -> BatchSplit:
        return self._splits(training, self._job.model_copy(update={"batch_sizes": (batch_size,)}))[batch_size]

    def _apply(self, training: _Training, batch_size: int) -> None:
        split = self._split(training, batch_size)
        trainer, args, patches = training.trainer, training.trainer.args, training.patches
        per_process = split.per_device * max(1, args.n_gpu)
        # With split batches, accelerate deals the trainer's batch out to all processes.
        shares = training.processes if trainer.accelerator.split_batches else 1
        patches.set_attribute(args, "per_device_train_batch_size", split.per_device * shares)
        patches.set_attribute(args, "gradient_accumulation_steps", split.accumulation)
        patches.set_attribute(args, "auto_find_batch_size", False)  # it would shrink the size within the training
        patches.set_attribute(trainer, "_train_batch_size", args.train_batch_size)

        def resize(loader: Any) -> None:
            if _rebalancing_sampler(loader) is None:  # that one follows the arguments
                resize_process_loader(loader, per_process, training.processes, patches)

        def scale(_: Any) -> None:
            factor = self._lr_factor(batch_size)
            if factor != 1.0:
                optimizer, scheduler = cast("tuple[Any, Any]", (trainer.optimizer, trainer.lr_scheduler))
                training.scaled.append((optimizer, scheduler))
                scale_learning_rate([optimizer], [scheduler], factor)

        afterwards(trainer, "get_train_dataloader", resize, patches)
        # Optimizer and scheduler exist by then, and a checkpoint's state is not loaded yet: that one is scaled already.
        afterwards(trainer, "create_scheduler", scale, patches)
        if training.session is not None:
            beforehand(trainer, "_save_checkpoint", lambda: self._keep_state(training), patches)

    def _lr_factor(self, batch_size: int) -> float:
        return lr_factor(self._lr_scaling, batch_size, self._job.default_batch_size)

    def _active(self, state: TrainerState) -> _Training | None:
        """The training that an event belongs to: another trainer may share the callback."""
        training = self._training
        return training if training is not None and training.trainer.state is state else None

    def _report(self, training: _Training, control: TrainerControl, metric: Callable[[], float | None]) -> None:
        if training.trial is None or not training.is_live or training.trial.is_over:
            return
        trial = training.trial
        if training.cluster is not None:
            training.cluster.synchronize()

        def report() -> TrialInfo:
            value = metric()
            if value is None or training.session is None:
                return trial
            training.session.report(_as_written(value), self._epochs(training))
            return training.session.trial

        self._trial = training.trial = _decided_by_process_zero(training.trainer, report)
        if training.trial.is_over:
            control.should_training_stop = True

    def _evaluated(self, training: _Training, metrics: Mapping[str, float], step: int) -> float | None:
        """The metric, or None when it may yet come from the evaluation of another data set."""
        if training.missed_at != step:
            training.missed, training.misses, training.missed_at = [], 0, step
        for name in (self._metric_name, f"{_EVALUATION_PREFIX}{self._metric_name}"):
            if name in metrics:
                return float(metrics[name])
        training.missed.extend(sorted(metrics))
        data_sets = training.trainer.eval_dataset
        training.misses += 1
        if training.misses >= (len(data_sets) if isinstance(data_sets, dict) else 1):
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} is not among the metrics of the evaluation {training.missed}: return "
                "it from compute_metrics, or name one of these"
            )
        return None

    def _logged(self, training: _Training) -> float:
        if training.logged is None:
            raise ZeusBSOConfigError(
                f"monitor={self._metric_name!r} was not logged in the first epoch, and "
                "TrainingArguments(eval_strategy='no') makes no evaluations: log it with trainer.log({…}), or monitor "
                "'loss'"
            )
        return training.logged

    def _epochs(self, training: _Training) -> float:
        """Epochs trained, as the server takes them: after whole epochs only whole ones."""
        epochs = float(training.trainer.state.epoch)
        reports_whole_epochs = training.is_measured_by_logs or training.trainer.args.eval_strategy == "epoch"
        if reports_whole_epochs or training.has_fractions is False:
            epochs = float(math.ceil(epochs))
        training.has_fractions = bool(training.has_fractions) or not epochs.is_integer()
        return epochs

    def _keep_state(self, training: _Training) -> None:
        """Put the trial where the trainer's checkpoints take it from."""
        if training.session is not None:
            state = {"trial": training.session.state_dict(), "has_fractions": training.has_fractions}
            checkpointed(training.trainer.state)[_STATE_KEY] = state

    def _finish(self, training: _Training, error: BaseException | None = None) -> None:
        """Undo, and end a trial that has no verdict. Never raises: it would hide the error that ended the training."""
        self._training = None
        try:
            training.patches.undo()
            for optimizer, scheduler in training.scaled:
                scale_learning_rate([optimizer], [scheduler], 1 / self._lr_factor(self.trial.batch_size))
            if training.session is not None:
                training.session.end(error)
                self._trial = training.session.trial if training.session.has_trial else None
            elif training.is_live and error is not None:
                with client_from_environment(self._server_url, self._token) as client:
                    end_trial_from_another_rank(client, training.trial, error)
        except Exception:
            _logger.exception("could not clean up after the training")
        finally:
            if training.cluster is not None:
                training.cluster.close()
            if training.client is not None:
                training.client.close()


def _is_evaluation(metrics: Mapping[str, float] | None) -> bool:
    return any(name.startswith(_EVALUATION_PREFIX) for name in metrics or ())


def _arguments_of_train(
    resume_from_checkpoint: Any = None, trial: Any = None, *_: Any, **__: Any
) -> tuple[str | bool | None, Any]:
    """What of `Trainer.train`'s arguments concerns a trial."""
    return resume_from_checkpoint, trial


def _saved_state(checkpoint: str | os.PathLike[str] | bool, args: TrainingArguments) -> Mapping[str, Any] | None:
    """What `_keep_state` put into a checkpoint (True: the latest of the trainer's folder), if anything."""
    find_latest: Callable[[str | None], str | None] = get_last_checkpoint  # it has no annotations
    folder = find_latest(args.output_dir) if isinstance(checkpoint, bool) else checkpoint
    if folder is None:
        return None
    try:
        state = json.loads(Path(folder, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the trainer says so better
        return None
    saved: Mapping[str, Any] | None = (state.get("stateful_callbacks") or {}).get(_STATE_KEY)
    return saved


def _decided_by_process_zero(trainer: Trainer, decide: Callable[[], T]) -> T:
    return decided_by_rank_zero(
        decide,
        rank=trainer.args.process_index,
        world_size=trainer.args.world_size,
        broadcast=lambda outcome: broadcast_object_list([outcome])[0],
    )


def _check_delivered(training: _Training, batch_size: int, args: TrainingArguments, loader: Any) -> None:
    """Never train at another size than the one that is reported."""
    accumulation = args.gradient_accumulation_steps
    expected = batch_size / (training.processes * accumulation)
    sampler = _rebalancing_sampler(loader)
    if sampler is None:
        delivered = process_batch_sizes(loader, training.processes)
    else:
        delivered = {sampler.effective_batch_size / (training.processes * accumulation)}
    if delivered != {expected}:
        raise ZeusBSOConfigError(
            f"the train loader delivers {sorted(delivered)} samples per batch instead of {expected:g} (batch size "
            f"{batch_size} over {training.processes} processes × {accumulation} accumulated batches): something set "
            "another size after Trainer.train began"
        )


def _rebalancing_sampler(loader: Any) -> Any:
    """The sampler that makes a step's batches of different sizes (``train_sampling_strategy="batch_rebalance"``)."""
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not hasattr(sampler, "effective_batch_size"):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler


def _as_written(metric: float) -> float:
    """A number in single precision as people write it: 0.9 is 0.89999998 there, below a target of 0.9."""
    single = np.float32(metric)
    return float(str(single)) if single == metric else metric
