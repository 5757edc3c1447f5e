"""Constructor and results of the batch-size callbacks, which all frameworks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Never

from zeus_plugins.energy import EnergyMonitor, WindowMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOOperationOrderError
from zeus_plugins.protocol import JobSpec, PowerLimitChoice
from zeus_plugins.training.arguments import (
    AfterTarget,
    OnFailure,
    Steps,
    TrialOptions,
    check_watch,
    checked_sizes,
    refuse_unknown,
)
from zeus_plugins.training.defaults import JobWish
from zeus_plugins.training.run import TrialRun
from zeus_plugins.training.trial import TrialInfo


class BatchSizeArguments:
    """Constructor and results of the batch-size callbacks."""

    def __init__(
        self,
        job: JobSpec | Mapping[str, Any] | str | None = None,
        monitor: str | None = None,
        *,
        target: float | None = None,
        mode: Literal["max", "min"] | None = None,
        batch_sizes: Sequence[int] | None = None,
        max_epochs: int | None = None,
        job_id: str | None = None,
        confirm: int | None = None,
        server_url: str | None = None,
        lr_scaling: Literal["none", "linear", "sqrt", "auto"] = "auto",
        energy_monitor: EnergyMonitor | WindowMonitor | None = None,
        max_per_device_batch_size: int | None = None,
        on_failure: OnFailure = "raise",
        after_target: AfterTarget = "stop",
        watch: Sequence[str] = (),
        steps: Steps = "samples",
        **unknown: Never,
    ) -> None:
        """Keep the arguments; the training begins later.

        Args:
            job: The recurring job, or some of its fields in a mapping, such as ``{"eta_knob": 0}``. The arguments down
                to `confirm` and the training define the rest (docs/reference.md). A text without a `monitor` is taken
                as the `monitor`.
            monitor: Name under which the training logs the metric of the target. With Hugging Face, the prefix
                ``eval_`` may be left out; with ``eval_strategy="no"``, give a name in the training's logs, such as
                ``loss``.
            target: Value of the metric at which the training is done (docs/target.md). None: the server learns it from
                the job's first three runs, which train at your own size to their end.
            mode: ``"max"`` if the metric rises as the model improves, ``"min"`` if it falls. None: the mode follows
                from other settings of the script for this metric, such as those of ModelCheckpoint, or from its name.
            batch_sizes: Global batch sizes to choose from: samples per optimizer step over all devices and accumulated
                batches. The script's own size is added to two or more; a single size is pinned. None: the script's own
                size, and up to three halvings and doublings of it.
            max_epochs: Epochs after which a run without the target has missed it. None: the trainer's number of epochs.
            job_id: Id of the job, if `job` is None. None: made from script, model class, metric, target and GPUs.
            confirm: Number of evaluations in a row that must reach the target. None: one.
            server_url: URL of the server, which gets the access token of ``ZEUS_BSO_TOKEN``. None:
                ``ZEUS_SERVER_URL``, or a server in this process (needs the extra ``server``).
            lr_scaling: Rule that scales the learning rates, which the script sets for the default batch size, to the
                trial's batch size. ``"auto"`` raises them above the default size by the rule for the optimizer's kind,
                and never lowers them (docs/schedules.md).
            energy_monitor: Measures energy and time, with the interface of Zeus's `ZeusMonitor` or ours. None: the best
                monitor of this machine.
            max_per_device_batch_size: Largest batch that fits on one device. For larger batches, the callback
                increases Lightning's `accumulate_grad_batches` or Hugging Face's `gradient_accumulation_steps`.
            on_failure: After a trial that missed its target, ``"raise"`` `ZeusBSOTrainFailError`, just ``"stop"``, or
                ``"finish"`` the run at the best known batch size in the same launch; after a crash at another size
                than the script's, at the script's own (docs/target.md).
            after_target: At the target, ``"stop"`` the training, or report its cost and ``"continue"`` without
                measuring to the end that the script sets (docs/target.md).
            watch: Names of further metrics that the training logs, such as ``("val_loss", "test_acc")``. Their last
                values are recorded, and compared between batch sizes (docs/target.md).
            steps: The script's settings and schedules that count steps or batches mean those at its own batch size.
                ``"samples"`` moves them to the same samples at other sizes; ``"unchanged"`` keeps the numbers
                (docs/schedules.md).
            **unknown: Not allowed: raises an error that names the right argument.

        Raises:
            ZeusBSOConfigError: An argument is invalid or unknown. The training raises it for an invalid job, trainer or
                data.
        """
        refuse_unknown(type(self), unknown)
        if isinstance(job, str) and monitor is None:
            job, monitor = None, job
        if not monitor or not isinstance(monitor, str):
            name = type(self).__name__
            raise ZeusBSOConfigError(
                f"monitor is {monitor!r}: give the name by which the target's metric is logged, {name}('val_acc', …). "
                f"A trainer takes such an object, callbacks=[{name}('val_acc', …)], not the class"
            )
        self._wish = JobWish(
            job,
            monitor=monitor,
            target=target,
            job_id=job_id,
            mode=mode,
            batch_sizes=None if batch_sizes is None else checked_sizes(batch_sizes),
            max_epochs=max_epochs,
            confirm=confirm,
        )
        self._metric_name = monitor
        self._options = TrialOptions(
            server_url=server_url,
            lr_scaling=lr_scaling,
            energy_monitor=energy_monitor,
            max_per_device_batch_size=max_per_device_batch_size,
            on_failure=on_failure,
            after_target=after_target,
            watch=check_watch(watch),
            steps=steps,
        )
        self._run = TrialRun(self._wish, self._options)

    @property
    def trial(self) -> TrialInfo:
        """The trial of the present or latest training: batch size, trial number, verdict, totals.

        After a training that ended without an error, the trial's `verdict` is not None and says stop.

        Raises:
            ZeusBSOOperationOrderError: There was no training yet, or the training had no trial because it continued a
                trained model or a checkpoint without a trial, or it ran in processes that have ended (Lightning's
                strategy ``ddp_spawn``).
        """
        if self._run.trial is None:
            raise ZeusBSOOperationOrderError(
                "there is no trial before the training has begun, after a rehearsal such as fast_dev_run, after it has "
                "run in spawned processes, or when it continues from a checkpoint without a trial or from a trained "
                "model"
            )
        return self._run.trial

    @property
    def converged(self) -> bool:
        """True if the present or latest training has reached its target. Raises the same errors as `trial`."""
        return self.trial.converged

    @property
    def summary(self) -> TrialInfo:
        """The same as `trial`, whose `str` is the outcome of the training in one line."""
        return self.trial

    @property
    def has_trial(self) -> bool:
        """True if the present or latest training has a trial."""
        return self._run.trial is not None

    @property
    def lr_factor(self) -> float:
        """The factor on learning rates for the trial's batch size, by `lr_scaling`; 1 before the size is known."""
        return self._run.lr_factor

    def keep_power_limits(self, choice: PowerLimitChoice, *, has_measured: bool) -> None:
        """Report the choice of a power-limit callback, which may have measured limits; call it on rank 0."""
        if self._run.active is not None:
            self._run.active.keep_power_limits(choice, has_measured=has_measured)
