"""The log and the counters of a server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from bso_server.api.auth import MOST_SENDERS, PERIOD_S, RefusalLog
from bso_server.errors import ForbiddenError, UnknownJobError
from bso_server.metrics.requests import RequestWatch, TextFormatter
from tests.support.jobs import job
from tests.support.servers import serving
from tests.support.tokens import RESULT, bearer
from tests.support.wire import begin, report

TOKEN = f"zbso_0123abcd_{'s' * 43}"
REQUESTS = 20
LIMIT_S = 60.0


class TestRequests:
    async def test_disconnected_client_is_counted_as_499(self) -> None:
        done: list[tuple[object, ...]] = []

        async def app(_scope: Any, _receive: Any, _send: Any) -> None:
            raise asyncio.CancelledError

        watch = RequestWatch(app, lambda *args: done.append(args[:3]))
        with pytest.raises(asyncio.CancelledError):
            await watch({"type": "http", "method": "POST", "headers": []}, None, None)
        assert done == [("POST", None, 499)]


FORGED = "gone\n2026-01-01 00:00:00,000 INFO bso_server: all is well\x1b[2J\x9b1m"


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("bso_server", logging.WARNING, __file__, 1, message, arguments, exc_info)


class TestLines:
    def test_log_lines_never_contain_a_token_secret(self) -> None:
        line = TextFormatter().format(record("GET /%s", TOKEN, error=ValueError(TOKEN)))
        assert line.count("zbso_0123abcd_…") == 2
        assert "sss" not in line

    def test_text_lines_escape_control_characters_and_indent_all_but_the_first(self) -> None:
        line = TextFormatter().format(record("trial: %s", FORGED, error=ValueError(FORGED)))
        first, *further = line.split("\n")
        assert first.endswith("trial: gone")
        assert further[0] == r"    2026-01-01 00:00:00,000 INFO bso_server: all is well\x1b[2J\x9b1m"
        assert further[1] == "    ValueError: gone"
        assert all(each.startswith("    ") and each.isprintable() for each in further)

    @pytest.mark.parametrize("name", ["bso_server", "zeus_plugins", "zeus_plugins.energy"])
    def test_loggers_of_both_packages_escape_control_characters_for_any_handler(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        logging.getLogger(name).warning("trial: %s", FORGED)
        assert caplog.messages[-1].startswith(r"trial: gone\n2026")
        assert caplog.messages[-1].isprintable()


def test_log_of_a_server_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEUS_BSO_LOG_LEVEL", "DEBUG")
    with serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path) as server:
        with httpx.Client(base_url=server.url) as http:
            trial = begin(http, http.post("/jobs", json=job()).json()["job_id"])
            assert report(http, trial, **{**RESULT, "metric": 0.1234567}).status_code == 200
            http.get("/api/jobs", headers=bearer(TOKEN))
            http.post("/report", content=b'{"secret body": nonsense')
        server.stop()
    text = server.log.read_text()
    assert "registered" in text
    assert "refused with 401" in text
    assert all(secret not in text for secret in ("s" * 43, "1234567", "secret body"))


def test_detail_of_a_trial_cannot_forge_a_log_line(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'bso.sqlite3'}", tmp_path) as server:
        with httpx.Client(base_url=server.url) as http:
            http.post("/jobs", json=job(job_id="forged-1")).raise_for_status()
            http.patch("/trials", json={**begin(http, "forged-1"), "detail": FORGED}).raise_for_status()
        lines = server.log.read_text().split("\n")
    (line,) = [line for line in lines if "all is well" in line]
    assert r"(gone\n2026-01-01 00:00:00,000 INFO bso_server: all is well\x1b[2J\x9b1m)" in line
    assert all(each.isprintable() for each in lines)


# --- Refused requests, with a clock set by the test -------------------------------------------------------------------


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
    (named,) = caplog.messages[MOST_SENDERS:]
    assert named.startswith("refused with 403: GET ")
    assert named.endswith(" from 10.0.0.0, no token: no")

    refusing.now_s += 10 * PERIOD_S
    await refusing.refuse(None)
    assert caplog.messages[MOST_SENDERS + 1 :] == [caplog.messages[-1]]
    assert "from an unknown address" in caplog.messages[-1]


async def test_errors_without_refusal_log_no_line(caplog: pytest.LogCaptureFixture) -> None:
    refusing = Refusing()
    await refusing.refuse("10.0.0.1", UnknownJobError("none"))
    await refusing.refuse("10.0.0.1", RuntimeError("a fault of the server"))
    assert caplog.messages == []
