"""A Lightning training on two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.warm import LIGHTNING, REPOSITORY

# A rank that waits for another one for ever shows as a test that fails by this limit.
LIMIT_S = 240
JOB_ID = "digits-ddp"


def run_two_ranks(server_url: str, target: float, folder: Path, scenario: str) -> tuple[bool, str]:
    """Whether both ranks ended well, and all that they said; started as `torchrun` starts them."""
    command = ["tests.support.ddp_training", server_url, JOB_ID, str(target), str(folder), scenario]
    status = run_ranks(*command, modules=LIGHTNING, output=folder / "output")
    return not any(status), (folder / "output").read_text()


def run_script(server_url: str, target: float, folder: Path, scenario: str) -> tuple[bool, str]:
    """As `run_two_ranks`, but started as a user starts a script; Lightning starts the second rank."""
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
    return training.returncode == 0, output
