"""Web servers with prescribed answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Received:
    """Paths and ``Authorization`` headers of the requests so far, to a server at this port."""

    port: int
    paths: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def responding(answer: Callable[[str, str, bytes], tuple[int, bytes]], port: int = 0) -> Iterator[Received]:
    """Answer each request by its method, path and body with a status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            received.paths.append(self.path)
            received.tokens.append(self.headers.get("Authorization"))
            status, body = answer(self.command, self.path, content)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - named by http.server

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        received = Received(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


def answering(status: int, body: bytes = b"", port: int = 0) -> AbstractContextManager[Received]:
    """Answer every request in the same way."""
    return responding(lambda *_: (status, body), port)
