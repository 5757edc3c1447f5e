"""Trainings that go on from a checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import resumed_training as script
from tests.conftest import Server
from tests.lightning_bench import (
    QUIET,
    make_bench,  # noqa: F401 - a fixture
    make_shared_server,  # noqa: F401 - a fixture
)
from tests.lightning_models import TRAIN_IMAGES
from zeus_plugins.client import BsoClient
from zeus_plugins.protocol import TrialState, TrialView

pytestmark = [
    *QUIET,
    # Lightning's own remark on saving where something is saved already.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]

REPOSITORY = Path(__file__).parent.parent
JOB_ID = "digits-nightly"
STEPS_OF_48 = 4


# Real signals to real processes


def run_script(server: Server, folder: Path, number: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.resumed_training", server.url, JOB_ID, str(folder), str(number)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def trial_on(server: Server) -> TrialView:
    with BsoClient(server.url) as client:
        (trial,) = client.show_job(JOB_ID).trials
    return trial


def seen_in(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def rates_of(steps: range) -> list[float]:
    """The default size's rate, halved each epoch; the job's first trial has the default size."""
    per_epoch = -(-TRAIN_IMAGES // (2 * script.BATCH_SIZE))
    return [script.RATE * 0.5 ** (step // per_epoch) for step in steps]


def test_a_training_killed_without_warning_goes_on_as_the_same_trial(server: Server, tmp_path: Path) -> None:
    killed = run_script(server, tmp_path, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = trial_on(server)
    assert (before.state, before.epochs, before.time_s) == (TrialState.RUNNING, 2, 4.0)
    resumed = run_script(server, tmp_path, 0)
    assert resumed.returncode == 0, resumed.stderr
    seen = seen_in(tmp_path)
    assert seen["sizes"] == [96, 72, 96, 72]
    assert seen["rates"] == pytest.approx(rates_of(range(4, 8)))
    assert seen["steps"] == 8
    assert seen["trial"]["trial_number"] == 1
    after = trial_on(server)
    assert (after.state, after.epochs, after.metric) == (TrialState.COMPLETED, 4, 0.9)
    assert (after.time_s, after.energy_j) == (8.0, 80.0)


def test_a_preempted_training_goes_on_within_its_epoch(server: Server, tmp_path: Path) -> None:
    preempted = run_script(server, tmp_path, signal.SIGTERM)
    assert preempted.returncode == 0, preempted.stderr
    first = seen_in(tmp_path)
    assert first["left"] == "SIGTERMException"
    assert trial_on(server).state is TrialState.SUSPENDED
    resumed = run_script(server, tmp_path, 0)
    assert resumed.returncode == 0, resumed.stderr
    second = seen_in(tmp_path)
    assert len(first["sizes"]) + len(second["sizes"]) == second["steps"] == 8
    assert first["rates"] + second["rates"] == pytest.approx(rates_of(range(8)))
    after = trial_on(server)
    assert (after.state, after.trial_number, after.epochs) == (TrialState.COMPLETED, 1, 4)
    # The steps between the last report and the signal count, too.
    assert (after.time_s, after.energy_j) == (8.0, 80.0)
