"""``zeus-plugins sync``."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.outboxes import TRIAL, dispatched, evaluation, facts, left_by, sender
from tests.support.servers import ServerProcess, bso_server, free_port
from zeus_plugins.cli import main
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.protocol import TrialState


def sync(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("zeus_plugins", "sync", *arguments, modules=("zeus_plugins.cli", "httpcore"))


def test_sync_delivers(outbox: Outbox, client: BsoClient) -> None:
    trial = dispatched(client)
    left_by(outbox, sender(trial, url=client.server_url), evaluation(1), evaluation(2, metric=0.95))
    what = f"job digits-1 for {client.server_url}"

    dry = sync("--dry-run")
    assert (dry.returncode, dry.stdout, dry.stderr) == (0, f"{what}: 2 waiting\n", "")
    assert facts(client.show_job("digits-1")) == [(TrialState.RUNNING, None, None)]

    done = sync()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{what}: 2 delivered\n", "")
    assert facts(client.show_job("digits-1")) == [(TrialState.COMPLETED, 2, 20)]

    again = sync()
    assert (again.returncode, again.stdout) == (0, f"nothing waits in {outbox.directory}\n")


def test_sync_to_a_server_that_has_moved(outbox: Outbox, client: BsoClient) -> None:
    trial = dispatched(client)
    left_by(outbox, sender(trial, url="http://127.0.0.1:9"), evaluation(1, metric=0.95))
    away = sync()
    assert away.returncode == 1
    assert "1 waiting (no answer from" in away.stdout
    assert away.stderr == (
        "zeus-plugins: not everything could be delivered; run this again when what stands in its way is mended\n"
    )
    assert sync("--server-url", client.server_url).returncode == 0
    assert facts(client.show_job("digits-1")) == [(TrialState.COMPLETED, 1, 10)]


def test_sync_tells_of_what_was_set_aside(
    outbox: Outbox, client: BsoClient, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = dispatched(client)
    left_by(outbox, sender(trial, url=client.server_url), evaluation(1))
    client.delete_job("digits-1")
    assert main(["sync"]) == 1
    (aside,) = outbox.refused()
    told, complaint = capsys.readouterr()
    assert "refused (" in told
    assert f"{aside}: set aside" in told
    assert complaint == "zeus-plugins: not everything could be delivered: a server refused it for good\n"
    assert main(["sync"]) == 0


def test_sync_with_a_token_that_is_not_taken(outbox: Outbox, tmp_path: Path) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path / uuid.uuid4().hex}.sqlite3", tmp_path / "log", free_port())
    path = left_by(outbox, sender(TRIAL, url=server.url), evaluation(1))
    server.start()
    try:
        whose = ["--name", "me", "--scope", "report", "--database-url", server.database_url]
        made = bso_server("token", "create", *whose)
        assert made.returncode == 0, made.stderr
        refused = sync("--token", "bso_nobody_knows", "--server-url", server.url)
    finally:
        server.stop()
    assert refused.returncode == 1
    assert "does not accept the token" in refused.stdout
    assert outbox.waiting() == [path]  # it is not the result's fault
