"""The power limit of a training, sent to a server that disappears and returns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract_double import CONVERGED, KEEP_TRAINING, ContractDouble
from tests.support.reporting import Flaky, training, until
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.protocol import PowerLimitChoice

SEARCHING, CHOICE = PowerLimitChoice(power_limits=1), PowerLimitChoice(power_limit_w=50.0, power_limits=2)
NONE: tuple[None, None] = (None, None)


def limits(messages: list[dict[str, Any]]) -> list[tuple[float | None, int | None]]:
    return [(sent["power_limit_w"], sent["power_limits"]) for sent in messages]


def test_each_report_has_the_latest_power_limit() -> None:
    server = ContractDouble(KEEP_TRAINING, KEEP_TRAINING, CONVERGED)
    session = training(server)
    session.report_evaluation(0.1)
    for choice in (SEARCHING, CHOICE):
        session.keep_power_limits(choice, has_measured=True)
        session.report_evaluation(0.2)
    # Too late: no message follows.
    session.keep_power_limits(SEARCHING, has_measured=True)
    session.end()
    assert limits(server.sent("POST", "/report")) == [NONE, (None, 1), (50.0, 2)]
    assert server.sent("PATCH", "/trials") == []


@pytest.mark.parametrize("diverges", [False, True])
def test_limit_after_the_last_report_comes_with_the_ending(diverges: bool) -> None:
    server = ContractDouble(KEEP_TRAINING)
    session = training(server)
    session.report_evaluation(0.1)
    session.keep_power_limits(CHOICE, has_measured=True)
    if diverges:
        session.report_evaluation(math.nan)
    session.end(RuntimeError("out of luck"))
    assert limits(server.sent("PATCH", "/trials")) == [(50.0, 2)]


def test_limit_is_delivered_after_an_outage(state_directory: Path) -> None:
    server = Flaky(KEEP_TRAINING, CONVERGED)
    session = training(server)
    server.down = True
    session.keep_power_limits(CHOICE, has_measured=True)
    assert not session.report_evaluation(0.1).stop_train
    until(Outbox(state_directory / "outbox").waiting)
    server.down = False
    until(lambda: server.sent("POST", "/report"))
    session.end(RuntimeError("out of luck"))
    assert limits(server.sent("POST", "/report")) == limits(server.sent("PATCH", "/trials")) == [(50.0, 2)]
