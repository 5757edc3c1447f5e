"""Executors that run commands as jobs of a cluster: Slurm (submitit), Ray (Jobs API) and Kubernetes (Kubeflow's SDK).

https://github.com/facebookincubator/submitit, https://docs.ray.io/en/latest/cluster/running-applications,
https://github.com/kubeflow/sdk
"""

from __future__ import annotations

import contextlib
import pickle
import shlex
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.executors import Launch, Show, shown_live

LOST = 1
"""Exit status of a run that was stopped or whose node failed."""

POLL_S = 1.0

# Longer than an upgrade of a cluster's control plane takes.
_PATIENCE_S = 300.0

T = TypeVar("T")


class ClusterExecutor(ABC):
    """An `Executor` that submits each run as a job. The nodes must share the file system of the log directory.

    Jobs survive a killed master. A resumed master finds a job by the marker file ``{job id}.train.running``.
    """

    # Name of the cluster in errors, and the exceptions that mean that it does not answer.
    _CLUSTER: ClassVar[str]
    _AWAY: ClassVar[tuple[type[Exception], ...]]

    def run(self, launch: Launch, show: Show) -> int:
        """See `Executor.run`."""
        offset = launch.log.stat().st_size if launch.log.exists() else 0
        return self._wait(self._submit(launch), launch, show, offset)

    def adopt(self, launch: Launch, show: Show) -> bool:
        """See `Executor.adopt`."""
        job = self._find_unfinished(launch) if launch.marker.exists() else None
        if job is None:
            return False
        self._wait(job, launch, show, 0)
        return True

    def _wait(self, job: Any, launch: Launch, show: Show, offset: int) -> int:
        try:
            with shown_live(launch.log, show, offset=offset):
                end = self._await_exit(job, launch)
        except BaseException:
            self._cancel(job)
            raise
        launch.marker.unlink(missing_ok=True)
        if isinstance(end, int):
            return end
        with launch.log.open("a") as file:
            file.write(f"\n{end}\n")
        return LOST

    def _ask(self, question: Callable[[], T]) -> T:
        """Call `question` until the cluster answers.

        Raises:
            ZeusBSOConfigError: The cluster has not answered for five minutes.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return question()
            except self._AWAY as error:
                if time.monotonic() > deadline:
                    raise ZeusBSOConfigError(
                        f"{self._CLUSTER} has not answered for {_PATIENCE_S:g} s: {error}"
                    ) from None
                time.sleep(POLL_S)

    @abstractmethod
    def _submit(self, launch: Launch) -> Any:
        """Submit a run, write the marker, and return the job."""

    @abstractmethod
    def _find_unfinished(self, launch: Launch) -> Any | None:
        """Return the marker's job, or None if it has ended or is unknown."""

    @abstractmethod
    def _await_exit(self, job: Any, launch: Launch) -> int | str:
        """Wait for a job; return its exit status or, if the run was lost, a line for its log."""

    @abstractmethod
    def _cancel(self, job: Any) -> None:
        """Cancel a job; do not raise if the cluster does not answer."""


class SubmititExecutor(ClusterExecutor):
    """A `ClusterExecutor` for Slurm. The marker file contains submitit's pickled job.

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

    def _submit(self, launch: Launch) -> Any:
        try:
            executor = self._submitit.AutoExecutor(folder=launch.log.parent / "submitit", cluster=self._cluster)
            executor.update_parameters(name=launch.log.name.removesuffix(".train.log"), **self._parameters)
        except (NameError, RuntimeError, ValueError, TypeError) as error:
            raise ZeusBSOConfigError(f"submitit cannot make Slurm jobs of these parameters: {error}") from None
        job = executor.submit(subprocess.call, ["/bin/sh", "-c", _exec_script(launch)], stdin=subprocess.DEVNULL)
        launch.marker.write_bytes(pickle.dumps(job))
        return job

    def _find_unfinished(self, launch: Launch) -> Any | None:
        job = pickle.loads(launch.marker.read_bytes())  # nosec B301  # noqa: S301 - the master's own file
        return None if job.done(force_check=True) else job

    def _await_exit(self, job: Any, launch: Launch) -> int | str:  # noqa: ARG002 - the signature is the interface's
        try:
            return int(job.result())
        except self._submitit.core.utils.FailedJobError as error:
            # The job was cancelled or exceeded its time or memory, or its node failed.
            return f"Slurm job {job.job_id}, {job.state}: {str(error).splitlines()[-1]}"

    def _cancel(self, job: Any) -> None:
        job.cancel(check=False)


class RayExecutor(ClusterExecutor):
    """A `ClusterExecutor` for Ray. The marker file contains the job's submission id.

    Args:
        address: URL of the cluster's dashboard, such as ``http://ray-head:8265``. None: the value of ``RAY_ADDRESS``,
            or a cluster on this machine.
        parameters: Further arguments of ``JobSubmissionClient.submit_job``, such as ``entrypoint_num_gpus``, or
            ``runtime_env``, Ray's runtime environment for all runs.

    Raises:
        ZeusBSOConfigError: Ray is not installed, or no cluster answers at this address.
    """

    _CLUSTER = "the Ray cluster"
    _AWAY = (OSError, RuntimeError)  # from requests, and from a dashboard that answers with an error

    def __init__(self, *, address: str | None = None, **parameters: Any) -> None:
        try:
            from ray.job_submission import JobSubmissionClient
        except ModuleNotFoundError:
            raise ZeusBSOConfigError("jobs of a Ray cluster need Ray: pip install 'zeus-plugins[ray]'") from None
        try:
            self._client = JobSubmissionClient(address)
        except (*self._AWAY, ValueError) as error:
            where = "RAY_ADDRESS" if address is None else address
            raise ZeusBSOConfigError(
                f"no Ray cluster takes jobs at {where}: give executor.parameters the address of its dashboard, such as "
                f"http://HOST:8265 ({error})"
            ) from None
        self._parameters = parameters

    def _submit(self, launch: Launch) -> Any:
        submission_id = f"zeus-{uuid.uuid4().hex}"
        # Write the marker first: if the master is killed before it submits, its successor finds no job and submits one.
        launch.marker.write_text(submission_id)
        try:
            # Ray starts jobs in a shell.
            self._client.submit_job(entrypoint=_exec_script(launch), submission_id=submission_id, **self._parameters)
        except (*self._AWAY, TypeError, ValueError) as error:
            # The cluster may have accepted the job although the answer is lost.
            self._cancel(submission_id)
            launch.marker.unlink()
            raise ZeusBSOConfigError(f"Ray takes no job with these executor.parameters: {error}") from None
        return submission_id

    def _find_unfinished(self, launch: Launch) -> Any | None:
        submission_id = launch.marker.read_text()
        if not any(one.submission_id == submission_id for one in self._ask(self._client.list_jobs)):
            return None
        ended = self._ask(lambda: self._client.get_job_status(submission_id)).is_terminal()
        return None if ended else submission_id

    def _await_exit(self, job: Any, launch: Launch) -> int | str:  # noqa: ARG002 - the signature is the interface's
        while not (info := self._ask(lambda: self._client.get_job_info(job))).status.is_terminal():
            time.sleep(POLL_S)
        if info.driver_exit_code is None:
            # The job was stopped, its node failed, or Ray could not make its runtime environment.
            return f"Ray job {job}, {info.status}: {info.message}"
        return int(info.driver_exit_code)

    def _cancel(self, job: Any) -> None:
        with contextlib.suppress(*self._AWAY):
            self._client.stop_job(job)


_OVER = frozenset({"Complete", "Failed"})
# Name of the training part of a runtime, and of its container, in Kubeflow's own runtimes.
_NODE = "node"


class KubeflowExecutor(ClusterExecutor):
    """A `ClusterExecutor` whose runs are TrainJobs of Kubeflow Trainer v2, on one node each.

    The pods must mount the volume of the log directory at the same path, by `volumes` or by the runtime. The marker
    file contains the TrainJob's name. The executor does not delete ended TrainJobs.

    Args:
        image: Container image with the script and `zeus_plugins`.
        runtime: Name of the TrainingRuntime or ClusterTrainingRuntime.
        namespace: Namespace of the jobs. None: the pod's namespace, or the namespace of the kubeconfig's context.
        context: Context of the kubeconfig. None: the current one.
        volumes: Maps names of PersistentVolumeClaims to the paths at which pods mount them.
        resources: Resources of a pod, such as ``{"gpu": 1, "memory": "16Gi"}``.

    Raises:
        ZeusBSOConfigError: Kubeflow's SDK is not installed, or there is no cluster.
    """

    _CLUSTER = "the Kubernetes cluster"
    _AWAY = (RuntimeError, TimeoutError)

    def __init__(
        self,
        *,
        image: str,
        runtime: str = "torch-distributed",
        namespace: str | None = None,
        context: str | None = None,
        volumes: Mapping[str, str] | None = None,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            from kubeflow import trainer
            from kubeflow.trainer import options
            from kubernetes.config import ConfigException
        except ModuleNotFoundError:
            raise ZeusBSOConfigError("TrainJobs need Kubeflow's SDK: pip install 'zeus-plugins[kubeflow]'") from None
        self._sdk, self._options = trainer, options
        try:
            self._client = trainer.TrainerClient(trainer.KubernetesBackendConfig(namespace=namespace, context=context))
        except ConfigException as error:
            raise ZeusBSOConfigError(
                f"there is no Kubernetes cluster: set KUBECONFIG, or run the master in a pod ({error})"
            ) from None
        self._image = image
        self._runtime = runtime
        self._resources = dict(resources or {})
        self._volumes = dict(volumes or {})

    def _submit(self, launch: Launch) -> Any:
        name = f"zeus-{uuid.uuid4().hex[:16]}"
        # Write the marker first: if the master is killed before it submits, its successor finds no job and submits one.
        launch.marker.write_text(name)
        _status_file(launch).unlink(missing_ok=True)
        try:
            self._client.train(
                runtime=self._runtime,
                trainer=self._sdk.CustomTrainerContainer(
                    image=self._image,
                    num_nodes=1,
                    resources_per_node=self._resources or None,
                ),
                options=[
                    self._options.Name(name=name),
                    self._options.TrainerCommand(command=["/bin/sh", "-c", _pod_script(launch)]),
                    *self._mounted(),
                ],
            )
        except (*self._AWAY, TypeError, ValueError) as error:
            # The cluster may have accepted the job although the answer is lost.
            self._cancel(name)
            launch.marker.unlink()
            reason = error.__cause__ or error
            raise ZeusBSOConfigError(f"there is no TrainJob of these executor.parameters: {error} ({reason})") from None
        return name

    def _find_unfinished(self, launch: Launch) -> Any | None:
        name = launch.marker.read_text()
        jobs = {job.name: job for job in self._ask(self._client.list_jobs)}
        return None if name not in jobs or jobs[name].status in _OVER else name

    def _await_exit(self, job: Any, launch: Launch) -> int | str:
        while (state := self._ask(lambda: self._client.get_job(job)).status) not in _OVER:
            time.sleep(POLL_S)
        status = _status_file(launch)
        if status.exists():
            said = int(status.read_text())
            status.unlink()
            return said
        # The job was deleted, ran out of memory or never began.
        return f"TrainJob {job}, {state}: it left no exit status; see kubectl describe trainjob {job}"

    def _cancel(self, job: Any) -> None:
        # Kubernetes sends SIGTERM to a deleted pod first.
        with contextlib.suppress(*self._AWAY):
            self._client.delete_job(job)

    def _mounted(self) -> list[Any]:
        """Return the SDK's options that mount the volumes."""
        if not self._volumes:
            return []
        from kubeflow.trainer.options import kubernetes as patches

        named = [(f"zeus-{number}", claim, path) for number, (claim, path) in enumerate(self._volumes.items())]
        pod = patches.PodSpecPatch(
            volumes=[{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _ in named],
            containers=[
                patches.ContainerPatch(
                    name=_NODE, volume_mounts=[{"name": name, "mountPath": path} for name, _, path in named]
                )
            ],
        )
        job = patches.JobTemplatePatch(spec=patches.JobSpecPatch(template=patches.PodTemplatePatch(spec=pod)))
        jobs = patches.JobSetSpecPatch(replicated_jobs=[patches.ReplicatedJobPatch(name=_NODE, template=job)])
        template = patches.JobSetTemplatePatch(spec=jobs)
        return [patches.RuntimePatch(training_runtime_spec=patches.TrainingRuntimeSpecPatch(template=template))]


def _status_file(launch: Launch) -> Path:
    """Return the file to which the pod writes the exit status, because a TrainJob does not record it."""
    return launch.log.with_suffix(".status")


def _pod_script(launch: Launch) -> str:
    """Return the pod's shell script: run the command with its output in the log, then write its exit status."""
    status = shlex.quote(str(_status_file(launch)))
    # Kubernetes signals the pod's first process, the shell, which forwards SIGTERM to the command.
    return (
        f"{_begin(launch)} || exit\n"
        f"{_command(launch)} &\n"
        "trap 'kill -TERM $!' TERM\n"
        "wait $!; status=$?\n"
        "while kill -0 $! 2>/dev/null; do wait $!; status=$?; done\n"
        f"echo $status >{status}.part && mv {status}.part {status}\n"
        "exit $status\n"
    )


def _exec_script(launch: Launch) -> str:
    """Return a shell script whose process becomes the command (`exec`)."""
    return f"{_begin(launch)} && exec {_command(launch)}"


def _begin(launch: Launch) -> str:
    """Return the start of a script: append all output to the log, and change to the working directory."""
    log, workdir = (shlex.quote(str(path)) for path in (launch.log, launch.workdir or Path.cwd()))
    return f"exec >>{log} 2>&1; cd {workdir}"


def _command(launch: Launch) -> str:
    """Return the command with its environment variables, quoted for a shell."""
    variables = {"PYTHONUNBUFFERED": "1", **launch.environ}
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *launch.command])
