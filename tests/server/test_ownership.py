"""Rotated, revoked and replaced tokens, and the jobs, trials and waiting results that belong to them."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import pytest

from bso_server.core.access import Scope
from bso_server.errors import ForbiddenError
from bso_server.service.tokens import Tokens
from tests.support.job_bench import seconds_and_joules
from tests.support.jobs import THREE_SIZES, job
from tests.support.reporting import warnings_in
from tests.support.servers import ServerProcess, bso_server
from tests.support.service import JobService, trial_id
from zeus_plugins import JobSpec
from zeus_plugins.cli import main
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.outbox import default_outbox
from zeus_plugins.client.port import NO_RETRIES
from zeus_plugins.errors import ZeusBSOTokenError
from zeus_plugins.protocol import CreatedJob, Heartbeat, TrialState, TrialView
from zeus_plugins.training.session import TrialSession


@dataclass
class Site:
    """A server, a job on it, and an administrator's commands."""

    server: ServerProcess
    job: JobSpec
    until_the_end: ExitStack

    def run(self, *command: str) -> str:
        done = bso_server(*command, "--database-url", self.server.database_url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def token(self, name: str, scope: str = "report", *options: str) -> str:
        return self.run("token", "create", "--name", name, "--scope", scope, *options).strip()

    def rotate(self, token: str, *options: str) -> str:
        return self.run("token", "rotate", id_of(token), *options).strip()

    def forget(self) -> None:
        """Restart the server, so that it reads its tokens again without waiting ten seconds."""
        self.server.kill()
        self.server.start()

    def session(self, token: str) -> TrialSession:
        """Return a training that uses a second and ten joules per epoch."""
        client = self.until_the_end.enter_context(BsoClient(self.server.url, token=token, retries=NO_RETRIES))
        return TrialSession(self.job, client, seconds_and_joules(1.0, 10.0))

    def begun(self, token: str) -> TrialSession:
        session = self.session(token)
        session.ask()
        session.begin_measurement()
        return session

    def finish(self, token: str, state: dict[str, object]) -> None:
        """Resume a training from a checkpoint and reach the target."""
        resumed = self.session(token)
        assert resumed.resume(state)
        resumed.begin_measurement()
        assert resumed.report_evaluation(0.95).converged
        resumed.end()

    def trials(self, token: str) -> list[TrialView]:
        with BsoClient(self.server.url, token=token) as client:
            return list(client.show_job(self.job.job_id).trials)

    def sync(self, token: str, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setenv("ZEUS_SERVER_URL", self.server.url)
        monkeypatch.setenv("ZEUS_BSO_TOKEN", token)
        return main(["sync"])


@pytest.fixture
def site(server: ServerProcess) -> Iterator[Site]:
    job_id = f"digits-{uuid.uuid4().hex[:8]}"
    job = JobSpec(
        job_id=job_id,
        job_id_prefix="digits",
        batch_sizes=(32, 64),
        default_batch_size=64,
        target_metric=0.9,
        max_epochs=4,
    )
    with ExitStack() as until_the_end:
        yield Site(server, job, until_the_end)


def id_of(token: str) -> str:
    return token.split("_")[1]


def through_a_checkpoint(session: TrialSession) -> dict[str, object]:
    state: dict[str, object] = json.loads(json.dumps(session.state_dict()))
    session.end(KeyboardInterrupt())
    return state


def facts(trial: TrialView) -> tuple[TrialState, float | None, str | None]:
    return trial.state, trial.epochs, trial.owner


class TestAnotherToken:
    def test_training_with_a_foreign_token_does_not_begin(self, site: Site) -> None:
        owner, other = site.token("nightly"), site.token("other")
        through_a_checkpoint(site.begun(owner))
        with pytest.raises(ZeusBSOTokenError, match=rf"belongs to token {id_of(owner)} \(nightly\).*docs/tokens.md"):
            site.session(other).ask()
        assert len(site.trials(owner)) == 1

    def test_training_resumed_with_a_foreign_token_continues_and_an_administrator_delivers_the_results(
        self, site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, other = site.token("nightly"), site.token("other")
        first = site.begun(owner)
        first.report_evaluation(0.5)
        state = through_a_checkpoint(first)

        with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
            site.finish(other, state)
        refused, waiting = warnings_in(caplog)
        assert f"belongs to token {id_of(owner)} (nightly), and token {id_of(other)} can neither" in refused
        assert "use that token, or have an administrator do it" in refused
        assert "The training continues" in refused
        assert "1 results of job" in waiting
        assert [facts(trial) for trial in site.trials(owner)] == [(TrialState.SUSPENDED, 1, id_of(owner))]

        assert site.sync(other, monkeypatch) == 1  # no trial has changed, and no result is lost
        assert len(default_outbox().waiting()) == 1
        assert site.sync(site.token("operator", "admin"), monkeypatch) == 0
        assert [facts(trial) for trial in site.trials(owner)] == [(TrialState.COMPLETED, 2, id_of(owner))]


class TestRevocation:
    def test_administrators_sync_completes_a_trial_of_a_revoked_token(
        self, site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, other = site.token("nightly", "report", "--share"), site.token("other")
        admin = site.token("operator", "admin")
        session = site.begun(owner)
        session.report_evaluation(0.5)
        said = site.run("token", "revoke", id_of(owner))
        assert "Only administrators report on its trials now" in said
        assert "docs/tokens.md" in said
        site.forget()
        assert session.report_evaluation(0.95).converged
        session.end()
        assert any("does not accept the token (401" in warning for warning in warnings_in(caplog))
        assert [facts(trial) for trial in site.trials(admin)] == [(TrialState.RUNNING, 1, id_of(owner))]

        caplog.clear()
        site.begun(other).end(KeyboardInterrupt())
        (stays,) = warnings_in(caplog)
        assert f"results that had waited in {default_outbox().directory}" in stays
        assert f"job {site.job.job_id} for {site.server.url}: " in stays
        assert f"belongs to token {id_of(owner)} (nightly)" in stays

        assert site.sync(other, monkeypatch) == 1
        assert site.sync(admin, monkeypatch) == 0
        assert facts(site.trials(admin)[0]) == (TrialState.COMPLETED, 2, id_of(owner))
        assert default_outbox().waiting() == default_outbox().refused() == []


class TestRotation:
    def test_rotation_lets_the_old_secret_finish_and_the_new_secret_start(self, site: Site) -> None:
        old = site.token("nightly")
        session = site.begun(old)
        session.report_evaluation(0.5)
        new = site.rotate(old)
        assert id_of(new) == id_of(old)
        assert not session.report_evaluation(0.6).stop_train
        state = through_a_checkpoint(session)
        assert [facts(trial) for trial in site.trials(old)] == [(TrialState.SUSPENDED, 2, id_of(old))]

        site.finish(new, state)
        assert [facts(trial) for trial in site.trials(new)] == [(TrialState.COMPLETED, 3, id_of(old))]


async def test_trial_without_an_owner_belongs_to_the_owner_of_the_job(bso: JobService) -> None:
    """Imports create such trials."""
    tokens, commands = Tokens(bso.store), bso.service.commands
    other = (await tokens.create("other", [Scope.REPORT]))[1].caller()
    for shares_jobs in (False, True):
        owner = (await tokens.create("owner", [Scope.REPORT], shares_jobs=shares_jobs))[1].caller()
        registration = CreatedJob.model_validate(job(**THREE_SIZES))
        await bso.service.register(registration, owner)
        trial = trial_id(await bso.service.transact(commands.begin_trial, registration.job_id))
        beat = Heartbeat(**trial.model_dump())
        with nullcontext() if shares_jobs else pytest.raises(ForbiddenError, match="belongs to token"):
            await bso.service.transact(commands.heartbeat, beat, other)
        assert (await bso.service.transact(commands.heartbeat, beat, owner)).state is TrialState.RUNNING


def test_list_of_tokens_shows_rotations_and_jobs(site: Site) -> None:
    token = site.token("nightly", "report", "--share")
    site.begun(token).end(KeyboardInterrupt())
    site.rotate(token, "--grace", "7d")
    (shown,) = json.loads(site.run("token", "list", "--json"))["tokens"]
    assert (shown["jobs"], shown["shares_jobs"], shown["revoked_at"]) == (1, True, None)
    assert shown["created_at"] < shown["rotated_at"] < shown["previous_secret_until"]
    header, line = site.run("token", "list").splitlines()
    assert "OLD SECRET UNTIL" in header
    assert "1 (shares)" in line
    assert line.split()[-3] == shown["previous_secret_until"][:10]
