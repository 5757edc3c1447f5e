"""Slow, endless or compressed answers of servers and proxies neither hang a training nor fill its memory."""

from __future__ import annotations

import gc
import gzip
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import httpx
import pytest

from tests.support import ROOT
from tests.support.embedded import session_of
from zeus_plugins.client import client_from_environment
from zeus_plugins.client._transport import received_within
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSORuntimeError, ZeusBSOServerUnreachableError
from zeus_plugins.protocol import TrialId

TRIAL = TrialId(job_id="digits-1", batch_size=32, trial_number=1)
DISPATCH = json.dumps({"job_id": "digits-1", "batch_size": 32, "trial_number": 3}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


Parts = Callable[[], Iterator[bytes]]


class Talker:
    """Server that answers each request with these parts, until they end or the client disconnects."""

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
                    continue  # the client has disconnected


@contextmanager
def talking(parts: Parts, pause_s: float = 0.0) -> Iterator[Talker]:
    server = Talker(parts, pause_s)
    try:
        yield server
    finally:
        server.close()


def whole(body: bytes, head: bytes = HEAD, more: bytes = b"") -> bytes:
    """Return an answer with this body; `more` follows `head` in its headers."""
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
def test_answer_sent_byte_by_byte_ends_at_the_timeout(parts: Parts) -> None:
    with talking(parts, pause_s=0.02) as server, BsoClient(server.url, timeout_s=0.3, retries=NO_RETRIES) as client:
        with pytest.raises(ZeusBSOServerUnreachableError, match=r"timed out after 0\.3 s"):
            client.request_trial("digits-1")
        # The server would have sent 40 times as long.
        assert server.sent < sum(map(len, parts())) / 2


def endless(status: bytes) -> Parts:
    def parts() -> Iterator[bytes]:
        yield b"HTTP/1.1 %s\r\nConnection: close\r\n\r\n" % status
        for _ in range(256):
            yield b"x" * 2**20

    return parts


@pytest.mark.parametrize("status", [b"200 OK", b"503 Service Unavailable", b"401 Unauthorized"])
def test_endless_answer_is_aborted(status: bytes) -> None:
    with talking(endless(status)) as server, client_of(server) as client:
        with pytest.raises(ZeusBSOServerUnreachableError, match="its answer is larger than 16777216 bytes"):
            client.end_trial(TRIAL)
        assert server.sent < 128 * 2**20


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "gzip, identity"])
def test_compressed_answer_is_not_decompressed(encoding: str) -> None:
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
def test_deeply_nested_answer_is_a_client_error(head: bytes) -> None:
    answer = whole(b"[" * 200_000, head)
    with talking(lambda: iter([answer])) as server, client_of(server) as client, pytest.raises(ZeusBSORuntimeError):
        client.end_trial(TRIAL)


def one_answer() -> Iterator[bytes]:
    yield whole(DISPATCH, more=b"Connection: close\r\n")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_local_server_is_contacted_without_the_proxy(variable: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(one_answer) as proxy, talking(one_answer) as server:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, proxy.url)
        url = f"http://{host}:{server.port}"
        with client_from_environment(url, "s3cret", timeout_s=60).with_retries(NO_RETRIES) as client:
            if host == "127.0.0.2":  # no server listens at this address, and the proxy must not see the request
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
def test_remote_server_is_contacted_through_the_proxy_of_the_environment(
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


@pytest.mark.parametrize(
    "proxy",
    [
        "ftp://me:s3cret@proxy",
        "http://me:s3cret@proxy:port",
        "http://me:s3cret@:3128",
        "http://me:s3cret@proxy..invalid:3128",
        "socks5://me:s3cret@proxy:1080",
    ],
)
def test_training_with_an_unusable_proxy_begins_at_the_default_size_and_names_the_problem(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # the package for SOCKS is missing
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "")
    with BsoClient("http://bso.invalid") as client:
        session = session_of(client)
        assert session.ask() == 32
        session.end()
    assert ("'idna' codec" if ".." in proxy else "pip install 'httpx[socks]'") in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_training_without_readable_certificates_begins_at_the_default_size_and_names_their_file(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with BsoClient("https://bso.invalid") as client:
        session = session_of(client)
        assert session.ask() == 32
        session.end()
    assert f"the certificates in {file}, which SSL_CERT_FILE names, cannot be read" in caplog.text


# httpcore leaves the socket of a failed SOCKS connection to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("answers", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["of HTTP", "that is silent"])
def test_socks_proxy_with_a_foreign_protocol_is_an_outage(answers: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    socksio = mock.MagicMock(__spec__=ModuleSpec("socksio", None))
    socksio.socks5.SOCKS5Connection().data_to_send.return_value = b"\5\1\0"
    socksio.socks5.SOCKS5Connection().receive_data.side_effect = ArithmeticError("no SOCKS")
    for name in ("httpcore._sync.socks_proxy", "socksio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "socksio", socksio)
    socks_proxy = importlib.import_module("httpcore._sync.socks_proxy")
    monkeypatch.setattr("httpcore.SOCKSProxy", socks_proxy.SOCKSProxy)
    with talking(lambda: iter([answers] * 100), pause_s=0.1) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url.replace("http", "socks5"))
        monkeypatch.setenv("NO_PROXY", "")
        with BsoClient("http://bso.invalid", timeout_s=0.5, retries=NO_RETRIES) as client:
            with pytest.raises(ZeusBSOServerUnreachableError, match="timed out" if not answers else "no SOCKS"):
                client.request_trial("digits-1")
            assert proxy.sent < 20 * max(1, len(answers))


# --- A silent DNS server ----------------------------------------------------------------------------------------------


SILENT_DNS = """
import os, socket, sys, time
from tests.support.embedded import JOB, monitor
from zeus_plugins import BatchSizeOptimizer

found, silence_s = socket.getaddrinfo, 600

def look_up(host, port, *more, flags=0, **options):
    if host == "bso.invalid" and not flags & socket.AI_NUMERICHOST:
        time.sleep(silence_s)
        host = "127.0.0.1"
    return found(host, port, *more, flags=flags, **options)

socket.getaddrinfo = look_up
limit_s = float(os.environ["ZEUS_BSO_TIMEOUT_S"])
begun = time.monotonic()

def took():
    global begun
    before, begun = begun, time.monotonic()
    return round((begun - before) / limit_s, 1)

optimizer = BatchSizeOptimizer(monitor(), "http://bso.invalid:9", JOB)
assert optimizer.get_batch_size() == 32
print(took())
optimizer.on_train_begin()
optimizer.on_evaluate(0.1)
print(took())
optimizer.close()
print(took())
child = os.fork()
if child == 0:
    silence_s = 0
    try:
        optimizer._session._client.list_jobs()
    except Exception as error:
        os._exit("Connection refused" not in str(error))
assert os.waitpid(child, 0)[1] == 0
"""


def test_silent_dns_server_delays_training_steps_and_exit_at_most_by_the_timeout() -> None:
    environ = {**os.environ, "ZEUS_BSO_TIMEOUT_S": "1", "NO_PROXY": "*", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SILENT_DNS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120)
    begin, evaluate, close = map(float, done.stdout.split())
    # Each takes a few timeouts, and more on a busy machine; a lookup takes 600 times the timeout.
    assert max(begin, evaluate, close) < 60, done.stdout
    assert (
        "no answer from the batch size optimization server at http://bso.invalid:9: timed out after 1 s" in done.stderr
    )


def test_exit_functions_send_requests_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12, they can start no thread."""
    error = RuntimeError("can't start new thread at interpreter shutdown")
    monkeypatch.setattr("threading.Thread.start", mock.Mock(side_effect=error))
    answering = httpx.MockTransport(lambda _: httpx.Response(200, content=DISPATCH))
    client = BsoClient("http://bso.example", transport=answering)
    assert client.request_trial("digits-1").trial_number == 3


def test_failed_request_leaves_nothing_to_the_garbage_collector() -> None:
    class Failing:
        """Stands for the connection, which is closed when its last reference ends."""

        def __call__(self) -> httpx.Response:
            raise httpx.ReadError("no answer")

    failing = Failing()
    is_alive = weakref.ref(failing)
    gc.disable()
    try:
        with suppress(httpx.ReadError):
            received_within(60.0, failing)
        del failing
        deadline = time.monotonic() + 60.0
        while is_alive() is not None:  # until the thread has ended
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        gc.enable()
