"""Promotion of a PostgreSQL standby after the loss of its primary; the server's URL names both hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.chaos.client import BoundedClient, DoneError
from tests.chaos.evidence import check_job, check_numbers
from tests.chaos.jobs import jobs
from tests.support.servers import ServerProcess, free_port
from tests.support.service import in_store

# --- Temporary PostgreSQL clusters ------------------------------------------------------------------------------------


_OWNER = "postgres"
# Without syncs, because these tests stop processes, not the machine.
_SETTINGS = "listen_addresses = '127.0.0.1'\nfsync = off\nmax_wal_size = '256MB'\n"


@dataclass(frozen=True)
class Cluster:
    """A cluster in a temporary folder, initially stopped."""

    folder: Path
    port: int
    programs: Path

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://{_OWNER}@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str | Path) -> None:
        """Run a program of PostgreSQL as a user other than root, which PostgreSQL refuses."""
        command: list[str | Path] = [self.programs / program, *arguments]
        owner = _OWNER if os.geteuid() == 0 else None
        log = self.folder.with_suffix(".log")
        with log.open("a") as output:
            done = subprocess.run(command, cwd="/", stdout=output, stderr=output, check=False, user=owner, group=owner)
        assert done.returncode == 0, f"{program}: {log.read_text()[-3000:]}"

    def configure(self, settings: str) -> None:
        """Append settings, with a separate socket and port."""
        with (self.folder / "postgresql.conf").open("a") as file:
            file.write(f"{_SETTINGS}port = {self.port}\nunix_socket_directories = '{self.folder}'\n{settings}\n")

    def control(self, action: str, *options: str) -> None:
        """Run pg_ctl and wait until the action (start, restart, stop or promote) is done."""
        self.run("pg_ctl", action, "--wait", "--timeout=120", "--pgdata", self.folder, *options)

    def kill(self) -> None:
        """Kill all processes, without a checkpoint or a message to the standby."""
        self.control("stop", "--mode=immediate")


def programs() -> Path:
    """Return the folder of PostgreSQL's programs; without them, skip the test, or fail in CI."""
    found = [Path(path).resolve() for path in (shutil.which("initdb"),) if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    if not found:
        reason = "no programs of PostgreSQL (initdb) to set up a primary and a standby with"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return found[0].parent


@contextmanager
def primary_and_standby() -> Iterator[tuple[Cluster, Cluster]]:
    """Two running clusters; the primary acknowledges a commit after the standby has stored it."""
    where = programs()
    # Outside pytest's folder, which only root can traverse.
    with TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            shutil.chown(folder, _OWNER, _OWNER)
        primary = Cluster(Path(folder, "primary"), free_port(), where)
        primary.run("initdb", "--no-sync", "--auth=trust", f"--username={_OWNER}", "--pgdata", primary.folder)
        primary.configure("synchronous_standby_names = '*'")
        clusters = [primary]
        try:
            primary.control("start")
            standby = Cluster(Path(folder, "standby"), free_port(), where)
            clusters.append(standby)
            copy = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--pgdata", standby.folder]
            primary.run("pg_basebackup", f"--dbname=host=127.0.0.1 port={primary.port} user={_OWNER}", *copy)
            # The standby works without a standby of its own after its promotion.
            standby.configure("synchronous_standby_names = ''")
            standby.control("start")
            yield primary, standby
        finally:
            for cluster in clusters:
                if (cluster.folder / "postmaster.pid").exists():
                    cluster.kill()


pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
CLIENTS = 3


@contextmanager
def serving(primary: Cluster, standby: Cluster, folder: Path) -> Iterator[ServerProcess]:
    """Run a server that connects to the cluster that accepts writes."""
    hosts = "&".join(f"host=127.0.0.1:{each.port}" for each in (primary, standby))
    url = f"postgresql+asyncpg://postgres@/postgres?{hosts}&target_session_attrs=read-write"
    server = ServerProcess(url, folder / "server.log", database_timeout_s=3.0)
    try:
        server.start("--migrate")
        yield server
    finally:
        server.kill()


def test_promoted_synchronous_standby_has_everything_acknowledged(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []
    with (
        primary_and_standby() as (primary, standby),
        serving(primary, standby, tmp_path) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        clients = [pool.submit(BoundedClient(server.url, seed, 200, answers.append).run) for seed in range(CLIENTS)]
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < 200:
            assert time.monotonic() < deadline, server.log.read_text()
            assert not any(each.done() for each in clients), server.log.read_text()
            time.sleep(0.01)
        primary.kill()
        before = len(answers)
        standby.control("promote")
        for client in clients:
            assert isinstance(client.exception(PATIENCE_S), DoneError), client.exception()
        assert len(answers) == CLIENTS * 200 > before + CLIENTS, "the clients went on after the promotion"
        check_numbers(answers)

        def check(transaction: Any) -> None:
            for each in jobs(0):
                check_job(transaction, each.job_id, answers)

        in_store(standby.url, lambda store: store.read(check))
        assert "Traceback" not in server.log.read_text()
