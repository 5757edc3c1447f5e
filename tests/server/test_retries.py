"""Retries after failed transactions: which failures are retried, and when."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from bso_server.errors import DatabaseUnavailableError, UnknownJobError
from bso_server.storage.deadlines import Deadline
from bso_server.storage.faults import Failure, JobExistsError, Retries, failure_of
from tests.support.databases import DriverError

LONG_S = 3600.0


def broken_off(*args: object, sqlstate: str | None = None) -> OperationalError:
    return OperationalError("INSERT", None, DriverError(*args, sqlstate=sqlstate))


@pytest.fixture
def longest_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every random wait as long as possible."""
    monkeypatch.setattr("random.random", lambda: 1.0)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (JobExistsError("job"), Failure.COLLIDED),
        (DatabaseUnavailableError("the connection was lost"), Failure.LOST),
        (DatabaseUnavailableError("nothing can be kept", fault="the disk of its database is full"), None),
        (broken_off(sqlstate="40P01"), Failure.BROKEN_OFF),
        (broken_off(1205, "Lock wait timeout exceeded"), Failure.BROKEN_OFF),
        (broken_off(1020, "Record has changed since last read"), Failure.BROKEN_OFF),
        (broken_off("database is locked"), Failure.BROKEN_OFF),
        (broken_off("no such column"), None),
        (UnknownJobError("job"), None),
        (RuntimeError(), None),
    ],
)
def test_errors_are_classified_as_documented(error: Exception, failure: Failure | None) -> None:
    assert failure_of(error) is failure


@pytest.mark.usefixtures("longest_waits")
@pytest.mark.parametrize(
    ("failure", "waits_s"),
    [
        (Failure.COLLIDED, [0.0, None]),
        (Failure.LOST, [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, None]),
        (Failure.BROKEN_OFF, [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4]),
    ],
)
def test_waits_between_attempts_are_literal(failure: Failure, waits_s: list[float | None]) -> None:
    retries = Retries(Deadline(LONG_S))
    assert [retries.wait_s(failure, JobExistsError("job")) for _ in waits_s] == pytest.approx(waits_s)
    assert retries.attempts == len(waits_s)
    assert retries.repeats == len([wait_s for wait_s in waits_s if wait_s is not None])


@pytest.mark.usefixtures("longest_waits")
def test_attempt_ending_after_the_deadline_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    clock: Any = lambda: now  # noqa: E731 - a clock set by the test
    monkeypatch.setattr("time.monotonic", clock)
    retries = Retries(Deadline(3.0))
    now += 1.2  # a wait for a lock in vain, as long as the next attempt might wait
    assert retries.wait_s(Failure.BROKEN_OFF, broken_off("database is locked")) == 0.05
    now += 1.25
    assert retries.wait_s(Failure.BROKEN_OFF, broken_off("database is locked")) is None


def test_exhausted_retries_report_an_unavailable_database(caplog: pytest.LogCaptureFixture) -> None:
    retries, collision = Retries(Deadline(LONG_S)), JobExistsError("job")
    assert retries.given_up(collision) is collision
    assert caplog.text == ""
    away = retries.given_up(broken_off("database is locked"))
    assert isinstance(away, DatabaseUnavailableError)
    assert away.detail == "aborted by the database each time: database is locked"
    assert "gave up after 0 attempts: aborted" in caplog.text
