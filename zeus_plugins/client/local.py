"""The server inside the training's own process, on a SQLite file: what a training without a server URL uses.

It is the same application as that of ``bso-server serve``, and `BsoClient` speaks to it as to any other; only the
transport differs. No port is opened, and no token asked for. Locks live in the file, so that any number of trainings
share it, and ``bso-server serve`` and ``bso-server jobs`` with them.

The only module of this package that imports `bso_server`, but for its pure policies in `zeus_plugins.master.policy`; it
needs the extra ``server``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from bso_server.app import create_app, store_of
from bso_server.errors import DatabaseNotReadyError, DatabaseUnavailableError
from bso_server.settings import Settings, problems, variable_of
from zeus_plugins.errors import ZeusBSOConfigError

__all__ = ["EmbeddedTransport"]

_SCHEME = "embedded:"
_DATABASE_VARIABLE = variable_of("database_url")

# Seconds. A start waits for the file's lock while another process upgrades its schema.
_START_S = 60.0
_STOP_S = 10.0

_logger = logging.getLogger("zeus_plugins")


class EmbeddedTransport(httpx.BaseTransport):
    """Carries requests to the server in this process.

    The server starts at the first request. All transports of this process on one file share it, and it ends when the
    last one that has sent a request is closed, or with the interpreter. A closed transport can be used again. Copies,
    pickled ones too, are transports of their own.

    Args:
        server_url: ``embedded:///path/of/file``; or ``embedded:``, the file that ``bso-server`` works on by default.

    Raises:
        ZeusBSOConfigError: There can be no SQLite file at this place, or a setting of the server is wrong.
    """

    def __init__(self, server_url: str = _SCHEME) -> None:
        self._settings, self._path = _settings_of(server_url)

    @property
    def server_url(self) -> str:
        """The same for every training on this file."""
        return f"{_SCHEME}//{self._path.as_posix()}"

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request to the server, and start that if need be.

        Raises:
            httpx.ConnectError: The server does not start.
            httpx.ReadTimeout: It does not answer in time.
            httpx.ReadError: It ended before it answered.
            ZeusBSOConfigError: The file was made by a newer version.
        """
        timeout_s = request.extensions.get("timeout", {}).get("read")
        answer = _servers.submit(self, self._settings, self._path, request)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            # What it does goes on, as it does when a connection is lost.
            raise httpx.ReadTimeout("", request=request) from None
        except CancelledError:
            raise httpx.ReadError("it ended before it answered", request=request) from None

    def close(self) -> None:
        """Have the server ended, unless another transport uses it."""
        _servers.release(self, self._path)


class _Server:
    """The application, and the thread with the event loop that it runs in.

    Args:
        settings: With the SQLite file.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started: Future[None] = Future()
        self._requests: set[asyncio.Task[Any] | None] = set()
        self._thread = threading.Thread(target=self._run, name="zeus-bso-embedded", daemon=True)
        # The transports that have sent a request and are not closed.
        self.users: weakref.WeakSet[EmbeddedTransport] = weakref.WeakSet()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Return when it can take requests.

        Raises:
            httpx.ConnectError: The file cannot be used now.
            ZeusBSOConfigError: It never can.
        """
        self._thread.start()
        try:
            self._started.result(_START_S)
        except TimeoutError:
            raise httpx.ConnectError(f"it did not start within {_START_S:g} s") from None
        except DatabaseNotReadyError as error:
            raise ZeusBSOConfigError(str(error)) from None
        except DatabaseUnavailableError as error:
            raise httpx.ConnectError(error.detail) from None
        except Exception as error:
            raise httpx.ConnectError(f"{type(error).__name__}: {error}") from error

    def submit(self, request: httpx.Request) -> Future[httpx.Response]:
        """Let it answer a request."""
        return asyncio.run_coroutine_threadsafe(self._answered(request), self._loop)

    def stop(self) -> None:
        """Let it answer what it was asked, and end it."""
        with contextlib.suppress(RuntimeError):  # Its loop has ended by itself.
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                _logger.exception("the server in this process broke")
            else:
                self._started.set_exception(_ungrouped(error))

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = create_app(self._settings, in_process=True)
        # Litestar's application is one of ASGI, whose type the HTTP library words otherwise.
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with app.lifespan():
            self._started.set_result(None)
            await self._stopping.wait()
            if self._requests:
                await asyncio.wait([task for task in self._requests if task], timeout=_STOP_S)

    async def _answered(self, request: httpx.Request) -> httpx.Response:
        task = asyncio.current_task()
        self._requests.add(task)
        try:
            answer = await self._transport.handle_async_request(request)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())
        finally:
            self._requests.discard(task)


class _Servers:
    """The servers that run in this process, one for each file.

    None runs while the process forks: a child would have none of its threads, and SQLite in the child would take its
    parent's locks on the file for its own (https://www.sqlite.org/howtocorrupt.html, 2.6). Parent and child start one
    again when they need it.
    """

    def __init__(self) -> None:
        self._running: dict[Path, _Server] = {}
        self._announced: set[Path] = set()
        self._quieted: list[logging.Logger] = []
        self._is_exiting = False
        # Reentrant: the handler of a signal may end a trial.
        self._lock = threading.RLock()

    def submit(
        self, user: EmbeddedTransport, settings: Settings, path: Path, request: httpx.Request
    ) -> Future[httpx.Response]:
        """Let the file's server answer a request; it is started if it does not run.

        Raises:
            httpx.ConnectError: It does not start.
            ZeusBSOConfigError: It never will.
        """
        with self._lock:
            server = self._running.get(path)
            if server is None or not server.is_alive:
                server = self._running[path] = self._started(settings, path)
            server.users.add(user)
            # A server that is told to stop answers what it was asked before.
            return server.submit(request)

    def release(self, user: EmbeddedTransport, path: Path) -> None:
        """Have the file's server ended if this was its last user."""
        with self._lock:
            server = self._running.get(path)
            if server is None or user not in server.users:
                return
            server.users.discard(user)
            if not server.users:
                self._stop(path)

    def stop_for_good(self) -> None:
        """The interpreter ends."""
        with self._lock:
            self._is_exiting = True
            self._stop(*self._running)

    def before_fork(self) -> None:
        """Have all servers ended, and none started until after the fork."""
        self._lock.acquire()
        self._stop(*self._running)

    def after_fork_in_parent(self) -> None:
        """Let servers start."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The same; the lock is none of this thread's."""
        self._lock = threading.RLock()

    def _started(self, settings: Settings, path: Path) -> _Server:
        if self._is_exiting:
            raise httpx.ConnectError("the interpreter is ending")
        self._announce(path)
        if not self._quieted:
            self._quieted = _quieted()
        server = _Server(settings)
        try:
            server.start()
        except BaseException:
            self._speak_again()
            raise
        return server

    def _stop(self, *paths: Path) -> None:
        for path in paths:
            self._running.pop(path).stop()
        self._speak_again()

    def _announce(self, path: Path) -> None:
        if path in self._announced:
            return
        self._announced.add(path)
        url = _database_url(path)
        _logger.info(
            "the batch size optimization server runs in this process, on %s; look at it with: bso-server jobs list%s",
            *(path, "" if url == Settings().database_url else f" --database-url '{url}'"),
        )

    def _speak_again(self) -> None:
        if not self._running:
            for logger in self._quieted:
                logger.setLevel(logging.NOTSET)
            self._quieted = []


def _ungrouped(error: BaseException) -> BaseException:
    """What went wrong, without the groups that the application's task groups put around it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _quieted() -> list[logging.Logger]:
    """Keep what a server has to say in everyday life out of a training's log; a level that the user has set stays."""
    loggers = [logging.getLogger(name) for name in ("bso_server", "alembic")]
    chosen = [logger for logger in loggers if logger.level == logging.NOTSET]
    for logger in chosen:
        logger.setLevel(logging.WARNING)
    return chosen


def _settings_of(server_url: str) -> tuple[Settings, Path]:
    """The server's settings, and where its file is, whatever becomes the working directory later."""
    stated = server_url.removeprefix(_SCHEME).removeprefix("//")
    elsewhere = f"name another file by {_DATABASE_VARIABLE}, or a running server by server_url= or ZEUS_SERVER_URL"
    try:
        settings = Settings(database_url=_database_url(Path(stated).absolute())) if stated else Settings()
        path = store_of(settings).file
    except ValidationError as error:
        raise ZeusBSOConfigError(f"wrong setting of the server in this process: {problems(error)}") from None
    except (ValueError, OSError) as error:
        raise ZeusBSOConfigError(f"the server in this process cannot keep its data: {error}; {elsewhere}") from None
    if path is None:
        raise ZeusBSOConfigError(
            f"a server in the training's own process works on a SQLite file, and {_DATABASE_VARIABLE} names another "
            "database: start `bso-server serve` on that, and pass server_url= or set ZEUS_SERVER_URL"
        )
    path = path.absolute()
    return settings.model_copy(update={"database_url": _database_url(path)}), path


def _database_url(path: Path) -> str:
    return f"sqlite:///{path}"


_servers = _Servers()
# Not atexit: what was registered there earlier would run later, and ends of trials are registered in this way, too.
weakref.finalize(_servers, _servers.stop_for_good)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_servers.before_fork,
        after_in_parent=_servers.after_fork_in_parent,
        after_in_child=_servers.after_fork_in_child,
    )
