"""Helpers of the tests of all callbacks: a server with a separate job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from tests.support.replay import ReplayMonitor
from tests.support.servers import ServerProcess
from zeus_plugins import JobSpec
from zeus_plugins.client.http import BsoClient
from zeus_plugins.energy import Measurement
from zeus_plugins.protocol import ZEUS, GpuConfig, JobView, TrialView
from zeus_plugins.training.session import TrialSession

GPUS = GpuConfig(max_power=100.0, number_of_gpus=1, gpu_model="A40")
SERVERS_SIZE = 48  # default of the job, used by the first trial
NEXT_SIZE = 24  # size of the second trial if the first reached its target
EPOCH_OF_48 = [48, 48, 48, 24]
EPOCH_OF_24 = [24] * 7
NEVER = 2.0  # a score that no training reaches
AT_ONCE = 0.0  # a score that every training has from the start


def seconds_and_joules(time_s: float, energy_j: float) -> ReplayMonitor:
    """Return a monitor in which every window has this time and energy."""
    return ReplayMonitor(repeat(Measurement(time_s, energy_j, "replayed")), GPUS)


class CountingMonitor:
    """Monitor of a second and ten joules per count, so that totals identify the measured work.

    Args:
        count: Returns the count so far.
    """

    source = "counted steps"

    def __init__(self, count: Callable[[], int]) -> None:
        self._windows: dict[str, int] = {}
        self._count = count

    @property
    def open_windows(self) -> list[str]:
        return list(self._windows)

    def gpus(self) -> GpuConfig:
        return GPUS

    def begin_window(self, name: str) -> None:
        assert name not in self._windows
        self._windows[name] = self._count()

    def end_window(self, name: str) -> Measurement:
        counted = self._count() - self._windows.pop(name)
        return Measurement(float(counted), 10.0 * counted, self.source)


@dataclass
class JobBench:
    """A running server, and a job used by a single test."""

    server: ServerProcess
    job_id: str

    def job(self, target: float = AT_ONCE, **spec: Any) -> JobSpec:
        defaults = {
            "batch_sizes": (NEXT_SIZE, SERVERS_SIZE),
            "default_batch_size": SERVERS_SIZE,
            "max_epochs": 1,
        }
        defaults["policy"] = ZEUS  # the order of its first sizes does not depend on costs
        return JobSpec(job_id=self.job_id, job_id_prefix="digits", target_metric=target, **(defaults | spec))

    def callback_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return these options and the options that every callback needs."""
        return {"server_url": self.server.url, "energy_monitor": seconds_and_joules(1.0, 10.0)} | options

    def is_registered(self) -> bool:
        with BsoClient(self.server.url) as client:
            return self.job_id in {job.job_id for job in client.list_jobs().jobs}

    def view(self) -> JobView:
        with BsoClient(self.server.url) as client:
            return client.show_job(self.job_id)

    def only_trial(self) -> TrialView:
        (trial,) = self.view().trials
        return trial

    def power_limits(self) -> list[tuple[float | None, int | None]]:
        """Return chosen limit in watts and number of known limits by trial."""
        return [(trial.power_limit_w, trial.power_limits) for trial in self.view().trials]

    def complete_first_trial(self, job: JobSpec) -> None:
        """Complete the first trial without a training: 1 s and 10 J, a cost of 55 J."""
        with BsoClient(self.server.url) as client:
            session = TrialSession(job, client, seconds_and_joules(1.0, 10.0))
            assert session.ask() == job.default_batch_size
            session.begin_measurement()
            assert session.report_evaluation(max(1.0, job.target_metric or 0.0), 1).converged
            session.end()
