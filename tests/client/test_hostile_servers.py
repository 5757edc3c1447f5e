"""Servers and proxies that are slow, endless or packed: no answer holds a training, and none fills its memory."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from zeus_plugins.client import client_from_environment
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOConfigError, ZeusBSORuntimeError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import TrialId

TRIAL = TrialId(job_id="digits-1", batch_size=32, trial_number=1)
DISPATCH = json.dumps({"job_id": "digits-1", "batch_size": 32, "trial_number": 3}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


Parts = Callable[[], Iterator[bytes]]


class Talker:
    """A server that answers each request with these parts, until they end or nobody listens any more."""

    def __init__(self, parts: Parts, pause_s: float = 0.0) -> None:
        self.parts, self.pause_s = parts, pause_s
        self.requests: list[bytes] = []
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._over = threading.Event()
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(65536))
                try:
                    for part in self.parts():
                        connection.sendall(part)
                        self.sent += len(part)
                        if self._over.wait(self.pause_s):
                            break
                except OSError:
                    continue  # it listens no more


@contextmanager
def talking(parts: Parts, pause_s: float = 0.0) -> Iterator[Talker]:
    server = Talker(parts, pause_s)
    try:
        yield server
    finally:
        server.close()


def whole(body: bytes, head: bytes = HEAD, more: bytes = b"") -> bytes:
    """An answer with this body, after the beginning of its head and with `more` in the head."""
    return head + more + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def client_of(server: Talker) -> BsoClient:
    return BsoClient(server.url, retries=NO_RETRIES)


def slow_head() -> Iterator[bytes]:
    yield HEAD
    for _ in range(600):
        yield b"x"
    yield whole(DISPATCH, b": 1\r\nConnection: close\r\n")


def slow_body() -> Iterator[bytes]:
    yield HEAD + b"Content-Length: %d\r\n\r\n" % (len(DISPATCH) + 600)
    for byte in DISPATCH + b" " * 600:
        yield bytes([byte])


def endless_interim() -> Iterator[bytes]:
    for _ in range(600):
        yield b"HTTP/1.1 100 Continue\r\n\r\n"
    yield whole(DISPATCH)


@pytest.mark.parametrize("parts", [slow_head, slow_body, endless_interim])
def test_an_answer_that_comes_byte_by_byte_ends_at_the_time_out(parts: Parts) -> None:
    with talking(parts, pause_s=0.02) as server, BsoClient(server.url, timeout_s=0.3, retries=NO_RETRIES) as client:
        with pytest.raises(ZeusBSOServerUnreachableError, match=r"timed out after 0\.3 s"):
            client.request_trial("digits-1")
        # The server would have talked 40 times as long.
        assert server.sent < sum(map(len, parts())) / 2


def endless(status: bytes) -> Parts:
    def parts() -> Iterator[bytes]:
        yield b"HTTP/1.1 %s\r\nConnection: close\r\n\r\n" % status
        for _ in range(256):
            yield b"x" * 2**20

    return parts


@pytest.mark.parametrize("status", [b"200 OK", b"503 Service Unavailable", b"401 Unauthorized"])
def test_an_answer_without_end_is_given_up(status: bytes) -> None:
    with talking(endless(status)) as server, client_of(server) as client:
        with pytest.raises(ZeusBSOServerUnreachableError, match="its answer is larger than 16777216 bytes"):
            client.end_trial(TRIAL)
        assert server.sent < 128 * 2**20


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "gzip, identity"])
def test_a_packed_answer_is_not_unpacked(encoding: str) -> None:
    packed = (zlib.compress if encoding == "deflate" else gzip.compress)(DISPATCH)
    answer = whole(packed, more=b"Content-Encoding: %s\r\n" % encoding.encode())
    with talking(lambda: iter([answer])) as server, client_of(server) as client:
        with pytest.raises(ZeusBSOServerUnreachableError, match="its answer is encoded"):
            client.request_trial("digits-1")
        assert b"accept-encoding: identity\r\n" in server.requests[0].lower()


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 500 No\r\nContent-Type: text/html; charset=bz2\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 No\r\n"],
    ids=["a charset that is none", "deep JSON", "a deep error"],
)
def test_no_answer_is_an_error_of_another_kind(head: bytes) -> None:
    answer = whole(b"[" * 200_000, head)
    with talking(lambda: iter([answer])) as server, client_of(server) as client, pytest.raises(ZeusBSORuntimeError):
        client.end_trial(TRIAL)


def one_answer() -> Iterator[bytes]:
    yield whole(DISPATCH, more=b"Connection: close\r\n")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_no_proxy_is_asked_for_this_machine(variable: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(one_answer) as proxy, talking(one_answer) as server:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, proxy.url)
        url = f"http://{host}:{server.port}"
        with client_from_environment(url, "s3cret", timeout_s=5).with_retries(NO_RETRIES) as client:
            if host == "127.0.0.2":  # nobody listens there, nor may the proxy hear of it
                with pytest.raises(ZeusBSOServerUnreachableError):
                    client.request_trial("digits-1")
            else:
                assert client.request_trial("digits-1").trial_number == 3
        assert proxy.requests == []


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_asked"),
    [
        ("http://bso.invalid:8000", None, True),
        ("http://127.example.invalid", None, True),
        ("http://bso.invalid:8000", "other.invalid", True),
        ("http://bso.invalid:8000", ".invalid", False),
        ("http://bso.invalid:8000", "bso.invalid:8000", False),
        ("http://bso.invalid:8000", "*", False),
        ("http://[::1]:1", None, False),
        ("http://[::ffff:127.0.0.1]:1", None, False),
    ],
)
def test_other_machines_are_asked_through_the_proxy_that_the_environment_names(
    url: str, no_proxy: str | None, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(one_answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("NO_PROXY", no_proxy or "")
        with BsoClient(url, retries=NO_RETRIES) as client:
            if is_asked:
                assert client.request_trial("digits-1").trial_number == 3
                assert proxy.requests[0].startswith(f"GET {url}/jobs/batch_size?".encode())
            else:
                with pytest.raises(ZeusBSOServerUnreachableError):
                    client.request_trial("digits-1")
                assert proxy.requests == []


@pytest.mark.parametrize("proxy", ["ftp://me:s3cret@proxy", "http://me:s3cret@proxy:port"])
def test_a_proxy_that_cannot_be_is_told(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "")
    with BsoClient("http://bso.invalid") as client, pytest.raises(ZeusBSOConfigError, match="NO_PROXY") as caught:
        client.request_trial("digits-1")
    assert "s3cret" not in str(caught.value)
