"""Main job with the settings of a newcomer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import bso_server
from zeus_plugins.demo.runner import _MAX_TRIES
from zeus_plugins.protocol import SavingsView


@pytest.mark.parametrize("has_server", [True, False])
@pytest.mark.slow
def test_each_training_is_a_fresh_process_with_and_without_a_fork_server(*, has_server: bool, tmp_path: Path) -> None:
    folder = tmp_path if has_server else tmp_path / ("long" * 30)  # too long for the name of the server's socket
    folder.mkdir(exist_ok=True)
    log = tmp_path / "log"
    launched = subprocess.run(
        [sys.executable, "-m", "tests.support.launching", str(log)],
        env=os.environ if has_server else {**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (launched.stdout, launched.returncode) == ("1\n2\n", 0), launched.stderr
    line = f"imported beforehand: {has_server}"
    assert log.read_text().splitlines() == [
        *(f"{line} one", "to standard error"),
        *(f"{line} one two", "to standard error"),
    ]


@pytest.mark.slow
def test_demo_states_the_cheapest_batch_size(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "zeus_plugins", "demo", "--recurrences", "2", "--directory", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert "Watch it live: http://127.0.0.1:" in demo.stdout
    assert demo.stdout.splitlines()[-1].startswith("Look at it: ")
    assert demo.stdout.endswith("open http://127.0.0.1:8000/ui/jobs/digits\n")
    url = f"sqlite:///{tmp_path / 'demo' / 'bso.sqlite3'}"
    shown = json.loads(bso_server("jobs", "show", "digits", "--json", "--database-url", url).stdout)
    trials = shown["trials"]
    # A recurrence without any completed run, as on a busy machine, must have used all its attempts.
    missed = 2 - sum(trial["state"] == "completed" for trial in trials)
    assert 0 <= missed < 2
    assert len(trials) >= 2 + missed * (_MAX_TRIES - 1)
    assert len({trial["batch_size"] for trial in trials}) >= 2
    assert all(trial["energy_source"].startswith("estimate: 65 W assumed × CPU time / ") for trial in trials)
    # On a busy machine, two recurrences may find that no size is cheaper.
    savings = SavingsView.model_validate(shown["savings"])
    assert (savings.batch_size, savings.default_batch_size) == (shown["best_batch_size"], 512)
    assert f"\n{savings.claim}.\n" in demo.stdout
