"""Trials with a target that two consecutive evaluations must reach, on an embedded server that may be down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded import JOB, CutServer, monitor, resumed, the_trial
from tests.support.fake_trainer import FakeTrainer, active
from tests.support.reporting import until
from zeus_plugins.protocol import JobSpec, ReportResponse, StopRule, TrainingResult, TrialState
from zeus_plugins.training.arguments import TrialOptions
from zeus_plugins.training.defaults import JobWish, TrainingFacts, planned
from zeus_plugins.training.run import TrialRun
from zeus_plugins.training.session import TrialSession

TWICE = JOB.model_copy(update={"target_metric": 0.8, "confirm": 2})
HIT, MISS = 0.9, 0.1


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CutServer]:
    for name in ("ZEUS_SERVER_URL", "ZEUS_BSO_TOKEN", "ZEUS_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with CutServer(f"embedded://{tmp_path / 'bso.sqlite3'}", tmp_path / "outbox") as server:
        yield server


def begun(server: CutServer, job: JobSpec = TWICE) -> TrialSession:
    session = TrialSession(job, server, monitor(), outbox=server.outbox)
    session.ask()
    session.begin_measurement()
    return session


def stops(session: TrialSession, *metrics: float) -> list[bool]:
    return [session.report_evaluation(metric).stop_train for metric in metrics]


def test_cost_at_the_target_is_measured_at_the_confirming_evaluation(server: CutServer) -> None:
    session = begun(server)
    assert stops(session, MISS, HIT, HIT) == [False, False, True]
    session.end()
    trial = the_trial(server)
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.COMPLETED, 3, 30.0)


def test_resumed_trial_does_not_count_an_evaluation_twice(server: CutServer) -> None:
    first = begun(server)
    assert stops(first, MISS) == [False]
    state = first.state_dict()
    assert stops(first, HIT) == [False]
    first.end(KeyboardInterrupt())
    second = resumed(server, state, TWICE)
    # First epoch 2 again, and then a new evaluation.
    assert stops(second, HIT, HIT) == [False, True]
    second.end()
    assert (the_trial(server).state, the_trial(server).epochs) == (TrialState.COMPLETED, 3)


def test_offline_training_counts_like_the_server(server: CutServer) -> None:
    session = begun(server)
    assert stops(session, HIT) == [False]
    server.line.is_cut = True
    assert stops(session, MISS, HIT, HIT) == [False, False, True]
    server.line.is_cut = False
    session.end()
    trial = the_trial(server)
    assert (trial.state, trial.epochs) == (TrialState.COMPLETED, 4)


def test_server_continues_the_count_of_the_training(server: CutServer) -> None:
    session = begun(server)
    server.line.is_cut = True
    assert stops(session, HIT) == [False]
    server.line.is_cut = False
    until(lambda: not server.outbox.waiting())
    assert session.trial.stop_rule == StopRule(
        max_epochs=JOB.max_epochs, max_cost_j=None, confirmed=1, confirmed_epoch=1.0
    )
    assert stops(session, HIT) == [True]
    session.end()


def test_late_answer_does_not_restore_an_earlier_count(server: CutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    session = begun(server)
    server.line.is_cut = True
    assert stops(session, HIT, MISS) == [False, False]
    send = CutServer.send_report

    def send_one(self: CutServer, result: TrainingResult) -> ReportResponse:
        answer = send(self, result)
        self.line.is_cut = True
        return answer

    monkeypatch.setattr(CutServer, "send_report", send_one)
    server.line.is_cut = False
    until(lambda: server.line.is_cut)
    assert stops(session, HIT, HIT) == [False, True]
    session.end(KeyboardInterrupt())


def test_last_epoch_is_not_a_separate_evaluation(server: CutServer) -> None:
    """A training that validates every second epoch reports its end with its last validation metric."""
    options = TrialOptions(energy_monitor=monitor(), on_failure="stop")
    run = TrialRun(JobWish(job=TWICE), options, connect=lambda *_: server)
    run.begin(FakeTrainer())
    active(run).start()
    active(run).report_evaluation(lambda: HIT, 4.0)
    active(run).report_last_epoch(5.0)
    run.finish()
    assert (the_trial(server).state, the_trial(server).epochs) == (TrialState.EXHAUSTED, 5)


def test_confirm_is_an_argument_of_a_guessed_job() -> None:
    facts = TrainingFacts(script="train", model="Net", samples=1000, step_size=32)
    plan = planned(JobWish(monitor="acc", target=0.9, confirm=2), facts)
    assert plan.job.confirm == 2
    assert "confirm" not in plan.guessed
    default = planned(JobWish(monitor="acc", target=0.9), facts)
    assert default.job.confirm == 1
    assert "confirm" in default.guessed
