"""Tasks of an operator: upgrading databases, showing settings, starting several processes."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from alembic.script import ScriptDirectory
from litestar.routes import HTTPRoute
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url

from bso_server import settings as settings_module
from bso_server.app import create_app
from bso_server.cli.common import CommandError, settings_of
from bso_server.core.job import LeasePolicy
from bso_server.settings import Settings
from bso_server.storage import migrations, sqlite
from bso_server.storage.database import open_database
from bso_server.storage.sqlite import network_filesystem
from bso_server.storage.store import Store
from bso_server.storage.transaction import Transaction
from tests.support import warm
from tests.support.databases import (
    MYSQL,
    MYSQL_URL,
    POSTGRES_URL,
    POSTGRESQL,
    administer,
    empty_database,
    fresh_database,
)
from tests.support.exports import export_over
from tests.support.jobs import job
from tests.support.servers import (
    NEEDED,
    SERVER_START_S,
    ServerProcess,
    bso_server,
    free_port,
    serving,
)
from tests.support.service import open_store
from tests.support.tokens import RESULT
from tests.support.wire import begin

T = TypeVar("T")

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
fileserver:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local xfs rw 0 0
share /mnt/with\\040blank cifs rw 0 0
host: /mnt/ssh fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/bso.sqlite3", None),
        ("/home/me/bso.sqlite3", "nfs4"),
        ("/home/local/bso.sqlite3", None),
        ("/homework/bso.sqlite3", None),
        ("/mnt/with blank/bso.sqlite3", "cifs"),
        ("/mnt/ssh/bso.sqlite3", "fuse.sshfs"),
    ],
)
def test_network_file_systems_are_recognized(path: str, kind: str | None) -> None:
    assert network_filesystem(Path(path), MOUNTS) == kind


def test_mounts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    assert network_filesystem(tmp_path) is None


@pytest.mark.parametrize("place", ["", "/:memory:"])
def test_in_memory_database_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="name a file"):
        open_database(f"sqlite://{place}")


def test_file_on_a_network_file_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "network_filesystem", lambda path: network_filesystem(path, MOUNTS))
    with pytest.raises(ValueError, match=r"/home/me/bso\.sqlite3 is on a network file system \(nfs4\)"):
        open_database("sqlite:////home/me/bso.sqlite3")


def test_url_selects_the_driver() -> None:
    drivers = {
        "sqlite:////tmp/bso.sqlite3": "sqlite",
        "sqlite+aiosqlite:////tmp/bso.sqlite3": "sqlite",
        "postgresql://db/bso": "postgresql+asyncpg",
        "postgresql+asyncpg://db/bso": "postgresql+asyncpg",
        "mysql://db/bso": "mysql+asyncmy",
        "mysql+asyncmy://db/bso": "mysql+asyncmy",
    }
    assert {url: open_database(url).url.drivername for url in drivers} == drivers


@pytest.mark.parametrize(
    ("driver", "extra"),
    [("postgresql+asyncpg", "postgres"), ("mysql+asyncmy", "mysql")],
)
def test_missing_driver_is_reported_with_the_extra_to_install(
    driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, module = driver.partition("+")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{module} is not installed: pip install 'zeus-plugins\[{extra}\]'"):
        open_database(f"{driver}:////tmp/bso.sqlite3")


def test_empty_database_is_upgraded_and_served(database_url: str, tmp_path: Path) -> None:
    source = ["--database-url", database_url]
    server = ServerProcess(database_url, tmp_path / "server.log")
    assert "is at schema none" in refusal("db", "check", *source)
    if not database_url.startswith("sqlite"):
        assert "run: bso-server db upgrade" in refusal("serve", "--port", str(free_port()), *source)

    server.start(*([] if database_url.startswith("sqlite") else ["--migrate"]))
    server.kill()
    assert bso_server("db", "check", *source).returncode == 0


def test_revisions_are_known_without_alembic() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent)).walk_revisions()
    assert tuple(script.revision for script in scripts)[::-1] == migrations.REVISIONS


def test_two_concurrent_upgrades_succeed(database_url: str, tmp_path: Path) -> None:
    command, output = ["bso_server", "db", "upgrade", "--database-url", database_url], tmp_path / "output"
    both = [warm.start(*command, modules=NEEDED, output=output) for _ in range(2)]
    for process in both:
        assert process.wait() == 0, output.read_text()


async def test_sqlite_file_is_backed_up_before_a_migration(
    new_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(new_database) as store:
        await store.migrate()
        assert list(tmp_path.glob("*.backup")) == []
        monkeypatch.setattr(migrations, "HEAD", "9999")
        await store.migrate()

    (copy,) = tmp_path.glob("*.backup")
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() is not None


@pytest.fixture
def newer_url(database_url: str) -> Iterator[str]:
    """URL of a database with a schema from a later version."""
    assert bso_server("db", "upgrade", "--database-url", database_url).returncode == 0
    (known,) = set_revision(database_url, "9999")
    yield database_url
    assert set_revision(database_url, known) == ["9999"]


def set_revision(database_url: str, revision: str) -> list[str]:
    """Write a revision into a database; return the previous revision."""

    def replace(connection: Connection) -> list[str]:
        before = list(connection.scalars(text("SELECT version_num FROM alembic_version")))
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
        return before

    return on_database(database_url, replace)


def change(database_url: str, statement: str) -> None:
    """Execute a statement on a database."""
    on_database(database_url, lambda connection: connection.exec_driver_sql(statement))


def on_database(database_url: str, work: Callable[[Connection], T]) -> T:
    async def run() -> T:
        opened = open_database(database_url)
        try:
            return await opened.transact(work, read_only=False, timeout_s=60.0)
        finally:
            await opened.close()

    return asyncio.run(run())


def refusal(*command: str) -> str:
    """Return the single error line of a failing command."""
    answer = bso_server(*command)
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    return line


def test_database_of_a_newer_version_is_left_unchanged(newer_url: str) -> None:
    for command in (["serve", "--port", str(free_port())], ["db", "check"], ["db", "upgrade"]):
        line = refusal(*command, "--database-url", newer_url)
        assert "is at schema 9999, which this version does not know" in line
        assert "newer version" in line
        assert "restore the backup" in line
    if newer_url.startswith("sqlite"):
        # A server that is restarted repeatedly must not fill the disk.
        assert list(Path(make_url(newer_url).database or "").parent.glob("*.backup")) == []


# Routes that answer without the database or report its failure; the training's own database is asked first.
OTHER_GETS = {
    *("/health/live", "/version", "/", "/ui/static/{name}", "/metrics"),
    *("/schema", "/schema/{path}", "/schema/openapi.json", "/jobs/batch_size"),
    # Removed pages, which name their replacement.
    *(
        "/ui/health",
        "/ui/health.json",
        "/ui/tokens",
        "/ui/jobs/{name}/report.html",
        "/ui/tokens.json",
        "/ui/jobs/{name}/whatif",
        "/ui/jobs/{name}/whatif.json",
        "/api/jobs/{job_id}/arms",
        "/api/jobs/{job_id}/trials.csv",
        "/api/jobs/{job_id}/events",
        "/api/jobs/{job_id}/power_profiles",
        "/api/jobs/{job_id}/trials/{trial_number}/epochs",
    ),
}


def test_older_server_answers_503_on_all_routes_after_schema_was_upgraded(database_url: str, tmp_path: Path) -> None:
    with (
        serving(database_url, tmp_path, "--migrate") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        http.post("/jobs", json=job(job_id="old-1")).raise_for_status()
        trial = begin(http, "old-1")
        gets = [path for path in every_get() if path not in OTHER_GETS]
        assert len(gets) > 10
        change(database_url, "ALTER TABLE trials RENAME COLUMN origin TO cause")
        known = set_revision(database_url, "9999")
        try:
            asked: list[tuple[str, str, object]] = [
                ("GET", "/jobs/batch_size?job_id=old-1", None),
                ("POST", "/jobs", job(job_id="old-2")),
                ("POST", "/report", {**trial, **RESULT}),
                ("PATCH", "/trials", trial),
                ("PATCH", "/trials/heartbeat", trial),
                ("POST", "/api/jobs/old-1/trials/1/discard", None),
                ("DELETE", "/jobs?job_id=old-1", None),
                *(("GET", path.format(job_id="old-1", trial_number=1, number=1, name="x"), None) for path in gets),
            ]
            answers = {f"{method} {path}": http.request(method, path, json=body) for method, path, body in asked}
            assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(answers, 503)
            for name, answer in answers.items():
                assert "another schema" in answer.text
                assert "/ui" in name or int(answer.headers["retry-after"]) > 0
                assert str(make_url(database_url).database) not in answer.text
            assert [http.get(path).status_code for path in ("/health/live", "/version")] == [200, 200]
            log = server.log.read_text()
            assert "Traceback" not in log
            assert log.count(" ERROR ") == 1
            assert "is at schema 9999, which this version does not know" in log
        finally:
            change(database_url, "ALTER TABLE trials RENAME COLUMN cause TO origin")
            set_revision(database_url, *known)
        # The database is restored from a backup: the server serves the database again without a restart.
        assert begin(http, "old-1")["trial_number"] == 2
        assert http.get("/health/ready").status_code == 200


def test_older_server_soon_stops_writing_after_a_schema_upgrade(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server checks the schema even if its own statements still succeed, and in any request."""
    monkeypatch.setenv("ZEUS_BSO_REAP_INTERVAL_S", "3600")
    with serving(database_url, tmp_path, "--migrate") as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.post("/jobs", json=job(job_id="old-3")).raise_for_status()
        trial = begin(http, "old-3")
        known = set_revision(database_url, "9999")
        try:
            deadline = time.monotonic() + 60
            while (answer := http.patch("/trials/heartbeat", json=trial)).status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert (answer.status_code, "another schema" in answer.text) == (503, True)
            assert "Traceback" not in server.log.read_text()
        finally:
            set_revision(database_url, *known)
        assert http.patch("/trials/heartbeat", json=trial).status_code == 200


def every_get() -> list[str]:
    """Return the path of each GET route, with parameters as placeholders for `str.format`."""
    app = create_app(Settings(database_url="sqlite:////nowhere/bso.sqlite3", _env_file=None))
    paths = [route.path for route in app.routes if isinstance(route, HTTPRoute) and "GET" in route.methods]
    return [re.sub(r"\{(\w+):\w+\}", r"{\1}", path) for path in paths]


@pytest.mark.parametrize("driver", ["postgresql", "postgresql+asyncpg", "mariadb", "mysql+asyncmy"])
def test_unreachable_database_is_named_as_written_in_a_single_error_line(driver: str) -> None:
    host = f"127.0.0.1:{free_port()}"
    for command in (["serve"], ["db", "check"], ["db", "upgrade"]):
        line = refusal(*command, "--database-url", f"{driver}://me:quiet@{host}/bso")
        assert f"no connection to the database {driver}://me:***@{host}/bso" in line
        assert "Check that it runs and can be reached" in line
        assert "quiet" not in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(f"postgresql{options}", said, marks=pytest.mark.postgresql)
        for options, said in (
            ("?sslmode=require", "rejected SSL upgrade"),
            ("?ssl=true", "rejected SSL upgrade"),
            ("?sslmode=prefer&application_name=bso&connect_timeout=20&timeout=20", None),
            ("?sslmode=verify-full&sslrootcert=/none.pem", "none.pem"),
            ("?channel_binding=require", "docs/server.md#database lists the options for TLS"),
        )
    ]
    + [
        pytest.param(f"mysql{options}", said, marks=pytest.mark.mysql)
        for options, said in (
            ("?ssl=true", "SSL"),
            ("?ssl-mode=REQUIRED", "SSL"),
            ("?connect_timeout=20", None),
            ("?ssl_ca=/none.pem", "No such file"),
            ("?sslmode=require", "docs/server.md#database lists the options for TLS"),
        )
    ],
)
def test_options_of_a_url_reach_the_driver_or_are_explained(options: str, said: str | None) -> None:
    kind, _, options = options.partition("?")
    with fresh_database(POSTGRES_URL if kind == "postgresql" else MYSQL_URL) as url:
        command = ("db", "upgrade", "--database-url", f"{url}?{options}")
        if said is None:
            assert bso_server(*command).returncode == 0
        else:
            assert said in refusal(*command)


PGBOUNCER = shutil.which("pgbouncer")


@pytest.mark.skipif(PGBOUNCER is None, reason="needs PgBouncer")
@pytest.mark.parametrize("database_url", [POSTGRESQL], indirect=True)
@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_server_starts_only_behind_a_pooler_of_sessions(database_url: str, tmp_path: Path, mode: str) -> None:
    assert bso_server("db", "upgrade", "--database-url", database_url).returncode == 0
    url, port, settings = make_url(database_url), free_port(), tmp_path / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n{url.database} = host={url.host} port={url.port} user={url.username}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\n"
    )
    user = ["-u", "nobody"] if os.getuid() == 0 else []
    with subprocess.Popen([str(PGBOUNCER), "-q", *user, str(settings)], stderr=subprocess.DEVNULL) as pooler:
        try:
            pooled = url.set(port=port).render_as_string(hide_password=False)
            until_it_answers(port)
            if mode == "session":
                with serving(pooled, tmp_path) as server:
                    assert httpx.get(f"{server.url}/health/ready").status_code == 200
            else:
                with (
                    pytest.raises(AssertionError, match=r"(?s)did not start: .*let it pool sessions \(pool_mode\)"),
                    serving(pooled, tmp_path),
                ):
                    pass
        finally:
            pooler.kill()


def until_it_answers(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("database_url", [POSTGRESQL, MYSQL], indirect=True)
def test_user_refused_by_the_database_gets_a_single_error_line(database_url: str) -> None:
    url = make_url(database_url).set(username="zeus_nobody", password="quiet")  # noqa: S106 - no real password
    line = refusal("db", "check", "--database-url", url.render_as_string(hide_password=False))
    assert "user and password" in line
    assert "zeus_nobody:***@" in line
    assert "quiet" not in line


@contextmanager
def user_of(database_url: str, *rights: str) -> Iterator[str]:
    """Create a user with these rights; yield the URL of the database with this user."""
    name = f"zeus_{secrets.token_hex(4)}"
    administer(database_url, f"CREATE USER {name}")
    try:
        for right in rights:
            administer(database_url, f"GRANT {right} TO {name}")
        yield make_url(database_url).set(username=name).render_as_string(hide_password=False)
    finally:
        if database_url.startswith("postgresql"):
            administer(database_url, f"DROP OWNED BY {name}")
        administer(database_url, f"DROP USER {name}")


@pytest.mark.parametrize("kind", [POSTGRESQL, MYSQL])
def test_upgrade_without_rights_says_what_the_database_refused(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        database_url = stack.enter_context(empty_database(kind, tmp_path))
        on_tables = f"SELECT, INSERT, UPDATE, DELETE ON {make_url(database_url).database}.*"
        user_url = stack.enter_context(user_of(database_url, *([on_tables] if kind == "mysql" else [])))
        for command in (["db", "upgrade"], ["serve", "--migrate", "--port", str(free_port())]):
            answer = bso_server(*command, "--database-url", user_url)
            assert answer.returncode == 1
            line = answer.stderr.splitlines()[-1]  # after the line of the log that the upgrade begins
            assert "denied" in line
            assert "needs the rights to create" in line


@pytest.mark.parametrize("database_url", [POSTGRESQL, MYSQL], indirect=True)
def test_user_without_rights_on_the_tables_is_told_so(database_url: str) -> None:
    assert bso_server("db", "upgrade", "--database-url", database_url).returncode == 0
    schema = f"{make_url(database_url).database}." if database_url.startswith("mysql") else ""
    with user_of(database_url, f"SELECT ON {schema}alembic_version") as user_url:
        for command in (["jobs", "list"], ["token", "list"], ["serve", "--port", str(free_port())]):
            answer = bso_server(*command, "--database-url", user_url)
            assert answer.returncode == 1
            assert "the user of its database lacks rights on it" in answer.stderr.splitlines()[-1]
            assert "Traceback" not in answer.stderr


@pytest.mark.postgresql
def test_database_that_cannot_store_every_text_is_refused(tmp_path: Path) -> None:
    name = f"zeus_test_{secrets.token_hex(6)}"
    administer(POSTGRES_URL, f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'")
    try:
        url = make_url(POSTGRES_URL).set(database=name).render_as_string(hide_password=False)
        said = "the database's encoding is LATIN1: create it with ENCODING 'UTF8'"
        with pytest.raises(AssertionError, match=f"(?s)did not start: .*{said}"), serving(url, tmp_path, "--migrate"):
            pass
    finally:
        administer(POSTGRES_URL, f"DROP DATABASE {name} WITH (FORCE)")


async def test_log_of_a_sqlite_file_shrinks_after_a_long_read(new_database: str) -> None:
    file = make_url(new_database).database or ""

    def fill(transaction: Transaction, megabytes: int) -> None:
        transaction.connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS ballast (content BLOB)")
        transaction.connection.exec_driver_sql("INSERT INTO ballast VALUES (randomblob(?))", (megabytes * 10**6,))

    async with open_store(new_database) as store:
        with closing(sqlite3.connect(file, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM sqlite_master").fetchall()
            await store.write(fill, 9)
            assert Path(f"{file}-wal").stat().st_size > 9 * 10**6
        for _ in range(2):
            await store.write(fill, 1)
        assert Path(f"{file}-wal").stat().st_size <= 4 * 2**20


def test_file_of_settings_in_another_encoding_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("ZEUS_BSO_LOG_LEVEL=INFO\n", encoding="utf-16")
    monkeypatch.chdir(tmp_path)
    assert "the file .env, which is no text in UTF-8" in refusal("jobs", "list")


def test_user_without_a_home_is_told_which_setting_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def user_data_path(_name: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(settings_module, "user_data_path", user_data_path)
    assert "or name a database by ZEUS_BSO_DATABASE_URL" in refusal("jobs", "list")


def test_invalid_database_file_gets_a_single_error_line(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader, " * 1000)
    assert f"{file}: file is not a database" in refusal("db", "check", "--database-url", f"sqlite:///{file}")


def test_separate_user_and_password_complete_the_url() -> None:
    opened = open_database("postgresql://host/db", user="zeus", password="hush")  # noqa: S106 - no real password
    assert Store(opened).description == "postgresql://zeus:***@host/db"
    assert Store(open_database("postgresql://me@host/db", user="zeus")).description == "postgresql://me@host/db"


def test_upgrade_quotes_the_driver_as_written(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'bso.sqlite3'}"
    done = bso_server("db", "upgrade", "--database-url", url)
    assert done.stdout == f"{url} is at this version's schema\n"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_server_on_all_addresses_answers_over_both_families(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path, "--host", "::") as server:
        urls = [f"http://{host}:{server.port}/api/jobs" for host in ("127.0.0.1", "[::1]")]
        assert [httpx.get(url).status_code for url in urls] == [200, 200]


def test_lease_lengths_are_configurable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(_env_file=None).leases == LeasePolicy()
    leases_s = {"HEARTBEAT_LEASE": 78, "SILENT_LEASE": 777, "SUSPENDED_LEASE": 7777}
    for name, seconds in leases_s.items():
        monkeypatch.setenv(f"ZEUS_BSO_{name}_S", str(seconds))
    with (
        serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        http.post("/jobs", json=job(job_id="kept-1")).raise_for_status()
        trials = [begin(http, "kept-1") for _ in range(3)]
        beat = http.patch("/trials/heartbeat", json=trials[1]).raise_for_status().json()
        http.patch("/trials", json={**trials[2], "outcome": "suspended"}).raise_for_status()
        _, *kept = export_over(http, "kept-1")
    assert (beat["interval_s"], beat["lease_s"]) == (13, 78)
    begun = [datetime.fromisoformat(trial["started_at"]) for trial in kept]
    ends = [datetime.fromisoformat(trial["lease_expires_at"]) for trial in kept]
    # The start of the lease differs from the start of the trial by milliseconds, or by seconds on a busy machine.
    for start, end, lease_s in zip(begun, ends, (777, 78, 7777), strict=True):
        assert lease_s <= (end - start).total_seconds() < lease_s + SERVER_START_S


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ZEUS_BSO_HEARTBEAT_LEASE_S": "0"}, "ZEUS_BSO_HEARTBEAT_LEASE_S"),
        ({"ZEUS_BSO_SILENT_LEASE_S": "0"}, "ZEUS_BSO_SILENT_LEASE_S"),
        ({"ZEUS_BSO_SUSPENDED_LEASE_S": "inf"}, "ZEUS_BSO_SUSPENDED_LEASE_S"),
        ({"ZEUS_BSO_HEARTBEAT_LEASE_S": "nan"}, "ZEUS_BSO_HEARTBEAT_LEASE_S"),
        ({"ZEUS_BSO_LOG_LEVEL": "LOUD"}, "ZEUS_BSO_LOG_LEVEL"),
        ({"ZEUS_BSO_SSO_PROXIES": "10.0.0.5,proxy.example"}, "ZEUS_BSO_SSO_PROXIES"),
        ({"ZEUS_BSO_SSO_PROXIES": "10.0.0.5/8"}, "ZEUS_BSO_SSO_PROXIES"),
        ({"ZEUS_BSO_SSO_HEADER": "Remote User"}, "ZEUS_BSO_SSO_HEADER"),
    ],
)
def test_contradictory_settings_are_refused(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommandError, match=f"{named}: "):
        settings_of(argparse.Namespace())
