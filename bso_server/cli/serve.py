"""``bso-server serve``: start and end of the server's process, and its limits for connections.

uvicorn on h11 bounds the memory of a connection, but not the time that a connection waits for its client: connections
that wait could use up all files that a process may open. `BoundedProtocol` adds this limit.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging.config
import os
import resource
import signal
import sys
from functools import lru_cache, partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from bso_server.api.auth import with_peer
from bso_server.app import create_app, prepare
from bso_server.cli.common import Commands, RemovedOption, add_command, settings_of, with_store
from bso_server.metrics.requests import TextFormatter
from bso_server.settings import Settings, variable_of
from zeus_plugins.protocol import ErrorBody

logger = logging.getLogger("bso_server")

# Seconds that a connection may be idle between two requests.
_KEEP_ALIVE_S = 5

# Maximum bytes of a head, or of another part of a request that h11 parses as a whole.
MOST_HEAD_BYTES = 16 * 1024

# Maximum connections of one process, and minimum of files left for other uses: the database, the log, and connections
# that are closing.
_MOST_CONNECTIONS = 4096
_FILES_LEFT = 64

# Seconds to send a refusal before its connection is aborted.
_FAREWELL_S = 1.0

# Seconds that requests may take after the signal to end the server; then they are cancelled.
_GRACE_S = 5

# Seconds from the signal to the forced end of the process. Docker kills a process after ten.
_LAST_S = 9.0


def add_serve_command(commands: Commands) -> None:
    """Add ``serve``."""
    serve = add_command(commands, "serve", "run the server", _serve)
    serve.add_argument("--host", dest="server_host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", dest="server_port", help="port to listen on (default 8000)")
    serve.add_argument(
        "--migrate",
        action="store_true",
        help="bring the database to this version's schema first (SQLite files are always upgraded)",
    )
    serve.add_argument(
        "--insecure", action="store_const", const=True, help="serve requests without a token from any machine"
    )
    instead = "one process serves 10,000 trainings; for more, start several servers on one database (docs/scale.md)"
    serve.add_argument("--workers", action=RemovedOption, instead=instead)


def _serve(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    log_config = _log_config(settings.log_level)
    logging.config.dictConfig(log_config)
    with_store(options, lambda store: prepare(store, migrate=options.migrate), schema="any")
    host = f"[{settings.server_host}]" if ":" in settings.server_host else settings.server_host
    logger.info("dashboard: http://%s:%d/ui/", host, settings.server_port)
    connections, files_left = connections_allowed()
    uvicorn.run(
        partial(application, settings),
        factory=True,
        # asyncio would listen only on IPv6 addresses; without a host, it listens on all addresses.
        host="" if settings.server_host == "::" else settings.server_host,
        port=settings.server_port,
        http=BoundedProtocol,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        ws="none",
        limit_concurrency=connections,
        # The process must have a free file for each connection that it accepts.
        backlog=files_left // 2,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        log_config=log_config,
        # A line for each request would hide the other lines.
        access_log=False,
        # `application` reads the proxy's headers itself, so that the server also sees the proxy's own address.
        proxy_headers=False,
    )


def connections_allowed() -> tuple[int, int]:
    """Return the maximum number of connections under the limit of open files, and the files left for other uses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 2 * _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else limit
    left = min(max(_FILES_LEFT, files // 4), files // 2)
    return min(files - left, _MOST_CONNECTIONS), left


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol on h11, with a deadline for clients, and with room for new clients.

    The application itself ends the wait for a body (`api.requests.in_time`), under every server program.
    """

    read_timeout_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn itself would refuse new clients at its limit, even if all other connections were idle.
        self._most, self.limit_concurrency = self.limit_concurrency or sys.maxsize, None
        # Clients could fill the log with uvicorn's warnings about them.
        self.logger = logging.getLogger("uvicorn.error.clients")
        self._since, self._unread, self._is_too_many = self.loop.time(), 0, False

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """If there are too many connections, close the one that has waited longest, or refuse this one."""
        super().connection_made(transport)
        self._alarm = self.loop.call_later(self.read_timeout_s, self._look)
        if len(self.connections) > self._most:
            _warn_once(self._most)
            others: set[Any] = self.connections - {self}
            waiting = [each for each in others if not each._is_answering]
            self._is_too_many = not waiting
            if waiting:
                min(waiting, key=lambda each: each._since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        super().connection_lost(exc)
        self._alarm.cancel()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on in pieces, because h11 limits the size only of incomplete heads."""
        if self._is_too_many:
            self._refuse(503, "the server has no room for another connection at present: send the request again")
        self._begin_head()
        for begin in range(0, len(data), MOST_HEAD_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[begin : begin + MOST_HEAD_BYTES])

    def on_response_complete(self) -> None:
        """Restart the deadline; uvicorn closes connections that stay idle."""
        self._since = self.loop.time() + self.timeout_keep_alive
        super().on_response_complete()
        if self.conn.trailing_data[0] and not self._is_answering:
            self._unset_keepalive_if_required()
            self._begin_head()

    def _begin_head(self) -> None:
        """Start the deadline of a head that follows an answer."""
        if self._since > self.loop.time():
            self._since = self.loop.time()
            self._alarm.cancel()
            self._alarm = self.loop.call_later(self.read_timeout_s, self._look)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text is shorter
        """Refuse a request that h11 cannot parse."""
        self._refuse(400, f"not a valid HTTP request, or its head has more than {MOST_HEAD_BYTES} bytes")

    def _look(self) -> None:
        """Close the connection if its client has done nothing until the deadline; otherwise look again later."""
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread or (self._is_answering and not unread):
            self._since, self._unread = self.loop.time(), unread
        left_s = self._since + self.read_timeout_s - self.loop.time()
        if left_s > 0:
            self._alarm = self.loop.call_later(left_s, self._look)
        elif self.conn.trailing_data[0]:
            self._refuse(
                408,
                f"the head of the request did not come in time: {variable_of('read_timeout_s')} says how many seconds",
            )
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer with this status, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            title = HTTPStatus(status).phrase
            body = ErrorBody(title=title, status=status, detail=message, message=message).model_dump_json().encode()
            headers = [
                ("Content-Type", "application/problem+json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
                ("Retry-After", "5"),
            ]
            for event in h11.Response(status_code=status, headers=headers), h11.Data(data=body):
                self.transport.write(self.conn.send(event))
        self.transport.close()
        # `close` waits until everything is sent, which may never happen.
        self._alarm.cancel()
        self._alarm = self.loop.call_later(_FAREWELL_S, self.transport.abort)


@lru_cache(maxsize=1)
def _warn_once(connections: int) -> None:
    logger.warning(
        "all %d connections are taken: idle ones give way to new ones; a process that may open more files (ulimit -n) "
        "takes more",
        connections,
    )


def _log_config(level: str) -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"text": {"()": TextFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "text"}},
        "root": {"level": level, "handlers": ["stderr"]},
        # Alembic logs the chosen implementation at every check of the schema.
        "loggers": {"alembic": {"level": "WARNING"}, "uvicorn.error.clients": {"level": "ERROR"}},
    }


def application(settings: Settings) -> object:
    """Make the application of a server process; end the process within `_LAST_S` of a signal."""
    _end_in_time()
    BoundedProtocol.read_timeout_s = settings.read_timeout_s
    app: Any = create_app(settings)
    # The objects made so far stay, so the garbage collector need not visit them again.
    gc.freeze()
    return with_peer(ProxyHeadersMiddleware(app, os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")))


def _end_in_time() -> None:
    """End the process at most `_LAST_S` seconds after a signal, even if a database or a thread hangs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        serving: Any = signal.getsignal(number)

        def end(number: int, frame: FrameType | None, serving: Any = serving) -> None:
            # The traceback of each thread shows where the server hangs.
            faulthandler.dump_traceback_later(_LAST_S, exit=True)
            serving(number, frame)

        signal.signal(number, end)
