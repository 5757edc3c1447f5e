"""The way of a trial to its training: the job registered, a trial asked for or, without the server, begun."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal, get_args

from pydantic import ValidationError

from zeus_plugins.client.delivery import deliver_waiting
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus_plugins.protocol import JobRegistration, JobSpec
from zeus_plugins.training import environment
from zeus_plugins.training.trial import TrialInfo

__all__ = ["OnUnreachable", "TrialEntry", "check_on_unreachable"]

OnUnreachable = Literal["default", "raise"]
"""What becomes of a training that begins while the server is away: see `TrialSession`."""

_logger = logging.getLogger("zeus_plugins")


class TrialEntry:
    """Gets a trial for a `TrialSession`, whose arguments these are. However often it asks, it is for one trial.

    Raises:
        ZeusBSOConfigError: ``ZEUS_JOB_ID`` does not fit the job, or there is no such `on_unreachable`.
    """

    def __init__(
        self,
        job: JobSpec,
        client: ServerPort,
        monitor: EnergyMonitor,
        outbox: Outbox,
        *,
        on_unreachable: OnUnreachable,
        environ: Mapping[str, str] | None,
    ) -> None:
        check_on_unreachable(on_unreachable)
        self.job = _with_job_id_from(environ, job)
        self._client = client
        self._monitor = monitor
        self._outbox = outbox
        self._on_unreachable = on_unreachable
        self._key = secrets.token_hex(16)

    def ask(self) -> tuple[TrialInfo, JobRegistration, ZeusBSORuntimeError | None]:
        """Start a trial: see `TrialSession.ask`.

        Returns:
            The trial, its job on this hardware, and the error for which it begins without the server, if it does.
        """
        registration = JobRegistration.of(self.job, self._monitor.gpus())
        self.deliver_earlier()
        try:
            registration = self._register(registration)
            dispatch = self._client.suggest(registration.job_id or "", self._key)
        except ZeusBSORuntimeError as error:
            if self.must_raise(error):
                raise
            return *self._begun_without_server(registration, error), error
        _logger.info(
            "job %s, trial %d: batch size %d (%s)",
            *(dispatch.job_id, dispatch.trial_number, dispatch.batch_size, dispatch.reason or "chosen by the server"),
        )
        return TrialInfo(**dispatch.model_dump(exclude={"origin"})), registration, None

    def registration_of(self, trial: TrialInfo) -> JobRegistration:
        """The job on this hardware, under the name that the trial has it under."""
        registration = JobRegistration.of(self.job, self._monitor.gpus())
        return registration.model_copy(update={"job_id": trial.job_id})

    def must_raise(self, error: ZeusBSORuntimeError) -> bool:
        """Whether the training does not begin after this error."""
        return self._on_unreachable == "raise" or not error.is_outage

    def deliver_earlier(self) -> None:
        """Deliver what earlier trainings have left for this server, as far as it takes it."""
        with self._client.with_retries(NO_RETRIES) as client:
            for file in deliver_waiting(
                self._outbox, lambda server_url: client if server_url == client.server_url else None
            ):
                if file.delivered:
                    _logger.info("delivered %d results of job %s that had waited", file.delivered, file.job_id)
                if file.set_aside is not None:
                    _logger.warning(
                        "the server refuses results of job %s that had waited (%s): they are set aside as %s",
                        *(file.job_id, file.problem, file.set_aside),
                    )
                elif file.problem is not None:
                    _logger.info("%s stays: %s", file.path, file.problem)

    def _register(self, registration: JobRegistration) -> JobRegistration:
        job_id = self._client.register(registration).job_id
        if job_id is None:
            raise ZeusBSORuntimeError("the server registered the job without giving it a job_id", status=HTTPStatus.OK)
        if self.job.job_id is None:
            _logger.warning(
                "the server made a new job %s, and each run without a job_id makes another that learns nothing from "
                "the earlier ones: set job_id=%r or %s=%s to continue this job at its next recurrence",
                *(job_id, job_id, environment.JOB_ID.name, job_id),
            )
            # Kept, so that asking again after a failed dispatch does not make one more job.
            self.job = self.job.model_copy(update={"job_id": job_id})
        return registration.model_copy(update={"job_id": job_id})

    def _begun_without_server(
        self, registration: JobRegistration, error: ZeusBSORuntimeError
    ) -> tuple[TrialInfo, JobRegistration]:
        """A trial that is recorded later, with the default batch size."""
        job_id = registration.job_id or f"{registration.job_id_prefix}-{secrets.token_hex(4)}"
        trial = TrialInfo(
            job_id=job_id,
            batch_size=registration.default_batch_size,
            key=f"offline-{self._key}",
            reason="the default size, as the server could not be reached",
        )
        _logger.warning(
            "%s. This training takes the default batch size %d of job %s; its results wait in %s and count when the "
            "server is back",
            *(error, trial.batch_size, job_id, self._outbox.directory),
        )
        return trial, registration.model_copy(update={"job_id": job_id})


def check_on_unreachable(on_unreachable: str) -> None:
    """Refuse what is no `OnUnreachable`.

    Raises:
        ZeusBSOConfigError: It is none.
    """
    if on_unreachable not in get_args(OnUnreachable):
        raise ZeusBSOConfigError(f"on_unreachable is {on_unreachable!r}: choose 'default' or 'raise'")


def _with_job_id_from(environ: Mapping[str, str] | None, job: JobSpec) -> JobSpec:
    job_id = environment.JOB_ID.text(environ)
    if job.job_id is not None or not job_id:
        return job
    try:
        return JobSpec.model_validate({**job.model_dump(), "job_id": job_id})
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        raise ZeusBSOConfigError(f"{environment.JOB_ID}={job_id} does not fit the job: {problems}") from None
