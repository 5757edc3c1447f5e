"""`ServerPort` over HTTP, against this project's server or Zeus 0.16's.

A Zeus server's answers lack our optional fields, and its errors have another format. On the training side, only this
module and `_transport.py` import the HTTP library.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from zeus_plugins.client._transport import connections_to, received_within
from zeus_plugins.client.port import DEFAULT_TIMEOUT_S, NO_RETRIES, Retries, ServerPort, error_of
from zeus_plugins.environment import SERVER_URL, TOKEN
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSOError, ZeusBSORuntimeError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import (
    CreatedJob,
    Ending,
    Heartbeat,
    HeartbeatResponse,
    JobList,
    JobSpecFromClient,
    JobView,
    OfflineTrial,
    Paths,
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    TrialList,
    faults_in_words,
)

# Share of a request's time for connecting: the rest is left to try another connection, perhaps to another replica.
_CONNECT_SHARE = 0.5
_EXCERPT_LENGTH = 200
_LONGEST_MESSAGE = 4000
# Twenty times a page of 1000 trials.
_LARGEST_ANSWER_BYTES = 16 * 2**20
_MAX_PORT = 65535
_LARGEST_PAGE = "1000"

_logger = logging.getLogger("zeus_plugins")

_Message = TypeVar("_Message", bound=BaseModel)
_Page = TypeVar("_Page", JobList, TrialList)


class BsoClient(ServerPort):
    """A connection to one batch size optimization server; see `ServerPort`.

    Requests are retried as `retries` says, because the server accepts a request twice; only `delete_job` is not
    retried. Neither the token nor a password inside `server_url` appears in the repr, in errors or in the log.

    Args:
        server_url: ``http://`` or ``https://`` with a host, and optionally a path prefix (behind a reverse proxy). A
            user and password inside it are sent as HTTP basic authentication. For the server in this process, use
            `zeus_plugins.client.client_from_environment`.
        token: Sent as ``Authorization: Bearer``. Whitespace around the token or `server_url`, as in files, is removed.
        timeout_s: Longest wait in seconds for a whole answer, including name lookup and connecting (at most half of the
            time), sending, receiving and retries.
        retries: How often a request without an answer is sent again.
        transport: Replaces the network.

    Raises:
        ZeusBSOConfigError: An argument is invalid.
    """

    def __init__(
        self,
        server_url: str,
        *,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.server_url, self._login = _parsed_server_url(server_url)
        self._token = _checked_token(token)
        if self._token and self._login:
            raise ZeusBSOConfigError(
                f"server_url {self.server_url} holds a user and a token is given too, but a request carries only one "
                f"of them: drop the user from server_url or unset {TOKEN}"
            )
        if not timeout_s > 0:
            raise ZeusBSOConfigError(f"timeout_s must be above 0 seconds, not {timeout_s}")
        self.timeout_s = timeout_s
        self._retries = retries or Retries()
        self._transport = transport
        self._http: httpx.Client | None = None
        self._http_pid = 0

    def __repr__(self) -> str:
        return f"BsoClient({self.server_url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_http": None}

    def with_retries(self, retries: Retries) -> BsoClient:
        """Return a client of the same server with a connection of its own."""
        other = copy.copy(self)
        other._http, other._retries = None, retries
        return other

    def close(self) -> None:
        """Close the connection, if one is open."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def register(self, job: JobSpecFromClient) -> CreatedJob:
        # `job` may be a `CreatedJob`, an answer of the server, whose JSON lacks `revise`.
        return self._decode(
            self._request("POST", Paths.JOBS, body=JobSpecFromClient.model_construct(**dict(job))), CreatedJob
        )

    def request_trial(self, job_id: str, key: str | None = None) -> TrialDispatch:
        answer = self._request("GET", Paths.BATCH_SIZE, params={"job_id": job_id}, key=key or secrets.token_hex(16))
        return self._decode(answer, TrialDispatch)

    def record_offline(self, trial: OfflineTrial, key: str) -> TrialDispatch:
        return self._decode(self._request("POST", Paths.TRIALS, body=trial, key=key), TrialDispatch)

    def send_report(self, result: TrainingResult) -> ReportResponse:
        return self._decode(self._request("POST", Paths.REPORT, body=result), ReportResponse)

    def end_trial(self, trial: TrialId, ending: Ending | None = None) -> None:
        end = TrialEnd(**trial.model_dump(), **(ending or Ending()).model_dump())
        self._expect_ours(self._request("PATCH", Paths.TRIALS, body=end))

    def heartbeat(self, trial: TrialId, *, regular: bool = True, resumes: bool = False) -> HeartbeatResponse:
        beat = Heartbeat(**trial.model_dump(), regular=regular, resumes=resumes)
        return self._decode(self._request("PATCH", Paths.HEARTBEAT, body=beat), HeartbeatResponse)

    def delete_job(self, job_id: str) -> None:
        """Delete a job and all its trials."""
        with self.with_retries(NO_RETRIES) as client:
            client._expect_ours(client._request("DELETE", Paths.JOBS, params={"job_id": job_id}))

    def list_jobs(self) -> JobList:
        """List the jobs of all pages. A Zeus server lacks this route."""
        return JobList(jobs=tuple(job for page in self._pages(Paths.API_JOBS, JobList) for job in page.jobs))

    def show_job(self, job_id: str, *, limit: int | None = None) -> JobView:
        path = f"{Paths.API_JOBS}/{quote(job_id, safe='')}"
        params = None if limit is None else {"limit": str(limit)}
        view = self._decode(self._request("GET", path, params=params), JobView)
        if limit is not None or len(view.trials) >= view.trial_count:
            return view
        pages = self._pages(f"{path}/trials", TrialList, limit=_LARGEST_PAGE)
        return view.model_copy(update={"trials": tuple(trial for page in pages for trial in page.trials)})

    def _pages(self, path: str, kind: type[_Page], **query: str) -> Iterator[_Page]:
        while True:
            page = self._decode(self._request("GET", path, params=query), kind)
            yield page
            if page.next_cursor is None:
                return
            query["cursor"] = str(page.next_cursor)

    def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: BaseModel | None = None,
        key: str | None = None,
    ) -> httpx.Response:
        """Send a request with its `Idempotency-Key`, retry it if necessary, and return its 2xx answer."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        request = self._connection().build_request(
            method,
            f"{self.server_url}{path}",
            params=params,
            content=None if body is None else body.model_dump_json(),
            headers=headers,
        )
        end_s = self._retries.end_s(self.timeout_s)
        attempt = 1
        while True:
            try:
                return self._answered(request, end_s - time.monotonic())
            except ZeusBSORuntimeError as error:
                wait_s = self._retries.wait_s(attempt)
                if attempt >= self._retries.attempts or not error.is_outage or time.monotonic() + wait_s > end_s:
                    raise
                _logger.debug("attempt %d of %s %s: %s", attempt, method, path, error)
            time.sleep(wait_s)
            attempt += 1

    def _answered(self, request: httpx.Request, limit_s: float) -> httpx.Response:
        request.extensions["timeout"] = httpx.Timeout(limit_s, connect=_CONNECT_SHARE * limit_s).as_dict()
        connection = self._connection()
        try:
            answer = received_within(limit_s, lambda: _received(connection, request))
        except BaseException as error:
            # After a time-out, or an interrupt of this thread, the other thread still waits for the answer.
            self.close()
            if not isinstance(error, Exception):
                raise
            # Do not chain the error: httpx's traceback adds sixty lines and no information. Errors of other classes
            # count as well: httpcore passes on those of its SOCKS library.
            raise ZeusBSOServerUnreachableError(self._unreachable_text(error)) from None
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    def _connection(self) -> httpx.Client:
        # A forked process must not use its parent's connections.
        if self._http is None or self._http_pid != os.getpid():
            self._http_pid = os.getpid()
            self._http = connections_to(
                self.server_url,
                auth=self._login,
                headers={"Accept-Encoding": "identity"}
                | ({"Authorization": f"Bearer {self._token}"} if self._token else {}),
                timeout=self.timeout_s,
                # Copied, because closing a client closes its transport, which a copy of this client may use.
                transport=copy.copy(self._transport),
            )
        return self._http

    def _decode(self, answer: httpx.Response, message: type[_Message]) -> _Message:
        try:
            return message.model_validate_json(answer.content)
        except ValidationError as error:
            self._raise_foreign(answer, faults_in_words(error, most=1))

    def _expect_ours(self, answer: httpx.Response) -> None:
        """Accept any JSON, or an empty body, as the answer of a route that returns nothing."""
        try:
            json.loads(answer.content or b"null")
        except (ValueError, RecursionError):
            self._raise_foreign(answer, "not JSON")

    def _raise_foreign(self, answer: httpx.Response, problem: str) -> NoReturn:
        raise ZeusBSORuntimeError(
            f"{answer.request.method} {answer.request.url} was answered with something else than expected ({problem}): "
            f"this does not look like a batch size optimization server. Check server_url or {SERVER_URL}",
            status=answer.status_code,
            is_foreign=True,
        )

    def _refusal(self, answer: httpx.Response) -> ZeusBSOError:
        request = answer.request
        try:
            body = json.loads(_text_of(answer))
        except (ValueError, RecursionError):
            body = None
        message, reason = _message_in(body) if isinstance(body, dict) else ("", None)
        return error_of(
            answer.status_code,
            self._without_secrets(message or _excerpt_of(answer)),
            server_url=self.server_url,
            request=f"{request.method} {request.url}",
            is_registration=request.method == "POST" and request.url.path.endswith(Paths.JOBS),
            is_foreign=not message,
            reason=reason,
        )

    def _unreachable_text(self, error: Exception) -> str:
        cause = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectTimeout):
            cause = f"no connection within {_CONNECT_SHARE * self.timeout_s:g} s"
        elif isinstance(error, httpx.TimeoutException | TimeoutError):
            cause = f"timed out after {self.timeout_s:g} s"
        return (
            f"no answer from the batch size optimization server at {self.server_url}: {self._without_secrets(cause)}. "
            f"Is `bso-server serve` running there? If it runs elsewhere, pass server_url= or set {SERVER_URL}"
        )

    def _without_secrets(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


def _received(client: httpx.Client, request: httpx.Request) -> httpx.Response:
    """Send a request once and receive its whole answer, up to a maximum size.

    Refuse a compressed answer: a few bytes could expand and fill the memory.
    """
    with contextlib.closing(client.send(request, stream=True)) as answer:
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise httpx.DecodingError(f"its answer is encoded ({encoding!r:.40}), which it was asked not to be")
        body = bytearray()
        for part in answer.iter_bytes():
            body += part
            if len(body) > _LARGEST_ANSWER_BYTES:
                raise httpx.ReadError(f"its answer is larger than {_LARGEST_ANSWER_BYTES} bytes")
    return httpx.Response(
        answer.status_code,
        headers=answer.headers,
        content=bytes(body),
        request=request,
        extensions=answer.extensions,
    )


def _parsed_server_url(server_url: str) -> tuple[str, tuple[str, str] | None]:
    """Split a server's URL into a URL without login and trailing slash, and its user and password."""
    server_url = server_url.strip()
    problem = f"server_url {_without_secret_parts(server_url)!r} "
    try:
        url = httpx.URL(server_url)
    except httpx.InvalidURL:
        # Do not chain the error: it may quote a part of a password that was not escaped.
        raise ZeusBSOConfigError(f"{problem}is not a URL: check its host and port") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ZeusBSOConfigError(f"{problem}must be http:// or https:// with a host, for example http://127.0.0.1:8000")
    if url.port is not None and not 0 < url.port <= _MAX_PORT:
        raise ZeusBSOConfigError(f"{problem}must have a port from 1 to {_MAX_PORT}")
    if url.query or url.fragment:
        raise ZeusBSOConfigError(f"{problem}must end with its path: remove what follows '?' or '#'")
    login = (url.username, url.password) if url.userinfo else None
    # httpx logs the URL of each request, so the URL must not contain the login.
    return str(url.copy_with(userinfo=b"")).rstrip("/"), login


def _without_secret_parts(server_url: str) -> str:
    """Hide user, password and query in a text that may not be a valid URL."""
    without_login = re.sub(r"^(.*?//)?.*@", r"\1***@", server_url, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?***", without_login, flags=re.DOTALL)


def _checked_token(token: str | None) -> str | None:
    token = (token or "").strip()
    if not (token.isascii() and token.isprintable()):
        # httpx would refuse such a header as well, but quote the token in its error.
        raise ZeusBSOConfigError(
            f"the token (token= or {TOKEN}) has characters that tokens never have: copy the token again"
        )
    return token or None


def _excerpt_of(answer: httpx.Response) -> str:
    """Describe an answer that does not look like an answer of a batch size optimization server."""
    if answer.is_redirect:
        where = _without_secret_parts(answer.headers.get("location", ""))
        return f"redirected to {where}; set server_url or {SERVER_URL} to the server's final address"
    excerpt = " ".join(_text_of(answer).split())[:_EXCERPT_LENGTH] or "no text"
    return f"{answer.reason_phrase}: {excerpt}. Is this a batch size optimization server? Check server_url"


def _message_in(body: dict[str, Any]) -> tuple[str, str | None]:
    """Return an error's message with the invalid fields (empty for a foreign body), and the error's reason.

    Our server sends `zeus_plugins.protocol.ErrorBody`. Zeus's server sends ``{"message": …}``, and its framework
    FastAPI ``{"detail": …}`` with a text or with a list of the invalid fields.
    """
    texts = (body.get("message"), body.get("detail"))
    message = next((text for text in texts if isinstance(text, str) and text), "")
    parts, faults = [message], body.get("errors") or body.get("detail")
    for fault in faults if isinstance(faults, list) else []:
        if isinstance(fault, dict):
            field, problem = fault.get("field") or fault.get("loc"), str(fault.get("message") or fault.get("msg"))
            if isinstance(field, list):
                field = ".".join(str(part) for part in field if part not in ("body", "query"))
            if problem not in message:
                parts.append(f"{field}: {problem}")
    message = "; ".join(part for part in parts if part)
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}…"
    reason = body.get("reason")
    return message, reason if isinstance(reason, str) else None


def _text_of(answer: httpx.Response) -> str:
    """Return the body, decoded as UTF-8, because decoding by a charset that the answer states may raise."""
    return answer.content.decode("utf-8", "replace")
