"""Trainings with the server in the process of the training."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from tests.support.frameworks import (  # noqa: F401 - a fixture
    FrameworkBench,
    Training,
    make_bench_without_server,
)
from tests.support.job_bench import EPOCH_OF_48, GPUS, NEVER, seconds_and_joules
from tests.support.replay import ReplayMonitor
from zeus_plugins.client import client_from_environment
from zeus_plugins.energy import EnergyMonitor, Measurement
from zeus_plugins.protocol import TrialState, TrialView


def train(bench: FrameworkBench, monitor: EnergyMonitor, **options: Any) -> tuple[Training, TrialView]:
    """Train three epochs; return the training and its trial."""
    job = bench.job(NEVER, max_epochs=3, higher_is_better_metric=True)
    callback = bench.BatchSize(job, "score", energy_monitor=monitor, on_failure="stop")
    training = bench.training(callback, epochs=3, **options)
    training.train()
    with client_from_environment() as client:
        (trial,) = client.show_job(bench.job_id).trials
    return training, trial


@pytest.mark.skipif(not hasattr(os, "fork"), reason="loads data in forked processes")
@pytest.mark.filterwarnings("ignore:.*This process.*is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    "stay",
    [
        pytest.param(False, id="new workers each epoch"),
        # When the trainer is collected, torch waits five seconds for each of its workers.
        pytest.param(True, marks=pytest.mark.slow, id="workers that stay"),
    ],
)
def test_training_with_forked_workers_needs_no_server_url(bench: FrameworkBench, stay: bool) -> None:
    training, trial = train(bench, seconds_and_joules(1.0, 10.0), **bench.forking(stay=stay))
    assert training.sizes == EPOCH_OF_48 * 3
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.EXHAUSTED, 3, 30)


def test_training_without_further_energy_measurements_continues_to_end(
    bench: FrameworkBench, caplog: pytest.LogCaptureFixture
) -> None:
    # The monitor has a measurement for the first of three epochs.
    monitor = ReplayMonitor([Measurement(1.0, 10.0, "replayed")], GPUS)
    with caplog.at_level(logging.WARNING, logger="zeus_plugins"):
        training, trial = train(bench, monitor, scores=(0.1, 0.2, 0.3))
    assert training.sizes == EPOCH_OF_48 * 3
    assert "can no longer be measured" in caplog.text
    assert (trial.state, trial.epochs, trial.energy_j) == (TrialState.FAILED, 1, 10)
    assert "no measurement left" in (trial.message or "")
