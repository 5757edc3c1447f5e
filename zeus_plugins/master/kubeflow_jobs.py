"""Runs as TrainJobs of a Kubernetes cluster, by Kubeflow's SDK (https://github.com/kubeflow/sdk)."""

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

_AWAY = (RuntimeError, TimeoutError)
_OVER = frozenset({"Complete", "Failed"})
# The part of a runtime that trains, and its container, as Kubeflow's own runtimes name both.
_NODE = "node"

T = TypeVar("T")


class KubeflowExecutor:
    """An `Executor` that has each run trained by a TrainJob of Kubeflow Trainer v2, on one node.

    The log directory must be on a volume that the pods mount at the same path: `volumes`, or the runtime's own. A job
    goes on when its master is killed; a resumed master finds it by its name, which is kept in
    ``{job id}.train.running``. TrainJobs stay when they are over.

    Args:
        image: Container image with the script and `zeus_plugins`.
        runtime: Name of the TrainingRuntime or ClusterTrainingRuntime.
        namespace: Namespace of the jobs; by default that of the pod or of the kubeconfig's context.
        context: Context of the kubeconfig, where it is not the current one.
        volumes: Paths at which pods mount PersistentVolumeClaims, by the names of these.
        resources: Resources of a pod, such as ``{"gpu": 1, "memory": "16Gi"}``.

    Raises:
        ZeusBSOConfigError: Kubeflow's SDK is not installed, or there is no cluster.
    """

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

    def run(self, launch: Launch, show: Show) -> int:
        """See `Executor.run`."""
        offset = launch.log.stat().st_size if launch.log.exists() else 0
        name = f"zeus-{uuid.uuid4().hex[:16]}"
        # Before there is the job: a master that is killed in between finds none, and launches the run again.
        launch.marker.write_text(name)
        _status_file(launch).unlink(missing_ok=True)
        try:
            self._client.train(
                runtime=self._runtime,
                trainer=self._sdk.CustomTrainerContainer(
                    image=self._image,
                    num_nodes=1,
                    resources_per_node=self._resources or None,
                    env={"PYTHONUNBUFFERED": "1", **launch.environ},
                ),
                options=[
                    self._options.Name(name=name),
                    self._options.TrainerCommand(command=["/bin/sh", "-c", _script(launch)]),
                    *self._mounted(),
                ],
            )
        except (*_AWAY, TypeError, ValueError) as error:
            # It may have been taken, and the answer lost.
            self._delete(name)
            launch.marker.unlink()
            reason = error.__cause__ or error
            raise ZeusBSOConfigError(f"there is no TrainJob of these executor.parameters: {error} ({reason})") from None
        return self._waited(name, launch, show, offset)

    def adopt(self, launch: Launch, show: Show) -> bool:
        """See `Executor.adopt`."""
        if not launch.marker.exists():
            return False
        name = launch.marker.read_text()
        jobs = {job.name: job for job in _asked(self._client.list_jobs)}
        if name not in jobs or jobs[name].status in _OVER:
            return False
        self._waited(name, launch, show, 0)
        return True

    def _mounted(self) -> list[Any]:
        """The option of the SDK that mounts the volumes."""
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

    def _waited(self, name: str, launch: Launch, show: Show, offset: int) -> int:
        try:
            with shown_live(launch.log, show, offset=offset):
                while (state := _asked(lambda: self._client.get_job(name)).status) not in _OVER:
                    time.sleep(POLL_S)
        except BaseException:
            # A pod that is deleted gets SIGTERM first.
            self._delete(name)
            raise
        launch.marker.unlink(missing_ok=True)
        status = _status_file(launch)
        if status.exists():
            said = int(status.read_text())
            status.unlink()
            return said
        # Deleted, out of memory, or never begun: why, Kubernetes knows.
        return note_loss(
            launch.log, f"TrainJob {name}, {state}: it left no exit status; see kubectl describe trainjob {name}"
        )

    def _delete(self, name: str) -> None:
        with contextlib.suppress(*_AWAY):
            self._client.delete_job(name)


def _asked(question: Callable[[], T]) -> T:
    return answered(question, "the Kubernetes cluster", _AWAY)


def _status_file(launch: Launch) -> Path:
    """The file in which a run leaves its exit status, which a TrainJob does not tell."""
    return launch.log.with_suffix(".status")


def _script(launch: Launch) -> str:
    """The work of the pod: the command, whose output goes where the master reads it, and its exit status."""
    workdir, log, status = (
        shlex.quote(str(path)) for path in (launch.workdir or Path.cwd(), launch.log, _status_file(launch))
    )
    # The shell passes SIGTERM on: it is the pod's first process, which Kubernetes signals.
    return (
        f"cd {workdir} || exit\n"
        f"{shlex.join(launch.command)} >>{log} 2>&1 &\n"
        "trap 'kill -TERM $!' TERM\n"
        "wait $!; status=$?\n"
        "while kill -0 $! 2>/dev/null; do wait $!; status=$?; done\n"
        f"echo $status >{status}.part && mv {status}.part {status}\n"
        "exit $status\n"
    )
