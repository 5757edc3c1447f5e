"""A Lightning training on two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A rank that waits for another one for ever shows as a test that fails by this limit.
LIMIT_S = 120
JOB_ID = "digits-ddp"
REPOSITORY = Path(__file__).parents[2]


def run_two_ranks(server_url: str, target: float, folder: Path, scenario: str) -> tuple[int, str]:
    """Exit status and output of the first rank; both have ended."""
    arguments = [server_url, JOB_ID, str(target), str(folder), scenario]
    training = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ddp_training", *arguments],
        cwd=REPOSITORY,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = training.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(training.pid, signal.SIGKILL)  # the second rank is a child of the first
        output, _ = training.communicate()
        pytest.fail(f"the ranks hang: {output}")
    return training.returncode, output
