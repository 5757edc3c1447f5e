"""Start-up of a training: its computation from the times of steps, and its way to the server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.contract_double import KEEP_TRAINING, ContractDouble
from tests.support.sessions import JOB, monitor_of, running_session, session_of, through_a_checkpoint
from zeus_plugins.client.local import LocalServer
from zeus_plugins.energy import EstimateMonitor
from zeus_plugins.protocol import PowerLimitChoice
from zeus_plugins.training.session import TrialSession
from zeus_plugins.training.startup import FirstSteps
from zeus_plugins.training.trial import TrialInfo


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)


class Clock:
    """A clock that a test moves on."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def startup_of(*steps_s: float, clock: Clock | None = None) -> float | None:
    """Return the start-up of a training with steps of these lengths."""
    clock = clock or Clock()
    timed, steps = FirstSteps(clock), optimizer()
    for step_s in steps_s:
        clock.now_s += step_s
        steps.step()
    return timed.startup_s()


@pytest.mark.parametrize(
    ("steps_s", "startup_s"),
    [
        # Ten first steps, then five: 30 + 5 + 8 · 1.5 less 10 · 1.5, and one slow step among the later ones.
        ([30.0, 5.0, *[1.5] * 8, 1.5, 1.5, 90.0, 1.5, 1.5], 32.0),
        # Half of few steps are first steps.
        ([4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 3.0),
        ([4.0, 1.0, 1.0, 1.0, 1.0], None),
        ([], None),
        # The first steps of a training need not be slower.
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 0.0),
        # Only twenty later steps count.
        ([4.0, *[1.0] * 29, *[50.0] * 40], 3.0),
    ],
)
def test_start_up_is_time_of_first_steps_beyond_median_of_later_steps(
    steps_s: list[float], startup_s: float | None
) -> None:
    assert startup_of(*steps_s) == startup_s


def test_only_steps_of_first_optimizer_count() -> None:
    clock = Clock()
    timed, generator, critic = FirstSteps(clock), optimizer(), optimizer()
    for number in range(6):
        clock.now_s += 1.0 + 8.0 * (number == 0)
        generator.step()
        clock.now_s += 2.0
        critic.step()
    # The first interval, of 9 s, has no step of the critic; the others take 3 s.
    assert timed.startup_s() == 6.0


def test_hook_does_nothing_after_thirty_steps_and_is_removed_at_the_end() -> None:
    session, other, steps = running_session(ContractDouble(), (1.0, 1.0)), FirstSteps(), optimizer()
    timed = session._first_steps
    assert timed is not None
    for _ in range(31):
        steps.step()
    assert timed._count == 30
    session.end()
    hooks = len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
    other.close()
    assert len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks) == hooks - 1


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the steps of trainings take 1 s but the first 30 s; return a function that trains an epoch of ten steps."""
    clock, steps = Clock(), optimizer()
    monkeypatch.setattr("zeus_plugins.training.session.FirstSteps", lambda: FirstSteps(clock))

    def train() -> None:
        for _ in range(10):
            clock.now_s += 30.0 if clock.now_s == Clock.now_s else 1.0
            steps.step()

    return train


def test_every_report_has_start_up_of_first_epoch(timed: Callable[[], None]) -> None:
    server = ContractDouble(KEEP_TRAINING, KEEP_TRAINING)
    session = running_session(server, (39.0, 10.0), (10.0, 10.0), (0.0, 0.0))
    for _ in range(2):
        timed()
        session.report_evaluation(0.5)
    assert [sent["startup_s"] for sent in server.sent("POST", "/report")] == [29.0, 29.0]
    assert TrialInfo.restored(through_a_checkpoint(session.state_dict())).startup_s == 29.0
    session.end()


def test_resumed_training_times_no_start_up(timed: Callable[[], None]) -> None:
    before = running_session(ContractDouble(), (5.0, 10.0))
    server = ContractDouble(KEEP_TRAINING)
    session = session_of(server, monitor_of((39.0, 10.0), (1.0, 1.0)))
    session.resume(through_a_checkpoint(before.state_dict()))
    before.end()
    session.begin_measurement()
    timed()
    session.report_evaluation(0.5)
    assert server.sent("POST", "/report")[0]["startup_s"] is None
    session.end()


@pytest.mark.parametrize(("has_measured", "startup_s"), [(True, None), (False, 29.0)])
def test_epoch_in_which_power_limits_were_tried_has_no_start_up(
    timed: Callable[[], None], has_measured: bool, startup_s: float | None
) -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = running_session(server, (39.0, 10.0), (1.0, 1.0))
    timed()
    session.keep_power_limits(PowerLimitChoice(power_limits=1), has_measured=has_measured)
    session.report_evaluation(0.5)
    assert server.sent("POST", "/report")[0]["startup_s"] == startup_s
    session.end()


def test_start_up_of_many_epochs_stops_no_run_and_is_in_no_expected_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run at 32 takes 10 epochs of 10 s. A run at 64 takes 6 such epochs, after a start-up of 300 s."""
    clock, steps = Clock(), optimizer()
    monkeypatch.setattr("zeus_plugins.training.session.FirstSteps", lambda: FirstSteps(clock))
    with LocalServer(f"embedded://{tmp_path / 'bso.sqlite3'}") as server:
        for size, epochs, startup_s in ((32, 10, 0.0), (64, 6, 300.0)):
            session = TrialSession(JOB, server, EstimateMonitor(100.0, device_model="A40", clock=clock))
            assert session.ask() == size
            session.begin_measurement()
            clock.now_s += startup_s
            for epoch in range(1, epochs + 1):
                for _ in range(10):
                    clock.now_s += 1.0
                    steps.step()
                session.report_evaluation(JOB.target_metric or 0.0 if epoch == epochs else 0.0)
            session.end()
            assert (session.trial.converged, session.trial.epoch) == (True, epochs)
        view = server.show_job(session.trial.job_id)
    assert [(each.startup_s, each.startup_j, each.cost_j) for each in view.trials] == [
        (0.0, 0.0, 10_000.0),
        (300.0, pytest.approx(30_000.0), 36_000.0),
    ]
    # Without the start-up, a run at 64 costs 60 s at 100 W.
    assert [each.expected_cost_j for each in view.arms] == pytest.approx([10_000.0, 6_000.0], rel=0.2)
    assert view.best_batch_size == 64
