"""PostgreSQL clusters of a test's own: a primary, and a standby that streams from it and can be promoted."""

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
# Without syncs, because these tests stop processes and not the machine.
_SETTINGS = "listen_addresses = '127.0.0.1'\nfsync = off\nmax_wal_size = '256MB'\n"


@dataclass(frozen=True)
class Cluster:
    """A cluster in a folder of its own, which is not running at first."""

    folder: Path
    port: int
    programs: Path

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://{_OWNER}@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str | Path) -> None:
        """Run a program of PostgreSQL, as another user than root, which it refuses."""
        command: list[str | Path] = [self.programs / program, *arguments]
        owner = _OWNER if os.geteuid() == 0 else None
        log = self.folder.with_suffix(".log")
        with log.open("a") as output:
            done = subprocess.run(command, cwd="/", stdout=output, stderr=output, check=False, user=owner, group=owner)
        assert done.returncode == 0, f"{program}: {log.read_text()[-3000:]}"

    def configure(self, settings: str) -> None:
        """Append settings, with a socket and a port of its own."""
        with (self.folder / "postgresql.conf").open("a") as file:
            file.write(f"{_SETTINGS}port = {self.port}\nunix_socket_directories = '{self.folder}'\n{settings}\n")

    def control(self, action: str, *options: str) -> None:
        """Run pg_ctl and wait until the action (start, restart, stop or promote) is done."""
        self.run("pg_ctl", action, "--wait", "--timeout=120", "--pgdata", self.folder, *options)

    def kill(self) -> None:
        """Stop all processes at once, without a checkpoint or a message to the standby."""
        self.control("stop", "--mode=immediate")


def programs() -> Path:
    """Return the folder of PostgreSQL's programs; without them the test is skipped, except in CI, where it fails."""
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
    # Not in pytest's folder, through which other users than root may not pass.
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
            # It is to work alone once it is promoted.
            standby.configure("synchronous_standby_names = ''")
            standby.control("start")
            yield primary, standby
        finally:
            for cluster in clusters:
                if (cluster.folder / "postmaster.pid").exists():
                    cluster.kill()
