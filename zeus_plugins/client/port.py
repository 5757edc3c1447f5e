"""`ServerPort`: what a training asks of a batch size optimization server, wherever that runs.

There are two: `zeus_plugins.client.http.BsoClient` speaks HTTP, and `zeus_plugins.client.local.LocalServer` is the
server in the training's own process. `tests/client/test_server_port.py` holds both to what is said here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from zeus_plugins import environment
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError, ZeusBSOTokenError
from zeus_plugins.protocol import (
    CreatedJob,
    Ending,
    HeartbeatResponse,
    JobSpecFromClient,
    JobView,
    OfflineTrial,
    PowerLimitChoice,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialId,
)

SERVER_URL_VARIABLE = environment.SERVER_URL.name
TOKEN_VARIABLE = environment.TOKEN.name
TIMEOUT_VARIABLE = environment.TIMEOUT_S.name

EMBEDDED = "embedded:"
"""The URL of the server in this process, on its default file; ``embedded:///path`` is the one on another file."""

DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Retries:
    """The repetition of requests that get no answer, or one that asks for patience.

    Waits are drawn evenly between 0 and a bound that doubles each time, so that trainings that lost the server together
    do not come back together (Brooker: Exponential Backoff and Jitter, 2015).

    Attributes:
        attempts: Times that it is sent at most.
        backoff_s: Longest wait before the second time, seconds.
        patience_s: Seconds after which it is not sent again. One that waits for its answer by then goes on waiting.
    """

    attempts: int = 4
    backoff_s: float = 0.5
    patience_s: float = 15.0

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after this attempt, counting from 1; random."""
        return random.uniform(0, self.backoff_s * 2 ** (attempt - 1))  # noqa: S311 - no secret


NO_RETRIES = Retries(attempts=1)


class ServerPort(Protocol):
    """One batch size optimization server, as a training sees it.

    Obligations of every method that asks the server:

    - It answers after the server's commit, never before.
    - Any thread may call it, in any order, also in exit functions and in signal handlers. A forked process may go on
      with its parent's port, and so may a process that got it pickled; nothing is opened before the first request.
    - It may be called again with the same arguments after any failure: what was done the first time is not done twice.
      A method that asks for more says so.
    - It raises `ZeusBSORuntimeError` with `is_outage` when the server is away, fails, or takes longer than `timeout_s`
      (`ZeusBSOServerUnreachableError` when there is no answer at all): the request may be in force or not.
    - It raises `ZeusBSOConfigError` when the server refuses the job, the settings or (`ZeusBSOTokenError`) the token,
      and any other `ZeusBSORuntimeError` when it refuses for another reason. `status` says which: 404 no such job or
      trial, 409 conflict, 422 invalid. A refusal has changed nothing.
    - What is sent of a trial says the job's `registration_id` and the trial's `lease_epoch`, where they are known. It
      is refused (409) if the job was registered anew since, or if a later run of the training has taken the trial over:
      the error's `reason` says which (`RefusalReason`).
    """

    @property
    def server_url(self) -> str:
        """The server's URL without user and password; for one in this process, ``embedded://`` and its file.

        Results that wait for this server are kept under it, so that it is the same for all its ports.
        """

    @property
    def timeout_s(self) -> float:
        """Longest wait in seconds for the server's answer as a whole."""

    def with_retries(self, retries: Retries) -> ServerPort:
        """Another port of the same server, to be closed by itself, that repeats requests so, where repeating helps."""

    def close(self) -> None:
        """Close what is open. The port can be used again afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def register(self, job: JobSpecFromClient) -> CreatedJob:
        """Register a job, or find it again when it is there with the same configuration.

        A job without a `job_id` gets a new one each time: whoever repeats the call sends the job that was answered.

        Returns:
            The job as the server keeps it.

        Raises:
            ZeusBSOConfigError: It is there with another configuration (409), or invalid (422).
        """

    def show_job(self, job_id: str, *, limit: int | None = None) -> JobView:
        """Show a registered job with its arms and trials. A Zeus server does not offer this.

        Args:
            job_id: The job.
            limit: At most so many trials, the latest ones, up to 1000. None: all of them.

        Raises:
            ZeusBSORuntimeError: No such job (404).
        """

    def request_trial(self, job_id: str, key: str | None = None) -> TrialDispatch:
        """Start a trial of a registered job; the answer says its global batch size.

        However often it is asked for with the same key, printable ASCII, it is one trial; a Zeus server starts one each
        time. None is a new key, with which no later call can ask again.

        Raises:
            ZeusBSORuntimeError: No such job (404); no batch size reached the target, or the key's trial has ended
                (409).
        """

    def record_offline(self, trial: OfflineTrial, key: str) -> TrialDispatch:
        """Have a trial recorded that began while the server was away. A Zeus server does not offer this.

        The key is one as in `request_trial`; its trial may have ended meanwhile.

        Returns:
            The trial with its number.

        Raises:
            ZeusBSORuntimeError: No such job (404).
            ZeusBSOConfigError: The job has no such batch size, or the key's trial has another one (422).
        """

    def send_report(self, result: TrainingResult) -> ReportResponse:
        """Report an evaluation of a running trial; the server hears of it as long as the answer does not say stop.

        The same report again gets the same answer again. A report of a trial that was given up brings it back.

        Args:
            result: Totals in seconds and joules since the trial began, and the metric.

        Returns:
            Whether to stop, and whether the target was reached.

        Raises:
            ZeusBSORuntimeError: No such trial (404), or it has ended, and not with this report (409).
            ZeusBSOConfigError: The report contradicts its trial or an earlier report (422).
        """

    def end_trial(self, trial: TrialId, ending: Ending | None = None) -> None:
        """End a trial that the server has not ended; one that has ended stays as it is.

        Any process may say so, not only the one that asked for the trial. Without an ending it failed; a Zeus server
        takes every end for a failure.

        Raises:
            ZeusBSORuntimeError: No such trial (404).
            ZeusBSOConfigError: It has another batch size (422).
        """

    def heartbeat(self, trial: TrialId, *, regular: bool = True, resumes: bool = False) -> HeartbeatResponse:
        """Keep a trial alive; a suspended or abandoned one runs again. A Zeus server does not offer this.

        It is `regular` if more heartbeats follow at the interval that the answer names. A training that `resumes` takes
        the trial over from the run with the trial's `lease_epoch`, unless it has ended; the answer says its own. Said
        again, that is refused as stale.

        Returns:
            Where the trial stands, even if it has ended, and when the next heartbeat is due.

        Raises:
            ZeusBSORuntimeError: No such trial (404).
            ZeusBSOConfigError: It has another batch size (422).
        """

    def store_power_profile(self, trial: TrialId, choice: PowerLimitChoice) -> None:
        """Have a trial's power limits kept, for later trials of its batch size. A Zeus server does not offer this.

        The trial may be in any state.

        Raises:
            ZeusBSORuntimeError: No such trial (404).
            ZeusBSOConfigError: It has another batch size, or its job other GPUs (422).
        """


def error_of(
    status: int,
    text: str,
    *,
    server_url: str,
    request: str,
    is_registration: bool,
    is_foreign: bool = False,
    reason: str | None = None,
) -> ZeusBSOError:
    """The error that a refusal becomes, by its HTTP status or the one that it would have over HTTP.

    A conflict is one of configurations if the request, told in words, was to register a job. A foreign answer is one
    that does not look like that of a batch size optimization server.
    """
    if status == 401:
        return ZeusBSOTokenError(
            f"the server at {server_url} does not accept the token ({status}: {text}): pass a valid token= or set "
            f"{TOKEN_VARIABLE}",
            status=status,
        )
    if status == 403:
        return ZeusBSOTokenError(
            f"the server at {server_url} does not allow that ({status}): {text}. The token is what token= or "
            f"{TOKEN_VARIABLE} says",
            status=status,
        )
    if status == 422 or (status == 409 and is_registration):
        return ZeusBSOConfigError(f"the server at {server_url} refuses the job ({status}): {text}", status=status)
    return ZeusBSORuntimeError(
        f"{request} failed ({status}): {text}", status=status, is_foreign=is_foreign, reason=reason
    )


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job's page in one file, without scripts and requests: shown in a notebook, or written to be sent.

    Attributes:
        job_id: The job.
        html: The file, a whole document.
    """

    job_id: str
    html: str = field(repr=False)

    def save(self, file: str | Path) -> Path:
        """Write it to a file, whose path is returned."""
        path = Path(file)
        path.write_text(self.html, "utf-8")
        return path

    def _repr_html_(self) -> str:
        # A frame of its own: the page's style must not become the notebook's, and nothing in it may run.
        return (
            f'<iframe title="Report of {escape(self.job_id)}" srcdoc="{escape(self.html)}" sandbox="" '
            'width="100%" height="900" style="border: 0"></iframe>'
        )
