"""One trial of a training, from the question for a batch size to its end: what all frameworks decide alike.

A framework's callback makes a `TrialRun` for each training and calls it from its hooks. The run decides; what it wants
done to the trainer it asks of a `TrainerPort`, which each framework implements in a few lines. Below it, a
`TrialSession` measures and talks to the server, on rank 0 alone: the other ranks get its answers and its errors by
broadcast, so that all of them go on, stop or raise together.

The order of calls, on every rank::

    run = TrialRun(job, options)
    run.begin(port)  or  run.resume(port, saved)
    run.scale_learning_rate()        when optimizers and schedulers exist, and no checkpoint has restored them yet
    run.start()                      right before the first step
    run.check()                      before the first step of each epoch, when its loader exists
    run.batch_trained()              after each batch, while run.is_counting_steps
    run.report(metric, epochs)       after each evaluation
    run.report_last_epoch(epochs)    after the last epoch
    run.finish(error)                always; then, unless there is an error, run.raise_failure()

Before `begin`, after `finish`, and in a training that goes on from a checkpoint without a trial, each of them does
nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from zeus_plugins.client.connect import client_from_environment
from zeus_plugins.client.outbox import OutboxHeader
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import ClusterMonitor
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import JobSpec, PowerLimitChoice
from zeus_plugins.training.announce import Announcer
from zeus_plugins.training.counting import StepCount
from zeus_plugins.training.defaults import JobPlan, JobWish, planned
from zeus_plugins.training.failures import end_trial_from_another_rank, show_in_one_paragraph, train_fail_error
from zeus_plugins.training.loaders import BatchSplit, split_batch
from zeus_plugins.training.lr_scaling import lr_factor, scale_learning_rate
from zeus_plugins.training.metrics import EpochCount
from zeus_plugins.training.options import TrialOptions
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.placement import placed
from zeus_plugins.training.port import TrainerPort, cluster_monitor, decided_by_rank_zero, node_monitor
from zeus_plugins.training.schedules import ScheduleWatch
from zeus_plugins.training.session import TrialSession
from zeus_plugins.training.trial import TrialInfo

T = TypeVar("T")

_logger = logging.getLogger("zeus_plugins")


class TrialRun:
    """One training of the job, and its trial. Can be pickled before it begins.

    Args:
        job: The recurring job, or what its user says of it. Its batch sizes are global.
        options: As the user gave them.
        connect: Makes a client, from the options' `server_url` and `token`.

    Attributes:
        patches: Changes to the trainer, which `finish` undoes.
    """

    def __init__(
        self,
        job: JobSpec | JobWish,
        options: TrialOptions,
        *,
        connect: Callable[[str | None, str | None], ServerPort] = client_from_environment,
    ) -> None:
        self._wish = job if isinstance(job, JobWish) else JobWish(job=job)
        # None until the training has told what its user does not say.
        self._plan = None if self._wish.job is None else planned(self._wish)
        self._options = options
        self._connect = connect
        self.patches = Patches()
        self._port: TrainerPort | None = None
        self._client: ServerPort | None = None
        self._session: TrialSession | None = None
        self._cluster: ClusterMonitor | None = None
        self._trial: TrialInfo | None = None
        self._sender: OutboxHeader | None = None
        self._steps: StepCount | None = None
        self._schedules: ScheduleWatch | None = None
        self._announcer: Announcer | None = None
        self._takes_reports = False
        self._is_finished = False
        self._epochs = EpochCount()
        # The optimizers and schedulers whose rates were scaled, to be scaled back.
        self._scaled: list[tuple[Sequence[Any], Sequence[Any]]] = []

    @property
    def trial(self) -> TrialInfo | None:
        """The trial as of the latest report, the same on every rank; None without one."""
        return self._trial

    @property
    def is_active(self) -> bool:
        """Whether there is a trial, and its training goes on."""
        return self._port is not None and self._trial is not None

    @property
    def is_open(self) -> bool:
        """Whether there is a trial, its training goes on, and the server takes reports on it."""
        return self.is_active and self._takes_reports

    @property
    def is_reporting(self) -> bool:
        """Whether `report` would report: the trial is open, and no verdict has said stop."""
        return self.is_open and self._trial is not None and not self._trial.is_over

    def begin(self, port: TrainerPort) -> None:
        """Ask for a batch size, and have the trainer deliver it.

        Raises:
            ZeusBSOConfigError: The job, the trainer or the data cannot work; the server refuses the job or the token.
            ZeusBSORuntimeError: As of `TrialSession.ask`.
        """
        self._port = port
        self._make_plan(port)
        self._splits(port, self._job.batch_sizes)  # before a trial is spent on a size that cannot be
        self._enter(port, lambda session: self._ask(port, session))

    def resume(self, port: TrainerPort, saved: Callable[[], Mapping[str, Any] | None]) -> None:
        """Go on with the trial of a checkpoint, at its batch size; without one, leave the training alone.

        Args:
            port: The trainer.
            saved: Reads what `state` returned; None, or nothing in it, from a checkpoint without a trial. Called on
                rank 0.

        Raises:
            ZeusBSOConfigError: The trial's size cannot be had on these devices; the trial can still go on elsewhere.
            ZeusBSORuntimeError: As of `TrialSession.resume`.
        """
        self._port = port
        state = self._decided(port, lambda: self._resumable(port, saved()))
        if state is None:
            if port.rank == 0:
                _logger.warning(
                    "the checkpoint holds no trial, so this training goes on with its own batch size, and nothing of "
                    "it is measured or reported: the rest of a training says nothing about a whole one. Train from the "
                    "start to let the server choose"
                )
            return
        if self._plan is None and "job" in state:
            self._plan = JobPlan(job=JobSpec(**{name: state["job"][name] for name in JobSpec.model_fields}))
        self._make_plan(port)
        self._epochs = EpochCount(state.get("has_fractions"))
        self._enter(port, lambda session: session.resume(state["trial"]))

    def scale_learning_rate(self) -> None:
        """Scale the rates of all optimizers and schedulers as the options say."""
        if self._port is None or not self.is_active or self.lr_factor == 1.0:
            return
        optimizers, schedulers = self._port.optimizers()
        if self._port.keeps_optimizers:
            self._scaled.append((optimizers, schedulers))
        scale_learning_rate(optimizers, schedulers, self.lr_factor)
        self._schedules_of(self._port).scaled(optimizers, schedulers)

    def start(self) -> None:
        """Log the choice, and begin to measure."""
        if self._port is None or self._trial is None:
            return
        if self._announcer is not None:
            self._announcer.started(self._port, self._trial, self.lr_factor, self.patches)
        schedules = self._port.schedules()  # which all ranks ask for: the framework may have them wait for each other
        if self._port.rank == 0:
            self._schedules_of(self._port).begin(schedules)
        self._steps = StepCount(self._port.optimizers()[0], self._port.accumulation)
        self._synchronize()
        if self.is_open:
            optimizer = next((type(each).__name__ for each in self._port.optimizers()[0]), None)
            self._decided(self._port, lambda: self._begin_measurement(optimizer))

    @property
    def is_counting_steps(self) -> bool:
        """True if `batch_trained` is still to be called: a few times at the start of a training."""
        return self._steps is not None and self._steps.is_counting

    def batch_trained(self) -> None:
        """Count a batch that was trained, with the optimizer step that came of it, if any."""
        if self._steps is not None:
            self._steps.batch_trained()

    def check(self) -> None:
        """Make sure that the batch size is in force: never train at another size than the one that is reported.

        Raises:
            ZeusBSOConfigError: It is not.
        """
        port, trial = self._port, self._trial
        if port is None or trial is None:
            return
        expected = trial.batch_size / (port.devices * port.accumulation)
        delivered = port.delivered()
        if any(size != expected for size in delivered):
            sizes = ", ".join("?" if size is None else f"{size:g}" for size in delivered)
            raise ZeusBSOConfigError(
                f"the train loaders deliver [{sizes}] samples per batch instead of {expected:g} (batch size "
                f"{trial.batch_size} over {port.devices} devices × {port.accumulation} accumulated batches): something "
                "set another size after the callback had set it"
            )

    def report(self, metric: Callable[[], float | None], epochs: float) -> None:
        """Report an evaluation, and stop the trainer when the server says so. Nothing after that verdict.

        Args:
            metric: Finds the metric; None when there is nothing to report yet. Called on rank 0, and what it raises is
                raised on every rank.
            epochs: Epochs of this trial trained so far. Fractions are rounded up once whole epochs were reported.

        Raises:
            ZeusBSOConfigError: What was counted so far contradicts the batch size.
            Exception: What `metric` raises.
        """
        port, trial = self._port, self._trial
        if port is None or trial is None or not self.is_reporting:
            return
        self._synchronize()
        self._trial = self._decided(port, lambda: self._reported(port, trial, metric(), epochs))
        if self._announcer is not None and self._trial != trial:
            cost_j = None if self._session is None else self._session.cost_j
            self._announcer.reported(port, self._trial, cost_j)
        if self._trial.is_over:
            port.stop()

    def report_last_epoch(self, epochs: float) -> None:
        """Report the end of a training whose last evaluation was before its last epoch.

        The server must hear that no more epochs are allowed; the latest metric stands.
        """
        trial = self._trial
        if trial is not None and trial.metric is not None and epochs >= self._job.max_epochs > (trial.epoch or 0):
            metric = trial.metric
            self.report(lambda: metric, epochs)

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have the server keep what a power-limit callback found out; called on rank 0."""
        if self._session is not None:
            self._session.keep_power_limits(choice)

    def state(self) -> dict[str, Any]:
        """The trial for a checkpoint, in plain types; an empty dict without one.

        The open window counts: it is closed into the totals and the next one opened.
        """
        if self._session is not None and self._session.has_trial:
            self._session.state_dict()
            self._trial = self._session.trial
        if self._trial is None:
            return {}
        state = {"trial": self._trial.model_dump(mode="json"), "has_fractions": self._epochs.has_fractions}
        # What was guessed may be guessed otherwise by then.
        return state if self._wish.job is not None else state | {"job": self._job.model_dump(mode="json")}

    def finish(self, error: BaseException | None = None, *, early_end: str | None = None) -> None:
        """Undo all changes, and end a trial that has no verdict. Nothing the second time.

        Meant for exit paths: it makes no collective call, and never raises, which would hide the `error` that ended the
        training.

        Args:
            error: What ended the training.
            early_end: Without an error, the trainer's own rule that ended it before its last epoch, where it is known.
        """
        if self._is_finished:
            return
        port, self._port, self._is_finished = self._port, None, True
        try:
            # The last first, and each though another fails.
            with ExitStack() as stack:
                if self._client is not None:
                    stack.callback(self._client.close)
                if self._cluster is not None:
                    stack.callback(self._cluster.close)
                stack.callback(self._end, error, early_end, port)
                if self._steps is not None:
                    stack.callback(self._steps.close)
                stack.callback(self._scale_back)
                stack.callback(self.patches.undo)
        except Exception:
            _logger.exception("could not clean up after the training")

    def raise_failure(self) -> None:
        """Raise when the training is over and its trial failed, if that is wanted.

        Raises:
            ZeusBSOTrainFailError: The trial did not reach its target.
        """
        if self._trial is None or not self._takes_reports or self._options.on_failure != "raise":
            return
        verdict = self._trial.verdict
        if verdict is None or not (verdict.stop_train and verdict.converged):
            show_in_one_paragraph()
            raise train_fail_error(verdict, self._trial.advice)

    def check_epochs(self, limit: float, setting: str, *, trained: int = 0) -> None:
        """Refuse a trainer that ends before the job's last epoch.

        Args:
            limit: Epochs after which the trainer ends.
            setting: What limits it, such as ``Trainer(max_epochs={})``.
            trained: Epochs that it had trained before the trial began.

        Raises:
            ZeusBSOConfigError: It ends before.
        """
        needed = 0 if self._plan is None else self._job.max_epochs
        if limit - trained >= needed:
            return
        already = f" after the {trained} epochs that this trainer has trained already" if trained else ""
        remedy = (
            "make a new Trainer for each training"
            if trained
            else f"set JobSpec(max_epochs={int(limit)}) or {setting.format(needed)}"
        )
        raise ZeusBSOConfigError(
            f"{setting.format(f'{limit:g}')} ends before the job's max_epochs ({needed}){already}, so the server would "
            f"never learn that a batch size cannot reach the target: {remedy}"
        )

    def check_steps(self, limit: int, samples: int, setting: str) -> None:
        """Refuse a trainer that ends within its first epoch.

        Args:
            limit: Optimizer steps after which the trainer ends.
            samples: Samples of an epoch.
            setting: What limits it, such as ``TrainingArguments(max_steps={})``.

        Raises:
            ZeusBSOConfigError: It does with at least one of the job's batch sizes.
        """
        sizes = () if self._plan is None else self._job.batch_sizes  # those that are guessed are such that it does not
        cut_short = [size for size in sizes if math.ceil(samples / size) > limit]
        if cut_short:
            raise ZeusBSOConfigError(
                f"{setting.format(limit)} ends within the first epoch at the batch sizes {cut_short}, whose cost would "
                f"be taken for that of a whole one: set {setting.format(math.ceil(samples / cut_short[0]))} or more, "
                "or num_train_epochs in its place, or drop these sizes from the job"
            )

    @property
    def _job(self) -> JobSpec:
        if self._plan is None:
            raise RuntimeError("the job is known once the training has begun")
        return self._plan.job

    def _make_plan(self, port: TrainerPort) -> None:
        """Make the job of what the user says and, where that is too little, of what the training tells."""
        plan = self._plan
        if plan is None:
            facts = port.facts(self.patches)
            plan = self._decided(port, lambda: planned(self._wish, facts))
        self._plan = replace(plan, fingerprint=port.fingerprint(), is_strict=self._options.strict)
        self._tuned_size = plan.job.default_batch_size
        if plan.warning is not None and port.rank == 0:
            _logger.warning("%s", plan.warning)

    def _check_registered(self, port: TrainerPort, job: JobSpec) -> None:
        """Refuse a job that the server has otherwise than was guessed, where this training cannot have it so."""
        self._splits(port, job.batch_sizes)
        if job.max_epochs > self._job.max_epochs:
            raise ZeusBSOConfigError(
                f"job {job.job_id} is registered with max_epochs={job.max_epochs}, and this trainer ends after "
                f"{self._job.max_epochs}, so the server would never learn that a batch size cannot reach the target: "
                f"let it train {job.max_epochs} epochs, or use another job_id"
            )

    @property
    def lr_factor(self) -> float:
        """The factor on the rates that the user chose for the job's default size; 1 without a rule."""
        size = self._tuned_size if self._trial is None else self._trial.batch_size
        return lr_factor(self._options.lr_scaling, size, self._tuned_size)

    def _begin_measurement(self, optimizer: str | None) -> None:
        if self._session is not None:
            self._session.begin_measurement(optimizer)

    def _schedules_of(self, port: TrainerPort) -> ScheduleWatch:
        if self._schedules is None:
            size = self._job.default_batch_size if self._trial is None else self._trial.batch_size
            self._schedules = ScheduleWatch(size, port.schedule_remedy)
        return self._schedules

    def _decided(self, port: TrainerPort, decide: Callable[[], T]) -> T:
        return decided_by_rank_zero(decide, rank=port.rank, world_size=port.world_size, broadcast=port.broadcast)

    def _enter(self, port: TrainerPort, begin: Callable[[TrialSession], bool]) -> None:
        """Have rank 0 get the trial, all ranks hear of it, and the trainer deliver its size."""
        place = placed(port)
        self._cluster = cluster_monitor(port, place, self._options.energy_monitor)
        plan = self._plan or JobPlan(job=self._job)

        def entered() -> tuple[TrialInfo, bool, JobPlan, OutboxHeader | None]:
            self._client = self._connect(self._options.server_url, self._options.token)
            monitor = self._cluster or node_monitor(place, self._options.energy_monitor)
            self._session = TrialSession(plan, self._client, monitor, on_unreachable=self._options.on_unreachable)
            takes_reports = begin(self._session)
            return self._session.trial, takes_reports, self._session.plan, self._session.sender

        self._trial, self._takes_reports, self._plan, self._sender = self._decided(port, entered)
        size = self._trial.batch_size
        port.deliver(self._splits(port, [size])[size], self.patches)
        self._announcer = Announcer(
            self._plan, self._wish.monitor, own_size=self._tuned_size, quiet=self._options.quiet
        )
        if self._takes_reports:
            url = "" if self._client is None else self._client.server_url
            self._announcer.begun(port, self._trial, url, self.patches)

    def _ask(self, port: TrainerPort, session: TrialSession) -> bool:
        batch_size = session.ask(lambda job: self._check_registered(port, job))
        if batch_size not in session.plan.job.batch_sizes:
            raise ZeusBSOConfigError(
                f"the server chose batch size {batch_size}, which is not one of the job's: "
                f"{list(session.plan.job.batch_sizes)}"
            )
        return True

    def _resumable(self, port: TrainerPort, state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if not state:
            return None
        # Before the trial runs again, so that it may still go on elsewhere. The job may have its size no more.
        self._splits(port, [TrialInfo.restored(state["trial"]).batch_size])
        return state

    def _splits(self, port: TrainerPort, batch_sizes: Sequence[int]) -> dict[int, BatchSplit]:
        """The spread of each of these sizes over the devices."""
        devices, accumulation = port.devices, port.accumulation
        most = self._options.max_per_device_batch_size
        found = {
            size: split_batch(size, world_size=devices, accumulation=accumulation, max_per_device=most)
            for size in batch_sizes
        }
        splits = {size: split for size, split in found.items() if split is not None}
        uneven = [size for size in batch_sizes if size not in splits]
        if uneven:
            raise ZeusBSOConfigError(
                f"the batch sizes {uneven} cannot be spread evenly over {devices} devices × {accumulation} accumulated "
                "batches: batch sizes are global, samples per optimizer step over all devices; choose multiples of "
                f"{devices * accumulation}"
            )
        if port.no_accumulation is not None and any(split.accumulation > 1 for split in splits.values()):
            raise ZeusBSOConfigError(
                f"{port.no_accumulation}, so sizes above max_per_device_batch_size={most} × {devices} devices cannot "
                "be reached: raise it, or drop those batch sizes from the job"
            )
        return splits

    def _synchronize(self) -> None:
        if self._cluster is not None:
            self._cluster.synchronize()

    def _reported(self, port: TrainerPort, trial: TrialInfo, metric: float | None, epochs: float) -> TrialInfo:
        if metric is None or self._session is None:
            return trial
        port.check_samples()
        if self._steps is not None:
            self._steps.check()
        self._schedules_of(port).check(port.optimizers()[0], goes_on=epochs < self._job.max_epochs)
        self._session.report(metric, self._epochs.reported(epochs))
        return self._session.trial

    def _end(self, error: BaseException | None, early_end: str | None, port: TrainerPort | None) -> None:
        if self._session is not None:
            self._session.end(error, early_end=early_end)
            if self._session.has_trial:
                self._trial = self._session.trial
                if port is not None and self._announcer is not None and self._takes_reports:
                    if error is None:
                        self._announcer.ended(port, self._trial, self._session.job_view, early_end)
                    else:
                        self._announcer.broken_off(port, self._trial, error)
            self._session = None
        elif self._takes_reports and error is not None:
            with self._connect(self._options.server_url, self._options.token) as client:
                end_trial_from_another_rank(client, self._trial, error, self._sender)

    def _scale_back(self) -> None:
        while self._scaled:
            scale_learning_rate(*self._scaled.pop(), 1 / self.lr_factor)
