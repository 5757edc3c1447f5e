"""Power-limit profiles of a training, sent to a server that disappears and returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.contract_double import CONVERGED, KEEP_TRAINING, ContractDouble
from tests.support.job_bench import GPUS, seconds_and_joules
from tests.support.reporting import JOB, Flaky, threads, training, until, warnings_in
from zeus_plugins.client.delivery import deliver_waiting
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.protocol import (
    PowerLimitChoice,
    PowerLimitSample,
    PowerProfile,
    TrialId,
)
from zeus_plugins.training.session import TrialSession
from zeus_plugins.training.trial import TrialInfo

PATH = "/trials/power_profile"
SAMPLES = tuple(PowerLimitSample(limit_w=w, steps=4, time_s=1.0, energy_j=w) for w in (50.0, 100.0))
CHOICE = PowerLimitChoice(gpus=GPUS, samples=SAMPLES, chosen_limit_w=50.0)
TRIAL = TrialId(job_id="digits-1", batch_size=64, trial_number=7)
SENT = {**TRIAL.model_dump(), **CHOICE.model_dump(mode="json")}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


@pytest.fixture
def outbox(state_directory: Path) -> Outbox:
    return Outbox(state_directory / "outbox")


class Keeping(Flaky):
    """Server that stores power limits, or answers with a status."""

    status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.down and request.url.path == PATH:
            self.requests.append(
                (request.method, request.url.path, httpx.Response(200, content=request.content).json())
            )
            return httpx.Response(self.status, json=None if self.status == 200 else {"message": "as the test asked"})
        return super().__call__(request)


def test_step_does_not_wait_for_the_server_but_the_end_of_the_training_does() -> None:
    class Slow(Keeping):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == PATH:
                until(lambda: has_returned)
            return super().__call__(request)

    has_returned = False
    server = Slow()
    session = training(server)
    session.keep_power_limits(CHOICE)
    has_returned = True
    session.end()
    assert server.sent("PUT", PATH) == [SENT]


def test_limits_follow_the_results_after_an_outage(outbox: Outbox) -> None:
    server = Keeping(KEEP_TRAINING, CONVERGED)
    session = training(server)
    server.down = True
    session.keep_power_limits(CHOICE)
    assert not session.report_evaluation(0.1).stop_train
    until(outbox.waiting)
    server.down = False
    until(lambda: server.sent("PUT", PATH))
    assert [path for _, path, _ in server.requests[-2:]] == ["/report", PATH]
    assert session.report_evaluation(0.95).converged
    session.end()
    assert server.sent("PUT", PATH) == [SENT]


def test_limits_are_lost_if_the_server_is_away_at_the_end(outbox: Outbox) -> None:
    server = Keeping(CONVERGED)
    session = training(server)
    server.down = True
    session.report_evaluation(0.95)  # reaches the target
    session.keep_power_limits(CHOICE)
    session.end()
    server.down = False
    (file,) = deliver_waiting(outbox, lambda _: server.client())
    assert (file.delivered, file.left, file.problem) == (1, 0, None)
    assert outbox.waiting() == []
    assert server.sent("PUT", PATH) == []


@pytest.mark.parametrize("status", [404, 409, 422])
def test_refusal_of_limits_affects_nothing_else(status: int, outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    server = Keeping(KEEP_TRAINING, CONVERGED)
    server.status = status
    session = training(server)
    session.keep_power_limits(CHOICE)
    until(lambda: warnings_in(caplog))
    assert not session.report_evaluation(0.1).stop_train
    assert session.report_evaluation(0.95).converged
    session.end()
    (warning,) = warnings_in(caplog)
    assert "does not keep the power limits of trial 7" in warning
    assert "as the test asked" in warning
    assert outbox.waiting() == outbox.refused() == []
    assert server.sent("PUT", PATH) == [SENT]


def test_failing_server_receives_the_limits_again() -> None:
    server = Keeping()
    server.status = 503
    session = training(server)
    session.keep_power_limits(CHOICE)
    until(lambda: server.sent("PUT", PATH))
    server.status = 200
    session.end()
    assert server.sent("PUT", PATH) == [SENT, SENT]


def test_zeus_server_receives_no_limits() -> None:
    server = ContractDouble(CONVERGED)  # fails for routes that Zeus lacks
    session = training(server)
    assert session.trial.power_profile is None
    session.keep_power_limits(CHOICE)
    assert session.report_evaluation(0.95).converged
    session.end()
    assert server.sent("PUT", PATH) == []


def test_without_a_trial_no_limits_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    server = Keeping()
    session = TrialSession(JOB, server.client(), seconds_and_joules(1.0, 10.0))
    with caplog.at_level(logging.DEBUG, logger="zeus_plugins"):
        session.keep_power_limits(CHOICE)
    session.ask()
    session.end()
    session.keep_power_limits(CHOICE)
    assert server.sent("PUT", PATH) == []
    assert warnings_in(caplog) == []


def test_checkpoint_contains_the_limits() -> None:
    session = training(Keeping())
    session.keep_power_limits(CHOICE)
    state: dict[str, Any] = session.state_dict()
    session.end()
    assert TrialInfo.model_validate(state).power_profile == PowerProfile(gpus=GPUS, samples=SAMPLES)
