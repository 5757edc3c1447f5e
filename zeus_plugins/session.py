"""One trial as the training side sees it: which batch size, what it has cost, what the server said.

`TrialSession` knows no framework. The adapters (plain PyTorch, Lightning, …) call it from their hooks and hold no count
of their own; everything that must survive a checkpoint lives in `TrialInfo`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from zeus_plugins.client import BsoClient
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimError,
)
from zeus_plugins.outcomes import detail_of, is_lost_peer, outcome_of
from zeus_plugins.protocol import (
    JobRegistration,
    JobSpec,
    NonNegativeFinite,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialId,
    TrialState,
)

__all__ = ["JOB_ID_VARIABLE", "TrialInfo", "TrialSession", "end_trial_from_another_rank"]

JOB_ID_VARIABLE = "ZEUS_JOB_ID"

_WINDOW = "zeus_bso_trial"
# The wire asks for a time above 0, and a coarse clock may see none pass between two evaluations.
_LEAST_TIME_S = 1e-6
_MAX_SOURCE_LENGTH = 255

_logger = logging.getLogger("zeus_plugins")


class TrialInfo(TrialId):
    """What a training knows of its own trial; also what a checkpoint keeps of it.

    Attributes:
        reason: Why the server chose this batch size, in words; None from a Zeus server.
        time_s: Seconds measured in all closed windows since the trial began, earlier runs of a resumed trial included.
        energy_j: Joules measured in the same windows.
        energy_source: How that energy was measured; None before the first window was closed.
        epoch: Epochs trained as of the latest evaluation.
        metric: The latest finite validation metric.
        verdict: The latest answer of the server.
    """

    reason: str | None = None
    time_s: NonNegativeFinite = 0.0
    energy_j: NonNegativeFinite = 0.0
    energy_source: str | None = None
    epoch: float | None = None
    metric: float | None = None
    verdict: ReportResponse | None = None

    @property
    def trial_id(self) -> TrialId:
        """The trial's name on the wire."""
        return TrialId(job_id=self.job_id, batch_size=self.batch_size, trial_number=self.trial_number)

    @property
    def is_over(self) -> bool:
        """Whether the server said stop."""
        return self.verdict is not None and self.verdict.stop_train


class TrialSession:
    """One trial from the question for a batch size to its end.

    The order of calls is `ask`, `begin_measurement`, `report` once per evaluation until its answer says stop, `end`.
    A resumed training calls `resume` in place of `ask`. The session can be pickled before `ask`, so that it
    can travel to spawned worker processes.

    Args:
        job: The recurring job. Its `job_id` wins over the environment variable ``ZEUS_JOB_ID``; with neither, the
            server makes a new job.
        client: Talks to the server. The session uses it but does not close it.
        monitor: Measures energy and time, and knows the GPUs of the job.
        environ: Environment variables; those of the process by default.

    Raises:
        ZeusBSOConfigError: ``ZEUS_JOB_ID`` does not fit the job.
    """

    def __init__(
        self,
        job: JobSpec,
        client: BsoClient,
        monitor: EnergyMonitor,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._job = _with_job_id_from(os.environ if environ is None else environ, job)
        self._client = client
        self._monitor = monitor
        self._trial: TrialInfo | None = None
        self._measuring = False
        self._closed = False
        self._ended = False
        # The epochs that the server heard of; a checkpoint may be older than the last report.
        self._reported_epoch = 0.0

    @property
    def has_trial(self) -> bool:
        """Whether there is a trial: asked for, or restored from a checkpoint."""
        return self._trial is not None

    @property
    def trial(self) -> TrialInfo:
        """The trial as it stands now; an immutable snapshot.

        Raises:
            ZeusBSOOperationOrderError: There is no trial yet.
        """
        if self._trial is None:
            raise ZeusBSOOperationOrderError("there is no trial yet: ask for a batch size first")
        return self._trial

    @property
    def finished(self) -> bool:
        """Whether a verdict says stop. The server hears no more of this trial."""
        return self._trial is not None and self._trial.is_over

    @property
    def failed(self) -> bool:
        """Whether a verdict says stop although the target was not reached."""
        return self.finished and self.trial.verdict is not None and not self.trial.verdict.converged

    def ask(self) -> int:
        """Register the job on this hardware and start a trial.

        Returns:
            The GLOBAL batch size of the trial: samples per optimizer step over all devices.

        Raises:
            ZeusBSOOperationOrderError: There is a trial already, or the session has ended.
            ZeusBSOConfigError: The server refuses the job.
            ZeusBSORuntimError: The server cannot be reached or fails.
        """
        if self.has_trial or self._ended:
            raise ZeusBSOOperationOrderError("a session holds one trial, and this one has had it: make a new session")
        job_id = self._register()
        dispatch = self._client.suggest(job_id)
        self._trial = TrialInfo(**dispatch.model_dump(include=set(TrialId.model_fields) | {"reason"}))
        _log_choice(dispatch)
        return dispatch.batch_size

    def begin_measurement(self) -> None:
        """Open the measurement window; call it where the training begins.

        Raises:
            ZeusBSOOperationOrderError: There is no trial, it is over, or the window is open already.
        """
        self._require_live_trial()
        if self._measuring:
            raise ZeusBSOOperationOrderError("the measurement has begun already: begin it once per training")
        self._monitor.begin_window(_WINDOW)
        self._measuring = True

    def report(self, metric: float, epoch: float | None = None) -> ReportResponse:
        """Report an evaluation with the time and energy spent since the trial began.

        A metric that is NaN or infinite is not sent: the training has diverged, so the trial ends as failed on the
        server and the answer says stop. When the server cannot be reached the totals are kept, and a later call reports
        them.

        Args:
            metric: The validation metric.
            epoch: Epochs trained so far, above 0; fractional when validating within an epoch. None: one more than at
                the previous evaluation.

        Returns:
            Whether to stop, and whether the target was reached.

        Raises:
            ZeusBSOOperationOrderError: The measurement has not begun, or the trial is over.
            ZeusBSOBadOperationError: `epoch` is not a finite number above 0.
            ZeusBSORuntimError: The server cannot be reached or fails.
        """
        self._require_live_trial()
        if not self._measuring:
            raise ZeusBSOOperationOrderError("begin the measurement before the first report")
        if epoch is None:
            epoch = (self.trial.epoch or 0) + 1
        if not (math.isfinite(epoch) and epoch > 0):
            raise ZeusBSOBadOperationError(f"epoch counts epochs trained so far and is above 0, not {epoch}")
        self._turn_window()
        self._update(epoch=epoch)
        metric = float(metric)
        if not math.isfinite(metric):
            return self._conclude(self._diverged(metric))
        self._update(metric=metric)
        verdict = self._client.report(self._result(metric, max(epoch, self._reported_epoch)))
        return self._conclude(verdict)

    def end(self, error: BaseException | None = None) -> None:
        """End the session; a trial without a final verdict ends on the server, too.

        The open window counts, for a checkpoint that is written later.

        Meant for exit paths: it may be called at any time and more than once, and it logs a warning where the server
        fails, so that it never hides the error that ended the training.

        Args:
            error: What ended the training: `outcomes.outcome_of` says what becomes of the trial. None: it ended before
                the server said so, which counts as failed.
        """
        if self._ended:
            return
        self._ended = True
        self._close_window()
        if self.has_trial and not self.finished and not self._closed:
            _end_on_server(self._client, self.trial, error)

    def state_dict(self) -> dict[str, Any]:
        """The trial for a checkpoint, in plain types (readable by ``torch.load(weights_only=True)``).

        The open window counts: it is closed into the totals and the next one opened.

        Returns:
            The fields of `TrialInfo`; an empty dict when there is no trial.
        """
        if self._trial is None:
            return {}
        if self._measuring:
            self._turn_window()
        return self._trial.model_dump(mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the trial of a checkpoint. What `state_dict` gave without a trial changes nothing.

        Args:
            state: What `state_dict` returned.

        Raises:
            ZeusBSOOperationOrderError: This session has a trial already, or has ended.
            ZeusBSOConfigError: `state` is not what `state_dict` returns.
        """
        if not state:
            return
        if self.has_trial or self._ended:
            raise ZeusBSOOperationOrderError("restore a checkpoint's trial into a new session, before asking for one")
        try:
            self._trial = TrialInfo.model_validate(dict(state))
        except ValidationError as error:
            raise ZeusBSOConfigError(f"the checkpoint holds no trial that can be continued: {error}") from None
        if self._job.job_id not in (None, self._trial.job_id):
            _logger.warning(
                "the checkpoint belongs to job %s, not to job %s: continuing its trial there",
                self._trial.job_id,
                self._job.job_id,
            )

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Continue the trial of a checkpoint, if the server still takes reports on it.

        Where it does not (the trial has ended there, or the server knows it no more), the trial's batch size stands,
        but nothing is measured or reported: the rest of a training says nothing about a whole one.

        What was reported after the checkpoint was written counts: those epochs are trained again, and paid twice.

        Args:
            state: What `state_dict` returned, with a trial.

        Returns:
            Whether the trial goes on. A warning says why not.

        Raises:
            ZeusBSOOperationOrderError: This session has a trial already, or has ended.
            ZeusBSOConfigError: `state` is not what `state_dict` returns.
            ZeusBSORuntimError: The server cannot be reached or fails.
        """
        self.load_state_dict(state)
        trial = self.trial
        if self.finished and trial.verdict is not None:
            closed: str | None = f"the server said stop: {trial.verdict.message}"
        else:
            closed = self._closed_on_server()
        if closed is None:
            _logger.info(
                "job %s, trial %d goes on from the checkpoint: batch size %d, %.4g J and %.4g s so far",
                *(trial.job_id, trial.trial_number, trial.batch_size, trial.energy_j, trial.time_s),
            )
            return True
        self._closed = True
        _logger.warning(
            "the checkpoint's trial %d of job %s is over (%s): this training goes on with its batch size %d, and "
            "nothing more of it is measured or reported",
            *(trial.trial_number, trial.job_id, closed, trial.batch_size),
        )
        return False

    def _closed_on_server(self) -> str | None:
        """Why the server takes no more reports on the trial, or None when it does."""
        if self.trial.reason is None:
            return None  # It is a Zeus server's, and those know no heartbeats.
        try:
            heard = self._client.heartbeat(self.trial.trial_id, regular=False)
        except ZeusBSORuntimError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return str(error)
        if heard.state is not TrialState.RUNNING:
            return f"it is {heard.state}"
        # Epochs after the checkpoint are trained again: what they cost the first time was spent nevertheless.
        self._reported_epoch = heard.epochs or 0.0
        self._update(
            time_s=max(self.trial.time_s, heard.time_s or 0.0), energy_j=max(self.trial.energy_j, heard.energy_j or 0.0)
        )
        return None

    def _register(self) -> str:
        registered = self._client.register(JobRegistration.of(self._job, self._monitor.gpus()))
        if registered.job_id is None:
            raise ZeusBSORuntimError("the server registered the job without giving it a job_id")
        if self._job.job_id is None:
            _logger.warning(
                "the server made a new job %s, and each run without a job_id makes another that learns nothing from "
                "the earlier ones: set job_id=%r or %s=%s to continue this job at its next recurrence",
                registered.job_id,
                registered.job_id,
                JOB_ID_VARIABLE,
                registered.job_id,
            )
            # Kept, so that asking again after a failed dispatch does not make one more job.
            self._job = self._job.model_copy(update={"job_id": registered.job_id})
        return registered.job_id

    def _require_live_trial(self) -> None:
        trial = self.trial
        if self.finished and trial.verdict is not None:
            raise ZeusBSOOperationOrderError(f"the trial is over, the server said stop: {trial.verdict.message}")
        if self._ended or self._closed:
            raise ZeusBSOOperationOrderError("the trial is over: make a new session for another one")

    def _turn_window(self) -> None:
        """Close the open window into the totals and open the next at once, so that no time falls between them."""
        measured = self._monitor.end_window(_WINDOW)
        self._monitor.begin_window(_WINDOW)
        self._update(
            time_s=self.trial.time_s + measured.time_s,
            energy_j=self.trial.energy_j + measured.energy_j,
            energy_source=_joined_sources(self.trial.energy_source, measured.source),
        )

    def _result(self, metric: float, epoch: float) -> TrainingResult:
        trial = self.trial
        return TrainingResult(
            job_id=trial.job_id,
            batch_size=trial.batch_size,
            trial_number=trial.trial_number,
            time=max(trial.time_s, _LEAST_TIME_S),
            energy=trial.energy_j,
            metric=metric,
            current_epoch=epoch,
            energy_source=trial.energy_source,
        )

    def _diverged(self, metric: float) -> ReportResponse:
        _end_on_server(self._client, self.trial)
        return ReportResponse(
            stop_train=True,
            converged=False,
            message=f"the metric is {metric}: training diverged with batch size {self.trial.batch_size}",
        )

    def _conclude(self, verdict: ReportResponse) -> ReportResponse:
        self._update(verdict=verdict)
        if verdict.stop_train:
            self._discard_window()
        return verdict

    def _update(self, **fields: Any) -> None:
        self._trial = self.trial.model_copy(update=fields)

    def _close_window(self) -> None:
        if not self._measuring:
            return
        try:
            self._turn_window()
        except Exception as error:
            # Not worth an error in place of the one that ended the training.
            _logger.debug("could not close the last measurement window: %s", error)
        self._discard_window()

    def _discard_window(self) -> None:
        if not self._measuring:
            return
        self._measuring = False
        try:
            self._monitor.end_window(_WINDOW)
        except Exception as error:
            # Nobody needs this measurement; the verdict, or the error that ended the training, must not be lost to it.
            _logger.debug("could not close the last measurement window: %s", error)


def end_trial_from_another_rank(client: BsoClient, trial: TrialInfo | None, error: BaseException | None) -> None:
    """Say what ended the training of a process that has no session.

    Rank 0 hears of such an error as a lost connection at best, and not that memory ran out. Logs a warning where the
    server fails, as `TrialSession.end` does.

    Args:
        client: Talks to the server.
        trial: The trial as rank 0 broadcast it, or None.
        error: What ended the training of this process.
    """
    if error is not None and trial is not None and not trial.is_over and not is_lost_peer(error):
        _end_on_server(client, trial, error)


def _end_on_server(client: BsoClient, trial: TrialInfo, error: BaseException | None = None) -> None:
    try:
        if error is None:
            client.end_trial(trial.trial_id)
        else:
            client.end_trial(trial.trial_id, outcome_of(error), detail_of(error))
    except ZeusBSOError as failure:
        _logger.warning("could not end trial %d of job %s: %s", trial.trial_number, trial.job_id, failure)


def _with_job_id_from(environ: Mapping[str, str], job: JobSpec) -> JobSpec:
    job_id = environ.get(JOB_ID_VARIABLE)
    if job.job_id is not None or not job_id:
        return job
    try:
        return JobSpec.model_validate({**job.model_dump(), "job_id": job_id})
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        raise ZeusBSOConfigError(f"{JOB_ID_VARIABLE}={job_id} does not fit the job: {problems}") from None


def _joined_sources(earlier: str | None, latest: str) -> str:
    """Name every way the totals were measured: a trial may resume on a machine that measures otherwise."""
    sources = earlier.split(" + ") if earlier else []
    if latest not in sources:
        sources.append(latest)
    return " + ".join(sources)[:_MAX_SOURCE_LENGTH]


def _log_choice(dispatch: TrialDispatch) -> None:
    _logger.info(
        "job %s, trial %d: batch size %d (%s)",
        dispatch.job_id,
        dispatch.trial_number,
        dispatch.batch_size,
        dispatch.reason or "chosen by the server",
    )
