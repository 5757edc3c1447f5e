"""Trial sessions on an in-memory server, with a monitor of listed measurements."""

from __future__ import annotations

import io
from typing import Any

import torch

from tests.support.contract_double import ContractDouble
from tests.support.replay import ReplayMonitor
from zeus_plugins.energy import EnergyMonitor, Measurement
from zeus_plugins.protocol import GpuConfig, JobSpec
from zeus_plugins.training.session import TrialSession

JOB = JobSpec(job_id="mnist-1", job_id_prefix="mnist", batch_sizes=(32, 64), default_batch_size=32)
GPUS = GpuConfig(max_power=600.0, number_of_gpus=2, gpu_model="A40")
TRIAL = {"job_id": "mnist-1", "batch_size": 64, "trial_number": 7}
NO_LIMIT = {"power_limit_w": None, "power_limits": None}


def monitor_of(*windows: tuple[float, float], source: str = "nvml") -> ReplayMonitor:
    return ReplayMonitor([Measurement(time_s, energy_j, source) for time_s, energy_j in windows], GPUS)


def session_of(server: ContractDouble, monitor: EnergyMonitor | None = None, *, job: JobSpec = JOB) -> TrialSession:
    return TrialSession(job, server.client(), monitor or monitor_of())


def running_session(
    server: ContractDouble, *windows: tuple[float, float], monitor: EnergyMonitor | None = None
) -> TrialSession:
    session = session_of(server, monitor or monitor_of(*windows))
    session.ask()
    session.begin_measurement()
    return session


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load the state like frameworks that load checkpoints without pickle."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
