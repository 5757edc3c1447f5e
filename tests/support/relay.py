"""A relay between a server and its database, which loses connections or falls silent on request."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from itertools import cycle, repeat

from sqlalchemy.engine import make_url

# A session sets its isolation to READ COMMITTED.
COMMIT = re.compile(rb"(?<!AUTO)COMMIT(?!TED)")


class Fate(Enum):
    """Fate of a connection once the database has answered."""

    LIVE = auto()
    LOSE_ANSWER = auto()
    END = auto()


class Relay:
    """Forward data between a database and its clients by default, with a thread per direction.

    Args:
        target: Host and port of the database.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener: socket.socket | None = None
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._fates: Iterator[Fate] = repeat(Fate.LIVE)
        self._turns_away = False
        self._speaks = threading.Event()
        self._speaks.set()
        self.turned_away = 0
        self.lost_commits = 0
        self.port = 0
        self.open()

    def open(self) -> None:
        """Accept connections on the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener, self.port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Abort every connection, and refuse new connections."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # A close without shutdown would leave the thread waiting and the port taken.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._cut()

    def turn_away(self, turns_away: bool) -> None:
        """Abort every connection, and new connections immediately; or stop doing so."""
        self._turns_away = turns_away
        if turns_away:
            self._cut()

    def fall_silent(self, is_silent: bool) -> None:
        """Hold back the data of both sides while accepting connections; or forward the held data."""
        if is_silent:
            self._speaks.clear()
        else:
            self._speaks.set()

    def url_of(self, database_url: str) -> str:
        """Return the URL of the database through this relay."""
        url = make_url(database_url).set(host="127.0.0.1", port=self.port)
        if url.get_backend_name() == "postgresql":
            # An attempt of asyncpg to use TLS, when aborted, leaves an error without an owner.
            url = url.update_query_dict({"ssl": "disable"})
        return url.render_as_string(hide_password=False)

    def lose_commits(self, loses: bool) -> None:
        """Abort connections at their COMMIT, alternately before and after the client receives the answer."""
        self._fates = cycle([Fate.LOSE_ANSWER, Fate.END]) if loses else repeat(Fate.LIVE)

    def _cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _end(each)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if self._turns_away:
                _end(client)
                self.turned_away += 1
                continue
            database = socket.create_connection(self._target)
            with self._lock:
                self._sockets |= {client, database}
            fates = [Fate.LIVE]
            for pump in (self._pass_questions, self._pass_answers):
                threading.Thread(target=pump, args=(client, database, fates), daemon=True).start()

    def _pass_questions(self, client: socket.socket, database: socket.socket, fates: list[Fate]) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if COMMIT.search(data):
                    fates.append(next(self._fates))
                self._speaks.wait()
                database.sendall(data)
        _end(database)

    def _pass_answers(self, client: socket.socket, database: socket.socket, fates: list[Fate]) -> None:
        with suppress(OSError):
            while data := database.recv(65536):
                # Read before the answer is sent: the client may ask for the next commit as soon as it has it.
                fate = fates[-1]
                if fate is Fate.LOSE_ANSWER:
                    self.lost_commits += 1
                    break
                self._speaks.wait()
                client.sendall(data)
                if fate is Fate.END:
                    break
        _end(client)
        _end(database)


def _end(connection: socket.socket) -> None:
    """End a connection and wake up a thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def relay_to(database_url: str) -> Iterator[Relay]:
    """Yield a relay to the database with this URL."""
    url = make_url(database_url)
    assert url.host is not None
    assert url.port is not None
    relay = Relay((url.host, url.port))
    try:
        yield relay
    finally:
        relay.fall_silent(False)
        relay.close()
