"""Texts of servers, scripts and devices on the terminal: they forge no line and command no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeus_plugins.cli import doctor, main, sync
from zeus_plugins.client.delivery import Delivered
from zeus_plugins.errors import ZeusBSORuntimeError
from zeus_plugins.master.history import Run, ended_in_words

FORGED = "x\nok       server       all is well\x1b[2J"
SHOWN = r"x\nok       server       all is well\x1b[2J"


def test_sync_escapes_the_answer_of_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = Delivered(Path("box"), job_id="job", server_url="http://server", left=1, problem=FORGED)
    monkeypatch.setattr(sync, "listed", lambda _: [waiting])
    assert main(["sync", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"job job for http://server: 1 waiting ({SHOWN})\n"


def test_commands_escape_text_of_fatal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise ZeusBSORuntimeError(FORGED)

    monkeypatch.setattr(sync, "listed", fail)
    assert main(["sync", "--dry-run"]) == 1
    assert capsys.readouterr().err == f"zeus-plugins: {SHOWN}\n"


def test_line_of_a_master_escapes_the_reason_of_a_run() -> None:
    measures = {"energy": 1.0, "time": 1.0, "cost": 1.0, "reached": False, "outcome": "failed", "reason": FORGED}
    run = Run(recurrence=1, tries=1, seed=1, job_id="job", bs=8, learning_rate=0.1, cost_ub=1.0, **measures)
    assert ended_in_words(run).startswith(f"job: failed: {SHOWN}; ")


def test_doctor_escapes_texts_of_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([doctor.Finding("nvidia", doctor.Level.OK, FORGED)]))
    assert main(["doctor"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"ok       nvidia       {SHOWN}"
