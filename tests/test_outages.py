"""Trainings whose server goes away at any point end by their own rule, and in the end the server knows all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from tests.support.databases import POSTGRES_URL, administer, fresh_database
from tests.support.outage_training import DEFAULT_SIZE, EPOCHS, FRAMEWORKS
from tests.support.servers import Server
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.protocol import JobView, Origin, TrialState

REPOSITORY = Path(__file__).parent.parent
# A training that hangs shows as a test that fails by this limit.
LIMIT_S = 120
# A server that hangs costs a training twice as long, and some seconds at its end.
TIMEOUT_S = 0.5


class Failing(BaseHTTPRequestHandler):
    """Answers everything with 500."""

    def do_any(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PATCH = do_any  # noqa: N815 - names fixed by the base class

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base class
        """Keep the test's output clean."""


@dataclass
class Site:
    """A server on PostgreSQL, and what may happen to it."""

    server: Server
    outbox: Outbox
    impostor: ThreadingHTTPServer | None = None

    def is_killed(self) -> None:
        self.server.kill()

    def is_started(self) -> None:
        self.server.start()

    def hangs(self) -> None:
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGSTOP)

    def goes_on(self) -> None:
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGCONT)

    def answers_500(self) -> None:
        self.server.kill()
        self.impostor = ThreadingHTTPServer(("127.0.0.1", self.server.port), Failing)
        threading.Thread(target=self.impostor.serve_forever).start()

    def is_mended(self) -> None:
        assert self.impostor is not None
        self.impostor.shutdown()
        self.impostor.server_close()
        self.server.start()

    def loses_database(self) -> None:
        name = self._database
        administer(POSTGRES_URL, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        sessions = f"FROM pg_stat_activity WHERE datname = '{name}'"
        administer(POSTGRES_URL, f"SELECT pg_terminate_backend(pid) {sessions}")

    def finds_database(self) -> None:
        administer(POSTGRES_URL, f'ALTER DATABASE "{self._database}" ALLOW_CONNECTIONS true')

    def has_everything(self) -> None:
        """Not a disaster: the training itself delivers what waits, now that the server is back."""
        deadline = time.monotonic() + LIMIT_S
        while self.outbox.waiting():
            assert time.monotonic() < deadline, "the training does not deliver what waits"
            time.sleep(0.05)

    @property
    def _database(self) -> str:
        return make_url(self.server.database_url).database or ""


Strike = Callable[[Site], None]


@dataclass(frozen=True)
class Scenario:
    """What happens to the server, and when.

    Attributes:
        strikes: By the points of `tests.support.outage_training`.
        recovery: What mends it all after the training.
        is_delivered_by_training: Whether nothing is left to ``zeus-plugins sync``.
        origin: Of the trial.
        state: In which the trial ends.
    """

    strikes: Mapping[str, Strike]
    recovery: Strike | None
    is_delivered_by_training: bool = False
    origin: Origin = Origin.EXPLORATION
    state: TrialState = TrialState.COMPLETED


pytestmark = pytest.mark.slow

SCENARIOS = {
    "away-before-the-start": Scenario({"start": Site.is_killed}, Site.is_started, origin=Origin.OFFLINE),
    "hangs-before-the-start": Scenario({"start": Site.hangs}, Site.goes_on, origin=Origin.OFFLINE),
    "500-before-the-start": Scenario({"start": Site.answers_500}, Site.is_mended, origin=Origin.OFFLINE),
    "away-and-back-before-the-end": Scenario(
        {"start": Site.is_killed, "epoch 2": Site.is_started, "epoch 3": Site.has_everything},
        recovery=None,
        is_delivered_by_training=True,
        origin=Origin.OFFLINE,
    ),
    "away-after-the-dispatch": Scenario({"dispatched": Site.is_killed}, Site.is_started),
    "away-in-the-middle-and-back": Scenario(
        {"epoch 2": Site.is_killed, "epoch 3": Site.is_started, "epoch 4": Site.has_everything},
        recovery=None,
        is_delivered_by_training=True,
    ),
    "away-in-the-middle": Scenario({"epoch 2": Site.is_killed}, Site.is_started),
    "away-and-never-at-the-target": Scenario({"epoch 2": Site.is_killed}, Site.is_started, state=TrialState.EXHAUSTED),
    "away-at-the-last-report": Scenario({f"epoch {EPOCHS}": Site.is_killed}, Site.is_started),
    "hangs": Scenario({"epoch 2": Site.hangs}, Site.goes_on),
    "500": Scenario({"epoch 2": Site.answers_500}, Site.is_mended),
    "database-gone": Scenario({"epoch 2": Site.loses_database}, Site.finds_database),
}


@dataclass
class Ran:
    """How the trainings of one framework went, by scenario.

    Attributes:
        seen: What the training saw.
        left: Files in the outbox after the training.
        synced: Exit status and output of ``zeus-plugins sync``, once the server was back.
        left_then: Files in the outbox after that.
        view: What the server knows in the end.
    """

    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    synced: dict[str, tuple[int, str]] = field(default_factory=dict)
    left_then: dict[str, int] = field(default_factory=dict)
    view: dict[str, JobView] = field(default_factory=dict)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with fresh_database(POSTGRES_URL) as database_url:
        server = Server(database_url, folder / "server.log")
        server.start("--migrate")
        yield Site(server, Outbox(folder / "state" / "outbox"))
        server.kill()


@pytest.fixture(scope="module", params=FRAMEWORKS)
def ran(request: pytest.FixtureRequest, site: Site, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    framework, folder = request.param, tmp_path_factory.mktemp(request.param)
    environ = {
        **os.environ,
        "ZEUS_STATE_DIR": str(site.outbox.directory.parent),
        "ZEUS_BSO_TIMEOUT_S": str(TIMEOUT_S),
        "PYTHONPATH": str(REPOSITORY),
    }
    names = {name: f"{framework}-{name}" for name in SCENARIOS}
    ran = Ran()
    with (folder / "output").open("w+") as output:
        command = [sys.executable, "-m", "tests.support.outage_training", framework, site.server.url, str(folder)]
        training = subprocess.Popen(
            [*command, *names.values()], cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            for name, scenario in SCENARIOS.items():
                ran.seen[name] = accompany(training, folder, names[name], scenario, site)
                ran.left[name] = len(site.outbox.waiting())
                if scenario.recovery is not None:
                    scenario.recovery(site)
                sync = [sys.executable, "-m", "zeus_plugins", "sync"]
                done = subprocess.run(
                    sync, env={**environ, "ZEUS_BSO_TIMEOUT_S": "30"}, capture_output=True, text=True, check=False
                )
                ran.synced[name] = done.returncode, done.stdout + done.stderr
                ran.left_then[name] = len(site.outbox.waiting())
                with BsoClient(site.server.url) as client:
                    ran.view[name] = client.show_job(names[name])
            assert training.wait(LIMIT_S) == 0, (folder / "output").read_text()
        finally:
            training.kill()
            training.wait()
    return ran


def accompany(
    training: subprocess.Popen[bytes], folder: Path, name: str, scenario: Scenario, site: Site
) -> dict[str, Any]:
    """Strike at the points of a training until it has ended; what it saw."""
    deadline = time.monotonic() + LIMIT_S
    while not (folder / f"{name}.json").exists():
        output = folder / "output"
        assert training.poll() is None, output.read_text()
        assert time.monotonic() < deadline, f"the training hangs: {output.read_text()}"
        for here in folder.glob(f"{name}.*"):
            point = here.suffix.removeprefix(".")
            if point in scenario.strikes:
                scenario.strikes[point](site)
            if point not in ("partial", "json"):
                here.unlink()
        time.sleep(0.01)
    seen: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return seen


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_training_ends_by_its_own_rule(ran: Ran, name: str) -> None:
    seen, scenario = ran.seen[name], SCENARIOS[name]
    if scenario.state is TrialState.COMPLETED:
        assert seen == {"size": DEFAULT_SIZE, "epochs": EPOCHS}
    else:
        assert seen["error"] == "ZeusBSOTrainFailError"
        assert f"{EPOCHS} epochs are over" in seen["message"]
        assert "judged without the server" in seen["message"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_server_has_everything_once_in_the_end(ran: Ran, name: str) -> None:
    scenario = SCENARIOS[name]
    assert ran.left[name] == (0 if scenario.is_delivered_by_training else 1)
    status, output = ran.synced[name]
    assert (status, ran.left_then[name]) == (0, 0), output
    (trial,) = ran.view[name].trials
    assert (trial.state, trial.origin, trial.batch_size) == (scenario.state, scenario.origin, DEFAULT_SIZE)
    assert (trial.epochs, trial.metric) == (EPOCHS, 1.0)
    assert (trial.time_s, trial.energy_j) == (EPOCHS, 10 * EPOCHS)
