"""Results that version 0.1.0 left waiting are delivered."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from zeus_plugins.cli import main
from zeus_plugins.client.connect import client_from_environment

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"


def test_results_of_version_0_1_0_are_delivered(state_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "outbox", state_directory / "outbox")
    file = tmp_path / "bso.sqlite3"
    with closing(sqlite3.connect(file)) as database:
        database.executescript((FIXTURES / "outbox_server.sql").read_text())
    assert main(["sync", "--server-url", f"embedded://{file}"]) == 0
    assert list((state_directory / "outbox").iterdir()) == []
    with client_from_environment(f"embedded://{file}") as client:
        for job_id, expected in json.loads((FIXTURES / "outbox_expected.json").read_text()).items():
            shown = [trial.model_dump(mode="json") for trial in client.show_job(job_id).trials]
            assert len(shown) == len(expected["trials"])
            for trial, wanted in zip(shown, expected["trials"], strict=True):
                assert {name: trial[name] for name in wanted if name in trial} == {
                    name: value for name, value in wanted.items() if name in trial
                }
                assert trial["state"] == wanted["state"]
