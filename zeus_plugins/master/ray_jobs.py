"""Runs as jobs of a Ray cluster, by Ray's Jobs API (https://docs.ray.io/en/latest/cluster/running-applications)."""

from __future__ import annotations

import contextlib
import shlex
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master._clusters import POLL_S, answered, note_loss
from zeus_plugins.master.executors import Launch, Show, shown_live

T = TypeVar("T")

# Of the network, as the requests library has them, and of a dashboard that answers otherwise than asked.
_AWAY = (OSError, RuntimeError)


class RayExecutor:
    """An `Executor` that submits each run as a job; the log directory must be on a file system that the nodes share.

    A job goes on when its master is killed; a resumed master finds it by its id, which is kept in
    ``{job id}.train.running``.

    Args:
        address: URL of the cluster's dashboard, such as ``http://ray-head:8265``; by default that of ``RAY_ADDRESS``,
            or of a cluster on this machine.
        runtime_env: Ray's runtime environment for all runs, such as ``{"pip": [...]}``. The run's own variables are
            added to its ``env_vars``.
        parameters: More arguments of ``JobSubmissionClient.submit_job``, such as ``entrypoint_num_gpus``.

    Raises:
        ZeusBSOConfigError: Ray is not installed, or no cluster answers at this address.
    """

    def __init__(
        self, *, address: str | None = None, runtime_env: Mapping[str, Any] | None = None, **parameters: Any
    ) -> None:
        try:
            from ray.job_submission import JobSubmissionClient
        except ModuleNotFoundError:
            raise ZeusBSOConfigError("jobs of a Ray cluster need Ray: pip install 'zeus-plugins[ray]'") from None
        try:
            self._client = JobSubmissionClient(address)
        except (*_AWAY, ValueError) as error:
            where = "RAY_ADDRESS" if address is None else address
            raise ZeusBSOConfigError(
                f"no Ray cluster takes jobs at {where}: give executor.parameters the address of its dashboard, such as "
                f"http://HOST:8265 ({error})"
            ) from None
        self._runtime_env = dict(runtime_env or {})
        self._parameters = parameters

    def run(self, launch: Launch, show: Show) -> int:
        """See `Executor.run`."""
        offset = launch.log.stat().st_size if launch.log.exists() else 0
        variables = {"PYTHONUNBUFFERED": "1", **launch.environ}
        runtime_env = {**self._runtime_env, "env_vars": {**self._runtime_env.get("env_vars", {}), **variables}}
        submission_id = f"zeus-{uuid.uuid4().hex}"
        # Before it is submitted: a master that is killed in between finds no such job, and launches the run again.
        launch.marker.write_text(submission_id)
        try:
            self._client.submit_job(
                entrypoint=_entrypoint(launch),
                submission_id=submission_id,
                runtime_env=runtime_env,
                **self._parameters,
            )
        except (*_AWAY, TypeError, ValueError) as error:
            # It may have been taken, and the answer lost.
            self._stop(submission_id)
            launch.marker.unlink()
            raise ZeusBSOConfigError(f"Ray takes no job with these executor.parameters: {error}") from None
        return self._waited(submission_id, launch, show, offset)

    def adopt(self, launch: Launch, show: Show) -> bool:
        """See `Executor.adopt`."""
        if not launch.marker.exists():
            return False
        submission_id = launch.marker.read_text()
        if not any(one.submission_id == submission_id for one in _asked(self._client.list_jobs)):
            return False
        if _asked(lambda: self._client.get_job_status(submission_id)).is_terminal():
            return False
        self._waited(submission_id, launch, show, 0)
        return True

    def _waited(self, submission_id: str, launch: Launch, show: Show, offset: int) -> int:
        try:
            with shown_live(launch.log, show, offset=offset):
                while True:
                    job = _asked(lambda: self._client.get_job_info(submission_id))
                    if job.status.is_terminal():
                        break
                    time.sleep(POLL_S)
        except BaseException:
            self._stop(submission_id)
            raise
        launch.marker.unlink(missing_ok=True)
        if job.driver_exit_code is None:
            # Stopped by somebody, or its node is gone, or its runtime environment could not be made.
            return note_loss(launch.log, f"Ray job {submission_id}, {job.status}: {job.message}")
        return int(job.driver_exit_code)

    def _stop(self, submission_id: str) -> None:
        with contextlib.suppress(*_AWAY):
            self._client.stop_job(submission_id)


def _asked(question: Callable[[], T]) -> T:
    return answered(question, "the Ray cluster", _AWAY)


def _entrypoint(launch: Launch) -> str:
    """A line for the shell by which Ray starts jobs; the output goes where the master reads it."""
    workdir = launch.workdir or Path.cwd()
    return f"cd {shlex.quote(str(workdir))} && exec {shlex.join(launch.command)} >>{shlex.quote(str(launch.log))} 2>&1"
