"""How the training side reaches the batch size optimization server: the only module that knows the HTTP library.

`BsoClient` has one method per route. It works against this project's server and against Zeus 0.16's, whose answers lack
our optional fields and whose errors have another shape.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from zeus_plugins._error_bodies import said_in_error_body
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimError, ZeusBSOServerUnreachableError
from zeus_plugins.outcomes import Outcome
from zeus_plugins.protocol import (
    Heartbeat,
    HeartbeatResponse,
    JobList,
    JobRegistration,
    JobView,
    Paths,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    TrialState,
)

__all__ = ["SERVER_URL_VARIABLE", "TOKEN_VARIABLE", "BsoClient", "client_from_environment"]

SERVER_URL_VARIABLE = "ZEUS_SERVER_URL"
TOKEN_VARIABLE = "ZEUS_BSO_TOKEN"  # noqa: S105 - the variable's name, not a token

_DEFAULT_TIMEOUT_S = 10.0
_EXCERPT_LENGTH = 200
_MAX_PORT = 65535

_Message = TypeVar("_Message", bound=BaseModel)


class BsoClient:
    """A connection to one batch size optimization server.

    Nothing is opened before the first call, and an open connection is never pickled, so a client can be sent to another
    process at any time. It can be used again after `close`. Neither the token nor a password inside `server_url`
    appears in its repr, its errors or the log.

    Every method that talks to the server raises `ZeusBSOServerUnreachableError` when there is no answer,
    `ZeusBSOConfigError` when the server refuses the job or the token, and `ZeusBSORuntimError` for every other failure.

    Args:
        server_url: ``http://`` or ``https://`` with a host; a path prefix (behind a reverse proxy) is kept. A user and
            password inside it are sent as HTTP basic authentication.
        token: Sent as ``Authorization: Bearer``. Whitespace around it or `server_url`, as files have it, is dropped.
        timeout_s: Longest wait in seconds for each of connecting, sending, and receiving a part of the answer.
        transport: Takes the place of the network in tests.

    Raises:
        ZeusBSOConfigError: An argument cannot work.
    """

    def __init__(
        self,
        server_url: str,
        *,
        token: str | None = None,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._base_url, self._login = _parsed_server_url(server_url)
        self._token = _checked_token(token)
        if self._token and self._login:
            raise ZeusBSOConfigError(
                f"server_url {self._base_url} holds a user and a token is given too, but a request carries only one of "
                f"them: drop the user from server_url or unset {TOKEN_VARIABLE}"
            )
        if not timeout_s > 0:
            raise ZeusBSOConfigError(f"timeout_s must be above 0 seconds, not {timeout_s}")
        self._timeout_s = timeout_s
        self._transport = transport
        self._http: httpx.Client | None = None

    def __repr__(self) -> str:
        return f"BsoClient({self._base_url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_http": None}

    def close(self) -> None:
        """Close the connection, if one is open."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def register(self, job: JobRegistration) -> JobRegistration:
        """Register a job, or find it again when it is there with the same configuration.

        Args:
            job: The job on its hardware.

        Returns:
            The job as the server keeps it, with its `job_id`.
        """
        return self._decode(self._request("POST", Paths.JOBS, body=job, refuses_config=(409,)), JobRegistration)

    def suggest(self, job_id: str) -> TrialDispatch:
        """Start a trial of a registered job.

        Args:
            job_id: The job.

        Returns:
            The trial with its global batch size.
        """
        return self._decode(self._request("GET", Paths.BATCH_SIZE, params={"job_id": job_id}), TrialDispatch)

    def report(self, result: TrainingResult) -> ReportResponse:
        """Report an evaluation of a running trial.

        Args:
            result: Totals in seconds and joules since the trial began, and the metric.

        Returns:
            Whether to stop, and whether the target was reached.
        """
        return self._decode(self._request("POST", Paths.REPORT, body=result), ReportResponse)

    def end_trial(self, trial: TrialId, outcome: Outcome = TrialState.FAILED, detail: str | None = None) -> None:
        """End a trial that the server has not ended.

        Args:
            trial: The trial. Only its three identifying fields are sent.
            outcome: How it ended. A Zeus server takes every end for a failure.
            detail: What happened, in words.
        """
        self._expect_ours(
            self._request("PATCH", Paths.TRIALS, body=TrialEnd(**_name_of(trial), outcome=outcome, detail=detail))
        )

    def heartbeat(self, trial: TrialId, *, regular: bool = True) -> HeartbeatResponse:
        """Keep a trial alive; a suspended or abandoned one runs again. A Zeus server does not offer this.

        Args:
            trial: The trial.
            regular: Whether more heartbeats follow at the interval that the answer names.

        Returns:
            Where the trial stands, and when the next heartbeat is due.
        """
        beat = Heartbeat(**_name_of(trial), regular=regular)
        return self._decode(self._request("PATCH", Paths.HEARTBEAT, body=beat), HeartbeatResponse)

    def delete_job(self, job_id: str) -> None:
        """Delete a job and all its trials.

        Args:
            job_id: The job.
        """
        self._expect_ours(self._request("DELETE", Paths.JOBS, params={"job_id": job_id}))

    def list_jobs(self) -> JobList:
        """List all jobs, however many pages they fill. A Zeus server does not offer this."""
        page = self._decode(self._request("GET", Paths.API_JOBS), JobList)
        jobs = page.jobs
        while page.next_cursor is not None:
            params = {"cursor": page.next_cursor}
            page = self._decode(self._request("GET", Paths.API_JOBS, params=params), JobList)
            jobs += page.jobs
        return JobList(jobs=jobs)

    def show_job(self, job_id: str) -> JobView:
        """Show a job with its arms and trials. A Zeus server does not offer this.

        Args:
            job_id: The job.
        """
        return self._decode(self._request("GET", f"{Paths.API_JOBS}/{quote(job_id, safe='')}"), JobView)

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: BaseModel | None = None,
        refuses_config: tuple[int, ...] = (),
    ) -> httpx.Response:
        """Send one request and return its 2xx answer.

        Args:
            method: HTTP method.
            path: Path below the server's URL.
            params: Query parameters.
            body: JSON body.
            refuses_config: Statuses, beside 422, by which this route says that the job cannot work.
        """
        url = f"{self._base_url}{path}"
        content = None if body is None else body.model_dump_json()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            answer = self._connection().request(method, url, params=params, content=content, headers=headers)
        except httpx.RequestError as error:
            # The HTTP library's own traceback is sixty lines that say less than this one.
            raise ZeusBSOServerUnreachableError(self._unreachable_text(error)) from None
        if not answer.is_success:
            self._raise_refusal(answer, refuses_config)
        return answer

    def _connection(self) -> httpx.Client:
        if self._http is None:
            self._http = httpx.Client(
                auth=self._login,
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                timeout=self._timeout_s,
                transport=self._transport,
            )
        return self._http

    def _decode(self, answer: httpx.Response, message: type[_Message]) -> _Message:
        try:
            return message.model_validate_json(answer.content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            self._raise_foreign(answer, f"{where}: {first['msg']}" if where else first["msg"])

    def _expect_ours(self, answer: httpx.Response) -> None:
        """Accept any JSON, or nothing, as the answer of a route that returns nothing."""
        if not answer.content:
            return
        try:
            answer.json()
        except ValueError:
            self._raise_foreign(answer, "not JSON")

    def _raise_foreign(self, answer: httpx.Response, problem: str) -> NoReturn:
        raise ZeusBSORuntimError(
            f"{_shown_request(answer)} was answered with something else than expected ({problem}): this does not look "
            f"like a batch size optimization server. Check server_url or {SERVER_URL_VARIABLE}",
            status=answer.status_code,
        )

    def _raise_refusal(self, answer: httpx.Response, refuses_config: tuple[int, ...]) -> NoReturn:
        status = answer.status_code
        text = self._without_secrets(_refusal_text(answer))
        if status in (401, 403):
            raise ZeusBSOConfigError(
                f"the server at {self._base_url} does not accept the token ({status}: {text}): pass a valid token= or "
                f"set {TOKEN_VARIABLE}"
            )
        if status == 422 or status in refuses_config:
            raise ZeusBSOConfigError(f"the server at {self._base_url} refuses the job ({status}): {text}")
        raise ZeusBSORuntimError(f"{_shown_request(answer)} failed ({status}): {text}", status=status)

    def _unreachable_text(self, error: httpx.RequestError) -> str:
        if isinstance(error, httpx.TimeoutException):
            cause = f"timed out after {self._timeout_s:g} s"
        else:
            cause = str(error) or type(error).__name__
        return (
            f"no answer from the batch size optimization server at {self._base_url}: {self._without_secrets(cause)}. "
            f"Is `bso-server serve` running there? If it runs elsewhere, pass server_url= or set {SERVER_URL_VARIABLE}"
        )

    def _without_secrets(self, text: str) -> str:
        """Hide what a server may have echoed."""
        return text.replace(self._token, "***") if self._token else text


def _name_of(trial: TrialId) -> dict[str, Any]:
    return trial.model_dump(include=set(TrialId.model_fields))


def client_from_environment(
    server_url: str | None = None,
    token: str | None = None,
    *,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> BsoClient:
    """Make a client; what is not given comes from ``ZEUS_SERVER_URL`` and ``ZEUS_BSO_TOKEN``.

    Args:
        server_url: As in `BsoClient`.
        token: As in `BsoClient`.
        timeout_s: As in `BsoClient`.
        environ: Environment variables; those of the process by default.
        transport: As in `BsoClient`.

    Raises:
        ZeusBSOConfigError: There is no server URL, or an argument cannot work.
    """
    environ = os.environ if environ is None else environ
    url = server_url if server_url is not None else environ.get(SERVER_URL_VARIABLE)
    if not url:
        raise ZeusBSOConfigError(
            f"which batch size optimization server? Pass server_url= or set {SERVER_URL_VARIABLE}, for example "
            f"{SERVER_URL_VARIABLE}=http://127.0.0.1:8000"
        )
    chosen_token = token if token is not None else environ.get(TOKEN_VARIABLE)
    return BsoClient(url, token=chosen_token, timeout_s=timeout_s, transport=transport)


def _parsed_server_url(server_url: str) -> tuple[str, tuple[str, str] | None]:
    """Split a server's URL into what may be shown, without a trailing slash, and the user and password inside it."""
    server_url = server_url.strip()
    problem = f"server_url {_without_secret_parts(server_url)!r} "
    try:
        url = httpx.URL(server_url)
    except httpx.InvalidURL:
        # The HTTP library's own words may quote a part of a password that was not escaped.
        raise ZeusBSOConfigError(f"{problem}is not a URL: check its host and port") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ZeusBSOConfigError(f"{problem}must be http:// or https:// with a host, for example http://127.0.0.1:8000")
    if url.port is not None and not 0 < url.port <= _MAX_PORT:
        raise ZeusBSOConfigError(f"{problem}must have a port from 1 to {_MAX_PORT}")
    if url.query or url.fragment:
        raise ZeusBSOConfigError(f"{problem}must end with its path: remove what follows '?' or '#'")
    login = (url.username, url.password) if url.userinfo else None
    # A login inside the URL would be written to the log with every request.
    return str(url.copy_with(userinfo=b"")).rstrip("/"), login


def _without_secret_parts(server_url: str) -> str:
    """Hide user, password and query of something that need not be a valid URL."""
    without_login = re.sub(r"^(.*?//)?.*@", r"\1***@", server_url, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?***", without_login, flags=re.DOTALL)


def _checked_token(token: str | None) -> str | None:
    token = (token or "").strip()
    if not (token.isascii() and token.isprintable()):
        # The HTTP library would refuse such a header too, but quote the token while doing so.
        raise ZeusBSOConfigError(
            f"the token (token= or {TOKEN_VARIABLE}) holds characters that no token has: copy it anew"
        )
    return token or None


def _shown_request(answer: httpx.Response) -> str:
    return f"{answer.request.method} {answer.request.url}"


def _refusal_text(answer: httpx.Response) -> str:
    """What the server says is wrong, or, where it is no batch size optimization server, what it looks like."""
    said = said_in_error_body(answer.text)
    if said:
        return said
    if answer.is_redirect:
        where = _without_secret_parts(answer.headers.get("location", ""))
        return f"redirected to {where}; set server_url or {SERVER_URL_VARIABLE} to the server's final address"
    excerpt = " ".join(answer.text.split())[:_EXCERPT_LENGTH] or "no text"
    return f"{answer.reason_phrase}: {excerpt}. Is this a batch size optimization server? Check server_url"
