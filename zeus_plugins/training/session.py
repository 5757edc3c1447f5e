"""One trial as the training side sees it: which batch size, what it has cost, what the server said.

`TrialSession` knows no framework. The adapters (plain PyTorch, Lightning, …) call it from their hooks and hold no count
of their own; everything that must survive a checkpoint lives in `TrialInfo`.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from pydantic import ValidationError

from zeus_plugins import environment
from zeus_plugins.client.delivery import deliver_waiting, is_refusal, recorded, registered_as, taken_over
from zeus_plugins.client.outbox import Outbox, OutboxHeader, default_outbox
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.client.reporter import TrialReporter
from zeus_plugins.energy import EnergyMonitor, WindowMonitor, as_energy_monitor
from zeus_plugins.energy.monitor import BridgedMonitor
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
    CreatedJob,
    Ending,
    Evaluation,
    JobSpec,
    JobSpecFromClient,
    JobView,
    PowerLimitChoice,
    PowerProfile,
    ReportResponse,
    StopRule,
    TrialState,
)
from zeus_plugins.training.announce import LATEST_TRIALS, advice, warn_of_scopes
from zeus_plugins.training.defaults import JobPlan
from zeus_plugins.training.metrics import as_written
from zeus_plugins.training.outcomes import detail_of, ending_of
from zeus_plugins.training.trial import TrialInfo

OnUnreachable = Literal["default", "raise"]
"""What becomes of a training that begins while the server is away: see `TrialSession`."""

_WINDOW = "zeus_bso_trial"

_logger = logging.getLogger("zeus_plugins")


class TrialSession:
    """One trial from the question for a batch size to its end.

    The order of calls is `ask`, `begin_measurement`, `report_evaluation` once per evaluation until its answer says
    stop, `end`. A resumed training calls `resume` in place of `ask`. The session can be pickled before `ask`, so that
    it can travel to spawned worker processes.

    Args:
        job: The recurring job, or a plan for it. Its `job_id` wins over the environment variable ``ZEUS_JOB_ID``; with
            neither, the server makes a new job.
        client: Talks to the server. The session uses it but does not close it.
        monitor: Measures energy and time, and knows the GPUs of the job. One that measures as Zeus's `ZeusMonitor` does
            will do.
        on_unreachable: What becomes of a training that begins while the server is away: ``"default"``, it takes the
            job's default batch size, and its trial is recorded later; ``"raise"``, it does not begin.
        outbox: Where results wait while the server is away; by default in the user's directory for state.
        environ: Environment variables; those of the process by default.

    Raises:
        ZeusBSOConfigError: ``ZEUS_JOB_ID`` does not fit the job, or there is no such `on_unreachable`.

    Attributes:
        plan: The job, as the server has it once a trial has been asked for, and what of it was guessed.
        job_view: The job with its latest trials as the server shows it after the verdict that ended this one; None
            before that, and where the server does not show it.
    """

    def __init__(
        self,
        job: JobSpec | JobPlan,
        client: ServerPort,
        monitor: EnergyMonitor | WindowMonitor,
        *,
        on_unreachable: OnUnreachable = "default",
        outbox: Outbox | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        check_on_unreachable(on_unreachable)
        self.plan = _with_job_id_from(environ, job if isinstance(job, JobPlan) else JobPlan(job=job))
        self.job_view: JobView | None = None
        self._client = client
        self._monitor = BridgedMonitor(as_energy_monitor(monitor), strict=True)
        self._on_unreachable = on_unreachable
        self._outbox = outbox or default_outbox(environ)
        # With one key, a repeated request finds the same trial.
        self._key = secrets.token_hex(16)
        self._trial: TrialInfo | None = None
        # None without a trial, and where the server takes no reports on a checkpoint's trial.
        self._reporter: TrialReporter | None = None
        self._measuring = False
        self._ended = False
        # The epochs that the server heard of; a checkpoint may be older than the last report.
        self._reported_epoch = 0.0

    @property
    def has_trial(self) -> bool:
        """True if there is a trial: asked for, or restored from a checkpoint."""
        return self._trial is not None

    @property
    def trial(self) -> TrialInfo:
        """The trial as it stands now; an immutable snapshot.

        Raises:
            ZeusBSOOperationOrderError: There is no trial yet.
        """
        if self._trial is None:
            raise ZeusBSOOperationOrderError("there is no trial yet: ask for a batch size first")
        if self._reporter is None:
            return self._trial
        return self._trial.known_as(self._reporter.trial, stop_rule=self._reporter.rule)

    @property
    def sender(self) -> OutboxHeader | None:
        """The trial to which results that wait for the server belong; None before there is a trial to report on."""
        return None if self._reporter is None else self._reporter.sender

    @property
    def cost_j(self) -> float | None:
        """The trial's cost so far, joules; None while that is unknown."""
        if self._reporter is None or self.trial.unmeasured is not None:
            return None
        return self._reporter.job.cost_j(time_s=self.trial.time_s, energy_j=self.trial.energy_j)

    @property
    def finished(self) -> bool:
        """True if a verdict says stop. The server hears no more of this trial."""
        return self._trial is not None and self._trial.is_over

    @property
    def failed(self) -> bool:
        """True if a verdict says stop although the target was not reached."""
        return self.finished and self.trial.verdict is not None and not self.trial.verdict.converged

    def ask(self, check: Callable[[JobSpec], None] | None = None) -> int:
        """Register the job on this hardware and start a trial. A repeated call after an error is for the same trial.

        What earlier trainings have left for this server is delivered first.

        Args:
            check: Refuses a job that is registered otherwise than was guessed, if this training cannot have it so.

        Returns:
            The GLOBAL batch size of the trial: samples per optimizer step over all devices.

        Raises:
            ZeusBSOOperationOrderError: There is a trial already, or the session has ended.
            ZeusBSOConfigError: The server refuses the job or the token; or earlier trainings of the job were made of
                something else, and the user is strict.
            ZeusBSORuntimeError: The server refuses otherwise; or it cannot be reached or fails, and `on_unreachable`
                says to raise.
        """
        if self.has_trial or self._ended:
            raise ZeusBSOOperationOrderError("a session holds one trial, and this one has had it: make a new session")
        gpus = self._monitor.gpus()
        self.plan = replace(self.plan, job=self.plan.on(gpus))
        job = JobSpecFromClient.of(self.plan.job, gpus).with_fingerprint(self.plan.fingerprint)
        self._deliver_earlier()
        trouble: ZeusBSORuntimeError | None = None
        try:
            registration = self._register(job)
            if check is not None:
                check(self.plan.job)
            dispatch = self._client.request_trial(registration.job_id, self._key)
            trial = TrialInfo(**dispatch.model_dump(exclude={"origin"}))
        except ZeusBSORuntimeError as error:
            if self._must_raise(error):
                raise
            trouble = error
            # A trial that is recorded later, with the default batch size.
            registration = job.named(job.job_id or f"{job.job_id_prefix}-{secrets.token_hex(4)}")
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
        """Continue the trial of a checkpoint, if the server still takes reports on it.

        Where it does not (the trial has ended there, or the server knows it no more), the trial's batch size stands,
        but nothing is measured or reported: the rest of a training says nothing about a whole one. While the server is
        away, or does not accept the token for it, the trial goes on as if it took them. From now on the server refuses
        what an earlier run says of the trial.

        What was reported after the checkpoint was written counts: those epochs are trained again, and paid twice.

        Args:
            state: What `state_dict` returned, with a trial.

        Returns:
            True if the trial goes on. A warning says why not.

        Raises:
            ZeusBSOOperationOrderError: This session has a trial already, or has ended.
            ZeusBSOConfigError: `state` is not what `state_dict` returns.
            ZeusBSORuntimeError: The server cannot be reached or fails, and `on_unreachable` says to raise; or something
                else answers in its place.
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
                "job %s, %s goes on from the checkpoint: batch size %d, %.4g J and %.4g s so far",
                *(trial.job_id, trial.name, trial.batch_size, trial.energy_j, trial.time_s),
            )
        else:
            _logger.warning(
                "%s of job %s, which the checkpoint holds, is over (%s): this training goes on with its batch size %d, "
                "and nothing more of it is measured or reported",
                *(trial.name, trial.job_id, closed, trial.batch_size),
            )
        return closed is None

    def begin_measurement(self, optimizer: str | None = None) -> None:
        """Open the measurement window; call it where the training begins.

        Args:
            optimizer: The optimizer's class, which some frameworks know only now: the server is told, if the job's
                fingerprint lacks it.

        Raises:
            ZeusBSOConfigError: Earlier trainings of the job used another optimizer, and the user is strict.
            ZeusBSOOperationOrderError: There is no trial, it is over, or the window is open already.
        """
        reporter = self._require_live_trial()
        if optimizer is not None and self.trial.has_extended_server and not reporter.is_away:
            self._tell_optimizer(reporter.job, optimizer)
        if self._measuring:
            raise ZeusBSOOperationOrderError("the measurement has begun already: begin it once per training")
        self._begin_window()

    def report_evaluation(self, metric: float, epoch: float | None = None) -> ReportResponse:
        """Report an evaluation with the time and energy spent since the trial began.

        A metric that is NaN or infinite is not sent: the training has diverged, so the trial ends as failed on the
        server and the answer says stop. While the server is away the result waits in the outbox, and the answer follows
        from the rule that the server sent last. Waiting for the server counts neither as time nor as energy of the
        training.

        What the monitor fails to measure and can measure again is estimated, and `energy_source` says so. Where it
        goes on to fail, the training goes on to its target or `max_epochs`; the trial ends as failed on the server.

        Args:
            metric: The validation metric. A number in single precision counts as it is written: 0.9, not 0.89999998.
            epoch: Epochs trained so far, above 0; fractional when validating within an epoch. None: one more than at
                the previous evaluation.

        Returns:
            Whether to stop, and whether the target was reached.

        Raises:
            ZeusBSOOperationOrderError: The measurement has not begun, or the trial is over.
            ZeusBSOBadOperationError: `epoch` is not a finite number above 0.
        """
        reporter = self._require_live_trial()
        if not self._measuring and self.trial.unmeasured is None:
            raise ZeusBSOOperationOrderError("begin the measurement before the first report")
        if epoch is None:
            epoch = (self.trial.epoch or 0) + 1
        if not (math.isfinite(epoch) and epoch > 0):
            raise ZeusBSOBadOperationError(f"epoch counts epochs trained so far and is above 0, not {epoch}")
        self._measure(self._end_window)
        self._update(epoch=epoch)
        metric = as_written(float(metric))
        if math.isfinite(metric):
            self._update(metric=metric)
            verdict = self._judged(reporter, metric, epoch)
        else:
            problem = f"the metric is {metric}: training diverged"
            reporter.end(Ending(detail=problem))
            message = f"{problem} with batch size {self.trial.batch_size}"
            verdict = ReportResponse(stop_train=True, converged=False, message=message)
        self._update(verdict=verdict)
        if verdict.stop_train:
            self._look_at_job(reporter)
        else:
            self._measure(self._begin_window)
        return verdict

    def keep_power_limits(self, choice: PowerLimitChoice) -> None:
        """Have what the training found out of its power limits kept, for later trials of its batch size.

        Checkpoints hold it from now on, and the server gets it, at once or when it is back; this call does not wait for
        it. A trial that has ended or takes no reports, and a Zeus server, are told nothing. Never raises.
        """
        if self._reporter is None or self._ended:
            return
        self._update(power_profile=PowerProfile(gpus=choice.gpus, samples=choice.samples))
        job = self._reporter.job
        if any(getattr(job, name) != value for name, value in choice.gpus):
            _logger.warning(
                "the power limits of this training are not kept on the server, as they were measured on other devices "
                "(%s) than its cost: give both callbacks the same energy_monitor",
                choice.gpus,
            )
        elif self.trial.has_extended_server:
            self._reporter.keep_power_limits(choice)

    def end(self, error: BaseException | None = None, *, early_end: str | None = None) -> None:
        """End the session; a trial without a final verdict ends on the server, too.

        The open window counts, for a checkpoint that is written later.

        Meant for exit paths: it may be called at any time and more than once, and it logs a warning where the server
        fails, so that it never hides the error that ended the training.

        Args:
            error: What ended the training: `outcomes.outcome_of` says what becomes of the trial. None: it ended by a
                rule of its own before the server said so, which counts as failed.
            early_end: That rule in words, where it is known.
        """
        if self._ended:
            return
        self._ended = True
        if self._measuring:
            try:
                self._end_window()
            except Exception as failure:
                # Do not mask the original exception; mark the trial as unmeasured.
                self._update(unmeasured=detail_of(failure))
                _logger.debug("could not close the last measurement window: %s", failure)
        if self._reporter is not None:
            self._reporter.end(None if self.finished else ending_of(error, early_end=early_end))

    def state_dict(self) -> dict[str, Any]:
        """The trial for a checkpoint, in plain types (readable by ``torch.load(weights_only=True)``).

        The open window counts: it is closed into the totals and the next one opened.

        Returns:
            The fields of `TrialInfo`; an empty dict when there is no trial.
        """
        if self._trial is None:
            return {}
        if self._measuring:
            self._measure(self._end_window)
            self._measure(self._begin_window)
        return self.trial.model_dump(mode="json")

    # Getting a trial

    def _register(self, job: JobSpecFromClient) -> CreatedJob:
        known = registered_as(self._client, job, self.plan.guessed)
        update = {name: getattr(known, name) for name in self.plan.guessed}
        self.plan = replace(self.plan, job=self.plan.job.model_copy(update=update))
        self._compare_fingerprints(known)
        job_id = known.job_id
        if self.plan.job.job_id is None:
            _logger.warning(
                "the server made a new job %s, and each run without a job_id makes another that learns nothing from "
                "the earlier ones: set job_id=%r or %s=%s to continue this job at its next recurrence",
                *(job_id, job_id, environment.JOB_ID.name, job_id),
            )
            # Kept, so that asking again after a failed dispatch does not make one more job.
            self.plan = replace(self.plan, job=self.plan.job.model_copy(update={"job_id": job_id}))
        return job.model_copy(update=update).named(job_id)

    def _compare_fingerprints(self, known: CreatedJob) -> None:
        """Warn, or raise, where the job's earlier trainings were made of something else."""
        told = self.plan.fingerprint
        if known.fingerprint is None or told is None:
            return
        differences = known.fingerprint.differences(told)
        if not differences:
            return
        text = (
            f"the trainings of job {known.job_id} were made of something else ({'; '.join(differences)}), so what was "
            "learned from them need not hold for this one. Give it a job of its own, such as "
            f"job_id={f'{known.job_id}-{told.model}'!r}"
        )
        if self.plan.is_strict:
            raise ZeusBSOConfigError(f"{text}, or say strict=False")
        _logger.warning("%s", text)

    def _tell_optimizer(self, registration: CreatedJob, optimizer: str) -> None:
        if self.plan.fingerprint is None or self.plan.fingerprint.optimizer is not None:
            return
        told = self.plan.fingerprint.model_copy(update={"optimizer": optimizer})
        self.plan = replace(self.plan, fingerprint=told)
        try:
            known = self._client.register(registration.model_copy(update={"fingerprint": told}))
        except ZeusBSOError as error:  # as much as the trainings are worth without it
            _logger.debug("the server was not told the optimizer: %s", error)
        else:
            self._compare_fingerprints(known)

    def _must_raise(self, error: ZeusBSOError) -> bool:
        """True if the training does not begin after this error."""
        is_outage = isinstance(error, ZeusBSORuntimeError) and error.is_outage
        return self._on_unreachable == "raise" or not is_outage

    def _continue_on_server(self, trial: TrialInfo) -> str | None:
        """Go on with a checkpoint's trial. Why the server takes no more reports on it, or None when it does."""
        registration = JobSpecFromClient.of(self.plan.job, self._monitor.gpus()).named(trial.job_id)
        sender = self._sender(registration, trial)
        self._deliver_earlier()
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
            if not isinstance(error, ZeusBSOTokenError) and self._must_raise(error):
                raise
            trouble = error
            self._update(lease_epoch=None)  # until this run has one of its own
            _logger.warning("%s. The training goes on with the checkpoint's trial", error)
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
        """Count what was reported after the checkpoint was written: it is done again, and was spent nevertheless."""
        self._reported_epoch = epochs
        trial = self.trial
        self._update(time_s=max(trial.time_s, time_s), energy_j=max(trial.energy_j, energy_j))

    def _sender(self, registration: CreatedJob, trial: TrialInfo) -> OutboxHeader:
        return OutboxHeader(
            server_url=self._client.server_url,
            registration=registration,
            guessed=tuple(sorted(self.plan.guessed)),
            batch_size=trial.batch_size,
            trial=trial.trial_id,
            key=trial.key,
        )

    def _open_line(self, registration: CreatedJob, *, trouble: ZeusBSOError | None, resumes: bool = False) -> None:
        """Open the trial's line to the server; `trouble` is what the user has been warned of."""
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

    def _deliver_earlier(self) -> None:
        """Deliver what earlier trainings have left for this server, as far as it takes it."""
        told: set[str] = set()
        with self._client.with_retries(NO_RETRIES) as client:
            for file in deliver_waiting(
                self._outbox, lambda server_url: client if server_url == client.server_url else None
            ):
                if file.delivered:
                    _logger.info("delivered %d results of job %s that had waited", file.delivered, file.job_id)
                if file.set_aside is not None and file.problem is None:
                    _logger.warning(
                        "%d lines of results of job %s that had waited cannot be read: they are set aside as %s",
                        *(file.damaged_lines, file.job_id, file.set_aside),
                    )
                elif file.set_aside is not None:
                    _logger.warning(
                        "the server refuses results of job %s that had waited (%s): they are set aside as %s",
                        *(file.job_id, file.problem, file.set_aside),
                    )
                elif file.problem is not None:
                    # Whoever has no token for them would not hear of them otherwise, and nobody else comes for them.
                    level = logging.WARNING if file.needs_token and file.job_id not in told else logging.INFO
                    told.add(file.job_id)
                    _logger.log(level, "results of job %s stay in %s: %s", file.job_id, file.path, file.problem)

    # Measuring and reporting it

    def _require_live_trial(self) -> TrialReporter:
        trial = self.trial
        if trial.is_over and trial.verdict is not None:
            raise ZeusBSOOperationOrderError(f"the trial is over, the server said stop: {trial.verdict.message}")
        if self._ended or self._reporter is None:
            raise ZeusBSOOperationOrderError("the trial is over: make a new session for another one")
        return self._reporter

    def _judged(self, reporter: TrialReporter, metric: float, epoch: float) -> ReportResponse:
        trial = self.trial
        if trial.unmeasured is not None:
            return reporter.judge_unmeasured(metric=metric, epoch=epoch)
        return reporter.report_evaluation(
            Evaluation(
                time=max(trial.time_s, LEAST_TIME_S),
                energy=trial.energy_j,
                metric=metric,
                current_epoch=max(epoch, self._reported_epoch),
                energy_source=trial.energy_source,
            )
        )

    def _look_at_job(self, reporter: TrialReporter) -> None:
        """Learn how the job stands after this trial, for people to be told."""
        if reporter.is_away or not self.trial.has_extended_server:
            return
        try:
            with self._client.with_retries(NO_RETRIES) as client:
                self.job_view = client.show_job(self.trial.job_id, limit=LATEST_TRIALS)
        except ZeusBSOError as error:
            _logger.debug("the server does not show the job: %s", error)
        else:
            self._update(advice=advice(self.job_view))
            warn_of_scopes(self.job_view)

    def _update(self, **fields: Any) -> None:
        self._trial = self.trial.model_copy(update=fields)

    def _measure(self, step: Callable[[], None]) -> None:
        """Open or close the window; where that fails, the trial is given up, and the training goes on."""
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
            "the energy of %s of job %s can no longer be measured (%s). The training goes on to its target or its last "
            "epoch; the trial has failed, and nothing more of it is reported",
            *(trial.name, trial.job_id, cause),
        )
        if self._reporter is not None:
            self._reporter.end(Ending(detail=f"the energy could not be measured: {cause}"[:MAX_DETAIL_LENGTH]))

    def _begin_window(self) -> None:
        self._monitor.begin_window(_WINDOW)
        self._measuring = True

    def _end_window(self) -> None:
        """Close the open window into the totals."""
        self._measuring = False
        self._trial = self.trial.plus(self._monitor.end_window(_WINDOW))


def check_on_unreachable(on_unreachable: str) -> None:
    """Refuse what is no `OnUnreachable`.

    Raises:
        ZeusBSOConfigError: It is none.
    """
    if on_unreachable not in get_args(OnUnreachable):
        raise ZeusBSOConfigError(f"on_unreachable is {on_unreachable!r}: choose 'default' or 'raise'")


def _with_job_id_from(environ: Mapping[str, str] | None, plan: JobPlan) -> JobPlan:
    job_id = environment.JOB_ID.text(environ)
    if plan.job.job_id is not None or not job_id:
        return plan
    try:
        return plan.named(job_id)
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        raise ZeusBSOConfigError(f"{environment.JOB_ID}={job_id} does not fit the job: {problems}") from None
