"""Trials of a training with an embedded server."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.engine import make_url

from bso_server.storage.sqlite import SqliteFile, SyncStore
from tests.support.replay import ReplayMonitor
from zeus_plugins import JobSpec
from zeus_plugins.client import client_from_environment
from zeus_plugins.client.local import LocalServer
from zeus_plugins.client.outbox import Outbox
from zeus_plugins.client.port import ServerPort
from zeus_plugins.energy import Measurement
from zeus_plugins.errors import ZeusBSOServerUnreachableError
from zeus_plugins.protocol import GpuConfig, TrainingResult, TrialId, TrialView
from zeus_plugins.training.session import TrialSession

T = TypeVar("T")

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
    """Return True if this process has the file open."""
    numbers = Path("/proc/self/fd").iterdir()
    return any(os.readlink(number).startswith(str(file)) for number in numbers if number.is_symlink())


class Line:
    """Connection to the server, which tests may cut, with actions to run before the next request."""

    def __init__(self) -> None:
        self.is_cut = False
        self.before: list[Callable[[], object]] = []
        self.loses_answers = 0


class CutServer(LocalServer):
    """Server behind such a connection; its copies share the connection."""

    def __init__(self, url: str, outbox: Path) -> None:
        super().__init__(url)
        self.line, self.outbox = Line(), Outbox(outbox)

    def _asked(self, request: str, ask: Callable[[SyncStore], T]) -> T:
        if self.line.before:
            self.line.before.pop()()
        if self.line.is_cut:
            raise ZeusBSOServerUnreachableError("cut")
        answer = super()._asked(request, ask)
        if self.line.loses_answers:
            self.line.loses_answers -= 1
            raise ZeusBSOServerUnreachableError("the answer was lost")
        return answer


def resumed(server: CutServer, state: dict[str, Any], job: JobSpec = JOB) -> TrialSession:
    """Resume a training from a checkpoint in a later run."""
    session = TrialSession(job, server, monitor(), outbox=server.outbox)
    assert session.resume(state)
    session.begin_measurement()
    return session


def the_trial(server: LocalServer) -> TrialView:
    """Return the job's only trial."""
    (trial,) = server.show_job(JOB.job_id or "").trials
    return trial


@contextmanager
def written_without_pause(file: Path) -> Iterator[list[float]]:
    """Let a second writer lock the file for 50 ms repeatedly, like a server under load; yield the times."""
    times: list[float] = []
    is_over = threading.Event()
    store = SyncStore(SqliteFile(make_url(f"sqlite:///{file}")), nullcontext())

    def write_on() -> None:
        while not is_over.is_set():
            store.write(lambda _: time.sleep(0.05), timeout_s=60.0)
            times.append(time.monotonic())
        store.close()

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        while len(times) < 5:
            time.sleep(0.005)
        yield times
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    with client_from_environment() as own:
        print(*[trial_to_its_end(own) for _ in range(int(sys.argv[1]))])
