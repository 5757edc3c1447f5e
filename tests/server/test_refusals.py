"""Log of refused requests, with a clock set by the test."""

from __future__ import annotations

from typing import Any

import pytest

from bso_server.api.auth import MOST_SENDERS, PERIOD_S, RefusalLog
from bso_server.errors import ForbiddenError, UnknownJobError


class Refusing:
    """A log of refusals, and refused clients."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._log = RefusalLog(lambda: self.now_s)

    async def refuse(self, address: str | None, error: Exception | None = None) -> None:
        client = None if address is None else (address, 1)
        scope: Any = {"client": client, "method": "GET", "path": "/x" * 1000, "headers": []}
        await self._log.note(error or ForbiddenError("no: never"), scope)


async def test_flood_of_refusals_logs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    refusing = Refusing()
    for _ in range(3):
        for number in range(2 * MOST_SENDERS):
            await refusing.refuse(f"10.0.0.{number}")
    assert len(caplog.messages) == MOST_SENDERS
    assert max(map(len, caplog.messages)) < 300

    refusing.now_s += PERIOD_S - 0.001
    await refusing.refuse("10.0.0.0")
    assert len(caplog.messages) == MOST_SENDERS

    refusing.now_s += 0.001
    await refusing.refuse("10.0.0.0")
    counted, named = caplog.messages[MOST_SENDERS:]
    assert counted.startswith(f"refused {5 * MOST_SENDERS + 1} more requests ")
    assert named.startswith("refused with 403: GET ")
    assert named.endswith(" from 10.0.0.0, no token: no")

    refusing.now_s += 10 * PERIOD_S
    await refusing.refuse(None)
    assert caplog.messages[MOST_SENDERS + 2 :] == [caplog.messages[-1]]
    assert "from an unknown address" in caplog.messages[-1]


async def test_errors_without_refusal_log_no_line(caplog: pytest.LogCaptureFixture) -> None:
    refusing = Refusing()
    await refusing.refuse("10.0.0.1", UnknownJobError("none"))
    await refusing.refuse("10.0.0.1", RuntimeError("a fault of the server"))
    assert caplog.messages == []
