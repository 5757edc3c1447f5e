"""Clients that keep a server waiting, or come in numbers: in this process over each of uvicorn's protocols, and real
processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from litestar.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bso_server.api.bodies import in_time
from bso_server.app import create_app
from bso_server.connections import Bounded, Limits, connections_allowed
from bso_server.settings import Settings
from tests.support.jobs import job
from tests.support.servers import ServerProcess, free_port, is_alive, serving, wait_until_up

# Far more than anything here takes, and less than a test that hangs is given.
PATIENCE_S = 60.0
SHORT_S = 0.2
HALF_A_HEAD = b"GET /now HTTP/1.1\r\nHost: local"
HALF_A_BODY = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"


class OnH11(Bounded, H11Protocol):  # type: ignore[misc]  # the base of `Bounded` stands for any of uvicorn's protocols
    """As where httptools is not installed."""


class OnHttptools(Bounded, HttpToolsProtocol):  # type: ignore[misc]  # likewise
    """As where it is."""


@pytest.fixture(params=[OnH11, OnHttptools], ids=["h11", "httptools"])
def protocol(request: pytest.FixtureRequest) -> type[Bounded]:
    return cast("type[Bounded]", request.param)


class App:
    """Answers ``/now`` at once, ``/later`` when it is told to, and ``/large`` with 64 MB; reads ``/body``."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.read = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/body":
            while (await receive()).get("more_body"):
                self.read.set()
        self.asked.set()
        if scope["path"] == "/later":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000 if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await send({"type": "http.response.body", "body": b"done"})


class Served:
    """A uvicorn server in this event loop, and connections to it."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self._server = server
        self.port = port
        self.clients: list[Client] = []

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def connect(self, sent: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        client.send(sent)
        address = client.writer.get_extra_info("sockname")
        connections: Any = self._server.server_state.connections
        await until(lambda: any(each.client == address for each in connections))
        return client

    async def get(self, path: str = "/now") -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S) as client:
            return await client.get(path)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def all(self) -> bytes:
        """The answer until the server closes the connection."""
        received = bytearray()
        with suppress(ConnectionResetError):
            while some := await self.reader.read(65536):
                received += some
        return bytes(received)

    async def all_while_sending(self, piece: bytes) -> bytes:
        """The same, by a client that never stops sending."""

        async def send() -> None:
            while True:
                self.send(piece)
                await asyncio.sleep(SHORT_S / 10)

        sending = asyncio.create_task(send())
        try:
            return await self.all()
        finally:
            sending.cancel()

    async def answer(self) -> bytes:
        """One answer of `App`, whose end is that of its chunks."""
        return await self.reader.readuntil(b"0\r\n\r\n")


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def served(app: Any, http: Any, **options: Any) -> AsyncIterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=http, ws="none", log_config=None, timeout_graceful_shutdown=1, **options)
        server = uvicorn.Server(config)
        # Not `serve`, which takes the signals of this process.
        serving = asyncio.create_task(server._serve([listener]))
        await until(lambda: server.started or serving.done())
        serves = Served(server, listener.getsockname()[1])
        try:
            yield serves
        finally:
            for client in serves.clients:
                client.writer.close()
            server.should_exit = True
            await serving


@asynccontextmanager
async def on_app(
    protocol: type[Bounded], keep_alive_s: float = SHORT_S, **limits: Any
) -> AsyncIterator[tuple[Served, App]]:
    """Run a server whose clients have little time."""
    limit = Limits(**{"read_timeout_s": SHORT_S, "answer_timeout_s": SHORT_S, **limits})
    app, http = App(), partial(protocol, limits=limit)
    async with (
        asyncio.timeout(PATIENCE_S),
        served(app, http, lifespan="off", timeout_keep_alive=keep_alive_s) as server,
    ):
        try:
            yield server, app
        finally:
            app.may_answer.set()


class TestWaiting:
    @pytest.mark.parametrize(
        ("half", "piece", "status"),
        [(HALF_A_HEAD, b"", b"408"), (HALF_A_HEAD, b"x", b"408"), (HALF_A_BODY % b"now", b"x", b"200")],
        ids=["head in silence", "head byte by byte", "body byte by byte, after the answer is given"],
    )
    async def test_the_rest_of_a_request_is_not_waited_for(
        self, protocol: type[Bounded], half: bytes, piece: bytes, status: bytes
    ) -> None:
        async with on_app(protocol) as (server, _):
            client = await server.connect(half)
            assert (await client.all_while_sending(piece)).startswith(b"HTTP/1.1 %s " % status)
            await until(lambda: server.connections == 0)

    async def test_a_client_that_says_nothing_is_told_nothing(self, protocol: type[Bounded]) -> None:
        async with on_app(protocol) as (server, _):
            assert await (await server.connect()).all() == b""

    async def test_half_a_second_head_is_given_up(self, protocol: type[Bounded]) -> None:
        # Kept alive for so long that the client, on a busy machine, is not idle before it sends.
        async with on_app(protocol, keep_alive_s=1) as (server, _):
            client = await server.connect(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
            client.send(HALF_A_HEAD)
            assert (await client.all()).startswith(b"HTTP/1.1 408 ")

    async def test_an_answer_that_nobody_reads_is_given_up(self, protocol: type[Bounded]) -> None:
        async with on_app(protocol) as (server, _):
            await server.connect(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: server.connections == 0)

    async def test_a_server_that_takes_its_time_is_waited_for(self, protocol: type[Bounded]) -> None:
        async with on_app(protocol) as (server, app):
            answer = asyncio.create_task(server.get("/later"))
            await app.asked.wait()
            await asyncio.sleep(4 * SHORT_S)
            app.may_answer.set()
            assert (await answer).text == "done"


class TestNumber:
    """With room for two connections, and all the time in the world."""

    @staticmethod
    def with_two(protocol: type[Bounded]) -> AbstractAsyncContextManager[tuple[Served, App]]:
        return on_app(protocol, connections=2, read_timeout_s=10 * PATIENCE_S, answer_timeout_s=10 * PATIENCE_S)

    @pytest.mark.parametrize("sent", [b"", HALF_A_HEAD], ids=["silent", "half a head"])
    async def test_who_waits_longest_gives_way(
        self, protocol: type[Bounded], sent: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with self.with_two(protocol) as (server, _):
            first, second = [await server.connect(sent) for _ in range(2)]
            assert (await server.get()).text == "done"
            assert await first.all() == b""
            second.send(HALF_A_HEAD.removeprefix(sent) + b"host\r\n\r\n")
            assert (await second.answer()).startswith(b"HTTP/1.1 200 ")
            for _ in range(3):
                await server.connect(sent)
            await until(lambda: server.connections <= 2)
        assert caplog.text.count("all 2 connections are taken") == 1
        assert "ulimit -n" in caplog.text

    async def test_half_a_body_gives_way(self, protocol: type[Bounded]) -> None:
        async with self.with_two(protocol) as (server, app):
            clients = []
            for _ in range(2):
                clients.append(await server.connect(HALF_A_BODY % b"body"))
                await app.read.wait()
                app.read.clear()
            assert (await server.get()).text == "done"
            assert await clients[0].all() == b""

    async def test_where_nobody_waits_the_newcomer_is_told_to_come_back(self, protocol: type[Bounded]) -> None:
        async with self.with_two(protocol) as (server, app):
            answers = []
            for _ in range(2):
                answers.append(asyncio.create_task(server.get("/later")))
                await app.asked.wait()
                app.asked.clear()
            refused = await server.get()
            assert refused.status_code == 503
            assert refused.headers["Retry-After"] == "5"
            assert "no room" in refused.json()["message"]
            app.may_answer.set()
            assert [answer.text for answer in await asyncio.gather(*answers)] == ["done", "done"]
            assert (await server.get()).text == "done"


@pytest.mark.parametrize(
    ("files", "taken"), [(64, 32), (128, 64), (256, 192), (1024, 768), (10**6, 4096), ("infinity", 4096)]
)
def test_files_are_left_for_the_rest(files: int | str, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limit = resource.RLIM_INFINITY if files == "infinity" else files
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, resource.RLIM_INFINITY))
    number, left = connections_allowed()
    assert number == taken
    assert left >= 32


class TestBodies:
    """In the application itself, so under every server."""

    @pytest.mark.parametrize("piece", [b"", b" "], ids=["in silence", "byte by byte"])
    @pytest.mark.parametrize("path", [b"jobs", b"report", b"api/import"])
    async def test_half_a_body_is_given_up(self, tmp_path: Path, path: bytes, piece: bytes) -> None:
        app = create_app(Settings(database_url=f"sqlite:///{tmp_path / 'bso.sqlite3'}", read_timeout_s=SHORT_S))

        async with asyncio.timeout(PATIENCE_S), served(app, "auto", lifespan="on") as server:
            client = await server.connect(HALF_A_BODY % path)
            head, _, body = (await client.all_while_sending(piece)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "ZEUS_BSO_READ_TIMEOUT_S" in json.loads(body)["message"]

    async def test_what_comes_steadily_has_time(self) -> None:
        # A second for 16 KiB: these take less, and in all longer than the second that there is to begin with.
        receive = in_time(sending(*(piece(b"x" * 16384, 0.3, more=more) for more in (True, True, True, False))), 1.0)
        while (await receive())["more_body"]:  # type: ignore[typeddict-item]  # these messages have it
            pass

    async def test_the_time_that_the_server_takes_over_a_part_does_not_count(self) -> None:
        receive = in_time(sending(*[piece(b"x", 0.001, more=True)] * 3), 0.6)
        for _ in range(3):
            await receive()
            await asyncio.sleep(0.4)

    async def test_after_the_body_there_is_no_deadline(self) -> None:
        receive = in_time(sending(piece(b"", 0, more=False), (4 * SHORT_S, {"type": "http.disconnect"})), SHORT_S)
        await receive()
        assert (await receive())["type"] == "http.disconnect"


Timed = tuple[float, dict[str, Any]]


def piece(body: bytes, after_s: float, *, more: bool) -> Timed:
    return after_s, {"type": "http.request", "body": body, "more_body": more}


def sending(*messages: Timed) -> Receive:
    """A client that sends each of these messages after so many seconds."""
    left = list(messages)

    async def receive() -> Any:
        after_s, message = left.pop(0)
        await asyncio.sleep(after_s)
        return message

    return cast("Receive", receive)


def connection_to(server: ServerProcess, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    connection.sendall(sent)
    # Whatever was sent before is seen by now.
    httpx.get(f"{server.url}/health/live").raise_for_status()
    return connection


def test_the_command_and_its_setting_bring_the_deadlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Enough for a client that sends at once, though the machine has much else to do.
    monkeypatch.setenv("ZEUS_BSO_READ_TIMEOUT_S", "1")
    with serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path) as server:
        for sent in (HALF_A_HEAD, HALF_A_BODY % b"jobs"):
            with connection_to(server, sent) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_a_process_ends_though_a_thread_of_it_hangs() -> None:
    script = """
import signal, threading
from bso_server.cli import serve

serve._LAST_S = 0.2
signal.signal(signal.SIGTERM, lambda *_: print("ending", flush=True))
serve._end_in_time()
signal.raise_signal(signal.SIGTERM)
threading.Event().wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "ending\n"
    assert "threading" in ended.stderr, "where it hung is not told"


@pytest.mark.slow
class TestProcesses:
    def test_half_a_body_does_not_keep_a_server_from_ending(self, server: ServerProcess) -> None:
        with connection_to(server, HALF_A_BODY % b"jobs"):
            assert server.process is not None
            server.process.terminate()
            # Less than such a body has: its end ends nothing here.
            assert server.process.wait(timeout=Settings().read_timeout_s - 1) == -signal.SIGTERM

    def test_a_database_that_hangs_does_not_keep_a_server_from_ending(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        with closing(sqlite3.connect(tmp_path / "bso.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            body = json.dumps(job()).encode()
            head = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            with connection_to(server, head + body):
                assert server.process is not None
                server.process.terminate()
                server.process.wait(timeout=PATIENCE_S)
            other.execute("ROLLBACK")

    @pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
    async def test_workers_do_not_outlive_the_process_that_started_them(self, tmp_path: Path) -> None:
        server = ServerProcess(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path / "server.log")
        server.start("--workers", "2")
        workers: list[int] = []

        try:
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: server.log.read_text().count("Application startup complete") == 2)
                workers.extend(map(int, re.findall(r"Started server process \[(\d+)\]", server.log.read_text())))
                server.kill()
                await until(lambda: not any(map(is_alive, workers)))
        finally:
            for worker in filter(is_alive, workers):
                os.kill(worker, signal.SIGKILL)
        socket.create_server(("127.0.0.1", server.port)).close()

    def test_connections_without_a_request_do_not_use_up_the_files(self, tmp_path: Path) -> None:
        log, port = tmp_path / "server.log", free_port()
        server = ServerProcess(f"sqlite:///{tmp_path / 'bso.sqlite3'}", log, port)
        options = ["--port", str(port), "--database-url", server.database_url]
        serve = [sys.executable, "-m", "bso_server", "serve", *options]
        with log.open("w") as output:
            process = subprocess.Popen(["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *serve], stderr=output)  # noqa: S607 - any sh
        try:
            wait_until_up(process, server.url, log)
            idle = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(200)]
            registered = httpx.post(f"{server.url}/jobs", json=job(), timeout=PATIENCE_S)
            assert registered.status_code == 201, registered.text
            for each in idle:
                each.close()
        finally:
            process.kill()
            process.wait()
        assert "connections are taken" in log.read_text()
