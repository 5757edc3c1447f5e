"""Slow clients and many clients: in this process, and with real processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from litestar.exceptions import HTTPException
from litestar.types import Receive

from bso_server.api.requests import in_time
from bso_server.app import create_app
from bso_server.cli.serve import MOST_HEAD_BYTES, BoundedProtocol, connections_allowed
from bso_server.settings import Settings
from tests.support.jobs import job
from tests.support.servers import ServerProcess, free_port, serving, wait_until_up
from tests.support.tokens import bearer, make_token

# --- Clients that attack a server: each uses the maximum of its memory and time ---------------------------------------


_PAUSE_S = 0.05
_REQUEST = b"GET /api/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"
_LOGIN = b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
_TRAILERS = _LOGIN + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"


def _large(piece: bytes) -> bytes:
    return piece * (65536 // len(piece))


# The first bytes of each kind of attack, and the bytes that it repeats without end: at intervals, or many at once.
KINDS = {
    "pipelining": (b"", _large(_REQUEST)),
    "endless value": (_REQUEST[:-2] + b"X: ", _large(b"x")),
    "tiny fields": (_REQUEST[:-2], _large(b"a:b\r\n")),
    "endless URL": (b"GET /", _large(b"x")),
    "tiny trailers": (_TRAILERS, _large(b"a:b\r\n")),
    "endless trailer": (_TRAILERS + b"X: ", _large(b"x")),
    "tiny chunks": (_LOGIN + b"Transfer-Encoding: chunked\r\n\r\n", _large(b"1\r\nx\r\n")),
    "slow body": (_LOGIN + b"Content-Length: 1000000\r\n\r\n" + b"x" * 999_000, b"x"),
    "unread answers": (b"", _large(b"GET /ui/static/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n")),
    "half open": (_REQUEST[:-8], b""),
}


@asynccontextmanager
async def attacking(port: int, number: int, *kinds: str) -> AsyncIterator[None]:
    """Keep this number of connections, of each kind in turn, for as long as the block runs."""
    attacks = [asyncio.create_task(_attack(port, *KINDS[kinds[each % len(kinds)]])) for each in range(number)]
    try:
        yield
    finally:
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)


async def _attack(port: int, begin: bytes, piece: bytes) -> None:
    """Send without reading; connect again whenever the server closes the connection."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as connection, suppress(OSError):
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, begin)
            while True:
                await loop.sock_sendall(connection, piece)
                await asyncio.sleep(0 if len(piece) > 1 else _PAUSE_S)
        await asyncio.sleep(_PAUSE_S)


# Far longer than anything here takes, and shorter than the time limit of a hanging test.
PATIENCE_S = 60.0
SHORT_S = 0.2
HALF_A_HEAD = b"GET /now HTTP/1.1\r\nHost: local"
HALF_A_BODY = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"


class App:
    """Answer ``/now`` at once, ``/later`` when allowed, and ``/large`` with 64 MB; read ``/body``."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.read = asyncio.Event()
        self.requests = 0
        self.path = ""
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        if scope["path"] == "/body":
            more = True
            while more:
                message = await receive()
                self.body += message.get("body", b"")
                more = message.get("more_body", False)
                self.read.set()
        self.headers, self.path = dict(scope["headers"]), scope["path"]
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

    @property
    def held(self) -> list[Any]:
        """Return the server's ends of the connections."""
        return list(self._server.server_state.connections)

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
        """Read until the server closes the connection."""
        received = bytearray()
        with suppress(ConnectionResetError):
            while some := await self.reader.read(65536):
                received += some
        return bytes(received)

    async def all_while_sending(self, piece: bytes) -> bytes:
        """Read until the server closes the connection, sending all the time."""

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
        """Return one answer of `App`, delimited by its last chunk."""
        return await self.reader.readuntil(b"0\r\n\r\n")


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def served(app: Any, http: Any, **options: Any) -> AsyncIterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=http, ws="none", log_config=None, timeout_graceful_shutdown=1, **options)
        server = uvicorn.Server(config)
        # `serve` is not used because it would install handlers for the signals of this process.
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
    read_timeout_s: float = SHORT_S, keep_alive_s: float = SHORT_S, **options: Any
) -> AsyncIterator[tuple[Served, App]]:
    """Run a server with short time limits for clients."""

    class Protocol(BoundedProtocol):
        pass

    Protocol.read_timeout_s = read_timeout_s
    options = {"timeout_keep_alive": keep_alive_s, "h11_max_incomplete_event_size": MOST_HEAD_BYTES, **options}
    app = App()
    async with asyncio.timeout(PATIENCE_S), served(app, Protocol, lifespan="off", **options) as server:
        try:
            yield server, app
        finally:
            app.may_answer.set()
            for client in server.clients:
                client.writer.transport.abort()
            await until(lambda: server.connections == 0)


class TestWaiting:
    @pytest.mark.parametrize(
        ("half", "piece", "status"),
        [(HALF_A_HEAD, b"", b"408"), (HALF_A_HEAD, b"x", b"408"), (HALF_A_BODY % b"now", b"x", b"200")],
        ids=["head in silence", "head byte by byte", "body byte by byte, after the answer is given"],
    )
    async def test_incomplete_request_times_out_while_bytes_trickle_in(
        self, half: bytes, piece: bytes, status: bytes
    ) -> None:
        async with on_app() as (server, _):
            client = await server.connect(half)
            assert (await client.all_while_sending(piece)).startswith(b"HTTP/1.1 %s " % status)
            await until(lambda: server.connections == 0)

    async def test_silent_client_is_disconnected_without_an_answer(self) -> None:
        async with on_app() as (server, _):
            assert await (await server.connect()).all() == b""

    async def test_incomplete_second_request_head_times_out_before_an_idle_connection(self) -> None:
        async with on_app(keep_alive_s=10 * PATIENCE_S) as (server, _):
            whole = b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n"
            pipelined, second = await server.connect(whole + HALF_A_HEAD), await server.connect(whole)
            assert (await second.answer()).startswith(b"HTTP/1.1 200 ")
            second.send(HALF_A_HEAD)
            await pipelined.answer()
            for client in (pipelined, second):
                assert (await client.all()).startswith(b"HTTP/1.1 408 ")

    async def test_connection_with_an_unread_answer_is_closed(self) -> None:
        async with on_app() as (server, _):
            await server.connect(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: server.connections == 0)

    async def test_slow_application_is_awaited(self) -> None:
        async with on_app() as (server, app):
            answer = asyncio.create_task(server.get("/later"))
            await app.asked.wait()
            await asyncio.sleep(4 * SHORT_S)
            app.may_answer.set()
            assert (await answer).text == "done"


class TestNumber:
    """Room for two connections, without time limits."""

    @staticmethod
    def with_two() -> AbstractAsyncContextManager[tuple[Served, App]]:
        return on_app(10 * PATIENCE_S, limit_concurrency=2)

    @pytest.mark.parametrize("sent", [b"", HALF_A_HEAD], ids=["silent", "half a head"])
    async def test_longest_waiting_connection_is_closed_first(self, sent: bytes) -> None:
        async with self.with_two() as (server, _):
            first, second = [await server.connect(sent) for _ in range(2)]
            assert (await server.get()).text == "done"
            assert await first.all() == b""
            second.send(HALF_A_HEAD.removeprefix(sent) + b"host\r\n\r\n")
            assert (await second.answer()).startswith(b"HTTP/1.1 200 ")
            for _ in range(3):
                await server.connect(sent)
            await until(lambda: server.connections <= 2)

    async def test_newcomer_gets_503_with_retry_after_if_all_connections_are_busy(self) -> None:
        async with self.with_two() as (server, app):
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


HEAD = b"POST /body HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"x" * MOST_HEAD_BYTES


class TestBytes:
    """Without time limits."""

    @staticmethod
    def patient() -> AbstractAsyncContextManager[tuple[Served, App]]:
        return on_app(10 * PATIENCE_S, 10 * PATIENCE_S)

    @pytest.mark.parametrize("path", ["/later", "/now"])
    async def test_pipelined_requests_wait_in_the_network_while_answers_are_unread(self, path: str) -> None:
        async with self.patient() as (server, app):
            client = await server.connect()
            (connection,) = server.held
            # The test reads no answers, so the client's stream stops receiving after 128 KiB.
            client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode() * 400_000)
            await until(lambda: connection.flow.read_paused and connection._is_answering)
            await asyncio.sleep(SHORT_S)
            assert not connection.transport.is_reading()
            assert len(connection.conn.trailing_data[0]) <= 512 * 1024
            assert connection.transport.get_write_buffer_size() < 128 * 1024
            if path == "/later":
                assert app.requests == 1

    async def test_pipelined_requests_are_all_answered(self) -> None:
        async with self.patient() as (server, app):
            get, post = b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n", HEAD + b"Content-Length: 3\r\n\r\nabc"
            chunked = CHUNKED + b"3\r\nabc\r\n0\r\nX: trailer\r\n\r\n"
            client = await server.connect((get + post + chunked + post) * 50)
            for _ in range(200):
                assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
            assert bytes(app.body) == b"abc" * 150

    @pytest.mark.parametrize(
        "sent",
        [
            b"GET /" + LONG,
            HEAD + b"X: " + LONG,
            b"GET /" + 2 * LONG + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            HEAD + b"a:b\r\n" * MOST_HEAD_BYTES,
            CHUNKED + b"1\r\nx\r\n0\r\nX: " + LONG,
            CHUNKED + b"1;" + LONG,
        ],
        ids=["URL", "value", "complete head", "fields", "trailer", "extension of a chunk"],
    )
    async def test_endless_head_is_refused(self, sent: bytes) -> None:
        async with self.patient() as (server, app):
            client = await server.connect(sent)
            answer = await client.all()
            # The system drops an answer if further bytes are in flight; the connection is closed in any case.
            if answer:
                head, _, body = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ")
                assert str(MOST_HEAD_BYTES) in json.loads(body)["message"]
            assert b"x" * 10 not in app.body
            await until(lambda: server.connections == 0)

    async def test_trailers_do_not_become_headers(self) -> None:
        async with self.patient() as (server, app):
            client = await server.connect(CHUNKED + b"0\r\nAuthorization: Bearer x\r\nHost: other\r\n\r\n")
            await client.answer()
            assert app.headers[b"host"] == b"localhost"
            assert b"authorization" not in app.headers

    @pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"\x16\x03\x01\r\n\r\n"])
    async def test_invalid_request_gets_a_json_error(self, sent: bytes) -> None:
        async with self.patient() as (server, _):
            head, _, body = (await (await server.connect(sent)).all()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert "not a valid HTTP request" in json.loads(body)["message"]

    async def test_absolute_url_reaches_no_route(self) -> None:
        async with self.patient() as (server, app):
            client = await server.connect(b"GET http://evil.example/now HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await client.answer()
            assert app.path == "http://evil.example/now"


@pytest.mark.parametrize(
    ("files", "taken"), [(64, 32), (128, 64), (256, 192), (1024, 768), (10**6, 4096), ("infinity", 4096)]
)
def test_file_descriptors_are_reserved_for_the_rest_of_the_server(
    files: int | str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    limit = resource.RLIM_INFINITY if files == "infinity" else files
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, resource.RLIM_INFINITY))
    number, left = connections_allowed()
    assert number == taken
    assert left >= 32


class TestBodies:
    """Limits within the application, independent of the server."""

    @pytest.mark.parametrize("piece", [b"", b" "], ids=["in silence", "byte by byte"])
    async def test_incomplete_body_times_out(self, tmp_path: Path, piece: bytes) -> None:
        app = create_app(Settings(database_url=f"sqlite:///{tmp_path / 'bso.sqlite3'}", read_timeout_s=SHORT_S))

        async with asyncio.timeout(PATIENCE_S), served(app, "auto", lifespan="on") as server:
            clients = [await server.connect(HALF_A_BODY % path) for path in (b"jobs", b"report")]
            answers = await asyncio.gather(*(client.all_while_sending(piece) for client in clients))
        for head, _, body in (answer.partition(b"\r\n\r\n") for answer in answers):
            assert head.startswith(b"HTTP/1.1 408 ")
            assert "ZEUS_BSO_READ_TIMEOUT_S" in json.loads(body)["message"]

    async def test_steadily_arriving_body_is_accepted(self, clock: Clock) -> None:
        # One second per 16 KiB: each piece takes less, and all together take longer than the initial second.
        receive = in_time(
            clock.sending(*(piece(b"x" * 16384, 0.3, more=more) for more in (True, True, True, False))), 1.0
        )
        while (await receive())["more_body"]:  # type: ignore[typeddict-item]  # these messages have the key
            pass
        with pytest.raises(HTTPException, match="did not come in time"):
            await in_time(clock.sending(piece(b"x", 1.1, more=True)), 1.0)()

    async def test_time_spent_by_the_server_on_a_piece_does_not_count(self, clock: Clock) -> None:
        receive = in_time(clock.sending(*[piece(b"x", 0.001, more=True)] * 3), 0.6)
        for _ in range(3):
            await receive()
            clock.now_s += 0.4

    async def test_deadline_ends_with_the_body(self, clock: Clock) -> None:
        receive = in_time(clock.sending(piece(b"", 0, more=False), (0.8, {"type": "http.disconnect"})), 0.2)
        await receive()
        assert (await receive())["type"] == "http.disconnect"


Timed = tuple[float, dict[str, Any]]


def piece(body: bytes, after_s: float, *, more: bool) -> Timed:
    return after_s, {"type": "http.request", "body": body, "more_body": more}


class Clock:
    """A clock of the event loop that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def sending(self, *messages: Timed) -> Receive:
        """Return a client that sends each message after its delay in seconds."""
        left = list(messages)

        async def receive() -> Any:
            after_s, message = left.pop(0)
            self.now_s += after_s
            for _ in range(3):  # deadlines act in the next turns of the event loop
                await asyncio.sleep(0)
            return message

        return cast("Receive", receive)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock.now_s)
    return clock


def connection_to(server: ServerProcess, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    connection.sendall(sent)
    # At this point, the server has read everything sent before.
    httpx.get(f"{server.url}/health/live").raise_for_status()
    return connection


def test_setting_of_the_command_sets_the_read_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a client that sends at once on a busy machine.
    monkeypatch.setenv("ZEUS_BSO_READ_TIMEOUT_S", "3")
    with (
        serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path) as server,
        connection_to(server, HALF_A_HEAD) as head,
        connection_to(server, HALF_A_BODY % b"jobs") as body,
    ):
        for connection in (head, body):
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_process_ends_despite_a_hanging_thread() -> None:
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
    def test_incomplete_body_and_hanging_database_do_not_keep_a_server_from_ending(
        self, server: ServerProcess, tmp_path: Path
    ) -> None:
        with closing(sqlite3.connect(tmp_path / "bso.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            body = json.dumps(job()).encode()
            head = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            with connection_to(server, HALF_A_BODY % b"jobs"), connection_to(server, head + body):
                assert server.process is not None
                server.process.terminate()
                # Shorter than the time limit of such a body, so that its timeout ends nothing here.
                assert server.process.wait(timeout=Settings().read_timeout_s - 1) == -signal.SIGTERM
            other.execute("ROLLBACK")

    def test_idle_connections_do_not_use_up_the_file_descriptors(self, tmp_path: Path) -> None:
        with started(tmp_path, "sh", "-c", 'ulimit -n 128; exec "$@"', "sh") as (server, _):
            idle = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) for _ in range(200)]
            registered = httpx.post(f"{server.url}/jobs", json=job(), timeout=PATIENCE_S)
            assert registered.status_code == 201, registered.text
            for each in idle:
                each.close()
        log = server.log.read_text()
        assert log.count("connections are taken") == 1
        assert "ulimit -n" in log

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
    async def test_attack_of_200_connections_takes_little_memory_and_loses_no_report(self, tmp_path: Path) -> None:
        with started(tmp_path) as (server, pid):
            token = make_token(server.database_url, "report")
            # These kinds take memory. Tiny chunks also take all CPU time, so that a training would continue without
            # the server.
            memory = [kind for kind in KINDS if kind != "tiny chunks"]
            async with attacking(server.port, 200, *memory), asyncio.TaskGroup() as group:
                trainings = [group.create_task(reported(server.url, token)) for _ in range(4)]
                # Long enough for each kind of attack, even if every report takes less time.
                await asyncio.sleep(5)
            assert [each.result() for each in trainings] == [list(range(1, 6))] * 4
            async with attacking(server.port, 20, "tiny chunks"):
                await asyncio.sleep(2)
            peak_kb = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            assert peak_kb is not None
            assert int(peak_kb[1]) < 300 * 1024
            assert httpx.get(f"{server.url}/health/live", timeout=PATIENCE_S).status_code == 200
        assert "Invalid HTTP request received" not in server.log.read_text()


@contextmanager
def started(folder: Path, *prefix: str) -> Iterator[tuple[ServerProcess, int]]:
    """Run a server as a process of its own; yield the server and its pid."""
    server = ServerProcess(f"sqlite:///{folder / 'bso.sqlite3'}", folder / "server.log", free_port())
    options = ["--port", str(server.port), "--database-url", server.database_url]
    command = [*prefix, sys.executable, "-m", "bso_server", "serve", *options]
    with server.log.open("w") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        wait_until_up(process, server.url, server.log)
        yield server, process.pid
    finally:
        process.kill()
        process.wait()


async def reported(url: str, token: str) -> list[int]:
    """Run a trial; return the epochs that the server has stored."""
    # The server may close a connection that is idle while this process is busy. Clients can take all of its CPU time.
    options: dict[str, Any] = {"limits": httpx.Limits(max_keepalive_connections=0), "timeout": PATIENCE_S}
    async with httpx.AsyncClient(base_url=url, headers=bearer(token), **options) as http:
        job_id = (await http.post("/jobs", json=job())).json()["job_id"]
        trial = (await http.get("/jobs/batch_size", params={"job_id": job_id})).json()
        for epoch in range(1, 6):
            totals = {"time": epoch, "energy": epoch, "metric": 0.1, "current_epoch": epoch}
            (await http.post("/report", json=trial | totals)).raise_for_status()
        epochs = await http.get(f"/ui/jobs/{job_id}/trials/1.json")
        return [each["epoch"] for each in epochs.json()["epochs"]]
