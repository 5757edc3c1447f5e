"""A server, its clients, and their disasters. Only processes started here are killed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bso_server.service.commands import BatchSizeService, Commands
from tests.chaos.jobs import jobs
from tests.support import ROOT
from tests.support.databases import end_sessions
from tests.support.disks import fill
from tests.support.servers import ServerProcess
from tests.support.service import open_store

CLIENTS = 4
PATIENCE_S = 120.0
LONGEST_PAUSE_S = 2.0
# Longer than any lease of a running trial: leases of trainings without heartbeats last an hour.
HOURS_LATER = timedelta(hours=2)


@dataclass(frozen=True)
class RunningClient:
    """A client process, its log of acknowledgements, and its error output if it ends by itself."""

    process: subprocess.Popen[bytes]
    log: Path
    errors: Path

    @property
    def acknowledgements(self) -> int:
        """Return the number of answers in the log."""
        return self.log.read_bytes().count(b"\n")


class Scene:
    """Two servers on one database, and their clients with `logs`; `struck` counts the victims of disasters.

    The database, which may be on a small `disk`, has the server's schema; `rng` chooses victims, and seeds the clients.
    """

    def __init__(self, database_url: str, directory: Path, rng: random.Random, disk: Path | None = None) -> None:
        self._disk = disk
        self._database_url = database_url
        self._servers = [ServerProcess(database_url, directory / f"server-{number}.log") for number in (1, 2)]
        self._directory = directory
        self._rng = rng
        self._clients: list[RunningClient] = []
        self._generation = 0
        self.logs: list[Path] = []
        self.struck: Counter[str] = Counter()

    def start(self) -> None:
        """Start the servers and all clients."""
        for server in self._servers:
            server.start()
        for _ in range(CLIENTS):
            self._start_client()
        self._wait_until_it_trains(self._clients[-1])

    def stop(self) -> None:
        """Kill everything at an arbitrary moment."""
        for server in self._servers:
            server.kill()
        while self._clients:
            self._kill_a_client()

    def wait_for(self, acknowledgements: int) -> None:
        """Wait until the clients have received `acknowledgements` more answers, and assert that all processes live."""
        wanted = self._acknowledgements + acknowledgements
        self._wait(lambda: self._acknowledgements >= wanted, "the clients get no answers")

    @property
    def generations(self) -> range:
        """Generations of the jobs that were begun."""
        return range(self._generation + 1)

    def disasters(self) -> list[Callable[[], None]]:
        """Return the possible disasters, frequent disasters several times."""
        cut = [] if self._database_url.startswith("sqlite") else [self.cut_connections] * 2
        leases = [self.expire_leases] * 2
        full = [] if self._disk is None else [self.fill_disk] * 3
        return [
            *[self.replace_client] * 3,
            *[self.kill_server] * 2,
            *[self.pause_server] * 2,
            *full,
            *leases,
            *cut,
            self.begin_new_jobs,
        ]

    def replace_client(self) -> None:
        """Kill a client and start a new client."""
        self._kill_a_client()
        self._start_client()

    def begin_new_jobs(self) -> None:
        """Let one client, and all clients started from now on, train new jobs."""
        self._generation += 1
        self.replace_client()
        self._wait_until_it_trains(self._clients[-1])

    def kill_server(self) -> None:
        """Kill a server, and restart it at the same address."""
        server = self._rng.choice(self._servers)
        server.kill()
        self.struck["server"] += 1
        server.start()

    def pause_server(self) -> None:
        """Pause a server, perhaps in the middle of a transaction, and continue it."""
        process = self._rng.choice(self._servers).process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        self.struck["pause"] += 1
        time.sleep(self._rng.uniform(0, LONGEST_PAUSE_S))
        process.send_signal(signal.SIGCONT)

    def fill_disk(self) -> None:
        """Fill the database's disk for a while, at first until the server has noticed."""
        assert self._disk is not None
        ballast = fill(self._disk)
        time.sleep(self._rng.uniform(0, LONGEST_PAUSE_S))
        # The database can still use the space within its files.
        self._wait(lambda: "disk of its database is full" in self._said, "the disk is not full for any server")
        self.struck["disk"] += 1
        ballast.unlink()

    def expire_leases(self) -> None:
        """Abandon all running trials, also of living clients, as another server with a clock ahead would."""

        async def reap() -> int:
            async with open_store(self._database_url) as store:
                return await BatchSizeService(store, Commands(clock=lambda: datetime.now(UTC) + HOURS_LATER)).reap()

        def some_expire() -> bool:
            self.struck["lease"] += (expired := asyncio.run(reap()))
            return expired > 0

        # The last trials may just have ended, and the search leaves out locked ones.
        self._wait(some_expire, "no lease expires")

    def cut_connections(self) -> None:
        """End one or more of the servers' connections to their database, from the database's side."""

        def some(numbers: Sequence[int]) -> Sequence[int]:
            return self._rng.sample(numbers, self._rng.randint(min(1, len(numbers)), len(numbers)))

        self.struck["connection"] += end_sessions(self._database_url, some)

    @property
    def _acknowledgements(self) -> int:
        return sum(client.acknowledgements for client in self._clients)

    @property
    def _said(self) -> str:
        """Logs of both servers."""
        return "\n".join(server.log.read_text() for server in self._servers)

    def _wait_until_it_trains(self, client: RunningClient) -> None:
        jobs_to_register = len(jobs(self._generation))
        self._wait(lambda: client.acknowledgements > jobs_to_register, "a new client gets no trial")

    def _wait(self, until: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._check()
            if until():
                return
            assert time.monotonic() < deadline, f"{otherwise}: {self._said}"
            time.sleep(0.02)

    def _check(self) -> None:
        for server in self._servers:
            assert server.process is not None
            assert server.process.poll() is None, f"a server ended of itself: {server.log.read_text()}"
        for client in self._clients:
            assert client.process.poll() is None, f"a client ended of itself: {client.errors.read_text()}"

    def _start_client(self) -> None:
        log = self._directory / f"client-{len(self.logs) + 1}.jsonl"
        log.touch()
        self.logs.append(log)
        url = self._rng.choice(self._servers).url
        arguments = [url, str(log), str(self._rng.getrandbits(32)), str(self._generation)]
        errors = log.with_suffix(".err")
        with errors.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.client", *arguments], cwd=ROOT, stdout=output, stderr=output
            )
        self._clients.append(RunningClient(process, log, errors))

    def _kill_a_client(self) -> None:
        # A client that is still starting would not notice.
        candidates = [client for client in self._clients if client.acknowledgements] or self._clients
        client = self._rng.choice(candidates)
        self._clients.remove(client)
        client.process.kill()
        client.process.wait()
        self.struck["client"] += 1
