"""Runs as TrainJobs, created by Kubeflow's SDK on an API server of the tests, which executes the runs here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.masters import (
    WAITS,
    assert_adopts_what_a_killed_master_left,
    assert_runs_are_jobs,
    launch_of,
    wait_for,
)
from zeus_plugins.errors import ZeusBSOConfigError
from zeus_plugins.master.executors import Launch

pytest.importorskip("kubeflow.trainer", reason="the extra kubeflow is not installed")

from tests.support.kubernetes_api import NAMESPACE, Cluster, cluster
from zeus_plugins.master.clusters import KubeflowExecutor

# Importing the Kubernetes clients takes long.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:kubeflow.*")]


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with cluster(tmp_path) as (served, kubeconfig):
        # The Kubernetes client reads KUBECONFIG only at its import.
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        yield served


def executor(**parameters: object) -> KubeflowExecutor:
    return KubeflowExecutor(**{"image": "registry.example/training:1", **parameters})


def test_runs_become_train_jobs(kubernetes: Cluster, tmp_path: Path) -> None:
    of_cluster = executor(resources={"gpu": 1}, volumes={"runs": "/runs", "data": "/data"})
    folder = assert_runs_are_jobs(of_cluster, tmp_path)
    assert list(folder.glob("*.status")) == []

    first = next(iter(kubernetes.jobs.values()))
    assert first["metadata"]["namespace"] == NAMESPACE
    assert first["spec"]["runtimeRef"] == {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    trainer = first["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"]) == ("registry.example/training:1", 1)
    assert trainer["resourcesPerNode"]["requests"] == {"nvidia.com/gpu": 1}
    (patch,) = first["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]] == ["runs", "data"]
    assert [each["mountPath"] for each in pod["containers"][0]["volumeMounts"]] == ["/runs", "/data"]


def test_job_left_by_a_killed_master_is_awaited(kubernetes: Cluster, tmp_path: Path) -> None:
    def be_away_for_a_moment() -> None:
        kubernetes.is_away = True
        wait_for(lambda: kubernetes.refused)
        kubernetes.is_away = False

    assert_adopts_what_a_killed_master_left(executor, tmp_path, be_away_for_a_moment)
    launch = launch_of(tmp_path, WAITS)
    launch.marker.write_text("zeus-never-created")
    assert not executor().adopt(launch, [].append)


def test_interrupted_master_deletes_the_job_and_terminates_the_script(kubernetes: Cluster, tmp_path: Path) -> None:
    told = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint('waits')\n"
    launch = launch_of(tmp_path, told + "while True: time.sleep(0.05)")
    of_cluster = executor()
    asked = of_cluster._client.get_job

    def get_job(name: str) -> object:
        if launch.log.exists() and launch.log.read_text():
            raise KeyboardInterrupt
        return asked(name)

    vars(of_cluster._client)["get_job"] = get_job
    with pytest.raises(KeyboardInterrupt):
        of_cluster.run(launch, [].append)
    assert kubernetes.jobs == {}
    status = launch.log.with_suffix(".status")
    wait_for(status.exists)
    assert status.read_text() == "7\n"


def test_run_without_an_exit_status_is_lost(kubernetes: Cluster, tmp_path: Path) -> None:
    launch, ended = launch_of(tmp_path, WAITS), list[int]()
    waiting = threading.Thread(target=lambda: ended.append(executor().run(launch, [].append)))
    waiting.start()
    wait_for(launch.log.exists)
    (process,) = kubernetes.processes.values()
    process.kill()
    (tmp_path / "go").touch()
    waiting.join()
    assert ended == [1]
    assert "Failed: it left no exit status; see kubectl describe trainjob zeus-" in launch.log.read_text()


def test_job_created_with_a_lost_answer_is_deleted(kubernetes: Cluster, tmp_path: Path) -> None:
    kubernetes.loses_answers_to = "POST"
    launch = launch_of(tmp_path, WAITS)
    with pytest.raises(ZeusBSOConfigError, match="there is no TrainJob"):
        executor().run(launch, [].append)
    assert len(kubernetes.processes) == 1
    assert kubernetes.jobs == {}


@pytest.mark.usefixtures("kubernetes")
def test_unusable_parameters_are_reported(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "0")
    with pytest.raises(ZeusBSOConfigError, match=r"no TrainJob of these executor\.parameters.*nonesuch"):
        executor(runtime="nonesuch").run(launch, [].append)
    assert not launch.marker.exists()
    with pytest.raises(ZeusBSOConfigError, match="there is no Kubernetes cluster"):
        executor(context="nonesuch")
    broken = Launch(["nonesuch"], None, {}, tmp_path / "rec01+try02.train.log")
    assert executor().run(broken, [].append) == 127
    assert "nonesuch" in broken.log.read_text()
