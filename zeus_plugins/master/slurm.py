"""Runs as jobs of a Slurm cluster, by submitit (https://github.com/facebookincubator/submitit)."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.executors import Launch, Show, shown_live

_LOST = 1


class SubmititExecutor:
    """An `Executor` that submits each run as a job; the log directory must be on a file system that the nodes share.

    A job goes on when its master is killed; a resumed master finds it by submitit's own record of it,
    which is kept in ``{job id}.train.running``.

    Args:
        cluster: ``"slurm"``; ``"local"`` has submitit run it as a process of this machine.
        parameters: Arguments of submitit's ``AutoExecutor.update_parameters``, such as ``timeout_min``,
            ``slurm_partition`` or ``gpus_per_node``.

    Raises:
        ZeusBSOConfigError: submitit is not installed, or there is no such parameter.
    """

    def __init__(self, *, cluster: str = "slurm", **parameters: Any) -> None:
        try:
            import submitit
        except ModuleNotFoundError:
            raise ZeusBSOConfigError("Slurm jobs need submitit: pip install 'zeus-plugins[slurm]'") from None
        self._submitit = submitit
        self._cluster = cluster
        self._parameters = parameters

    def run(self, launch: Launch, show: Show) -> int:
        """See `Executor.run`."""
        offset = launch.log.stat().st_size if launch.log.exists() else 0
        try:
            executor = self._submitit.AutoExecutor(folder=launch.log.parent / "submitit", cluster=self._cluster)
            executor.update_parameters(name=launch.log.name.removesuffix(".train.log"), **self._parameters)
        except (NameError, RuntimeError, ValueError, TypeError) as error:
            raise ZeusBSOConfigError(f"submitit cannot make Slurm jobs of these parameters: {error}") from None
        workdir = str(launch.workdir or Path.cwd())
        job = executor.submit(_execute, list(launch.command), workdir, dict(launch.environ), str(launch.log))
        launch.marker.write_bytes(pickle.dumps(job))
        return self._waited(job, launch, show, offset)

    def adopt(self, launch: Launch, show: Show) -> bool:
        """See `Executor.adopt`."""
        if not launch.marker.exists():
            return False
        job = pickle.loads(launch.marker.read_bytes())  # noqa: S301 - a file of our own, beside commands that we run
        if job.done(force_check=True):
            return False
        self._waited(job, launch, show, 0)
        return True

    def _waited(self, job: Any, launch: Launch, show: Show, offset: int) -> int:
        try:
            with shown_live(launch.log, show, offset=offset):
                status: int = job.result()
        except self._submitit.core.utils.FailedJobError as error:
            # Cancelled, out of time or memory, or a node that is gone: why, only Slurm knows.
            with launch.log.open("a") as log:
                log.write(f"\nSlurm job {job.job_id}, {job.state}: {str(error).splitlines()[-1]}\n")
            status = _LOST
        except BaseException:
            job.cancel(check=False)
            raise
        launch.marker.unlink(missing_ok=True)
        return status


def _execute(command: Sequence[str], workdir: str, environ: Mapping[str, str], log: str) -> int:
    with Path(log).open("ab") as output:
        try:
            return subprocess.run(  # noqa: S603 - running what the user says is what this is for
                command,
                cwd=workdir,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        except OSError as error:
            output.write(f"{command[0]} cannot be started in {workdir}: {error.strerror}\n".encode())
            return 127
