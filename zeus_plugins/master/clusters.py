"""The executor that runs commands as jobs of a Slurm cluster, by submitit.

https://github.com/facebookincubator/submitit
"""

from __future__ import annotations

import pickle
import shlex
import subprocess
from pathlib import Path
from typing import Any

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.executors import Launch, Show, shown_live

LOST = 1
"""Exit status of a run that was stopped or whose node failed."""


class SubmititExecutor:
    """An `Executor` that submits each run as a job. The nodes must share the file system of the log directory.

    Jobs survive a killed master. A resumed master finds a job by the marker file ``{job id}.train.running``, which
    contains submitit's pickled job.

    Args:
        cluster: ``"slurm"``, or ``"local"`` for a process on this machine.
        parameters: Arguments of submitit's ``AutoExecutor.update_parameters``, such as ``timeout_min``,
            ``slurm_partition`` or ``gpus_per_node``.

    Raises:
        ZeusBSOConfigError: submitit is not installed. `run` raises it for an unknown parameter.
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
        return self._wait(self._submit(launch), launch, show, offset)

    def adopt(self, launch: Launch, show: Show) -> bool:
        """See `Executor.adopt`."""
        if not launch.marker.exists():
            return False
        job = pickle.loads(launch.marker.read_bytes())  # nosec B301  # noqa: S301 - the master's own file
        if job.done(force_check=True):
            return False
        self._wait(job, launch, show, 0)
        return True

    def _submit(self, launch: Launch) -> Any:
        try:
            executor = self._submitit.AutoExecutor(folder=launch.log.parent / "submitit", cluster=self._cluster)
            executor.update_parameters(name=launch.log.name.removesuffix(".train.log"), **self._parameters)
        except (NameError, RuntimeError, ValueError, TypeError) as error:
            raise ZeusBSOConfigError(f"submitit cannot make Slurm jobs of these parameters: {error}") from None
        job = executor.submit(subprocess.call, ["/bin/sh", "-c", _script(launch)], stdin=subprocess.DEVNULL)
        launch.marker.write_bytes(pickle.dumps(job))
        return job

    def _wait(self, job: Any, launch: Launch, show: Show, offset: int) -> int:
        """Wait for a job; return its exit status or, if the run was lost, explain that in its log and return `LOST`."""
        lost = None
        try:
            with shown_live(launch.log, show, offset=offset):
                try:
                    status = int(job.result())
                except self._submitit.core.utils.FailedJobError as error:
                    # The job was cancelled or exceeded its time or memory, or its node failed.
                    status, lost = LOST, f"Slurm job {job.job_id}, {job.state}: {str(error).splitlines()[-1]}"
        except BaseException:
            job.cancel(check=False)
            raise
        launch.marker.unlink(missing_ok=True)
        if lost is not None:
            with launch.log.open("a") as file:
                file.write(f"\n{lost}\n")
        return status


def _script(launch: Launch) -> str:
    """Return a shell script that appends all output to the log, and whose process becomes the command (`exec`)."""
    log, workdir = (shlex.quote(str(path)) for path in (launch.log, launch.workdir or Path.cwd()))
    variables = {"PYTHONUNBUFFERED": "1", **launch.environ}
    command = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *launch.command])
    return f"exec >>{log} 2>&1; cd {workdir} && exec {command}"
