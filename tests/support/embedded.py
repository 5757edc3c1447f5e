"""Trials of a training whose server runs in the training's own process."""

from __future__ import annotations

import os
from itertools import repeat
from pathlib import Path

from zeus_plugins import JobSpec
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.protocol import GpuConfig, TrainingResult, TrialId
from zeus_plugins.training.session import TrialSession

JOB = JobSpec(job_id="digits-1", job_id_prefix="digits", batch_sizes=(32, 64), default_batch_size=32, max_epochs=5)
GPUS = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")


def monitor() -> ReplayMonitor:
    return ReplayMonitor(repeat(Measurement(1.0, 10.0, "replayed")), GPUS)


def session_of(client: ServerPort) -> TrialSession:
    return TrialSession(JOB, client, monitor())


def trial_to_its_end(client: ServerPort) -> int:
    session = session_of(client)
    session.ask()
    session.begin_measurement()
    assert session.report_evaluation(1.0).converged
    session.end()
    assert session.trial.trial_number is not None
    return session.trial.trial_number


def final_report(trial: TrialId) -> TrainingResult:
    name = trial.model_dump(include=set(TrialId.model_fields))
    return TrainingResult(**name, time=1.0, energy=1.0, metric=1.0, current_epoch=1)


def is_open(file: Path) -> bool:
    """Whether this process has the file open."""
    numbers = Path("/proc/self/fd").iterdir()
    return any(os.readlink(number).startswith(str(file)) for number in numbers if number.is_symlink())
