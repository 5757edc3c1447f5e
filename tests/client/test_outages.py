"""Trainings end by their own rule if the server disappears at any point, and finally the server has every result."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from tests.support.answering import answering
from tests.support.databases import POSTGRES_URL, administer, empty_database
from tests.support.disks import fill, small_disk
from tests.support.outage_training import DEFAULT_SIZE, EPOCHS, TRAININGS, train
from tests.support.servers import ServerProcess
from zeus_plugins.cli import main
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.protocol import Origin, TrialState

# A hanging training becomes a failing test through this limit.
LIMIT_S = 120
# A hanging server costs a training twice as long, and some seconds at its end. Any other server gets more time, because
# the machine may be busy.
TIMEOUT_S = 1.0
PATIENCE_S = 30.0
SMALL_DISK = "sqlite on a small disk"


@dataclass
class Site:
    """A server and the disasters that may strike it."""

    server: ServerProcess
    outbox: Outbox
    impostor: ExitStack = field(default_factory=ExitStack)

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
        self.impostor.enter_context(answering(500, port=self.server.port))

    def is_mended(self) -> None:
        self.impostor.close()
        self.server.start()

    def loses_database(self) -> None:
        name = self._database
        administer(POSTGRES_URL, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        sessions = f"FROM pg_stat_activity WHERE datname = '{name}'"
        administer(POSTGRES_URL, f"SELECT pg_terminate_backend(pid) {sessions}")

    def finds_database(self) -> None:
        administer(POSTGRES_URL, f'ALTER DATABASE "{self._database}" ALLOW_CONNECTIONS true')

    def has_no_room(self) -> None:
        fill(self._file.parent)

    def has_room(self) -> None:
        (self._file.parent / "ballast").unlink()

    def loses_file(self) -> None:
        self._file.rename(self._file.with_name("moved"))

    def finds_file(self) -> None:
        self._file.with_name("moved").rename(self._file)

    @property
    def _file(self) -> Path:
        return Path(self._database)

    def has_everything(self) -> None:
        """Wait until the training itself has delivered all waiting results to the returned server."""
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
    """Disasters of the server and their times.

    Attributes:
        strikes: Disasters by the points of `tests.support.outage_training`.
        recovery: Repair after the training; None if ``zeus-plugins sync`` has nothing left to deliver.
        origin: Origin of the trial.
        state: Final state of the trial.
    """

    strikes: Mapping[str, Strike]
    recovery: Strike | None
    origin: Origin = Origin.EXPLORATION
    state: TrialState = TrialState.COMPLETED


SCENARIOS = {
    "away-before-the-start": Scenario({"start": Site.is_killed}, Site.is_started, origin=Origin.OFFLINE),
    "hangs-before-the-start": Scenario({"start": Site.hangs}, Site.goes_on, origin=Origin.OFFLINE),
    "500-before-the-start": Scenario({"start": Site.answers_500}, Site.is_mended, origin=Origin.OFFLINE),
    "away-and-back-before-the-end": Scenario(
        {"start": Site.is_killed, "epoch 2": Site.is_started, "epoch 3": Site.has_everything},
        recovery=None,
        origin=Origin.OFFLINE,
    ),
    "away-after-the-dispatch": Scenario({"dispatched": Site.is_killed}, Site.is_started),
    "away-in-the-middle-and-back": Scenario(
        {"epoch 2": Site.is_killed, "epoch 3": Site.is_started, "epoch 4": Site.has_everything},
        recovery=None,
    ),
    "away-in-the-middle": Scenario({"epoch 2": Site.is_killed}, Site.is_started),
    "away-and-never-at-the-target": Scenario({"epoch 2": Site.is_killed}, Site.is_started, state=TrialState.EXHAUSTED),
    "away-at-the-last-report": Scenario({f"epoch {EPOCHS}": Site.is_killed}, Site.is_started),
    "hangs": Scenario({"epoch 2": Site.hangs}, Site.goes_on),
    "500": Scenario({"epoch 2": Site.answers_500}, Site.is_mended),
    "database-gone": Scenario({"epoch 2": Site.loses_database}, Site.finds_database),
    "file-gone": Scenario({"epoch 2": Site.loses_file}, Site.finds_file),
    "disk-full": Scenario({"epoch 2": Site.has_no_room}, Site.has_room),
}


# These run with the frameworks, too, which begin, fail and continue in their own ways.
WITH_FRAMEWORKS = {"away-before-the-start", "away-and-never-at-the-target", "hangs", "away-in-the-middle-and-back"}
QUICK = {
    "plain-away-and-back-before-the-end",
    "plain-away-and-never-at-the-target",
    "plain-hangs",
    "plain-file-gone",
    "plain-disk-full",
    "plain-away-in-the-middle-and-back",
}


def cases() -> Iterator[Any]:
    for framework in TRAININGS:
        for name, scenario in SCENARIOS.items():
            if framework != "plain" and name not in WITH_FRAMEWORKS:
                continue
            kind, marks = "sqlite", []
            if Site.loses_database in scenario.strikes.values():
                kind, marks = "postgresql", [pytest.mark.postgresql]
            if Site.has_no_room in scenario.strikes.values():
                kind = SMALL_DISK
            if f"{framework}-{name}" not in QUICK:
                marks.append(pytest.mark.slow)
            yield pytest.param(framework, name, kind, marks=marks, id=f"{framework}-{name}")


@pytest.fixture
def site(kind: str, state_directory: Path, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        folder = stack.enter_context(small_disk(tmp_path / "disk", size="1m")) if kind == SMALL_DISK else tmp_path
        database_url = stack.enter_context(empty_database(kind.partition(" ")[0], folder))
        server = ServerProcess(database_url, tmp_path / "server.log", database_timeout_s=3.0)
        server.start("--migrate")
        yield Site(server, Outbox(state_directory / "outbox"))
        server.kill()


@pytest.mark.parametrize(("framework", "name", "kind"), list(cases()))
def test_training_ends_by_the_local_rule_and_every_result_arrives_once(
    site: Site,
    framework: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = SCENARIOS[name]
    monkeypatch.chdir(tmp_path)
    hangs = {Site.hangs, Site.loses_database} & set(scenario.strikes.values())
    monkeypatch.setenv("ZEUS_BSO_TIMEOUT_S", str(TIMEOUT_S if hangs else PATIENCE_S))

    def meet(point: str) -> None:
        if point in scenario.strikes:
            scenario.strikes[point](site)

    seen = train(framework, site.server.url, name, meet)
    if scenario.state is TrialState.COMPLETED:
        assert seen == {"size": DEFAULT_SIZE, "epochs": EPOCHS}
    else:
        assert seen["error"] == "ZeusBSOTrainFailError"
        assert f"after {EPOCHS} epochs, all that max_epochs allows" in seen["message"]
        assert "judged without the server" in seen["message"]

    assert len(site.outbox.waiting()) == (0 if scenario.recovery is None else 1)
    if scenario.recovery is not None:
        scenario.recovery(site)
    monkeypatch.setenv("ZEUS_BSO_TIMEOUT_S", str(PATIENCE_S))
    status = main(["sync"])
    assert (status, site.outbox.waiting()) == (0, []), capsys.readouterr()
    with BsoClient(site.server.url) as client:
        (trial,) = client.show_job(name).trials
    assert (trial.state, trial.origin, trial.batch_size) == (scenario.state, scenario.origin, DEFAULT_SIZE)
    assert (trial.epochs, trial.metric) == (EPOCHS, 1.0)
    assert (trial.time_s, trial.energy_j) == (EPOCHS, 10 * EPOCHS)
