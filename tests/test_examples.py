"""The examples run as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Server
from zeus_plugins.client import BsoClient
from zeus_plugins.protocol import TrialState

EXAMPLES = Path(__file__).parent.parent / "examples"
MEASURED = {TrialState.COMPLETED, TrialState.EARLY_STOPPED, TrialState.EXHAUSTED}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("lightning_digits.py", ["--recurrences", "2"]),
        ("lightning_digits.py", ["--recurrences", "1", "--devices", "2"]),
        ("plain_pytorch.py", ["--recurrences", "2"]),
    ],
    ids=["lightning", "lightning on two processes", "plain"],
)
def test_an_example_trains_as_often_as_asked(server: Server, script: str, arguments: list[str]) -> None:
    command = [sys.executable, str(EXAMPLES / script), *arguments, "--server-url", server.url, "--job-id", "digits-1"]
    # More threads than cores make small networks slow.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    with BsoClient(server.url) as client:
        trials = client.show_job("digits-1").trials
    assert len(trials) == int(arguments[1])
    assert trials[0].batch_size == 64
    assert {trial.state for trial in trials} <= MEASURED
    assert "batch size 64" in run.stdout
