"""`ServerPort` in the training's own process, on a SQLite file: the default without a server URL.

Each request runs a function of `bso_server.service.commands` in a transaction, in the calling thread (see
docs/internals.md). A SQLite connection must not be carried into a forked child
(https://www.sqlite.org/howtocorrupt.html, 2.6), so files are closed before each `os.fork`. This module needs the extra
``server``.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from bso_server.core.access import UNRESTRICTED
from bso_server.errors import STATUS_OF, BsoError, DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.service import reading
from bso_server.service.commands import Commands, with_job_id
from bso_server.service.decisions import TRIES, decide
from bso_server.service.reports import ReportBatch
from bso_server.settings import Settings, problems, variable_of
from bso_server.storage.database import open_sqlite_file
from bso_server.storage.sqlite import SqliteFile, SyncStore
from bso_server.storage.transaction import Transaction
from zeus_plugins.client.port import (
    DEFAULT_TIMEOUT_S,
    EMBEDDED,
    Retries,
    ServerPort,
    error_of,
)
from zeus_plugins.environment import SERVER_URL
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
    ReportResponse,
    TrainingResult,
    TrialDispatch,
    TrialEnd,
    TrialId,
    faults_in_words,
)

_DATABASE_VARIABLE = variable_of("database_url")

# Factor on the time-out of a training's first requests: if they fail, the training begins at the default batch size.
_START_PATIENCE = 6

# Short, because this thread handles no signal while SQLite waits for another process's lock.
_BUSY_TIMEOUT_S = 0.1

_logger = logging.getLogger("zeus_plugins")

T = TypeVar("T")


class LocalServer(ServerPort):
    """The server in this process.

    All `LocalServer` objects of this process on one file share one connection. The first request opens it; `close` or
    the end of the interpreter closes it, and the next request opens it again. The settings are those of ``bso-server``,
    except tokens, hosts and rates, which concern only remote callers.

    Args:
        server_url: ``embedded:///path/of/file``; or ``embedded:``, the default file of ``bso-server``.
        timeout_s: Longest wait in seconds for other processes that have the file locked. `register` and `request_trial`
            wait up to six times as long.

    Raises:
        ZeusBSOConfigError: No SQLite file can be opened at this path, or a setting of the server is wrong.
    """

    def __init__(self, server_url: str = EMBEDDED, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not timeout_s > 0:
            raise ZeusBSOConfigError(f"timeout_s must be above 0 seconds, not {timeout_s}")
        self.timeout_s = timeout_s
        self._retries = Retries()
        self._settings, self._path = _settings_of(server_url)
        self.server_url = f"{EMBEDDED}//{self._path.as_posix()}"
        self._commands = Commands(leases=self._settings.leases)

    def __repr__(self) -> str:
        return f"LocalServer({self.server_url!r})"

    def with_retries(self, retries: Retries) -> LocalServer:
        """Return a copy; nothing is retried, because each request already waits for the file."""
        other = copy.copy(self)
        other._retries = retries
        return other

    def close(self) -> None:
        """Close the connection to the file; other servers of this process open it again when they need it."""
        _files.close(self._path)

    def register(self, job: JobSpecFromClient) -> CreatedJob:
        try:
            registration = with_job_id(job)
        except ValidationError as error:  # A copy of a valid job with other values may be invalid.
            faults = faults_in_words(error)
            raise self._refusal("registration", HTTPStatus.UNPROCESSABLE_ENTITY, faults) from None
        known = self._read("registration", lambda transaction: self._commands.registered(transaction, registration))
        if known is not None:
            return known
        return self._write("registration", lambda transaction: self._commands.register(transaction, registration))[0]

    def request_trial(self, job_id: str, key: str | None = None) -> TrialDispatch:
        key = key or secrets.token_hex(16)
        return self._asked("suggestion", lambda store: self._begin_trial(store, job_id, key))

    def _begin_trial(self, store: SyncStore, job_id: str, key: str) -> TrialDispatch:
        """Start a trial as `BatchSizeService.begin_trial` does."""
        commands, limit_s = self._commands, self._limit_s("suggestion")
        for _ in range(TRIES):
            basis = store.read(lambda transaction: commands.considered(transaction, job_id, key), timeout_s=limit_s)
            decided = None if basis is None else decide(basis)
            start = partial(
                commands.begin_decided, job_id=job_id, idempotency_key=key, caller=UNRESTRICTED, decided=decided
            )
            dispatch = store.write(start, timeout_s=limit_s)
            if dispatch is not None:
                return dispatch
        return store.write(lambda transaction: commands.begin_trial(transaction, job_id, key), timeout_s=limit_s)

    def record_offline(self, trial: OfflineTrial, key: str) -> TrialDispatch:
        return self._write("offline trial", lambda transaction: self._commands.record_offline(transaction, trial, key))

    def send_report(self, result: TrainingResult) -> ReportResponse:
        sent = TrainingResult(**dict(result))  # Sets each field, as over HTTP; `is_of_one_rank` depends on it.

        def report(transaction: Transaction) -> ReportResponse:
            (outcome,) = ReportBatch(transaction, [(sent, UNRESTRICTED)], self._commands.moment()).take()
            if not isinstance(outcome, ReportResponse):
                raise outcome if isinstance(outcome, Exception) else AssertionError("a report waits for its rows")
            return outcome

        return self._write("report", report)

    def end_trial(self, trial: TrialId, ending: Ending | None = None) -> None:
        end = TrialEnd(**trial.model_dump(), **(ending or Ending()).model_dump())
        self._write("end of a trial", lambda transaction: self._commands.end_trial(transaction, end))

    def heartbeat(self, trial: TrialId, *, regular: bool = True, resumes: bool = False) -> HeartbeatResponse:
        beat = Heartbeat(**trial.model_dump(), regular=regular, resumes=resumes)
        return self._write("heartbeat", lambda transaction: self._commands.heartbeat(transaction, beat))

    def delete_job(self, job_id: str) -> None:
        """Delete a job and all its trials."""
        self._write("deletion", lambda transaction: self._commands.delete_job(transaction, job_id))

    def list_jobs(self) -> JobList:
        """List all jobs."""
        return self._read("list of jobs", partial(reading.list_jobs, limit=None))

    def show_job(self, job_id: str, *, limit: int | None = None) -> JobView:
        return self._read("job", lambda transaction: reading.show_job(transaction, job_id, limit=limit))

    def _write(self, request: str, work: Callable[[Transaction], T]) -> T:
        return self._asked(request, lambda store: store.write(work, timeout_s=self._limit_s(request)))

    def _read(self, request: str, work: Callable[[Transaction], T]) -> T:
        return self._asked(request, lambda store: store.read(work, timeout_s=self._limit_s(request)))

    def _limit_s(self, request: str) -> float:
        patience = _START_PATIENCE if request in ("registration", "suggestion") else 1
        return self._retries.end_s(patience * self.timeout_s) - time.monotonic()

    def _asked(self, request: str, ask: Callable[[SyncStore], T]) -> T:
        """Call `ask` with the file's store, and raise the same errors as over HTTP."""
        try:
            return ask(_files.store(self._path, self._settings))
        except DatabaseNotReadyError as error:
            raise ZeusBSOConfigError(str(error)) from None
        except DatabaseUnavailableError as error:
            raise ZeusBSOServerUnreachableError(
                f"no answer from the batch size optimization server in this process, {self.server_url}: "
                f"{error.detail}. Check that its file can be read and written"
            ) from error
        except BsoError as error:
            raise self._refusal(request, STATUS_OF[type(error)], error.message, error.reason) from None
        except Exception as error:
            # A fault of the server must not end a training.
            _logger.exception("the batch size optimization server in this process failed at a %s", request)
            raise ZeusBSORuntimeError(
                f"the {request} failed: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR
            ) from error

    def _refusal(self, request: str, status: int, text: str, reason: str | None = None) -> ZeusBSOError:
        return error_of(
            status,
            text,
            server_url=self.server_url,
            request=f"the {request} at {self.server_url}",
            is_registration=request == "registration",
            reason=reason,
        )


class _Files:
    """The files that this process has opened, and the lock that separates their transactions from forks."""

    def __init__(self) -> None:
        self._stores: dict[Path, SyncStore] = {}
        # Reentrant, because a signal handler may end a trial.
        self._lock = threading.RLock()

    def store(self, path: Path, settings: Settings) -> SyncStore:
        with self._lock:
            if path not in self._stores:
                self._stores[path] = SyncStore(_opened(settings), self._lock)
                url = _database_url(path)
                option = "" if url == Settings().database_url else f" --database-url '{url}'"
                _logger.info(
                    f"the batch size optimization server runs in this process, on {path}; look at it with: bso-server "
                    f"jobs list{option}"
                )
            return self._stores[path]

    def close(self, *paths: Path) -> None:
        """Close these files, or all; the next request opens a file again."""
        with self._lock:
            for path in paths or tuple(self._stores):
                if path in self._stores:
                    self._stores[path].close()

    def before_fork(self) -> None:
        """Wait for the current transaction, and close the files until after the fork."""
        self._lock.acquire()
        for store in self._stores.values():
            store.close(keeps_file=True)

    def after_fork(self) -> None:
        """Allow transactions again; the forking thread holds the lock, in the child as well."""
        self._lock.release()


def _settings_of(server_url: str) -> tuple[Settings, Path]:
    stated = server_url.removeprefix(EMBEDDED).removeprefix("//")
    try:
        settings = Settings(database_url=_database_url(Path(stated).absolute())) if stated else Settings()
    except ValueError as error:
        problem = problems(error) if isinstance(error, ValidationError | UnicodeDecodeError) else error
        raise ZeusBSOConfigError(f"wrong setting of the server in this process: {problem}") from None
    path = _opened(settings).path.absolute()
    return settings.model_copy(update={"database_url": _database_url(path)}), path


def _opened(settings: Settings) -> SqliteFile:
    try:
        file = open_sqlite_file(settings.database_url, busy_timeout_s=_BUSY_TIMEOUT_S)
    except (ValueError, OSError) as error:
        raise ZeusBSOConfigError(
            f"the server in this process cannot keep its data: {error}; name another file by {_DATABASE_VARIABLE}, or "
            f"a running server by server_url= or {SERVER_URL}"
        ) from None
    if file is None:
        raise ZeusBSOConfigError(
            f"a server in the training's own process works on a SQLite file, and {_DATABASE_VARIABLE} names another "
            f"database: start `bso-server serve` on that, and pass server_url= or set {SERVER_URL}"
        )
    return file


def _database_url(path: Path) -> str:
    return f"sqlite:///{path}"


_files = _Files()
# Close the files after the exit functions of trainings; closing removes SQLite's log beside each file.
weakref.finalize(_files, _files.close)
os.register_at_fork(before=_files.before_fork, after_in_parent=_files.after_fork, after_in_child=_files.after_fork)
