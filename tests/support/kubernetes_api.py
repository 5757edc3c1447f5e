"""A Kubernetes cluster with Kubeflow Trainer as its SDK needs it: TrainJobs run as processes here.

Each request must be a TrainJob that Kubeflow's own models read without loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubeflow_trainer_api import models

from tests.support.answering import responding

NAMESPACE = "trainings"
CREATED = "2026-01-01T00:00:00Z"
RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"}},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                            "spec": {
                                "template": {"spec": {"containers": [{"name": "node", "image": "pytorch/pytorch"}]}}
                            },
                        },
                    }
                ]
            }
        },
    },
}
TRAIN_JOBS = re.compile(rf"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs(?:/([^/?]+))?$")


class Cluster:
    """Created jobs by name and their processes, and the number of requests during an outage.

    The cluster can perform requests of one method and lose the answers.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.is_away = False
        self.refused = 0
        self.loses_answers_to: str | None = None

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        job["metadata"] |= {"namespace": NAMESPACE, "creationTimestamp": CREATED}
        self.jobs[name] = job
        self.processes[name] = subprocess.Popen(trainer["command"], start_new_session=True)
        return job

    def read(self, name: str) -> dict[str, Any] | None:
        if name not in self.jobs:
            return None
        status = self.processes[name].poll()
        if status is not None:
            condition = {"type": "Complete" if status == 0 else "Failed", "status": "True", "reason": "Over"}
            self.jobs[name]["status"] = {"conditions": [{**condition, "message": "", "lastTransitionTime": CREATED}]}
        return self.jobs[name]

    def delete(self, name: str) -> dict[str, Any] | None:
        job = self.jobs.pop(name, None)
        if job is not None:
            self.processes[name].terminate()
        return job

    def answer(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a request, or None for an unknown object."""
        if path.endswith("/clustertrainingruntimes/torch-distributed"):
            return RUNTIME
        if path == f"/api/v1/namespaces/{NAMESPACE}/pods":
            return {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []}
        found = TRAIN_JOBS.match(path)
        if found is None:
            return None
        match method, found[1]:
            case "POST", None:
                return self.create(body)
            case "GET", None:
                return {"items": [self.read(name) for name in self.jobs], "kind": "TrainJobList", "metadata": {}}
            case "DELETE", name:
                return self.delete(name)
            case _, name:
                return self.read(name)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """Yield a cluster, and the kubeconfig through which clients find the cluster."""
    served = Cluster()

    def answer(method: str, path: str, content: bytes) -> tuple[int, bytes]:
        found = None if served.is_away else served.answer(method, path.partition("?")[0], json.loads(content or "{}"))
        status = 404 if found is None else 200
        if served.loses_answers_to == method:
            status = 504
        if served.is_away:
            status = 503
            served.refused += 1
        return status, json.dumps(found or {"kind": "Status", "status": "Failure", "code": status}).encode()

    with responding(answer) as port:
        file = folder / "kubeconfig"
        here = {"cluster": "here", "user": "me", "namespace": NAMESPACE}
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "me", "user": {}}],
                    "contexts": [{"name": "here", "context": here}],
                    "current-context": "here",
                }
            )
        )
        try:
            yield served, file
        finally:
            for process in served.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
