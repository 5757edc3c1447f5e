"""A server with outages, and a training that reports to it."""

from __future__ import annotations

import logging
import time
from typing import Any

import httpx
import pytest

from tests.support.contract_double import ContractDouble
from tests.support.job_bench import seconds_and_joules
from tests.support.threads import heartbeat_threads
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.client.port import Retries
from zeus_plugins.protocol import ZEUS
from zeus_plugins.training.session import TrialSession

PATIENCE_S = 60.0
JOB = JobSpec(
    job_id="digits-1",
    job_id_prefix="digits",
    batch_sizes=(32, 64),
    default_batch_size=64,
    target_metric=0.9,
    max_epochs=4,
    policy=ZEUS,
)


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def threads() -> list[str]:
    return [thread.name for thread in heartbeat_threads()]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class Flaky(ContractDouble):
    """Server with outages on request that supports heartbeats, like our server."""

    def __init__(self, *verdicts: dict[str, Any] | int, batch_size: int = 64) -> None:
        super().__init__(*verdicts, batch_size=batch_size)
        self.rule: dict[str, Any] = {"max_cost_j": None, "max_epochs": 4}
        self.state, self.interval_s, self.heartbeats = "running", 0.05, 0

    def client(self, timeout_s: float = 10.0) -> BsoClient:
        retries = Retries(attempts=2, backoff_s=0)
        return BsoClient("http://bso", timeout_s=timeout_s, transport=httpx.MockTransport(self), retries=retries)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.down and request.url.path == "/trials/heartbeat":
            self.heartbeats += 1
            return httpx.Response(
                200, json={"state": self.state, "lease_s": 1, "interval_s": self.interval_s, "lease_epoch": 1}
            )
        answer = super().__call__(request)
        if request.url.path == "/jobs/batch_size":
            return httpx.Response(200, json={**answer.json(), "reason": "why not", "stop_rule": self.rule})
        return answer


def training(server: ContractDouble, client: BsoClient | None = None) -> TrialSession:
    session = TrialSession(JOB, client or server.client(), seconds_and_joules(1.0, 10.0))
    session.ask()
    session.begin_measurement()
    return session
