"""Operations page: its backup and restore commands work, and its log lines match the code."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.engine import make_url

from tests.support.databases import POSTGRES_URL, empty_database, fresh_database
from tests.support.jobs import job
from tests.support.masters import ROOT
from tests.support.servers import ServerProcess, bso_server, serving
from tests.support.wire import begin, reached, report

PAGE = (ROOT / "docs" / "operations.md").read_text()


def run(beginning: str, names: dict[str, str]) -> None:
    """Run the command on the page that starts with `beginning`, with other names of files, programs and databases."""
    (line,) = re.findall(rf"^({re.escape(beginning)}.*?)$", PAGE, re.MULTILINE)
    for name, other in names.items():
        line = line.replace(name, other)
    assert not re.search("/var/lib|/backup/|/opt|example", line)
    subprocess.run(shlex.split(line), check=True)


def begun(server: ServerProcess) -> dict[str, Any]:
    """Begin and report a trial of a job that also has a completed trial; return the running trial."""
    with httpx.Client(base_url=server.url) as http:
        http.post("/jobs", json=job(job_id="kept-1")).raise_for_status()
        reached(http, begin(http, "kept-1"), cost_j=500)
        trial = begin(http, "kept-1")
        report(http, trial, time=1, energy=100, metric=0.25, current_epoch=1).raise_for_status()
    return trial


def states(server: ServerProcess) -> list[str]:
    answer = httpx.get(f"{server.url}/api/jobs/kept-1").raise_for_status()
    return [trial["state"] for trial in answer.json()["trials"]]


def check_restored(server: ServerProcess, trial: dict[str, Any]) -> None:
    """Assert that the job is in its state at the backup, and that its running trial can be completed."""
    assert states(server) == ["completed", "running"]
    with httpx.Client(base_url=server.url) as http:
        reached(http, trial, cost_j=600)
    assert states(server) == ["completed", "completed"]
    verified = bso_server("db", "verify", "--database-url", server.database_url)
    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.mark.slow
def test_sqlite_file_is_backed_up_in_use_and_restored(server: ServerProcess, tmp_path: Path) -> None:
    trial = begun(server)
    names = {
        "bso-server": f"{sys.executable} -m bso_server",
        "/var/lib/zeus-bso/bso.sqlite3": make_url(server.database_url).database or "",
        "/backup/bso.sqlite3": str(tmp_path / "backup.sqlite3"),
    }
    run("bso-server db backup", names)
    httpx.patch(f"{server.url}/trials", json=trial).raise_for_status()  # unknown to the backup
    assert states(server) == ["completed", "failed"]
    server.stop()
    run("rm -f /var/lib/zeus-bso/bso.sqlite3-wal", names)
    run("cp /backup/bso.sqlite3", names)
    server.start()
    check_restored(server, trial)


@pytest.mark.slow
@pytest.mark.postgresql
@pytest.mark.skipif(shutil.which("pg_dump") is None, reason="needs pg_dump and pg_restore")
def test_postgresql_database_is_dumped_in_use_and_restored(tmp_path: Path) -> None:
    with empty_database("postgresql", tmp_path) as first, fresh_database(POSTGRES_URL) as second:
        # The longer name is replaced first.
        databases = {"postgresql://bso@db.example/bso_restored": second, "postgresql://bso@db.example/bso": first}
        names = {
            name: make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
            for name, url in databases.items()
        } | {"/backup/bso.dump": str(tmp_path / "bso.dump")}
        with serving(first, tmp_path, "--migrate") as server:
            trial = begun(server)
            run("pg_dump", names)
            httpx.patch(f"{server.url}/trials", json=trial).raise_for_status()
            run("pg_restore", names)
        checked = bso_server("db", "check", "--database-url", second)
        assert checked.returncode == 0, checked.stderr
        with serving(second, tmp_path) as restored:
            check_restored(restored, trial)


def test_documented_log_lines_match_the_code() -> None:
    table = PAGE.partition("## Log lines")[2].partition("## ")[0]
    lines = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(lines) > 10
    templates = [text for file in (ROOT / "bso_server").rglob("*.py") for text in texts_of(file)]
    assert [line for line in lines if not any(line in template for template in templates)] == []


def texts_of(file: Path) -> list[str]:
    """Return the texts in a file, with … for interpolated values."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[.0-9]*[a-z]", "…", node.value))
    return found
