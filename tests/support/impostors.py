"""A web server instead of a batch size optimization server, which answers each request with the same status."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self


class _Handler(BaseHTTPRequestHandler):
    server: Impostor

    def do_any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PATCH = do_any  # noqa: N815 - names fixed by the base class

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base class
        """Keep the test's output clean."""


class Impostor(ThreadingHTTPServer):
    """Record the received tokens until `close` or the end of a ``with`` block."""

    def __init__(self, status: int, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.status = status
        self.tokens: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
