"""One trial of a training, from the request for a batch size to the end: the decisions that all frameworks share.

A framework's callback makes a `TrialRun` for each training and calls it from its hooks. The run changes the trainer
through a `TrainerPort`. On rank 0, a `TrialSession` measures and talks to the server; the other ranks receive its
answers and errors by broadcast, so that all continue, stop or raise together.

The order of calls, on every rank::

    run = TrialRun(wish, options)
    run.begin(port)  or  run.resume(port, saved)
    run.active.scale_learning_rate()        when optimizers and schedulers exist, before a checkpoint restores them
    run.active.start()                      right before the first step
    run.active.check()                      before the first step of each epoch, when its loader exists
    run.active.steps.batch_trained()        after each batch
    run.active.watch(values)                        when further metrics are known
    run.active.report_evaluation(metric, epochs)    after each evaluation
    run.active.report_last_epoch(epochs)    after the last epoch
    run.finished_by(new_port, error)        after the last epoch, or after an exception; the trainer then trains again
                                            with the run that this returns, from `scale_learning_rate` on, unless it
                                            returns None
    run.finish(error)                       always; then, without an error, run.raise_failure()

`run.active` is None before `begin`, after `finish`, and in a training without a trial: one that continues from a
checkpoint without a trial, or from an earlier training of this process.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from zeus_plugins.client import client_from_environment
from zeus_plugins.client.port import ServerPort
from zeus_plugins.environment import DISABLED
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.protocol import EndReason, Fingerprint, JobSpec, PowerLimitChoice, ReportResponse
from zeus_plugins.training.announce import Announcer
from zeus_plugins.training.arguments import TrialOptions
from zeus_plugins.training.batches import BatchSplit, StepCount
from zeus_plugins.training.defaults import JobPlan, JobWish, TrainingFacts, planned
from zeus_plugins.training.lr_scaling import LrScaling, ScheduleWatch, lr_factor, scale_learning_rate
from zeus_plugins.training.metrics import EpochCount
from zeus_plugins.training.outcomes import (
    allows_another_size,
    detail_of,
    end_trial_from_another_rank,
    is_refusal_of_size,
    release_memory,
    show_in_one_paragraph,
    study_around,
    train_fail_error,
    verdict_at_end,
)
from zeus_plugins.training.patches import Patches
from zeus_plugins.training.port import TrainerPort, TrainingMonitor, all_agree, decided, splits_of
from zeus_plugins.training.session import TrialSession
from zeus_plugins.training.steps import StepScale, drive_by_samples
from zeus_plugins.training.trial import TrialInfo

T = TypeVar("T")

_logger = logging.getLogger("zeus_plugins")

OWN = "your own batch size"

# Per model, the ids of the jobs that have trained it, with the sum of its weights after the latest trial of each.
_TRAINED: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()


@dataclass
class RunRecord:
    """The facts of a run that every rank knows, also after the training.

    The `trial` is as at the latest report, the `plan` as before the job's registration, and the `job` as on the server.
    A checkpoint's trial that is over takes no reports.
    """

    trial: TrialInfo
    plan: JobPlan
    job: JobSpec
    lr_factor: float
    takes_reports: bool
    epochs: EpochCount

    @property
    def is_at_own_size(self) -> bool:
        """True if the trial has the job's default batch size."""
        return self.trial.batch_size == self.job.default_batch_size


class TrialRun:
    """One training of the job, and its trial. Can be pickled before it begins.

    `connect` makes a client, given the options' `server_url`.

    Attributes:
        patches: Changes to the trainer, which `finish` undoes.
        active: The run while the training of its trial continues, from `begin` or `resume` to `finish`; otherwise None.
    """

    def __init__(
        self,
        wish: JobWish,
        options: TrialOptions,
        *,
        connect: Callable[[str | None], ServerPort] = client_from_environment,
    ) -> None:
        self.patches = Patches()
        self._wish = wish
        self.options = options
        self._client_from = connect
        self.connect = partial(connect, options.server_url)
        self.active: ActiveRun | None = None
        self._record: RunRecord | None = None  # set by begin and resume
        self._weights: TrainedWeights | None = None

    @property
    def trial(self) -> TrialInfo | None:
        """The trial at the latest report, the same on every rank; None without one."""
        return None if self._record is None else self._record.trial

    @property
    def lr_factor(self) -> float:
        """The factor on learning rates for the trial's batch size; 1 before that is known."""
        return 1.0 if self._record is None else self._record.lr_factor

    def begin(self, port: TrainerPort) -> None:
        """Ask for a batch size, and set it in the trainer; errors as in `TrialSession.ask`.

        Leave a training alone that goes on from an earlier one in this process, or that is not to have a trial.
        """
        if is_disabled(port):
            return
        facts = self._facts_of(port)
        plan = self._plan_of(port, facts)
        weights = TrainedWeights(port.given_model)
        if self._goes_on(port, plan.job.job_id, weights):
            return
        # Before a trial is spent on a size that cannot be. Ranks may have data of different lengths.
        decided(port, lambda: self._splits(port, plan.job.batch_sizes, facts))

        def check_registered(job: JobSpec) -> None:
            self._splits(port, job.batch_sizes, facts)
            if job.max_epochs > plan.job.max_epochs:
                raise ZeusBSOConfigError(
                    f"job {job.job_id} is registered with max_epochs={job.max_epochs}, and this trainer ends after "
                    f"{plan.job.max_epochs}, so the server would never learn that a batch size cannot reach the "
                    f"target: let it train {job.max_epochs} epochs, or use another job_id"
                )

        def ask(session: TrialSession) -> None:
            batch_size, sizes = session.ask(check_registered), session.plan.job.batch_sizes
            if batch_size not in sizes:
                raise ZeusBSOConfigError(
                    f"the server chose batch size {batch_size}, which is not one of the job's: {list(sizes)}"
                )

        self._enter(port, plan, EpochCount(), ask)
        self._weights = weights

    def _goes_on(self, port: TrainerPort, job_id: str | None, weights: TrainedWeights) -> bool:
        """Return True, with a warning, if the training goes on from an earlier one in this process."""

        def find() -> str | None:
            if job_id is not None and weights.are_of(job_id):
                return f"an earlier training of job {job_id} has trained this model, and this one goes on from there"
            if port.epochs_before and not self._wish.said_epochs:  # of which the trainer then checks the number
                return f"this Trainer goes on after epoch {port.epochs_before} of an earlier training"
            return None

        reason = decided(port, find)
        if reason is not None and port.rank == 0:
            _logger.warning(
                "%s: it has its own batch size, and is neither measured nor reported. For a trial, train a new model "
                "with a new Trainer",
                reason,
            )
        return reason is not None

    def resume(self, port: TrainerPort, saved: Callable[[], Mapping[str, Any] | None]) -> None:
        """Continue the trial of a checkpoint at its batch size; without one, leave the training alone.

        `saved` reads the result of `state`, on rank 0; None or empty for a checkpoint without a trial. Errors as in
        `TrialSession.resume`, and `ZeusBSOConfigError` if these devices cannot train at the trial's size; then the
        trial can still continue elsewhere.
        """
        if is_disabled(port):
            return

        def resumable() -> Mapping[str, Any] | None:
            state = saved()
            if not state:
                return None
            # Check before resuming, so that a failure leaves the trial resumable elsewhere. The job may have lost this
            # size since.
            self._splits(port, [TrialInfo.restored(state.get("trial", {})).batch_size])
            return state

        state = decided(port, resumable)
        if state is None:
            if port.rank == 0:
                _logger.warning(
                    "the checkpoint holds no trial, so this training continues at its own batch size, unmeasured and "
                    "unreported: the rest of a training says nothing about a whole training. Train from the "
                    "start to let the server choose"
                )
            return
        epochs = EpochCount(state.get("has_fractions"))
        saved_job = state.get("job")
        facts = self._facts_of(port) if self._wish.job is None and saved_job is None else None
        self._enter(port, self._plan_of(port, facts, saved_job), epochs, lambda it: it.resume(state["trial"]))
        if self.active is not None:
            self.active.first_weights_are = "weights of the checkpoint"

    def state(self) -> dict[str, Any]:
        """Return the trial for a checkpoint, in plain types; empty without a trial.

        An open window is closed into the totals, and the next window opens.
        """
        if self.active is not None:
            self.active.count_open_window()
        record = self._record
        if record is None:
            return {}
        return {
            "trial": record.trial.model_dump(mode="json"),
            "has_fractions": record.epochs.has_fractions,
            # Save the resolved job: defaults may be inferred differently on resume.
            "job": record.job.model_dump(mode="json"),
        }

    def finish(
        self, error: BaseException | None = None, *, early_end: str | None = None, next_step: str | None = None
    ) -> None:
        """Undo all changes, and end a trial without a verdict; the second call does nothing.

        Meant for exit paths: makes no collective call, and never raises, so that it does not mask the `error` that
        ended the training. Without one, `early_end` is the trainer's rule that ended it before its last epoch, if
        known. `next_step` tells the user the next step, in place of the advice to launch the training again.
        """
        active, self.active = self.active, None
        weights, self._weights = self._weights, None
        try:
            with ExitStack() as stack:  # which runs each callback even if another one fails
                if active is not None and weights is not None:
                    stack.callback(weights.end, active.record.job.job_id or "")
                if active is not None:
                    stack.callback(active.close, error, early_end, next_step)
                stack.callback(self.patches.undo)
        except Exception:
            _logger.exception("could not clean up after the training")

    def finished_by(self, port: TrainerPort, error: Exception | None = None) -> TrialRun | None:
        """End this run, and begin a trial that trains to the target in its place.

        A run that has missed its target is finished at the best known size. A run that an `error` has ended at a size
        other than the user's own is trained at the own size, from the first weights, if all ranks can do so; otherwise
        raise the error.

        Return None if the run needs no such trial. All ranks call this method with a new port, when the trainer has
        stopped. Afterwards the trainer is ready to train the job's epochs again, with the same model. If the new trial
        cannot begin, the launch ends as with the option ``"stop"``, or by the error.
        """
        active, record = self.active, self._record
        if error is not None and (active is None or record is None or not active.outlives(error)):
            raise error
        if active is None or record is None or (error is None and not active.is_to_be_finished):
            return None
        restarts = error is not None or active.restarts
        why_not = port.no_continuation
        if why_not is None and restarts and error is None and active.first_weights is None:
            why_not = "the weights are no longer finite numbers, and the first weights were not kept"
        topic = f"{record.job.job_id}/{record.trial.name}/{record.trial.batch_size}"
        if error is not None and not all_agree(port, topic, not why_not):
            raise error
        size, known_as = (record.job.default_batch_size, OWN) if error or why_not else active.best_known_size()
        if size is None:
            why_not = f"{OWN}, {record.job.default_batch_size}, has missed the target with all its epochs, too"
        if why_not is not None or size is None:
            port.say(f"zeus: this run is not finished at another batch size: {why_not}")
            return None
        begins = f"begins again with the {active.first_weights_are}" if restarts else "continues"
        if error is not None:
            _logger.warning(
                "the training at batch size %d was ended by %s",
                *(record.trial.batch_size, detail_of(error)),
                exc_info=None if is_refusal_of_size(error) else error,
            )
            release_memory(error)
        self.finish(error, next_step=f"The training {begins} at {size}, {known_as}.")
        run = TrialRun(self._wish, self.options, connect=self._client_from)
        try:
            missed, job = record.trial, record.job

            def begin(session: TrialSession) -> None:
                session.finish_run_of(missed, size, job)

            run._enter(port, record.plan, EpochCount(), begin, finishes=True)
            run._weights = TrainedWeights(port.model)
            if restarts and active.first_weights is not None:
                port.model.load_state_dict(active.first_weights)
            if run.active is not None:
                # If this trial crashes, too, at the best known size.
                run.active.first_weights, run.active.first_weights_are = active.first_weights, active.first_weights_are
            if not port.keeps_optimizers:
                active.unscale_learning_rate()  # the module may hand out the same optimizers again
            port.train_again(job.max_epochs, run.patches, keeps_state=not restarts)
        except Exception as failure:
            run.finish(failure)
            _logger.warning("the run is not finished at batch size %d: %s", size, failure)
        else:
            return run
        if error is not None:
            raise error
        return None

    def raise_failure(self) -> None:
        """Raise `ZeusBSOTrainFailError` if the trial missed its target and the options ask for the error.

        Within a search of hyperparameters or a cross-validation, which the error would end, log a warning instead.
        """
        record = self._record
        if record is None or not record.takes_reports or self.options.on_failure != "raise":
            return
        verdict = record.trial.verdict
        if record.job.target_metric is None and record.trial.metric is not None:
            return  # A run that helps to set the target misses none.
        if not record.trial.converged:
            study = study_around()
            if study is not None:
                _logger.warning("this training missed its target; %s continues with its other trainings", study)
                return
            show_in_one_paragraph()
            hint = 'or set on_failure="finish" to end each launch with a model'
            raise train_fail_error(verdict, record.trial.advice, hint)

    def _facts_of(self, port: TrainerPort) -> TrainingFacts | None:
        """Return the facts of the training; None if they cannot be known yet, and a whole job is described."""
        try:
            return port.facts(self.patches, counts_samples=self.options.steps == "samples")
        except Exception as error:  # the data may be made by a later hook
            if self._wish.job is None:
                raise
            _logger.debug("the data cannot be read before the training begins: %s", error)
            return None

    def _plan_of(
        self, port: TrainerPort, facts: TrainingFacts | None, saved_job: Mapping[str, Any] | None = None
    ) -> JobPlan:
        """Make the job of the user's description, completed from the checkpoint or from the training."""
        wish, samples = self._wish, None
        if wish.job is not None:
            plan = planned(wish, modes=port.modes(wish.monitor))
        elif saved_job is not None:
            plan = JobPlan(job=JobSpec(**saved_job), monitor=wish.monitor)
        else:
            samples = None if facts is None else facts.samples
            plan = decided(
                port,
                lambda: planned(
                    wish, facts, port.modes(wish.monitor), check_size=lambda size: self._splits(port, [size], facts)
                ),
            )
        if plan.warning is not None and port.rank == 0:
            _logger.warning("%s", plan.warning)
        data = None if facts is None else facts.data
        known = Fingerprint(monitor=wish.monitor or None, samples=samples, data=data)
        fingerprint = port.fingerprint().completed_by(known)
        script_size = None if facts is None else facts.step_size
        scaling, default = f"rate {self.options.lr_scaling}, steps {self.options.steps}", plan.job.default_batch_size
        if script_size not in (None, default) and self.options.lr_scaling != LrScaling.NONE:
            scaling += f", from {default}"  # at a pinned size, the rates are those of the script's own size
        return replace(plan, fingerprint=fingerprint, script_size=script_size, scaling=scaling)

    def _enter(
        self,
        port: TrainerPort,
        plan: JobPlan,
        epochs: EpochCount,
        begin: Callable[[TrialSession], object],
        *,
        finishes: bool = False,
    ) -> None:
        """Get the trial on rank 0, share it with all ranks, and set its size in the trainer.

        A trial that `finishes` a run leaves the hyperparameters in trackers as they are, because some refuse changes.
        """
        active = ActiveRun(self, port, plan, epochs, begin, finishes=finishes)
        self.active, self._record = active, active.record
        size = active.record.trial.batch_size
        split = self._splits(port, [size])[size]
        changes = active.follow_samples(split, self.patches)
        port.deliver(split, self.patches, is_own=active.record.is_at_own_size)
        active.announce(changes)

    def _splits(
        self, port: TrainerPort, batch_sizes: Sequence[int], facts: TrainingFacts | None = None
    ) -> dict[int, BatchSplit]:
        return splits_of(port, batch_sizes, self.options.max_per_device_batch_size, facts)


def is_disabled(port: TrainerPort) -> bool:
    """Return True, and say so, if the environment turns the callback off for this training."""
    if not decided(port, lambda: DISABLED.text() not in (None, "", "0")):
        return False
    port.say(f"zeus: {DISABLED} is set: this training has its own batch size, and is neither measured nor reported")
    return True


class ActiveRun:
    """A run during its trial's training, on one rank.

    The constructor has rank 0 get the trial by `begin`. If that fails, the constructor closes its connections, and ends
    a trial that the server has begun.
    """

    def __init__(
        self,
        run: TrialRun,
        port: TrainerPort,
        plan: JobPlan,
        epochs: EpochCount,
        begin: Callable[[TrialSession], object],
        *,
        finishes: bool = False,
    ) -> None:
        options = run.options
        self._finishes = finishes
        self._port = port
        self._connect = run.connect
        self._options = options
        self._trains_on = options.after_target == "continue"
        self.first_weights: dict[str, Any] | None = None
        self.first_weights_are = "first weights of this launch"
        self._session: TrialSession | None = None  # only on rank 0
        self._own_size = own_size = plan.job.default_batch_size
        with ExitStack() as opened:
            self._monitors = TrainingMonitor(port, options.energy_monitor)
            opened.callback(self._monitors.close)

            def enter() -> tuple[Any, ...]:
                client = opened.enter_context(self._connect())
                monitor = self._monitors.monitor()
                session = TrialSession(plan, client, monitor, watch=options.watch, checks_direction=True)
                opened.push(lambda _kind, error, _traceback: session.end(error))
                self._session = session
                begin(session)
                return session.trial, session.plan, session.sender

            trial, registered, self._sender = decided(port, enter)
            self._opened = opened.pop_all()
        self._factor_of = partial(lr_factor, options.lr_scaling, trial.batch_size, own_size)
        self.unscale_learning_rate: Callable[[], None] = lambda: None  # nothing is scaled yet
        takes_reports = self._sender is not None
        self.record = RunRecord(trial, plan, registered.job, self._factor_of(None), takes_reports, epochs)
        self.watched_names = registered.watched(options.watch)
        self.steps = StepCount([], 1)  # counts nothing until the start
        self._step_scale = StepScale()
        self._schedules = ScheduleWatch(trial.batch_size)
        self._patches = run.patches
        self._plan = registered
        self._announcer = Announcer(port, registered, run.patches)

    @property
    def is_reporting(self) -> bool:
        """Whether `report_evaluation` reports: the server takes reports, and no verdict has said stop."""
        return self.record.takes_reports and not self.record.trial.is_over

    @property
    def is_beyond_target(self) -> bool:
        """True if the training continues although its trial has completed: nothing is measured or reported."""
        trial = self.record.trial
        if trial.verdict is None or not trial.converged:
            return False
        return self._trains_on or trial.verdict.reason is EndReason.NO_TARGET

    @property
    def is_to_be_finished(self) -> bool:
        """True if the run has missed its target, the options ask to finish it, and another size may reach the target.

        A run that used all its epochs at the user's own size has done the script's own work. A run that finishes
        another one is the launch's last.
        """
        record, trial = self.record, self.record.trial
        if self._options.on_failure != "finish" or not record.takes_reports or self._finishes:
            return False
        return trial.is_over and not trial.converged and not (record.is_at_own_size and trial.used_all_epochs)

    def outlives(self, error: Exception) -> bool:
        """Return True if the user's own batch size may train although this error has ended the trial."""
        record = self.record
        is_asked = self._options.on_failure == "finish" and record.takes_reports and not record.trial.converged
        return is_asked and not record.is_at_own_size and allows_another_size(error)

    @property
    def restarts(self) -> bool:
        """True if the run is to be finished from its first weights, because the present ones are not finite numbers."""
        return not all(bool(each.isfinite().all()) for each in self._port.model.parameters())

    def best_known_size(self) -> tuple[int | None, str]:
        """Return the batch size that finishes the run, and a phrase about it; all ranks make this call.

        The size is None if no size has reached the target, and the user's own has missed it with all its epochs, unless
        the run must start again.
        """

        def decide(session: TrialSession) -> tuple[int | None, str]:
            view, own = session.job_view, self.record.job.default_batch_size
            if view is not None and view.best_batch_size is not None:
                return view.best_batch_size, "the best known batch size"
            trials = () if view is None else view.trials
            has_missed = any(it.batch_size == own and it.end_reason is EndReason.MAX_EPOCHS_REACHED for it in trials)
            return None if has_missed and not self.restarts else own, OWN

        return self._decided_with(decide)

    def follow_samples(self, split: BatchSplit, patches: Patches) -> list[str]:
        """Set what the script counts in steps for this split, as the options say; return the changes in words."""
        if self._options.steps != "samples":
            return []
        self._step_scale, changes = self._port.follow_samples(self._own_size, split, patches)
        return changes

    def announce(self, changes: Sequence[str]) -> None:
        """Report the chosen batch size and the `changes`; of a trial that finishes a run, not to the trackers."""
        if self.record.takes_reports:
            place = "" if self._session is None else self._session.place
            self._announcer.begun(self.record.trial, place, to_trackers=not self._finishes)
        self._announcer.moved(changes)

    def scale_learning_rate(self) -> None:
        """Scale the rates of all optimizers and schedulers, and drive schedules by samples, as the options say."""
        optimizers, schedulers = self._port.optimizers()
        are_scaled, scale = any(self._factor_of(each) != 1.0 for each in optimizers), self._step_scale.steps
        computes_rates, fixed = self._port.dependence() if are_scaled or scale != 1 else (False, ())
        for scheduler in fixed if scale != 1 else ():
            drive_by_samples(scheduler, scale, self._patches)
            advance = f"{type(scheduler).__name__} by {float(1 / scale):.3g} of its steps in each step"
            self._announcer.moved([advance])
        if are_scaled and computes_rates:
            self.record.lr_factor = 1.0
            self._factor_of = partial(lr_factor, LrScaling.NONE, 1, 1)
            if self._port.rank == 0:
                _logger.warning(
                    "lr_scaling is left out: the module computes its learning rate from its batch size, and would "
                    "scale it twice. Compute it from a fixed size to let lr_scaling do it"
                )
            return
        if self.decide_factor(optimizers) == 1.0:
            return
        scale_learning_rate(optimizers, schedulers, self._factor_of)
        self.unscale_learning_rate = partial(
            scale_learning_rate, optimizers, schedulers, lambda each: 1 / self._factor_of(each)
        )
        if self._port.keeps_optimizers:
            self._opened.callback(self.unscale_learning_rate)
        self._schedules.scaled(optimizers, schedulers)

    def decide_factor(self, optimizers: Sequence[object]) -> float:
        """Keep, report and return the factor for these optimizers, or the names of their classes.

        If rules differ, keep the first factor that changes a rate.
        """
        factors = [self._factor_of(each) for each in optimizers]
        self.record.lr_factor = next((factor for factor in factors if factor != 1.0), 1.0)
        if not self.record.is_at_own_size:
            self._announcer.scaled(self._options.lr_scaling, zip(factors, optimizers, strict=True))
        return self.record.lr_factor

    @contextmanager
    def unscaled_rates(self) -> Iterator[None]:
        """Undo the scaling within the block, for code that sets learning rates or adds parameter groups."""
        optimizers, schedulers = self._port.optimizers()
        scale_learning_rate(optimizers, (), lambda each: 1 / self._factor_of(each))
        try:
            yield
        finally:
            scale_learning_rate(optimizers, (), self._factor_of)
            if self.record.lr_factor != 1.0:
                self._schedules.scaled(optimizers, schedulers)

    def start(self) -> None:
        """Log the choice, and begin to measure."""
        port = self._port
        self._announcer.started(self.record.trial, self.record.lr_factor)
        optimizers, _ = port.optimizers()
        self.steps = StepCount(optimizers, port.accumulation)
        self._keep_first_weights()
        self._monitors.synchronize()
        if self.record.takes_reports:
            optimizer = next((type(each).__name__ for each in optimizers), None)
            self._decided_with(lambda session: session.begin_measurement(optimizer))

    def check(self) -> None:
        """Raise `ZeusBSOConfigError` if the batch size in force is not the size that will be reported."""
        if not self.is_reporting:
            return
        port, batch_size = self._port, self.record.trial.batch_size
        expected = batch_size / (port.devices * port.accumulation)
        delivered = port.delivered()
        if any(size != expected for size in delivered):
            sizes = ", ".join("?" if size is None else f"{size:g}" for size in delivered)
            raise ZeusBSOConfigError(
                f"the train loaders deliver [{sizes}] samples per batch instead of {expected:g} (batch size "
                f"{batch_size} over {port.devices} devices × {port.accumulation} accumulated batches): something "
                "set another size after the callback had set it",
                of_size=True,
            )

    def report_evaluation(
        self, metric: Callable[[], float | None], epochs: float, *, is_repeated: bool = False
    ) -> None:
        """Report an evaluation, and stop the trainer if the server says so; do nothing after that verdict.

        With the option ``after_target="continue"``, the target does not stop the trainer.

        Args:
            metric: Returns the metric, or None before the first evaluation. Called on rank 0; every rank raises
                its error.
            epochs: Epochs of this trial trained so far. Fractions are rounded up once whole epochs were reported.
            is_repeated: True if the metric repeats the previous report.
        """
        if not self.is_reporting:
            return
        record, before = self.record, self.record.trial

        def reported(session: TrialSession) -> TrialInfo:
            value = metric()
            if value is None:
                return before
            self._port.check_samples()
            self.steps.check()
            self._schedules.check(self._port.optimizers()[0], goes_on=epochs < record.job.max_epochs)
            session.report_evaluation(value, record.epochs.reported(epochs), is_repeated=is_repeated)
            return session.trial

        self._monitors.synchronize()
        record.trial = self._decided_with(reported)
        if record.trial != before:
            self._announcer.reported(record.trial)
        if record.trial.is_over:
            self._port.end_counts()
            if not (self.is_beyond_target or (record.trial.used_all_epochs and self._port.is_in_last_epoch)):
                self._port.stop()

    def report_last_epoch(self, epochs: float) -> None:
        """Report the end of a training whose last evaluation was before its last epoch, with the latest metric.

        Otherwise the server would not learn that the training has no epochs left. Raise `ZeusBSOConfigError` if no
        evaluation was reported at all.
        """
        trial, metric = self.record.trial, self.record.trial.metric
        if metric is None and self.is_reporting and epochs >= self.record.job.max_epochs:
            raise ZeusBSOConfigError(
                f"the training ended after {epochs:g} epochs at batch size {trial.batch_size} without an evaluation, "
                "and had nothing to report: evaluate at least once in an epoch",
                of_size=True,
            )
        if metric is not None and epochs >= self.record.job.max_epochs > (trial.epoch or 0):
            self.report_evaluation(lambda: metric, epochs, is_repeated=True)

    def watch(self, values: Mapping[str, float]) -> None:
        """Send these values of watched metrics with the next report; do nothing on other ranks than 0."""
        if self._session is not None and self.is_reporting and values:
            self._session.watch(values)

    def keep_power_limits(self, choice: PowerLimitChoice, *, has_measured: bool) -> None:
        """Send the choice of a power-limit callback with the next message; called on rank 0."""
        if self._session is not None:
            self._session.keep_power_limits(choice, has_measured=has_measured)

    def count_open_window(self) -> None:
        """Close the open window into the totals and open the next one."""
        if self._session is not None:
            self._session.state_dict()
            self.record.trial = self._session.trial

    def close(self, error: BaseException | None, early_end: str | None, next_step: str | None = None) -> None:
        """End the trial if it has no verdict yet, and close session, monitor and files as `TrialRun.finish` says."""
        record, session = self.record, self._session
        with self._opened:
            self.steps.close()
            if session is not None:
                session.end(error, early_end=early_end)
                record.trial = session.trial
            if error is None and not record.trial.is_over:
                record.trial = record.trial.model_copy(update={"verdict": self._verdict_at_end(early_end)})
            if session is not None and record.takes_reports:
                if error is None:
                    went_on = self._trains_on and self.is_beyond_target
                    self._announcer.ended(record.trial, session.job_view, went_on=went_on, next_step=next_step)
                else:
                    self._announcer.broken_off(record.trial, error, session.job_view, next_step)
            elif record.takes_reports and error is not None:
                with self._connect() as client:
                    end_trial_from_another_rank(client, record.trial, error, self._sender)

    def _verdict_at_end(self, early_end: str | None) -> ReportResponse:
        if self.record.takes_reports:
            return verdict_at_end(self.record.trial, self.record.job, self._plan.monitor, early_end)
        message = "nothing of this run was measured or reported, as the trial of its checkpoint was over"
        return ReportResponse(stop_train=True, converged=False, message=message)

    def _decided_with(self, decide: Callable[[TrialSession], T]) -> T:
        """Let rank 0 decide, with its session."""
        return decided(self._port, lambda: decide(cast("TrialSession", self._session)))

    def _keep_first_weights(self) -> None:
        """Copy the model to the memory of the CPU, if the run may have to be finished from its first weights."""
        record, options = self.record, self._options
        if options.on_failure != "finish" or not record.takes_reports or self._port.no_continuation is not None:
            return
        if not record.is_at_own_size and self.first_weights is None:
            state = self._port.model.state_dict()
            self.first_weights = {
                name: value.detach().to("cpu", copy=True) if hasattr(value, "detach") else copy.deepcopy(value)
                for name, value in state.items()
            }


def error_of(train: Callable[[], object]) -> Exception | None:
    """Call a function, and return its exception or None; a signal is raised."""
    try:
        train()
    except Exception as error:
        return error
    return None


class TrainedWeights:
    """Weights of a model at the start of a training, compared with those at earlier ends and at its own end.

    A training that goes on from the weights of an earlier trial in this process reaches the target sooner than a whole
    one, at any batch size, so that it must not be a trial of the same job. Without a model, nothing is known or noted.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sum = None if model is None else sum_of_weights(model)

    def are_of(self, job_id: str) -> bool:
        """Return True if a trial of this job has left the model in this state."""
        return self._sum is not None and _TRAINED.get(self._model, {}).get(job_id) == self._sum

    def end(self, job_id: str) -> None:
        """Note that a trial of this job leaves the model as it is now; do nothing if its weights are the same."""
        now = None if self._sum is None else sum_of_weights(self._model)
        if now is not None and now != self._sum:
            _TRAINED.setdefault(self._model, {})[job_id] = now


def sum_of_weights(model: Any) -> float | None:
    """Return the sum of this process's parameters, or of its shards of them; None if it holds none."""
    parts = [getattr(each, "_local_tensor", each) for each in model.parameters()]
    held = [each.detach() for each in parts if each.numel() > 0]
    # The argument makes no copy of a parameter in double precision, as a conversion would.
    return sum(float(each.sum(dtype=sys.modules["torch"].float64)) for each in held) if held else None
