"""The way of a trial to its training: the job registered, a trial asked for or, without the server, begun."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Literal, get_args

from pydantic import ValidationError

from zeus_plugins.client.delivery import deliver_waiting, registered_as
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import NO_RETRIES, ServerPort
from zeus_plugins.energy import EnergyMonitor
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError
from zeus_plugins.protocol import JobRegistration, JobSpec
from zeus_plugins.training import environment
from zeus_plugins.training.defaults import JobPlan
from zeus_plugins.training.trial import TrialInfo

OnUnreachable = Literal["default", "raise"]
"""What becomes of a training that begins while the server is away: see `TrialSession`."""

_logger = logging.getLogger("zeus_plugins")


class TrialEntry:
    """Gets a trial for a `TrialSession`, whose arguments these are. However often it asks, it is for one trial.

    Attributes:
        plan: The job, as the server has it once it is registered.

    Raises:
        ZeusBSOConfigError: ``ZEUS_JOB_ID`` does not fit the job, or there is no such `on_unreachable`.
    """

    def __init__(
        self,
        job: JobSpec | JobPlan,
        client: ServerPort,
        monitor: EnergyMonitor,
        outbox: Outbox,
        *,
        on_unreachable: OnUnreachable,
        environ: Mapping[str, str] | None,
    ) -> None:
        check_on_unreachable(on_unreachable)
        self.plan = _with_job_id_from(environ, job if isinstance(job, JobPlan) else JobPlan(job=job))
        self._client = client
        self._monitor = monitor
        self._outbox = outbox
        self._on_unreachable = on_unreachable
        self._key = secrets.token_hex(16)

    @property
    def job(self) -> JobSpec:
        """The job, as the server has it once it is registered."""
        return self.plan.job

    def ask(
        self, check: Callable[[JobSpec], None] | None = None
    ) -> tuple[TrialInfo, JobRegistration, ZeusBSORuntimeError | None]:
        """Start a trial: see `TrialSession.ask`.

        Args:
            check: Refuses a job that is registered otherwise than was guessed, if this training cannot have it so.

        Returns:
            The trial, its job on this hardware, and the error for which it begins without the server, if it does.
        """
        gpus = self._monitor.gpus()
        self.plan = replace(self.plan, job=self.plan.on(gpus))
        registration = JobRegistration.of(self.job, gpus).with_fingerprint(self.plan.fingerprint)
        self.deliver_earlier()
        try:
            registration = self._register(registration)
            if check is not None:
                check(self.job)
            dispatch = self._client.suggest(registration.job_id or "", self._key)
        except ZeusBSORuntimeError as error:
            if self.must_raise(error):
                raise
            return *self._begun_without_server(registration, error), error
        return TrialInfo(**dispatch.model_dump(exclude={"origin"})), registration, None

    def registration_of(self, trial: TrialInfo) -> JobRegistration:
        """The job on this hardware, under the name that the trial has it under."""
        registration = JobRegistration.of(self.job, self._monitor.gpus())
        return registration.model_copy(update={"job_id": trial.job_id})

    def must_raise(self, error: ZeusBSOError) -> bool:
        """Whether the training does not begin after this error."""
        is_outage = isinstance(error, ZeusBSORuntimeError) and error.is_outage
        return self._on_unreachable == "raise" or not is_outage

    def deliver_earlier(self) -> None:
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

    def tell_optimizer(self, registration: JobRegistration, optimizer: str) -> None:
        """Have the server know by what the trainings optimize, which some frameworks know only when they begin.

        Raises:
            ZeusBSOConfigError: Earlier trainings used another one, and the user is strict.
        """
        if self.plan.fingerprint is None or self.plan.fingerprint.optimizer is not None:
            return
        told = self.plan.fingerprint.model_copy(update={"optimizer": optimizer})
        self.plan = replace(self.plan, fingerprint=told)
        try:
            known = self._client.register(registration.model_copy(update={"fingerprint": told}))
        except ZeusBSOError as error:  # as much as the trainings are worth without it
            _logger.debug("the server was not told the optimizer: %s", error)
        else:
            self._compare(known)

    def _register(self, registration: JobRegistration) -> JobRegistration:
        known = registered_as(self._client, registration, self.plan.guessed)
        update = {name: getattr(known, name) for name in self.plan.guessed}
        self.plan = replace(self.plan, job=self.job.model_copy(update=update))
        registration = registration.model_copy(update=update)
        self._compare(known)
        job_id = known.job_id
        if job_id is None:
            raise ZeusBSORuntimeError("the server registered the job without giving it a job_id", status=HTTPStatus.OK)
        if self.job.job_id is None:
            _logger.warning(
                "the server made a new job %s, and each run without a job_id makes another that learns nothing from "
                "the earlier ones: set job_id=%r or %s=%s to continue this job at its next recurrence",
                *(job_id, job_id, environment.JOB_ID.name, job_id),
            )
            # Kept, so that asking again after a failed dispatch does not make one more job.
            self.plan = replace(self.plan, job=self.job.model_copy(update={"job_id": job_id}))
        return registration.model_copy(update={"job_id": job_id})

    def _compare(self, known: JobRegistration) -> None:
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


def _with_job_id_from(environ: Mapping[str, str] | None, plan: JobPlan) -> JobPlan:
    job_id = environment.JOB_ID.text(environ)
    if plan.job.job_id is not None or not job_id:
        return plan
    try:
        return plan.named(job_id)
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        raise ZeusBSOConfigError(f"{environment.JOB_ID}={job_id} does not fit the job: {problems}") from None
