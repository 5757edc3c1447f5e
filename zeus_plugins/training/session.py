"""One trial on the training side: its batch size, its cost, and the server's verdicts.

`TrialSession` knows no framework. Callbacks and the optimizer for plain loops call it, and `TrialInfo` holds everything
that must survive a checkpoint.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from zeus_plugins import environment
from zeus_plugins.client.delivery import deliver_earlier, is_refusal, recorded, registered_as, taken_over
from zeus_plugins.client.outbox import Outbox, OutboxHeader, default_outbox
from zeus_plugins.client.port import EMBEDDED, NO_RETRIES, Retries, ServerPort, last_requests
from zeus_plugins.client.reporter import TrialReporter
from zeus_plugins.energy import EnergyMonitor, WindowMonitor, as_energy_monitor
from zeus_plugins.energy.monitor import BridgedMonitor
from zeus_plugins.energy.processes import Waiting
from zeus_plugins.errors import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimeError,
    ZeusBSOTokenError,
)
from zeus_plugins.protocol import (
    LEAST_TIME_S,
    MAX_DETAIL_LENGTH,
    MAX_WATCHED,
    CreatedJob,
    Ending,
    EndReason,
    Evaluation,
    JobSpec,
    JobSpecFromClient,
    JobView,
    PowerLimitChoice,
    ReportResponse,
    StopRule,
    TrialState,
    finishing_reason,
)
from zeus_plugins.training.announce import LATEST_TRIALS
from zeus_plugins.training.arguments import check_watch
from zeus_plugins.training.defaults import JobPlan, check_direction
from zeus_plugins.training.metrics import as_written
from zeus_plugins.training.outcomes import detail_of, ending_of, outcome_of
from zeus_plugins.training.startup import FirstSteps
from zeus_plugins.training.trial import TrialInfo

_WINDOW = "zeus_bso_trial"

_logger = logging.getLogger("zeus_plugins")

# Attempts to get a trial for the own rule of learning rates and steps while other launches change the rule.
_MOST_RACES = 5


class TrialSession:
    """One trial, from the request for a batch size to the end.

    Call `ask` (or `resume`, in a resumed training, or `join`), `begin_measurement`, `report_evaluation` after each
    evaluation until its verdict says stop, and `end`; calls in another order raise `ZeusBSOOperationOrderError`. Before
    `ask`, the session can be pickled for spawned worker processes.

    Args:
        job: The recurring job, or a plan for it. Its `job_id` precedes the environment variable ``ZEUS_JOB_ID``;
            without both, the server makes a new job.
        client: The server's client; stays open.
        monitor: Measures energy and time, and knows the job's GPUs; Zeus's `ZeusMonitor` is accepted.
        outbox: Keeps results while the server is away; by default in the user's state directory.
        rank: Rank of this process, if every rank of the training may report.
        watch: Names of further metrics, which `watch` is expected to receive.
        checks_direction: Whether the first run of the job goes on to a second evaluation if its first one reaches the
            target. If the metric then moves away from the target, `report_evaluation` raises `ZeusBSOConfigError`.

    Raises:
        ZeusBSOConfigError: ``ZEUS_JOB_ID`` does not fit the job, or a name in `watch` is invalid.

    Attributes:
        plan: The job, as on the server once a trial has been asked for, and its guessed fields.
        monitor: The monitor, whose passing failures are bridged.
        job_view: The job with its latest trials, as the server shows it after the final verdict; otherwise None.
    """

    def __init__(
        self,
        job: JobSpec | JobPlan,
        client: ServerPort,
        monitor: EnergyMonitor | WindowMonitor,
        *,
        outbox: Outbox | None = None,
        rank: int | None = None,
        watch: Iterable[str] = (),
        checks_direction: bool = False,
    ) -> None:
        self.watched_names = check_watch(watch)
        self.plan = (job if isinstance(job, JobPlan) else JobPlan(job=job)).with_id_of_environment()
        self.job_view: JobView | None = None
        self._client = client
        self.monitor = BridgedMonitor(as_energy_monitor(monitor), strict=True)
        self._waiting = Waiting()
        # Until the first report of the trial; None in a resumed trial, as its first steps may have been before.
        self._first_steps: FirstSteps | None = None
        self._outbox = outbox or default_outbox()
        self._rank = rank
        self._key = secrets.token_hex(16)  # by which a repeated request finds the same trial
        self._trial: TrialInfo | None = None
        # None without a trial, and for a checkpoint's trial that takes no reports.
        self._reporter: TrialReporter | None = None
        self._measuring = False
        self._ended = False
        # Whether the next evaluation is the first of the job; it is held back if it reaches the target.
        self._checks_direction = checks_direction
        self._is_first = False
        self._held: Evaluation | None = None
        # The last reported epoch of a resumed trial; the checkpoint may be older than that report.
        self._reported_epoch = 0.0

    @property
    def has_trial(self) -> bool:
        """True if there is a trial: asked for, or restored from a checkpoint."""
        return self._trial is not None

    @property
    def trial(self) -> TrialInfo:
        """The present state of the trial, immutable."""
        if self._trial is None:
            raise ZeusBSOOperationOrderError("there is no trial yet: ask for a batch size first")
        if self._reporter is None:
            return self._trial
        trial, reporter = self._trial, self._reporter
        cost_j = reporter.job.cost_j(time_s=trial.time_s, energy_j=trial.energy_j)
        return trial.known_as(
            reporter.trial, stop_rule=reporter.rule, cost_j=None if trial.unmeasured is not None else cost_j
        )

    @property
    def sender(self) -> OutboxHeader | None:
        """The trial to which results in the outbox belong; None without a trial to report on."""
        return None if self._reporter is None else self._reporter.sender

    @property
    def place(self) -> str:
        """The place of the trial's results: the server, or the outbox until the server has recorded the trial."""
        waits = self._trial is not None and self.trial.trial_number is None
        return str(self._outbox.directory) if waits else self._client.server_url.removeprefix(f"{EMBEDDED}//")

    @property
    def finished(self) -> bool:
        """True if a verdict says stop. The server receives no more reports on this trial."""
        return self._trial is not None and self._trial.is_over

    def ask(self, check: Callable[[JobSpec], None] | None = None) -> int:
        """Register the job on this hardware, start a trial, and return its GLOBAL batch size.

        First deliver the results that earlier trainings have left for this server. While the server is away, return the
        job's default size; the trial is then recorded later. After an error, a repeated call is for the same trial.

        Args:
            check: Raises if this training cannot do the registered job, which may differ from the guessed one.

        Raises:
            ZeusBSOConfigError: The server refuses the job or the token.
            ZeusBSORuntimeError: The server refuses for another reason.
        """
        if self.has_trial or self._ended:
            raise ZeusBSOOperationOrderError("a session holds one trial, and this one has had it: make a new session")
        gpus = self.monitor.gpus()
        self.plan = replace(self.plan, job=self.plan.on(gpus))
        job = JobSpecFromClient.of(self.plan.job, gpus).with_fingerprint(self.plan.fingerprint)
        if self.plan.scaling is not None:
            job = job.model_copy(update={"scaling": self.plan.scaling})
        deliver_earlier(self._outbox, self._client)
        registration: JobSpecFromClient = job
        trouble: ZeusBSORuntimeError | None = None
        try:
            for _ in range(_MOST_RACES):
                registration = self._register(job)
                if check is not None:
                    check(self.plan.job)
                dispatch = self._client.request_trial(registration.job_id, self._key)
                if dispatch.scaling in (None, registration.scaling):
                    break
                # Another launch has changed the rule since the registration, and the trial would count for that rule.
                detail = f"another launch changed the scaling to {dispatch.scaling!r} at the same time"
                self._client.end_trial(dispatch, Ending(outcome=TrialState.WITHDRAWN, detail=detail))
                self._key = secrets.token_hex(16)
            else:
                raise ZeusBSOConfigError(
                    f"launches of job {registration.job_id} with different lr_scaling or steps begin again and again "
                    "at the same time: give each of them a job of its own by job_id="
                )
            trial = TrialInfo(**dispatch.model_dump(exclude={"origin", "is_first", "scaling"}))
            self._is_first = dispatch.is_first and self._checks_direction
        except ZeusBSORuntimeError as error:
            if not error.is_outage:
                raise
            trouble = error
            # A trial that is recorded later, with the default batch size: the registered one, if that much succeeded.
            registration = registration.named(
                registration.job_id or f"{registration.job_id_prefix}-{secrets.token_hex(4)}"
            )
            trial = TrialInfo(
                job_id=registration.job_id,
                batch_size=registration.default_batch_size,
                key=f"offline-{self._key}",
                reason="the default size, as the server could not be reached",
            )
            _logger.warning(
                "%s. This training takes the default batch size %d of job %s; its results wait in %s and count when "
                "the server is back",
                *(error, trial.batch_size, trial.job_id, self._outbox.directory),
            )
        self._trial = trial
        self._open_line(registration, trouble=trouble)
        return trial.batch_size

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Continue the trial of a checkpoint (`state_dict`), and return whether the server still takes reports on it.

        From then on, the server refuses reports of the trial's earlier run. If the trial has ended on the server or is
        unknown there, its batch size remains in force, but nothing is measured or reported: the rest of a training says
        nothing about a whole one. If the server is away or refuses the token, the trial continues as if the server took
        its reports. Epochs after the checkpoint are trained again, and their cost counts twice.

        Raises:
            ZeusBSOConfigError: `state` describes no trial.
            ZeusBSORuntimeError: Another service answers in the server's place.
        """
        if self.has_trial or self._ended:
            raise ZeusBSOOperationOrderError("restore a checkpoint's trial into a new session, before asking for one")
        trial = self._trial = TrialInfo.restored(state)
        if self.plan.job.job_id not in (None, trial.job_id):
            _logger.warning(
                "the checkpoint belongs to job %s, not to job %s: continuing its trial there",
                *(trial.job_id, self.plan.job.job_id),
            )
        closed: str | None
        if trial.is_over and trial.verdict is not None:
            closed = f"the server said stop: {trial.verdict.message}"
        elif trial.unmeasured is not None:
            closed = f"its energy could not be measured: {trial.unmeasured}"
        else:
            closed = self._continue_on_server(trial)
        trial = self.trial
        if closed is None:
            _logger.info(
                "job %s, %s continues from the checkpoint: batch size %d, %.4g J and %.4g s so far",
                *(trial.job_id, trial.name, trial.batch_size, trial.energy_j, trial.time_s),
            )
        else:
            _logger.warning(
                "%s of job %s, which the checkpoint holds, is over (%s): this training continues at its batch size %d, "
                "unmeasured and unreported",
                *(trial.name, trial.job_id, closed, trial.batch_size),
            )
        return closed is None

    def finish_run_of(self, missed: TrialInfo, batch_size: int, job: JobSpec) -> None:
        """Start a trial of the registered `job` at this size that finishes the run of a trial without the target.

        While the server is away, the trial waits in the outbox.

        Raises:
            ZeusBSOError: The server refuses the trial.
        """
        self.plan = replace(self.plan, job=job)
        self._trial = TrialInfo(
            job_id=missed.job_id,
            batch_size=batch_size,
            key=f"finish-{self._key}",
            continues=missed.trial_number,
            reason=finishing_reason(missed.name, missed.batch_size),
        )
        registration = self._registration(job, missed.job_id)
        try:
            trial_id = recorded(self._client, self._sender(registration, self._trial))
            self._trial = self._trial.known_as(trial_id)
        except ZeusBSOError as error:
            if is_refusal(error):
                raise
            _logger.warning("%s. The results of the rest of this run wait in %s", error, self._outbox.directory)
        self._open_line(registration, trouble=None)

    def join(self, batch_size: int, trial_number: int) -> None:
        """Let this rank, too, report the trial that rank 0 has requested; rank 0 also ends the trial.

        Number 0 is a trial that rank 0 began while the server was away: this rank then sends nothing, and stops at the
        target or after `max_epochs`.

        Raises:
            ZeusBSOConfigError: The job has no `job_id`, which names it on all ranks.
        """
        job = self.plan.job
        if job.job_id is None:
            raise ZeusBSOConfigError(
                f"rank {self._rank} reports on the trial of rank 0 and needs its id: pass JobSpec(job_id=…) or set "
                f"{environment.JOB_ID}"
            )
        registration = JobSpecFromClient.of(job, self.monitor.gpus()).named(job.job_id)
        self._trial = TrialInfo(
            job_id=job.job_id,
            batch_size=batch_size,
            trial_number=trial_number or None,
            key=None if trial_number else self._key,
        )
        self._open_line(registration, trouble=None)
        if self._reporter is not None and not trial_number:
            self._reporter.send_nothing()

    def begin_measurement(self, optimizer: str | None = None, *, scaling: str | None = None) -> None:
        """Open the measurement window; call it where the training begins.

        Only now, some frameworks know the class of the `optimizer`, which completes the job's fingerprint, and plain
        loops know the rule (`scaling`) of their rates, which then holds for the next runs.
        """
        reporter = self._require_live_trial()
        if self.trial.has_extended_server and not reporter.is_away:
            self._complete(reporter.job, optimizer, scaling)
        if self._measuring:
            raise ZeusBSOOperationOrderError(
                "the measurement has begun already: begin it once per training. If find_executable_batch_size repeats"
                " the loop, remove it: a run that is out of memory excludes its batch size"
            )
        if not self.trial.time_s:
            self._first_steps = FirstSteps()
        self._begin_window()

    def report_evaluation(
        self, metric: float, epoch: float | None = None, *, is_repeated: bool = False
    ) -> ReportResponse:
        """Report an evaluation with the time and energy since the trial began, waiting for the server excluded.

        A metric that is NaN or infinite means that the training has diverged: it is not sent, the trial ends as failed,
        and the verdict says stop. While the server is away, the result waits in the outbox, and the server's last rule
        gives the verdict.

        If the monitor fails for a time, its numbers are estimated, and `energy_source` says so. If it does not recover,
        the training continues to its target or `max_epochs`, and the trial ends as failed on the server.

        Args:
            metric: The validation metric. A number in single precision counts as written: 0.9, not 0.89999998.
            epoch: Epochs trained so far, above 0 (else `ZeusBSOBadOperationError`), fractional within an epoch. None:
                one more than at the previous evaluation.
            is_repeated: True if the metric repeats the previous report, so that it confirms no target.
        """
        reporter = self._require_live_trial()
        if not self._measuring and self.trial.unmeasured is None:
            raise ZeusBSOOperationOrderError("begin the measurement before the first report")
        if epoch is None:
            epoch = (self.trial.epoch or 0) + 1
        if not (math.isfinite(epoch) and epoch > 0):
            raise ZeusBSOBadOperationError(f"epoch counts epochs trained so far and is above 0, not {epoch}")
        self._measure(self._end_window)
        if self._first_steps is not None:
            self._update(startup_s=self._first_steps.startup_s())
            self._first_steps = None
        self._update(epoch=epoch)
        metric = as_written(float(metric))
        if math.isfinite(metric):
            self._update(metric=metric)
            verdict = self._judged(reporter, metric, epoch, is_repeated=is_repeated)
        else:
            problem = f"the metric is {metric}: training diverged"
            self._end_trial(reporter, Ending(detail=problem))
            message = f"{problem} with batch size {self.trial.batch_size}"
            verdict = ReportResponse(stop_train=True, converged=False, message=message)
        self._update(verdict=verdict)
        if verdict.stop_train:
            self._look_at_job(reporter)
        else:
            self._measure(self._begin_window)
        return verdict

    def watch(self, values: Mapping[str, float]) -> None:
        """Send these values of further metrics with the next report, which records the last value of each name.

        A value that is NaN or infinite is not sent, and removes an earlier one. After the final verdict no report
        follows: then log a warning instead.

        Raises:
            ZeusBSOConfigError: A name is invalid, or there are too many.
        """
        if self._ended or self.trial.is_over:
            _logger.warning(
                "%s came after the last report of this run and cannot be recorded: hand watched metrics over before "
                "the evaluation that ends the run",
                ", ".join(values),
            )
            return
        known = dict(self.trial.watched or {})
        check_watch([*known, *values], most=MAX_WATCHED)
        for name, value in values.items():
            number = as_written(float(value))
            if math.isfinite(number):
                known[name] = number
            else:
                known.pop(name, None)
        self._update(watched=known)

    def keep_power_limits(self, choice: PowerLimitChoice, *, has_measured: bool) -> None:
        """Send the choice of a power limit with the next report or the ending, and keep it in checkpoints.

        `has_measured` is True if this training has measured limits. Never raises.
        """
        if self._reporter is None or self._ended:
            return
        if self._first_steps is not None and has_measured:
            # This epoch has tried limits, so that its first steps differ from later steps for another reason.
            self._first_steps.close()
            self._first_steps = None
        self._update(**dict(choice))

    def end(self, error: BaseException | None = None, *, early_end: str | None = None) -> None:
        """End the session, and end its trial on the server unless the server has already ended it.

        The energy of the open window is included. This method is meant for exit paths: call it at any time, also more
        than once. If the server fails, it logs a warning instead of raising, so that the `error` that ended the
        training is not masked (for the outcome, see `outcomes.outcome_of`). Without an error, the trial counts as
        failed, because a rule of the training ended it before the verdict (`early_end` names the rule, if known).
        """
        if self._ended:
            return
        self._ended = True
        if self._first_steps is not None:
            self._first_steps.close()
        closing = last_requests(self._client.timeout_s)
        if error is None and self.has_trial and self.trial.epoch is not None:
            self._warn_of_unwatched()
        if self._measuring:
            try:
                self._end_window()
            except Exception as failure:
                # Do not mask the original exception; mark the trial as unmeasured.
                self._update(unmeasured=detail_of(failure))
                _logger.debug("could not close the last measurement window: %s", failure)
        if self._reporter is not None:
            broke_down = error is not None and outcome_of(error) in (TrialState.FAILED, TrialState.INFEASIBLE)
            if self._held is not None and (error is None or broke_down) and self.trial.unmeasured is None:
                self._update(verdict=self._report_held(self._reporter))
                self._look_at_job(self._reporter)
            ending = None if self.finished else ending_of(error, early_end=early_end)
            if self._rank and ending is not None and ending.outcome is not TrialState.INFEASIBLE:
                ending = None  # Rank 0 knows how the training ended, but not that another rank ran out of memory.
            self._end_trial(self._reporter, ending)
            if ending is not None and ending.outcome is TrialState.FAILED:
                self._look_at_job(self._reporter, closing)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of `TrialInfo` for a checkpoint, in plain types (for ``torch.load(weights_only=True)``).

        An open window is closed into the totals, and the next window opens. Empty without a trial.
        """
        if self._trial is None:
            return {}
        if self._measuring:
            self._measure(self._end_window)
            self._measure(self._begin_window)
        return self.trial.model_dump(mode="json")

    # Getting a trial

    def _register(self, job: JobSpecFromClient) -> CreatedJob:
        follows = self.plan.follows
        known = registered_as(self._client, job, follows, revises=True)
        update = {name: getattr(known, name) for name in follows}
        if self.plan.job.target_metric is None:
            update["target_metric"] = known.target_metric
            if known.target_metric is not None:
                self.plan = replace(self.plan, target_in_words=known.target_in_words)
        self.plan = replace(self.plan, job=self.plan.job.model_copy(update=update))
        self.plan.compare(known)
        self.plan.compare_samples(known)
        job_id = known.job_id
        if self.plan.job.job_id is None:
            _logger.warning(
                "the server made a new job %s, and each run without a job_id makes another that learns nothing from "
                "the earlier ones: set job_id=%r or %s=%s to continue this job at its next recurrence",
                *(job_id, job_id, environment.JOB_ID.name, job_id),
            )
            # Keep the id, so that a repeated request after a failed dispatch does not make another job.
            self.plan = replace(self.plan, job=self.plan.job.model_copy(update={"job_id": job_id}))
        if job.target_metric is None:
            # The server recognises its own target by these numbers when it gets the registration again.
            update["target_runs"] = known.target_runs or ()
        return job.model_copy(update={**update, "scaling": known.scaling}).named(job_id)

    def _complete(self, registration: CreatedJob, optimizer: str | None, scaling: str | None) -> None:
        is_other = scaling not in (None, registration.scaling or "rate none")
        update: dict[str, Any] = {"scaling": scaling, "revise": True} if is_other else {}
        fingerprint = self.plan.fingerprint
        if optimizer is not None and fingerprint is not None and fingerprint.optimizer is None:
            update["fingerprint"] = fingerprint.model_copy(update={"optimizer": optimizer})
            self.plan = replace(self.plan, fingerprint=update["fingerprint"])
        if not update:
            return
        try:
            known = self._client.register(registration.model_copy(update=update))
        except ZeusBSOError as error:  # the fingerprint then lacks the optimizer
            _logger.debug("the server did not take the optimizer or the rule of its rates: %s", error)
        else:
            self.plan.compare(known)

    def _continue_on_server(self, trial: TrialInfo) -> str | None:
        """Continue a checkpoint's trial; return why the server takes no more reports on it, or None."""
        job = self.plan.job
        # The checkpoint may belong to another job, whose id lacks this job's prefix.
        if not trial.job_id.startswith(job.job_id_prefix):
            job = job.model_copy(update={"job_id_prefix": trial.job_id, "job_id": trial.job_id})
        registration = self._registration(job, trial.job_id)
        sender = self._sender(registration, trial)
        deliver_earlier(self._outbox, self._client)
        trouble: ZeusBSOError | None = None
        try:
            trial_id, heard = trial.trial_id or recorded(self._client, sender), None
            self._trial = trial.known_as(trial_id)
            if trial.has_extended_server:
                trial_id, heard = taken_over(self._client, trial_id)
                self._trial = trial.known_as(trial_id)
        except ZeusBSOError as error:
            if is_refusal(error):
                return str(error)
            is_outage = isinstance(error, ZeusBSORuntimeError) and error.is_outage
            if not is_outage and not isinstance(error, ZeusBSOTokenError):
                raise
            trouble = error
            self._update(lease_epoch=None)  # until this run has its own
            _logger.warning("%s. The training continues with the checkpoint's trial", error)
            waiting = self._outbox.latest(sender)
            if waiting is not None:
                self._count_known(waiting.time, waiting.energy, waiting.current_epoch)
        else:
            if heard is not None and heard.state is not TrialState.RUNNING:
                return f"it is {heard.state}"
            if heard is not None:
                self._count_known(heard.time_s or 0.0, heard.energy_j or 0.0, heard.epochs or 0.0)
        self._open_line(registration, trouble=trouble, resumes=trouble is not None and trial.has_extended_server)
        return None

    def _count_known(self, time_s: float, energy_j: float, epochs: float) -> None:
        """Count the reports after the checkpoint was written: it is trained again, but was spent."""
        self._reported_epoch = epochs
        trial = self.trial
        self._update(time_s=max(trial.time_s, time_s), energy_j=max(trial.energy_j, energy_j))

    def _registration(self, job: JobSpec, job_id: str) -> CreatedJob:
        """Return the registration of a job that this launch, or the checkpoint's, has registered before."""
        registration = JobSpecFromClient.of(job, self.monitor.gpus()).named(job_id)
        # Its target may have been learned, and replaced since: ask for none.
        return registration.model_copy(update={"target_runs": ()})

    def _sender(self, registration: CreatedJob, trial: TrialInfo) -> OutboxHeader:
        return OutboxHeader(
            server_url=self._client.server_url,
            registration=registration,
            guessed=tuple(sorted(self.plan.guessed)),
            batch_size=trial.batch_size,
            trial=trial.trial_id,
            key=trial.key,
            continues=trial.continues,
        )

    def _open_line(self, registration: CreatedJob, *, trouble: ZeusBSOError | None, resumes: bool = False) -> None:
        """Start the reporter; the user has been warned of `trouble`."""
        trial = self.trial
        self._reporter = reporter = TrialReporter(
            self._client,
            self._outbox,
            self._sender(registration, trial),
            trial.stop_rule or StopRule(max_epochs=registration.max_epochs),
            takes_heartbeats=trial.has_extended_server,
            resumes=resumes,
        )
        reporter.start(trouble)

    # Measuring and reporting it

    def _require_live_trial(self) -> TrialReporter:
        trial = self.trial
        if trial.is_over and trial.verdict is not None:
            raise ZeusBSOOperationOrderError(f"the trial is over, the server said stop: {trial.verdict.message}")
        if self._ended or self._reporter is None:
            raise ZeusBSOOperationOrderError("the trial is over: make a new session for another one")
        return self._reporter

    def _warn_of_unwatched(self) -> None:
        names = self.plan.watched(self.watched_names)
        missing = [name for name in names if name not in (self.trial.watched or {})]
        if missing:
            _logger.warning(
                "no report of this run had a finite value of the watched %s: log it in an evaluation, under this name, "
                "before the last report. Values logged later, for example by a test after training, cannot be recorded",
                ", ".join(missing),
            )

    def _judged(self, reporter: TrialReporter, metric: float, epoch: float, *, is_repeated: bool) -> ReportResponse:
        if self._held is not None and self.trial.unmeasured is None:
            if not is_repeated:
                check_direction(self.plan.job, self.plan.monitor, self._held.metric, metric)
            verdict = self._report_held(reporter)
            if verdict.stop_train:
                return verdict
        trial, rule = self.trial, reporter.rule
        epoch = max(epoch, self._reported_epoch)
        if is_repeated and rule.confirmed:
            # The rule has counted this metric already.
            reporter.rule = rule = rule.model_copy(update={"confirmed_epoch": epoch})
        if trial.unmeasured is not None:
            return reporter.judge(rule, metric=metric, epochs=epoch)
        evaluation = Evaluation(
            time=max(trial.time_s, LEAST_TIME_S),
            energy=trial.energy_j,
            metric=metric,
            current_epoch=epoch,
            energy_source=trial.energy_source,
            judged_by=rule if is_repeated and rule.confirmed else None,
            waited_share=trial.waited_share,
            startup_s=trial.startup_s,
            power_limit_w=trial.power_limit_w,
            power_limits=trial.power_limits,
            watched=trial.watched,
            rank=self._rank,
        )
        is_first, self._is_first = self._is_first, False
        if is_first and reporter.job.is_reached_by(metric) and epoch < reporter.job.max_epochs:
            self._held = evaluation
            message = (
                f"{self.plan.monitor} {metric:.4g}, at the target: the job's first run goes on to its next evaluation"
            )
            return ReportResponse(
                stop_train=False, converged=False, message=message, reason=EndReason.KEEP_TRAINING, stop_rule=rule
            )
        return reporter.report_evaluation(evaluation)

    def _report_held(self, reporter: TrialReporter) -> ReportResponse:
        """Report the job's first evaluation, with the cost at that time."""
        held, self._held = cast("Evaluation", self._held), None
        verdict = reporter.report_evaluation(held)
        if verdict.stop_train:
            # The trial ended there. The training since has only shown the direction of the metric.
            self._update(epoch=held.current_epoch, metric=held.metric, time_s=held.time, energy_j=held.energy)
        return verdict

    def _end_trial(self, reporter: TrialReporter, ending: Ending | None) -> None:
        """End the trial, also with a power limit that no report has sent."""
        choice = {name: getattr(self.trial, name) for name in PowerLimitChoice.model_fields}
        reporter.end(None if ending is None else ending.model_copy(update=choice))

    def _look_at_job(self, reporter: TrialReporter, retries: Retries = NO_RETRIES) -> None:
        """Get the job after this trial, for the lines at the end of the training."""
        if reporter.is_away or not self.trial.has_extended_server:
            return
        try:
            with self._client.with_retries(retries) as client:
                self.job_view = client.show_job(self.trial.job_id, limit=LATEST_TRIALS)
        except ZeusBSOError as error:
            _logger.debug("the server does not show the job: %s", error)
        else:
            self._update(advice=self.job_view.stuck)

    def _update(self, **fields: Any) -> None:
        self._trial = self.trial.model_copy(update=fields)

    def _measure(self, step: Callable[[], None]) -> None:
        """Open or close the window; if that fails, give up the trial, but not the training."""
        if self.trial.unmeasured is not None:
            return
        try:
            step()
        except Exception as error:
            cause = detail_of(error)
        else:
            return
        trial = self.trial
        self._measuring = False
        self._update(unmeasured=cause)
        _logger.warning(
            "the energy of %s of job %s can no longer be measured (%s). The training continues to its target or "
            "its last epoch; the trial has failed and reports nothing more",
            *(trial.name, trial.job_id, cause),
        )
        if self._reporter is not None:
            detail = f"the energy could not be measured: {cause}"[:MAX_DETAIL_LENGTH]
            self._end_trial(self._reporter, Ending(detail=detail))

    def _begin_window(self) -> None:
        self._waiting.begin()
        self.monitor.begin_window(_WINDOW)
        self._measuring = True

    def _end_window(self) -> None:
        """Close the open window into the totals."""
        self._measuring = False
        measured = self.monitor.end_window(_WINDOW)
        self._trial = self.trial.plus(measured, self._waiting.end(measured.time_s))
