"""Web servers with prescribed answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def responding(answer: Callable[[str, str, bytes], tuple[int, bytes]]) -> Iterator[int]:
    """Answer each request by its method, path and body with a status and JSON; yield the server's port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.command, self.path, content)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - named by http.server

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[int, list[str]]]:
    """Answer every request in the same way; yield the server's port, and the paths of the requests so far."""
    asked: list[str] = []

    def answer(_method: str, path: str, _content: bytes) -> tuple[int, bytes]:
        asked.append(path)
        return status, body

    with responding(answer) as port:
        yield port, asked
