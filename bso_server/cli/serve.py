"""``bso-server serve``: the processes of the server, from their start to their end."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging.config
import multiprocessing
import os
import signal
import threading
from types import FrameType
from typing import Any

import uvicorn

from bso_server.app import create_app, prepare
from bso_server.cli.common import Commands, add_command, given, settings_of, with_store
from bso_server.connections import KEEP_ALIVE_S, connections_allowed
from bso_server.metrics.logs import JsonFormatter, TextFormatter
from bso_server.metrics.watch import counted_together, require_tracing
from bso_server.settings import file_variable_of, variable_of

logger = logging.getLogger("bso_server")

# Seconds that requests may go on after the signal to end; what then is left is broken off.
_GRACE_S = 5

# Seconds that a worker may take to start, or stand still; then another one takes its place. On a busy machine no worker
# would ever be up within uvicorn's own five.
_WORKER_S = 30

# Seconds from that signal to the end of the process, whatever it waits for. Docker kills after ten.
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
        help="bring the database to this version's schema first (on SQLite that is done in any case)",
    )
    serve.add_argument(
        "--insecure", action="store_const", const=True, help="serve everybody who shows no token, on any machine"
    )


def _serve(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    log_config = _log_config(settings.log_level, settings.log_format)
    logging.config.dictConfig(log_config)
    # What is missing for it shows here, and not in each process.
    if settings.tracing:
        require_tracing()
    with_store(options, lambda store: prepare(store, migrate=options.migrate))
    # Each worker process builds its own application, and reads the settings from the environment that it inherits.
    for name, value in given(options).items():
        os.environ[variable_of(name)] = str(value)
        os.environ.pop(file_variable_of(name), None)
    host = f"[{settings.server_host}]" if ":" in settings.server_host else settings.server_host
    logger.info("dashboard: http://%s:%d/ui/", host, settings.server_port)
    _, files_left = connections_allowed()
    with counted_together(options.workers):
        uvicorn.run(
            "bso_server.cli.serve:application",
            factory=True,
            host=settings.server_host,
            port=settings.server_port,
            workers=options.workers,
            http="bso_server.connections:BoundedProtocol",
            ws="none",
            # Of those that wait to be taken, no more come at once than there are files left.
            backlog=files_left // 2,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_worker_healthcheck=_WORKER_S,
            log_config=log_config,
            # One line per request would drown the others.
            access_log=False,
        )


def _log_config(level: str, log_format: str) -> dict[str, Any]:
    """Logging for this process and for each worker, as `logging.config.dictConfig` takes it."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"text": {"()": TextFormatter}, "json": {"()": JsonFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": log_format}},
        "root": {"level": level, "handlers": ["stderr"]},
        # It tells which implementation it picked at every look at the schema.
        "loggers": {"alembic": {"level": "WARNING"}},
    }


def application() -> object:
    """Make the application of a process that serves, whose end comes in time and not after its parent's."""
    _end_in_time()
    _end_with_parent()
    app = create_app()
    # What is there by now stays: the garbage collector need not walk through it again and again.
    gc.freeze()
    return app


def _end_in_time() -> None:
    """Have a signal to end this process do so, also when a database or a thread of this process hangs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        serving: Any = signal.getsignal(number)

        def end(number: int, frame: FrameType | None, serving: Any = serving) -> None:
            # It says where each thread was, which is all that can be known then.
            faulthandler.dump_traceback_later(_LAST_S, exit=True)
            serving(number, frame)

        signal.signal(number, end)


def _end_with_parent() -> None:
    """End this worker when the process that started it has ended, however that came: it would keep the port."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        logging.getLogger("bso_server").warning("the process that started this one has ended: ending, too")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="zeus-bso-parent", daemon=True).start()
