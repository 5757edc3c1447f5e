"""Temporary PostgreSQL clusters: a primary, and a streaming standby that can be promoted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.servers import free_port

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
def primary_and_standby(*, synchronous: bool) -> Iterator[tuple[Cluster, Cluster]]:
    """Two running clusters; a synchronous primary acknowledges a commit after the standby has stored it."""
    where = programs()
    # Outside pytest's folder, which only root can traverse.
    with TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            shutil.chown(folder, _OWNER, _OWNER)
        primary = Cluster(Path(folder, "primary"), free_port(), where)
        primary.run("initdb", "--no-sync", "--auth=trust", f"--username={_OWNER}", "--pgdata", primary.folder)
        primary.configure(f"synchronous_standby_names = '{'*' if synchronous else ''}'")
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
