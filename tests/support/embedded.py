"""Trials of a training whose server runs in the training's own process."""

from __future__ import annotations

from itertools import repeat

from zeus_plugins import JobSpec
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import Measurement, ReplayMonitor
from zeus_plugins.protocol import GpuConfig
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
    assert session.report(1.0).converged
    session.end()
    assert session.trial.trial_number is not None
    return session.trial.trial_number
