"""``bso-server serve``: start and end of the server's processes."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging.config
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from bso_server.api.auth import with_peer
from bso_server.app import create_app, prepare
from bso_server.cli.common import Commands, add_command, given, settings_of, with_store
from bso_server.connections import KEEP_ALIVE_S, MOST_HEAD_BYTES, connections_allowed
from bso_server.metrics import DIRECTORY_VARIABLE
from bso_server.metrics.requests import JsonFormatter, TextFormatter
from bso_server.settings import file_variable_of, variable_of

logger = logging.getLogger("bso_server")

# Seconds that requests may take after the signal to end the server; then they are cancelled.
_GRACE_S = 5

# Seconds after which an unresponsive worker is replaced. On a busy machine, no worker starts within uvicorn's
# default of five.
_WORKER_S = 30

# Seconds from the signal to the forced end of the process. Docker kills a process after ten.
_LAST_S = 9.0


def add_serve_command(commands: Commands) -> None:
    """Add ``serve``."""
    serve = add_command(commands, "serve", "run the server", _serve)
    serve.add_argument("--host", dest="server_host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", dest="server_port", help="port to listen on (default 8000)")
    serve.add_argument("--workers", type=int, default=1, help="number of processes (default 1)")
    serve.add_argument(
        "--migrate",
        action="store_true",
        help="bring the database to this version's schema first (SQLite files are always upgraded)",
    )
    serve.add_argument(
        "--insecure", action="store_const", const=True, help="serve requests without a token from any machine"
    )


def _serve(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    log_config = _log_config(settings.log_level, settings.log_format)
    logging.config.dictConfig(log_config)
    with_store(options, lambda store: prepare(store, migrate=options.migrate), schema="any")
    # Each worker process builds its own application from the environment that it inherits.
    for name, value in given(options).items():
        os.environ[variable_of(name)] = str(value)
        os.environ.pop(file_variable_of(name), None)
    host = f"[{settings.server_host}]" if ":" in settings.server_host else settings.server_host
    logger.info("dashboard: http://%s:%d/ui/", host, settings.server_port)
    _, files_left = connections_allowed()
    with _counted_together(options.workers):
        uvicorn.run(
            "bso_server.cli.serve:application",
            factory=True,
            host=settings.server_host,
            port=settings.server_port,
            workers=options.workers,
            http="bso_server.connections:BoundedProtocol",
            # Takes effect only if httptools is not installed.
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            ws="none",
            # The process must have a free file for each connection that it accepts.
            backlog=files_left // 2,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_worker_healthcheck=_WORKER_S,
            log_config=log_config,
            # A line for each request would hide the other lines.
            access_log=False,
            # `application` reads the proxy's headers itself, so that the server also sees the proxy's own address.
            proxy_headers=False,
        )


@contextmanager
def _counted_together(processes: int) -> Iterator[None]:
    """Make the processes that the block starts share their counts; raise `OSError` without room for temporary files."""
    # An inherited directory would contain the counts of an earlier start.
    os.environ.pop(DIRECTORY_VARIABLE, None)
    if processes == 1:
        yield
        return
    directory = tempfile.mkdtemp(prefix=f"zeus-bso-metrics-{os.getpid()}-")
    os.environ[DIRECTORY_VARIABLE] = directory
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _log_config(level: str, log_format: str) -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"text": {"()": TextFormatter}, "json": {"()": JsonFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": log_format}},
        "root": {"level": level, "handlers": ["stderr"]},
        # Alembic logs the chosen implementation at every check of the schema.
        "loggers": {"alembic": {"level": "WARNING"}},
    }


def application() -> object:
    """Make the application of a server process; end the process within `_LAST_S` of a signal, and with its parent."""
    _end_in_time()
    _end_with_parent()
    app: Any = create_app()
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


def _end_with_parent() -> None:
    """End this worker when its parent process has ended, or the worker would keep the port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        logging.getLogger("bso_server").warning("parent process exited; shutting down")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="zeus-bso-parent", daemon=True).start()
