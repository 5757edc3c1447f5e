"""`ServerPort`: the requests of a training to a batch size optimization server.

`zeus_plugins.client.http.BsoClient` implements the port over HTTP; `zeus_plugins.client.local.LocalServer` runs the
server in the training's own process. `tests/client/test_server_port.py` tests both against this interface.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Protocol, Self

from zeus_plugins.environment import TOKEN
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError, ZeusBSOTokenError
from zeus_plugins.protocol import (
    CreatedJob,
    Ending,
    HeartbeatResponse,
    JobSpecFromClient,
    JobView,
    OfflineTrial,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialId,
)

EMBEDDED = "embedded:"
"""The URL of the server in this process on its default file; ``embedded:///path`` names another file."""

DEFAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often, and when, a request is sent again that got no answer or a temporary error, within its time-out.

    Each wait is drawn uniformly between 0 and a bound that doubles, so that trainings that lost the server together do
    not retry together (Brooker: Exponential Backoff and Jitter, 2015).

    Attributes:
        attempts: Maximum number of times that a request is sent.
        backoff_s: Longest wait before the second attempt, seconds.
        until_s: Value of `time.monotonic()` at which all requests end.
    """

    attempts: int = 4
    backoff_s: float = 0.5
    until_s: float = math.inf

    def wait_s(self, attempt: int) -> float:
        """Draw the seconds to wait after this attempt, counting from 1."""
        return random.uniform(0, self.backoff_s * 2 ** (attempt - 1))  # nosec B311  # noqa: S311 - no secret

    def end_s(self, timeout_s: float) -> float:
        """Return the value of `time.monotonic()` at which a request that begins now ends."""
        return min(time.monotonic() + timeout_s, self.until_s)


NO_RETRIES = Retries(attempts=1)


def last_requests(timeout_s: float) -> Retries:
    """Return retries for the end of a training, which waits at most twice the time-out of a request."""
    return Retries(attempts=1, until_s=time.monotonic() + 2 * timeout_s)


class ServerPort(Protocol):
    """One batch size optimization server, as a training sees it.

    Every method that sends a request keeps these promises:

    - It returns only after the server's commit.
    - Any thread may call it, in any order, also in exit functions and signal handlers. A forked process may use its
      parent's port, and a port may be pickled; nothing is opened before the first request.
    - It is idempotent: after any failure, it may be called again with the same arguments. The methods that need a key
      for this say so.
    - It raises `ZeusBSORuntimeError` with `is_outage` if the server is away, fails, or takes longer than `timeout_s`
      (`ZeusBSOServerUnreachableError` without any answer); the request may still have taken effect.
    - It raises `ZeusBSOConfigError` if the server refuses the job, the settings or (`ZeusBSOTokenError`) the token, and
      `ZeusBSORuntimeError` without `is_outage` for any other refusal. `status` is 404 for an unknown job or trial, 409
      for a conflict, 422 for an invalid request or a batch size other than the trial's. A refusal changes nothing.
    - Messages about a trial carry the job's `registration_id` and the trial's `lease_epoch` and `dispatch_id`, if
      known. The server refuses them (409) if the job was registered again since, or if a later run of the training has
      taken the trial over; the error's `reason` says which (`RefusalReason`). If another training has the number of a
      trial that the database has lost, they are refused as of an unknown trial.

    Attributes:
        server_url: The server's URL without user and password, or ``embedded://`` and the file of a server in this
            process. The outbox stores results under this URL, so it is equal for all ports of a server.
        timeout_s: Longest wait in seconds for a whole answer, including retries.
    """

    server_url: str
    timeout_s: float

    def with_retries(self, retries: Retries) -> ServerPort:
        """Return another port of the same server, to be closed separately, that retries as given."""

    def close(self) -> None:
        """Close all connections. The port can be used again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def register(self, job: JobSpecFromClient) -> CreatedJob:
        """Register a job, or find the job of this id and configuration; return it as the server stores it.

        A job without a `job_id` gets a new id in each call; to repeat the call, send the job that was returned.

        Raises:
            ZeusBSOConfigError: The id has another configuration (409), or the job is invalid (422).
        """

    def show_job(self, job_id: str, *, limit: int | None = None) -> JobView:
        """Return a job with its arms and latest `limit` trials (at most 1000; None: all). A Zeus server cannot."""

    def request_trial(self, job_id: str, key: str | None = None) -> TrialDispatch:
        """Start a trial of a registered job, and return it with its global batch size.

        Requests with the same key (printable ASCII) start only one trial; a Zeus server starts a new trial for each
        request. None stands for a new key, so a repeated call starts another trial.

        Raises:
            ZeusBSORuntimeError: No batch size reached the target, or the key's trial has ended (409).
        """

    def record_offline(self, trial: OfflineTrial, key: str) -> TrialDispatch:
        """Record a trial that began while the server was away, and return it. A Zeus server lacks this route.

        The key works as in `request_trial`, but its trial may have ended.

        Raises:
            ZeusBSOConfigError: The job has no such batch size (422).
        """

    def send_report(self, result: TrainingResult) -> ReportResponse:
        """Report an evaluation of a running trial, with totals since the trial began; return the verdict.

        A repeated report gets the same answer. A report revives an abandoned trial.

        Raises:
            ZeusBSORuntimeError: The trial has ended with another report (409).
            ZeusBSOConfigError: The report contradicts an earlier report (422).
        """

    def end_trial(self, trial: TrialId, ending: Ending | None = None) -> None:
        """End a trial that the server has not ended; an ended trial stays as it is.

        Any process may call this method, not only the process that requested the trial. Without an ending, the trial
        has failed; a Zeus server treats every ending as a failure.
        """

    def heartbeat(self, trial: TrialId, *, regular: bool = True, resumes: bool = False) -> HeartbeatResponse:
        """Renew a trial's lease, or revive a suspended or abandoned trial; return its state. A Zeus server cannot.

        Args:
            trial: The trial.
            regular: Whether more heartbeats follow at the interval that the answer states.
            resumes: Whether to take the trial over from the run with `trial.lease_epoch`, unless the trial has ended.
                The answer contains the new epoch. The server refuses a repetition of this request as stale.
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
    """Return the exception for a refusal with this HTTP status; `is_foreign` if another kind of server has answered."""
    if status == 401:
        return ZeusBSOTokenError(
            f"the server at {server_url} does not accept the token ({status}: {text}): pass a valid token= or set "
            f"{TOKEN}",
            status=status,
        )
    if status == 403:
        return ZeusBSOTokenError(
            f"the server at {server_url} does not allow that ({status}): {text}. The token is what token= or "
            f"{TOKEN} says",
            status=status,
        )
    if status == 422 or (status == 409 and is_registration):
        return ZeusBSOConfigError(f"the server at {server_url} refuses the job ({status}): {text}", status=status)
    return ZeusBSORuntimeError(
        f"{request} failed ({status}): {text}", status=status, is_foreign=is_foreign, reason=reason
    )
